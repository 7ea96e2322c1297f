// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

// The controllers of OpenShift that write to MachineSets, as stubborn as they are.

// provider is the MachineSet controller of a cloud provider: at each change it overwrites its own annotations with what
// the instance type has, and keeps others. Source: openshift/machine-api-provider-aws
// pkg/actuators/machineset/controller.go.
func (s *site) provider() {
	s.t.Helper()
	s.controller("machine-api-provider", func(set *unstructured.Unstructured) bool {
		annotations := set.GetAnnotations()
		changed := false
		for key, value := range map[string]string{
			"machine.openshift.io/vCPU": "96", "machine.openshift.io/memoryMb": "1179648", "machine.openshift.io/GPU": "1",
			"capacity.cluster-autoscaler.kubernetes.io/labels": "kubernetes.io/arch=amd64",
		} {
			if annotations[key] != value {
				annotations[key], changed = value, true
			}
		}
		set.SetAnnotations(annotations)
		return changed
	})
}

// autoscalerOperator is the MachineAutoscaler controller of cluster-autoscaler-operator: with a change of the limits it
// fills in the capacity annotations that are missing, and touches no other. Source:
// openshift/cluster-autoscaler-operator pkg/controller/machineautoscaler/machinetarget.go and
// machineautoscaler_controller.go.
func (s *site) autoscalerOperator(limit string) {
	s.t.Helper()
	s.Expect(retry.RetryOnConflict(retry.DefaultRetry, func() error {
		set := s.machineSet()
		annotations := set.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		const key = "machine.openshift.io/cluster-api-autoscaler-node-group-max-size"
		if annotations[key] == limit {
			return nil
		}
		annotations[key] = limit
		for key, value := range map[string]string{
			"cpu": "96", "memory": "1179648Mi", "gpu-count": "1", "gpu-type": "nvidia.com/gpu", "maxPods": "250",
		} {
			if _, found := annotations["capacity.cluster-autoscaler.kubernetes.io/"+key]; !found {
				annotations["capacity.cluster-autoscaler.kubernetes.io/"+key] = value
			}
		}
		set.SetAnnotations(annotations)
		return s.client.Update(s.t.Context(), set, client.FieldOwner("cluster-autoscaler-operator"))
	})).To(Succeed())
}

// controller runs a controller of MachineSets until the test ends.
func (s *site) controller(manager string, change func(*unstructured.Unstructured) bool) {
	s.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s.t.Context().Err() == nil {
			list := &unstructured.UnstructuredList{}
			list.SetAPIVersion("machine.openshift.io/v1beta1")
			list.SetKind("MachineSetList")
			if err := s.client.List(s.t.Context(), list); err == nil {
				for i := range list.Items {
					if change(&list.Items[i]) {
						_ = s.client.Update(s.t.Context(), &list.Items[i], client.FieldOwner(manager)) // tried again
					}
				}
			}
			select {
			case <-s.t.Context().Done():
			case <-time.After(poll):
			}
		}
	}()
	s.t.Cleanup(func() { <-done })
}

// openShift makes the cluster one of OpenShift 4.19 with MachineSet gpu.
func (s *site) openShift() (version *unstructured.Unstructured) {
	s.t.Helper()
	s.apply("{apiVersion: v1, kind: Namespace, metadata: {name: openshift-machine-api}}")
	version = s.apply("{apiVersion: config.openshift.io/v1, kind: ClusterVersion, metadata: {name: version}, spec: {}}")
	version.Object["status"] = map[string]any{"desired": map[string]any{"version": "4.19.3"}}
	s.Expect(s.client.Status().Update(s.t.Context(), version)).To(Succeed())
	s.apply(`
apiVersion: machine.openshift.io/v1beta1
kind: MachineSet
metadata: {name: gpu, namespace: openshift-machine-api, annotations: {team: a}}
spec: {replicas: 0, template: {spec: {metadata: {labels: {pool: gpu}}}}}
`)
	return version
}

const eightReplicas = `
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {matchLabels: {pool: gpu}}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}
  autoscaling:
    mode: Manage
    nodeShapes: [{product: Tesla-T4, gpusPerNode: 1, nodeGroups: [{kind: MachineSet, namespace: openshift-machine-api, name: gpu}]}]
`

func (s *site) capacity() map[string]string {
	s.t.Helper()
	all := map[string]string{}
	for key, value := range s.machineSet().GetAnnotations() {
		if key == pure.AnnotationGPUCount || key == pure.AnnotationGPUType || key == v1alpha1.AnnotationAutoscaling {
			all[key] = value
		}
	}
	return all
}

func (s *site) deletePolicy() {
	s.t.Helper()
	s.Expect(s.client.Delete(s.t.Context(), &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}})).To(Succeed())
}

// TestBesideTheControllersOfOpenShift: the default is taken over and survives what OpenShift's controllers write, and
// comes back with the end of the policy.
func TestBesideTheControllersOfOpenShift(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.openShift()
	s.provider()
	s.autoscalerOperator("4")
	before := s.capacity()
	s.Expect(before).To(Equal(map[string]string{pure.AnnotationGPUCount: "1", pure.AnnotationGPUType: "nvidia.com/gpu"}))
	s.start()
	s.apply(eightReplicas)
	s.reports(v1alpha1.ReasonStartupGap)
	s.Expect(s.groups()[0].Written).To(Equal([]string{pure.AnnotationGPUCount + "=8"}))
	s.autoscalerOperator("5")
	s.Consistently(s.capacity, 3*time.Second, poll).Should(And(
		HaveKeyWithValue(pure.AnnotationGPUCount, "8"), HaveKeyWithValue(pure.AnnotationGPUType, "nvidia.com/gpu")))
	s.Expect(s.machineSet().GetAnnotations()).To(And(HaveKeyWithValue("machine.openshift.io/GPU", "1"), HaveKeyWithValue("team", "a")))

	s.deletePolicy()
	s.Eventually(s.capacity, wait, poll).Should(Equal(before))
	s.autoscalerOperator("6")
	s.Expect(s.capacity()).To(Equal(before))
}

