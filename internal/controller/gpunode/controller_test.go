// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpunode_test

import (
	"context"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpunode"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

var gpuPresent = map[string]string{"nvidia.com/gpu.present": "true"}

// pass is one reconciliation of a node, with the number of writes it made.
type pass struct {
	client client.WithWatch
	writes int
}

func (p *pass) reconcile(t *testing.T, name string) {
	t.Helper()
	selector, err := labels.Parse(gpunode.DefaultSelector)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	p.writes = 0
	counting := interceptor.NewClient(p.client, interceptor.Funcs{
		Apply: func(ctx context.Context, c client.WithWatch, o runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			p.writes++
			return c.Apply(ctx, o, opts...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			p.writes++
			return c.Delete(ctx, o, opts...)
		},
	})
	_, err = gpunode.New(counting, selector).Reconcile(t.Context(), request(name))
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

	t.Run("is created for a node with GPUs, owned by it, and then left alone", func(t *testing.T) {
		g, p := NewWithT(t), &pass{client: c}
		node := newNode(t, c, "a100", gpuPresent)
		p.reconcile(t, node.Name)
		g.Expect(p.writes).To(Equal(1))
		g.Expect(get(t, c, node.Name).OwnerReferences).To(ConsistOf(metav1.OwnerReference{
			APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID,
		}), "neither controller nor blockOwnerDeletion, which would need rights on nodes/finalizers")
		p.reconcile(t, node.Name)
		g.Expect(p.writes).To(BeZero())
	})

	t.Run("is not created for a node without GPUs, nor for one that does not exist", func(t *testing.T) {
		g, p := NewWithT(t), &pass{client: c}
		newNode(t, c, "plain", nil)
		p.reconcile(t, "plain")
		p.reconcile(t, "missing")
		g.Expect(exists(t, c, "plain")).To(BeFalse())
		g.Expect(exists(t, c, "missing")).To(BeFalse())
	})

	t.Run("keeps the spec that the rollout applied, also when its owner has to be put back", func(t *testing.T) {
		g, p := NewWithT(t), &pass{client: c}
		newNode(t, c, "h100", gpuPresent)
		p.reconcile(t, "h100")
		spec := applyv1alpha1.GPUNode("h100").WithSpec(applyv1alpha1.GPUNodeSpec().WithPolicy("research"))
		g.Expect(c.Apply(t.Context(), spec, client.FieldOwner("gpusharing-controller"))).To(Succeed())
		noOwner := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"ownerReferences":null}}`))
		g.Expect(c.Patch(t.Context(), get(t, c, "h100"), noOwner)).To(Succeed())

		p.reconcile(t, "h100")
		g.Expect(get(t, c, "h100").Spec.Policy).To(Equal("research"))
		g.Expect(get(t, c, "h100").OwnerReferences).To(HaveLen(1))
	})

	t.Run("stays when the node loses the label, for it records how to put the node back", func(t *testing.T) {
		g, p := NewWithT(t), &pass{client: c}
		node := newNode(t, c, "relabelled", gpuPresent)
		p.reconcile(t, node.Name)
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"nvidia.com/gpu.present":"false"}}}`))
		g.Expect(c.Patch(t.Context(), node, patch)).To(Succeed())
		p.reconcile(t, node.Name)
		g.Expect(exists(t, c, node.Name)).To(BeTrue())
	})

	t.Run("of an earlier node of that name is replaced, with all that it recorded", func(t *testing.T) {
		g, p := NewWithT(t), &pass{client: c}
		first := newNode(t, c, "reborn", gpuPresent)
		p.reconcile(t, first.Name)
		old := get(t, c, "reborn")
		g.Expect(c.Delete(t.Context(), first)).To(Succeed())
		second := newNode(t, c, "reborn", gpuPresent)

		p.reconcile(t, "reborn")
		g.Expect(exists(t, c, "reborn")).To(BeFalse())
		p.reconcile(t, "reborn")
		g.Expect(get(t, c, "reborn").UID).NotTo(Equal(old.UID))
		g.Expect(get(t, c, "reborn").OwnerReferences[0].UID).To(Equal(second.UID))
	})
}
