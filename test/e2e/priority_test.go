// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// prioritySpecs prove on the one node what TestADefaultBesideAPolicyForSomeNodes in test/cluster proves on two.
func prioritySpecs() {
	Describe("A cluster-wide default and a policy for some nodes stand side by side:", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			DeferCleanup(func(ctx SpecContext) { unshare(ctx, map[string]int64{"nvidia.com/gpu": 2}) })
		})

		It("the default governs a node that no other policy selects", func(ctx SpecContext) {
			apply(ctx, "default", `{sharing: {strategy: MPS, mps: {replicas: 2}}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
			expectReady(ctx, "default")
		})

		It("the policy with the higher priority governs a node that both select, and the default reports the conflict", func(ctx SpecContext) {
			apply(ctx, "some", `{priority: 10, nodeSelector: {matchLabels: {kubernetes.io/hostname: node-a}}, sharing: {strategy: MPS, mps: {replicas: 4}}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 8})
			expectReady(ctx, "some")
			Eventually(conflicted).WithContext(ctx).WithArguments("default").Should(Equal(int32(1)))
		})

		It("the default governs the node again when the other policy goes", func(ctx SpecContext) {
			Expect(kube.Delete(ctx, &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "some"}})).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
			expectReady(ctx, "default")
		})
	})
}

// conflicted is the number of nodes that a policy selects and another governs.
func conflicted(ctx context.Context, policy string) (int32, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	err := kube.Get(ctx, client.ObjectKey{Name: policy}, p)
	return p.Status.Nodes.Conflicted, err
}

// A line for each spec, to the standard error, which hack/e2e shows while the specs run.
var _ = ReportAfterEach(func(spec SpecReport) {
	if !notAsked(spec) {
		of := strings.Join(spec.ContainerHierarchyTexts[min(1, len(spec.ContainerHierarchyTexts)):], " ")
		fmt.Fprintf(os.Stderr, "%-8s %s: %s%s\n", outcome(spec.State), of, spec.LeafNodeText, details(spec))
	}
})

var _ = ReportAfterSuite("what the kubelet lost", func(Report) {
	if machine != nil && lost+machine.Lost() > 0 {
		fmt.Fprintf(os.Stderr, "%d times the kubelet lost NVIDIA's device plugin when that started anew (docs/install.md),\n"+
			"and was restarted, as an administrator must. That is the kubelet's own fault, and no program of ours could help it.\n",
			lost+machine.Lost())
	}
})

// notAsked reports whether a spec was left out since another part was asked for.
func notAsked(spec SpecReport) bool {
	return spec.State == types.SpecStateSkipped && spec.Failure.Message == ""
}

func outcome(state types.SpecState) string {
	switch state {
	case types.SpecStatePassed:
		return "proved"
	case types.SpecStatePending:
		return "pending"
	case types.SpecStateSkipped:
		return "skipped"
	case types.SpecStateInvalid, types.SpecStateFailed, types.SpecStateAborted, types.SpecStatePanicked,
		types.SpecStateInterrupted, types.SpecStateTimedout:
	}
	return "FAILED"
}

// details are how long a spec took, if it ran, and what it noted.
func details(spec types.SpecReport) string {
	if spec.RunTime == 0 {
		return ""
	}
	parts := []string{spec.RunTime.Round(100 * time.Millisecond).String()}
	for _, entry := range spec.ReportEntries {
		if entry.Visibility != ReportEntryVisibilityNever { // what a command printed is for the report as JSON alone
			parts = append(parts, entry.Name+" "+entry.StringRepresentation())
		}
	}
	return " (" + strings.Join(parts, "; ") + ")"
}
