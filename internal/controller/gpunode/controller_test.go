// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpunode_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpunode"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

var gpuPresent = map[string]string{"nvidia.com/gpu.present": "true"}

// reconciliation is one of a node, with the number of writes it made.
type reconciliation struct {
	client client.WithWatch
	writes int
	now    time.Time
	same   *gpunode.Controller // that reconciled before; nil: another one does
}

func (r *reconciliation) clock() clock.PassiveClock { return clocktesting.NewFakePassiveClock(r.now) }

func (r *reconciliation) reconcile(t *testing.T, name string) {
	t.Helper()
	selector, err := labels.Parse(cluster.DefaultSelector)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	r.writes = 0
	counting := interceptor.NewClient(r.client, interceptor.Funcs{
		Apply: func(ctx context.Context, c client.WithWatch, o runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			r.writes++
			return c.Apply(ctx, o, opts...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			r.writes++
			return c.Delete(ctx, o, opts...)
		},
	})
	reconciler := r.same
	if reconciler == nil {
		reconciler = gpunode.New(counting, r.client, selector, r.clock())
	}
	_, err = reconciler.Reconcile(t.Context(), request(name))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
}

func request(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
}

func newNode(t *testing.T, c client.Client, name string, nodeLabels map[string]string) *corev1.Node {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: nodeLabels}}
	NewWithT(t).Expect(c.Create(t.Context(), node)).To(Succeed())
	return node
}

func get(t *testing.T, c client.Client, name string) *v1alpha1.GPUNode {
	t.Helper()
	gpuNode := &v1alpha1.GPUNode{}
	NewWithT(t).Expect(c.Get(t.Context(), types.NamespacedName{Name: name}, gpuNode)).To(Succeed())
	return gpuNode
}

func exists(t *testing.T, c client.Client, name string) bool {
	t.Helper()
	err := c.Get(t.Context(), types.NamespacedName{Name: name}, &v1alpha1.GPUNode{})
	NewWithT(t).Expect(client.IgnoreNotFound(err)).To(Succeed())
	return !apierrors.IsNotFound(err)
}

