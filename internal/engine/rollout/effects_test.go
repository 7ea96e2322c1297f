// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// effectsFile holds, a seed a line, a digest of what the controller wrote in each of the recorded histories.
const effectsFile = "testdata/effects"

// recorded are the seeds in effectsFile: their kinds of events are frozen, on either stack.
const recorded, recordedOnDriver = 5200, 150

// effects are what a controller has written in a history and to what: labels, taints, configurations, the spec of
// GPUNodes, evictions, deletions, ClusterPolicy, DeviceClasses. What it only says, to whom it says it, when it would
// look again, and in which order it writes within one reconcile is not among them. So code that was moved, renamed or
// merged has the same effects.
type effects struct {
	lines  []string
	now    []string          // of this reconcile
	before map[string]string // what this one found; nil: it does nothing
	policy string            // what the last one wrote into the ClusterPolicy
}

// begin notes how things are before a reconcile writes.
func (e *effects) begin(c *run, d rollout.Decision) {
	if e == nil {
		return
	}
	if e.before = nil; len(d.Actions) > 0 {
		e.before = c.written()
	}
}

// did notes what leaves no trace in an object.
func (e *effects) did(format string, args ...any) {
	if e != nil {
		e.now = append(e.now, fmt.Sprintf(format, args...))
	}
}

// end notes what a reconcile has written.
func (e *effects) end(c *run) {
	if e == nil {
		return
	}
	policy := fmt.Sprint(c.Plugin.MIGReady)
	if c.Plugin.Operands != nil {
		policy += canonical(c.Plugin.Operands.Ours)
	}
	if policy != e.policy {
		e.policy = policy
		e.did("ClusterPolicy = %s", policy)
	}
	if e.before != nil {
		e.compare(c.written())
	}
	slices.Sort(e.now)
	for _, line := range e.now {
		e.lines = append(e.lines, fmt.Sprintf("%d %s", c.Now.Unix(), line))
	}
	e.now = nil
}

// compare notes what is not as this reconcile found it.
func (e *effects) compare(now map[string]string) {
	for what, value := range now {
		if was, known := e.before[what]; !known || was != value {
			e.did("%s = %s", what, value)
		}
	}
	for what := range e.before {
		if _, is := now[what]; !is {
			e.did("%s is deleted", what)
		}
	}
}

// written are the values that the controller writes, by object and field.
func (c *run) written() map[string]string {
	w := map[string]string{}
	for name, h := range c.hosts {
		for label, value := range h.Labels {
			w["Node "+name+" label "+label] = value
		}
		for _, t := range h.Taints {
			w["Node "+name+" taint "+t.Key+":"+string(t.Effect)] = t.Value
		}
		w["GPUNode "+name+" spec"] = canonical(h.GPU.Spec)
		if !h.features.ours.IsZero() {
			w["NodeFeature "+name] = "ours"
		}
		if !h.DevicesTaintedAt.IsZero() {
			w["DeviceTaintRule "+name] = strconv.FormatInt(h.DevicesTaintedAt.Unix(), 10)
		}
	}
	for key, data := range c.Configs {
		w["ConfigMap "+key] = strconv.Quote(data)
	}
	for _, class := range c.DRA.Classes {
		w["DeviceClass "+class.Name] = canonical(class)
	}
	return w
}

func canonical(value any) string {
	data, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return string(data)
}

// effectsOf plays the history of a seed.
func effectsOf(seed uint64) []string {
	e := &effects{}
	broken, _ := playing(historyOf(seed), false, watching{effects: e})
	if broken != "" {
		e.lines = append(e.lines, "breaks "+history.Invariant(broken))
	}
	return e.lines
}

// recordedSeeds are those of effectsFile, in its order.
func recordedSeeds() []uint64 {
	var seeds []uint64
	for n := uint64(1); n <= recorded; n++ {
		seeds = append(seeds, n)
	}
	for n := uint64(1); n <= recordedOnDriver; n++ {
		seeds = append(seeds, onDriver+n)
	}
	return seeds
}

