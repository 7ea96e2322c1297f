// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// TestADefaultBesideAPolicyForSomeNodes: on two nodes a cluster-wide default and a policy for one of them stand side by
// side, and the default governs both when that policy goes.
func TestADefaultBesideAPolicyForSomeNodes(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2)
	f.policy(timeSlicing("2"), "{maxUnavailable: 2}")
	f.ready()
	f.step("each node has the policy with the highest priority that selects it", func() {
		f.apply("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: some}, spec: {priority: 10, " +
			"nodeSelector: {matchLabels: {kubernetes.io/hostname: n02}}, sharing: " + timeSlicing("4") + "}}")
		f.advertise(map[string]int64{"n01": 4, "n02": 8})
		f.Expect(f.spec("n01").PolicyName).To(Equal("research"))
		f.Expect(f.spec("n02").PolicyName).To(Equal("some"))
		f.ready()
	})
	f.step("the default governs the node of a policy that goes", func() {
		gone := &v1alpha1.GPUSharingPolicy{}
		gone.Name = "some"
		f.Expect(f.client.Delete(t.Context(), gone)).To(Succeed())
		f.advertise(map[string]int64{"n01": 4, "n02": 4})
		f.Eventually(func() string { return f.spec("n02").PolicyName }, patience, pollEvery).Should(Equal("research"))
	})
}

// advertise waits until the nodes advertise so many GPUs.
func (f *fleet) advertise(want map[string]int64) {
	f.t.Helper()
	f.Eventually(func() map[string]int64 {
		have := map[string]int64{}
		for _, n := range f.world().Nodes {
			have[n.Name] = n.Allocatable["nvidia.com/gpu"]
		}
		return have
	}, patience, pollEvery).Should(Equal(want))
}
