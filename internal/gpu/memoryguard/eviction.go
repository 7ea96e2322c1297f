// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

const (
	// perGPU and perPod are the shortest times between two evictions for one GPU, and of one pod.
	perGPU, perPod = time.Minute, 10 * time.Minute
	// maxRecords is the bound of the API's list, and so of the evictions from one node in ten minutes.
	maxRecords = 64
	// fresh is how old a report may be that evicts a pod, and ahead how far the clock of its node may be ahead.
	fresh, ahead = 2 * time.Minute, 30 * time.Second
	// soon is how long a pod may still have to end whose memory is waited for: four times the grace period of most, while one of a day, which a
	// tenant can ask for, shields nobody. frees is how long after its end the memory is free.
	soon, frees = 2 * time.Minute, 10 * time.Second
)

// Pod is what the controller knows by itself of the pod that an agent names.
type Pod struct {
	Found       bool
	Node        string // that it is bound to
	Created     time.Time
	RequestsGPU bool
	Ends        bool      // it is terminating, or has ended
	EndsBy      time.Time // it is terminating, and is killed then
	Protected   string    // why it is never evicted; empty: it may be
}

// Refusal is why the API server refused to evict a pod, and when to ask again.
type Refusal struct {
	Message string
	Until   time.Time
}

// Case is one report of an agent, and what the controller decides by.
type Case struct {
	Memory    v1alpha1.TimeSlicedMemory // of the policy
	Replicas  int32                     // of the policy
	Node      string
	Pressure  v1alpha1.MemoryPressure
	Pod       Pod
	Evicted   []v1alpha1.MemoryEviction // those recorded of the node
	Elsewhere []v1alpha1.MemoryEviction // those of a pod of that name, recorded of other nodes
	Refused   Refusal
	Left      time.Time // since when the pod is known to have Gone
	Now       time.Time
}

// Decision is whether the controller evicts the pod of a Case.
type Decision struct {
	Evict bool
	Why   string        // it does not; empty in mode Report
	After time.Duration // when to decide again without a new report; 0: no need
}

// DecideAll decides on the reports of one GPU, the worst first: at most one pod is evicted. One that may not be evicted
// shields no other, but what frees its memory by itself is waited for.
func DecideAll(cases []Case) []Decision {
	decisions, wait := make([]Decision, len(cases)), ""
	for i, c := range cases {
		d := Decide(c)
		switch {
		case d.Evict && wait != "":
			d = Decision{Why: wait}
		case d.Evict:
			wait = "another pod of this GPU is evicted first"
		case c.frees():
			wait = "another pod of this GPU is ending"
		}
		decisions[i] = d
	}
	return decisions
}

// Gone reports whether the pod that was meant is not there any more, or runs no more.
func (c Case) Gone() bool {
	return !c.Pod.Found || c.replaced() || c.Pod.Node != c.Node || c.Pod.Ends && c.Pod.EndsBy.IsZero()
}

func (c Case) replaced() bool { return c.Pod.Created.After(c.Pressure.ObservedTime.Add(-ahead)) }

// frees reports whether the memory of the container counts as freed: until a report that is later than its end names it
// still.
func (c Case) frees() bool {
	end := c.Pod.EndsBy
	if c.Gone() {
		end = c.Left
	}
	return !end.IsZero() && end.Sub(c.Now) <= soon && !c.Pressure.ObservedTime.After(end.Add(frees))
}

// Decide decides on a Case. An agent is believed about the memory of its own GPUs only: whether the pod is on its node,
// requests a GPU and may be evicted, and how many pods were evicted lately, the controller knows by itself.
func Decide(c Case) Decision {
	p := c.Pressure
	age := c.Now.Sub(p.ObservedTime.Time)
	switch {
	case c.Memory.Guard.Mode != v1alpha1.MemoryGuardEvict:
		return Decision{}
	case !Exceeds(c.Memory, p) || !Meant(c.Memory, c.Replicas, p):
		return Decision{Why: "the report does not match the policy any more"}
	case age > fresh || age < -ahead:
		return Decision{Why: fmt.Sprintf("the agent's report is not of the last %s; check that the clock of the node is right", fresh)}
	case !c.Pod.Found || c.replaced():
		return Decision{Why: "the pod is gone"}
	case c.Pod.Node != c.Node:
		return Decision{Why: "the pod is not on this node"}
	case c.Pod.Ends:
		return Decision{Why: "the pod is ending"}
	case !c.Pod.RequestsGPU:
		return Decision{Why: "the pod requests no GPU"}
	case c.Pod.Protected != "":
		return Decision{Why: "the pod " + c.Pod.Protected}
	}
	return c.paced()
}

