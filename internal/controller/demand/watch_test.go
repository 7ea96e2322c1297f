// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
)

// TestAPodIsTheSame only if the nodes that would take it are: the API server lets pods that wait tolerate more.
func TestAPodIsTheSame(t *testing.T) {
	pod := &corev1.Pod{}
	pod.Spec.Containers = []corev1.Container{{}}
	more := pod.DeepCopy()
	more.Spec.Tolerations = []corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}
	NewWithT(t).Expect(samePod(pod, pod.DeepCopy())).To(BeTrue())
	NewWithT(t).Expect(samePod(pod, more)).To(BeFalse())
}
