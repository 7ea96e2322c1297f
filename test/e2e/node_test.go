// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var _ = Describe("The node", func() {
	It("gives a pod that asks for it a whole GPU", func(ctx SpecContext) {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "hello"},
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: workloadImage,
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}},
			}}},
		}
		Eventually(func() error {
			_, err := machine.Client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
			return err
		}).Should(Succeed())
		Eventually(func(g Gomega) {
			got, err := machine.Client.CoreV1().Pods("default").Get(ctx, "hello", metav1.GetOptions{})
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(got.Status.Phase).To(Equal(corev1.PodRunning), "%v", got.Status)
		}).Should(Succeed())
		Eventually(func(g Gomega) {
			log, err := machine.Client.CoreV1().Pods("default").GetLogs("hello", &corev1.PodLogOptions{}).DoRaw(ctx)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(string(log)).To(ContainSubstring(`"devices":["/dev/nvidia`))
			g.Expect(string(log)).To(ContainSubstring(`"visible":"GPU-`))
		}).Should(Succeed())
	})
})
