// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
)

// TestWhatIsSaidOfANodeThatIsOverbooked: the profile is allowed, and another tenant's pod, bound by spec.nodeName, is what is in the way.
func TestWhatIsSaidOfANodeThatIsOverbooked(t *testing.T) {
	g, p := NewWithT(t), applying()
	p.Spec.Sharing.MIG.Layouts[0].OnDemand.Profiles = []v1alpha1.MIGProfile{"3g", "7g"}
	a := a100s(t, "a", 1)
	rests(&a)
	a.Pods = []cluster.Pod{{Namespace: "other", Name: "idles", UID: "idles", GPU: true, Scheduled: now.Add(-time.Hour), Requests: map[string]int64{"nvidia.com/mig-7g.40gb": 1}}}
	s := &cluster.Snapshot{Now: now, Nodes: []cluster.Node{a}}
	_, _, is, _ := review(&pure.Memory{}, demand.Attempts{}, p, s, []*corev1.Pod{waits("w", "7g.40gb", nil)})
	g.Expect(is.Status).To(Equal(metav1.ConditionFalse))
	g.Expect(is.Reason).NotTo(Equal(v1alpha1.ReasonProfileNotAllowed), is.Message)
	g.Expect(is.Message).To(ContainSubstring("other/idles"))
}
