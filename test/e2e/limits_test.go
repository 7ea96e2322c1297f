// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

// askLimits has a user's pod ask its MPS control daemon for its limits, with the program that the pod gets from the
// driver, and compares the answers with the GPUNode.
func askLimits(ctx context.Context, want guides.Limits) {
	GinkgoHelper()
	n := &v1alpha1.GPUNode{}
	Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)).To(Succeed())
	Expect(n.Status.Devices).NotTo(BeEmpty())
	for _, d := range n.Status.Devices {
		m := d.Sharing.MPS
		Expect(m).NotTo(BeNil())
		Expect(fmt.Sprintf("%d, %s", m.ActiveThreadPercentage, m.PinnedMemoryLimit)).To(Equal(want.Status))
	}
	startPod(ctx, "asking", resourceName(n.Status.Devices[0].Sharing.MPS.ResourceName), 1)
	expectRunning(ctx, "asking")
	Expect(ask(ctx, "asking", "get_default_active_thread_percentage")).To(Equal(want.Percentage))
	Expect(ask(ctx, "asking", "get_default_device_pinned_mem_limit 0")).To(Equal(want.Memory))
	stopPods(ctx)
}

// ask is the answer of the MPS control daemon to a command in a user's pod.
func ask(ctx context.Context, pod, command string) string {
	GinkgoHelper()
	return strings.TrimSpace(kubectl(ctx, command+"\n", "exec", "-i", "-n", users, pod, "--", "nvidia-cuda-mps-control"))
}
