// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// +kubebuilder:rbac:groups=authorization.k8s.io,resources=subjectaccessreviews,verbs=create

// gatherPrograms finds the namespaces in which programs of NVIDIA's and of NFD run, and the DaemonSets of NVIDIA's
// DRA driver. Errors: the API server does not answer what the account of such a DaemonSet may do, for the first
// time.
func (c *Controller) gatherPrograms(ctx context.Context, s *seen) (cluster.Programs, []appsv1.DaemonSet, error) {
	programs := cluster.Programs{
		ConfigMap: s.plugin.ConfigMap, GPUOperators: s.plugin.GPUOperators,
		Discovery: slices.Sorted(maps.Keys(s.features.Discovery)), Own: []string{c.Namespace},
	}
	sets := &appsv1.DaemonSetList{}
	if err := c.client.List(ctx, sets, client.UnsafeDisableDeepCopy); err != nil {
		return programs, nil, fmt.Errorf("reading DaemonSets: %w", err)
	}
	elsewhere := map[types.NamespacedName]bool{}
	offers := slices.DeleteFunc(sets.Items, func(set appsv1.DaemonSet) bool { return !cluster.MakesGPUOffers(&set) })
	for i := range offers {
		if set := &offers[i]; !slices.Contains(programs.GPUOperators, set.Namespace) {
			elsewhere[accountOf(set)] = true
		}
	}
	if err := c.publishers.ask(ctx, c.client, elsewhere, c.Clock.Now()); err != nil {
		return programs, nil, err
	}
	var drivers []appsv1.DaemonSet
	for i := range offers {
		set, account := &offers[i], accountOf(&offers[i])
		switch {
		case !elsewhere[account]:
		case c.publishers[account].may:
			programs.DRADrivers = append(programs.DRADrivers, set.Namespace)
		default:
			continue
		}
		drivers = append(drivers, *set)
	}
	slices.Sort(programs.DRADrivers)
	programs.DRADrivers = slices.Compact(programs.DRADrivers)
	return programs, drivers, nil
}

// accountOf is the account of a DaemonSet's pods.
func accountOf(set *appsv1.DaemonSet) types.NamespacedName {
	return types.NamespacedName{Namespace: set.Namespace, Name: cmp.Or(set.Spec.Template.Spec.ServiceAccountName, "default")}
}

// publishers remembers which accounts may publish ResourceSlices, as the API server has answered. NVIDIA's DRA
// driver may be installed in any namespace, and nothing else tells it there that a user of one namespace cannot
// imitate.
type publishers map[types.NamespacedName]publisher

type publisher struct {
	may     bool
	asked   time.Time
	refused int // answers in succession that it may not
}

// How long an answer of the API server counts: one that an account may not first for a minute, because the driver's
// chart may make the account's rights after its DaemonSet, then for twice as long each time.
const (
	mayPublish    = 10 * time.Minute
	mayNotPublish = time.Minute
)

// mostQuestions is how many accounts are asked about in one reconcile: every user of a namespace can make DaemonSets
// that look like the driver's.
const mostQuestions = 20

// isDue reports whether the answer counts no more.
func (p publisher) isDue(now time.Time) bool {
	lasts := mayPublish
	if !p.may {
		lasts = timing.Doubled(mayNotPublish, mayPublish, p.refused)
	}
	return now.Sub(p.asked) >= lasts
}

// ask asks about those of the accounts whose answers are too old, and forgets all others. The accounts of one namespace
// wait for one another and not for those of others. While the API server does not answer, its last answer counts.
func (p publishers) ask(ctx context.Context, c client.Client, accounts map[types.NamespacedName]bool, now time.Time) error {
	maps.DeleteFunc(p, func(account types.NamespacedName, _ publisher) bool { return !accounts[account] })
	var due []types.NamespacedName
	for account := range accounts {
		if p[account].isDue(now) {
			due = append(due, account)
		}
	}
	slices.SortFunc(due, func(a, b types.NamespacedName) int {
		return cmp.Or(p[a].asked.Compare(p[b].asked), strings.Compare(a.String(), b.String()))
	})
	turn, taken := map[types.NamespacedName]int{}, map[string]int{}
	for _, account := range due {
		turn[account] = taken[account.Namespace]
		taken[account.Namespace]++
	}
	slices.SortStableFunc(due, func(a, b types.NamespacedName) int { return cmp.Compare(turn[a], turn[b]) })
	for _, account := range due[:min(len(due), mostQuestions)] {
		last, known := p[account]
		may, err := mayPublishSlices(ctx, c, account)
		switch {
		case err == nil && may:
			p[account] = publisher{may: true, asked: now}
		case err == nil:
			p[account] = publisher{asked: now, refused: last.refused + 1}
		case !known:
			return fmt.Errorf("asking whether account %s may publish ResourceSlices: %w", account, err)
		}
	}
	return nil
}

// mayPublishSlices asks the API server whether an account may publish ResourceSlices.
func mayPublishSlices(ctx context.Context, c client.Client, account types.NamespacedName) (bool, error) {
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: fmt.Sprintf("system:serviceaccount:%s:%s", account.Namespace, account.Name),
		Groups: []string{
			"system:serviceaccounts", "system:serviceaccounts:" + account.Namespace, "system:authenticated",
		},
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: sliceKind.Group, Resource: "resourceslices", Verb: "create",
		},
	}}
	err := c.Create(ctx, review)
	return review.Status.Allowed, err
}
