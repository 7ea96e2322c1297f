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

// Listener is who listens at a Unix socket.
type Listener struct {
	// Process is the one that began to listen, as the kernel has noted it.
	Process Process
	// Known is false if nobody listens, or if that process has ended, though another has its socket now.
	Known bool
	// Socket is the node at the path, which is another one whenever a process makes one there. Zero: nothing is there.
	Socket FileID
}

// Listener looks who listens at a socket. The path is not followed if it is a link, and nothing is sent. Errors:
// ErrNoSocket.
func (p *Proc) Listener(socket string) (Listener, error) {
	node, err := unix.Open(socket, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Listener{}, nil // nobody listens where nothing is
	}
	defer unix.Close(node) //nolint:errcheck // only looked at
	var stat unix.Stat_t
	if err := unix.Fstat(node, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return Listener{}, fmt.Errorf("%w: %s", ErrNoSocket, socket)
	}
	found := Listener{Socket: FileID{Device: stat.Dev, Inode: stat.Ino}}
	at := &unix.SockaddrUnix{Name: filepath.Join(p.root.Name(), "self/fd", strconv.Itoa(node))} // what was looked at, and short enough
	for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_SEQPACKET} {
		if pid, ok := peer(at, kind); ok {
			_, found.Known = p.User(pid)
			found.Process = p.Describe(pid)
			break
		}
	}
	return found, nil
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
