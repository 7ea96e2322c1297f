// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/types"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// checkEvery is how often a check looks again.
const checkEvery = 2 * time.Second

// Check prints what doctor finds, and the rights that manifests grant to the operator's accounts and the API server
// does not: what the pod of `helm test` does. Manifests are YAML documents. It looks again until nothing is an error,
// as long as the patience lasts: agents take a moment after an installation, and an upgrade replaces them a few at a
// time. Errors: ErrUnhealthy, or the API server does not answer, or the account of the check lacks rights.
func (p *Program) Check(ctx context.Context, config *rest.Config, manifests []byte, wait Patience) error {
	granted, err := grantsOf(manifests)
	if err != nil {
		return err
	}
	for w := (checkWait{Patience: wait, since: p.Clock.Now()}); ; {
		is, rights, err := p.checkOnce(ctx, config, granted)
		updated, updating := is.updated()
		again, goesOn := w.look(p.Clock.Now(), updated, updating)
		if again && (err != nil || unhealthy(append(diagnose(is), rights...))) {
			select {
			case <-p.Clock.After(checkEvery):
				continue
			case <-ctx.Done():
			}
		}
		if err != nil {
			return err
		}
		is.updateGoesOn = goesOn
		return p.report(append(diagnose(is), rights...), "")
	}
}

// Patience is how long a check waits.
type Patience struct {
	// Timeout is how long it looks again while there are errors.
	Timeout time.Duration
	// Update is how long it looks again while an update of the agents goes on, which is one that has reached another
	// node within Timeout.
	Update time.Duration
}

// checkWait is a check that waits.
type checkWait struct {
	Patience

	since, progress time.Time // of the last progress of an update
	updated         int
}

// look decides after a look at the cluster whether to look again if there are errors, and whether an update of the
// agents goes on.
func (w *checkWait) look(now time.Time, updated int, updating bool) (again, goesOn bool) {
	if updated > w.updated {
		w.updated, w.progress = updated, now
	}
	goesOn = updating && now.Sub(w.progress) < w.Timeout
	waited := now.Sub(w.since)
	return waited < w.Timeout || goesOn && waited < w.Update, goesOn
}

// checkOnce reads what doctor reads, and finds what rights are missing.
func (p *Program) checkOnce(ctx context.Context, config *rest.Config, granted []grant) (installation, []finding, error) {
	is, err := p.examineCluster(ctx, config, namespaceOf(granted))
	if err != nil {
		return is, nil, err
	}
	c, err := clientOf(config)
	if err != nil {
		return is, nil, err
	}
	missing, err := missingGrants(ctx, c, granted)
	return is, rightsFindings(granted, missing), err
}

// namespaceOf is the namespace of the controller's account; empty: it has no rights.
func namespaceOf(granted []grant) string {
	for _, g := range granted {
		if g.account.Name == controllerName {
			return g.account.Namespace
		}
	}
	return ""
}

// grant is one right of a ServiceAccount. One of resource and path is set.
type grant struct {
	account  types.NamespacedName
	resource authorizationv1.ResourceAttributes
	path     authorizationv1.NonResourceAttributes
}

// String is the right as a sentence names it, such as "patch nodes" or "get leases gpu-sharing-controller in namespace
// gpu-sharing-operator".
func (g grant) String() string {
	r := g.resource
	if r.Resource == "" {
		return g.path.Verb + " " + g.path.Path
	}
	says := r.Verb + " " + r.Resource
	if r.Subresource != "" {
		says += "/" + r.Subresource
	}
	if r.Group != "" {
		says += "." + r.Group
	}
	if r.Name != "" {
		says += " " + r.Name
	}
	if r.Namespace != "" {
		says += " in namespace " + r.Namespace
	}
	return says
}

// bound is a Role or ClusterRole as a binding refers to it. The namespace of a ClusterRole is empty.
type bound struct{ kind, namespace, name string }

