// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// programOf names what offers the GPUs of a node.
func programOf(s dra.Stack) string {
	switch s {
	case dra.DRADriver:
		return "NVIDIA's DRA driver"
	case dra.Both:
		return "NVIDIA's device plugin and its DRA driver, both for the same GPUs"
	case dra.DevicePlugin:
	}
	return "NVIDIA's device plugin"
}

// lacking writes what is not known, because the user may not read it.
func (t *text) lacking(lacks []string) {
	for _, what := range lacks {
		t.row(0, "", what+".")
	}
	if len(lacks) > 0 {
		t.WriteString("\n")
	}
}

// hasTwoStacks reports whether NVIDIA's DRA driver serves a node of the cluster, or is installed there: its chart brings
// the DeviceClass.
func hasTwoStacks(s *cluster.Snapshot) bool {
	return slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool { return s.Plugin.StackOf(&n) != dra.DevicePlugin }) ||
		slices.ContainsFunc(s.DRA.Classes, func(c dra.Class) bool { return c.Name == dra.DriverName && !c.Unread })
}

// stacks writes what offers the GPUs of the nodes that a policy governs, and what would change for pods if the other
// program did: moved are the nodes then.
func (t *text) stacks(policy string, s *cluster.Snapshot, now, moved []rollout.NodeState) {
	type line struct {
		stack dra.Stack
		moved string
	}
	var nodes alike[line]
	for _, n := range now {
		at := slices.IndexFunc(s.Nodes, func(o cluster.Node) bool { return o.Name == n.Node })
		if n.Policy != policy || at < 0 || n.State == node.Unknown {
			continue
		}
		l := line{stack: s.Plugin.StackOf(&s.Nodes[at])}
		if then := slices.IndexFunc(moved, func(m rollout.NodeState) bool { return m.Node == n.Node }); then >= 0 && l.stack != dra.Both {
			l.moved = afterMove(l.stack, &n, &moved[then], sharesOf(policy, s))
		}
		nodes.add(l, n.Node)
	}
	for _, l := range nodes.order {
		its := nodes.names[l]
		t.WriteString("\n")
		t.row(0, "", fmt.Sprintf("STACK %s on %s: %s", programOf(l.stack), count(len(its), "node"), strings.Join(its, ", ")))
		if l.moved != "" {
			t.row(2, "if moved", l.moved)
		}
	}
}

// sharesOf is the number of shares that a policy needs of each GPU on nodes of NVIDIA's DRA driver; 0: any number.
func sharesOf(policy string, s *cluster.Snapshot) int64 {
	at := slices.IndexFunc(s.Policies, named(policy))
	if at < 0 {
		return 0
	}
	return dra.Shares(s.Policies[at].Spec.Sharing)
}

// afterMove is what pods can request of a node once the other one of NVIDIA's programs offers its GPUs.
func afterMove(stack dra.Stack, now, then *rollout.NodeState, shares int64) string {
	to := dra.DRADriver
	if stack == dra.DRADriver {
		to = dra.DevicePlugin
	}
	says := "to " + programOf(to) + ": "
	switch {
	case then.State == node.Unsupported || then.State == node.Unknown:
		return says + fmt.Sprintf("%s: %s", then.Reason, then.Message)
	case now.State != node.Unsupported && maps.Equal(now.Expected, then.Expected):
		says += "the same resources"
	default:
		says += resources(then.Expected)
	}
	switch {
	case to == dra.DRADriver && shares > 1:
		says += ", with " + dra.Values(shares) + ", for all its nodes"
	case to == dra.DRADriver && shares == 0 && then.Expected[plan.ResourceGPU] > 0:
		says += ", and " + plan.ResourceGPU + " times consumableShares of its chart"
	}
	return says + ". docs/dra.md has the order"
}

// movedOver is the snapshot once the other one of NVIDIA's programs offers the GPUs of each node.
func movedOver(s cluster.Snapshot) cluster.Snapshot {
	if _, offered := dra.Offering(s.DRA.Classes, plan.ResourceGPU); !offered {
		s.DRA.Classes = append(slices.Clone(s.DRA.Classes), dra.Class{Name: dra.DriverName, Resource: plan.ResourceGPU}) // its chart brings it
	}
	s.Nodes = slices.Clone(s.Nodes)
	for i := range s.Nodes {
		n := &s.Nodes[i]
		stack := s.Plugin.StackOf(n)
		labels := map[string]string{}
		maps.Copy(labels, n.Labels)
		n.Labels, n.Annotations = labels, maps.Clone(n.Annotations)
		delete(n.Annotations, v1alpha1.AnnotationOtherController)
		n.Published, n.Claims, n.DRA, n.Allocatable = nil, nil, "", nil
		offers := func(p cluster.Pod) bool { return p.DRA || p.KeptBy(deployPlugin) }
		n.Pods = slices.DeleteFunc(slices.Clone(n.Pods), offers)
		if stack == dra.DevicePlugin {
			n.DRA = "the move"
			n.Labels[deployPlugin] = cluster.LabelFalse
		} else if s.Plugin.ClusterPolicy {
			n.Labels[deployPlugin] = "true"
		}
	}
	return s
}

// classesOf are the DeviceClasses that the operator would make or delete.
func classesOf(d rollout.Decision) (lines []string) {
	for _, a := range d.Actions {
		switch a := a.(type) {
		case action.WriteClass:
			lines = append(lines, fmt.Sprintf("creates DeviceClass %s, by which pods get %s", a.Class.Name, a.Class.Resource))
		case action.DeleteClass:
			lines = append(lines, "deletes DeviceClass "+a.Name+", which nothing names any more")
		}
	}
	return lines
}

// devicesOf are the GPUs of a node as its agent reports them. Which GPU or instance a pod has by a ResourceClaim is not
// known to the agent, which therefore counts the pod for each of them: it is what the claim and the ResourceSlices say.
func devicesOf(n *cluster.Node) []gpu.Device {
	devices := plan.Devices(n.GPU.Status.Devices)
	located := map[string]bool{} // pods, as namespace/name
	type held struct {
		uuid string
		gpu.Holder
	}
	var holders []held
	for _, claim := range n.Claims {
		for _, device := range claim.Of(n.Name) {
			uuid, instance, known := n.Published.Locate(device, n.GPU.Status.Devices)
			for p := range n.Pods {
				if pod := &n.Pods[p]; known && pod.Has(claim) {
					located[pod.Namespace+"/"+pod.Name] = true
					holders = append(holders, held{uuid, gpu.Holder{Namespace: pod.Namespace, Pod: pod.Name, Instance: instance}})
				}
			}
		}
	}
	for i := range devices {
		d := &devices[i]
		d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), func(h gpu.Holder) bool { return located[h.Namespace+"/"+h.Pod] })
		for _, h := range holders {
			if h.uuid == d.UUID {
				d.Holders = append(d.Holders, h.Holder)
			}
		}
	}
	return devices
}
