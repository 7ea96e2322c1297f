// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
)

// TestNVIDIAsOwnMPSDaemonSet follows a node that NVIDIA's daemon set serves: it starts with its configuration, is
// restarted for another one, and ends before the GPUs are shared otherwise.
func TestNVIDIAsOwnMPSDaemonSet(t *testing.T) {
	g := NewWithT(t)
	c := newCluster()
	c.Wiring.NVIDIAMPS = true
	h := c.add("a", sim.A100)
	wish := func(s v1alpha1.Sharing) {
		p := policyOf("research", s, evicting)
		p.Generation = int64(c.pods)
		c.Policies = []v1alpha1.GPUSharingPolicy{p}
	}

	wish(mps(4))
	d, states := c.run(100)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateUpToDate), d.Nodes[0].Message)
	g.Expect(states["a"]).NotTo(ContainElement(rollout.StateDraining))
	g.Expect(h.daemons).To(BeEmpty(), "ours does not run beside theirs")
	g.Expect(h.theirs.ActiveThreadPercentage).To(Equal(25))
	g.Expect(h.GPU.Spec.Devices[0].Sharing.MPS.Owner).To(Equal(v1alpha1.MPSDaemonOwnerNVIDIA))

	c.tick(time.Minute)
	c.hold(h, "client", 0, gpu.WholeGPU)
	wish(mps(10))
	d, _ = c.run(100)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateUpToDate), d.Nodes[0].Message)
	g.Expect(c.evicted).To(Equal([]string{"client"}), "clients die with the daemon")
	g.Expect(h.theirs.ActiveThreadPercentage).To(Equal(10))
	g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/gpu": 10}))

	for name, next := range map[string]v1alpha1.Sharing{"MIG": mig(count("1g", 7)), "time-slicing": timeSlicing(2)} {
		wish(mps(10))
		c.run(100)
		wish(next)
		d, _ = c.run(100)
		g.Expect(d.Nodes[0].State).To(Equal(rollout.StateUpToDate), "%s: %s", name, d.Nodes[0].Message)
		g.Expect(h.theirs).To(BeNil())
		g.Expect(h.Labels[pluginLabel]).To(Equal("true"))
	}
	wish(mps(4))
	c.run(100)
	c.Policies = nil
	d, _ = c.run(100)
	g.Expect(d.Nodes).To(BeEmpty())
	g.Expect(h.theirs).To(BeNil())
	g.Expect(h.devices()[0].State.ComputeMode).To(Equal(gpu.ComputeDefault))
	g.Expect(c.crashes).To(BeEmpty())
}

func TestLimitsThatNVIDIAsDaemonSetDoesNotKeepAreRefused(t *testing.T) {
	g := NewWithT(t)
	c := newCluster()
	c.Wiring.NVIDIAMPS = true
	c.add("a", sim.A100)
	sharing := mps(4)
	sharing.MPS.PinnedMemoryLimit = "2Gi"
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", sharing)}
	d, _ := c.run(3)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateImpossible))
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonMPSLimitsFixed))
	g.Expect(d.Nodes[0].Message).To(ContainSubstring("NVIDIA's MPS daemon set serves the node and gives each client 25% of the threads"))
}

// standAlone is a cluster without the GPU Operator: nothing follows a deploy label. A pod of NVIDIA's MPS daemon set stays
// on the node, and what its daemon does follows from the configuration that was selected when it started.
func standAlone() (*cluster, *host) {
	c := newCluster()
	c.Wiring.ClusterPolicy, c.Wiring.NVIDIAMPS = false, true
	h := c.add("a", sim.A100)
	h.Labels = map[string]string{"kubernetes.io/hostname": "a"}
	h.Pods = []rollout.Pod{{
		Namespace: "nvidia", Name: "plugin", UID: "plugin", Controller: "DaemonSet", MountsConfig: true, Scheduled: c.Now,
	}}
	c.advertise(h)
	return c, h
}

func TestNVIDIAsMPSDaemonSetBesideAStandAlonePlugin(t *testing.T) {
	g := NewWithT(t)
	c, h := standAlone()
	wish := func(s v1alpha1.Sharing) rollout.Decision {
		p := policyOf("research", s, evicting)
		p.Generation = int64(c.pods)
		c.Policies = []v1alpha1.GPUSharingPolicy{p}
		d, _ := c.run(100)
		g.Expect(d.Nodes[0].State).To(Equal(rollout.StateUpToDate), d.Nodes[0].Message)
		return d
	}
	wish(mps(4))
	g.Expect(h.theirs.ActiveThreadPercentage).To(Equal(25))
	c.tick(time.Minute)
	c.hold(h, "client", 0, gpu.WholeGPU)
	wish(mps(10))
	g.Expect(c.evicted).To(Equal([]string{"client"}), "clients die with the daemon")
	g.Expect(h.theirs.ActiveThreadPercentage).To(Equal(10))
	g.Expect(c.killed).To(BeEmpty())
	wish(timeSlicing(2))
	g.Expect(h.theirs).To(BeNil())
	g.Expect(h.Taints).To(BeEmpty())
}

func TestAnMPSDaemonThatDoesNotEndIsNotWaitedForForEver(t *testing.T) {
	g := NewWithT(t)
	c, h := standAlone()
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", mps(4))}
	c.run(100)
	c.stuck = true
	c.Policies = []v1alpha1.GPUSharingPolicy{policyOf("research", timeSlicing(2))}
	d, _ := c.run(1000)
	g.Expect(d.Nodes[0].State).To(Equal(rollout.StateFailed))
	g.Expect(d.Nodes[0].Reason).To(Equal(v1alpha1.ReasonNotAdvertised))
	g.Expect(d.Nodes[0].Message).To(And(ContainSubstring("NVIDIA's MPS daemon still serves the GPUs as before"),
		ContainSubstring("nvidia.com/mps.capable")))
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(advertised(h)).To(Equal(map[string]int64{"nvidia.com/gpu": 4}), "it is back where it was")
}
