// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// TestNobodyTakesNodesFromTheMPSPodsByTheWay: Kubernetes would end the MPS pods on those nodes, and with them all MPS
// clients. Argo CD renders the chart without a look at the cluster and applies it, as this test does.
func TestNobodyTakesNodesFromTheMPSPodsByTheWay(t *testing.T) {
	i := newInstallation(t, helmOf(t, helm4))
	i.do(t, "install", release, i.chart, "--create-namespace", "--set", "gpuNodes.selector.pool=shared")
	mps := client.ObjectKey{Namespace: namespace, Name: "gpu-sharing-mps"}
	// sync does as Argo CD does with the chart and values.
	sync := func(values ...string) error {
		objects := i.render(t, append(values, "gpuNodes.selector.pool=shared")...)
		return i.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(find(t, objects, "DaemonSet gpu-sharing-mps")),
			client.ForceOwnership, client.FieldOwner("argocd-controller"))
	}
	change := func(edit func(*appsv1.DaemonSet), opts ...client.UpdateOption) error {
		d := &appsv1.DaemonSet{}
		if err := i.Client.Get(t.Context(), mps, d); err != nil {
			return err
		}
		edit(d)
		return i.Client.Update(t.Context(), d, opts...)
	}
	NewWithT(t).Eventually(func() error {
		return change(func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.NodeSelector["zone"] = "a" }, client.DryRunAll)
	}, 30*time.Second).ShouldNot(Succeed(), "an admission policy takes effect a moment after it was applied")

	t.Run("a selector with another label is refused, and the message says what to do", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(sync("gpuNodes.selector.zone=a")).To(MatchError(SatisfyAll(
			ContainSubstring("DaemonSet "+namespace+"/gpu-sharing-mps would leave out nodes, by nodeSelector zone=a"),
			ContainSubstring("end the MPS pods there"), ContainSubstring("mps.changeSelector=true"), ContainSubstring(v1alpha1.AnnotationAllowFewerNodes+"=true"))))
		d := &appsv1.DaemonSet{}
		g.Expect(i.Client.Get(t.Context(), mps, d)).To(Succeed())
		g.Expect(d.Spec.Template.Spec.NodeSelector).NotTo(HaveKey("zone"))
	})
	t.Run("so is another value of a label", func(t *testing.T) {
		NewWithT(t).Expect(change(func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.NodeSelector["pool"] = "other" })).
			To(MatchError(ContainSubstring("nodeSelector pool=other")))
	})
	t.Run("so is an affinity", func(t *testing.T) {
		NewWithT(t).Expect(change(func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.Affinity = onlyZone("a") })).
			To(MatchError(ContainSubstring("another nodeAffinity")))
	})
	t.Run("so are fewer tolerations", func(t *testing.T) {
		NewWithT(t).Expect(sync("gpuNodes.tolerations[0].key=nvidia.com/gpu", "gpuNodes.tolerations[0].operator=Exists")).
			To(MatchError(ContainSubstring("fewer tolerations")))
	})
	t.Run("what ends no pod is not", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(sync("mps.podLabels.team=gpu", "images.agent.tag=v9")).To(Succeed())
		g.Expect(change(func(d *appsv1.DaemonSet) {
			d.Spec.Template.Spec.Tolerations = append(d.Spec.Template.Spec.Tolerations, corev1.Toleration{Key: "new", Operator: corev1.TolerationOpExists})
			delete(d.Spec.Template.Spec.NodeSelector, "pool")
		})).To(Succeed())
		g.Expect(change(func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.NodeSelector = nil })).To(Succeed())
	})
	t.Run("what says that it is meant is not, and the next change is again", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(sync()).To(MatchError(ContainSubstring("nodeSelector")), "the case before took the labels away")
		g.Expect(sync("gpuNodes.selector.zone=a", "mps.changeSelector=true")).To(Succeed())
		g.Expect(change(func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.Affinity = onlyZone("a") })).To(Succeed(), "the annotation is there still")
		g.Expect(sync("gpuNodes.selector.zone=a")).To(Succeed())
		g.Expect(change(func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.Affinity = onlyZone("b") })).
			To(MatchError(ContainSubstring("another nodeAffinity")))
	})
	t.Run("Helm refuses before it changes anything, and widens without a question", func(t *testing.T) {
		g := NewWithT(t)
		_, err := i.try(t, "upgrade", release, i.chart, "--set", "gpuNodes.selector.pool=other")
		g.Expect(err).To(MatchError(ContainSubstring("gpuNodes.selector changes from")))
		i.do(t, "upgrade", release, i.chart, "--force-conflicts", "--set", "gpuNodes.selector.zone=a")
	})
}

