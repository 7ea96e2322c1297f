// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

func TestAgentFlags(t *testing.T) {
	tests := map[string]struct {
		args []string
		env  string // NODE_NAME
		err  string
	}{
		"the node from the environment": {env: "n1"},
		"the node from its flag":        {args: []string{"--node-name=n1"}, env: "n2"},
		"no node":                       {err: "--node-name, or the environment variable NODE_NAME, must name the node"},
		"an unknown flag":               {args: []string{"--gpu"}, env: "n1", err: "flag provided but not defined: -gpu"},
		"an argument too many":          {args: []string{"mps"}, env: "n1", err: `unknown argument "mps"; see --help`},
		"a driver root that is relative": {
			args: []string{"--driver-root=run/nvidia"}, env: "n1", err: `--driver-root must be an absolute path, not "run/nvidia"`,
		},
		"a driver that is found":   {args: []string{"--host-root=/host", "--driver-root=auto", "--container-root=/"}, env: "n1"},
		"a host root that is none": {args: []string{"--host-root="}, env: "n1", err: `--host-root must be an absolute path, not ""`},
		"a sampling interval":      {args: []string{"--sampling-interval=15s", "--metrics-bind-address=:8443"}, env: "n1"},
		"a sampling interval that is too short": {
			args: []string{"--sampling-interval=1s"}, env: "n1", err: "--sampling-interval must be 0 or at least 5s, not 1s",
		},
		"samples that nobody can read": {
			args: []string{"--sampling-interval=15s"}, env: "n1",
			err: "--sampling-interval needs --metrics-bind-address, at which the agent serves what it keeps",
		},
		"a feature gate":                       {args: []string{"--node-name=n1", "--feature-gates=MemoryLimits=true,OnDemandMIG=true"}},
		"a feature gate that there is none of": {args: []string{"--feature-gates=Memory=true"}, env: "n1", err: `invalid value "Memory=true" for flag -feature-gates: no feature gate is called "Memory"; there is MemoryLimits, OnDemandMIG`},
		"a resync of nothing":                  {args: []string{"--resync=0"}, env: "n1", err: "--resync must be longer than 0, not 0s"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			t.Setenv("NODE_NAME", tc.env)
			f, err := parseAgentFlags(tc.args)
			if tc.err != "" {
				g.Expect(err).To(MatchError(tc.err))
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(f.node).To(Equal("n1"))
			g.Expect(f.driverRoot).To(Equal("auto"))
			g.Expect(f.mpsRoot).To(Equal("/run/nvidia/mps"))
			g.Expect(f.podResourcesSocket).To(Equal("/var/lib/kubelet/pod-resources/kubelet.sock"))
			g.Expect(f.resync).To(Equal(time.Minute))
		})
	}
}

func TestMPSHostMakesItsRootAndEndsWhenTold(t *testing.T) {
	g := NewWithT(t)
	root := filepath.Join(t.TempDir(), "run", "mps")
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx, []string{"mps-host", "--mps-root=" + root}) }()
	g.Eventually(func() error { _, err := os.Stat(root); return err }, "30s").Should(Succeed())
	stop()
	g.Eventually(done, "30s").Should(Receive(Succeed()))
}

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
