// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// narration tells what happens, one line each, with the seconds since it began and who it is about.
type narration struct {
	mu      sync.Mutex
	out     io.Writer
	began   time.Time
	colours bool
}

func newNarration(out *os.File) *narration {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &narration{out: out, began: time.Now(), colours: terminal && os.Getenv("NO_COLOR") == ""}
}

// say tells that something happened.
func (s *narration) say(who, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ")
	_, _ = fmt.Fprintf(s.out, "%6.1fs  %s  %s\n", time.Since(s.began).Seconds(), s.paint(fmt.Sprintf("%-15s", who), "36"), text)
}

// chapter begins a part of the narration.
func (s *narration) chapter(title string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = fmt.Fprintf(s.out, "\n%s\n", s.paint(title, "1"))
}

// show prints text as it is.
func (s *narration) show(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = fmt.Fprintln(s.out, strings.TrimRight(text, "\n"))
}

func (s *narration) paint(text, colour string) string {
	if !s.colours {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}
