// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

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
