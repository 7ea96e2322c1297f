// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver/mpsclient"
)

func mpsUserSpecs() {
	Describe("MPS clients", Ordered, Offset(1), func() {
		const limited = `{strategy: MPS, mps: {replicas: 10, activeThreadPercentage: %d, multiUser: %t}, advertise: {renameByDefault: true}}`
		BeforeAll(func(ctx SpecContext) {
			resume(ctx, sim.A100, sim.A100)
			share(ctx, fmt.Sprintf(limited, 20, false))
			expectAllocatable(ctx, map[string]int64{gpuShared: 20})
			expectReady(ctx, "shared")
		})
		AfterAll(func(ctx SpecContext) { unshare(ctx, map[string]int64{"nvidia.com/gpu": 2}) })

		It("keep their limits when those of the policy change, and new ones get the new", func(ctx SpecContext) {
			startPod(ctx, "before", gpuShared, 1)
			Expect(expectServed(ctx, "before").Percentage).To(Equal(20.0))
			share(ctx, fmt.Sprintf(limited, 50, false))
			Eventually(pending).WithContext(ctx).Should(HaveKeyWithValue(v1alpha1.ReasonLimitsPending, ContainSubstring("default/before")))
			startPod(ctx, "after", gpuShared, 1)
			after := expectServed(ctx, "after")
			Expect(after.Percentage).To(Equal(50.0))
			Expect(after.Server).To(Equal(expectServed(ctx, "before").Server), "nobody is disturbed")
			stopPod(ctx, "before")
			Eventually(pending).WithContext(ctx).Should(BeEmpty())
		})

		It("of another user wait, and the policy names them", func(ctx SpecContext) {
			startPod(ctx, "first", gpuShared, 1, as(1000650000))
			Expect(expectServed(ctx, "first").User).To(Equal(1000650000))
			startPod(ctx, "second", gpuShared, 1, as(1000660000))
			expectRunning(ctx, "second")
			Eventually(pending).WithContext(ctx).Should(HaveKeyWithValue(v1alpha1.ReasonMPSUserWaiting,
				And(ContainSubstring("now 1000650000"), ContainSubstring("default/second (user 1000660000)"))))
			Expect(served(ctx, "second")).To(BeNil())
			stopPod(ctx, "first")
			Expect(expectServed(ctx, "second").User).To(Equal(1000660000))
			Eventually(pending).WithContext(ctx).Should(BeEmpty())
		})

		It("of all users are served at the same time if the policy says so", func(ctx SpecContext) {
			share(ctx, fmt.Sprintf(limited, 50, true))
			expectReady(ctx, "shared")
			startPod(ctx, "first", gpuShared, 1, as(1000650000))
			startPod(ctx, "second", gpuShared, 1, as(1000660000))
			Expect(expectServed(ctx, "first").Server).To(Equal(expectServed(ctx, "second").Server))
			Expect(pending(ctx)).To(BeEmpty())
		})

		It("and their server write logs that the MPS pod shows", func(ctx SpecContext) {
			Eventually(mpsLog).WithContext(ctx).Should(And(
				MatchRegexp(`"file":"control.log","line":"[^"]*Starting new server for user 0`),
				MatchRegexp(`"file":"server.log","line":"[^"]*Server for user 0 started`), ContainSubstring(gpuShared)))
		})
	})
}

// as makes the programs of a pod run as a user.
func as(uid int64) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) { s.SecurityContext.RunAsUser = &uid }
}

// expectServed waits until a user's program is served by MPS, and returns what it got.
func expectServed(ctx context.Context, name string) mpsclient.Answer {
	GinkgoHelper()
	expectRunning(ctx, name)
	var answer *mpsclient.Answer
	Eventually(func(g Gomega) {
		var err error
		answer, err = served(ctx, name)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(answer).NotTo(BeNil())
	}).WithContext(ctx).Should(Succeed())
	Expect(answer.Error).To(BeEmpty())
	return *answer
}

// served is what a user's program got from MPS: the second thing that it reports. Nil while it waits.
func served(ctx context.Context, name string) (*mpsclient.Answer, error) {
	log, err := machine.Client.CoreV1().Pods(users).GetLogs(name, &corev1.PodLogOptions{}).DoRaw(ctx)
	if err != nil {
		return nil, err
	}
	var first given
	var answer mpsclient.Answer
	d := json.NewDecoder(bytes.NewReader(log))
	if err := d.Decode(&first); err != nil {
		return nil, err
	}
	if !d.More() {
		return nil, nil //nolint:nilnil // it waits
	}
	return &answer, d.Decode(&answer)
}

// pending are the reasons and messages of the nodes that the policy lists.
func pending(ctx context.Context) (map[string]string, error) {
	p := &v1alpha1.GPUSharingPolicy{}
	err := kube.Get(ctx, client.ObjectKey{Name: "shared"}, p)
	found := map[string]string{}
	for _, n := range p.Status.Pending {
		found[n.Reason] = n.Message
	}
	return found, err
}

// mpsLog is the log of the MPS pod.
func mpsLog(ctx context.Context) (string, error) {
	pods := &corev1.PodList{}
	err := kube.List(ctx, pods, client.InNamespace(operatorNamespace), client.MatchingLabels{"app.kubernetes.io/name": "gpu-sharing-mps"})
	if err != nil || len(pods.Items) != 1 {
		return "", fmt.Errorf("%d MPS pods: %w", len(pods.Items), err)
	}
	log, err := machine.Client.CoreV1().Pods(operatorNamespace).GetLogs(pods.Items[0].Name, &corev1.PodLogOptions{}).DoRaw(ctx)
	return string(log), err
}
