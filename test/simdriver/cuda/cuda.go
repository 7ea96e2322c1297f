// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cuda is what a CUDA program asks the simulated kernel module for: a context and memory on a GPU.
package cuda

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"strings"
)

// Socket is, in the folder of the simulated hardware, where the kernel module answers programs. It finds out itself who asks.
const Socket = "memory"

// Context is a program's context on a GPU. It ends with the program.
type Context struct {
	conn  net.Conn
	lines *bufio.Reader
}

// Open makes a context on the GPU with a minor number.
func Open(hardware string, minor int) (*Context, error) {
	conn, err := net.Dial("unix", hardware+"/"+Socket)
	if err != nil {
		return nil, fmt.Errorf("CUDA_ERROR_NO_DEVICE: %w", err)
	}
	c := &Context{conn, bufio.NewReader(conn)}
	if _, err := c.ask("context %d", minor); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return c, nil
}

// Allocate takes memory, as cuMemAlloc does, or as cuMemAllocManaged.
func (c *Context) Allocate(bytes uint64, managed bool) error {
	_, err := c.ask("allocate %d %t", bytes, managed)
	return err
}

// Total is the GPU's memory as the program sees it (cuMemGetInfo), in bytes.
func (c *Context) Total() (bytes uint64, err error) {
	answer, err := c.ask("total")
	if err == nil {
		_, err = fmt.Sscan(answer, &bytes)
	}
	return bytes, err
}

// ask returns what follows OK, or what else is answered as an error.
func (c *Context) ask(format string, args ...any) (string, error) {
	if _, err := fmt.Fprintf(c.conn, format+"\n", args...); err != nil {
		return "", err
	}
	line, err := c.lines.ReadString('\n')
	if err != nil {
		return "", err
	}
	answer, ok := strings.CutPrefix(strings.TrimSpace(line), "OK")
	if !ok {
		return "", errors.New(answer)
	}
	return answer, nil
}

// Close ends the context, and with it all that was allocated.
func (c *Context) Close() error { return c.conn.Close() }
