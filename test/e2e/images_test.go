// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"path/filepath"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// workloadImage is that of users' pods.
const workloadImage = "example.com/workload:e2e"

// These are users' programs in that image, with the names of NVIDIA's.
const mpsServerProgram, mpsControlProgram, configManagerProgram = "/" + simdriver.MPSServerName, "/nvidia-cuda-mps-control", "/config-manager"

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
		// The names by which NVIDIA's programs are known: a user's image may have them too.
		Links: map[string]string{mpsServerProgram: "/workload", mpsControlProgram: "/workload", configManagerProgram: "/workload"},
	}
	operand := image.Image{
		Name: gpuoperator.ClientImage, Files: map[string]string{"/nvidia-operand": filepath.Join(bin, "nvidia-operand")},
	}
	return []image.Image{workload, nvidiaImage(ctx), operand, nfdPrograms()}
}

// standImage is the agent's, with what stands for cgroup v2 on this machine.
func standImage(ctx context.Context) image.Image {
	i, err := image.Image{
		Name: standRepository + ":" + standTag, Entrypoint: []string{agentProgram}, Env: []string{"PATH=/usr/bin:/bin"},
		Files: map[string]string{agentProgram: filepath.Join(bin, "agent-cgroupstand")},
	}.WithLibrariesOf(ctx, filepath.Join(bin, "agent-cgroupstand"))
	Expect(err).NotTo(HaveOccurred())
	return i
}

const standRepository, standTag = "example.com/gpu-sharing-agent-cgroupstand", "built"

// managerImage has NVIDIA's mig-manager, what it runs, and the shell that the GPU Operator's script needs. Only its
// specs need it.
func managerImage(ctx context.Context) image.Image {
	parted := filepath.Join(os.TempDir(), "nvidia-mig-parted")
	Expect(os.WriteFile(parted, []byte(partedWithModules), 0o755)).To(Succeed())
	i, err := image.Image{
		Name: gpuoperator.ManagerImage,
		Env: []string{
			"PATH=/usr/local/bin:/usr/bin:/bin", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility",
		},
		Files: map[string]string{
			"/etc/ld.so.cache": "/etc/ld.so.cache", "/usr/bin/nvidia-mig-parted": parted,
			realParted: filepath.Join(bin, "nvidia-mig-parted"),
		},
		Links: map[string]string{"/bin/sh": "/usr/bin/bash"},
	}.WithPrograms(ctx,
		filepath.Join(bin, "nvidia-mig-manager"), filepath.Join(bin, "nvidia-ctk"), "/bin/bash", "/bin/sleep", "/bin/cat",
		"/bin/mount", "/usr/bin/unshare", "/usr/sbin/chroot")
	Expect(err).NotTo(HaveOccurred())
	i, err = i.WithLibrariesOf(ctx, filepath.Join(bin, "nvidia-mig-parted"))
	Expect(err).NotTo(HaveOccurred())
	return i
}

const realParted = "/usr/libexec/nvidia-mig-parted"

// partedWithModules runs nvidia-mig-parted where it sees the kernel modules of the simulated machine, among which it
// looks for NVIDIA's. The kernel of this machine may have none, and then no place to show them.
const partedWithModules = `#!/bin/sh
exec unshare --mount sh -c 'set -e
modules=$(cat ` + driver.Hardware + `/proc/modules)
mount -t tmpfs none /proc
echo "$modules" >/proc/modules
exec ` + realParted + ` "$@"' sh "$@"
`

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
