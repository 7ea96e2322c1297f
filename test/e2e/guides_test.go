// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

func guideSpecs() {
	all, err := guides.All()
	if err != nil {
		panic(err) // without it no spec can be named
	}
	for _, g := range all {
		Describe(fmt.Sprintf("The guide %q, which is followed by hand today:", g.Title), Ordered, Offset(1), func() {
			BeforeAll(func(ctx SpecContext) { begin(ctx, g.GPUs...) })
			for _, e := range g.Entries {
				if e.Replayed() {
					It(fmt.Sprintf("line %s: %s", e.Lines, e.Guide), func(ctx SpecContext) { replay(ctx, e.Replay) })
				}
			}
		})
	}
}

// guidePolicy is the one policy of a guide.
const guidePolicy = "guide"

func replay(ctx context.Context, s guides.Replay) {
	GinkgoHelper()
	switch {
	case s.Pods != nil:
		usePods(ctx, *s.Pods)
		return
	case s.Limits != nil:
		askLimits(ctx, *s.Limits)
		return
	case len(s.Plan) > 0:
		preview(ctx, s)
		return
	case s.GPUs != nil:
		begin(ctx, s.GPUs...)
	}
	if s.Holding != nil {
		hold(ctx, *s.Holding)
	}
	switch {
	case s.Deleted:
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
	if s.Programs {
		expectOperandsReady(ctx)
	}
}

// preview has the plugin print what a policy would do, or its deletion, and checks that nothing is done.
func preview(ctx context.Context, s guides.Replay) {
	GinkgoHelper()
	var before map[string]int64
	Eventually(func(g Gomega) { // the device plugin may be between two registrations with the kubelet
		var err error
		before, err = offered(ctx)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(before).NotTo(BeEmpty())
	}).WithContext(ctx).Should(Succeed())
	if s.Holding != nil {
		hold(ctx, *s.Holding)
	}
	asked, input := []string{"gpusharing", "plan", "--delete", guidePolicy}, ""
	if s.Policy != nil {
		spec, err := json.Marshal(s.Policy)
		Expect(err).NotTo(HaveOccurred())
		asked, input = []string{"gpusharing", "plan", "-f", "-"}, manifest(guidePolicy, string(spec))
	}
	Eventually(func(g Gomega) {
		printed := kubectl(ctx, input, asked...)
		for _, line := range s.Plan {
			g.Expect(printed).To(ContainSubstring(line))
		}
	}).WithContext(ctx).Should(Succeed())
	Expect(offered(ctx)).To(Equal(before))
	stopPods(ctx)
}

func holderName(i int) string { return fmt.Sprintf("holder-%d", i) }

// hold starts pods that hold what a change needs idle.
func hold(ctx context.Context, p guides.Pods) {
	GinkgoHelper()
	for i := range p.Running {
		startPod(ctx, holderName(i), resourceName(p.Asking), 1)
		expectRunning(ctx, holderName(i))
	}
}

// usePods starts pods that ask for a resource: as many as there are run, and the others wait.
func usePods(ctx context.Context, p guides.Pods) {
	GinkgoHelper()
	name, each := func(i int) string { return fmt.Sprintf("guide-%d", i) }, max(p.Each, 1)
	for i := range p.Running {
		startPod(ctx, name(i), resourceName(p.Asking), each)
	}
	for i := range p.Running {
		got := expectRunning(ctx, name(i))
		Expect(got.uuids()).To(And(Not(BeEmpty()), HaveEach(HavePrefix(p.Visible))))
		if p.Pipe != "" {
			Expect(got.PipeDirectory).To(Equal(p.Pipe))
		}
	}
	for i := range p.Pending {
		startPod(ctx, name(p.Running+i), resourceName(p.Asking), each)
		expectPending(ctx, name(p.Running+i), "Insufficient "+p.Asking)
	}
	stopPods(ctx)
}

// expectStalled waits until a policy's status says for which reason a node cannot honour it, and checks that the node
// offers what it did before. The first policy of all restarts NVIDIA's programs once, whether it can be honoured or
// not.
func expectStalled(ctx context.Context, name, reason string, before map[string]int64) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		p := &v1alpha1.GPUSharingPolicy{}
		g.Expect(kube.Get(ctx, client.ObjectKey{Name: name}, p)).To(Succeed())
		g.Expect(explain(ctx, p)).To(And(ContainSubstring(reason), ContainSubstring(nodeName)))
	}).WithContext(ctx).Should(Succeed())
	Eventually(configuredForUs).WithContext(ctx).Should(Succeed())
	Eventually(func(g Gomega) { g.Consistently(offered, "2s").WithContext(ctx).Should(Equal(before)) }).WithContext(ctx).Should(Succeed())
}
