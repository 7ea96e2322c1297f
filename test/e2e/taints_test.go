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
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

// How a node ceases to be set apart.
const (
	endsWithTaints = "with the policy's taints"
	endsWithPolicy = "with the policy"
)

// setApart applies a policy without its taints, then with them, and ends that.
func setApart(ctx context.Context, s guides.Replay) {
	GinkgoHelper()
	taint, plain := parseTaint(s.Apart.Taint), *s.Policy
	plain.Taints = nil
	applySpec(ctx, guidePolicy, plain)
	expectAllocatable(ctx, s.Advertised)
	expectReady(ctx, guidePolicy)
	before, err := tolerance(ctx)
	Expect(err).NotTo(HaveOccurred())

	expectTaintedOnlyWhenSafe(ctx, s, taint)
	Eventually(tolerance).WithContext(ctx).Should(And(
		HaveField("Taints", ContainElement(taint)), HaveField("ClusterPolicy", Not(Equal(before.ClusterPolicy)))))
	expectReady(ctx, guidePolicy)

	// NVIDIA's programs run, and one that ends comes back to a node that takes no other pods.
	expectPluginBack(ctx)
	expectAllocatable(ctx, s.Advertised)

	// So do users' pods, if they tolerate the taint.
	startPod(ctx, "intolerant", resourceName(s.Apart.Asking), 1)
	expectPending(ctx, "intolerant", "untolerated taint")
	startPod(ctx, "tolerant", resourceName(s.Apart.Asking), 1, tolerating(taint))
	expectRunning(ctx, "tolerant")
	stopPods(ctx)

	switch s.Apart.Ends {
	case endsWithTaints:
		applySpec(ctx, guidePolicy, plain)
	case endsWithPolicy:
		unshare(ctx, map[string]int64{"nvidia.com/gpu": int64(len(fitted))})
	default:
		Fail(fmt.Sprintf("nobody knows how it ends %q", s.Apart.Ends))
	}
	Eventually(tolerance).WithContext(ctx).Should(HaveField("Taints", Equal(before.Taints)))
	installNFD(ctx, gpuoperator.Namespace)
	Eventually(tolerance).WithContext(ctx).Should(Equal(before))
	expectOperandsReady(ctx)
	Eventually(offered).WithContext(ctx).ShouldNot(BeEmpty())
}

// tolerated is what a policy's taints change.
type tolerated struct {
	Taints        []corev1.Taint
	Annotation    string // of the node: which taints are ours
	ClusterPolicy any    // its spec.daemonsets
	Templates     map[string][]corev1.Toleration
}

func tolerance(ctx context.Context) (tolerated, error) {
	f, err := look(ctx)
	if err != nil {
		return tolerated{}, err
	}
	spec, _ := f.ClusterPolicy.(map[string]any) // the CRD holds it to that
	t := tolerated{
		Taints: f.Taints, Annotation: f.Annotations[v1alpha1.AnnotationTaints], ClusterPolicy: spec["daemonsets"],
		Templates: map[string][]corev1.Toleration{},
	}
	for name, template := range f.Templates {
		t.Templates[name] = template.Spec.Tolerations
	}
	return t, nil
}

// expectTaintedOnlyWhenSafe applies the policy while a pod holds a GPU. Then the tolerations wait, since NVIDIA's
// container toolkit would restart beside the device plugin, and the policy says what to add by hand. It goes on by
// itself once the pod has ended.
func expectTaintedOnlyWhenSafe(ctx context.Context, s guides.Replay, taint corev1.Taint) {
	GinkgoHelper()
	startPod(ctx, holderName(0), resourceName(s.Apart.Asking), 1)
	expectRunning(ctx, holderName(0))
	applySpec(ctx, guidePolicy, *s.Policy)
	Eventually(tainted).WithContext(ctx).WithArguments(guidePolicy).Should(And(
		HavePrefix(v1alpha1.ReasonTolerationMissing), ContainSubstring("%s/%s", users, holderName(0)),
		ContainSubstring("add {key: %s, operator: Exists, effect: %s} to daemonsets.tolerations of the ClusterPolicy", taint.Key, taint.Effect)))
	Expect(tolerance(ctx)).To(HaveField("Taints", Not(ContainElement(taint))))
	stopPod(ctx, holderName(0))
	// What is not NVIDIA's operator's to change, the administrator changes.
	Eventually(tainted).WithContext(ctx).WithArguments(guidePolicy).Should(And(
		HavePrefix(v1alpha1.ReasonTolerationsChanging), ContainSubstring("(Helm: node-feature-discovery.worker.tolerations)")))
	installNFD(ctx, gpuoperator.Namespace, `worker.tolerations=[{"operator":"Exists"}]`)
	Eventually(tainted).WithContext(ctx).WithArguments(guidePolicy).Should(HavePrefix(v1alpha1.ReasonTaintsPresent + ":"))
	expectOperandsReady(ctx)
	expectAllocatable(ctx, s.Advertised)
}

// parseTaint reads a taint as kubectl writes it.
func parseTaint(written string) corev1.Taint {
	rest, effect, _ := strings.Cut(written, ":")
	key, value, _ := strings.Cut(rest, "=")
	return corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)}
}

// tolerating lets a pod go where a taint is.
func tolerating(t corev1.Taint) func(*corev1.PodSpec) {
	return func(spec *corev1.PodSpec) {
		spec.Tolerations = append(spec.Tolerations, corev1.Toleration{Key: t.Key, Value: t.Value, Effect: t.Effect})
	}
}

// tainted is reason and message of a policy's condition Tainted.
func tainted(ctx context.Context, policy string) (string, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	if err := kube.Get(ctx, client.ObjectKey{Name: policy}, p); err != nil {
		return "", err
	}
	c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionTainted)
	if c == nil || c.ObservedGeneration != p.Generation {
		return "", fmt.Errorf("generation %d of policy %s has no condition yet: %s", p.Generation, policy, explain(ctx, p))
	}
	return c.Reason + ": " + c.Message, nil
}

// expectPluginBack deletes the pod of NVIDIA's device plugin and waits until another runs.
func expectPluginBack(ctx context.Context) {
	GinkgoHelper()
	pods := &corev1.PodList{}
	Expect(kube.List(ctx, pods, client.InNamespace(gpuoperator.Namespace), client.MatchingLabels{"app": gpuoperator.PluginName})).To(Succeed())
	var old []string
	for i := range pods.Items {
		old = append(old, pods.Items[i].Name)
		Expect(client.IgnoreNotFound(kube.Delete(ctx, &pods.Items[i]))).To(Succeed())
	}
	Expect(old).NotTo(BeEmpty())
	Eventually(func() ([]string, error) { return notReady(ctx, gpuoperator.Namespace, old...) }).WithContext(ctx).Should(BeEmpty())
}

// expectOperandsReady waits until all of NVIDIA's programs run.
func expectOperandsReady(ctx context.Context) {
	GinkgoHelper()
	Eventually(func() ([]string, error) { return notReady(ctx, gpuoperator.Namespace) }).WithContext(ctx).Should(BeEmpty())
}