func TestGPUNode(t *testing.T) {
	c := env.Start(t).Client

	t.Run("is created for a node with GPUs, and then left alone", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		node := newNode(t, c, "a100", gpuPresent)
		r.reconcile(t, node.Name)
		g.Expect(r.writes).To(Equal(1))
		g.Expect(get(t, c, node.Name).OwnerReferences).To(BeEmpty(), "the garbage collector must not take the baseline with the node")
		r.reconcile(t, node.Name)
		g.Expect(r.writes).To(BeZero())
	})

	t.Run("is not created for a node without GPUs, nor for one that does not exist", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		newNode(t, c, "plain", nil)
		r.reconcile(t, "plain")
		r.reconcile(t, "missing")
		g.Expect(exists(t, c, "plain")).To(BeFalse())
		g.Expect(exists(t, c, "missing")).To(BeFalse())
	})

	t.Run("keeps the spec that the rollout applied, also when its annotation is restored", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		newNode(t, c, "h100", gpuPresent)
		r.reconcile(t, "h100")
		spec := applyv1alpha1.GPUNode("h100").WithSpec(applyv1alpha1.GPUNodeSpec().WithPolicyName("research"))
		g.Expect(c.Apply(t.Context(), spec, client.FieldOwner("gpusharing-controller"))).To(Succeed())
		none := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":null}}`))
		g.Expect(c.Patch(t.Context(), get(t, c, "h100"), none)).To(Succeed())

		r.reconcile(t, "h100")
		g.Expect(get(t, c, "h100").Spec.PolicyName).To(Equal("research"))
		g.Expect(get(t, c, "h100").Annotations).To(HaveKey(v1alpha1.AnnotationMachine))
	})

	t.Run("gets its annotation back a few times an hour where another controller takes it again and again", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		newNode(t, c, "taken", gpuPresent)
		clk := clocktesting.NewFakePassiveClock(time.Now())
		r.same = gpunode.New(c, c, labels.Everything(), clk)
		written := 0
		for range 240 {
			r.reconcile(t, "taken")
			if machine := get(t, c, "taken").Annotations[v1alpha1.AnnotationMachine]; machine != "" {
				written++
				none := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":null}}`))
				g.Expect(c.Patch(t.Context(), get(t, c, "taken"), none)).To(Succeed())
			}
			clk.SetTime(clk.Now().Add(30 * time.Second))
		}
		g.Expect(written).To(BeNumerically("~", 8, 1), "in two hours")
		clk.SetTime(clk.Now().Add(2 * time.Hour))
		r.reconcile(t, "taken")
		g.Expect(get(t, c, "taken").Annotations).To(HaveKey(v1alpha1.AnnotationMachine))
	})

	t.Run("of a node that is gone is not written again and again either", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		policy := newPolicy(t, c, "gone")
		node := newMachine(t, c, "gone", "six")
		clk := clocktesting.NewFakePassiveClock(time.Now())
		r.same = gpunode.New(c, c, labels.Everything(), clk)
		r.reconcile(t, node.Name)
		changed(t, c, node.Name)
		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		written := 0
		for range 240 {
			r.reconcile(t, "gone")
			if _, orphaned := get(t, c, "gone").Annotations[v1alpha1.AnnotationOrphaned]; orphaned {
				written++
				none := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":null}}`))
				g.Expect(c.Patch(t.Context(), get(t, c, "gone"), none)).To(Succeed())
			}
			clk.SetTime(clk.Now().Add(30 * time.Second))
		}
		g.Expect(written).To(BeNumerically("~", 8, 1), "in two hours")
		g.Expect(c.Delete(t.Context(), policy)).To(Succeed())
		r.reconcile(t, "gone")
		g.Expect(exists(t, c, "gone")).To(BeFalse())
	})

	t.Run("stays when the node loses the label, for it records how to put the node back", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		node := newNode(t, c, "relabelled", gpuPresent)
		r.reconcile(t, node.Name)
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"nvidia.com/gpu.present":"false"}}}`))
		g.Expect(c.Patch(t.Context(), node, patch)).To(Succeed())
		r.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeTrue())
	})

	t.Run("of another machine of that name is replaced, with all that it recorded", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		first := newMachine(t, c, "reused", "one")
		r.reconcile(t, first.Name)
		changed(t, c, "reused")
		old := get(t, c, "reused")
		g.Expect(c.Delete(t.Context(), first)).To(Succeed())
		newMachine(t, c, "reused", "two")

		r.reconcile(t, "reused")
		g.Expect(exists(t, c, "reused")).To(BeFalse())
		r.reconcile(t, "reused")
		g.Expect(get(t, c, "reused").UID).NotTo(Equal(old.UID))
		g.Expect(get(t, c, "reused").Spec.Baseline).To(BeNil())
	})

	t.Run("of another machine is replaced though its node was gone before, and the label of the new one comes late", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c, now: time.Now()}
		policy := newPolicy(t, c, "late")
		first := newMachine(t, c, "late", "one")
		r.reconcile(t, first.Name)
		changed(t, c, "late")
		g.Expect(c.Delete(t.Context(), first)).To(Succeed())
		r.reconcile(t, "late")
		g.Expect(get(t, c, "late").Annotations).To(HaveKey(v1alpha1.AnnotationOrphaned))

		second := newNode(t, c, "late", nil)
		second.Status.NodeInfo.SystemUUID = "two"
		g.Expect(c.Status().Update(t.Context(), second)).To(Succeed())
		r.reconcile(t, "late")
		second.Labels = gpuPresent
		g.Expect(c.Update(t.Context(), second)).To(Succeed())
		r.reconcile(t, "late")
		r.reconcile(t, "late")
		g.Expect(get(t, c, "late").Spec.Baseline).To(BeNil(), "it is the baseline of the first machine")
		g.Expect(c.Delete(t.Context(), policy)).To(Succeed())
	})

	t.Run("stays while its machine registers again, for a day", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c, now: time.Now()}
		policy := newPolicy(t, c, "research")
		node := newMachine(t, c, "reborn", "three")
		r.reconcile(t, node.Name)
		changed(t, c, "reborn")
		old := get(t, c, "reborn")
		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		r.reconcile(t, "reborn")
		r.now = r.now.Add(23 * time.Hour)
		r.reconcile(t, "reborn")
		g.Expect(exists(t, c, "reborn")).To(BeTrue())

		node = newMachine(t, c, "reborn", "three")
		r.reconcile(t, "reborn")
		g.Expect(get(t, c, "reborn").UID).To(Equal(old.UID))
		g.Expect(get(t, c, "reborn").Spec).To(Equal(old.Spec))
		g.Expect(get(t, c, "reborn").Annotations).NotTo(HaveKey(v1alpha1.AnnotationOrphaned))

		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		r.reconcile(t, "reborn")
		r.now = r.now.Add(24 * time.Hour)
		r.reconcile(t, "reborn")
		g.Expect(exists(t, c, "reborn")).To(BeFalse())

		node = newMachine(t, c, "reborn", "three")
		r.reconcile(t, node.Name)
		changed(t, c, "reborn")
		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		r.reconcile(t, "reborn")
		g.Expect(c.Delete(t.Context(), policy)).To(Succeed())
		r.reconcile(t, "reborn")
		g.Expect(exists(t, c, "reborn")).To(BeFalse(), "no policy is left, and removing the operator must not wait for a machine that is gone")
	})

	t.Run("stays while its machine is registered by hand, until the kubelet tells which one it is", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		node := newMachine(t, c, "byhand", "eight")
		r.reconcile(t, node.Name)
		changed(t, c, node.Name)
		old := get(t, c, node.Name)
		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		node = newNode(t, c, "byhand", nil) // as https://kubernetes.io/docs/concepts/architecture/nodes/#manual-node-administration says
		r.reconcile(t, node.Name)
		g.Expect(get(t, c, node.Name).UID).To(Equal(old.UID))
		node.Status.NodeInfo.SystemUUID, node.Status.NodeInfo.KubeletVersion = "eight", "v1.37.1"
		g.Expect(c.Status().Update(t.Context(), node)).To(Succeed())
		r.reconcile(t, node.Name)
		g.Expect(get(t, c, node.Name).Spec).To(Equal(old.Spec))

		node.Status.NodeInfo.SystemUUID = "" // a kubelet that tells none
		g.Expect(c.Status().Update(t.Context(), node)).To(Succeed())
		r.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeFalse())
	})

	t.Run("of a backup forgets that its node was gone, and a note from the future counts as none", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c, now: time.Now()}
		policy := newPolicy(t, c, "backup")
		node := newMachine(t, c, "backup", "seven")
		r.reconcile(t, node.Name)
		changed(t, c, node.Name)
		note := func(at time.Time) {
			text := fmt.Sprintf(`{"metadata":{"annotations":{"gpusharing.io/orphaned":%q}}}`, at.UTC().Format(time.RFC3339))
			g.Expect(c.Patch(t.Context(), get(t, c, node.Name), client.RawPatch(types.MergePatchType, []byte(text)))).To(Succeed())
		}
		note(r.now.Add(-48 * time.Hour))
		r.reconcile(t, node.Name)
		g.Expect(get(t, c, node.Name).Annotations).NotTo(HaveKey(v1alpha1.AnnotationOrphaned))
		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		r.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeTrue(), "it is gone just now")

		note(r.now.Add(400 * 24 * time.Hour))
		r.reconcile(t, node.Name)
		r.now = r.now.Add(25 * time.Hour)
		r.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeFalse())
		g.Expect(c.Delete(t.Context(), policy)).To(Succeed())
	})

	t.Run("of a node that is gone stays while the policies may have gone with their kind", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		node := newMachine(t, c, "kept", "five")
		r.reconcile(t, node.Name)
		changed(t, c, node.Name)
		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		terminating := interceptor.NewClient(c, interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				err := c.Get(ctx, key, o, opts...)
				o.SetDeletionTimestamp(new(metav1.Now()))
				return err
			},
		})
		_, err := gpunode.New(c, terminating, labels.Everything(), r.clock()).Reconcile(t.Context(), request(node.Name))
		g.Expect(err).To(MatchError(pluginconfig.ErrKindsGone))
		g.Expect(exists(t, c, node.Name)).To(BeTrue())
		r.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeFalse())
	})

	t.Run("is created again for a node that lost its label, if the node has the copy of a baseline", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		node := newNode(t, c, "unselected", nil)
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"gpusharing.io/baseline":"{}"}}}`))
		g.Expect(c.Patch(t.Context(), node, patch)).To(Succeed())
		r.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeTrue())
	})

	t.Run("goes with its node if there is nothing to restore", func(t *testing.T) {
		g, r := NewWithT(t), &reconciliation{client: c}
		node := newMachine(t, c, "untouched", "four")
		r.reconcile(t, node.Name)
		g.Expect(c.Delete(t.Context(), node)).To(Succeed())
		r.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeFalse())
	})
}