// TestAnInstallationOverKeptMPSPodsLeavesOutNoNodes: the MPS pods outlive helm uninstall, and with them what guards
// their nodes. Fewer tolerations end MPS pods as another selector does.
func TestAnInstallationOverKeptMPSPodsLeavesOutNoNodes(t *testing.T) {
	i := newInstallation(t, helmOf(t, helm4))
	g := NewWithT(t)
	const (
		fewer = "gpuNodes.tolerations[0].key=nvidia.com/gpu,gpuNodes.tolerations[0].operator=Exists,gpuNodes.tolerations[0].effect=," +
			"gpuNodes.tolerations[1].key=spot,gpuNodes.tolerations[1].operator=Exists,gpuNodes.tolerations[1].effect=NoExecute," +
			"gpuNodes.tolerations[1].tolerationSeconds=1000000"
		meant = "mps.changeSelector=true"
	)
	refused := func(err error, field string) {
		t.Helper()
		g.Expect(err).To(MatchError(SatisfyAll(ContainSubstring(field+" changes from"), ContainSubstring("Drain these nodes of MPS clients first"), ContainSubstring(meant))))
	}
	i.do(t, "install", release, i.chart, "--create-namespace")
	_, err := i.try(t, "upgrade", release, i.chart, "--set", fewer)
	refused(err, "gpuNodes.tolerations")

	out := i.do(t, "uninstall", release)
	for _, kind := range []string{"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} {
		g.Expect(i.exists(t, object("admissionregistration.k8s.io/v1", kind, "", "gpu-sharing-mps-nodes"))).To(BeTrue())
		g.Expect(out).To(ContainSubstring("[" + kind + "] gpu-sharing-mps-nodes"))
		g.Expect(i.exists(t, object("admissionregistration.k8s.io/v1", kind, "", "gpu-sharing-agent-own-node"))).To(BeFalse())
	}
	narrower := find(t, i.render(t, fewer), "DaemonSet gpu-sharing-mps")
	g.Eventually(func() error {
		return i.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(narrower.DeepCopy()), client.ForceOwnership,
			client.FieldOwner("argocd-controller"), client.DryRunAll)
	}, 30*time.Second).Should(MatchError(ContainSubstring("fewer tolerations")), "what knows no cluster, as Argo CD")
	_, err = i.try(t, "install", release, i.chart, "--set", fewer+",agent.admissionPolicy.enabled=false")
	refused(err, "gpuNodes.tolerations")
	_, err = i.try(t, "install", release, i.chart, "--set", "gpuNodes.selector.pool=shared")
	refused(err, "gpuNodes.selector")

	i.do(t, "install", release, i.chart, "--set", fewer+","+meant)
	i.do(t, "upgrade", release, i.chart, "--set", fewer)
	_, err = i.try(t, "upgrade", release, i.chart, "--set", strings.Replace(fewer, "1000000", "999999", 1))
	refused(err, "gpuNodes.tolerations")
	i.do(t, "upgrade", release, i.chart)
}

// TestALabelWithoutAValueIsOneMoreThatNodesMustHave: without the admission policy Helm alone keeps the MPS pods on the
// nodes without that label.
func TestALabelWithoutAValueIsOneMoreThatNodesMustHave(t *testing.T) {
	i := newInstallation(t, helmOf(t, helm4))
	i.do(t, "install", release, i.chart, "--create-namespace", "--set", "agent.admissionPolicy.enabled=false")
	const label = `gpuNodes.selector.node-role\.kubernetes\.io/gpu=`
	_, err := i.try(t, "upgrade", release, i.chart, "--set", "agent.admissionPolicy.enabled=false", "--set-string", label)
	NewWithT(t).Expect(err).To(MatchError(ContainSubstring("gpuNodes.selector changes from")))
	i.do(t, "upgrade", release, i.chart, "--set", "agent.admissionPolicy.enabled=false,mps.changeSelector=true", "--set-string", label)
	i.do(t, "upgrade", release, i.chart, "--set", "agent.admissionPolicy.enabled=false", "--set-string", label)
}

