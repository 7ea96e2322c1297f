// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package ssa_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/ssa"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// counting is a client that counts the applies that reach it.
func counting(c client.WithWatch, requests *int) client.Client {
	return interceptor.NewClient(c, interceptor.Funcs{
		Apply: func(ctx context.Context, c client.WithWatch, o runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			*requests++
			return c.Apply(ctx, o, opts...)
		},
		SubResourceApply: func(
			ctx context.Context, c client.Client, sub string, o runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption,
		) error {
			*requests++
			return c.SubResource(sub).Apply(ctx, o, opts...)
		},
	})
}

func TestApply(t *testing.T) {
	cluster := env.Start(t)
	requests := 0
	owner := ssa.Owner{Client: counting(cluster.Client, &requests), Name: "tester"}
	t.Run("a main resource is applied once, and again only when it differs", func(t *testing.T) { mainResource(t, owner, &requests) })
	t.Run("a field that another manager changed is taken back", func(t *testing.T) { takenBack(t, owner, cluster.Client) })
	t.Run("a status is applied once, and its times do not count as a change", func(t *testing.T) { status(t, owner, &requests) })
	t.Run("a namespaced kind of Kubernetes' own", func(t *testing.T) { configMap(t, owner, &requests) })
	t.Run("a refusal is an error that names the manager", func(t *testing.T) { refused(t, owner) })
}

func mainResource(t *testing.T, owner ssa.Owner, requests *int) {
	g, ctx := gomega.NewWithT(t), t.Context()
	want := func(key string) *ac.GPUNodeApplyConfiguration {
		return ac.GPUNode("main").WithLabels(map[string]string{"a": "b"}).WithSpec(ac.GPUNodeSpec().WithConfigKey(key).WithDevices(
			ac.DeviceSpec().WithUUID("GPU-1").WithSharing(ac.DeviceSharing().WithMIGMode(v1alpha1.MIGModeDisabled))))
	}
	*requests = 0
	wrote, err := ssa.Apply(ctx, owner, &v1alpha1.GPUNode{}, want("one"), ac.ExtractGPUNode)
	g.Expect(wrote, err).To(gomega.BeTrue())

	have := get(t, owner.Client, "main")
	wrote, err = ssa.Apply(ctx, owner, have, want("one"), ac.ExtractGPUNode)
	g.Expect(wrote, err).To(gomega.BeFalse())
	g.Expect(*requests).To(gomega.Equal(1), "nothing changed, so nothing is asked of the API server")

	wrote, err = ssa.Apply(ctx, owner, have, want("two"), ac.ExtractGPUNode)
	g.Expect(wrote, err).To(gomega.BeTrue())
	g.Expect(get(t, owner.Client, "main").Spec.ConfigKey).To(gomega.Equal("two"))

	dropped := ac.GPUNode("main").WithSpec(ac.GPUNodeSpec().WithConfigKey("two"))
	wrote, err = ssa.Apply(ctx, owner, get(t, owner.Client, "main"), dropped, ac.ExtractGPUNode)
	g.Expect(wrote, err).To(gomega.BeTrue())
	g.Expect(get(t, owner.Client, "main").Spec.Devices).To(gomega.BeEmpty(), "what an apply leaves out, it deletes")
}

func takenBack(t *testing.T, owner ssa.Owner, other client.Client) {
	g, ctx := gomega.NewWithT(t), t.Context()
	want := func(policy string) *ac.GPUNodeApplyConfiguration {
		return ac.GPUNode("taken").WithSpec(ac.GPUNodeSpec().WithPolicy(policy))
	}
	_, err := ssa.Apply(ctx, owner, &v1alpha1.GPUNode{}, want("ours"), ac.ExtractGPUNode)
	g.Expect(err).NotTo(gomega.HaveOccurred())
	g.Expect(other.Apply(ctx, want("theirs"), client.FieldOwner("somebody"), client.ForceOwnership)).To(gomega.Succeed())

	wrote, err := ssa.Apply(ctx, owner, get(t, other, "taken"), want("ours"), ac.ExtractGPUNode)
	g.Expect(wrote, err).To(gomega.BeTrue())
	g.Expect(get(t, other, "taken").Spec.Policy).To(gomega.Equal("ours"))
}

