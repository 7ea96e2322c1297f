// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"bytes"
	"reflect"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// sleeping is a controller between two decisions. It wakes as the real one does: when something that it reads has
// changed, or when the time is there that its decision named. In the seconds between it would decide the same again.
type sleeping struct {
	last    rollout.Decision
	nodes   cluster.Snapshot // of which the last decision was made
	rest    []byte           // of that snapshot, since others may write into it
	decided bool
}

// decide returns a new decision on the snapshot, or the last one if nobody would have woken the controller.
func (s *sleeping) decide(snapshot cluster.Snapshot, decide func(cluster.Snapshot) rollout.Decision) rollout.Decision {
	rest := others(snapshot)
	passed := snapshot.Now.Sub(s.nodes.Now)
	if s.decided && passed >= 0 && snapshot.Repeats == nil && snapshot.OtherControllers == nil && len(s.last.Actions) == 0 &&
		(s.last.After == 0 || passed < s.last.After) && bytes.Equal(rest, s.rest) &&
		reflect.DeepEqual(snapshot.Policies, s.nodes.Policies) && reflect.DeepEqual(snapshot.Nodes, s.nodes.Nodes) {
		d := s.last
		if d.After > 0 {
			d.After -= passed
		}
		return d
	}
	s.last, s.decided = decide(snapshot), true
	for i := range snapshot.Nodes {
		snapshot.Nodes[i].Version = 0 // of remembering
	}
	s.nodes, s.rest = snapshot, rest
	return s.last
}

// others is what a snapshot holds besides its nodes, policies and time.
func others(s cluster.Snapshot) []byte {
	s.Nodes, s.Policies, s.Now = nil, nil, time.Time{}
	return values(nil, reflect.ValueOf(s))
}

// TestTheSimulatedControllerWakes: when anything that it reads has changed, when its time has come, and not else.
func TestTheSimulatedControllerWakes(t *testing.T) {
	g := NewWithT(t)
	decisions := 0
	counted := func(s cluster.Snapshot) rollout.Decision {
		decisions++
		return rollout.Decide(s)
	}
	c := fleet(1, timeSlicing(4))
	c.steps(60)
	var s sleeping
	for range 3 {
		g.Expect(s.decide(c.world(), counted).Nodes[0].State).To(Equal(node.UpToDate))
		c.tick(time.Second)
	}
	g.Expect(decisions).To(Equal(1))

	for _, change := range []func(){
		func() { c.hosts["n0"].Labels["team.example/label"] = "other" },
		func() { c.hosts["n0"].AgentReady = false },
		func() { c.Policies[0].Generation++ },
		func() { c.Configs["another"] = "version: v1\n" },
		func() { c.Plugin.Ready = false },
	} {
		s.last.Actions = nil
		decisions = 0
		change()
		s.decide(c.world(), counted)
		g.Expect(decisions).To(Equal(1))
	}

	s.last.Actions, s.last.After = nil, 10*time.Second
	decisions = 0
	c.Now = c.Now.Add(9 * time.Second)
	g.Expect(s.decide(c.world(), counted).After).To(Equal(time.Second))
	g.Expect(decisions).To(BeZero())
	c.Now = c.Now.Add(time.Second)
	s.decide(c.world(), counted)
	g.Expect(decisions).To(Equal(1))
}