// TestTolerationsOfTheMPSPodsAreComparedAsKubernetesComparesThemWithTaints: by Helm, and by the admission policy, which
// sees an upgrade when other objects have changed already.
func TestTolerationsOfTheMPSPodsAreComparedAsKubernetesComparesThemWithTaints(t *testing.T) {
	// of are the values of a toleration.
	of := func(fields ...string) string {
		return "gpuNodes.tolerations[0]." + strings.Join(fields, ",gpuNodes.tolerations[0].")
	}
	i := newInstallation(t, helmOf(t, helm4))
	i.do(t, "install", release, i.chart, "--create-namespace", "--set", of("key=gpu", "value=yes", "effect=NoExecute", "tolerationSeconds=60"))
	applied := func(tolerations string) error {
		return i.Client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(find(t, i.render(t, tolerations), "DaemonSet gpu-sharing-mps")),
			client.ForceOwnership, client.FieldOwner("argocd-controller"), client.DryRunAll)
	}
	NewWithT(t).Eventually(func() error { return applied(of("key=other", "operator=Exists")) }, 30*time.Second).
		ShouldNot(Succeed(), "an admission policy takes effect a moment after it was applied")

	for title, tc := range map[string]struct {
		tolerations string
		fewer       bool
	}{
		"the same, with its operator":       {of("key=gpu", "operator=Equal", "value=yes", "effect=NoExecute", "tolerationSeconds=60"), false},
		"longer":                            {of("key=gpu", "value=yes", "effect=NoExecute", "tolerationSeconds=61"), false},
		"for ever":                          {of("key=gpu", "value=yes", "effect=NoExecute"), false},
		"any value":                         {of("key=gpu", "operator=Exists", "effect=NoExecute", "tolerationSeconds=60"), false},
		"any value and effect":              {of("key=gpu", "operator=Exists"), false},
		"everything of the effect":          {of("operator=Exists", "effect=NoExecute"), false},
		"everything":                        {of("operator=Exists"), false},
		"less long":                         {of("key=gpu", "value=yes", "effect=NoExecute", "tolerationSeconds=59"), true},
		"another value":                     {of("key=gpu", "value=no", "effect=NoExecute"), true},
		"no value":                          {of("key=gpu", "effect=NoExecute"), true},
		"another key":                       {of("key=other", "operator=Exists", "effect=NoExecute"), true},
		"another effect":                    {of("key=gpu", "operator=Exists", "effect=NoSchedule"), true},
		"everything of another effect":      {of("operator=Exists", "effect=NoSchedule"), true},
		"everything of the effect, shorter": {of("operator=Exists", "effect=NoExecute", "tolerationSeconds=1"), true},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			_, helm := i.try(t, "upgrade", release, i.chart, "--dry-run=server", "--set", tc.tolerations)
			policy := applied(tc.tolerations)
			if !tc.fewer {
				g.Expect(helm).NotTo(HaveOccurred())
				g.Expect(policy).NotTo(HaveOccurred())
				return
			}
			g.Expect(helm).To(MatchError(ContainSubstring("gpuNodes.tolerations changes from")))
			g.Expect(policy).To(MatchError(ContainSubstring("fewer tolerations")))
		})
	}
	t.Run("one value instead of any", func(t *testing.T) {
		g := NewWithT(t)
		i.do(t, "upgrade", release, i.chart, "--set", of("key=gpu", "operator=Exists"))
		_, helm := i.try(t, "upgrade", release, i.chart, "--dry-run=server", "--set", of("key=gpu", "value=yes"))
		g.Expect(helm).To(MatchError(ContainSubstring("gpuNodes.tolerations changes from")))
		g.Expect(applied(of("key=gpu", "value=yes"))).To(MatchError(ContainSubstring("fewer tolerations")))
	})
}

// TestArgoCDAppliesTheGuardOfTheMPSNodesBeforeTheMPSPods: an update of the DaemonSet that comes first is not denied.
// Argo CD applies wave after wave, and in one wave the kinds that it does not know last.
// https://github.com/argoproj/argo-cd/blob/master/gitops-engine/pkg/sync/sync_tasks.go
func TestArgoCDAppliesTheGuardOfTheMPSNodesBeforeTheMPSPods(t *testing.T) {
	objects := newHelm(t).render(t)
	wave := func(name string) int {
		number, given := find(t, objects, name).GetAnnotations()["argocd.argoproj.io/sync-wave"]
		if !given {
			return 0
		}
		n, err := strconv.Atoi(number)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		return n
	}
	for _, guard := range []string{"ValidatingAdmissionPolicy gpu-sharing-mps-nodes", "ValidatingAdmissionPolicyBinding gpu-sharing-mps-nodes"} {
		NewWithT(t).Expect(wave(guard)).To(BeNumerically("<", wave("DaemonSet gpu-sharing-mps")), guard)
	}
}

// onlyZone requires nodes of a zone.
func onlyZone(zone string) *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{zone}},
		}}},
	}}}
}
