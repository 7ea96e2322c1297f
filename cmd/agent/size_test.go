// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// TestTheAgentLinksNoTemplates: a program that links text/template keeps every exported method of every type that it
// registers, which of Kubernetes' API are 10 MB, on every node with GPUs. gRPC links it unless it is built with a tag.
func TestTheAgentLinksNoTemplates(t *testing.T) {
	g := NewWithT(t)
	linked, err := exec.CommandContext(t.Context(), "go", "list", "-tags", "grpcnotrace", "-deps", ".").Output()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(strings.Fields(string(linked))).To(And(ContainElement("google.golang.org/grpc"), Not(ContainElement("text/template"))))
	root := filepath.Join("..", "..")
	for _, file := range []string{"Dockerfile", "Makefile", "hack/e2e/build.sh"} {
		text, err := os.ReadFile(filepath.Join(root, file))
		g.Expect(err).NotTo(HaveOccurred())
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "go build") && strings.Contains(line, "./cmd/agent") {
				g.Expect(line).To(ContainSubstring("-tags grpcnotrace"), file)
			}
		}
	}
}
