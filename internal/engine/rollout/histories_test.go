// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"

	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// TestMain lets more garbage lie: histories are short and leave much.
func TestMain(m *testing.M) {
	debug.SetGCPercent(1000)
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
	d := newDigests()
	stage := history.Stage{Test: "./internal/engine/rollout -run TestHistories$", Kinds: kinds(), Of: historyOf, Play: d.play}
	if !stage.Replay(t) {
		playAll(t, stage, history.NewStudy(t, "HISTORIES", 300, 5000)) // few of a test during development
		d.report(t)
	}
}

// onDriver is the first seed of histories in which NVIDIA's DRA driver serves most of the nodes.
const onDriver = uint64(1) << 40

// TestHistoriesOfTheDRADriver plays histories in which NVIDIA's DRA driver serves two of three nodes: it enumerates
// once, its slices outlive it by 30 s, a scheduler allocates what they show, and a pod that was allocated a device
// which is gone waits for ever. The invariants are those of TestHistories, and so are the variables, which begin with HISTORIES_OF_DRA.
func TestHistoriesOfTheDRADriver(t *testing.T) {
	study := history.NewStudy(t, "HISTORIES_OF_DRA", 150, 150)
	study.Base = onDriver
	playAll(t, history.Stage{Test: "./internal/engine/rollout -run TestHistories$", Of: historyOf, Play: play}, study)
}

// playAll plays the histories of a study on all cores.
func playAll(t *testing.T, stage history.Stage, study *history.Study) {
	t.Helper()
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() { stage.PlayAll(t, study) })
	}
	workers.Wait()
	study.Report(t)
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