func status(t *testing.T, owner ssa.Owner, requests *int) {
	g, ctx := gomega.NewWithT(t), t.Context()
	g.Expect(owner.Client.Apply(ctx, ac.GPUNode("status"), client.FieldOwner("controller"))).To(gomega.Succeed())
	observed := v1alpha1.GPUNodeStatus{
		Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady,
			LastTransitionTime: metav1.NewTime(time.Date(2026, 8, 1, 10, 0, 0, 0, time.FixedZone("", 7200))),
		}},
		Devices: []v1alpha1.DeviceStatus{{
			UUID: "GPU-1", Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
			Holders: []v1alpha1.HolderStatus{{Namespace: "ns", Pod: "pod", Container: "main"}},
		}},
	}
	apply := func() bool {
		configuration, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](observed)
		g.Expect(err).NotTo(gomega.HaveOccurred())
		wrote, err := ssa.ApplyStatus(ctx, owner, get(t, owner.Client, "status"), ac.GPUNode("status").WithStatus(configuration), ac.ExtractGPUNodeStatus)
		g.Expect(err).NotTo(gomega.HaveOccurred())
		return wrote
	}
	*requests = 0
	g.Expect(apply()).To(gomega.BeTrue())
	g.Expect(apply()).To(gomega.BeFalse())
	g.Expect(*requests).To(gomega.Equal(1))

	observed.Devices[0].Holders = nil
	g.Expect(apply()).To(gomega.BeTrue())
	got := get(t, owner.Client, "status").Status
	g.Expect(got.Devices).To(gomega.Equal(observed.Devices))
}

func configMap(t *testing.T, owner ssa.Owner, requests *int) {
	g, ctx := gomega.NewWithT(t), t.Context()
	want := func() *corev1ac.ConfigMapApplyConfiguration {
		return corev1ac.ConfigMap("keys", "default").WithData(map[string]string{"k": "v"})
	}
	*requests = 0
	_, err := ssa.Apply(ctx, owner, &corev1.ConfigMap{}, want(), corev1ac.ExtractConfigMap)
	g.Expect(err).NotTo(gomega.HaveOccurred())
	have := &corev1.ConfigMap{}
	g.Expect(owner.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "keys"}, have)).To(gomega.Succeed())
	wrote, err := ssa.Apply(ctx, owner, have, want(), corev1ac.ExtractConfigMap)
	g.Expect(wrote, err).To(gomega.BeFalse())
	g.Expect(*requests).To(gomega.Equal(1))
}

func refused(t *testing.T, owner ssa.Owner) {
	g := gomega.NewWithT(t)
	want := ac.GPUNode("refused").WithSpec(ac.GPUNodeSpec().WithDevices(
		ac.DeviceSpec().WithUUID("GPU-1").WithSharing(ac.DeviceSharing().WithMIGMode("Sometimes"))))
	wrote, err := ssa.Apply(t.Context(), owner, &v1alpha1.GPUNode{}, want, ac.ExtractGPUNode)
	g.Expect(wrote).To(gomega.BeFalse())
	g.Expect(err).To(gomega.MatchError(gomega.And(
		gomega.ContainSubstring("applying as tester"), gomega.ContainSubstring(`Unsupported value: "Sometimes"`))))
}

func TestApplySaysWhatItCouldNotExtract(t *testing.T) {
	g := gomega.NewWithT(t)
	extract := func(*v1alpha1.GPUNode, string) (*ac.GPUNodeApplyConfiguration, error) {
		return nil, errors.New("no such type")
	}
	have := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}}
	wrote, err := ssa.Apply(t.Context(), ssa.Owner{Name: "tester"}, have, ac.GPUNode("n"), extract)
	g.Expect(wrote).To(gomega.BeFalse())
	g.Expect(err).To(gomega.MatchError("extracting what tester applied: no such type"))
}

func get(t *testing.T, c client.Client, name string) *v1alpha1.GPUNode {
	t.Helper()
	node := &v1alpha1.GPUNode{}
	if err := c.Get(t.Context(), client.ObjectKey{Name: name}, node); err != nil {
		t.Fatal(err)
	}
	return node
}
