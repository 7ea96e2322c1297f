// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
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

// leaderIn is the pod of that Deployment that holds that lease.
func leaderIn(namespace string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "controller-1", Labels: map[string]string{nameLabel: controllerName}},
		Spec:       deploymentIn(namespace).Spec.Template.Spec,
	}
}

func byFieldName(o client.Object) []string { return []string{o.GetName()} }

// TestATenantNeitherStandsInForAControllerNorHidesOne: restore deletes all policies if a controller runs. Kubernetes' ClusterRole edit lets each
// tenant write leases, and Deployments with any label, in his own namespace.
func TestATenantNeitherStandsInForAControllerNorHidesOne(t *testing.T) {
	scheme, err := newScheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	alive, stopped := now, now.Add(-72*time.Hour)
	const own, tenant = "gpu-sharing-operator", "team"
	available := deploymentIn(own)
	available.Status.AvailableReplicas = 1
	for title, tc := range map[string]struct {
		objects   []client.Object
		forbidden client.ObjectList // what the user may not read
		says, too string            // the message begins with says, and ends with too
	}{
		"the controller":                              {objects: []client.Object{deploymentIn(own), leaseIn(own, alive), leaderIn(own)}},
		"a controller without leader election":        {objects: []client.Object{available}},
		"one that stopped":                            {objects: []client.Object{deploymentIn(own), leaseIn(own, stopped), leaderIn(own)}, says: "lease " + own},
		"one that stopped, and a lease of a tenant":   {objects: []client.Object{deploymentIn(own), leaseIn(own, stopped), leaseIn(tenant, alive)}, says: "lease " + own},
		"an old lease elsewhere":                      {objects: []client.Object{deploymentIn(own), leaseIn(own, alive), leaderIn(own), leaseIn(tenant, stopped)}},
		"an uninstalled one, and a lease of a tenant": {objects: []client.Object{leaseIn(tenant, alive)}, says: "no Deployment"},
		"an uninstalled one":                          {objects: []client.Object{leaseIn(own, stopped)}, says: "lease " + own},
		"a Deployment without pods": {
			objects: []client.Object{deploymentIn(own), leaseIn(tenant, alive)}, says: "no pod of deployment " + own + "/gpu-sharing-controller is available",
		},
		"a lease that another pod holds": {
			objects: []client.Object{deploymentIn(own), leaseIn(own, alive)},
			says:    "lease " + own + "/gpu-sharing-controller is held by controller-1_6d0c, which is no pod of deployment " + own + "/gpu-sharing-controller",
		},
		"one that stopped, and a Deployment and a lease of a tenant": {
			objects: []client.Object{deploymentIn(own), leaseIn(own, stopped), leaderIn(own), deploymentIn(tenant), leaseIn(tenant, alive)},
			says:    "lease " + own + "/gpu-sharing-controller was last renewed at ",
			too:     ", and lease " + tenant + "/gpu-sharing-controller is held by controller-1_6d0c, which is no pod of deployment " + tenant + "/gpu-sharing-controller",
		},
		"the controller, and a Deployment of a tenant": {
			objects: []client.Object{deploymentIn(own), leaseIn(own, alive), leaderIn(own), deploymentIn(tenant)},
		},
		"the controller, and a Deployment and a lease of a tenant, whose namespace is listed first": {
			objects: []client.Object{deploymentIn(own), leaseIn(own, alive), leaderIn(own), deploymentIn("a"), leaseIn("a", stopped)},
		},
		"a user who may not read Deployments": {objects: []client.Object{leaseIn(own, alive)}, forbidden: &appsv1.DeploymentList{}},
		"that user, and one that stopped":     {objects: []client.Object{leaseIn(own, stopped)}, forbidden: &appsv1.DeploymentList{}, says: "lease " + own},
		"a user who may not read pods":        {objects: []client.Object{deploymentIn(own), leaseIn(own, alive)}, forbidden: &corev1.PodList{}},
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
			why, err := noController(t.Context(), c, now)
			g.Expect(err).NotTo(HaveOccurred())
			if tc.says == "" {
				g.Expect(why).To(BeEmpty())
			}
			g.Expect(why).To(And(HavePrefix(tc.says), HaveSuffix(tc.too)))
			g.Expect(strings.Contains(why, tenant)).To(Equal(strings.Contains(tc.too, tenant)), why)
		})
	}
}
