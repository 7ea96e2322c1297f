// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package mpsclient is what CUDA does in a process whose environment names an MPS pipe directory, against the simulated
// nvidia-cuda-mps-control.
package mpsclient

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
)

// Hello begins the first line of a client.
const Hello = "client"

// Answer is what a client gets: limits, or an error.
type Answer struct {
	Server     int           `json:"server,omitempty"` // PID of the MPS server
	User       int           `json:"user"`             // of the client
	Percentage float64       `json:"percentage,omitempty"`
	MemoryMiB  map[int]int64 `json:"memoryMiB,omitempty"` // by index of the GPU; absent: no limit
	Error      string        `json:"error,omitempty"`
}

// Write writes the answer as a line.
func (a Answer) Write(to io.Writer) error {
	line, err := json.Marshal(a)
	if err != nil {
		return err
	}
	_, err = to.Write(append(line, '\n'))
	return err
}

// Client is a connection to an MPS control daemon.
type Client struct {
	conn net.Conn
}

// Connect connects to the daemon of a pipe directory, for the GPUs with these minor numbers; none are all. It does not
// wait to be served.
func Connect(pipe string, minors ...string) (*Client, error) {
	dir, err := os.Open(pipe)
	if err != nil {
		return nil, fmt.Errorf("CUDA_ERROR_MPS_CONNECTION_FAILED: %w", err)
	}
	defer dir.Close() //nolint:errcheck // only read
	return ConnectAt(dir, minors...)
}

// ConnectAt is Connect for a folder that is open, so that its path may be of any length and belong to any user.
func ConnectAt(dir *os.File, minors ...string) (*Client, error) {
	conn, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/control", dir.Fd()))
	if err != nil {
		return nil, fmt.Errorf("CUDA_ERROR_MPS_CONNECTION_FAILED: %w", err)
	}
	if _, err := fmt.Fprintln(conn, strings.Join(append([]string{Hello}, minors...), " ")); err != nil {
		return nil, fmt.Errorf("CUDA_ERROR_MPS_CONNECTION_FAILED: %w", err)
	}
	return &Client{conn: conn}, nil
}

// Wait waits until the client is served, as long as another user has the server.
func (c *Client) Wait() (Answer, error) {
	var a Answer
	if err := json.NewDecoder(c.conn).Decode(&a); err != nil {
		return Answer{}, fmt.Errorf("CUDA_ERROR_MPS_RPC_FAILURE: %w", err)
	}
	if a.Error != "" {
		return a, fmt.Errorf("CUDA error: %s", a.Error)
	}
	return a, nil
}

// Lost waits until the server ends, with which the client fails.
func (c *Client) Lost() { _, _ = c.conn.Read(make([]byte, 1)) }

// Close ends the client.
func (c *Client) Close() error { return c.conn.Close() }
