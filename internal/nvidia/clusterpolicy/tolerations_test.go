// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterpolicy_test

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

var (
	shared  = corev1.Toleration{Key: "example.com/shared", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	startup = corev1.Toleration{Key: "gpusharing.io/startup", Operator: corev1.TolerationOpExists}
	byThem  = corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
)

func policy(t *testing.T, spec string) *unstructured.Unstructured {
	t.Helper()
	p := &unstructured.Unstructured{}
	NewWithT(t).Expect(yaml.Unmarshal([]byte("metadata: {name: cluster-policy}\nspec: "+spec), &p.Object)).To(Succeed())
	return p
}

// TestTolerationsComeAndGo: whatever the ClusterPolicy says, it says again after ours have come, changed and gone.
func TestTolerationsComeAndGo(t *testing.T) {
	theirs := "{key: team, operator: Equal, value: a, effect: NoSchedule}"
	for name, test := range map[string]struct {
		spec string
		with []corev1.Toleration
	}{
		"DaemonSets without anything":           {"{daemonsets: {}}", []corev1.Toleration{byThem, shared}},
		"DaemonSets without tolerations":        {"{daemonsets: {priorityClassName: high}}", []corev1.Toleration{byThem, shared}},
		"an empty list, which NVIDIA ignores":   {"{daemonsets: {tolerations: []}}", []corev1.Toleration{byThem, shared}},
		"the default, as NVIDIA's chart has it": {"{daemonsets: {tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]}}", []corev1.Toleration{byThem, shared}},
		"the user's own":                        {"{daemonsets: {tolerations: [" + theirs + "]}}", []corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpEqual, Value: "a", Effect: corev1.TaintEffectNoSchedule}, shared}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			before := policy(t, test.spec)
			p, err := clusterpolicy.WithTolerations(before, []corev1.Toleration{shared})
			g.Expect(err).NotTo(HaveOccurred())
			o := clusterpolicy.OperandsOf(p)
			g.Expect(o.Tolerations).To(Equal(test.with))
			g.Expect(o.Ours).To(Equal([]corev1.Toleration{shared}))
			again, err := clusterpolicy.WithTolerations(p, []corev1.Toleration{shared})
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(again).To(Equal(p), "once more changes nothing")

			p, err = clusterpolicy.WithTolerations(p, []corev1.Toleration{startup})
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(clusterpolicy.OperandsOf(p).Tolerations).To(Equal([]corev1.Toleration{test.with[0], startup}))

			p, err = clusterpolicy.WithTolerations(p, nil)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(p.Object["spec"]).To(Equal(before.Object["spec"]))
			g.Expect(p.GetAnnotations()).To(BeEmpty())
		})
	}
}

func TestTheUsersLaterTolerationsStay(t *testing.T) {
	g := NewWithT(t)
	p, err := clusterpolicy.WithTolerations(policy(t, "{daemonsets: {}}"), []corev1.Toleration{shared})
	g.Expect(err).NotTo(HaveOccurred())
	list, _, err := unstructured.NestedSlice(p.Object, "spec", "daemonsets", "tolerations")
	g.Expect(err).NotTo(HaveOccurred())
	list = append(list, map[string]any{"key": "team", "operator": "Exists"})
	g.Expect(unstructured.SetNestedSlice(p.Object, list, "spec", "daemonsets", "tolerations")).To(Succeed())

	p, err = clusterpolicy.WithTolerations(p, nil)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(clusterpolicy.OperandsOf(p).Tolerations).To(Equal([]corev1.Toleration{byThem, {Key: "team", Operator: corev1.TolerationOpExists}}))
}

func TestTolerates(t *testing.T) {
	taint := corev1.Taint{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}
	for name, test := range map[string]struct {
		toleration corev1.Toleration
		does       bool
	}{
		"everything":            {corev1.Toleration{Operator: corev1.TolerationOpExists}, true},
		"the key":               {corev1.Toleration{Key: "team", Operator: corev1.TolerationOpExists}, true},
		"another key":           {corev1.Toleration{Key: "pool", Operator: corev1.TolerationOpExists}, false},
		"the value":             {corev1.Toleration{Key: "team", Value: "a"}, true},
		"another value":         {corev1.Toleration{Key: "team", Operator: corev1.TolerationOpEqual, Value: "b"}, false},
		"another effect":        {corev1.Toleration{Key: "team", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}, false},
		"nothing in particular": {corev1.Toleration{Value: "a"}, false},
		"a number":              {corev1.Toleration{Key: "team", Operator: "Lt", Value: "a"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(clusterpolicy.Tolerates([]corev1.Toleration{test.toleration}, taint)).To(Equal(test.does))
		})
	}
}

func TestOperands(t *testing.T) {
	for name, test := range map[string]struct {
		spec                      string
		driver, upgrades, toolkit bool
	}{
		"what a field means that is not there": {"{}", true, false, true},
		"as NVIDIA's chart installs it":        {"{driver: {enabled: true, upgradePolicy: {autoUpgrade: true}}, toolkit: {enabled: true}}", true, true, true},
		"driver and toolkit on the host":       {"{driver: {enabled: false, upgradePolicy: {autoUpgrade: true}}, toolkit: {enabled: false}}", false, false, false},
		"the driver by a kind of its own":      {"{driver: {useNvidiaDriverCRD: true, upgradePolicy: {autoUpgrade: true}}}", false, false, true},
		"virtual machines: no upgrades":        {"{driver: {upgradePolicy: {autoUpgrade: true}}, sandboxWorkloads: {enabled: true}}", true, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			o := clusterpolicy.OperandsOf(policy(t, test.spec))
			g.Expect(o.Name).To(Equal("cluster-policy"))
			g.Expect(o.Tolerations).To(Equal([]corev1.Toleration{byThem}))
			g.Expect([]bool{o.Driver, o.Upgrades, o.Toolkit}).To(Equal([]bool{test.driver, test.upgrades, test.toolkit}))
		})
	}
}
