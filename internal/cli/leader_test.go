// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
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
		HolderIdentity: new("controller-1"), LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: renewed},
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

func byFieldName(o client.Object) []string { return []string{o.GetName()} }

// TestALeaseOfATenantIsNoController: restore deletes all policies if a controller runs. Kubernetes' ClusterRole edit lets each tenant write
// leases, and Deployments, in his own namespace.
func TestALeaseOfATenantIsNoController(t *testing.T) {
	scheme, err := newScheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	alive, stopped := now, now.Add(-72*time.Hour)
	const own, tenant = "gpu-sharing-operator", "team"
	available := deploymentIn(own)
	available.Status.AvailableReplicas = 1
	for title, tc := range map[string]struct {
		objects   []client.Object
		forbidden bool // to read Deployments
		says      string
	}{
		"the controller":                               {objects: []client.Object{deploymentIn(own), leaseIn(own, alive)}},
		"a controller without leader election":         {objects: []client.Object{available}},
		"one that stopped":                             {objects: []client.Object{deploymentIn(own), leaseIn(own, stopped)}, says: "lease " + own},
		"one that stopped, and a lease of a tenant":    {objects: []client.Object{deploymentIn(own), leaseIn(own, stopped), leaseIn(tenant, alive)}, says: "lease " + own},
		"an old lease elsewhere":                       {objects: []client.Object{deploymentIn(own), leaseIn(own, alive), leaseIn(tenant, stopped)}},
		"one that stopped, and a Deployment beside it": {objects: []client.Object{deploymentIn(own), leaseIn(own, stopped), deploymentIn(tenant), leaseIn(tenant, alive)}, says: "lease " + own},
		"an uninstalled one, and a lease of a tenant":  {objects: []client.Object{leaseIn(tenant, alive)}, says: "no Deployment"},
		"an uninstalled one":                           {objects: []client.Object{leaseIn(own, stopped)}, says: "lease " + own},
		"a Deployment without pods":                    {objects: []client.Object{deploymentIn(own), leaseIn(tenant, alive)}, says: "no Deployment"},
		"a user who may not read Deployments":          {objects: []client.Object{leaseIn(own, alive)}, forbidden: true},
		"that user, and one that stopped":              {objects: []client.Object{leaseIn(own, stopped)}, forbidden: true, says: "lease " + own},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(tc.objects...).WithIndex(&coordinationv1.Lease{}, "metadata.name", byFieldName).
				WithInterceptorFuncs(interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
					if _, is := list.(*appsv1.DeploymentList); is && tc.forbidden {
						return apierrors.NewForbidden(schema.GroupResource{Resource: "deployments"}, "", errors.New("no"))
					}
					return c.List(ctx, list, opts...)
				}}).Build()
			why, err := noController(t.Context(), c, now)
			g.Expect(err).NotTo(HaveOccurred())
			if tc.says == "" {
				g.Expect(why).To(BeEmpty())
			}
			g.Expect(why).To(HavePrefix(tc.says))
			g.Expect(strings.Contains(why, tenant)).To(BeFalse(), why)
		})
	}
}
