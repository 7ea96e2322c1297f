// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// TestAPluginThatIsStartedBeforeItEndedIsRestartedForNewInstances: it has not seen the instance that the agent made
// again, and would offer one that is gone.
func TestAPluginThatIsStartedBeforeItEndedIsRestartedForNewInstances(t *testing.T) {
	for name, started := range map[string]func(*v1alpha1.GPUSharingPolicy){
		"the change is withdrawn": func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("3g", 2)) },
		"the rollout is paused":   paused,
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := fleet(1, mig(count("3g", 2)))
			c.run(200)
			h := c.hosts["n0"]
			h.destroy(0)
			c.version["n0"]++
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g", 7)) })
			for c.reconcile(); h.Annotations[v1alpha1.AnnotationStopped] == ""; c.reconcile() {
				c.tick(time.Second)
			}
			c.edit(started)
			c.reconcile()
			g.Expect(h.Labels).To(HaveKeyWithValue(pluginLabel, "true"))
			c.edit(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing, p.Spec.Rollout.Paused = mig(count("3g", 2)), false })
			c.tick(time.Second)
			c.during(10*time.Minute, 5*time.Second)
			g.Expect(h.plugin.uuids).To(ConsistOf(h.instances()))
		})
	}
}
