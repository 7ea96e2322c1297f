// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// systemBus is where programs find the D-Bus of the machine, on which systemd takes orders.
const systemBus = "/run/dbus/system_bus_socket"

// ServeBus stands for the D-Bus of a machine with systemd. NVIDIA's mig-manager connects to it before each change, also
// where it stops no service of the machine, and reports nothing where it cannot. Here there is no systemd: every call
// is answered as the first one is, with the name that the caller gets on the bus. What is returned ends it.
func ServeBus() (stop func() error, err error) {
	if err := os.MkdirAll(filepath.Dir(systemBus), 0o755); err != nil {
		return nil, fmt.Errorf("making the folder of the D-Bus: %w", err)
	}
	if err := os.Remove(systemBus); err != nil && !errors.Is(err, fs.ErrNotExist) { // of the machine below
		return nil, fmt.Errorf("removing another D-Bus: %w", err)
	}
	listener, err := net.Listen("unix", systemBus)
	if err != nil {
		return nil, fmt.Errorf("listening as the D-Bus: %w", err)
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return // it was closed
			}
			go answer(connection)
		}
	}()
	return listener.Close, nil
}

// answer serves one connection until the caller closes it (D-Bus Specification, "Authentication Protocol" and "Message
// Protocol").
func answer(connection net.Conn) {
	defer connection.Close() //nolint:errcheck // the caller may have done it
	in := bufio.NewReader(connection)
	for {
		line, err := in.ReadString('\n')
		reply := "ERROR"
		switch command := strings.Trim(line, "\x00\r\n"); {
		case err != nil:
			return
		case command == "BEGIN":
			answerCalls(in, connection)
			return
		case command == "AUTH":
			reply = "REJECTED EXTERNAL"
		case strings.HasPrefix(command, "AUTH EXTERNAL"):
			reply = "OK 0123456789abcdef0123456789abcdef"
		}
		if _, err := io.WriteString(connection, reply+"\r\n"); err != nil {
			return
		}
	}
}

// answerCalls reads messages, little-endian as the caller writes them, and answers each with one string.
func answerCalls(in io.Reader, out io.Writer) {
	for {
		var header [16]byte
		if _, err := io.ReadFull(in, header[:]); err != nil {
			return
		}
		body, fields := binary.LittleEndian.Uint32(header[4:]), binary.LittleEndian.Uint32(header[12:])
		if _, err := io.CopyN(io.Discard, in, int64((fields+7)/8*8+body)); err != nil {
			return
		}
		reply := []byte{'l', 2, 0, 1, 9, 0, 0, 0, 1, 0, 0, 0, 15, 0, 0, 0} // a return with 9 bytes of body and 15 of fields
		reply = append(reply, 5, 1, 'u', 0)                                // to the call with this serial number
		reply = append(reply, header[8:12]...)
		reply = append(reply, 8, 1, 'g', 0, 1, 's', 0, 0, // the body is a string
			4, 0, 0, 0, ':', '1', '.', '1', 0)
		if _, err := out.Write(reply); err != nil {
			return
		}
	}
}
