// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// add adds a node with what runs on it, and what has.
func (f *Fleet) add(n *cluster.Node, seen time.Duration, c Cluster) {
	f.Nodes, f.GPUs, f.Time = append(f.Nodes, n), f.GPUs+len(n.GPU.Status.Devices), min(f.Time, seen)
	f.Concurrent += c.Seen.Concurrent[n.Name]
	f.held[n.Name], f.requests[n.Name] = c.Seen.Concurrent[n.Name], map[string]int64{}
	containers := slices.DeleteFunc(slices.Clone(c.Seen.Containers), func(seen Container) bool { return seen.Node != n.Name })
	containers = append(containers, f.addPods(n, containers, c.observed)...)
	if slices.ContainsFunc(containers, func(seen Container) bool { return f.podOf(seen) == nil }) {
		for _, name := range f.offered(n, c) { // any of these is what it may have requested
			f.requests[n.Name][name] += 0
		}
	}
	others := map[string]bool{}
	for _, container := range containers {
		if c.Scope.Namespace != "" && container.Namespace != c.Scope.Namespace {
			others[container.Namespace] = true
		} else {
			f.Containers = append(f.Containers, container)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(others)) {
		if !slices.Contains(f.Others, name) {
			f.Others = append(f.Others, name)
		}
	}
}

// healthyGPUs is how many GPUs of a node offer something: NVIDIA's programs offer nothing of one that is unhealthy, and one of which an instance
// is does not count either. A node that offers nothing at all has no program that tells.
func healthyGPUs(n *cluster.Node) int {
	offered, sick := int64(0), int64(0)
	for name, count := range n.Allocatable {
		if cluster.IsGPUResource(name) {
			offered += count
		}
	}
	for _, count := range n.Unhealthy(n.Expected()) {
		sick += count
	}
	if n.Published != nil {
		for _, d := range n.Published.Devices {
			if d.Tainted == "" {
				offered++
			} else {
				sick++
			}
		}
	}
	if offered == 0 {
		return len(n.GPU.Status.Devices)
	}
	return int(int64(len(n.GPU.Status.Devices)) * offered / (offered + sick))
}

// workloads are those of which a pod was observed.
func (c Cluster) workloads() map[string]bool {
	pods, all := map[string]bool{}, map[string]bool{}
	for _, seen := range c.Seen.Containers {
		pods[seen.Namespace+"/"+seen.Pod] = true
	}
	for i := range c.Nodes {
		for _, p := range c.Nodes[i].Pods {
			if p.Workload != "" && pods[p.Namespace+"/"+p.Name] {
				all[p.Workload] = true
			}
		}
	}
	return all
}

// addPods adds the pods of a node that request GPUs, and returns those of which nothing was observed, nor of their workload: what they use
// is not known.
func (f *Fleet) addPods(n *cluster.Node, seen []Container, observed map[string]bool) (unseen []Container) {
	sum := int64(0)
	for i := range n.Pods {
		p := &n.Pods[i]
		requests := requestsOf(p, n)
		if len(requests) == 0 {
			continue
		}
		f.pods[p.Namespace+"/"+p.Name] = p
		for name, count := range requests {
			f.requests[n.Name][name] += count
			sum += count
		}
		if !observed[p.Workload] && !slices.ContainsFunc(seen, func(c Container) bool { return c.Namespace == p.Namespace && c.Pod == p.Name }) {
			unseen = append(unseen, Container{Name: usage.Name{Namespace: p.Namespace, Pod: p.Name}, Node: n.Name, Held: 1})
		}
	}
	f.held[n.Name] = max(f.held[n.Name], int(sum))
	return unseen
}

// requestsOf are the resources that a pod requests or, of NVIDIA's DRA driver, those of the devices that it has by ResourceClaims.
func requestsOf(p *cluster.Pod, n *cluster.Node) map[string]int64 {
	if len(p.Requests) > 0 {
		return p.Requests
	}
	has := map[string]int64{}
	for _, claim := range n.Claims {
		for _, of := range claim.Devices {
			if d, found := n.Published.Named(of.Device); !found || !p.Has(claim) {
				continue
			} else if d.Profile != "" {
				has[plan.ResourceOf(d.Profile)]++
			} else {
				has[plan.ResourceGPU]++
			}
		}
	}
	return has
}

// offered are the resources that a node offers: as its kubelet lists them or, before it does, as its policy asks.
func (f Fleet) offered(n *cluster.Node, c Cluster) []string {
	if listed := c.offeredBy(n); len(listed) > 0 {
		return slices.Collect(maps.Keys(listed))
	}
	if p := c.policy(f.Policy); p != nil {
		if want, err := policy.DesiredState(p, c.wouldBe(n)); err == nil {
			return slices.Collect(maps.Keys(want.Config.Resources))
		}
	}
	return []string{plan.ResourceGPU}
}

// podOf is the pod of a container; nil if it is not on the nodes any more.
func (f Fleet) podOf(c Container) *cluster.Pod { return f.pods[c.Namespace+"/"+c.Pod] }

func (f Fleet) has(node string) bool { return f.requests[node] != nil }

// requested reports whether a pod on one of the nodes requests a resource, or may have.
func (f Fleet) requested(name string) bool {
	for _, asked := range f.requests {
		if _, is := asked[name]; is {
			return true
		}
	}
	return false
}

// requestsInstances reports whether pods request MIG instances by their profile.
func (f Fleet) requestsInstances() bool {
	for _, asked := range f.requests {
		for name := range asked {
			if strings.HasPrefix(name, plan.ResourcePrefix) {
				return true
			}
		}
	}
	return false
}

// asking are the pods of which the request of one resource is such a number.
func (f Fleet) asking(is func(int64) bool) []string {
	var names []string
	for name, p := range f.pods {
		for _, n := range p.Requests {
			if is(n) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}
