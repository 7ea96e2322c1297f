// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package ssa_test

import (
	"context"
	"errors"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
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

// suite is what the cases share.
type suite struct {
	*testing.T
	Gomega

	owner    ssa.Owner
	other    client.Client // of another controller
	requests *int          // that wrote, through owner
}

func TestApply(t *testing.T) {
	cluster := env.Start(t)
	requests := 0
	owner := ssa.Owner{Client: counting(cluster.Client, &requests), Name: "tester"}
	run := func(name string, test func(s suite)) {
		t.Run(name, func(t *testing.T) {
			requests = 0
			test(suite{T: t, Gomega: NewWithT(t), owner: owner, other: cluster.Client, requests: &requests})
		})
	}
	run("a main resource is applied once, and again only when it differs", mainResource)
	run("a field that another manager changed is taken back", takenBack)
	run("a status is applied once, and its times do not count as a change", status)
	run("a namespaced kind of Kubernetes' own", configMap)
	run("a refusal is an error that names the manager", refused)
}

func mainResource(s suite) {
	want := func(key string) *ac.GPUNodeApplyConfiguration {
		return ac.GPUNode("main").WithLabels(map[string]string{"a": "b"}).WithSpec(ac.GPUNodeSpec().WithConfigName(key).WithDevices(
			ac.DeviceSpec().WithUUID("GPU-1").WithSharing(ac.DeviceSharing().WithMIGMode(v1alpha1.MIGModeDisabled))))
	}
	wrote, err := ssa.Apply(s.Context(), s.owner, &v1alpha1.GPUNode{}, want("one"), ac.ExtractGPUNode)
	s.Expect(wrote, err).To(BeTrue())

	have := s.get("main")
	wrote, err = ssa.Apply(s.Context(), s.owner, have, want("one"), ac.ExtractGPUNode)
	s.Expect(wrote, err).To(BeFalse())
	s.Expect(*s.requests).To(Equal(1), "nothing changed, so nothing is asked of the API server")

	wrote, err = ssa.Apply(s.Context(), s.owner, have, want("two"), ac.ExtractGPUNode)
	s.Expect(wrote, err).To(BeTrue())
	s.Expect(s.get("main").Spec.ConfigName).To(Equal("two"))

	dropped := ac.GPUNode("main").WithSpec(ac.GPUNodeSpec().WithConfigName("two"))
	wrote, err = ssa.Apply(s.Context(), s.owner, s.get("main"), dropped, ac.ExtractGPUNode)
	s.Expect(wrote, err).To(BeTrue())
	s.Expect(s.get("main").Spec.Devices).To(BeEmpty(), "what an apply leaves out, it deletes")
}

func takenBack(s suite) {
	want := func(policy string) *ac.GPUNodeApplyConfiguration {
		return ac.GPUNode("taken").WithSpec(ac.GPUNodeSpec().WithPolicyName(policy))
	}
	_, err := ssa.Apply(s.Context(), s.owner, &v1alpha1.GPUNode{}, want("ours"), ac.ExtractGPUNode)
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.other.Apply(s.Context(), want("theirs"), client.FieldOwner("another-controller"), client.ForceOwnership)).To(Succeed())

	wrote, err := ssa.Apply(s.Context(), s.owner, s.get("taken"), want("ours"), ac.ExtractGPUNode)
	s.Expect(wrote, err).To(BeTrue())
	s.Expect(s.get("taken").Spec.PolicyName).To(Equal("ours"))
}

func status(s suite) {
	s.Expect(s.other.Apply(s.Context(), ac.GPUNode("status"), client.FieldOwner("controller"))).To(Succeed())
	observed := v1alpha1.GPUNodeStatus{
		Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady,
			LastTransitionTime: metav1.NewTime(time.Date(2026, 8, 1, 10, 0, 0, 0, time.FixedZone("", 7200))),
		}},
		Devices: []v1alpha1.DeviceStatus{{
			UUID: "GPU-1", Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
			Holders: []v1alpha1.HolderStatus{{Namespace: "ns", PodName: "pod", ContainerName: "main"}},
		}},
	}
	apply := func() bool {
		configuration, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](observed)
		s.Expect(err).NotTo(HaveOccurred())
		wrote, err := ssa.ApplyStatus(s.Context(), s.owner, s.get("status"), ac.GPUNode("status").WithStatus(configuration), ac.ExtractGPUNodeStatus)
		s.Expect(err).NotTo(HaveOccurred())
		return wrote
	}
	s.Expect(apply()).To(BeTrue())
	s.Expect(apply()).To(BeFalse())
	s.Expect(*s.requests).To(Equal(1))

	observed.Devices[0].Holders = nil
	s.Expect(apply()).To(BeTrue())
	got := s.get("status").Status
	s.Expect(got.Devices).To(Equal(observed.Devices))
}

func configMap(s suite) {
	want := func() *corev1ac.ConfigMapApplyConfiguration {
		return corev1ac.ConfigMap("keys", "default").WithData(map[string]string{"k": "v"})
	}
	_, err := ssa.Apply(s.Context(), s.owner, &corev1.ConfigMap{}, want(), corev1ac.ExtractConfigMap)
	s.Expect(err).NotTo(HaveOccurred())
	have := &corev1.ConfigMap{}
	s.Expect(s.owner.Client.Get(s.Context(), client.ObjectKey{Namespace: "default", Name: "keys"}, have)).To(Succeed())
	wrote, err := ssa.Apply(s.Context(), s.owner, have, want(), corev1ac.ExtractConfigMap)
	s.Expect(wrote, err).To(BeFalse())
	s.Expect(*s.requests).To(Equal(1))
}

func refused(s suite) {
	want := ac.GPUNode("refused").WithSpec(ac.GPUNodeSpec().WithDevices(
		ac.DeviceSpec().WithUUID("GPU-1").WithSharing(ac.DeviceSharing().WithMIGMode("Sometimes"))))
	wrote, err := ssa.Apply(s.Context(), s.owner, &v1alpha1.GPUNode{}, want, ac.ExtractGPUNode)
	s.Expect(wrote).To(BeFalse())
	s.Expect(err).To(MatchError(And(
		ContainSubstring("applying as tester"), ContainSubstring(`Unsupported value: "Sometimes"`))))
}

func TestApplySaysWhatItCouldNotExtract(t *testing.T) {
	g := NewWithT(t)
	extract := func(*v1alpha1.GPUNode, string) (*ac.GPUNodeApplyConfiguration, error) {
		return nil, errors.New("no such type")
	}
	have := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}}
	wrote, err := ssa.Apply(t.Context(), ssa.Owner{Name: "tester"}, have, ac.GPUNode("n"), extract)
	g.Expect(wrote).To(BeFalse())
	g.Expect(err).To(MatchError("extracting what tester applied: no such type"))
}

func (s suite) get(name string) *v1alpha1.GPUNode {
	s.Helper()
	node := &v1alpha1.GPUNode{}
	s.Expect(s.other.Get(s.Context(), client.ObjectKey{Name: name}, node)).To(Succeed())
	return node
}
