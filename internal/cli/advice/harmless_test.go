// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice_test

import (
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// underPolicy is a cluster whose node a policy research governs.
func underPolicy(c advice.Cluster, sharing v1alpha1.Sharing) advice.Cluster {
	c.Nodes[0].GPU.Spec.PolicyName = "research"
	c.Policies = []v1alpha1.GPUSharingPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "research"}, Spec: v1alpha1.GPUSharingPolicySpec{Sharing: sharing}}}
	return c
}

// running are pods on node a that each request one of a resource.
func running(c advice.Cluster, resource string, user *int64) advice.Cluster {
	for _, seen := range c.Seen.Containers {
		c.Nodes[0].Pods = append(c.Nodes[0].Pods, cluster.Pod{
			Namespace: seen.Namespace, Name: seen.Pod, GPU: true, Requests: map[string]int64{resource: 1}, RunsAs: user,
		})
	}
	return c
}

func timeSliced(replicas int32, renamed bool) v1alpha1.Sharing {
	return v1alpha1.Sharing{
		Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: replicas}, Advertise: &v1alpha1.Advertise{RenameByDefault: &renamed},
	}
}

// The instances of a policy fit, so there is nothing to change: with another name of the resource, each pod that is started again stays Pending.
func TestInstancesThatFitKeepTheirName(t *testing.T) {
	for _, names := range []v1alpha1.MIGResourceNames{v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGResourceNamesUniform} {
		g := NewWithT(t)
		a := adviseOne(t, underPolicy(on(gpus(a100, 1), equal(7, 3, 0.1)...), v1alpha1.Sharing{
			Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{ResourceNames: names, Layouts: []v1alpha1.MIGLayout{{Fill: "1g.5gb"}}},
		}))
		g.Expect(a.Policy).NotTo(BeNil(), a.NoPolicy)
		g.Expect(a.Policy.Spec.Sharing.MIG.ResourceNames).To(Equal(names))
	}
}

func TestReplicasKeepTheirName(t *testing.T) {
	for _, renamed := range []bool{true, false} {
		g := NewWithT(t)
		c := underPolicy(on(gpus(t4, 1), equal(2, 3, 0.1)...), timeSliced(2, renamed))
		a := adviseOne(t, c)
		g.Expect(*a.Policy.Spec.Sharing.Advertise.RenameByDefault).To(Equal(renamed), "pods may be started again that have ended")
		resource := "nvidia.com/gpu"
		if renamed {
			resource += ".shared"
		}
		a = adviseOne(t, running(c, resource, new(int64(1000))))
		g.Expect(a.Best.Sharing.Strategy).To(Equal(v1alpha1.StrategyMPS))
		g.Expect(*a.Policy.Spec.Sharing.Advertise.RenameByDefault).To(Equal(renamed))
	}
	g := NewWithT(t)
	a := adviseOne(t, underPolicy(on(gpus(a100, 1), equal(3, 3, 0.1)...), timeSliced(4, true)))
	g.Expect(option(t, a, "MIG, 7 × 1g.5gb").Against).To(ContainElement("pods on node a request 1 nvidia.com/gpu.shared, and it would offer 0"))
}