// grantsOf are the rights that the Roles, ClusterRoles and their bindings among YAML documents grant to
// ServiceAccounts, sorted by account.
func grantsOf(manifests []byte) ([]grant, error) {
	roles, bindings := map[bound][]rbacv1.PolicyRule{}, []rbacv1.RoleBinding{}
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifests))); ; {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		// A Role and a ClusterRole have the same fields here, and so have their bindings.
		var o struct {
			rbacv1.RoleBinding
			Rules []rbacv1.PolicyRule `json:"rules"`
		}
		if err == nil {
			err = yaml.Unmarshal(document, &o)
		}
		if err != nil {
			return nil, fmt.Errorf("reading the manifests of the operator's rights: %w", err)
		}
		switch o.Kind {
		case "Role", "ClusterRole":
			roles[bound{o.Kind, o.Namespace, o.Name}] = o.Rules
		case "RoleBinding", "ClusterRoleBinding":
			bindings = append(bindings, o.RoleBinding)
		}
	}
	var all []grant
	for i := range bindings {
		b := &bindings[i]
		role := bound{kind: b.RoleRef.Kind, name: b.RoleRef.Name}
		if role.kind == "Role" {
			role.namespace = b.Namespace
		}
		for _, subject := range b.Subjects {
			if subject.Kind != rbacv1.ServiceAccountKind {
				continue
			}
			for _, rule := range roles[role] {
				all = append(all, grantsOfRule(types.NamespacedName{Namespace: subject.Namespace, Name: subject.Name}, b.Namespace, rule)...)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b grant) int { return strings.Compare(a.account.String(), b.account.String()) })
	return all, nil
}

// grantsOfRule are the rights of a rule, in a namespace; empty: in all of the cluster.
func grantsOfRule(account types.NamespacedName, namespace string, rule rbacv1.PolicyRule) (all []grant) {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, verb := range rule.Verbs {
		for _, path := range rule.NonResourceURLs {
			all = append(all, grant{account: account, path: authorizationv1.NonResourceAttributes{Verb: verb, Path: path}})
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, name := range names {
					resource, subresource, _ := strings.Cut(resource, "/")
					all = append(all, grant{account: account, resource: authorizationv1.ResourceAttributes{
						Namespace: namespace, Verb: verb, Group: group, Resource: resource, Subresource: subresource, Name: name,
					}})
				}
			}
		}
	}
	return all
}

// missingGrants asks the API server which rights it does not grant. It asks the authorizer that decides, whatever the
// roles say.
func missingGrants(ctx context.Context, c client.Client, granted []grant) (missing []grant, err error) {
	for _, g := range granted {
		const serviceAccounts = "system:serviceaccounts"
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:   "system:serviceaccount:" + g.account.Namespace + ":" + g.account.Name,
			Groups: []string{serviceAccounts, serviceAccounts + ":" + g.account.Namespace, "system:authenticated"},
		}}
		if g.resource.Resource != "" {
			review.Spec.ResourceAttributes = &g.resource
		} else {
			review.Spec.NonResourceAttributes = &g.path
		}
		if err := c.Create(ctx, review); err != nil {
			return nil, fmt.Errorf("asking what %s may do: %w", g.account, err)
		}
		if !review.Status.Allowed {
			missing = append(missing, g)
		}
	}
	return missing, nil
}

// rightsFindings are findings about the rights of each account that is granted some.
func rightsFindings(granted, missing []grant) (found []finding) {
	lacks := map[string][]string{}
	for _, g := range granted {
		lacks[g.account.String()] = nil
	}
	for _, g := range missing {
		lacks[g.account.String()] = append(lacks[g.account.String()], g.String())
	}
	for _, account := range slices.Sorted(maps.Keys(lacks)) {
		if names := lacks[account]; len(names) > 0 {
			found = append(found, finding{levelError, fmt.Sprintf("ServiceAccount %s may not %s. Its Roles or their bindings were changed or deleted: "+
				"helm upgrade creates them again", account, format.Few(names, mostNamed))})
			continue
		}
		found = append(found, finding{levelOK, fmt.Sprintf("ServiceAccount %s has its rights", account)})
	}
	return found
}
