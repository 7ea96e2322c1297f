// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
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
		lines = append(lines, changeLines(p.Status.OnDemand)...)
	}
	return lines
}

// onDemandFor is that of a policy for pods that ask for some resources.
func onDemandFor(p *v1alpha1.GPUSharingPolicy, requests map[string]int64) (lines []string) {
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
		if len(d.Instances) == instances && !slices.ContainsFunc(d.Instances, func(r v1alpha1.InstanceRequest) bool { return requests[plan.ResourceOf(r.Profile)] != int64(r.Count) }) {
			lines = append(lines, fmt.Sprintf("policy %s: %s", p.Name, demandLine(d)))
		}
	}
	if len(lines) > 0 {
		lines = append(lines, changeLines(p.Status.OnDemand)...)
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
		case !d.UntilTime.IsZero():
			why += ": instances are idle for long enough at " + format.Clock(d.UntilTime.Time)
		}
		then = append(then, why+". "+node.WhatToDo(d.Reason))
	}
	return fmt.Sprintf("%s for %s, %s first: %s", count(int(d.Pods), "pod"), resources(asks), d.FirstPod, strings.Join(then, "; "))
}

// changeLines say what would be changed.
func changeLines(s *v1alpha1.OnDemandStatus) (lines []string) {
	for _, c := range s.Changes {
		var parts []string
		if len(c.Destroy) > 0 {
			parts = append(parts, "destroy the idle "+instancesText(c.Destroy))
		}
		parts = append(parts, "create "+instancesText(c.Create))
		lines = append(lines, fmt.Sprintf("would change GPU %d of node %s: %s", c.Index, c.NodeName, strings.Join(parts, ", ")))
	}
	if more := int(s.GPUs) - len(s.Changes); more > 0 {
		lines = append(lines, fmt.Sprintf("and %s more", count(more, "GPU")))
	}
	if len(lines) > 0 {
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
