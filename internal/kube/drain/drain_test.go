// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package drain_test

import (
	"context"
	"errors"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/internal/kube/drain"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

func controlledBy(kind string) []metav1.OwnerReference {
	yes := true
	return []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: "owner", UID: "1", Controller: &yes}}
}

// create creates a pod that a node runs, so that it goes only when the node says so.
func create(t *testing.T, c client.Client, name string, change func(*corev1.Pod)) *corev1.Pod {
	t.Helper()
	seconds := int64(30)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			NodeName: "node", TerminationGracePeriodSeconds: &seconds,
			Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}},
		},
	}
	if change != nil {
		change(pod)
	}
	g := NewWithT(t)
	g.Expect(c.Create(t.Context(), pod)).To(Succeed())
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	g.Expect(c.Status().Update(t.Context(), pod)).To(Succeed())
	return pod
}

// budget creates a PodDisruptionBudget, as its controller leaves it unless it has not seen it yet.
func budget(t *testing.T, c client.Client, app string, seen bool) {
	t.Helper()
	g := NewWithT(t)
	all := intstr.FromString("100%")
	b := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: app + "-budget"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
		},
	}
	g.Expect(c.Create(t.Context(), b)).To(Succeed())
	if seen {
		b.Status = policyv1.PodDisruptionBudgetStatus{
			ObservedGeneration: b.Generation, ExpectedPods: 1, DesiredHealthy: 1, CurrentHealthy: 1,
		}
		g.Expect(c.Status().Update(t.Context(), b)).To(Succeed())
	}
}

func TestEvict(t *testing.T) {
	cluster := env.Start(t)
	config := rest.CopyConfig(cluster.Config)
	config.Wrap(drain.AtOnce)
	c, err := client.NewWithWatch(config, client.Options{Scheme: cluster.Scheme})
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for name, tc := range map[string]struct {
		change  func(*corev1.Pod)
		before  func(*testing.T, *corev1.Pod) // after the pod was created
		uid     types.UID                     // asked for; empty: the pod's own
		outcome drain.Outcome
		message string
		stays   bool
	}{
		"a pod is told to go": {outcome: drain.Evicting},
		"a pod of a ReplicaSet too": {
			change:  func(p *corev1.Pod) { p.OwnerReferences = controlledBy("ReplicaSet") },
			outcome: drain.Evicting,
		},
		"a pod that does not exist is gone": {
			before: func(t *testing.T, p *corev1.Pod) {
				t.Helper()
				NewWithT(t).Expect(c.Delete(t.Context(), p, client.GracePeriodSeconds(0))).To(Succeed())
			},
			outcome: drain.Gone,
		},
		"a pod that is on its way out is left alone": {
			before: func(t *testing.T, p *corev1.Pod) {
				t.Helper()
				NewWithT(t).Expect(c.Delete(t.Context(), p)).To(Succeed())
			},
			outcome: drain.Gone,
		},
		"another pod of that name is left alone": {uid: "another", outcome: drain.Gone, stays: true},
		"a pod of a DaemonSet is never evicted": {
			change:  func(p *corev1.Pod) { p.OwnerReferences = controlledBy("DaemonSet") },
			outcome: drain.Protected, stays: true,
			message: "belongs to DaemonSet owner, which would start it again at once",
		},
		"a pod whose owner is a DaemonSet of another group is evicted": {
			change: func(p *corev1.Pod) {
				p.OwnerReferences = controlledBy("DaemonSet")
				p.OwnerReferences[0].APIVersion = "example.com/v1"
			},
			outcome: drain.Evicting,
		},
		"the mirror of a static pod is never evicted": {
			change:  func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "hash"} },
			outcome: drain.Protected, stays: true,
			message: "mirrors a static pod, which only its node can stop",
		},
		"a PodDisruptionBudget holds": {
			before:  func(t *testing.T, p *corev1.Pod) { t.Helper(); budget(t, c, p.Name, true) },
			outcome: drain.Blocked, stays: true,
			message: "is not evicted: " +
				"The disruption budget pod-budget needs 1 healthy pods and has 1 currently",
		},
		"a PodDisruptionBudget that its controller has not seen is named at once": {
			before:  func(t *testing.T, p *corev1.Pod) { t.Helper(); budget(t, c, p.Name, false) },
			outcome: drain.Blocked, stays: true,
			message: "is not evicted: " +
				"The disruption budget pod-budget is still being processed by the server.",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			pod := create(t, c, "pod", tc.change)
			t.Cleanup(func() { clean(t, c) })
			if tc.before != nil {
				tc.before(t, pod)
			}
			uid := pod.UID
			if tc.uid != "" {
				uid = tc.uid
			}
			result, err := drain.Evict(t.Context(), c, client.ObjectKeyFromObject(pod), uid)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(result.Outcome).To(Equal(tc.outcome))
			if tc.message == "" {
				g.Expect(result.Message).To(BeEmpty())
			} else {
				g.Expect(result.Message).To(Equal("pod default/pod " + tc.message))
			}
			err = c.Get(t.Context(), client.ObjectKeyFromObject(pod), pod)
			g.Expect(client.IgnoreNotFound(err)).To(Succeed())
			g.Expect(err == nil && pod.DeletionTimestamp == nil).To(Equal(tc.stays))
		})
	}

	t.Run("an API server that fails is an error", func(t *testing.T) {
		g, pod := NewWithT(t), create(t, c, "pod", nil)
		t.Cleanup(func() { clean(t, c) })
		broken := interceptor.NewClient(c, interceptor.Funcs{SubResourceCreate: func(
			context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption,
		) error {
			return apierrors.NewInternalError(errors.New("two budgets"))
		}})
		_, err := drain.Evict(t.Context(), broken, client.ObjectKeyFromObject(pod), pod.UID)
		g.Expect(err).To(MatchError(ContainSubstring("evicting pod default/pod: Internal error occurred: two budgets")))
	})
}

func clean(t *testing.T, c client.Client) {
	t.Helper()
	g, ctx := NewWithT(t), context.Background()
	g.Expect(c.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace("default"), client.GracePeriodSeconds(0))).To(Succeed())
	g.Expect(c.DeleteAllOf(ctx, &policyv1.PodDisruptionBudget{}, client.InNamespace("default"))).To(Succeed())
}
