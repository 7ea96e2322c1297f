// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"path/filepath"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
)

const (
	// nfdImage is the image of Node Feature Discovery's chart.
	nfdImage = "registry.k8s.io/nfd/node-feature-discovery:v0.19.0"
	// nfdName is the name of Node Feature Discovery's chart, which its pods have as their label.
	nfdName = "node-feature-discovery"
)

// nodeFeatures is the kind by which programs ask Node Feature Discovery for labels.
var nodeFeatures = schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeatureList"}

// nfdPrograms is the image of Node Feature Discovery.
func nfdPrograms() image.Image {
	programs := map[string]string{}
	for _, name := range []string{"nfd-master", "nfd-worker", "nfd-gc"} {
		programs["/usr/bin/"+name] = filepath.Join(bin, name)
	}
	return image.Image{Name: nfdImage, Env: []string{"PATH=/usr/bin"}, User: "65534:65534", Files: programs}
}

// installNFD installs Node Feature Discovery by its own chart, with the values of the GPU Operator's chart and others
// that are given as for helm --set-json.
func installNFD(ctx context.Context, namespace string, set ...string) {
	GinkgoHelper()
	args := []string{
		"upgrade", "--install", nfdRelease(namespace), filepath.Join(bin, "nfd-chart"), "--namespace", namespace, "--create-namespace",
		"--values", filepath.Join(root, "test", "e2e", "gpuoperator", "nfd-values.yaml"),
	}
	for _, value := range set {
		args = append(args, "--set-json", value)
	}
	helm(ctx, args...)
}

// uninstallNFD removes Node Feature Discovery without the hook that takes all its labels from the nodes.
func uninstallNFD(ctx context.Context, namespace string) {
	GinkgoHelper()
	helm(ctx, "uninstall", nfdRelease(namespace), "--namespace", namespace, "--no-hooks")
	Eventually(func() ([]corev1.Pod, error) {
		pods := &corev1.PodList{}
		err := kube.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabels{"app.kubernetes.io/name": nfdName})
		return pods.Items, err
	}).WithContext(ctx).Should(BeEmpty())
}

// moveNFD installs Node Feature Discovery in another namespace, and then removes it from where it was, so that no label
// goes in between.
func moveNFD(ctx context.Context, from, to string) {
	GinkgoHelper()
	installNFD(ctx, to)
	Eventually(func() ([]string, error) { return notReady(ctx, to) }).WithContext(ctx).Should(BeEmpty())
	uninstallNFD(ctx, from)
}

// nfdRelease is the name of the Helm release, which in NVIDIA's namespace is the GPU Operator's.
func nfdRelease(namespace string) string {
	if namespace == gpuoperator.Namespace {
		return "gpu-operator"
	}
	return "nfd"
}
