// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// TestMIGManagerIsNotWaitedForBecauseAClockWasAhead: another controller, whose clock was a day ahead, wrote since when mig-manager was asked.
func TestMIGManagerIsNotWaitedForBecauseAClockWasAhead(t *testing.T) {
	g := NewWithT(t)
	c := newCluster()
	h := releasedTo(g, c, "all-1g.5gb")
	h.mishap = func(string) string { return "hangs" }
	c.Now = c.Now.Add(-24 * time.Hour)
	d := c.during(45*time.Minute, 10*time.Second)
	g.Expect(d.ConfigureMIGManager).To(BeFalse(), "%+v", d.Nodes)
	g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
	g.Expect(h.GPU.Spec).To(Equal(v1alpha1.GPUNodeSpec{}))
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
}