// TestAdviceKnowsWhatItAdvises has for each criterion of harm a fleet to which it applies, and one like it to which it does not.
func TestAdviceKnowsWhatItAdvises(t *testing.T) {
	tenants := append(equal(1, 1, 0.1), using("x", "a", gib(1), new(0.1)))
	ofMPS := v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: 4}}
	guarded := timeSliced(4, false)
	guarded.TimeSlicing.Memory = &v1alpha1.TimeSlicedMemory{Guard: v1alpha1.MemoryGuard{FreeBelowPercent: 50}}
	two := running(underPolicy(on(gpus(t4, 1), equal(1, 1, 0.1)...), v1alpha1.Sharing{
		Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4}, Advertise: &v1alpha1.Advertise{FailRequestsGreaterThanOne: new(false)},
	}), "nvidia.com/gpu", new(int64(1)))
	two.Nodes[0].Pods[0].Requests["nvidia.com/gpu"] = 2
	unseen := running(on(gpus(a100, 1), equal(2, 1, 0.1)...), "nvidia.com/gpu", nil)
	unseen.Seen.Containers = unseen.Seen.Containers[:1]
	replica := running(on(gpus(a100, 1), equal(2, 1, 0.1)...), "nvidia.com/gpu", nil)
	replica.Seen.Containers = replica.Seen.Containers[:1]
	replica.Nodes[0].Pods[0].Workload, replica.Nodes[0].Pods[1].Workload = "Deployment team/infer", "Deployment team/infer"
	for name, c := range map[string]struct {
		cluster advice.Cluster
		option  string
		against string
	}{
		"a pod of a workload that was observed":      {replica, "MIG, 7 × 1g.5gb", ""},
		"a memory guard keeps half of the GPU free":  {underPolicy(on(gpus(t4, 1), equal(2, 4, 0.1)...), guarded), "TimeSlicing", "of which the memory guard keeps 50 % free"},
		"no memory guard":                            {underPolicy(on(gpus(t4, 1), equal(2, 4, 0.1)...), timeSliced(4, false)), "TimeSlicing", ""},
		"MPS isolates better than time-slicing":      {underPolicy(on(gpus(t4, 1), equal(2, 1, 0.1)...), ofMPS), "TimeSlicing", "policy research asks for MPS, which isolates better"},
		"Exclusive isolates better than MPS":         {underPolicy(on(gpus(t4, 1), equal(1, 1, 0.1)...), v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}), "MPS", "policy research asks for Exclusive"},
		"MPS for pods of several users":              {on(gpus(t4, 1), equal(2, 1, 0.1)...), "MPS", "it serves one user ID at a time"},
		"MPS where it is already":                    {underPolicy(on(gpus(t4, 1), equal(2, 1, 0.1)...), ofMPS), "MPS", ""},
		"MPS for pods of one user":                   {running(on(gpus(t4, 2), equal(2, 1, 0.1)...), "nvidia.com/gpu", new(int64(1))), "MPS", ""},
		"time-slicing of tenants":                    {on(gpus(t4, 1), tenants...), "TimeSlicing", "it takes the isolation from each other from containers of several namespaces: team, x"},
		"time-slicing of tenants that are so":        {underPolicy(on(gpus(t4, 1), tenants...), timeSliced(2, false)), "TimeSlicing", ""},
		"a pod that requests two replicas":           {two, "MPS", "a container gets one replica at most, and these request more: team/infer-0"},
		"one that the policy takes":                  {two, "TimeSlicing", ""},
		"a pod of which nothing was observed":        {unseen, "MIG, 7 × 1g.5gb", "the driver did not report the memory of team/infer-1"},
		"a pod that runs, though fewer were seen so": {running(on(gpus(a100, 1), equal(8, 1, 0.1)...), "nvidia.com/gpu", nil), "MIG, 7 × 1g.5gb", "it has room for 7, and 8 were held"},
		"MPS beside NVIDIA's DRA driver":             {driven(running(on(gpus(t4, 2), equal(2, 1, 0.1)...), "nvidia.com/gpu", new(int64(1)))), "MPS", "node a refuses it"},
		"a node that refuses all":                    {optedOut(on(gpus(a100, 1), equal(2, 1, 0.1)...)), "MIG, 7 × 1g.5gb", "node a refuses it"},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "a pod that runs, though fewer were seen so" {
				c.cluster.Seen.Concurrent["a"] = 1
			}
			o := option(t, adviseOne(t, c.cluster), c.option)
			if c.against == "" {
				NewWithT(t).Expect(o.Against).To(BeEmpty())
				return
			}
			NewWithT(t).Expect(o.Against).To(ContainElement(ContainSubstring(c.against)))
		})
	}
}

