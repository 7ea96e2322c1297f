// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"cmp"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// TestMain lets more garbage lie: histories are short and leave much.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

// TestHistories plays histories of clusters that are made by chance: machines die and return with other GPUs, pods of
// every kind come and go, other controllers rewrite what the operator has written, objects are deleted and restored
// from backups, policies are edited and deleted. These invariants hold:
//
//	progress  every node whose machine runs reaches its desired state, whatever becomes of the others
//	restore   without policies everything is as it was before the operator, or the GPUNode reports what is not
//	bounded   no fight with another controller goes on without end, and nothing grows until the API server refuses it
//	truth     Ready is true only if everything is as desired, and each reason to wait has a live cause
//	harmless  no pod loses what it uses, no bystander is evicted, no unselected GPU is changed, and the budget holds
//
// A failure prints the shortest history that still fails, and the command that plays it again. These variables change
// what is played:
//
//	HISTORIES=100000     so many histories (make test: 800, which are the same in each run)
//	HISTORIES_FOR=120s   as many as fit in that time, and at least 5,000
//	HISTORIES_FROM=7     the seed of the first. Without it one half begins at seed 1, the other at history.Late
//	HISTORIES_BREAKS=50  so many failures before the test ends, each in one line
//	HISTORIES_DIGEST=1   print a digest of all that was decided: code that only moved leaves it as it was
//	HISTORY=<history>    only this one, with everything that happens
func TestHistories(t *testing.T) {
	if text := os.Getenv("HISTORY"); text != "" {
		replay(t, text)
		return
	}
	s := history.NewStudy(t, "HISTORIES", 300, 5000) // few of a test during development
	d := newDigests()
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed, more := s.Next(); more; seed, more = s.Next() {
				s.Note(seed, d.breaks(historyOf(seed)))
			}
		})
	}
	workers.Wait()
	broken := s.Report(t)
	d.report(t)
	for _, seed := range slices.Sorted(maps.Keys(broken)) {
		if s.Short {
			t.Errorf("%d %s", seed, broken[seed])
			continue
		}
		h := history.Shrink(historyOf(seed), broken[seed], breaks)
		broken, transcript := play(h, true)
		t.Errorf("seed %d breaks %s\n%s\n\nPlay it again: HISTORY='%s' go test ./internal/engine/rollout -run TestHistories -v", seed, broken, strings.Join(transcript, "\n"), h)
	}
}

// onDriver is the first seed of histories in which NVIDIA's DRA driver serves most of the nodes.
const onDriver = uint64(1) << 40

// TestHistoriesOfTheDRADriver plays histories in which NVIDIA's DRA driver serves two of three nodes: it enumerates
// once, its slices outlive it by 30 s, a scheduler allocates what they show, and a pod that was allocated a device
// which is gone waits for ever. The invariants are those of TestHistories. Half of the seeds begin at history.Late.
// HISTORIES_OF_DRA=1000 plays so many, and HISTORIES_BREAKS=1 prints each failure in one line.
func TestHistoriesOfTheDRADriver(t *testing.T) {
	many, err := strconv.ParseUint(cmp.Or(os.Getenv("HISTORIES_OF_DRA"), "150"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	var next atomic.Uint64
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed := next.Add(1); seed <= many; seed = next.Add(1) {
				n := 1 + seed/2
				if seed%2 == 0 {
					n = history.Late + seed/2
				}
				h := historyOf(onDriver + n)
				broken := breaks(h)
				switch {
				case broken == "":
				case os.Getenv("HISTORIES_BREAKS") != "":
					t.Errorf("%d %s", h.Seed, broken)
				default:
					h = history.Shrink(h, broken, breaks)
					broken, transcript := play(h, true)
					t.Errorf("%s\n%s\n\nPlay it again: HISTORY='%s' go test ./internal/engine/rollout -run TestHistories$ -v", broken, strings.Join(transcript, "\n"), h)
				}
			}
		})
	}
	workers.Wait()
}

// breaks is what a history breaks.
func breaks(h history.History) string {
	broken, _ := play(h, false)
	return broken
}

// replay plays one history and prints what happens. One that is given by its seed alone is made as short as it can be.
func replay(t *testing.T, text string) {
	t.Helper()
	h, err := history.Parse(text, kinds())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text, ":") {
		h = historyOf(h.Seed)
	}
	if !strings.Contains(text, ":") {
		h = history.Shrink(h, breaks(h), breaks)
	}
	broken, transcript := play(h, true)
	t.Logf("%s\n%s", h, strings.Join(transcript, "\n"))
	if broken != "" {
		t.Error(broken)
	}
}

// TestHistoriesAreDeterministic: a history takes place in the same way each time, or no failure could be looked into.
func TestHistoriesAreDeterministic(t *testing.T) {
	for seed := uint64(1); seed <= 40; seed++ {
		h, err := history.Parse(historyOf(seed).String(), kinds())
		if err != nil {
			t.Fatal(err)
		}
		first, again := told(historyOf(seed)), told(h)
		if first != again {
			t.Errorf("seed %d:\n%s\nand then:\n%s", seed, first, again)
		}
	}
}

func told(h history.History) string {
	broken, transcript := play(h, true)
	return broken + strings.Join(transcript, "\n")
}
