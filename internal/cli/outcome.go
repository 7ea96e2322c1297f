// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// OutcomeError is what a plan comes to, by which a pipeline decides whether to go on. It is the exit code of plan, and no
// failure of the command.
type OutcomeError int

// The outcomes. 1 is left to commands that fail.
const (
	// NoChange: the policies are in the cluster as they are.
	NoChange OutcomeError = 0
	// NonDisruptive: no GPU and no instance must be idle for it.
	NonDisruptive OutcomeError = 2
	// Disruptive: some must, so that pods wait or are evicted; or workloads would find nothing to run on; or a node does
	// not report, so that it is not known.
	Disruptive OutcomeError = 3
	// Unsatisfiable: a policy is not accepted, for another reason than that one of higher priority governs some of its
	// nodes; or a node that it selects cannot satisfy it.
	Unsatisfiable OutcomeError = 4
)

// words are the name of the outcome, and what it means.
func (o OutcomeError) words() (name, means string) {
	switch o {
	case NoChange:
		return "NoChange", "the policies are in the cluster as they are"
	case NonDisruptive:
		return "NonDisruptive", "no GPU has to be idle for it"
	case Disruptive:
		return "Disruptive", "GPUs have to be idle for it, or workloads find nothing to run on"
	case Unsatisfiable:
	}
	return "Unsatisfiable", "a policy is not accepted, or nodes that it selects cannot satisfy it"
}

func (o OutcomeError) name() string {
	name, _ := o.words()
	return name
}

// Error is the outcome as the last line of a plan says it.
func (o OutcomeError) Error() string {
	name, means := o.words()
	return fmt.Sprintf("%s: %s (exit code %d)", name, means, int(o))
}

// changeOf is what applying a policy is for it.
func changeOf(s cluster.Snapshot, p *v1alpha1.GPUSharingPolicy) string {
	at := slices.IndexFunc(s.Policies, named(p.Name))
	switch {
	case at < 0:
		return changeCreate
	case equality.Semantic.DeepEqual(s.Policies[at].Spec, p.Spec):
		return changeNone
	}
	return changeUpdate
}

// outcomeOf is the worst that a change of policies comes to. A policy that is unchanged counts for nothing.
func outcomeOf(s cluster.Snapshot, c change) OutcomeError {
	then := c.of(s)
	before, after := rollout.Decide(s), rollout.Decide(then)
	worst, names := NoChange, slices.Clone(c.deleted)
	for _, name := range c.deleted {
		if worst = max(worst, NonDisruptive); len(lost(name, c, s, before.Nodes, after.Nodes)) > 0 {
			worst = Disruptive
		}
	}
	for i := range c.applied {
		p := &c.applied[i]
		if changeOf(s, p) == changeNone {
			continue
		}
		names, worst = append(names, p.Name), max(worst, NonDisruptive)
		if takes(&s, after.Unmet[p.Name]) {
			worst = max(worst, Disruptive)
		}
		accepted, _ := condition.Find(after.Policies[p.Name].Conditions, v1alpha1.ConditionAccepted)
		intended := accepted.Reason == v1alpha1.ReasonConflicted && rollout.YieldsByPriority(&then, p.Name)
		if accepted.Status == metav1.ConditionFalse && !intended {
			worst = Unsatisfiable
		}
	}
	was := map[string]rollout.NodeState{}
	for _, n := range before.Nodes {
		was[n.Node] = n
	}
	for _, n := range after.Nodes {
		if b := was[n.Node]; slices.Contains(names, n.Policy) || slices.Contains(names, b.Policy) {
			worst = max(worst, outcomeOn(&b, &n))
		}
	}
	return worst
}

// takes reports whether one of the unmet requests is for what a node offers now.
func takes(s *cluster.Snapshot, unmet []string) bool {
	return slices.ContainsFunc(unmet, func(line string) bool {
		request := strings.Join(rollout.UnmetRequests(line), "")
		return slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool {
			return n.Offered(s.Plugin.StackOf(&n))[request[strings.LastIndex(request, " ")+1:]] > 0
		})
	})
}

// outcomeOn is what a change comes to on a node.
func outcomeOn(before, after *rollout.NodeState) OutcomeError {
	switch after.State {
	case node.Unsupported:
		return Unsatisfiable
	case node.UpToDate:
		return NoChange
	case node.PendingNonDisruptive, node.Selecting, node.Verifying, node.Finishing, node.Degraded:
		return NonDisruptive
	case node.Unknown, node.PendingDisruptive, node.Draining, node.StoppingOperands, node.Idle, node.Applying, node.Failed:
	}
	if before.Policy == after.Policy && before.ConfigName == after.ConfigName && reflect.DeepEqual(before.Devices, after.Devices) {
		return NonDisruptive // it was on its way there before
	}
	return Disruptive
}
