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

// narration tells a story that a person follows: numbered chapters, with the seconds since it began. What only matters
// if the demo fails goes to a log.
type narration struct {
	mu       sync.Mutex
	out, log io.Writer
	began    time.Time
	colours  bool
	chapters int
	lines    int // that were told
}

func newNarration(out *os.File) *narration {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &narration{out: out, log: io.Discard, began: time.Now(), colours: terminal && os.Getenv("NO_COLOR") == ""}
}

// say tells that something happened.
func (s *narration) say(format string, args ...any) {
	s.print(fmt.Sprintf("   %5.1f s  %s", s.seconds(), fmt.Sprintf(format, args...)))
}

// chapter begins a part of the story.
func (s *narration) chapter(title string) {
	s.chapters++
	s.print("\n" + s.paint(fmt.Sprintf("%d. %s", s.chapters, title), "1"))
}

// show prints text as it is, below the chapter.
func (s *narration) show(text string) {
	s.print("   " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n   "))
}

// note writes to the log what happens on a node.
func (s *narration) note(who, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = fmt.Fprintf(s.log, "%6.1fs  %-15s  %s\n", s.seconds(), who, fmt.Sprintf(format, args...))
}

func (s *narration) seconds() float64 { return time.Since(s.began).Seconds() }

func (s *narration) print(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var trimmed []string
	for line := range strings.Lines(text + "\n") {
		trimmed = append(trimmed, strings.TrimRight(line, " \n"))
	}
	s.lines += len(trimmed)
	_, _ = fmt.Fprintln(s.out, strings.Join(trimmed, "\n"))
}

func (s *narration) paint(text, colour string) string {
	if !s.colours {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}
