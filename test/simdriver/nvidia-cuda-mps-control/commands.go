// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strconv"
	"strings"
	"time"
)

// answer carries out a command and reports whether it ends the daemon.
func (d *daemon) answer(line string) (answer string, quit bool) {
	words := strings.Fields(line)
	if len(words) == 0 {
		return "", false
	}
	if err := meet(d.driver, words[0]); err != nil {
		return err.Error(), false
	}
	d.mu.Lock()
	answer, quit = d.model.Tell(line)
	d.wake()
	d.mu.Unlock()
	if quit {
		d.quit(words[1:])
	}
	return answer, quit
}

// quit waits for the clients to leave: for ever, or with -t for so many seconds, after which they end with the server.
func (d *daemon) quit(args []string) {
	var timeout <-chan time.Time
	if len(args) == 2 && args[0] == "-t" {
		seconds, _ := strconv.Atoi(args[1])
		timeout = time.After(time.Duration(seconds) * time.Second)
	}
	for d.clients() > 0 {
		select {
		case <-timeout:
			return
		case <-time.After(pollTime):
		}
	}
}

func (d *daemon) clients() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.model.Clients()
}
