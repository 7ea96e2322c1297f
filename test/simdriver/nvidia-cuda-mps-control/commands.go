// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const usage = "Invalid command or arguments; see the manual of nvidia-cuda-mps-control"

// answer carries out a command and says whether it ends the daemon.
func (d *daemon) answer(command []string) (answer string, quit bool) {
	if len(command) == 0 {
		return "", false
	}
	if err := meet(d.driver, command[0]); err != nil {
		return err.Error(), false
	}
	args := command[1:]
	switch command[0] {
	case "get_default_active_thread_percentage":
		return d.getPercentage(), false
	case "set_default_active_thread_percentage":
		return d.setPercentage(args), false
	case "get_default_device_pinned_mem_limit":
		return d.getMemory(args), false
	case "set_default_device_pinned_mem_limit":
		return d.setMemory(args), false
	case "get_server_list":
		return d.list(func(s *simdriver.State) []int { return s.ServersOf(d.pipe) }), false
	case "get_client_list":
		return d.list(func(s *simdriver.State) []int { return s.ClientsOf(number(args)) }), false
	case "quit":
		return d.quit(args)
	}
	return usage, false
}

func number(args []string) int {
	if len(args) == 0 {
		return -1
	}
	n, err := strconv.Atoi(args[len(args)-1])
	if err != nil {
		return -1
	}
	return n
}

func (d *daemon) getPercentage() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return fmt.Sprintf("%.1f", d.percentage)
}

func (d *daemon) setPercentage(args []string) string {
	if len(args) != 1 {
		return usage
	}
	p, err := strconv.ParseFloat(args[0], 64)
	if err != nil || p <= 0 || p > 100 {
		return fmt.Sprintf("Invalid active thread percentage %s", args[0])
	}
	d.mu.Lock()
	d.percentage = p
	d.mu.Unlock()
	return d.getPercentage()
}

// getMemory shows gigabytes without their fraction, as driver 595 does.
func (d *daemon) getMemory(args []string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	limit, ok := d.memory[number(args)]
	switch {
	case !ok:
		return "0"
	case limit >= 1024:
		return fmt.Sprintf("%dG", limit/1024)
	}
	return fmt.Sprintf("%dM", limit)
}

// setMemory takes the index of a GPU and a size such as 512M or 4G.
func (d *daemon) setMemory(args []string) string {
	if len(args) != 2 {
		return usage
	}
	state, err := d.driver.Read()
	if err != nil {
		return err.Error()
	}
	index, err := strconv.Atoi(args[0])
	if err != nil || index < 0 || index >= len(state.Node.GPUs) {
		return fmt.Sprintf("Invalid device %s", args[0])
	}
	limit, ok := mebibytes(args[1])
	if !ok {
		return fmt.Sprintf("Invalid memory limit %s", args[1])
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.memory[index] = limit
	return ""
}

func mebibytes(size string) (int64, bool) {
	factor := int64(1)
	digits, giga := strings.CutSuffix(strings.ToUpper(size), "G")
	if giga {
		factor = 1024
	}
	digits = strings.TrimSuffix(digits, "M")
	n, err := strconv.ParseInt(digits, 10, 64)
	return n * factor, err == nil && n > 0
}

// list prints PIDs, a line each.
func (d *daemon) list(pids func(s *simdriver.State) []int) string {
	state, err := d.driver.Read()
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, pid := range pids(state) {
		fmt.Fprintln(&b, pid)
	}
	return b.String()
}

func (d *daemon) clients() int {
	state, err := d.driver.Read()
	if err != nil {
		return 0 // the node is gone
	}
	count := 0
	for _, server := range state.ServersOf(d.pipe) {
		count += len(state.ClientsOf(server))
	}
	return count
}

// quit waits for the clients to leave: for ever, or with -t for so many seconds, after which they end with the server.
func (d *daemon) quit(args []string) (answer string, quit bool) {
	var timeout <-chan time.Time
	if len(args) > 0 && args[0] == "-t" {
		timeout = time.After(time.Duration(max(number(args), 0)) * time.Second)
	}
	for d.clients() > 0 {
		select {
		case <-timeout:
			return d.endServers(), true
		case <-time.After(pollTime):
		}
	}
	return d.endServers(), true
}

func (d *daemon) endServers() string {
	if err := d.driver.EndMPS(d.pipe); err != nil {
		return err.Error()
	}
	return ""
}
