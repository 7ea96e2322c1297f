// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package history makes random histories of clusters: what happens, to which policies, and what other controllers
// write. Two worlds play them: the cluster in miniature of internal/engine/rollout, where a history takes milliseconds,
// and the real controllers and agents on a real API server of test/cluster.
package history

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// History is a cluster, made by the seed, and what happens to it.
type History struct {
	Seed   uint64
	Events []Event
}

// Event is something that happens. It carries all chance that it needs, so that the others stay what they are when one
// is left out.
type Event struct {
	Kind string
	Dice uint64
	// Reconciles is how many reconciles follow before the next event.
	Reconciles int
}

// Random is the chance of an event.
func (e Event) Random() *rand.Rand { return rand.New(rand.NewPCG(e.Dice, 3)) }

// Of is the history of a seed, of 2 to 10 events of these kinds, which are sorted.
func Of(seed uint64, kinds []string) History {
	return History{Seed: seed, Events: events(rand.New(rand.NewPCG(seed, 1)), kinds)}
}

func events(random *rand.Rand, kinds []string) (of []Event) {
	for range 2 + random.IntN(9) {
		of = append(of, Event{Kind: kinds[random.IntN(len(kinds))], Dice: random.Uint64(), Reconciles: random.IntN(14)})
	}
	return of
}

// Late is the first seed whose history has events of late kinds too. Another kind among those of Of would change what
// every seed plays; a late kind leaves the seeds below Late as they are.
const Late = 10_000

// WithLate adds 2 to 10 events of these late kinds, which are sorted, each at some place between the others.
func (h History) WithLate(late []string) History {
	random := rand.New(rand.NewPCG(h.Seed, 4))
	h.Events = slices.Clone(h.Events)
	for _, e := range events(random, late) {
		h.Events = slices.Insert(h.Events, random.IntN(len(h.Events)+1), e)
	}
	return h
}

func (h History) String() string {
	var parts []string
	for _, e := range h.Events {
		parts = append(parts, fmt.Sprintf("%s/%x+%d", e.Kind, e.Dice, e.Reconciles))
	}
	return fmt.Sprintf("%d:%s", h.Seed, strings.Join(parts, ","))
}

// Parse reads what String writes, or a seed alone.
func Parse(text string, kinds []string) (h History, err error) {
	seed, events, whole := strings.Cut(text, ":")
	if _, err = fmt.Sscan(seed, &h.Seed); err != nil || !whole {
		return Of(h.Seed, kinds), err
	}
	for part := range strings.SplitSeq(events, ",") {
		if part == "" {
			continue
		}
		var e Event
		kind, rest, _ := strings.Cut(part, "/")
		if _, err = fmt.Sscanf(rest, "%x+%d", &e.Dice, &e.Reconciles); err != nil {
			return h, fmt.Errorf("event %q: %w", part, err)
		}
		if e.Kind = kind; !slices.Contains(kinds, kind) {
			return h, fmt.Errorf("no event is called %q", kind)
		}
		h.Events = append(h.Events, e)
	}
	return h, nil
}

// Shrink leaves out events, and the reconciles after them, as long as the same invariant breaks. Play returns what is
// broken.
func Shrink(h History, broken string, play func(History) string) History {
	if broken == "" {
		return h
	}
	breaks := func(o History) bool { return Invariant(play(o)) == Invariant(broken) }
	for i := len(h.Events) - 1; i >= 0; i-- {
		if o := (History{Seed: h.Seed, Events: slices.Delete(slices.Clone(h.Events), i, i+1)}); breaks(o) {
			h = o
			i = len(h.Events)
		}
	}
	for i := range h.Events {
		o := History{Seed: h.Seed, Events: slices.Clone(h.Events)}
		if o.Events[i].Reconciles = 0; h.Events[i].Reconciles > 0 && breaks(o) {
			h = o
		}
	}
	return h
}

// Invariant is the name of the invariant that is broken: what comes before the colon.
func Invariant(broken string) string {
	name, _, _ := strings.Cut(broken, ":")
	return name
}