// paced keeps the rates.
func (c Case) paced() Decision {
	counting := Counting(c.Evicted, c.Now)
	if len(counting) >= maxRecords {
		return Decision{Why: fmt.Sprintf("%d pods of this node were evicted in the last ten minutes", maxRecords), After: perGPU}
	}
	for _, e := range slices.Concat(counting, Counting(c.Elsewhere, c.Now)) {
		same := e.Namespace == c.Pressure.Container.Namespace && e.PodName == c.Pressure.Container.PodName
		if remaining := perPod - c.Now.Sub(e.Time.Time); same && remaining > 0 {
			return Decision{Why: "the pod was evicted less than ten minutes ago", After: remaining}
		}
		if e.DeviceUUID != c.Pressure.DeviceUUID {
			continue
		}
		if remaining := perGPU - c.Now.Sub(e.Time.Time); remaining > 0 {
			return Decision{Why: "another pod was evicted from this GPU less than a minute ago", After: remaining}
		}
		if !c.Pressure.ObservedTime.After(e.Time.Time) {
			return Decision{Why: "another pod was evicted from this GPU after the agent's report"}
		}
	}
	if c.Now.Before(c.Refused.Until) {
		return Decision{Why: c.Refused.Message, After: c.Refused.Until.Sub(c.Now)}
	}
	return Decision{Evict: true}
}

// Exceeds reports whether a report shows by its own figures what the guard of the policy asks for.
func Exceeds(spec v1alpha1.TimeSlicedMemory, p v1alpha1.MemoryPressure) bool {
	return p.Container.UsedBytes > p.Container.ShareBytes && almostFull(spec, p.FreeBytes, p.TotalBytes) &&
		(spec.PerReplica == nil || p.Container.ShareBytes >= spec.PerReplica.Value()) &&
		p.ObservedTime.Sub(p.SinceTime.Time) >= grace(spec)
}

// Meant reports whether the share of a report is no smaller than the policy's, as it is in a report of a former policy.
func Meant(spec v1alpha1.TimeSlicedMemory, replicas int32, p v1alpha1.MemoryPressure) bool {
	return spec.PerReplica != nil || replicas == 0 || p.Container.ShareBytes >= p.TotalBytes/int64(replicas)
}

// Recorded adds an eviction to those recorded of a node, and removes those that count no more. Its time is rounded up
// to a second, as the API server keeps no parts.
func Recorded(all []v1alpha1.MemoryEviction, p v1alpha1.MemoryPressure, now time.Time) []v1alpha1.MemoryEviction {
	return append(Counting(all, now), v1alpha1.MemoryEviction{
		Time: seconds(now.Add(time.Second - 1)), DeviceUUID: p.DeviceUUID, Namespace: p.Container.Namespace, PodName: p.Container.PodName,
	})
}

// Counting are the evictions that still count. A time in the future tells that the clock of a controller was wrong, and counts as long past.
func Counting(all []v1alpha1.MemoryEviction, now time.Time) []v1alpha1.MemoryEviction {
	var counting []v1alpha1.MemoryEviction
	for _, e := range all {
		if age := now.Sub(e.Time.Time); age < perPod && age > -perGPU {
			counting = append(counting, e)
		}
	}
	return counting
}

// Describe is what a report means: the container, what it uses, its share, what is free and, as far as there is room,
// who else is on the GPU.
func Describe(node string, p v1alpha1.MemoryPressure) string {
	const most = 30 // characters, and one neighbour at least
	text := fmt.Sprintf("Container %s of pod %s/%s uses %s of GPU %s on node %s, its share is %s; %s of %s are free",
		p.Container.ContainerName, p.Container.Namespace, p.Container.PodName, gib(p.Container.UsedBytes), p.DeviceUUID, node,
		gib(p.Container.ShareBytes), gib(p.FreeBytes), gib(p.TotalBytes))
	if len(p.Neighbours) > 0 {
		text += "; neighbours: " + format.ListIn(p.Neighbours, most)
	}
	return text
}

func gib(bytes int64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }
