// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	policies "github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// onDemandOf says who waits for MIG instances that a policy has on demand, what would be changed for them, and why not.
func onDemandOf(p *v1alpha1.GPUSharingPolicy) (lines []string) {
	is, reported := condition.Find(p.Status.Conditions, v1alpha1.ConditionDemandMet)
	if !reported {
		if p.OnDemand() != nil {
			lines = append(lines, "not reported: the controller runs without the feature gate OnDemandMIG (chart: featureGates.OnDemandMIG=true)")
		}
		return lines
	}
	if is.Status == metav1.ConditionUnknown || p.Status.OnDemand == nil {
		return []string{is.Message}
	}
	for i := range p.Status.OnDemand.Requests {
		lines = append(lines, demandLine(&p.Status.OnDemand.Requests[i]))
	}
	if len(lines) > 0 || is.Status != metav1.ConditionTrue {
		lines = append(lines, changeLines(p)...)
	}
	return lines
}

// madeOnDemand says which GPUs of a policy's nodes have, or are to have, other instances than at rest, and for whom.
func madeOnDemand(p *v1alpha1.GPUSharingPolicy, nodes []report) (lines []string) {
	more := 0
	for i := range nodes {
		n := &nodes[i].node.GPU
		for _, e := range n.Status.Demand {
			at := slices.IndexFunc(n.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.UUID == e.UUID })
			if n.Spec.PolicyName != p.Name || p.OnDemand() == nil || at < 0 {
				continue
			}
			if len(lines) == v1alpha1.MostDemands {
				more++
				continue
			}
			lines = append(lines, madeLine(p, n, plan.Devices(n.Status.Devices)[at], e))
		}
	}
	if more > 0 {
		lines = append(lines, fmt.Sprintf("on demand: and %s more", count(more, "GPU")))
	}
	return lines
}

func madeLine(p *v1alpha1.GPUSharingPolicy, n *v1alpha1.GPUNode, d gpu.Device, e v1alpha1.GPUDemand) string {
	line := fmt.Sprintf("on demand: GPU %d of node %s ", d.Index, n.Name)
	is := plan.Observed(d).Instances
	if !maps.Equal(plan.ByProfile(is), plan.ByProfile(e.Instances)) {
		line += "has " + instancesText(is) + " and is to have "
	} else {
		line += "has "
	}
	line += instancesText(e.Instances)
	if rest := policies.Resting(p, d); rest != nil {
		line += fmt.Sprintf(", at rest %s (unused for %s)", instancesText(rest), duration.HumanDuration(p.OnDemand().Rest()))
	}
	if e.FirstPod != "" {
		line += "; since " + format.Clock(e.SinceTime.Time) + " for " + e.FirstPod
	}
	if e.Failures > 0 {
		line += fmt.Sprintf("; %s failed", count(int(e.Failures), "change"))
	}
	return line
}

// onDemandFor is that of a policy for pods of a namespace that ask for some resources.
func onDemandFor(p *v1alpha1.GPUSharingPolicy, namespace string, requests map[string]int64) (lines []string) {
	if p.Status.OnDemand == nil {
		return nil
	}
	instances := 0
	for name := range requests {
		if strings.HasPrefix(name, plan.ResourcePrefix) {
			instances++
		}
	}
	for i := range p.Status.OnDemand.Requests {
		d := &p.Status.OnDemand.Requests[i]
		of, _, _ := strings.Cut(d.FirstPod, "/")
		if of == namespace && len(d.Instances) == instances && !slices.ContainsFunc(d.Instances, func(r v1alpha1.InstanceRequest) bool { return requests[plan.ResourceOf(r.Profile)] != int64(r.Count) }) {
			lines = append(lines, fmt.Sprintf("policy %s: %s", p.Name, demandLine(d)))
		}
	}
	if len(lines) > 0 {
		lines = append(lines, changeLines(p)...)
	}
	return lines
}

// demandLine says what some pods wait for, and what would become of them.
func demandLine(d *v1alpha1.DemandStatus) string {
	asks := map[string]int64{}
	for _, i := range d.Instances {
		asks[plan.ResourceOf(i.Profile)] = int64(i.Count)
	}
	var then []string
	if d.Ready > 0 {
		then = append(then, fmt.Sprintf("for %d instances are idle, so it is the scheduler's turn", d.Ready))
	}
	if d.Planned > 0 {
		then = append(then, fmt.Sprintf("%d would start after the change below", d.Planned))
	}
	if d.Unmet > 0 {
		why := fmt.Sprintf("for %d nothing can be done (%s)", d.Unmet, d.Reason)
		switch {
		case len(d.Holders) > 0:
			why += ": instances are held by " + format.List(d.Holders)
		case d.Reason == v1alpha1.ReasonAdvertisedNotScheduled:
			why += ": the scheduler left instances idle; next attempt at " + format.Clock(d.UntilTime.Time)
		case !d.UntilTime.IsZero():
			why += ": instances are idle for long enough at " + format.Clock(d.UntilTime.Time)
		}
		then = append(then, why+". "+node.WhatToDo(d.Reason))
	}
	return fmt.Sprintf("%s for %s, %s first: %s", count(int(d.Pods), "pod"), resources(asks), d.FirstPod, strings.Join(then, "; "))
}

// changeLines say what would be changed, or is.
func changeLines(p *v1alpha1.GPUSharingPolicy) (lines []string) {
	s, changes := p.Status.OnDemand, "would change"
	applies := p.OnDemand() != nil && p.OnDemand().Mode == v1alpha1.OnDemandModeApply
	if applies {
		changes = "changes"
	}
	for _, c := range s.Changes {
		var parts []string
		if len(c.Destroy) > 0 {
			parts = append(parts, "destroy the idle "+instancesText(c.Destroy))
		}
		parts = append(parts, "create "+instancesText(c.Create))
		lines = append(lines, fmt.Sprintf("%s GPU %d of node %s: %s", changes, c.Index, c.NodeName, strings.Join(parts, ", ")))
	}
	if more := int(s.GPUs) - len(s.Changes); more > 0 {
		lines = append(lines, fmt.Sprintf("and %s more", count(more, "GPU")))
	}
	if len(lines) > 0 && !applies {
		lines = append(lines, "mode Advise changes nothing")
	}
	return lines
}

func instancesText(all []v1alpha1.InstanceCount) string {
	var parts []string
	for _, i := range all {
		parts = append(parts, fmt.Sprintf("%d × %s", i.Count, i.Profile))
	}
	return strings.Join(parts, ", ")
}
