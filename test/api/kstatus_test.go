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
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
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
	kubeconfig := env.KubeconfigFile(t, cluster.Config)
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

// columns asks the API server for the table that kubectl prints, and returns the names of its columns in their order
// and the cells of its only row, without those of -o wide and with them.
func columns(t *testing.T, config *rest.Config, resource string) (names, wide []string, cells map[string]any) {
	t.Helper()
	g := NewWithT(t)
	config = rest.CopyConfig(config)
	config.GroupVersion, config.APIPath = &v1alpha1.SchemeGroupVersion, "/apis"
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	c, err := rest.RESTClientFor(config)
	g.Expect(err).NotTo(HaveOccurred())
	table := &metav1.Table{}
	g.Expect(c.Get().Resource(resource).SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").
		Do(t.Context()).Into(table)).To(Succeed())
	g.Expect(table.Rows).To(HaveLen(1))
	cells = map[string]any{}
	for i, column := range table.ColumnDefinitions {
		if column.Priority == 0 {
			names = append(names, column.Name)
		} else {
			wide = append(wide, column.Name)
		}
		cells[column.Name] = table.Rows[0].Cells[i]
	}
	return names, wide, cells
}

// TestColumnsOfPolicies: how far the rollout is, and what holds it up.
func TestColumnsOfPolicies(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	o := policy(t, "edited", `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
	g.Expect(cluster.Client.Create(t.Context(), o)).To(Succeed())
	names, wide, cells := columns(t, cluster.Config, "gpusharingpolicies")
	g.Expect(names).To(HaveExactElements("Name", "Strategy", "Nodes", "Ready", "Updated", "Blocked", "Status", "Age"))
	g.Expect(wide).To(HaveExactElements("Generation", "Observed", "Message"))
	g.Expect(cells).To(And(HaveKeyWithValue("Strategy", "TimeSlicing"), HaveKeyWithValue("Status", v1alpha1.ReasonAwaitingReport),
		HaveKeyWithValue("Message", ContainSubstring("not observed the policy yet")), HaveKeyWithValue("Nodes", BeNil())))

	p := &v1alpha1.GPUSharingPolicy{}
	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(o), p)).To(Succeed())
	p.Status.ObservedGeneration = p.Generation
	p.Status.Nodes = v1alpha1.NodeCounts{Matched: 40, Ready: 30, Changing: 1, Waiting: 8, Failed: 1, Updated: 31, Blocked: 3}
	p.Status.Conditions = condition.SetProgress([]metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonGPUInUse, Message: "30 of 40 nodes ready",
		ObservedGeneration: p.Generation, LastTransitionTime: metav1.Now(),
	}}, metav1.Condition{}, metav1.Now().Time)
	g.Expect(cluster.Client.Status().Update(t.Context(), p)).To(Succeed())
	p.Spec.Sharing.TimeSlicing.Replicas = 8
	g.Expect(cluster.Client.Update(t.Context(), p)).To(Succeed())
	_, _, cells = columns(t, cluster.Config, "gpusharingpolicies")
	for column, want := range map[string]int{"Nodes": 40, "Ready": 30, "Updated": 31, "Blocked": 3, "Generation": 2, "Observed": 1} {
		g.Expect(cells).To(HaveKeyWithValue(column, BeNumerically("==", want)), column)
	}
	g.Expect(cells).To(And(HaveKeyWithValue("Status", v1alpha1.ReasonGPUInUse), HaveKeyWithValue("Message", "30 of 40 nodes ready")))
}

// TestColumnsOfGPUNodes: which GPUs a node has, how they are shared, and whether its agent has done that.
func TestColumnsOfGPUNodes(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	n := &v1alpha1.GPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: "a"},
		Spec:       v1alpha1.GPUNodeSpec{PolicyName: "research", Strategy: v1alpha1.StrategyMIG},
	}
	g.Expect(cluster.Client.Create(t.Context(), n)).To(Succeed())
	names, wide, cells := columns(t, cluster.Config, "gpunodes")
	g.Expect(names).To(HaveExactElements("Name", "Policy", "Strategy", "GPUs", "Ready", "Status", "Age"))
	g.Expect(wide).To(HaveExactElements("Message"))
	g.Expect(cells).To(And(HaveKeyWithValue("Ready", "Unknown"), HaveKeyWithValue("Status", v1alpha1.ReasonAwaitingReport),
		HaveKeyWithValue("Message", ContainSubstring("controller has not reported yet"))))

	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(n), n)).To(Succeed())
	n.Status.ObservedGeneration, n.Status.GPUs = n.Generation, "2× NVIDIA-A100-SXM4-40GB"
	n.Status.Conditions = condition.SetProgress([]metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, Message: "2 GPUs match",
		ObservedGeneration: n.Generation, LastTransitionTime: metav1.Now(),
	}}, metav1.Condition{}, metav1.Now().Time)
	g.Expect(cluster.Client.Status().Update(t.Context(), n)).To(Succeed())
	_, _, cells = columns(t, cluster.Config, "gpunodes")
	g.Expect(cells).To(And(HaveKeyWithValue("Policy", "research"), HaveKeyWithValue("Strategy", "MIG"),
		HaveKeyWithValue("GPUs", "2× NVIDIA-A100-SXM4-40GB"), HaveKeyWithValue("Ready", "True"), HaveKeyWithValue("Status", "Ready"),
		HaveKeyWithValue("Message", "2 GPUs match")))
}