// digestsOfEffects are the digests of the effects, by seed, computed on all cores.
func digestsOfEffects(seeds []uint64) map[uint64]string {
	queue, digests := make(chan uint64), map[uint64]string{}
	var mu sync.Mutex
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed := range queue {
				sum := sha256.Sum256([]byte(strings.Join(effectsOf(seed), "\n")))
				mu.Lock()
				digests[seed] = fmt.Sprintf("%x", sum[:8])
				mu.Unlock()
			}
		})
	}
	for _, seed := range seeds {
		queue <- seed
	}
	close(queue)
	workers.Wait()
	return digests
}

// TestEffects compares what the controller writes in the recorded histories with what it wrote when they were recorded,
// and names the seeds that differ. A change of behaviour changes the record, in a commit of its own that says why.
//
//	EFFECTS=compare  all of them (make effects)
//	EFFECTS=record   writes the record anew (make effects EFFECTS=record)
//	EFFECTS=7        prints the effects of one seed, so that those before and after a change can be laid side by side
func TestEffects(t *testing.T) {
	switch asked := os.Getenv("EFFECTS"); asked {
	case "":
		t.Skip("run by make effects")
	case "record":
		digests := digestsOfEffects(recordedSeeds())
		var file bytes.Buffer
		for _, seed := range recordedSeeds() {
			fmt.Fprintf(&file, "%d %s\n", seed, digests[seed])
		}
		if err := os.WriteFile(effectsFile, file.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	case "compare":
		compareEffects(t)
	default:
		seed, err := strconv.ParseUint(asked, 10, 64)
		if err != nil {
			t.Fatalf("EFFECTS is compare, record or a seed, not %q", asked)
		}
		t.Log("\n" + strings.Join(effectsOf(seed), "\n"))
	}
}

func compareEffects(t *testing.T) {
	t.Helper()
	file, err := os.Open(effectsFile)
	if err != nil {
		t.Fatalf("%v: make effects EFFECTS=record writes it", err)
	}
	defer file.Close() //nolint:errcheck // it is only read
	want := map[uint64]string{}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var seed uint64
		var digest string
		if _, err := fmt.Sscan(lines.Text(), &seed, &digest); err != nil {
			t.Fatalf("%s: %q: %v", effectsFile, lines.Text(), err)
		}
		want[seed] = digest
	}
	seeds := recordedSeeds()
	if len(want) != len(seeds) {
		t.Fatalf("%s has %d seeds, not %d", effectsFile, len(want), len(seeds))
	}
	is := digestsOfEffects(seeds)
	changed := slices.DeleteFunc(slices.Clone(seeds), func(seed uint64) bool { return is[seed] == want[seed] })
	t.Logf("the effects of %d of %d seeds are as recorded", len(seeds)-len(changed), len(seeds))
	if len(changed) > 0 {
		t.Errorf("the effects of these seeds changed: %v\nSee those of one: EFFECTS=%d go test ./internal/engine/rollout -run '^TestEffects$' -v",
			changed, changed[0])
	}
}

// TestEffectsAreWhatIsWritten: what the controller writes is among them, what it says is not, and they are the same
// each time.
func TestEffectsAreWhatIsWritten(t *testing.T) {
	kinds := map[string]bool{}
	for seed := uint64(1); seed <= 16; seed++ {
		for _, n := range []uint64{seed, onDriver + seed} {
			first := effectsOf(n)
			if !slices.Equal(first, effectsOf(n)) {
				t.Fatalf("seed %d has other effects the second time", n)
			}
			for _, line := range first {
				fields := strings.Fields(line)
				kind := fields[1]
				if kind == "Node" {
					kind += " " + fields[3]
				}
				kinds[kind] = true
			}
		}
	}
	for _, kind := range []string{
		"ClusterPolicy", "ConfigMap", "DeviceClass", "GPUNode", "Node label", "Node taint", "NodeFeature", "delete", "evict",
	} {
		if !kinds[kind] {
			t.Errorf("no history has an effect on %s: %v", kind, slices.Sorted(maps.Keys(kinds)))
		}
	}
	for kind := range kinds {
		if strings.Contains(kind, "status") {
			t.Errorf("%s is only said", kind)
		}
	}
}
