// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"os"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

// The files of the operator's CRDs.
const gpuNodesCRD, policiesCRD = "gpusharing.io_gpunodes.yaml", "gpusharing.io_gpusharingpolicies.yaml"

// crdFolder has the operator's CRDs, those of the previous version for the files that are named.
func crdFolder(t *testing.T, old ...string) string {
	t.Helper()
	g := NewWithT(t)
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	folder := t.TempDir()
	for _, file := range []string{gpuNodesCRD, policiesCRD} {
		content, err := os.ReadFile(filepath.Join(root, "config", "crd", file))
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(os.WriteFile(filepath.Join(folder, file), content, 0o600)).To(Succeed())
	}
	for _, file := range old {
		content, err := previous.File(t.Context(), "config/crd/"+file)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(os.WriteFile(filepath.Join(folder, file), content, 0o600)).To(Succeed())
	}
	return folder
}

// everyStrategy are policies of every strategy.
var everyStrategy = []string{
	`{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`, `{strategy: MPS, mps: {replicas: 4}}`, `{strategy: Exclusive}`, sevenEach,
}

// TestTodaysProgramsWorkWithThePreviousCRDs: Helm with crds.install=false, or a user who applies the CRDs in another
// way, may leave them as they were.
func TestTodaysProgramsWorkWithThePreviousCRDs(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2, env.WithOwnCRDs(crdFolder(t, gpuNodesCRD, policiesCRD)))
	for _, sharing := range everyStrategy {
		f.step(sharing, func() {
			f.policy(sharing, `{maxUnavailable: "100%"}`)
			f.ready()
			f.atRest()
		})
	}
}

// versions are those of all objects of the operator.
func (f *fleet) versions() map[string]string {
	f.t.Helper()
	found := map[string]string{}
	nodes, policies := &v1alpha1.GPUNodeList{}, &v1alpha1.GPUSharingPolicyList{}
	for _, list := range []client.ObjectList{nodes, policies} {
		f.Expect(f.client.List(f.t.Context(), list)).To(Succeed())
	}
	for i := range nodes.Items {
		found["GPUNode "+nodes.Items[i].Name] = nodes.Items[i].ResourceVersion
	}
	for i := range policies.Items {
		found["GPUSharingPolicy "+policies.Items[i].Name] = policies.Items[i].ResourceVersion
	}
	return found
}

// atRest waits until nobody writes the operator's objects any more, and checks that it stays so although the agents
// look several times.
func (f *fleet) atRest() {
	f.t.Helper()
	f.Eventually(func(g Gomega) {
		before := f.versions()
		g.Consistently(f.versions, "5s", 5*pollEvery).Should(Equal(before))
	}, "1m", pollEvery).Should(Succeed())
}
