// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	nodev1 "k8s.io/api/node/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// variant is another way than the default in which NVIDIA's driver and container toolkit may be there.
type variant struct {
	title string
	// set brings it about, and unset the default.
	set, unset func(context.Context)
}

func variants() []variant {
	return []variant{
		{
			title: "Without CDI, where pods get devices as the device plugin lists them,",
			set:   func(ctx context.Context) { setCDI(ctx, false) },
			unset: func(ctx context.Context) { setCDI(ctx, true) },
		},
		{
			title: "In NRI mode, where no runtime class gives NVIDIA's pods the driver,",
			set:   startNRI,
			unset: func(ctx context.Context) {
				mergeClusterPolicy(ctx, `{"spec":{"cdi":{"nriPluginEnabled":false}}}`)
				restartClients(ctx)
			},
		},
		{
			title: "With a driver on the node itself,",
			set:   func(ctx context.Context) { moveDriver(ctx, driver.Host) },
			unset: func(ctx context.Context) { moveDriver(ctx, driver.Container) },
		},
		{
			title: "With a driver on the node behind the links of Debian's alternatives,",
			set:   func(ctx context.Context) { moveDriver(ctx, driver.Debian) },
			unset: func(ctx context.Context) { moveDriver(ctx, driver.Container) },
		},
	}
}

func variantSpecs() {
	for _, v := range variants() {
		Describe(v.title, Ordered, Offset(1), func() { variantSpecsOf(v) })
	}
}

// variantSpecsOf are the same for all variants: pods of both kinds of sharing get exactly their device files.
func variantSpecsOf(v variant) {
	BeforeAll(func(ctx SpecContext) {
		begin(ctx, sim.A100, sim.A100)
		v.set(ctx)
		DeferCleanup(func(ctx SpecContext) {
			unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
			v.unset(ctx)
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
		})
	})

	It("time-slicing is Ready, and a pod gets a GPU", func(ctx SpecContext) {
		share(ctx, `{strategy: TimeSlicing, timeSlicing: {replicas: 2}}`)
		expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 4})
		expectReady(ctx, "shared")
		startPod(ctx, "sliced", "nvidia.com/gpu", 1)
		got := expectRunning(ctx, "sliced")
		Expect(got).To(beExactly(got.uuid()))
	})

	It("MIG is Ready, and a pod gets an instance", func(ctx SpecContext) {
		share(ctx, `{strategy: MIG, mig: {layouts: [{fill: 3g.20gb}]}}`)
		expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-3g.20gb": 4})
		expectReady(ctx, "shared")
		startPod(ctx, "instance", resourceOf("3g.20gb"), 1)
		got := expectRunning(ctx, "instance")
		Expect(got.uuid()).To(HavePrefix("MIG-"))
		Expect(got).To(beExactly(got.uuid()))
	})
}

// setCDI says in the ClusterPolicy whether pods get devices by CDI, and installs the toolkit anew, as the GPU Operator
// does.
func setCDI(ctx context.Context, enabled bool) {
	GinkgoHelper()
	installToolkit(ctx, enabled)
	mergeClusterPolicy(ctx, fmt.Sprintf(`{"spec":{"cdi":{"enabled":%t}}}`, enabled))
	restartClients(ctx)
}

// startNRI runs the toolkit's NRI plugin on the node, and lets NVIDIA's pods get the driver through it.
func startNRI(ctx context.Context) {
	GinkgoHelper()
	plugin := exec.Command(filepath.Join(bin, "nri"), gpuoperator.Namespace, "/var/run/nri/nri.sock")
	plugin.Stdout, plugin.Stderr = GinkgoWriter, GinkgoWriter
	Expect(plugin.Start()).To(Succeed())
	DeferCleanup(func() {
		_ = plugin.Process.Kill() // it may have ended by itself
		_ = plugin.Wait()
	})
	mergeClusterPolicy(ctx, `{"spec":{"cdi":{"nriPluginEnabled":true}}}`)
	class := &nodev1.RuntimeClass{}
	class.Name = gpuoperator.RuntimeClass
	Eventually(func() error { return kube.Get(ctx, client.ObjectKeyFromObject(class), class) }).WithContext(ctx).
		Should(MatchError(ContainSubstring("not found")))
	restartClients(ctx)
}

// moveDriver replaces the driver by one in another layout. What has the old one open starts anew.
func moveDriver(ctx context.Context, layout driver.Layout) {
	GinkgoHelper()
	stopDriver()
	startDriver(ctx, layout)
	restartClients(ctx)
}
