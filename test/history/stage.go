// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// Stage is where histories are played, by a test of this name. Variables of the environment change what is played; see Study for others:
//
//	<Prefix>HISTORY=<history>  only this one, with everything that happens; of a seed alone the shortest one that still fails
type Stage struct {
	Prefix string
	Test   string   // arguments of go test
	Kinds  []string // of events
	Of     func(seed uint64) History
	// Play returns the invariant that does not hold and how, empty if all hold, and what has happened, at least if it is asked for.
	Play func(h History, tells bool) (broken string, told []string)
	// Whole is whether a history that fails is left as it is. It may be too slow to be played again and again.
	Whole bool
}

// Replay plays the history that the environment asks for; false: it asks for none.
func (s Stage) Replay(t *testing.T) bool {
	t.Helper()
	text := os.Getenv(s.Prefix + "HISTORY")
	if text == "" {
		return false
	}
	h, err := Parse(text, s.Kinds)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, ":") {
		h = s.shortest(s.Of(h.Seed))
	}
	broken, told := s.Play(h, true)
	t.Logf("%s\n%s", h, strings.Join(told, "\n"))
	if broken != "" {
		t.Error(broken)
	}
	return true
}

func (s Stage) shortest(h History) History {
	if s.Whole {
		return h
	}
	breaks := func(h History) string {
		broken, _ := s.Play(h, false)
		return broken
	}
	return Shrink(h, breaks(h), breaks)
}

// PlayAll plays the histories of a study until there are no more. A failure prints the shortest history that still fails, and the command that
// plays it again.
func (s Stage) PlayAll(t *testing.T, of *Study) {
	t.Helper()
	for seed, more := of.Next(); more; seed, more = of.Next() {
		h := s.Of(seed)
		broken, told := s.Play(h, false)
		of.Note(seed, broken)
		switch {
		case broken == "":
			continue
		case of.short:
			t.Errorf("%d %s", seed, broken)
			continue
		case !s.Whole:
			h = s.shortest(h)
			broken, told = s.Play(h, true)
		}
		again := fmt.Sprintf("%sHISTORY='%s' go test %s -v", s.Prefix, h, s.Test)
		t.Errorf("seed %d breaks %s\n%s\n\nPlay it again: %s", seed, broken, strings.Join(told, "\n"), again)
	}
}
