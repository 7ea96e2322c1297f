// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
)

var _ = Describe("The node", func() {
	It("runs a pod of an image of our own", func(ctx SpecContext) {
		w := image.Image{
			Name: "example.invalid/workload:e2e", Entrypoint: []string{"/workload"},
			Files: map[string]string{"/workload": filepath.Join(bin, "workload")},
		}
		archive := filepath.Join(os.TempDir(), "workload.tar")
		Expect(image.Write(w, archive)).To(Succeed())
		Expect(machine.Import(ctx, archive)).To(Succeed())
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "hello"},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: w.Name}}},
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
		log, err := machine.Client.CoreV1().Pods("default").GetLogs("hello", &corev1.PodLogOptions{}).DoRaw(ctx)
		Expect(err).NotTo(HaveOccurred())
		Expect(string(log)).To(ContainSubstring(`"devices"`))
	})
})
