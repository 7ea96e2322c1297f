// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
)

// guide is what administrators follow by hand today, step by step, each of which is one policy now (folder guides).
type guide struct {
	Guide string      `json:"guide"`
	GPUs  []sim.Model `json:"gpus"`
	Steps []step      `json:"steps"`
}

// step is done by hand today. It is replayed by a policy, by no policy, or by pods on what the last policy advertises.
type step struct {
	// ByHand is what the guide tells to do.
	ByHand string `json:"by hand"`
	// Later names what the operator cannot do yet; the step is pending until then.
	Later string `json:"later,omitempty"`
	// GPUs are put into the node first.
	GPUs []sim.Model `json:"gpus,omitempty"`
	// Holding are pods that hold what the policy changes when it is applied; it evicts them.
	Holding *guidePods `json:"holding,omitempty"`
	// Policy is the spec of the one policy; null: it is deleted.
	Policy *v1alpha1.GPUSharingPolicySpec `json:"policy,omitempty"`
	// Apart is how the policy sets the node apart while the step lasts.
	Apart *apart `json:"apart,omitempty"`
	// Reboots says that the GPUs cannot be reset, so that the node has to be rebooted for the policy.
	Reboots bool `json:"reboots,omitempty"`
	// Refused is the reason for which the policy cannot be honoured, as its status says.
	Refused string `json:"refused,omitempty"`
	// Advertised is what the kubelet then offers, and Labels what the node's labels say.
	Advertised map[string]int64  `json:"advertised,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	// Pods use what is offered.
	Pods *guidePods `json:"pods,omitempty"`
}

// guidePods are pods that ask for one of a resource each.
type guidePods struct {
	Asking  string `json:"asking"`
	Running int    `json:"running"`
	Pending int    `json:"pending"`
	// Visible is how the device begins that each gets.
	Visible string `json:"visible,omitempty"`
	// Pipe is the MPS pipe directory that each gets.
	Pipe string `json:"pipe,omitempty"`
}

func guideSpecs() {
	Describe("Guides that are followed by hand today:", Offset(1), func() {
		files, _ := filepath.Glob("guides/*.yaml") // the pattern is not malformed
		for _, file := range files {
			raw, err := os.ReadFile(file)
			if err != nil {
				panic(err) // the specs cannot be told without it
			}
			g := guide{}
			if err := yaml.UnmarshalStrict(raw, &g); err != nil {
				panic(fmt.Errorf("%s: %w", file, err))
			}
			Describe(g.Guide, Ordered, func() {
				BeforeAll(func(ctx SpecContext) { begin(ctx, g.GPUs...) })
				for i, s := range g.Steps {
					name := fmt.Sprintf("%d. %s", i+1, s.ByHand)
					if s.Later != "" {
						PIt(name+" — pending: "+s.Later, func() {})
						continue
					}
					It(name, func(ctx SpecContext) { replay(ctx, s) })
				}
			})
		}
	})
}

// guidePolicy is the one policy of a guide.
const guidePolicy = "guide"

func replay(ctx context.Context, s step) {
	GinkgoHelper()
	switch {
	case s.Pods != nil:
		usePods(ctx, *s.Pods)
		return
	case s.GPUs != nil:
		begin(ctx, s.GPUs...)
	}
	if s.Holding != nil {
		hold(ctx, *s.Holding)
	}
	switch {
	case s.Policy == nil:
		unshare(ctx, s.Advertised)
		return
	case s.Apart != nil:
		setApart(ctx, s)
		return
	case s.Reboots:
		rebootFor(ctx, s)
		return
	}
	before, err := offered(ctx)
	Expect(err).NotTo(HaveOccurred())
	applySpec(ctx, guidePolicy, *s.Policy)
	if s.Refused != "" {
		expectStalled(ctx, guidePolicy, s.Refused, before)
		return
	}
	expectAllocatable(ctx, s.Advertised)
	expectReady(ctx, guidePolicy)
	if s.Holding != nil {
		for i := range s.Holding.Running {
			expectGone(ctx, holderName(i))
		}
	}
	for key, value := range s.Labels {
		Eventually(nodeLabels).WithContext(ctx).Should(HaveKeyWithValue(key, value))
	}
}

func holderName(i int) string { return fmt.Sprintf("holder-%d", i) }

// hold starts pods that hold what a change needs idle.
func hold(ctx context.Context, p guidePods) {
	GinkgoHelper()
	for i := range p.Running {
		startPod(ctx, holderName(i), resourceName(p.Asking), 1)
		expectRunning(ctx, holderName(i))
	}
}

// usePods starts pods that ask for one of a resource each: as many as there are run, and the others wait.
func usePods(ctx context.Context, p guidePods) {
	GinkgoHelper()
	name := func(i int) string { return fmt.Sprintf("guide-%d", i) }
	for i := range p.Running {
		startPod(ctx, name(i), resourceName(p.Asking), 1)
	}
	for i := range p.Running {
		got := expectRunning(ctx, name(i))
		Expect(got.uuid()).To(HavePrefix(p.Visible))
		if p.Pipe != "" {
			Expect(got.PipeDirectory).To(Equal(p.Pipe))
		}
	}
	for i := range p.Pending {
		startPod(ctx, name(p.Running+i), resourceName(p.Asking), 1)
		expectPending(ctx, name(p.Running+i), "Insufficient "+p.Asking)
	}
	stopPods(ctx)
}

// expectStalled waits until a policy's status says for which reason a node cannot honour it, and checks that the node
// offers what it did before. The first policy of all restarts NVIDIA's programs once, whether it can be honoured or not.
func expectStalled(ctx context.Context, name, reason string, before map[string]int64) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		p := &v1alpha1.GPUSharingPolicy{}
		g.Expect(kube.Get(ctx, client.ObjectKey{Name: name}, p)).To(Succeed())
		g.Expect(explain(ctx, p)).To(And(ContainSubstring(reason), ContainSubstring(nodeName)))
	}).WithContext(ctx).Should(Succeed())
	Eventually(wired).WithContext(ctx).Should(Succeed())
	Eventually(func(g Gomega) { g.Consistently(offered, "2s").WithContext(ctx).Should(Equal(before)) }).WithContext(ctx).Should(Succeed())
}
