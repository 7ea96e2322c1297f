// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"testing"

	. "github.com/onsi/gomega"
)

// TestADaemonSetIsWrittenOnce is about the hash that tells whether what is rendered has changed.
func TestADaemonSetIsWrittenOnce(t *testing.T) {
	g := NewWithT(t)
	hashes := map[string]string{}
	for range 2 {
		for _, set := range render(&clusterPolicy{}) {
			hash, err := hashOf(set)
			g.Expect(err).NotTo(HaveOccurred())
			if before, twice := hashes[set.Name]; twice {
				g.Expect(hash).To(Equal(before), set.Name)
			}
			hashes[set.Name] = hash
		}
	}
	g.Expect(hashes).NotTo(BeEmpty())
	g.Expect(hashes[PluginName]).NotTo(Equal(hashes[FeaturesName]))
}
