// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/onsi/gomega"
)

func TestOperandFlags(t *testing.T) {
	tests := map[string]struct {
		args       []string
		env, image string
		err        string
	}{
		"the namespace and the image from the environment": {env: "operators", image: "registry/agent:1"},
		"the namespace from its flag":                      {args: []string{"--namespace=operators"}, env: "other", image: "registry/agent:1"},
		"no namespace":                                     {image: "registry/agent:1", err: "--namespace, or the environment variable POD_NAMESPACE, must name the namespace"},
		"no image":                                         {env: "operators", err: "the environment variable RELATED_IMAGE_AGENT must name the agent's image"},
		"an argument too many":                             {args: []string{"now"}, env: "operators", image: "registry/agent:1", err: `unknown argument "now"; see operands --help`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := gomega.NewWithT(t)
			t.Setenv("POD_NAMESPACE", tc.env)
			t.Setenv("RELATED_IMAGE_AGENT", tc.image)
			f, err := parseOperandFlags(tc.args)
			if tc.err != "" {
				g.Expect(err).To(gomega.MatchError(tc.err))
				return
			}
			g.Expect(err).NotTo(gomega.HaveOccurred())
			g.Expect(f.owner.String()).To(gomega.Equal("operators/gpu-sharing-operands"))
			g.Expect(f.agentImage).To(gomega.Equal("registry/agent:1"))
			g.Expect(f.manifests).To(gomega.Equal("/manifests"))
		})
	}
}
