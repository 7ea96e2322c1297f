// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"fmt"
	"math/rand/v2"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// PoolLabel is the label of a node that names its pool, "a" or "b".
const PoolLabel = "pool"

// Taint is the taint that some policies keep on their nodes.
func Taint() v1alpha1.Taint {
	return v1alpha1.Taint{Key: "example.com/shared", Value: "a", Effect: v1alpha1.TaintEffect(corev1.TaintEffectNoSchedule)}
}

// Policies are the policies of a cluster: one for all nodes, one for each pool, or one that overrides another.
func Policies(random *rand.Rand) []v1alpha1.GPUSharingPolicy {
	switch random.IntN(5) {
	case 0:
		return Split(random)
	case 1:
		first, second := Policy("all", "", random), Policy("pool-a", "a", random)
		second.Spec.Priority = 5
		return []v1alpha1.GPUSharingPolicy{first, second}
	}
	return []v1alpha1.GPUSharingPolicy{Policy("all", "", random)}
}

// Split are two policies, for a pool each.
func Split(random *rand.Rand) []v1alpha1.GPUSharingPolicy {
	return []v1alpha1.GPUSharingPolicy{Policy("pool-a", "a", random), Policy("pool-b", "b", random)}
}

// Policy is a policy for the nodes of a pool, or for all nodes where pool is empty.
func Policy(name, pool string, random *rand.Rand) v1alpha1.GPUSharingPolicy {
	p := v1alpha1.GPUSharingPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1},
		Spec: v1alpha1.GPUSharingPolicySpec{
			NodeSelector: &v1alpha1.NodeSelector{}, Sharing: sharing(random), ReleasePolicy: v1alpha1.ReleasePolicyRestore,
			Rollout: v1alpha1.Rollout{Drain: v1alpha1.Drain{TimeoutSeconds: 600}},
		},
	}
	if pool != "" {
		p.Spec.NodeSelector.MatchLabels = map[string]string{PoolLabel: pool}
	}
	randomRollout(&p.Spec.Rollout, random)
	if p.Spec.Sharing.MIG != nil {
		switch random.IntN(4) {
		case 0:
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Indexes: []int32{0}}
		case 1:
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Products: []string{"NVIDIA-*"}}
		}
	}
	if random.IntN(4) == 0 {
		p.Spec.Taints = []v1alpha1.Taint{Taint()}
	}
	return p
}

// EditPolicy changes something of a policy, and returns which field.
func EditPolicy(p *v1alpha1.GPUSharingPolicy, random *rand.Rand) (field string) {
	switch random.IntN(7) {
	case 0:
		randomRollout(&p.Spec.Rollout, random)
		return "rollout"
	case 1:
		p.Spec.Rollout.Paused = !p.Spec.Rollout.Paused
		return "rollout.paused"
	case 2:
		p.Spec.GPUSelector = nil
		if p.Spec.Sharing.MIG != nil && random.IntN(2) == 0 {
			p.Spec.GPUSelector = &v1alpha1.GPUMatch{Indexes: []int32{int32(random.IntN(2))}}
		}
		return "gpuSelector"
	case 3:
		if len(p.Spec.Taints) > 0 {
			p.Spec.Taints = nil
		} else {
			p.Spec.Taints = []v1alpha1.Taint{Taint()}
		}
		return "taints"
	}
	p.Spec.Sharing = sharing(random)
	if p.Spec.Sharing.MIG == nil {
		p.Spec.GPUSelector = nil
	}
	return "sharing"
}

// Says describes a policy in a line.
func Says(p *v1alpha1.GPUSharingPolicy) string {
	says := string(p.Spec.Sharing.Strategy)
	if p.Spec.Sharing.MIG != nil {
		says += fmt.Sprint(p.Spec.Sharing.MIG.Layouts[0].Instances)
	}
	if t := p.Spec.Sharing.TimeSlicing; t != nil {
		says += fmt.Sprint(" ", t.Replicas, " ", t.Interval)
	}
	if len(p.Spec.NodeSelector.MatchLabels) > 0 {
		says += fmt.Sprint(" for ", p.Spec.NodeSelector.MatchLabels)
	}
	if p.Spec.GPUSelector != nil {
		says += fmt.Sprintf(" on %+v", *p.Spec.GPUSelector)
	}
	r := p.Spec.Rollout
	return fmt.Sprintf("%s, %s, maxUnavailable %s, failureThreshold %d, paused %v, reboot %s %s, startupTaint %s, %d taints, %s", says, r.Drain.Mode, r.MaxUnavailable,
		r.FailureThreshold, r.Paused, r.Reboot, r.Drain.BeforeReboot, r.StartupTaint, len(p.Spec.Taints), p.Spec.ReleasePolicy)
}

func sharing(random *rand.Rand) v1alpha1.Sharing {
	timeSlicing := func(replicas int32) v1alpha1.Sharing {
		return v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: replicas}}
	}
	timed := func(interval v1alpha1.TimeSliceInterval) v1alpha1.Sharing {
		s := timeSlicing(4)
		s.TimeSlicing.Interval = interval
		return s
	}
	mps := func(replicas int32) v1alpha1.Sharing {
		return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: replicas}}
	}
	mig := func(instances ...v1alpha1.MIGInstances) v1alpha1.Sharing {
		return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{
			ResourceNames: v1alpha1.MIGResourceNamesPerProfile, Layouts: []v1alpha1.MIGLayout{{Instances: instances}},
		}}
	}
	count := func(profile v1alpha1.MIGProfile, n int32) v1alpha1.MIGInstances {
		return v1alpha1.MIGInstances{Profile: profile, Count: n}
	}
	sharings := []v1alpha1.Sharing{
		{Strategy: v1alpha1.StrategyExclusive},
		timeSlicing(2), timeSlicing(4), mps(4), mps(10), mig(count("1g", 7)), mig(count("3g", 1), count("1g", 2)), mig(count("2g", 3)),
		timed(v1alpha1.TimeSliceIntervalShort), timed(v1alpha1.TimeSliceIntervalLong),
	}
	return sharings[random.IntN(len(sharings))]
}

func randomRollout(r *v1alpha1.Rollout, random *rand.Rand) {
	modes := []v1alpha1.DrainMode{v1alpha1.DrainModeEvict, v1alpha1.DrainModeEvict, v1alpha1.DrainModeWaitForIdle, v1alpha1.DrainModeNever}
	r.MaxUnavailable = new(intstr.FromInt32(int32(1 + random.IntN(2))))
	r.Drain.Mode = modes[random.IntN(len(modes))]
	r.FailureThreshold = []int32{1, 2, 5}[random.IntN(3)]
	reboots := random.IntN(4)
	r.Reboot = []v1alpha1.RebootMode{v1alpha1.RebootModeNever, v1alpha1.RebootModeIfRequired}[reboots%2]
	r.Drain.BeforeReboot = []v1alpha1.BeforeReboot{v1alpha1.BeforeRebootGPUPods, v1alpha1.BeforeRebootAllPods}[reboots/2]
	if random.IntN(4) == 0 {
		r.StartupTaint = v1alpha1.StartupTaintUntilReady
	}
}
