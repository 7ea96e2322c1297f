// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// mebibytesPerGibibyte is the factor between the units of a memory limit.
const mebibytesPerGibibyte = 1024

// Tell carries out one command. Once the daemon was told to quit, nobody asks it any more. quit reports whether the daemon is to end: a caller that lets the daemon wait for its
// clients does that before it calls Close.
func (d *Daemon) Tell(line string) (answer string, quit bool) {
	words := strings.Fields(line)
	if len(words) == 0 {
		return "", false
	}
	d.Commands = append(d.Commands, strings.Join(words, " "))
	name, args := words[0], words[1:]
	if name == "quit" {
		d.Quitting = true
		return "", true
	}
	command, known := commands[name]
	if !known || len(args) < command.least || len(args) > command.most {
		return fmt.Sprintf("Unknown command %q", name), false
	}
	return command.do(d, args), false
}

type command struct {
	least, most int // arguments
	do          func(d *Daemon, args []string) string
}

var commands = map[string]command{
	"get_default_active_thread_percentage": {0, 0, func(d *Daemon, _ []string) string { return d.Defaults.percentage() }},
	"set_default_active_thread_percentage": {1, 1, func(d *Daemon, a []string) string { return d.Defaults.setPercentage(a[0]) }},
	"get_default_device_pinned_mem_limit":  {1, 1, func(d *Daemon, a []string) string { return d.Defaults.memory(a[0]) }},
	"set_default_device_pinned_mem_limit":  {2, 2, func(d *Daemon, a []string) string { return d.Defaults.setMemory(a[0], a[1]) }},
	"get_active_thread_percentage":         {1, 1, ofServer(func(_ *Daemon, s *Server, _ []string) string { return s.Limits.percentage() })},
	"set_active_thread_percentage":         {2, 2, ofServer(func(_ *Daemon, s *Server, a []string) string { return s.Limits.setPercentage(a[0]) })},
	"get_device_pinned_mem_limit":          {2, 2, ofServer(func(_ *Daemon, s *Server, a []string) string { return s.Limits.memory(a[0]) })},
	"set_device_pinned_mem_limit": {3, 3, ofServer(func(_ *Daemon, s *Server, a []string) string {
		return s.Limits.setMemory(a[0], a[1])
	})},
	"get_server_list":   {0, 0, (*Daemon).serverList},
	"get_server_status": {1, 1, ofServer((*Daemon).serverStatus)},
	"get_client_list":   {1, 1, ofServer((*Daemon).clientList)},
	"shutdown_server":   {1, 2, ofServer((*Daemon).shutdown)},
	"ps":                {0, 0, (*Daemon).processes},
}

// ofServer is a command whose first argument is the PID of a server.
func ofServer(do func(*Daemon, *Server, []string) string) func(*Daemon, []string) string {
	return func(d *Daemon, args []string) string {
		i := slices.IndexFunc(d.Servers, func(s *Server) bool { return strconv.Itoa(s.PID) == args[0] })
		if i < 0 {
			return fmt.Sprintf("Server %s not found", args[0])
		}
		return do(d, d.Servers[i], args[1:])
	}
}

func (l *Limits) percentage() string { return fmt.Sprintf("%.1f", l.Percentage) }

func (l *Limits) setPercentage(value string) string {
	p, err := strconv.ParseFloat(value, 64)
	if err == nil && p > 0 && p <= 100 {
		l.Percentage = p
	}
	return l.percentage()
}

// memory shows gibibytes without their fraction, and nothing where there is no limit.
func (l *Limits) memory(device string) string {
	index, err := strconv.Atoi(device)
	limit, limited := l.Memory[index]
	switch {
	case err != nil || !limited:
		return ""
	case limit >= mebibytesPerGibibyte:
		return fmt.Sprintf("%dG", limit/mebibytesPerGibibyte)
	}
	return fmt.Sprintf("%dM", limit)
}

// setMemory takes the index of a GPU, whether or not there is one, and a size such as 512M or 4G. It says nothing, and
// what is no size is no limit.
func (l *Limits) setMemory(device, size string) string {
	index, err := strconv.Atoi(device)
	if err != nil {
		return ""
	}
	delete(l.Memory, index)
	if limit, ok := mebibytes(size); ok {
		l.Memory[index] = limit
	}
	return ""
}

func mebibytes(size string) (int64, bool) {
	factor := int64(1)
	digits, giga := strings.CutSuffix(strings.ToUpper(size), "G")
	if giga {
		factor = mebibytesPerGibibyte
	}
	n, err := strconv.ParseInt(strings.TrimSuffix(digits, "M"), 10, 64)
	return n * factor, err == nil && n > 0
}

func (d *Daemon) serverList([]string) string {
	var b strings.Builder
	for _, s := range d.Servers {
		fmt.Fprintln(&b, s.PID)
	}
	return b.String()
}

func (d *Daemon) serverStatus(s *Server, _ []string) string {
	if s.fault() {
		return "FAULT"
	}
	return "ACTIVE"
}

func (d *Daemon) clientList(s *Server, _ []string) string {
	var b strings.Builder
	for _, c := range s.Clients {
		fmt.Fprintln(&b, c.PID)
	}
	return b.String()
}

// shutdown ends a server once it has no clients, whom it goes on serving, or with -f at once.
func (d *Daemon) shutdown(s *Server, args []string) string {
	force := len(args) == 1 && args[0] == "-f"
	s.Ending = true
	if force || len(s.Clients) == 0 {
		d.end(s)
		_ = d.serve() // as in Disconnect
	}
	return ""
}

// processes is ps: the clients that are served. Those that wait are not among them.
func (d *Daemon) processes([]string) string {
	if len(d.Servers) == 0 {
		return "Server not found"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%-8s %-10s %s\n", "PID", "ID", "SERVER")
	id := 0
	for _, s := range d.Servers {
		for _, c := range s.Clients {
			id++
			fmt.Fprintf(&b, "%-8d %-10d %d\n", c.PID, id, s.PID)
		}
	}
	return b.String()
}
