// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// leaseIn is a lease of the controller's name that was renewed at a time.
func leaseIn(namespace string, renewed time.Time) *coordinationv1.Lease {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: controllerName}}
	lease.Spec = coordinationv1.LeaseSpec{
		HolderIdentity: new("controller-1_6d0c"), LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: renewed},
	}
	return lease
}

// deploymentIn is a Deployment with the controller's label.
func deploymentIn(namespace string) *appsv1.Deployment {
	labels := map[string]string{nameLabel: controllerName}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: controllerName, Labels: labels},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "controller", Image: "example.com/controller"}}},
		}},
	}
}

// bindingOf is the ClusterRoleBinding of the controller's account in a namespace.
func bindingOf(namespace string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: controllerName + "-" + namespace},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: controllerName},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: controllerName}},
	}
}

func byFieldName(o client.Object) []string { return []string{o.GetName()} }

// TestARenewedLeaseProvesAController: wherever it runs, so also without a Deployment. Kubernetes' ClusterRole edit lets
// each tenant write leases, and Deployments with any label, in his own namespace: they neither stand in for a
// controller, of which restore would then expect that it restores the nodes, nor hide one.
func TestARenewedLeaseProvesAController(t *testing.T) {
	scheme, err := newScheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	alive, stopped := now, now.Add(-72*time.Hour)
	const own, tenant = "gpu-sharing-operator", "team"
	available := func(namespace string) *appsv1.Deployment {
		d := deploymentIn(namespace)
		d.Status.AvailableReplicas = 1
		return d
	}
	unelected := func(replicas int32) *appsv1.Deployment {
		d := deploymentIn(own)
		d.Spec.Template.Spec.Containers[0].Args = []string{"--leader-elect=false"}
		d.Status.AvailableReplicas = replicas
		return d
	}
	nobodys := leaseIn(own, alive)
	nobodys.Spec.HolderIdentity = new("")
	const renewed, isAvailable = "lease " + own + "/gpu-sharing-controller is renewed", "deployment " + own + "/gpu-sharing-controller is available"
	for title, tc := range map[string]struct {
		objects       []client.Object
		namespace     string            // of --namespace
		forbidden     client.ObjectList // what the user may not read
		proof, absent string            // absent begins so
	}{
		"a controller without a Deployment": {objects: []client.Object{bindingOf(own), leaseIn(own, alive)}, proof: renewed},
		"a controller with one of which no pod is available": {
			objects: []client.Object{bindingOf(own), deploymentIn(own), leaseIn(own, alive)}, proof: renewed,
		},
		"a controller without leader election": {objects: []client.Object{bindingOf(own), available(own)}, proof: isAvailable},
		"a controller without leader election, where an earlier one with it left its lease": {
			objects: []client.Object{bindingOf(own), leaseIn(own, stopped), unelected(1)}, proof: isAvailable,
		},
		"a controller without leader election of which no pod is available, and an old lease": {
			objects: []client.Object{bindingOf(own), leaseIn(own, stopped), unelected(0)}, absent: "No controller runs: lease " + own,
		},
		"one that cannot get its lease, though a pod of it is available": {
			objects: []client.Object{bindingOf(own), leaseIn(own, stopped), available(own)}, absent: "No controller runs: lease " + own,
		},
		"a user who may not read Deployments, where a lease is old": {
			objects: []client.Object{bindingOf(own), leaseIn(own, stopped)}, forbidden: &appsv1.DeploymentList{}, absent: "No controller runs: lease " + own,
		},
		"one that OLM has installed, under a name of its own": {
			objects: []client.Object{func() client.Object { b := bindingOf(own); b.Name = "gpu-sharing-operator.v0.1.0-6cd9x"; return b }(), leaseIn(own, alive)},
			proof:   renewed,
		},
		"one outside of the cluster, whose namespace the user names": {objects: []client.Object{leaseIn(own, alive)}, namespace: own, proof: renewed},
		"one that stopped":       {objects: []client.Object{bindingOf(own), leaseIn(own, stopped)}, absent: "No controller runs: lease " + own + "/gpu-sharing-controller was last renewed at "},
		"one that gave up":       {objects: []client.Object{bindingOf(own), nobodys}, absent: "No controller runs: nobody holds lease " + own},
		"one that never started": {objects: []client.Object{bindingOf(own), deploymentIn(own)}, absent: "No controller runs: namespace " + own + " has neither lease "},
		"one that stopped, and a Deployment and a lease of a tenant": {
			objects: []client.Object{bindingOf(own), leaseIn(own, stopped), available(tenant), leaseIn(tenant, alive)}, absent: "No controller runs: lease " + own,
		},
		"the controller, and a Deployment and a lease of a tenant, whose namespace is listed first": {
			objects: []client.Object{bindingOf(own), leaseIn(own, alive), deploymentIn("a"), leaseIn("a", stopped)}, proof: renewed,
		},
		"an uninstalled one, and a Deployment and a lease of a tenant": {
			objects: []client.Object{available(tenant), leaseIn(tenant, alive)}, absent: "No controller is installed: no ClusterRoleBinding ",
		},
		"one of two that are installed":                {objects: []client.Object{bindingOf("a"), bindingOf(own), leaseIn("a", stopped), leaseIn(own, alive)}, proof: renewed},
		"a user who may not read Deployments":          {objects: []client.Object{bindingOf(own), leaseIn(own, alive)}, forbidden: &appsv1.DeploymentList{}, proof: renewed},
		"that user, where a controller needs no lease": {objects: []client.Object{bindingOf(own), available(own)}, forbidden: &appsv1.DeploymentList{}},
		"a user who may not read leases":               {objects: []client.Object{bindingOf(own), leaseIn(own, stopped)}, forbidden: &coordinationv1.LeaseList{}},
		"a user who may not read ClusterRoleBindings":  {objects: []client.Object{bindingOf(own), leaseIn(own, stopped)}, forbidden: &rbacv1.ClusterRoleBindingList{}},
		"that user, who names the namespace of a controller": {
			objects: []client.Object{bindingOf(own), leaseIn(own, alive)}, namespace: own, forbidden: &rbacv1.ClusterRoleBindingList{}, proof: renewed,
		},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(tc.objects...).WithIndex(&coordinationv1.Lease{}, "metadata.name", byFieldName).
				WithInterceptorFuncs(interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
					if tc.forbidden != nil && reflect.TypeOf(list) == reflect.TypeOf(tc.forbidden) {
						return apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no"))
					}
					return c.List(ctx, list, opts...)
				}}).Build()
			leader, err := leadershipOf(t.Context(), c, tc.namespace, now)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(leader.proof).To(Equal(tc.proof))
			if tc.absent == "" {
				g.Expect(leader.absent).To(BeEmpty())
			}
			g.Expect(leader.absent).To(And(HavePrefix(tc.absent), Not(ContainSubstring(tenant))))
		})
	}
}
