// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestHistories plays histories of clusters that are made by chance: machines die and return with other GPUs, pods of every kind
// come and go, other controllers rewrite what the operator has written, objects are deleted and restored from backups, policies
// are edited and deleted. These invariants hold:
//
//	progress  every node whose machine runs reaches its desired state, whatever becomes of the others
//	restore   without policies everything is as it was before the operator, or the GPUNode reports what is not
//	bounded   no fight with another controller goes on without end
//	truth     Ready is true only if everything is as desired, and each reason to wait has a live cause
//	harmless  no pod loses what it uses, no bystander is evicted, no unselected GPU is changed, and the budget holds
//
// A failure prints the shortest history that still fails, and the command that plays it again. These variables change what is
// played:
//
//	HISTORIES=100000     so many histories (make test: 5,200, which are the same in each run)
//	HISTORIES_FOR=120s   as many as fit in that time, and at least 5,000
//	HISTORIES_FROM=7     the seed of the first
//	HISTORIES_BREAKS=50  so many failures before the test ends, each in one line
//	HISTORY=<history>    only this one, with everything that happens
func TestHistories(t *testing.T) {
	if text := os.Getenv("HISTORY"); text != "" {
		replay(t, text)
		return
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // histories are short and leave much garbage
	s := newStudy(t)
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed, more := s.next(); more; seed, more = s.next() {
				broken, _, met := play(historyOf(seed), false)
				s.note(seed, broken, met)
			}
		})
	}
	workers.Wait()
	s.report(t)
}

// study is what is found in many histories.
type study struct {
	began       time.Time
	first       uint64
	count       uint64        // so many histories
	atLeast     time.Duration // and as many as fit in this time
	most        int           // failures
	short       bool          // failures are reported in a line
	mu          sync.Mutex
	begun, done uint64
	broken      map[uint64]string
	met         map[string][]uint64 // by known defect: seeds
}

func newStudy(t *testing.T) *study {
	t.Helper()
	const (
		usual  = 300 // of a test during development
		fewest = 5000
	)
	s := &study{
		began: time.Now(), first: number(t, "HISTORIES_FROM", 1), count: number(t, "HISTORIES", usual), most: int(number(t, "HISTORIES_BREAKS", 3)),
		short: os.Getenv("HISTORIES_BREAKS") != "", broken: map[uint64]string{}, met: map[string][]uint64{},
	}
	if text := os.Getenv("HISTORIES_FOR"); text != "" && os.Getenv("HISTORIES") == "" {
		d, err := time.ParseDuration(text)
		if err != nil {
			t.Fatal(err)
		}
		s.atLeast, s.count = d, fewest
	}
	return s
}

// next is the seed of the next history; more is false if there is none.
func (s *study) next() (seed uint64, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.broken) >= s.most || s.begun >= s.count && time.Since(s.began) >= s.atLeast {
		return 0, false
	}
	s.begun++
	return s.first + s.begun - 1, true
}

func (s *study) note(seed uint64, broken string, met map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done++
	for defect := range met {
		s.met[defect] = append(s.met[defect], seed)
	}
	if broken != "" {
		s.broken[seed] = broken
	}
}

func (s *study) report(t *testing.T) {
	t.Helper()
	t.Logf("%d histories from seed %d in %s", s.done, s.first, time.Since(s.began).Round(time.Second))
	for _, defect := range slices.Sorted(maps.Keys(s.met)) {
		seeds := slices.Sorted(slices.Values(s.met[defect]))
		t.Logf("%d meet the known defect %s, the first are %v", len(seeds), defect, seeds[:min(5, len(seeds))])
	}
	for _, seed := range slices.Sorted(maps.Keys(s.broken)) {
		if s.short {
			t.Errorf("%d %s", seed, s.broken[seed])
			continue
		}
		h := shrink(historyOf(seed), s.broken[seed])
		broken, story, _ := play(h, true)
		t.Errorf("seed %d breaks %s\n%s\n\nPlay it again: HISTORY='%s' go test ./internal/rollout -run TestHistories -v", seed, broken, strings.Join(story, "\n"), h)
	}
}

// number is what a variable of the environment says.
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

// replay plays one history and prints what happens. One that is given by its seed alone is made as short as it can be.
func replay(t *testing.T, text string) {
	t.Helper()
	h, err := parseHistory(text)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, ":") {
		broken, _, _ := play(h, false)
		h = shrink(h, broken)
	}
	broken, story, _ := play(h, true)
	t.Logf("%s\n%s", h, strings.Join(story, "\n"))
	if broken != "" {
		t.Error(broken)
	}
}

// shrink leaves out events, and the passes after them, as long as the same invariant breaks.
func shrink(h history, broken string) history {
	if broken == "" {
		return h
	}
	breaks := func(o history) bool {
		is, _, _ := play(o, false)
		return invariantOf(is) == invariantOf(broken)
	}
	for i := len(h.events) - 1; i >= 0; i-- {
		if o := (history{seed: h.seed, events: slices.Delete(slices.Clone(h.events), i, i+1)}); breaks(o) {
			h = o
			i = len(h.events)
		}
	}
	for i := range h.events {
		o := history{seed: h.seed, events: slices.Clone(h.events)}
		if o.events[i].passes = 0; h.events[i].passes > 0 && breaks(o) {
			h = o
		}
	}
	return h
}

// invariantOf is the name of the invariant that is broken.
func invariantOf(broken string) string {
	name, _, _ := strings.Cut(broken, ":")
	return name
}

// TestHistoriesAreDeterministic: a history takes place in the same way each time, or no failure could be looked into.
func TestHistoriesAreDeterministic(t *testing.T) {
	for seed := uint64(1); seed <= 40; seed++ {
		h, err := parseHistory(historyOf(seed).String())
		if err != nil {
			t.Fatal(err)
		}
		first, again := told(historyOf(seed)), told(h)
		if first != again {
			t.Errorf("seed %d:\n%s\nand then:\n%s", seed, first, again)
		}
	}
}

func told(h history) string {
	broken, story, _ := play(h, true)
	return broken + strings.Join(story, "\n")
}
