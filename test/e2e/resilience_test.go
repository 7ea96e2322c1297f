// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// ourConfigMap is the one from which NVIDIA's device plugin reads what we render.
const ourConfigMap = "gpu-sharing-device-plugin"

func resilienceSpecs() {
	Describe("Whatever happens,", Ordered, Offset(1), func() {
		var before map[string]int32
		shared := map[string]int64{"nvidia.com/gpu": 8}

		BeforeAll(func(ctx SpecContext) {
			resume(ctx, sim.A100, sim.A100)
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			expectAllocatable(ctx, shared)
			expectReady(ctx, "shared")
		})

		BeforeEach(func(ctx SpecContext) {
			startPod(ctx, "witness", "nvidia.com/gpu", 1)
			expectRunning(ctx, "witness")
			before = expectSettled(ctx)
		})

		It("a key that a user garbles never reaches the device plugin, and is restored", func(ctx SpecContext) {
			key := selectedKey(ctx)
			good := keys(ctx)[key]
			Expect(good).NotTo(BeEmpty())
			patchKeys(ctx, fmt.Sprintf(`{"data":{%q:"version: v1\nsharing: {timeSlicing: {resources: []}}\n"}}`, key))
			Eventually(func() string { return keys(ctx)[key] }).WithContext(ctx).Should(Equal(good))
			Consistently(offered, "3s").WithContext(ctx).Should(Equal(shared))
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("a key that a user deletes is there again before anything needs it", func(ctx SpecContext) {
			key := selectedKey(ctx)
			patchKeys(ctx, fmt.Sprintf(`{"data":{%q:null}}`, key))
			Eventually(func() map[string]string { return keys(ctx) }).WithContext(ctx).Should(HaveKey(key))
			Consistently(offered, "3s").WithContext(ctx).Should(Equal(shared))
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("a ConfigMap that a user deletes is there again, and edits go on", func(ctx SpecContext) {
			Expect(kube.Delete(ctx, handMade(ourConfigMap, nil))).To(Succeed())
			Eventually(func() map[string]string { return keys(ctx) }).WithContext(ctx).Should(HaveKey(selectedKey(ctx)))
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 5}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 10})
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			expectAllocatable(ctx, shared)
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("controller and agent may be killed at any moment of a change", func(ctx SpecContext) {
			killed := 0
			for i := range 2 { // the kubelet waits longer each time before it starts them again
				share(ctx, fmt.Sprintf(`{strategy: TimeSlicing, timeSlicing: {replicas: %d}}`, 5+i))
				time.Sleep(time.Duration(i) * 300 * time.Millisecond) // a moment of the change, not a wait for anything
				n, err := kill("/controller", agentProgram)
				Expect(err).NotTo(HaveOccurred())
				killed += n
			}
			Expect(killed).To(BeNumerically(">", 2))
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`)
			expectAllocatable(ctx, shared)
			expectReady(ctx, "shared")
			Expect(restarts(ctx)).To(Equal(before))
		})

		It("a kubelet that is restarted offers the same again, and nothing that ran ends", func(ctx SpecContext) {
			Expect(machine.RestartKubelet(ctx)).To(Succeed())
			expectAllocatable(ctx, shared)
			expectReady(ctx, "shared")
			Expect(restarts(ctx)).To(Equal(before))
			startPod(ctx, "after", "nvidia.com/gpu", 1)
			expectRunning(ctx, "after")
		})
	})
}

// selectedKey is the key that the node's label names.
func selectedKey(ctx context.Context) string {
	GinkgoHelper()
	labels, err := nodeLabels(ctx)
	Expect(err).NotTo(HaveOccurred())
	return labels[configLabel]
}

// keys are those of our ConfigMap; none if it is not there.
func keys(ctx context.Context) map[string]string {
	GinkgoHelper()
	found := &corev1.ConfigMap{}
	err := kube.Get(ctx, client.ObjectKey{Namespace: gpuoperator.Namespace, Name: ourConfigMap}, found)
	Expect(client.IgnoreNotFound(err)).To(Succeed())
	return found.Data
}

func patchKeys(ctx context.Context, patch string) {
	GinkgoHelper()
	c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: gpuoperator.Namespace, Name: ourConfigMap}}
	Expect(kube.Patch(ctx, c, client.RawPatch("application/merge-patch+json", []byte(patch)))).To(Succeed())
}

// kill kills all processes of these programs, as the kernel does when memory runs out, and says how many.
func kill(programs ...string) (int, error) {
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	killed := 0
	for _, path := range found {
		raw, _ := os.ReadFile(path) // it may have ended
		program, _, _ := strings.Cut(string(raw), "\x00")
		for _, wanted := range programs {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			if err == nil && program == wanted && syscall.Kill(pid, syscall.SIGKILL) == nil {
				killed++
			}
		}
	}
	return killed, nil
}

// watchOffered notes everything that the node offers, until the function that it returns is called, which returns it.
func watchOffered(ctx context.Context) func() []map[string]int64 {
	return notes(func() (map[string]int64, error) { return offered(ctx) })
}

// notes looks at something again and again, until the function that it returns is called, which returns what was seen.
func notes[T any](look func() (T, error)) func() []T {
	stop, ended := make(chan struct{}), make(chan struct{})
	var seen []T
	go func() {
		defer close(ended)
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			if now, err := look(); err == nil {
				seen = append(seen, now)
			}
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	}()
	return func() []T {
		close(stop)
		<-ended
		return seen
	}
}
