// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// why writes an answer: the sentence first, and then what it follows from.
func (t *text) why(a *answer) {
	who := cmp.Or(a.Pod, a.Workload)
	if a.Pod != "" {
		who = "Pod " + a.Namespace + "/" + a.Pod
	}
	if a.Workload != "" && a.Pod != "" {
		who += " of " + a.Workload
	}
	state := "is " + a.Phase
	if a.Pod == "" {
		state = "has no pod"
	}
	t.row(0, "", fmt.Sprintf("%s %s. %s", who, state, a.Answer))
	var below text
	below.width = t.width
	if len(a.Requests) > 0 {
		below.row(2, "asks for", resources(a.Requests))
	}
	for i := range a.Shares {
		of := ""
		if a.Shares[i].Container != "" { // a claim is the pod's
			of = "container " + a.Shares[i].Container + ": "
		}
		below.row(2, "has", of+a.Shares[i].String())
	}
	if a.Limit != "" {
		below.row(2, "limit", a.Limit)
	}
	if a.Change != "" {
		below.row(2, "change", a.Change)
	}
	if len(a.Shares) == 0 && a.Cause != causeRunning {
		below.rows("offered", offerLines(a.Offers))
		below.rows("nodes", verdictLines(a.Nodes))
		below.rows("held by", holdingLines(a.Holders))
		below.rows("on demand", a.OnDemand)
	}
	for _, q := range a.Quotas {
		below.row(2, "quota", fmt.Sprintf("%d of %d %s are taken, by ResourceQuota %s", q.Used, q.Hard, q.Resource, q.Name))
	}
	if a.Scheduler != "" {
		below.row(2, "scheduler", a.Scheduler)
	}
	below.rows("not known", a.NotKnown)
	if below.Len() > 0 {
		t.WriteString("\n" + below.String())
	}
}

func offerLines(offers []offer) (lines []string) {
	for _, o := range offers {
		line := fmt.Sprintf("%s: %d on %s", o.Resource, o.Total, count(o.Nodes, "node"))
		if o.Free != nil {
			line += fmt.Sprintf(", %d free", *o.Free)
		}
		lines = append(lines, line)
	}
	return lines
}

// verdictLines are a line for all nodes off which the same keeps a pod, the nearest nodes first.
func verdictLines(all []verdict) (lines []string) {
	const most = 12
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b verdict) int { return slices.Index(funnel, b.Cause) - slices.Index(funnel, a.Cause) })
	var nodes alike[string]
	for _, v := range sorted {
		nodes.add(v.Message, v.Node)
	}
	for _, message := range nodes.order {
		if len(lines) == most {
			return append(lines, fmt.Sprintf("and %d other reasons", len(nodes.order)-most))
		}
		lines = append(lines, fmt.Sprintf("%s: %s", format.List(nodes.names[message]), message))
	}
	return lines
}

func holdingLines(all []holding) (lines []string) {
	const most = 12
	for i, h := range mostFirst(all) {
		if i == most {
			return append(lines, fmt.Sprintf("and %s", count(len(all)-most, "other namespace")))
		}
		lines = append(lines, fmt.Sprintf("%s %d: %s", h.Namespace, h.Shares, format.List(h.Pods)))
	}
	return lines
}
