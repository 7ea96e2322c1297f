// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// upgrade is what each upgrade of a Helm 4 release of the GPU Operator writes: the chart's default.
const upgrade = `{"spec":{"mig":{"strategy":"single"}}}`

// meets lets another controller write the ClusterPolicy so often just before the operator does.
func (f *fixture) meets(times int, write func()) {
	f.fail = func(what string) error {
		if what == "patch ClusterPolicy" && times > 0 {
			times--
			write()
		}
		return nil
	}
}

// reports is a status that NVIDIA's operator writes.
func (f *fixture) reports(policy *unstructured.Unstructured) func() {
	n := 0
	return func() {
		n++
		status := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"status":{"conditions":[{"type":"Ready","message":"%d"}]}}`, n))
		f.Expect(f.client.Status().Patch(f.ctx(), nvidia("ClusterPolicy", policy.GetName()), status, client.FieldOwner("gpu-operator"))).To(Succeed())
	}
}

// again deletes the ClusterPolicy and creates another one of that name, in a later second: the API server's times are
// in seconds.
func (f *fixture) again(policy *unstructured.Unstructured) *unstructured.Unstructured {
	f.t.Helper()
	before := f.get(policy).GetCreationTimestamp()
	f.Expect(f.client.Delete(f.ctx(), policy)).To(Succeed())
	f.configure(research)
	f.Eventually(func() time.Time { return time.Now().Truncate(time.Second) }, "10s", "50ms").Should(BeTemporally(">", before.Time))
	f.clock.SetTime(time.Now())
	return f.policy(policy.GetName(), installed)
}

// testMeetsStatusWrites: NVIDIA's operator writes the status of a new ClusterPolicy several times within seconds.
func testMeetsStatusWrites(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.meets(3, f.reports(policy))
	f.Expect(f.configure(research)).To(ContainElement("patch ClusterPolicy"))
	f.Expect(f.observe().Ready).To(BeTrue(), "in the same reconcile")

	policy = f.again(policy)
	f.meets(3, f.reports(policy))
	f.configure(research)
	o := f.observe()
	f.Expect(o.Overridden).To(BeNil(), "who created the ClusterPolicy has reverted nothing")
	f.Expect(o.Ready).To(BeTrue())

	f.patch(policy, "helm", upgrade)
	f.meets(3, f.reports(policy))
	f.configure(research)
	f.Expect(f.observe().Ready).To(BeTrue())

	f.tolerations = []corev1.Toleration{{Key: "example.com/shared", Operator: corev1.TolerationOpExists}}
	f.meets(1, f.reports(policy))
	f.configure(research)
	f.Expect(f.observe().Operands.Ours).To(Equal(f.tolerations))
	f.meets(1, f.reports(policy))
	f.configureMIG()
	f.Expect(f.observe().MIGReady).To(BeTrue())
	f.meets(1, f.reports(policy))
	f.restoreMIG()
	f.Expect(f.observe().MIGReady).To(BeFalse())

	f.tolerations = nil
	f.meets(1, f.reports(policy))
	f.restore(false)
	f.Expect(f.spec(policy)).To(MatchYAML(`
daemonsets: {updateStrategy: RollingUpdate}
devicePlugin: {enabled: true}
mig: {strategy: single}
`), "NVIDIA's definition fills in daemonsets")
}

// testMeetsTooManyWrites: who was not overruled in the end has no revert on record.
func testMeetsTooManyWrites(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.configure(research)
	policy = f.again(policy)
	for range 2 {
		f.meets(100, f.reports(policy))
		f.Expect(apierrors.IsConflict(f.tryConfigure(research))).To(BeTrue())
		patches := slices.DeleteFunc(slices.Clone(f.writes), func(w string) bool { return w != "patch ClusterPolicy" })
		f.Expect(patches).To(HaveLen(5), "at once, and not without end")
		f.fail = nil
		f.Expect(f.observe().Overridden).To(BeNil())
		f.configure(research)
		f.Expect(f.observe().Ready).To(BeTrue())
		f.patch(policy, "helm", upgrade)
	}
}

// testMeetsUser: what a user writes in the very moment is what they want once the operator is gone.
func testMeetsUser(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.meets(1, func() { f.patch(policy, "kubectl-edit", `{"spec":{"mig":{"strategy":"mixed"}}}`) })
	f.configure(research)
	f.Expect(f.observe().Ready).To(BeTrue())
	f.restore(false)
	f.Expect(f.spec(policy)).To(ContainSubstring("strategy: mixed"))
}

// testMeetsDeletion leaves a ClusterPolicy alone that took the place of the one that was read, and one that disables
// the plugin.
func testMeetsDeletion(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.meets(1, func() {
		f.Expect(f.client.Delete(f.ctx(), f.get(policy))).To(Succeed())
		f.policy("cluster-policy", "spec: {devicePlugin: {enabled: false}}")
	})
	f.Expect(apierrors.IsConflict(f.tryConfigure(research))).To(BeTrue())
	f.Expect(f.spec(policy)).To(MatchYAML("{devicePlugin: {enabled: false}}"))

	f.meets(0, nil)
	f.patch(policy, "helm", `{"spec":{"devicePlugin":{"enabled":true}}}`)
	f.meets(1, func() { f.patch(policy, "helm", `{"spec":{"devicePlugin":{"enabled":false}}}`) })
	f.Expect(apierrors.IsConflict(f.tryConfigure(research))).To(BeTrue())
	f.Expect(f.spec(policy)).To(MatchYAML("{devicePlugin: {enabled: false}}"))
}

// testUpgradedEachMonth: MIG_STRATEGY=single overrules the configuration of each node, and NVIDIA's device plugin ends
// where the layout is a mixed one.
func testUpgradedEachMonth(f *fixture) {
	policy, now := f.policy("cluster-policy", installed), time.Now()
	for month := -3; month <= 0; month++ {
		f.clock.SetTime(now.AddDate(0, month, 0))
		f.configure(research)
		f.patch(policy, "helm", upgrade)
		f.configure(research)
		f.Expect(f.observe().Overridden).To(BeNil(), "a month lies between two upgrades")
		f.Expect(f.observe().Ready).To(BeTrue())
	}
	f.patch(policy, "helm", upgrade)
	f.clock.SetTime(now.Add(5 * time.Minute))
	f.Expect(f.observe().Overridden).To(BeNil(), "those of former months do not count")
}

// testInstalledAgain installs the chart a few times within an hour, as a person does who tries its values. Nobody but a
// controller reverts what the operator has written within the minutes after that, again and again.
func testInstalledAgain(f *fixture) {
	policy, now := f.policy("cluster-policy", installed), time.Now()
	f.configure(research)
	for _, minutes := range []int{-10, 0, 10, 20} {
		f.clock.SetTime(now.Add(time.Duration(minutes) * time.Minute))
		f.patch(policy, "helm", upgrade)
		f.Expect(f.observe().Overridden).To(BeNil())
		f.configure(research)
		f.Expect(f.observe().Ready).To(BeTrue())
		f.Expect(f.observe().Overruled).To(BeTemporally("~", f.clock.Now(), time.Second))
	}
	f.clock.SetTime(now.Add(2 * time.Hour))
	f.Expect(f.observe().Overruled).To(BeZero())
}

// testFightCalms lets another controller revert the ClusterPolicy whenever the operator has set it.
func testFightCalms(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.configure(research)
	f.patch(policy, "argocd-controller", upgrade)
	f.configure(research)
	for _, minutes := range []int{1, 2, 4, 8, 16, 32, 60, 60} {
		f.clock.SetTime(time.Now()) // by which the API server says when a field was written
		f.patch(policy, "argocd-controller", upgrade)
		f.Expect(f.configure(research)).NotTo(ContainElement("patch ClusterPolicy"))
		overridden := f.observe().Overridden
		f.Expect(overridden.Until).To(BeTemporally("~", time.Now().Add(time.Duration(minutes)*time.Minute), 10*time.Second))
		f.Expect(overridden.Message).To(ContainSubstring(`set mig.strategy "single" again`))
		f.clock.SetTime(overridden.Until)
		f.configure(research)
		f.Expect(f.observe().Ready).To(BeTrue())
	}
}

// testTolerationsRemoved: a list that is removed has no owner any more, whether or not nodes need our ConfigMap.
func testTolerationsRemoved(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	shared := []corev1.Toleration{{Key: "example.com/shared", Operator: corev1.TolerationOpExists}}
	remove := `{"metadata":{"annotations":{"gpusharing.io/tolerations":null}},"spec":{"daemonsets":{"tolerations":null}}}`
	reverts := []string{remove, `{"spec":{"daemonsets":{"tolerations":null}}}`}
	for _, configure := range []bool{true, false} {
		c := f.configurer()
		round := func(ours []corev1.Toleration) *clusterpolicy.Operands {
			o, err := c.Observe(f.ctx())
			f.Expect(err).NotTo(HaveOccurred())
			if f.clock.Now().Before(o.Operands.NotBefore) { // as the decision does
				ours = o.Operands.Ours
			}
			if configure {
				_, err = c.Configure(f.ctx(), o, ours)
			} else {
				_, err = c.Restore(f.ctx(), o, false, ours)
			}
			f.Expect(err).NotTo(HaveOccurred())
			o, err = c.Observe(f.ctx())
			f.Expect(err).NotTo(HaveOccurred())
			f.Expect(o.Restores(configure, false, o.Operands.Ours)).To(BeFalse())
			return o.Operands
		}
		round(shared)
		for n, minutes := range []int{0, 1, 2, 4, 8, 16, 32, 60, 60, 0} {
			if minutes == 0 { // the rounds before are long ago
				f.clock.SetTime(f.clock.Now().Add(2 * time.Hour))
			}
			f.patch(policy, "argocd-controller", reverts[n%len(reverts)])
			f.patch(policy, "kubectl-edit", fmt.Sprintf(`{"spec":{"devicePlugin":{"version":"v0.%d"}}}`, n)) // no other removal
			if o := round(shared); minutes > 0 {
				f.Expect(o.Ours).To(BeEmpty())
				f.Expect(o.NotBefore).To(Equal(f.clock.Now().Add(time.Duration(minutes) * time.Minute)))
				f.clock.SetTime(o.NotBefore)
			}
			f.Expect(round(shared).Ours).To(Equal(shared))
		}
		f.patch(policy, "argocd-controller", reverts[1])
		round(nil)
		f.Expect(f.get(policy).GetAnnotations()).NotTo(HaveKey(v1alpha1.AnnotationTolerations))
		reverts = append(reverts, `{"spec":{"daemonsets":{"tolerations":[{"key":"team","operator":"Exists"}]}}}`)
	}
}

// testRecordIsLost: the record of who was overruled survives a controller that replaces the whole ClusterPolicy, and
// the loss of the ConfigMap.
func testRecordIsLost(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.configure(research)
	f.patch(policy, "argocd-controller", upgrade)
	f.Expect(f.configure(research)).To(Equal([]string{"patch ClusterPolicy", "apply ConfigMap"}))
	f.Expect(f.client.Delete(f.ctx(), f.configMap(pluginconfig.ConfigMapName))).To(Succeed())
	f.configure(research)
	f.patch(policy, "argocd-controller", upgrade)
	f.Expect(f.observe().Overridden).NotTo(BeNil())
}

// testTolerationsStripped: a mutating webhook of the platform team keeps the list as it was.
func testTolerationsStripped(f *fixture) {
	f.policy("cluster-policy", installed)
	writes := 0
	stripping := interceptor.NewClient(f.client, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if o.GetObjectKind().GroupVersionKind().Kind != "ClusterPolicy" {
				return c.Patch(ctx, o, p, opts...)
			}
			writes++
			data, err := p.Data(o)
			f.Expect(err).NotTo(HaveOccurred())
			var patch map[string]any
			f.Expect(json.Unmarshal(data, &patch)).To(Succeed())
			if spec, is := patch["spec"].(map[string]any); is {
				delete(spec, "daemonsets")
			}
			data, err = json.Marshal(patch)
			f.Expect(err).NotTo(HaveOccurred())
			return c.Patch(ctx, o, client.RawPatch(types.MergePatchType, data), opts...)
		},
	})
	c := pluginconfig.New(stripping, f.client, f.clock, f.standAlone)
	for range 60 {
		o, err := c.Observe(f.ctx())
		f.Expect(err).NotTo(HaveOccurred())
		ours := []corev1.Toleration{{Key: "example.com/shared", Operator: corev1.TolerationOpExists}}
		if f.clock.Now().Before(o.Operands.NotBefore) { // as the decision does
			ours = o.Operands.Ours
		}
		_, err = c.Configure(f.ctx(), o, ours)
		f.Expect(err).NotTo(HaveOccurred())
		f.clock.SetTime(f.clock.Now().Add(time.Minute))
	}
	f.Expect(writes).To(BeNumerically("<", 20), "in an hour")
}

// testTolerationsStrippedInPart: a mutating webhook of the platform team admits tolerations of some keys only. What the operator added goes again.
func testTolerationsStrippedInPart(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	admitted := corev1.Toleration{Key: "example.com/admitted", Operator: corev1.TolerationOpExists}
	ours := []corev1.Toleration{admitted, {Key: "example.com/stripped", Operator: corev1.TolerationOpExists}}
	stripping := interceptor.NewClient(f.client, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if o.GetObjectKind().GroupVersionKind().Kind != "ClusterPolicy" {
				return c.Patch(ctx, o, p, opts...)
			}
			data, err := p.Data(o)
			f.Expect(err).NotTo(HaveOccurred())
			var patch map[string]any
			f.Expect(json.Unmarshal(data, &patch)).To(Succeed())
			if list, found, _ := unstructured.NestedSlice(patch, "spec", "daemonsets", "tolerations"); found {
				list = slices.DeleteFunc(list, func(t any) bool { return t.(map[string]any)["key"] == "example.com/stripped" })
				f.Expect(unstructured.SetNestedSlice(patch, list, "spec", "daemonsets", "tolerations")).To(Succeed())
			}
			data, err = json.Marshal(patch)
			f.Expect(err).NotTo(HaveOccurred())
			return c.Patch(ctx, o, client.RawPatch(types.MergePatchType, data), opts...)
		},
	})
	c := pluginconfig.New(stripping, f.client, f.clock, f.standAlone)
	for range 5 {
		o, err := c.Observe(f.ctx())
		f.Expect(err).NotTo(HaveOccurred())
		users := slices.DeleteFunc(slices.Clone(o.Operands.Tolerations), func(t corev1.Toleration) bool { return clusterpolicy.Among(o.Operands.Ours, t) })
		want := slices.DeleteFunc(slices.Clone(ours), func(t corev1.Toleration) bool { return clusterpolicy.Among(users, t) }) // as the decision does
		_, err = c.Configure(f.ctx(), o, want)
		f.Expect(err).NotTo(HaveOccurred())
		f.clock.SetTime(f.clock.Now().Add(time.Hour))
	}
	for range 3 { // the policy is gone
		o, err := c.Observe(f.ctx())
		f.Expect(err).NotTo(HaveOccurred())
		_, err = c.Restore(f.ctx(), o, false, nil)
		f.Expect(err).NotTo(HaveOccurred())
	}
	f.Expect(clusterpolicy.OperandsOf(f.get(policy)).Tolerations).NotTo(ContainElement(admitted))
}

// testOneMoreToleration: another controller reverts another field meanwhile.
func testOneMoreToleration(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	c := f.configurer()
	a := []corev1.Toleration{{Key: "example.com/a", Operator: corev1.TolerationOpExists}}
	both := append(slices.Clone(a), corev1.Toleration{Key: "example.com/b", Operator: corev1.TolerationOpExists})
	configure := func(ours []corev1.Toleration) *pluginconfig.Observed {
		o, err := c.Observe(f.ctx())
		f.Expect(err).NotTo(HaveOccurred())
		_, err = c.WriteKeys(f.ctx(), o, o.Configs)
		f.Expect(err).NotTo(HaveOccurred())
		_, err = c.Configure(f.ctx(), o, ours)
		f.Expect(err).NotTo(HaveOccurred())
		o, err = c.Observe(f.ctx())
		f.Expect(err).NotTo(HaveOccurred())
		return o
	}
	for range 2 {
		configure(a)
		f.patch(policy, "argocd-controller", upgrade)
	}
	f.Expect(configure(a).Overridden).NotTo(BeNil())
	f.Expect(configure(both).Operands.Ours).To(Equal(both))
}
