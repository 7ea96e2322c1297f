// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	. "github.com/onsi/gomega"
)

// TestMemoryIsReturnedOnceWorkIsOver: once after each time of work, and not while heartbeats are all that happens.
func TestMemoryIsReturnedOnceWorkIsOver(t *testing.T) {
	g := NewWithT(t)
	const live = 100
	allocated, released := uint64(0), 0
	r := &rest{read: func() (uint64, uint64) { return allocated, live }, release: func() { released++ }}
	period := func(more uint64) int {
		allocated += more
		r.look()
		return released
	}
	g.Expect(period(1000)).To(Equal(0), "the cache is filled")
	g.Expect(period(10)).To(Equal(1))
	g.Expect(period(10)).To(Equal(1))
	g.Expect(period(500)).To(Equal(1))
	g.Expect(period(30)).To(Equal(1))
	g.Expect(period(10)).To(Equal(2))
	g.Expect(period(0)).To(Equal(2))
}

func TestMemoryIsRead(t *testing.T) {
	g := NewWithT(t)
	before, _ := readMemory()
	kept := make([]byte, 1<<20)
	after, live := readMemory()
	g.Expect(after - before).To(BeNumerically(">=", len(kept)))
	g.Expect(live).To(BeNumerically("<", after))
}
