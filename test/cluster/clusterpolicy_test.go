// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"math/rand/v2"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// recreateEvent deletes NVIDIA's ClusterPolicy and creates it again, as a user does who installs the GPU Operator anew.
func (s *run) recreateEvent(random *rand.Rand) {
	s.tell("the ClusterPolicy is deleted: %v", s.deleted(theClusterPolicy()))
	s.rounds(random.IntN(6), random)
	s.tell("the ClusterPolicy is created again")
	s.chart()
}

// chartEvent upgrades the chart of the GPU Operator, which writes mig.strategy: single.
func (s *run) chartEvent(*rand.Rand) {
	s.tell("the chart of the GPU Operator is upgraded")
	s.chart()
}

// chart applies the ClusterPolicy of NVIDIA's chart, as Helm 4 does.
func (s *run) chart() {
	o := &unstructured.Unstructured{}
	s.Expect(yaml.Unmarshal([]byte(clusterPolicy), &o.Object)).To(Succeed())
	s.Expect(s.client.Apply(s.t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("helm"), client.ForceOwnership)).To(Succeed())
}
