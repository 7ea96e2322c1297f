// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const (
	// draDriver is the name of NVIDIA's DRA driver for GPUs in the API.
	draDriver = "gpu.nvidia.com"
	// draRelease is its Helm release, which has a namespace of its own.
	draRelease, draNamespace = "dra-driver-nvidia-gpu", "dra-driver-nvidia-gpu"
	// draComponent is the label of its pods.
	draComponent = "dra-driver-nvidia-gpu-component"
	// draKubeletPlugin is the component that runs on each node with GPUs.
	draKubeletPlugin = "kubelet-plugin"

	draRepository, draTag = "example.com/dra-driver-nvidia-gpu", "e2e"
	// nfdNamespace is where Node Feature Discovery is where no GPU Operator brings it.
	nfdNamespace = "node-feature-discovery"
)

// beginDRA gives a container of specs a node with NVIDIA's DRA driver and these GPUs, which nobody shares or uses. It
// is built anew if the specs before it needed another one, or failed.
func beginDRA(ctx context.Context, models ...sim.Model) {
	GinkgoHelper()
	if broken || !onDRA || onGPUCluster || !slices.Equal(models, fitted) {
		wipe()
		buildDRA(ctx, models...)
	}
}

// buildDRA makes a cluster of nothing: a node with these GPUs, and NVIDIA's DRA driver on it, alone: no GPU Operator,
// no device plugin and no operator of ours.
func buildDRA(ctx context.Context, models ...sim.Model) {
	GinkgoHelper()
	onDRA = true
	say := sinceNow()
	startNode(ctx)
	Expect(machine.Import(ctx, write(draImage(ctx)))).To(Succeed())
	say("images imported")
	fit(ctx, models...)
	installNFD(ctx, nfdNamespace)
	label(ctx, gpuoperator.LabelPresent, "true") // as an administrator does where no GPU Operator runs
	installDRA(ctx)
	expectDRAReady(ctx, 0)
	say("NVIDIA's DRA driver publishes")
}

// draImage is the image of NVIDIA's DRA driver: its kubelet plugin, the hook of the CDI specifications that the plugin
// writes, which the plugin copies to the node, and a shell with what the script runs that waits for the driver.
func draImage(ctx context.Context) image.Image {
	GinkgoHelper()
	i, err := image.Image{
		Name: draRepository + ":" + draTag,
		Env:  []string{"PATH=/usr/bin:/bin", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility"},
		Files: map[string]string{
			"/etc/ld.so.cache":                    "/etc/ld.so.cache",
			"/usr/bin/kubelet-plugin-prestart.sh": filepath.Join(draModule(), "hack", "kubelet-plugin-prestart.sh"),
		},
		Links: map[string]string{"/bin/sh": "/usr/bin/bash"},
	}.WithPrograms(ctx,
		filepath.Join(bin, "dra", "gpu-kubelet-plugin"), filepath.Join(bin, "dra", "nvidia-cdi-hook"),
		"/bin/bash", "/bin/ls", "/bin/ln", "/bin/sleep", "/bin/date",
		"/usr/bin/find", "/usr/bin/head", "/usr/bin/basename", "/usr/bin/env")
	Expect(err).NotTo(HaveOccurred())
	return i
}

// draModule is the folder of the Go module of NVIDIA's DRA driver.
func draModule() string { return filepath.Join(bin, "dra", "module") }

// installDRA installs or upgrades NVIDIA's DRA driver by its chart, with values as for helm --set.
func installDRA(ctx context.Context, values ...string) {
	GinkgoHelper()
	args := []string{
		"upgrade", "--install", draRelease, filepath.Join(draModule(), "deployments", "helm", "dra-driver-nvidia-gpu"),
		"--namespace", draNamespace, "--create-namespace",
	}
	for _, value := range append([]string{
		"nvidiaDriverRoot=" + driver.Root, "resources.computeDomains.enabled=false", "gpuResourcesEnabledOverride=true",
		"image.repository=" + draRepository, "image.tag=" + draTag,
	}, values...) {
		args = append(args, "--set", value)
	}
	helm(ctx, args...)
}

// shareDRA gives NVIDIA's DRA driver a number of shares, which restarts it, and waits until it publishes them.
func shareDRA(ctx context.Context, count int64) {
	GinkgoHelper()
	installDRA(ctx, "featureGates.ConsumableShares=true", fmt.Sprintf("consumableShares=%d", count))
	expectDRAReady(ctx, count)
}

// restartDRA deletes the pod of the kubelet plugin and waits until another one publishes the GPUs as they are.
func restartDRA(ctx context.Context) {
	GinkgoHelper()
	old, err := draPods(ctx)
	Expect(err).NotTo(HaveOccurred())
	for _, name := range old {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: draNamespace, Name: name}}
		Expect(client.IgnoreNotFound(kube.Delete(ctx, pod))).To(Succeed())
	}
	expectDRAReady(ctx, 0, old...)
}

// expectDRAReady waits until NVIDIA's DRA driver publishes the GPUs as they are, each of them in so many shares, and
// its former pods are gone.
func expectDRAReady(ctx context.Context, count int64, mustGo ...string) {
	GinkgoHelper()
	Eventually(func() ([]string, error) { return notReady(ctx, draNamespace, mustGo...) }).WithContext(ctx).Should(BeEmpty())
	Eventually(published).WithContext(ctx).Should(Equal(devicesOfDriver(count)))
}

// draPods are the names of the pods of the kubelet plugin.
func draPods(ctx context.Context) ([]string, error) {
	pods := &corev1.PodList{}
	err := kube.List(ctx, pods, client.InNamespace(draNamespace), client.MatchingLabels{draComponent: draKubeletPlugin})
	var names []string
	for i := range pods.Items {
		names = append(names, pods.Items[i].Name)
	}
	return names, err
}