// TestAToolThatReplacesTheObject: a GitOps tool that replaces the MachineSet takes the annotations off. It is left
// alone, and named.
func TestAToolThatReplacesTheObject(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.openShift()
	s.start()
	s.apply(eightReplicas)
	s.reports(v1alpha1.ReasonStartupGap)
	s.Expect(retry.RetryOnConflict(retry.DefaultRetry, func() error {
		set := s.machineSet()
		set.SetAnnotations(map[string]string{"team": "a", "argocd.argoproj.io/tracking-id": "gpu"})
		return s.client.Update(s.t.Context(), set, client.FieldOwner("argocd-controller"))
	})).To(Succeed())
	s.Expect(s.reports(v1alpha1.ReasonRemovedByOther)).To(ContainSubstring("argocd-controller"))
	s.Consistently(s.capacity, 3*time.Second, poll).Should(BeEmpty())
}

func TestAValueOfAUser(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.openShift()
	set := s.machineSet()
	set.SetAnnotations(map[string]string{pure.AnnotationGPUCount: "2"})
	s.Expect(s.client.Update(t.Context(), set, client.FieldOwner("kubectl-edit"))).To(Succeed())
	s.start()
	s.apply(eightReplicas)
	s.Expect(s.reports(v1alpha1.ReasonOwnedByOther)).To(ContainSubstring("kubectl-edit"))
	s.Consistently(s.capacity, 3*time.Second, poll).Should(Equal(map[string]string{pure.AnnotationGPUCount: "2"}))
}

// TestAMachineSetThatGoes: it is not created anew by a write that comes late.
func TestAMachineSetThatGoes(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.openShift()
	s.start()
	for range 5 {
		s.apply(eightReplicas)
		s.Eventually(s.groups, wait, poll).ShouldNot(BeEmpty())
		set := s.machineSet()
		s.Expect(s.client.Delete(t.Context(), set)).To(Succeed())
		s.reports(v1alpha1.ReasonNodeGroupNotFound)
		s.Consistently(func() bool {
			return apierrors.IsNotFound(s.client.Get(context.Background(), client.ObjectKeyFromObject(set), set))
		}, time.Second, poll).Should(BeTrue())
		s.deletePolicy()
		s.apply("{apiVersion: machine.openshift.io/v1beta1, kind: MachineSet, metadata: {name: gpu, namespace: openshift-machine-api}, " +
			"spec: {template: {spec: {metadata: {labels: {pool: gpu}}}}}}")
	}
}

// TestWithoutTheRights: mode Manage reports what is missing, and writes once it is there.
func TestWithoutTheRights(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.openShift()
	s.start()
	s.apply(eightReplicas)
	s.Expect(s.reports(v1alpha1.ReasonNotPermitted)).To(ContainSubstring("autoscaling.manage=true"))
	s.Expect(s.capacity()).To(BeEmpty())
}

// TestANodeTellsItsMachineSet: node, Machine, MachineSet.
func TestANodeTellsItsMachineSet(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	s.openShift()
	uid := s.machineSet().GetUID()
	s.apply("{apiVersion: machine.openshift.io/v1beta1, kind: Machine, metadata: {name: gpu-x1, namespace: openshift-machine-api, ownerReferences: " +
		"[{apiVersion: machine.openshift.io/v1beta1, kind: MachineSet, name: gpu, controller: true, uid: " + string(uid) + "}]}, spec: {}}")
	s.node("worker-1", "Tesla-T4", 4, map[string]string{"pool": "gpu"}, map[string]string{"machine.openshift.io/machine": "openshift-machine-api/gpu-x1"})
	s.start()
	s.apply("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: research}, spec: " +
		"{nodeSelector: {}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8}}, autoscaling: {mode: Manage}}}")
	s.reports(v1alpha1.ReasonStartupGap)
	group := s.groups()[0]
	s.Expect(group.Nodes).To(BeEquivalentTo(1))
	s.Expect(group.Resources).To(Equal([]v1alpha1.NodeResource{{Name: "nvidia.com/gpu", Count: 32}}))
	s.Expect(s.capacity()).To(HaveKeyWithValue(pure.AnnotationGPUCount, "32"))
}

// TestAnUpgradeOfOpenShift: the version changes in the status of the ClusterVersion, while its spec stays the same.
func TestAnUpgradeOfOpenShift(t *testing.T) {
	t.Parallel()
	s := newSite(t, manage)
	version := s.openShift()
	is := func(reported string) {
		s.Expect(s.client.Get(t.Context(), client.ObjectKey{Name: "version"}, version)).To(Succeed())
		s.Expect(unstructured.SetNestedField(version.Object, reported, "status", "desired", "version")).To(Succeed())
		s.Expect(s.client.Status().Update(t.Context(), version)).To(Succeed())
	}
	is("4.18.30")
	s.start()
	s.apply(eightReplicas)
	s.Expect(s.reports(v1alpha1.ReasonResourceNotSupported)).To(ContainSubstring("OpenShift is 4.18.30"))
	is("4.19.0")
	s.reports(v1alpha1.ReasonStartupGap)
}
