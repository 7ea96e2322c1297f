// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
)

// TestTheLogHasALineForEachDecision that changes something, and no other unless it is asked for.
func TestTheLogHasALineForEachDecision(t *testing.T) {
	have := &v1alpha1.GPUNode{}
	have.Spec.ConfigName = "a"
	an := &eventRecorder{seen: &seen{gpuNodes: map[string]*v1alpha1.GPUNode{"n": have}}}
	recorded := v1alpha1.GPUNodeSpec{ConfigName: "a", Baseline: &v1alpha1.Baseline{}}
	failed := action.Report{Node: "n", Why: "recording that the change failed"}
	failed.Status.Rollout.Failed = &v1alpha1.FailedChange{Reason: v1alpha1.ReasonApplyTimedOut, Message: "not within 15m0s"}
	for name, tc := range map[string]struct {
		action    action.Action
		line      string
		verbosity int
	}{
		"a taint":                     {action.Untaint{Node: "n"}, "Remove our taint from node n", 0},
		"a desired state":             {action.SetSpec{Node: "n", Spec: v1alpha1.GPUNodeSpec{ConfigName: "b"}, Why: "applying policy p"}, "Set spec of GPUNode n: applying policy p", 0},
		"a record in a desired state": {action.SetSpec{Node: "n", Spec: recorded, Why: "recording the baseline"}, "Set spec of GPUNode n: recording the baseline", 1},
		"a label":                     {action.PatchNode{Node: "n", Labels: map[string]*string{"a": nil}, Why: "selecting b"}, "Patch node n (selecting b): a-", 0},
		"an annotation":               {action.PatchNode{Node: "n", Annotations: map[string]*string{"a": nil}, Why: "recording"}, "Patch node n (recording): a-", 1},
		"a sync":                      {action.TriggerSync{Node: "n", Namespace: "x", Pod: "y", Value: "z"}, "Trigger a sync of pod x/y for z", 1},
		"a report":                    {action.Report{Node: "n", Why: "reporting Ready"}, "Status of GPUNode n: reporting Ready", 1},
		"that a change has failed":    {failed, "Node n: not within 15m0s", 0},
	} {
		t.Run(name, func(t *testing.T) {
			line, verbosity := an.logged(tc.action)
			g := NewWithT(t)
			g.Expect(line).To(Equal(tc.line))
			g.Expect(verbosity).To(Equal(tc.verbosity))
		})
	}
}
