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

// story tells what happens, one line each, with the seconds since it began and who it is about.
type story struct {
	mu      sync.Mutex
	out     io.Writer
	began   time.Time
	colours bool
}

func newStory(out *os.File) *story {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &story{out: out, began: time.Now(), colours: terminal && os.Getenv("NO_COLOR") == ""}
}

// say tells that something happened.
func (s *story) say(who, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ")
	_, _ = fmt.Fprintf(s.out, "%6.1fs  %s  %s\n", time.Since(s.began).Seconds(), s.paint(fmt.Sprintf("%-15s", who), "36"), text)
}

// chapter begins a part of the story.
func (s *story) chapter(title string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = fmt.Fprintf(s.out, "\n%s\n", s.paint(title, "1"))
}

// show prints text as it is.
func (s *story) show(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = fmt.Fprintln(s.out, strings.TrimRight(text, "\n"))
}

func (s *story) paint(text, colour string) string {
	if !s.colours {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}
