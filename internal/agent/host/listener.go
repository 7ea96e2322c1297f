// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrNoSocket says that something else is where a socket was expected.
var ErrNoSocket = errors.New("no socket")

// Listener describes the process that listens at a Unix socket, as the kernel has noted it when it began to. known is
// false if nobody listens, or if that process has ended, whoever has its socket now. The path is not followed if it is a
// link, and nothing is sent. Errors: ErrNoSocket.
func (p *Proc) Listener(socket string) (listener Process, known bool, err error) {
	node, err := unix.Open(socket, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Process{}, false, nil //nolint:nilerr // nobody listens where nothing is
	}
	defer unix.Close(node) //nolint:errcheck // only looked at
	var stat unix.Stat_t
	if err := unix.Fstat(node, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return Process{}, false, fmt.Errorf("%w: %s", ErrNoSocket, socket)
	}
	at := &unix.SockaddrUnix{Name: filepath.Join(p.root.Name(), "self/fd", strconv.Itoa(node))} // what was looked at, and short enough
	for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET} {
		if pid, ok := peer(at, kind); ok {
			_, runs := p.User(pid)
			return p.Describe(pid), runs, nil
		}
	}
	return Process{}, false, nil
}

// peer is the PID of who listens at a socket of a kind.
func peer(at *unix.SockaddrUnix, kind int) (pid int, ok bool) {
	fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was sent
	if err := unix.Connect(fd, at); err != nil {
		return 0, false
	}
	who, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, false
	}
	return int(who.Pid), true
}
