// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env_test

import (
	"testing"

	. "github.com/onsi/gomega"
	authenticationv1 "k8s.io/api/authentication/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

func TestIdentityOfAPodOnANode(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	c, err := cluster.ClientAs(t.Context(), env.Identity{
		Namespace: "somewhere", ServiceAccount: "agent", Pod: "agent-1", Node: "node-1",
	})
	g.Expect(err).NotTo(HaveOccurred())

	review := &authenticationv1.SelfSubjectReview{}
	g.Expect(c.Create(t.Context(), review)).To(Succeed())
	g.Expect(review.Status.UserInfo.Username).To(Equal("system:serviceaccount:somewhere:agent"))
	g.Expect(review.Status.UserInfo.Extra["authentication.kubernetes.io/node-name"]).
		To(HaveExactElements("node-1"), "the API server can tell one node's agent from another's")
}
