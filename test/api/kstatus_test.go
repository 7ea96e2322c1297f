// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestObjectsThatNobodyHasObserved: kstatus takes an object without conditions for one that is done. So the API server
// itself says that nothing is known, before a controller or an agent runs.
func TestObjectsThatNobodyHasObserved(t *testing.T) {
	cluster := env.Start(t)
	unknown := func(kind string) any {
		return And(HaveField("Type", kind), HaveField("Status", metav1.ConditionUnknown), HaveField("Reason", v1alpha1.ReasonAwaitingReport))
	}
	t.Run("policy", func(t *testing.T) {
		g := NewWithT(t)
		o := policy(t, "new", `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
		g.Expect(cluster.Client.Create(t.Context(), o)).To(Succeed())
		p := &v1alpha1.GPUSharingPolicy{}
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(o), p)).To(Succeed())
		g.Expect(p.Status.Conditions).To(ConsistOf(unknown(v1alpha1.ConditionAccepted), unknown(v1alpha1.ConditionReady),
			unknown(v1alpha1.ConditionReconciling), unknown(v1alpha1.ConditionStalled)))
		g.Expect(env.Kstatus(t, p)).To(Equal(status.InProgressStatus))
	})
	t.Run("GPUNode", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(cluster.Client.Apply(t.Context(), applyv1alpha1.GPUNode("new"), client.FieldOwner("test"))).To(Succeed())
		n := &v1alpha1.GPUNode{}
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: "new"}, n)).To(Succeed())
		g.Expect(n.Status.Conditions).To(ConsistOf(unknown(v1alpha1.ConditionReady), unknown(v1alpha1.ConditionReconciling),
			unknown(v1alpha1.ConditionStalled)))
		g.Expect(env.Kstatus(t, n)).To(Equal(status.InProgressStatus))
	})
}

// TestKubectlWait: an edit that no controller has observed is waited for, too.
func TestKubectlWait(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	data, err := env.Kubeconfig(cluster.Config)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.WriteFile(kubeconfig, data, 0o600)).To(Succeed())
	wait := func(condition string) (string, error) {
		kubectl := filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kubectl")
		out, err := exec.CommandContext(t.Context(), kubectl, "--kubeconfig", kubeconfig, "wait", "--for=condition="+condition,
			"gpusharingpolicy/waited-for", "--timeout=1s").CombinedOutput()
		return string(out), err
	}
	o := policy(t, "waited-for", `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
	g.Expect(cluster.Client.Create(t.Context(), o)).To(Succeed())
	out, err := wait("Ready")
	g.Expect(err).To(HaveOccurred(), "of a policy that no controller has observed: %s", out)
	g.Expect(out).To(ContainSubstring("timed out"))

	p := &v1alpha1.GPUSharingPolicy{}
	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(o), p)).To(Succeed())
	p.Status.ObservedGeneration = p.Generation
	p.Status.Conditions = condition.SetProgress([]metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, ObservedGeneration: p.Generation,
		LastTransitionTime: metav1.Now(),
	}}, metav1.Condition{}, time.Now())
	g.Expect(cluster.Client.Status().Update(t.Context(), p)).To(Succeed())
	for _, met := range []string{"Ready", "Stalled=false", "Reconciling=false"} {
		out, err = wait(met)
		g.Expect(err).NotTo(HaveOccurred(), "%s: %s", met, out)
	}
	p.Spec.Sharing.TimeSlicing.Replicas = 8
	g.Expect(cluster.Client.Update(t.Context(), p)).To(Succeed())
	out, err = wait("Ready")
	g.Expect(err).To(HaveOccurred(), "of an edit that no controller has observed: %s", out)
}
