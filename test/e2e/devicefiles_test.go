// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// probes is the namespace of pods that may make device files, which users' pods must not.
const probes = "probes"

func deviceFileSpecs() {
	Describe("Device files", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			resume(ctx, sim.A100, sim.A100)
			share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 2}}`)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
			expectReady(ctx, "shared")
		})

		It("are in the driver's own /dev and not in the node's", func() {
			Expect(filepath.Glob("/dev/nvidia*")).To(BeEmpty())
			Expect(filepath.Join(driver.Root, "dev/nvidia0")).To(BeAnExistingFile())
		})

		It("of other GPUs cannot be opened, even by a pod that makes them itself", func(ctx SpecContext) {
			got := probe(ctx, "nvidia.com/gpu", numbers(driver.GPU(0), driver.GPU(1), driver.Cap(simdriver.InstanceMinor(0, 1)))...)
			Expect(got).To(beExactly(got.uuid()))
			want := map[string]string{}
			for _, d := range []driver.Device{driver.GPU(0), driver.GPU(1), driver.Cap(simdriver.InstanceMinor(0, 1))} {
				want[number(d)] = "EPERM"
			}
			for _, d := range got.Devices { // a device file with an allocated number is as good as the one that was given
				if _, asked := want[fmt.Sprintf("%d:%d", d.Major, d.Minor)]; asked {
					want[fmt.Sprintf("%d:%d", d.Major, d.Minor)] = "ENXIO"
				}
			}
			Expect(got.Probes).To(Equal(want))
		})
	})
}

func number(d driver.Device) string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

func numbers(devices ...driver.Device) []string {
	var all []string
	for _, d := range devices {
		all = append(all, number(d))
	}
	return all
}

// probe starts a pod that may make device files, and makes and opens those of these numbers.
func probe(ctx context.Context, requests corev1.ResourceName, numbers ...string) given {
	GinkgoHelper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: probes}}
	Expect(client.IgnoreAlreadyExists(kube.Create(ctx, namespace))).To(Succeed())
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: probes, Name: "probe"}, Spec: requesting(requests, 1)}
	pod.Spec.SecurityContext, pod.Spec.Containers[0].SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64)}, nil
	pod.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "PROBE_DEVICES", Value: strings.Join(numbers, " ")}}
	Expect(kube.Create(ctx, pod)).To(Succeed())
	DeferCleanup(func(ctx SpecContext) {
		Expect(client.IgnoreNotFound(kube.Delete(ctx, pod))).To(Succeed())
		Eventually(func() error { return kube.Get(ctx, client.ObjectKeyFromObject(pod), pod) }).WithContext(ctx).
			Should(MatchError(ContainSubstring("not found")))
	})
	var got given
	Eventually(func(g Gomega) {
		log, err := machine.Client.CoreV1().Pods(probes).GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(json.Unmarshal(log, &got)).To(Succeed(), "%s", log)
	}).WithContext(ctx).Should(Succeed())
	return got
}