func newPolicy(t *testing.T, c client.Client, name string) *v1alpha1.GPUSharingPolicy {
	t.Helper()
	p := &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.GPUSharingPolicySpec{
		NodeSelector: &v1alpha1.NodeSelector{}, Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive},
	}}
	NewWithT(t).Expect(c.Create(t.Context(), p)).To(Succeed())
	return p
}

// newMachine registers a node as a kubelet does, which reports the UUID of the machine.
func newMachine(t *testing.T, c client.Client, name, uuid string) *corev1.Node {
	t.Helper()
	node := newNode(t, c, name, gpuPresent)
	node.Status.NodeInfo.SystemUUID = uuid
	NewWithT(t).Expect(c.Status().Update(t.Context(), node)).To(Succeed())
	return node
}

// changed records a baseline, as the rollout does when it changes a node.
func changed(t *testing.T, c client.Client, name string) {
	t.Helper()
	labels := map[string]string{v1alpha1.LabelConfig: "by-hand"}
	spec := applyv1alpha1.GPUNodeSpec().WithBaseline(applyv1alpha1.Baseline().WithLabels(labels))
	want := applyv1alpha1.GPUNode(name).WithSpec(spec)
	NewWithT(t).Expect(c.Apply(t.Context(), want, client.FieldOwner("gpusharing-controller"))).To(Succeed())
}