// driven is a cluster whose node NVIDIA's DRA driver serves.
func driven(c advice.Cluster) advice.Cluster {
	c.Nodes[0].DRANode = cluster.DRANode{DRA: "ResourceSlice a", Published: &dra.Pool{Complete: true}}
	return c
}

func optedOut(c advice.Cluster) advice.Cluster {
	c.Nodes[0].Labels["nvidia.com/gpu.deploy.operands"] = "false"
	return c
}

// Nobody knows what of a node that is shared by hand its pods count on: import describes it first.
func TestNoAdviceForNodesThatAreSharedByHand(t *testing.T) {
	for name, allocatable := range map[string]map[string]int64{
		"replicas": {"nvidia.com/gpu": 4}, "renamed": {"nvidia.com/gpu.shared": 4}, "instances": {"nvidia.com/mig-1g.5gb": 7},
	} {
		t.Run(name, func(t *testing.T) {
			c := on(gpus(a100, 1), equal(3, 1, 0.1)...)
			c.Nodes[0].Allocatable = allocatable
			_, err := advice.Of(c)
			NewWithT(t).Expect(err).To(MatchError(ContainSubstring("nodes that are shared by hand; apply what `kubectl gpusharing import` prints first: a")))
		})
	}
}

// A policy that is advised for a node which another one governs, and which is not as that one asks, would conflict: the node keeps whole GPUs.
func TestNoAdviceForNodesThatLackTheirPolicy(t *testing.T) {
	c := underPolicy(on(gpus(t4, 1), equal(1, 1, 0.1)...), v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{Fill: "1g"}}}})
	c.Policies[0].Spec.NodeSelector, c.Nodes[0].GPU.Spec.PolicyName = &v1alpha1.NodeSelector{}, ""
	_, err := advice.Of(c)
	NewWithT(t).Expect(err).To(MatchError(ContainSubstring("nodes that are not in the desired state of their policy; `kubectl gpusharing status` says why: a")))
}

// A GPU that NVIDIA's plugin calls unhealthy offers nothing: what the others offer must be enough for the pods that run on them.
func TestASickGPUHasNoRoom(t *testing.T) {
	g := NewWithT(t)
	c := running(underPolicy(on(gpus(t4, 2), equal(3, 3, 0.1)...), timeSliced(4, true)), "nvidia.com/gpu.shared", nil)
	c.Nodes[0].Allocatable = map[string]int64{"nvidia.com/gpu.shared": 4}
	c.Nodes[0].Unallocatable = map[string]int64{"nvidia.com/gpu.shared": 4}
	a := adviseOne(t, c)
	for _, o := range a.Options {
		if o.Sharing.TimeSlicing != nil && o.Sharing.TimeSlicing.Replicas < 3 {
			g.Expect(o.Against).NotTo(BeEmpty(), "%s: one GPU is sick, and three pods run on the other", o.Name)
		}
	}
	g.Expect(a.Best.Sharing.TimeSlicing.Replicas).To(BeNumerically(">=", 3), "%s", a.Best.Name)
}

// The kubelet keeps the capacity of a plugin that stopped for 5 minutes: no GPU is sick for what it had another name before.
func TestAFormerNameMakesNoGPUSick(t *testing.T) {
	g := NewWithT(t)
	c := running(underPolicy(on(gpus(t4, 1), equal(2, 1, 0.1)...), timeSliced(2, false)), "nvidia.com/gpu", new(int64(1)))
	c.Nodes[0].Allocatable = map[string]int64{"nvidia.com/gpu": 2, "nvidia.com/gpu.shared": 0}
	c.Nodes[0].Unallocatable = map[string]int64{"nvidia.com/gpu.shared": 10}
	g.Expect(option(t, adviseOne(t, c), "MPS").Against).To(BeEmpty())
}
