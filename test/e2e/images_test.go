// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"path/filepath"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
)

// workloadImage is that of users' pods.
const workloadImage = "example.com/workload:e2e"

func pauseImage() image.Image {
	return image.Image{
		Name: "registry.k8s.io/pause:e2e", Entrypoint: []string{"/pause"},
		Files: map[string]string{"/pause": filepath.Join(bin, "pause")},
	}
}

// images are those that pods run, besides pause and the operator's, which are pulled from a registry.
func images(ctx context.Context) []image.Image {
	workload := image.Image{
		Name: workloadImage, Entrypoint: []string{"/workload"}, User: "65532:65532",
		Files: map[string]string{"/workload": filepath.Join(bin, "workload")},
	}
	operand := image.Image{
		Name: gpuoperator.ClientImage, Files: map[string]string{"/nvidia-operand": filepath.Join(bin, "nvidia-operand")},
	}
	return []image.Image{workload, nvidiaImage(ctx), operand, nfdPrograms()}
}

// nvidiaImage has NVIDIA's programs, the C library that they need, and the shell that the GPU Operator's scripts need:
// as in NVIDIA's image one that becomes the script which it is told to run, so that signals reach the program. Its
// environment asks for the driver, as that of NVIDIA's image does.
func nvidiaImage(ctx context.Context) image.Image {
	i, err := image.Image{
		Name:  gpuoperator.Image,
		Env:   []string{"PATH=/usr/local/bin:/usr/bin:/bin", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility"},
		Files: map[string]string{"/etc/ld.so.cache": "/etc/ld.so.cache"},
		Links: map[string]string{"/bin/sh": "/usr/bin/bash"},
	}.WithPrograms(ctx,
		filepath.Join(bin, "nvidia-device-plugin"), filepath.Join(bin, "config-manager"),
		filepath.Join(bin, "gpu-feature-discovery"), filepath.Join(bin, "mps-control-daemon"), "/bin/bash", "/bin/sleep",
		"/bin/mount", "/bin/umount", "/usr/bin/tail") // the MPS daemon runs these
	Expect(err).NotTo(HaveOccurred())
	return i
}
