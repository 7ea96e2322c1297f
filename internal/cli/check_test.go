// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
)

const someRights = `
kind: ServiceAccount
metadata: {namespace: a, name: one}
---
kind: ClusterRole
metadata: {name: everywhere}
rules:
- {apiGroups: [""], resources: [nodes, pods/eviction], verbs: [patch]}
- {nonResourceURLs: [/metrics], verbs: [get]}
---
kind: Role
metadata: {namespace: a, name: here}
rules:
- {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [x, z], verbs: [get]}
---
kind: ClusterRole
metadata: {name: here}
rules:
- {apiGroups: [""], resources: [secrets], verbs: [get]}
---
kind: ClusterRoleBinding
metadata: {name: everywhere}
roleRef: {kind: ClusterRole, name: everywhere}
subjects:
- {kind: ServiceAccount, namespace: a, name: two}
- {kind: User, name: alice}
---
kind: RoleBinding
metadata: {namespace: a, name: here}
roleRef: {kind: Role, name: here}
subjects: [{kind: ServiceAccount, namespace: a, name: one}]
`

// TestGrantsOfManifests: a role that nothing binds, and a role of the same name and another kind, grant nothing.
func TestGrantsOfManifests(t *testing.T) {
	g := NewWithT(t)
	granted, err := grantsOf([]byte(someRights))
	g.Expect(err).NotTo(HaveOccurred())
	says := map[types.NamespacedName][]string{}
	for _, one := range granted {
		says[one.account] = append(says[one.account], one.String())
	}
	g.Expect(says).To(Equal(map[types.NamespacedName][]string{
		{Namespace: "a", Name: "one"}: {"get leases.coordination.k8s.io x in namespace a", "get leases.coordination.k8s.io z in namespace a"},
		{Namespace: "a", Name: "two"}: {"patch nodes", "patch pods/eviction", "get /metrics"},
	}))
	_, err = grantsOf([]byte("kind: [Role"))
	g.Expect(err).To(MatchError(ContainSubstring("reading the manifests of the operator's rights")))
}

func TestRightsThatAreMissingAreNamed(t *testing.T) {
	g := NewWithT(t)
	granted, err := grantsOf([]byte(someRights))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(rightsFindings(granted, nil)).To(ConsistOf(
		finding{levelOK, "ServiceAccount a/one has its rights"}, finding{levelOK, "ServiceAccount a/two has its rights"}))
	g.Expect(rightsFindings(granted, granted[2:4])).To(ConsistOf(
		finding{levelOK, "ServiceAccount a/one has its rights"},
		finding{levelError, "ServiceAccount a/two may not patch nodes, patch pods/eviction. Its Roles or their bindings were changed or deleted: " +
			"helm upgrade creates them again"}))
}

// TestACheckWaitsForAnUpdateThatGoesOn: helm test follows helm upgrade, and hundreds of nodes take longer than the test
// waits for errors.
func TestACheckWaitsForAnUpdateThatGoesOn(t *testing.T) {
	type look struct {
		after         time.Duration
		updated       int
		updating      bool
		again, goesOn bool
	}
	const minute = time.Minute
	for title, looks := range map[string][]look{
		"no update":                      {{0, 9, false, true, false}, {minute, 9, false, true, false}, {2 * minute, 9, false, false, false}},
		"an update that goes on":         {{0, 0, true, true, false}, {minute, 4, true, true, true}, {2 * minute, 8, true, true, true}, {239 * time.Second, 8, true, true, true}},
		"one that goes on for too long":  {{0, 1, true, true, true}, {3 * minute, 8, true, true, true}, {4 * minute, 12, true, false, true}},
		"one that stands still":          {{0, 0, true, true, false}, {minute, 4, true, true, true}, {179 * time.Second, 4, true, true, true}, {3 * minute, 4, true, false, false}},
		"one whose first agents go down": {{0, 4, true, true, true}, {minute, 3, true, true, true}, {2 * minute, 4, true, false, false}},
		"one that ends":                  {{0, 4, true, true, true}, {3 * minute, 9, false, false, false}},
	} {
		t.Run(title, func(t *testing.T) {
			w := checkWait{Patience: Patience{Timeout: 2 * minute, Update: 4 * minute}, since: now}
			for _, l := range looks {
				again, goesOn := w.look(now.Add(l.after), l.updated, l.updating)
				NewWithT(t).Expect([]bool{again, goesOn}).To(Equal([]bool{l.again, l.goesOn}), "after %s", l.after)
			}
		})
	}
	g := NewWithT(t)
	is := healthy(t, 3)
	is.agentSets, is.nodes[2].agents, is.updateGoesOn = []agentSet{{"x/agents", 3, 2, 1, true, false, ""}}, nil, true
	g.Expect(unhealthy(diagnose(is))).To(BeFalse(), "a release that is being upgraded is not rolled back")
	g.Expect(diagnose(is)).To(ContainElement(finding{
		levelWarning,
		"The update of daemonset x/agents goes on: 1 agent of 3 nodes to be replaced. Wait for it, or look at the pods that are not ready",
	}))
}
