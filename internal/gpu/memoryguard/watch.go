// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package memoryguard decides for the memory guard of time-slicing. It is pure.
//
//	agent       samples over time → Watch.Next → Kept → GPUNode.status.memoryPressure
//	controller  what agents report, the pod and what was evicted → Decide → eviction or the reason for none
package memoryguard

import (
	"cmp"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

const (
	// maxNeighbours is the bound of the API's list.
	maxNeighbours = 16
	// maxOffenders is how many pods a report names of a GPU in mode Evict, if not more than maxReports are then named of the node: half of what the
	// API takes, and all that it took at first.
	maxOffenders, maxReports = 8, 64
	// maxGap is the longest time between two samples of a GPU that count as one stretch: what was between them is not
	// known.
	maxGap = 30 * time.Second
	// RenewEvery is how often a report is written again while the pressure lasts, if pods are evicted.
	RenewEvery = time.Minute
	// The intervals between two samples: while the free memory of a GPU is low, and otherwise.
	lowInterval, interval = 5 * time.Second, 15 * time.Second
)

// Watch is since when GPUs, by UUID, have been almost full in each sample.
type Watch map[string]stretch

type stretch struct {
	since, seen time.Time
	named       usage.Name // the container that was found last
}

// names reports whether a container was found last and exceeds its share still.
func (s stretch) names(c usage.Container) bool { return c.Name == s.named && c.Over() }

// Interval is how long after a sample the next one is due.
func (w Watch) Interval() time.Duration {
	if len(w) > 0 {
		return lowInterval
	}
	return interval
}

// Next adds a sample and returns the GPUs that are under pressure: almost full for the whole grace period, while a
// container uses more than its share. In mode Evict it names several of a GPU, the worst first: one that is not evicted
// shields no other. A GPU whose memory is not known begins anew. If what a container uses is not known, none on that GPU
// is reported.
func (w Watch) Next(spec v1alpha1.TimeSlicedMemory, units []usage.Unit, now time.Time) (Watch, []v1alpha1.MemoryPressure) {
	next := Watch{}
	var found [][]v1alpha1.MemoryPressure // of each GPU
	for i := range units {
		u := &units[i]
		if !timeSliced(u) || !almostFull(spec, u.Memory.Free, u.Memory.Total) {
			continue
		}
		s, was := w[u.GPU]
		if !was || now.Sub(s.seen) > maxGap || now.Before(s.seen) {
			s = stretch{since: now}
		}
		s.seen = now
		over := offenders(u.Containers)
		if spec.Guard.Mode != v1alpha1.MemoryGuardEvict && len(over) > 0 {
			over = over[:1]
			if i := slices.IndexFunc(u.Containers, s.names); i >= 0 {
				over[0] = u.Containers[i] // or two that take turns are a new report with each sample
			}
		}
		s.named = usage.Name{}
		if len(over) > 0 {
			s.named = over[0].Name
		}
		next[u.GPU] = s
		if len(over) > 0 && now.Sub(s.since) >= grace(spec) {
			found = append(found, pressures(u, over, s.since, now))
		}
	}
	return next, fitting(found)
}

func pressures(u *usage.Unit, over []usage.Container, since, now time.Time) (all []v1alpha1.MemoryPressure) {
	for _, c := range over {
		all = append(all, v1alpha1.MemoryPressure{
			DeviceUUID: u.GPU, SinceTime: seconds(since), ObservedTime: seconds(now), TotalBytes: u.Memory.Total, FreeBytes: u.Memory.Free,
			Container: v1alpha1.MemoryUser{
				Namespace: c.Namespace, PodName: c.Pod, ContainerName: c.Container, UsedBytes: *c.MemoryBytes, ShareBytes: *c.ShareBytes,
			},
			Neighbours: neighbours(u.Containers, c.Name),
		})
	}
	return all
}

// fitting are the worst of each GPU, as many as fit.
func fitting(found [][]v1alpha1.MemoryPressure) (all []v1alpha1.MemoryPressure) {
	found = found[:min(len(found), maxReports)]
	for _, of := range found {
		all = append(all, of[:min(len(of), maxReports/len(found))]...)
	}
	return all
}

// ByGPU are reports as lists of one GPU each.
func ByGPU(reports []v1alpha1.MemoryPressure) (lists [][]v1alpha1.MemoryPressure) {
	for _, p := range reports {
		i := slices.IndexFunc(lists, func(of []v1alpha1.MemoryPressure) bool { return of[0].DeviceUUID == p.DeviceUUID })
		if i < 0 {
			i, lists = len(lists), append(lists, nil)
		}
		lists[i] = append(lists[i], p)
	}
	return lists
}

// Kept returns what to report of the GPUs that are under pressure: what was reported before of those with the same
// containers and the same worst one, so that figures alone cause no write. One that does not show what the policy asks
// for now is replaced. In
// mode Evict a report is renewed, because the controller evicts for no report that is old.
func Kept(spec v1alpha1.TimeSlicedMemory, reported, found []v1alpha1.MemoryPressure, now time.Time) (kept []v1alpha1.MemoryPressure) {
	last := map[string][]v1alpha1.MemoryPressure{}
	for _, was := range ByGPU(reported) {
		last[was[0].DeviceUUID] = was
	}
	for _, is := range ByGPU(found) {
		if was := last[is[0].DeviceUUID]; says(spec, was, is, now) {
			is = was
		}
		kept = append(kept, is...)
	}
	return kept
}

// says reports whether what was reported of a GPU says what is found.
func says(spec v1alpha1.TimeSlicedMemory, was, is []v1alpha1.MemoryPressure, now time.Time) bool {
	if len(was) != len(is) || !sameShare(was[0].Container, is[0].Container) {
		return false
	}
	return !slices.ContainsFunc(was, func(old v1alpha1.MemoryPressure) bool {
		return !Exceeds(spec, old) || spec.Guard.Mode == v1alpha1.MemoryGuardEvict && now.Sub(old.ObservedTime.Time) >= RenewEvery ||
			!slices.ContainsFunc(is, func(p v1alpha1.MemoryPressure) bool { return sameShare(old.Container, p.Container) })
	})
}

func sameShare(a, b v1alpha1.MemoryUser) bool {
	return a.Namespace == b.Namespace && a.PodName == b.PodName && a.ContainerName == b.ContainerName && a.ShareBytes == b.ShareBytes
}

// timeSliced reports whether a GPU is shared by time-slicing, with memory that can be: the API server refuses the
// report of all GPUs of the node for one whose free memory is negative.
func timeSliced(u *usage.Unit) bool {
	return u.Strategy == v1alpha1.StrategyTimeSlicing && u.Instance == nil && !u.Partitioned &&
		u.Memory != nil && u.Memory.Total > 0 && u.Memory.Free >= 0 && u.Memory.Free <= u.Memory.Total
}

// almostFull reports whether the free memory is below the threshold.
func almostFull(spec v1alpha1.TimeSlicedMemory, free, total int64) bool {
	return free < total/100*int64(spec.Guard.FreeBelowPercent)
}

func grace(spec v1alpha1.TimeSlicedMemory) time.Duration {
	return time.Duration(spec.Guard.GracePeriodSeconds) * time.Second
}

// offenders are the containers that exceed their shares the most, one of each pod; of equals the first. They are known only if the use and the
// share of every container on the GPU are.
func offenders(containers []usage.Container) (worst []usage.Container) {
	for _, c := range containers {
		switch {
		case c.MemoryBytes == nil || c.ShareBytes == nil || *c.ShareBytes <= 0:
			return nil
		case c.Over():
			worst = append(worst, c)
		}
	}
	slices.SortStableFunc(worst, func(a, b usage.Container) int { return cmp.Compare(excess(b), excess(a)) })
	pods := map[[2]string]bool{}
	worst = slices.DeleteFunc(worst, func(c usage.Container) bool {
		pod := [2]string{c.Namespace, c.Pod}
		named := pods[pod]
		pods[pod] = true
		return named
	})
	return worst[:min(len(worst), maxOffenders)]
}

func excess(c usage.Container) int64 { return *c.MemoryBytes - *c.ShareBytes }

func neighbours(containers []usage.Container, of usage.Name) []string {
	var names []string
	seen := map[string]bool{of.Namespace + "/" + of.Pod: true}
	for _, c := range containers {
		name := c.Namespace + "/" + c.Pod
		if !seen[name] && len(names) < maxNeighbours {
			seen[name] = true
			names = append(names, name)
		}
	}
	return names
}

// seconds is a time as the API server keeps it.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }
