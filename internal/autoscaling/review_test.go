// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/autoscaling"
)

// A new node of a paused policy advertises whole GPUs until the rollout goes on.
func TestAPausedPolicyAnnouncesNothing(t *testing.T) {
	g := NewWithT(t)
	w := karpenter(t, renamed+declared+"\nrollout: {paused: true}")
	g.Expect(w.Advise().Writes).To(BeEmpty())
	g.Expect(only(t, w).Reason).To(Equal(v1alpha1.ReasonPaused))
	s := scalable(t, autoscaling.GroupClusterAPI, renamed+"\nrollout: {paused: true}", nil)
	g.Expect(s.Advise().Writes).To(BeEmpty())
}
