// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// gatherPrograms finds the namespaces in which programs of NVIDIA's and of NFD run, and the DaemonSets of NVIDIA's
// DRA driver. Errors: the API server does not answer what the account of such a DaemonSet may do, for the first
// time.
func (c *Controller) gatherPrograms(ctx context.Context, s *seen) (world.Programs, []appsv1.DaemonSet, error) {
	programs := world.Programs{
		ConfigMap: s.plugin.ConfigMap, GPUOperators: s.plugin.GPUOperators,
		Discovery: slices.Sorted(maps.Keys(s.features.discovery)),
	}
	sets := &appsv1.DaemonSetList{}
	if err := c.client.List(ctx, sets, client.UnsafeDisableDeepCopy); err != nil {
		return programs, nil, fmt.Errorf("reading DaemonSets: %w", err)
	}
	var drivers []appsv1.DaemonSet
	for i := range sets.Items {
		set := &sets.Items[i]
		if !world.MakesGPUOffers(set) {
			continue
		}
		if !slices.Contains(programs.GPUOperators, set.Namespace) {
			name := cmp.Or(set.Spec.Template.Spec.ServiceAccountName, "default")
			account := types.NamespacedName{Namespace: set.Namespace, Name: name}
			publishes, err := c.publishers.may(ctx, c.client, account, c.Clock.Now())
			if err != nil {
				return programs, nil, err
			}
			if !publishes {
				continue
			}
			programs.Drivers = append(programs.Drivers, set.Namespace)
		}
		drivers = append(drivers, *set)
	}
	slices.Sort(programs.Drivers)
	programs.Drivers = slices.Compact(programs.Drivers)
	return programs, drivers, nil
}

// publishers remembers which accounts may publish ResourceSlices, as the API server has answered. NVIDIA's DRA
// driver may be installed in any namespace, and nothing else tells it there that a user of one namespace cannot
// imitate.
type publishers map[types.NamespacedName]publisher

type publisher struct {
	may   bool
	asked time.Time
}

// How long an answer of the API server counts. The driver's chart may make the account's rights after its DaemonSet.
const (
	mayPublish    = 10 * time.Minute
	mayNotPublish = time.Minute
)

// may reports whether an account may publish ResourceSlices. While the API server does not answer, its last answer
// counts.
func (p publishers) may(
	ctx context.Context, c client.Client, account types.NamespacedName, now time.Time,
) (bool, error) {
	lasts := mayNotPublish
	last, known := p[account]
	if last.may {
		lasts = mayPublish
	}
	if known && now.Sub(last.asked) < lasts {
		return last.may, nil
	}
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: fmt.Sprintf("system:serviceaccount:%s:%s", account.Namespace, account.Name),
		Groups: []string{
			"system:serviceaccounts", "system:serviceaccounts:" + account.Namespace, "system:authenticated",
		},
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: sliceKind.Group, Resource: "resourceslices", Verb: "create",
		},
	}}
	if err := c.Create(ctx, review); err != nil {
		if known {
			return last.may, nil
		}
		return false, fmt.Errorf("asking whether account %s may publish ResourceSlices: %w", account, err)
	}
	p[account] = publisher{may: review.Status.Allowed, asked: now}
	return review.Status.Allowed, nil
}
