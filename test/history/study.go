// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"
)

// Study hands out the seeds of many histories and collects what they break. Variables of the environment, whose names
// begin with Prefix, change how many:
//
//	<Prefix>              so many histories
//	<Prefix>_FOR=120s     as many as fit in that time, and at least AtLeast
//	<Prefix>_FROM=7       the seed of the first. Without it one half begins at seed 1, the other at Late
//	<Prefix>_BREAKS=50    so many failures before the test ends, each in one line
type Study struct {
	// Base is added to each seed.
	Base uint64
	// First is the seed of the first history; 0: they are of both halves.
	First uint64

	short       bool // failures are reported in a line
	began       time.Time
	count       uint64        // so many histories
	lasts       time.Duration // and as many as fit in this time
	most        int           // failures
	mu          sync.Mutex
	begun, done uint64
	broken      map[uint64]string
}

// NewStudy begins a study of usual histories, or of what the environment asks for.
func NewStudy(t *testing.T, prefix string, usual, atLeast uint64) *Study {
	t.Helper()
	s := &Study{
		began: time.Now(), First: number(t, prefix+"_FROM", 0), count: number(t, prefix, usual), most: int(number(t, prefix+"_BREAKS", 3)),
		short: os.Getenv(prefix+"_BREAKS") != "", broken: map[uint64]string{},
	}
	if text := os.Getenv(prefix + "_FOR"); text != "" && os.Getenv(prefix) == "" {
		d, err := time.ParseDuration(text)
		if err != nil {
			t.Fatal(err)
		}
		s.lasts, s.count = d, atLeast
	}
	return s
}

// Next is the seed of the next history; more is false if there is none.
func (s *Study) Next() (seed uint64, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.broken) >= s.most || s.begun >= s.count && time.Since(s.began) >= s.lasts {
		return 0, false
	}
	s.begun++
	return s.Base + s.seed(s.begun-1), true
}

// seed is the seed of the history number n, from 0.
func (s *Study) seed(n uint64) uint64 {
	switch {
	case s.First > 0:
		return s.First + n
	case n%2 == 0:
		return 1 + n/2
	}
	return Late + n/2
}

// Note notes what a history breaks, empty for nothing.
func (s *Study) Note(seed uint64, broken string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done++
	if broken != "" {
		s.broken[seed] = broken
	}
}

// Report logs what was played.
func (s *Study) Report(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	from := fmt.Sprint(s.First)
	if s.First == 0 {
		from = fmt.Sprintf("1, every other one from %d,", Late)
	}
	t.Logf("%d histories from seed %s in %s", s.done, from, time.Since(s.began).Round(time.Second))
}

// number is what a variable of the environment contains.
func number(t *testing.T, name string, usual uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return usual
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
