// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// mischiefVariable names what the program does that a user of one namespace may do, and that is meant to harm others:
//
//	stay    it does not end when it is told to
//	fill    it fills the pipe directory of its MPS daemon; stay too
//	listen  it answers in the place of that daemon; stay too
const mischiefVariable = "MISCHIEF"

// isMischief begins what the variable names, and reports whether the program is to go on until it is killed.
func isMischief(pipe string) bool {
	what := os.Getenv(mischiefVariable)
	if what == "" {
		return false
	}
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM)
	switch what {
	case "fill":
		go fill(pipe)
	case "listen":
		go listen(filepath.Join(pipe, "control"))
	}
	return true
}

const mebibyte = 1 << 20

// fill writes 256 MiB into a folder, in five seconds: files that stay, files that are removed and still open, and a
// folder in a folder in a folder.
func fill(folder string) {
	page := make([]byte, mebibyte)
	deep := filepath.Join(folder, "deep")
	for i := range 256 {
		path := filepath.Join(folder, fmt.Sprint("full-", i))
		if i%8 == 0 {
			deep = filepath.Join(deep, "er")
			_ = os.MkdirAll(deep, 0o755) // it is emptied meanwhile
			path = filepath.Join(deep, "full")
		}
		if f, err := os.Create(path); err == nil {
			_, _ = f.Write(page) // likewise
			if i%4 == 0 {
				_ = os.Remove(path)
			} else {
				_ = f.Close()
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	fmt.Println(`"filled"`)
}

// listen takes the place of a socket and answers each line with what an MPS daemon cannot.
func listen(socket string) {
	_ = os.Remove(socket) // or it was not there
	l, err := net.Listen("unix", socket)
	if err != nil {
		fail(err)
		return
	}
	fmt.Println(`"listens"`)
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close() //nolint:errcheck // it lies anyway
			for lines := bufio.NewScanner(c); lines.Scan(); {
				_, _ = fmt.Fprintf(c, "1000000.0\n\x00")
			}
		}()
	}
}
