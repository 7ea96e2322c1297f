// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// bringUp brings the loopback interface up.
func bringUp(socket int) error {
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("naming the loopback interface: %w", err)
	}
	request.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("bringing the loopback interface up: %w", err)
	}
	return nil
}

// addAddress gives the loopback interface one more address, under a label such as lo:1.
func addAddress(socket int, label, address string) error {
	parsed, err := netip.ParseAddr(address)
	if err != nil {
		return fmt.Errorf("giving the machine an address: %w", err)
	}
	if err := setInet4(socket, unix.SIOCSIFADDR, label, parsed.AsSlice()); err != nil {
		return fmt.Errorf("giving the machine the address %s: %w", address, err)
	}
	if err := setInet4(socket, unix.SIOCSIFNETMASK, label, []byte{255, 255, 255, 255}); err != nil {
		return fmt.Errorf("giving the machine the address %s: %w", address, err)
	}
	return nil
}

func setInet4(socket int, what uint, label string, value []byte) error {
	request, err := unix.NewIfreq(label)
	if err != nil {
		return err
	}
	if err := request.SetInet4Addr(value); err != nil {
		return err
	}
	return unix.IoctlIfreq(socket, what, request)
}
