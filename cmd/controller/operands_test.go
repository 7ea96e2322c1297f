// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/agentinstall"
)

func TestOperandFlags(t *testing.T) {
	tests := map[string]struct {
		args       []string
		env, image string
		err        string
	}{
		"the namespace and the image from the environment": {env: "operators", image: "registry/agent:1"},
		"the namespace from its flag":                      {args: []string{"--namespace=operators"}, env: "other", image: "registry/agent:1"},
		"no namespace":                                     {image: "registry/agent:1", err: "--namespace, or the environment variable POD_NAMESPACE, must name the namespace"},
		"no image":                                         {env: "operators", err: "the environment variable RELATED_IMAGE_AGENT must name the agent's image"},
		"an argument too many":                             {args: []string{"now"}, env: "operators", image: "registry/agent:1", err: `unknown argument "now"; see operands --help`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			t.Setenv("POD_NAMESPACE", tc.env)
			t.Setenv("RELATED_IMAGE_AGENT", tc.image)
			f, err := parseOperandFlags(tc.args)
			if tc.err != "" {
				g.Expect(err).To(MatchError(tc.err))
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(f.owner.String()).To(Equal("operators/gpu-sharing-operands"))
			g.Expect(f.agentImage).To(Equal("registry/agent:1"))
			g.Expect(f.manifests).To(Equal("/manifests"))
		})
	}
}

// TestASubscriptionSets: by the environment, which is all that OLM lets a user set.
func TestASubscriptionSets(t *testing.T) {
	for title, tc := range map[string]struct {
		address, interval, gates, err string
		want                          agentinstall.Agents
	}{
		"nothing is set":         {},
		"metrics":                {address: ":8443", want: agentinstall.Agents{Args: []string{"--metrics-bind-address=:8443"}, Port: 8443}},
		"metrics and samples":    {address: ":9", interval: "60s", want: agentinstall.Agents{Args: []string{"--metrics-bind-address=:9", "--sampling-interval=60s"}, Port: 9}},
		"samples alone":          {interval: "60s", err: "nobody could read the samples"},
		"memory limits":          {gates: "OnDemandMIG=true,MemoryLimits=true", want: agentinstall.Agents{Args: []string{"--feature-gates=MemoryLimits=true"}, Cgroups: true}},
		"a gate of the others":   {gates: "OnDemandMIG=true,MemoryLimits=false"},
		"a gate that is none":    {gates: "Memory=true", err: `FEATURE_GATES): no feature gate is called "Memory"; there is MemoryLimits, OnDemandMIG`},
		"no port":                {address: "8443", err: `METRICS_BIND_ADDRESS) "8443" must have a port`},
		"an interval of no unit": {address: ":1", interval: "60", err: "SAMPLING_INTERVAL): time: missing unit"},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			for name, value := range map[string]string{
				"POD_NAMESPACE": "operators", "RELATED_IMAGE_AGENT": "registry/agent:1", "METRICS_BIND_ADDRESS": tc.address, "SAMPLING_INTERVAL": tc.interval, "FEATURE_GATES": tc.gates,
			} {
				t.Setenv(name, value)
			}
			f, err := parseOperandFlags(nil)
			if tc.err != "" {
				g.Expect(err).To(MatchError(ContainSubstring(tc.err)))
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(f.agents).To(Equal(tc.want))
			controller, err := parseFlags(nil)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(controller.metricsAddress).To(Equal(cmp.Or(tc.address, "0")))
		})
	}
}

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
