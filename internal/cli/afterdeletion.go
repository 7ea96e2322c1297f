// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// afterwards is what a node offers to pods once policies are deleted. The operator does not read an administrator's own
// configuration of the device plugin, so a node that returns to one may offer anything.
type afterwards struct {
	labels    map[string]string
	resources map[string]int64
	single    bool // a container gets no more than one of what is shared
	shared    func(resource string) bool
	returnsTo string // the administrator's configuration; empty: none
}

// lost returns a line for each workload whose request some node meets before the deletion of a policy, and none
// afterwards: of the pods on the policy's nodes, and of those that wait for a node.
func lost(name string, c change, s cluster.Snapshot, before, after []rollout.NodeState) []string {
	then := c.afterwards(s, after)
	var requesting []*cluster.Pod
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if !slices.ContainsFunc(before, func(s rollout.NodeState) bool { return s.Node == n.Name && s.Policy == name }) {
			continue
		}
		for p := range n.Pods {
			requesting = append(requesting, &n.Pods[p])
		}
	}
	now := change{}.afterwards(s, before)
	for i := range s.Unscheduled {
		if p := &s.Unscheduled[i]; slices.ContainsFunc(now, func(o afterwards) bool { return o.meets(p) }) {
			requesting = append(requesting, p)
		}
	}
	pods := map[string]int{}
	for _, p := range requesting {
		if len(p.Requests) == 0 || slices.ContainsFunc(then, func(o afterwards) bool { return o.returnsTo == "" && o.meets(p) }) {
			continue
		}
		who := fmt.Sprintf("%s asks for %s", cmp.Or(p.Workload, "pod "+p.Namespace+"/"+p.Name), resources(p.Requests))
		if at := slices.IndexFunc(then, func(o afterwards) bool { return o.returnsTo != "" && o.admits(p) }); at >= 0 {
			who += fmt.Sprintf(", which a node offers then only if %s does, to which it returns", then[at].returnsTo)
		} else {
			who += ", which no node will offer"
		}
		pods[who]++
	}
	lines := make([]string, 0, len(pods))
	for _, line := range slices.Sorted(maps.Keys(pods)) {
		if pods[line] > 1 {
			line += fmt.Sprintf(" (%d pods)", pods[line])
		}
		lines = append(lines, line)
	}
	return lines
}

// afterwards is what each node offers once it is in these states.
func (c change) afterwards(s cluster.Snapshot, states []rollout.NodeState) []afterwards {
	all := make([]afterwards, 0, len(s.Nodes))
	policies := c.of(s).Policies
	for i := range s.Nodes {
		n := &s.Nodes[i]
		o := afterwards{labels: n.Labels, resources: n.Offered(s.Plugin.StackOf(n)), shared: func(string) bool { return false }}
		at := slices.IndexFunc(states, func(s rollout.NodeState) bool { return s.Node == n.Name })
		if at >= 0 {
			o.become(&states[at], n, policies)
			if states[at].Policy == "" && o.returnsTo == "" && !states[at].Retained {
				o.returnsTo = c.found
			}
		}
		all = append(all, o)
	}
	return all
}

// become takes over what the node offers in a state.
func (o *afterwards) become(s *rollout.NodeState, n *cluster.Node, policies []v1alpha1.GPUSharingPolicy) {
	switch {
	case s.State == node.Unsupported, s.State == node.Unknown, s.State == node.Failed, s.Retained:
	case s.Policy != "":
		if s.Expected != nil {
			o.resources = s.Expected
		}
		if at := slices.IndexFunc(policies, named(s.Policy)); at >= 0 {
			o.single = policies[at].Spec.Sharing.RefusesMoreThanOne()
			o.shared = func(resource string) bool { return s.Replicas[resource] > 1 }
		}
	default:
		o.resources = restoredResources(s, &n.GPU)
		if b := n.GPU.Spec.Baseline; b != nil && b.Labels[v1alpha1.LabelConfig] != "" {
			o.returnsTo = "configuration " + b.Labels[v1alpha1.LabelConfig]
		}
	}
}

// restoredResources are those of a node whose GPUs are in their baselines, as the device plugin advertises them by
// default: its instances under mig.strategy mixed, and under single.
func restoredResources(s *rollout.NodeState, n *v1alpha1.GPUNode) map[string]int64 {
	counts := map[string]int64{}
	for _, d := range n.Status.Devices {
		sharing := d.Sharing
		if at := slices.IndexFunc(s.Devices, func(to v1alpha1.DeviceSpec) bool { return to.UUID == d.UUID }); at >= 0 {
			sharing = s.Devices[at].Sharing
		}
		if sharing.MIGMode != v1alpha1.MIGModeEnabled {
			counts[plan.ResourceGPU]++
		}
		for _, i := range sharing.Instances {
			counts[plan.ResourceOf(i.Profile)] += int64(i.Count)
			counts[plan.ResourceGPU] += int64(i.Count)
		}
	}
	return counts
}

func (o afterwards) meets(p *cluster.Pod) bool {
	for name, n := range p.Requests {
		if o.resources[name] < n || n > 1 && o.single && o.shared(name) {
			return false
		}
	}
	return o.admits(p)
}

// admits reports whether the pod's node selector admits the node. NVIDIA's labels change with the sharing, and count as
// equal.
func (o afterwards) admits(p *cluster.Pod) bool {
	for name, value := range p.NodeSelector {
		if !strings.HasPrefix(name, "nvidia.com/") && o.labels[name] != value {
			return false
		}
	}
	return true
}
