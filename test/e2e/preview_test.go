// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// paused is a layout of which nothing is done yet.
func paused(instances string) string {
	return strings.Replace(layout(instances), "rollout: {", "rollout: {paused: true, ", 1)
}

// manifest is a policy for all nodes as a file that kubectl reads; spec is YAML on one line.
func manifest(name, spec string) string {
	return fmt.Sprintf("{apiVersion: %s, kind: GPUSharingPolicy, metadata: {name: %s}, spec: {nodeSelector: {}, %s}\n",
		v1alpha1.SchemeGroupVersion, name, strings.TrimPrefix(spec, "{"))
}

// expectPreview waits until the node reports what a policy that is paused would do to it, and what becomes of the only
// blocker.
func expectPreview(ctx context.Context, policy string, pod, handling string) v1alpha1.RolloutStatus {
	GinkgoHelper()
	var found v1alpha1.RolloutStatus
	Eventually(func(g Gomega) {
		p := &v1alpha1.GPUSharingPolicy{}
		g.Expect(kube.Get(ctx, client.ObjectKey{Name: policy}, p)).To(Succeed())
		g.Expect(p.Status.Pending).To(HaveLen(1), "%s", explain(ctx, p))
		pending := p.Status.Pending[0]
		g.Expect(pending.NodeName).To(Equal(nodeName))
		g.Expect(pending.Reason).To(Equal(v1alpha1.ReasonPaused), pending.Message)
		n := &v1alpha1.GPUNode{}
		g.Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)).To(Succeed())
		found = n.Status.Rollout
		g.Expect(found.Steps).NotTo(BeEmpty())
		g.Expect(found.Blockers).To(HaveLen(1))
		g.Expect(found.Blockers[0].Name).To(Equal(pod))
		g.Expect(found.Blockers[0].Handling).To(ContainSubstring(handling))
	}).WithContext(ctx).Should(Succeed())
	return found
}

// affected is what a policy says of the workloads that it leaves without what they ask for; empty: none.
func affected(ctx context.Context, policy string) (string, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	if err := kube.Get(ctx, client.ObjectKey{Name: policy}, p); err != nil {
		return "", err
	}
	if c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionWorkloadsAffected); c != nil && c.Status == "True" {
		return c.Message, nil
	}
	return "", nil
}

// deployed are the states of a Deployment's pods.
func deployed(ctx context.Context, name string) ([]string, error) {
	pods := &corev1.PodList{}
	err := kube.List(ctx, pods, client.InNamespace(users), client.MatchingLabels(named(name)))
	var states []string
	for i := range pods.Items {
		states = append(states, state(&pods.Items[i]))
	}
	return states, err
}

// expectDeployed waits until the one pod of a Deployment runs, and returns its name. A pod that the kubelet refused,
// see expectRunning, stays beside it.
func expectDeployed(ctx context.Context, name string) (pod string) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		pods := &corev1.PodList{}
		g.Expect(kube.List(ctx, pods, client.InNamespace(users), client.MatchingLabels(named(name)))).To(Succeed())
		pod = ""
		for i := range pods.Items {
			if pods.Items[i].Status.Phase == corev1.PodRunning {
				pod = pods.Items[i].Name
			}
		}
		g.Expect(pod).NotTo(BeEmpty())
	}).WithContext(ctx).Should(Succeed())
	return pod
}
