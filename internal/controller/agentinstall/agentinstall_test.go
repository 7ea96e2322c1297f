// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agentinstall_test

import (
	"context"
	"errors"
	"testing"
	"testing/fstest"

	. "github.com/onsi/gomega"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/agentinstall"
)

const daemonSet = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent, namespace: written-elsewhere}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec: {containers: [{name: agent, image: agent-image}]}
`

func newOwner() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "ours", Name: "operands", UID: "1"}}
}

func manifests(owned, kept string) fstest.MapFS {
	return fstest.MapFS{"owned.yaml": {Data: []byte(owned)}, "kept.yaml": {Data: []byte(kept)}}
}

func newController(c client.Client, files fstest.MapFS) *agentinstall.Controller {
	return agentinstall.New(c, agentinstall.Options{
		Owner:     types.NamespacedName{Namespace: "ours", Name: "operands"},
		Manifests: files, Images: map[string]string{"agent-image": "registry/agent:1"}, Events: events.NewFakeRecorder(8),
	})
}

func TestWhatCannotBeInstalledIsSaid(t *testing.T) {
	tests := map[string]struct {
		files fstest.MapFS
		says  string
	}{
		"a file that the bundle lacks":       {fstest.MapFS{"owned.yaml": {}}, "reading what is to be installed: open kept.yaml"},
		"a file that is no YAML":             {manifests("a: [", ""), "reading what is to be installed from owned.yaml"},
		"an image that the release lacks":    {manifests("", "{kind: DaemonSet, metadata: {name: a}, spec: {template: {spec: {containers: [{image: other}]}}}}"), "one of the containers of DaemonSet a: nobody named the image other"},
		"a container that is no object":      {manifests("{kind: DaemonSet, metadata: {name: a}, spec: {template: {spec: {containers: [x]}}}}", ""), "one of the containers of DaemonSet a: is no object"},
		"containers that are no list at all": {manifests("{kind: DaemonSet, metadata: {name: a}, spec: {template: {spec: {containers: 1}}}}", ""), "reading the containers of DaemonSet a: .spec.template.spec.containers accessor error"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := newController(fake.NewFakeClient(), tc.files).Reconcile(t.Context(), newOwner())
			NewWithT(t).Expect(err).To(MatchError(ContainSubstring(tc.says)))
		})
	}
}

func TestOneThatFailsDoesNotBlockTheOthers(t *testing.T) {
	g := NewWithT(t)
	var applied int
	c := interceptor.NewClient(fake.NewFakeClient(), interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			applied++
			if applied == 1 {
				return apierrors.NewForbidden(schema.GroupResource{Group: "apps", Resource: "daemonsets"}, "agent", nil)
			}
			return nil
		},
	})
	_, err := newController(c, manifests(daemonSet, daemonSet)).Reconcile(t.Context(), newOwner())
	g.Expect(err).To(MatchError(ContainSubstring("installing DaemonSet agent: daemonsets.apps \"agent\" is forbidden")))
	g.Expect(applied).To(Equal(2))
}

// OLM takes a ClusterServiceVersion for installed once its Deployments are ready.
func TestReadyOnceAndAsLongAsAllIsInstalled(t *testing.T) {
	g := NewWithT(t)
	refused := true
	c := interceptor.NewClient(fake.NewFakeClient(), interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			if refused {
				return apierrors.NewForbidden(schema.GroupResource{Group: "apps", Resource: "daemonsets"}, "agent", errors.New("denied by a policy"))
			}
			return nil
		},
	})
	recorder := events.NewFakeRecorder(8)
	controller := agentinstall.New(c, agentinstall.Options{
		Owner:     types.NamespacedName{Namespace: "ours", Name: "operands"},
		Manifests: manifests(daemonSet, ""), Images: map[string]string{"agent-image": "registry/agent:1"}, Events: recorder,
	})
	reconciles := func() { _, _ = controller.Reconcile(t.Context(), newOwner()) }
	g.Expect(controller.Installed(nil)).NotTo(Succeed(), "before the first reconcile")

	reconciles()
	reconciles()
	g.Expect(controller.Installed(nil)).To(MatchError(ContainSubstring("denied by a policy")))
	g.Expect(recorder.Events).To(Receive(And(ContainSubstring(v1alpha1.EventOperandsNotInstalled), ContainSubstring("DaemonSet agent"))))
	g.Expect(recorder.Events).NotTo(Receive(), "the same again is no news")

	refused = false
	reconciles()
	g.Expect(controller.Installed(nil)).To(Succeed())
	refused = true
	reconciles()
	g.Expect(controller.Installed(nil)).NotTo(Succeed(), "what was lost since cannot be mended")
	g.Expect(recorder.Events).To(Receive())
}

// MPS pods of two namespaces on a node would undo each other's work.
func TestNoSecondOperatorBeginsInAnotherNamespace(t *testing.T) {
	where := func(namespace string) *admissionv1.ValidatingAdmissionPolicyBinding {
		return &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{
			Name: "gpu-sharing-mps-nodes", Annotations: map[string]string{v1alpha1.AnnotationNamespace: namespace},
		}}
	}
	pods := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "theirs", Name: "gpu-sharing-mps"}}
	tests := map[string]struct {
		cluster []client.Object
		refused bool
	}{
		"the first one":                      {},
		"the same namespace":                 {cluster: []client.Object{where("ours"), pods}},
		"another one, where nothing is left": {cluster: []client.Object{where("theirs")}},
		"another one":                        {cluster: []client.Object{where("theirs"), pods}, refused: true},
		"a tenant's DaemonSet of that name":  {cluster: []client.Object{where(""), pods}},
	}
	for title, tc := range tests {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			applied := 0
			c := interceptor.NewClient(fake.NewClientBuilder().WithObjects(tc.cluster...).Build(), interceptor.Funcs{
				Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
					applied++
					return nil
				},
			})
			controller := newController(c, manifests(daemonSet, ""))
			_, err := controller.Reconcile(t.Context(), newOwner())
			if !tc.refused {
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(applied).To(Equal(1))
				return
			}
			g.Expect(err).To(MatchError(ContainSubstring("is installed in namespace theirs already, or was: daemonset theirs/gpu-sharing-mps is there")))
			g.Expect(applied).To(BeZero())
			g.Expect(controller.Installed(nil)).To(MatchError(err), "OLM does not take it for installed")
		})
	}
}

// Helm's next upgrade, or kubectl apply -k, would undo what OLM does, and helm uninstall would take it along.
func TestWhatHelmOrKustomizeInstalledIsTakenOverByNobody(t *testing.T) {
	agents := func(annotations map[string]string, manager string) *appsv1.DaemonSet {
		return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{
			Namespace: "ours", Name: "agent", Annotations: annotations, ManagedFields: []metav1.ManagedFieldsEntry{{
				Manager: manager, Operation: metav1.ManagedFieldsOperationApply, APIVersion: "apps/v1", FieldsType: "FieldsV1",
				FieldsV1: metav1.NewFieldsV1(`{"f:metadata": {"f:labels": {}}}`),
			}},
		}}
	}
	tests := map[string]struct {
		there *appsv1.DaemonSet
		says  string
	}{
		"Helm": {
			agents(map[string]string{"meta.helm.sh/release-name": "sharing"}, "helm"),
			"DaemonSet ours/agent was installed by Helm, and not by OLM: one would undo the work of the other. Run helm uninstall -n ours sharing,",
		},
		"kustomize": {
			agents(nil, "kubectl"),
			"DaemonSet ours/agent was installed by kubectl or kustomize, and not by OLM: one would undo the work of the other. Run kubectl delete daemonset -n ours agent,",
		},
		"this program, before OLM made the Deployment anew": {there: agents(nil, agentinstall.FieldManager)},
	}
	for title, tc := range tests {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			applied := 0
			c := interceptor.NewClient(fake.NewClientBuilder().WithReturnManagedFields().WithObjects(tc.there).Build(), interceptor.Funcs{
				Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
					applied++
					return nil
				},
			})
			_, err := newController(c, manifests(daemonSet, "")).Reconcile(t.Context(), newOwner())
			if tc.says == "" {
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(applied).To(Equal(1))
				return
			}
			g.Expect(err).To(MatchError(ContainSubstring(tc.says)))
			g.Expect(applied).To(BeZero())
		})
	}
}

func TestNothingIsInstalledForAnOwnerThatGoes(t *testing.T) {
	g := NewWithT(t)
	owner := newOwner()
	now := metav1.Now()
	owner.DeletionTimestamp = &now
	_, err := newController(nil, nil).Reconcile(t.Context(), owner)
	g.Expect(err).NotTo(HaveOccurred())
}
