// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"os"
	"testing"

	"github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// TestAnAgentThatCannotReadTheRecordReportsNoGPUWithoutItsDaemon: the daemon runs.
func TestAnAgentThatCannotReadTheRecordReportsNoGPUWithoutItsDaemon(t *testing.T) {
	g, n := gomega.NewWithT(t), newNode(t)
	shared := daemon(10, 1510)
	g.Expect(n.view.Start(t.Context(), shared)).To(gomega.Succeed())
	g.Expect(os.WriteFile(n.path(resource, ".gpusharing.json"), nil, 0o600)).To(gomega.Succeed())

	serving, err := n.view.Observe(t.Context())
	if err != nil {
		return // nothing is reported
	}
	devices := mps.Assign([]gpu.Device{{UUID: shared.Devices[0].UUID}}, serving)
	g.Expect(devices[0].State.MPS).NotTo(gomega.BeNil())
}

// TestARecordThatCannotBeReadHidesNoChangeOfUsers: the daemon that runs serves one user.
func TestARecordThatCannotBeReadHidesNoChangeOfUsers(t *testing.T) {
	g, n := gomega.NewWithT(t), newNode(t)
	shared := daemon(10, 1510)
	g.Expect(n.view.Start(t.Context(), shared)).To(gomega.Succeed())
	g.Expect(os.WriteFile(n.path(resource, ".gpusharing.json"), nil, 0o600)).To(gomega.Succeed())
	shared.MultiUser = true
	g.Expect(n.view.Start(t.Context(), shared)).To(gomega.Succeed())
	a, b := n.daemons.Run(n.pipe(), "pod-a", 1000), n.daemons.Run(n.pipe(), "pod-b", 2000)
	_, served, err := n.daemons.Connect(a)
	g.Expect(served, err).To(gomega.BeTrue())
	_, served, err = n.daemons.Connect(b)
	g.Expect(served, err).To(gomega.BeTrue())
}
