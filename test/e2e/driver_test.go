// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// installed is the driver that the node has.
var installed *driver.Driver

// fit puts GPUs into the machine, in place of those that are there, and starts a driver for them.
func fit(ctx context.Context, models ...sim.Model) {
	GinkgoHelper()
	putIn(models...)
	startDriver(ctx, driver.Container)
}

// putIn puts GPUs into the machine, in place of those that are there. Without a driver.
func putIn(models ...sim.Model) {
	GinkgoHelper()
	stopDriver()
	spec := simdriver.Spec{Name: nextNode(), Models: models, DriverVersion: driver.Version}
	if gpus == nil {
		var err error
		gpus, err = driver.Fit(filepath.Join(bin, "driver"), spec)
		Expect(err).NotTo(HaveOccurred())
	} else {
		Expect(gpus.Replace(spec)).To(Succeed())
	}
	fitted = models
}

// startDriver starts a driver in a layout, and after it NVIDIA's container toolkit.
func startDriver(ctx context.Context, layout driver.Layout) {
	GinkgoHelper()
	startDriverAs(ctx, driver.Options{Layout: layout})
}

// startDriverAs starts a driver, by default of the first version, and after it NVIDIA's container toolkit.
func startDriverAs(ctx context.Context, o driver.Options) {
	GinkgoHelper()
	o.Programs, o.Version = filepath.Join(bin, "driver"), cmp.Or(o.Version, driver.Version)
	var err error
	installed, err = driver.Start(o)
	Expect(err).NotTo(HaveOccurred())
	installToolkit(ctx, true)
}

func stopDriver() {
	GinkgoHelper()
	if installed != nil {
		Expect(installed.Stop()).To(Succeed())
	}
	installed = nil
}

// installToolkit installs NVIDIA's container toolkit, which works by CDI or not.
func installToolkit(ctx context.Context, cdi bool) {
	GinkgoHelper()
	Expect(driver.Toolkit{Bin: bin, CDI: cdi}.Install(ctx, installed)).To(Succeed())
}

func vgpuSpecs() {
	Describe("A vGPU guest", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) { begin(ctx, sim.VGPU) })

		It("shows as one, with its license", func(ctx SpecContext) {
			Eventually(gpuNode).WithContext(ctx).Should(HaveField("Status.Devices", ConsistOf(And(
				HaveField("Virtual", true), HaveField("License", v1alpha1.LicenseStateLicensed)))))
		})

		It("is named once it has no license, and no longer once it has one again", func(ctx SpecContext) {
			license(false)
			DeferCleanup(license, true)
			Eventually(licenseMissing).WithContext(ctx).Should(ContainSubstring("GPU 0 (GRID-A100-20C): no vGPU license"))
			Expect(kubectl(ctx, "", "gpusharing", "status")).To(ContainSubstring("virtual, without a license"))
			license(true)
			Eventually(licenseMissing).WithContext(ctx).Should(BeEmpty())
		})
	})
}

// license gives the vGPUs their license, or takes it.
func license(has bool) {
	GinkgoHelper()
	Expect(gpus.Update(func(s *simdriver.State) error {
		for i := range s.Node.GPUs {
			s.Node.GPUs[i].Unlicensed = !has
		}
		return nil
	})).To(Succeed())
}

func gpuNode(ctx context.Context) (*v1alpha1.GPUNode, error) {
	n := &v1alpha1.GPUNode{}
	return n, kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)
}

// licenseMissing is the message of the condition; empty: it is not true.
func licenseMissing(ctx context.Context) (string, error) {
	n, err := gpuNode(ctx)
	if err != nil {
		return "", err
	}
	c, _ := condition.Find(n.Status.Conditions, v1alpha1.ConditionLicenseMissing)
	return c.Message, nil
}
