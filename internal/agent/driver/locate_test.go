// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"testing"

	. "github.com/onsi/gomega"
)

func TestWhereTheDriverIs(t *testing.T) {
	mark := func(content string) marks { return marks{operator: true, ready: &content} }
	container := "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\nDRIVER_ROOT_CTR_PATH=/driver-root\n" +
		"NVIDIA_DEV_ROOT=/run/nvidia/driver\nDEV_ROOT_CTR_PATH=/driver-root\n"
	onHost := "IS_HOST_DRIVER=true\nNVIDIA_DRIVER_ROOT=/\nDRIVER_ROOT_CTR_PATH=/host\nNVIDIA_DEV_ROOT=/\nDEV_ROOT_CTR_PATH=/host\n"
	whole, plain := tree{library: true, dev: true}, tree{dev: true}
	tests := map[string]struct {
		requested string
		marks     marks
		trees     map[string]tree
		roots     Roots
		state     State
		says      string // of the error; empty: the roots are found
	}{
		"driver container": {
			marks: mark(container), trees: map[string]tree{"/run/nvidia/driver": whole, "/": plain},
			roots: Roots{Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver"},
		},
		"driver on the host, beside an empty folder of the driver container": {
			marks: mark(onHost), trees: map[string]tree{"/run/nvidia/driver": {}, "/": whole}, roots: Roots{Driver: "/", Dev: "/"},
		},
		"driver root without a folder dev": {
			marks: mark("NVIDIA_DRIVER_ROOT=/home/kubernetes/bin/nvidia\nNVIDIA_DEV_ROOT=/\n"),
			trees: map[string]tree{"/home/kubernetes/bin/nvidia": {library: true}, "/": plain},
			roots: Roots{Driver: "/home/kubernetes/bin/nvidia", Dev: "/"},
		},
		"a mark without a device root": {
			marks: mark("NVIDIA_DRIVER_ROOT='/run/nvidia/driver/'\n"), trees: map[string]tree{"/run/nvidia/driver": whole},
			roots: Roots{Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver"},
		},
		"an empty mark, as old versions of the GPU Operator leave it": {
			marks: mark(""), trees: map[string]tree{"/": whole}, roots: Roots{Driver: "/", Dev: "/"},
		},
		"the GPU Operator replaces the driver": {
			marks: marks{operator: true}, trees: map[string]tree{"/run/nvidia/driver": whole, "/": whole}, state: NotReady,
			says: "Waiting for NVIDIA's driver: /run/nvidia/validations/driver-ready is absent",
		},
		"a stale mark": {
			marks: mark(container), trees: map[string]tree{"/run/nvidia/driver": {}, "/": whole}, state: NotReady,
			says: "No libnvidia-ml.so.1 below /run/nvidia/driver, which /run/nvidia/validations/driver-ready names",
		},
		"a driver root whose dev is gone": {
			marks: mark(container), trees: map[string]tree{"/run/nvidia/driver": {library: true}, "/": plain}, state: NotReady,
			says: "No folder dev below /run/nvidia/driver, which /run/nvidia/validations/driver-ready names",
		},
		"a mark with a relative path": {
			marks: mark("NVIDIA_DRIVER_ROOT=driver\n"), state: NotReady, says: "names \"driver\", which is no absolute path: delete the pod",
		},
		"a mark with a device root alone": {
			marks: mark("NVIDIA_DEV_ROOT=/\n"), trees: map[string]tree{"/": whole}, state: NotReady, says: "names no NVIDIA_DRIVER_ROOT",
		},
		"no GPU Operator, driver container": {
			trees: map[string]tree{"/run/nvidia/driver": whole, "/": plain}, roots: Roots{Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver"},
		},
		"no GPU Operator, driver on the host": {trees: map[string]tree{"/": whole}, roots: Roots{Driver: "/", Dev: "/"}},
		"no driver": {
			trees: map[string]tree{"/": plain}, state: NotFound,
			says: "No NVIDIA driver on this node: no libnvidia-ml.so.1 below /run/nvidia/driver (driver container) or / (driver on the host)",
		},
		"a root that was asked for, whatever the mark says": {
			requested: "/opt/nvidia", marks: mark(container), trees: map[string]tree{"/opt/nvidia": whole, "/run/nvidia/driver": whole},
			roots: Roots{Driver: "/opt/nvidia", Dev: "/opt/nvidia"},
		},
		"a root that was asked for and has no driver": {
			requested: "/opt/nvidia", trees: map[string]tree{"/": whole}, state: NotFound,
			says: "No libnvidia-ml.so.1 below /opt/nvidia, which --driver-root names as the driver root",
		},
		"Windows Subsystem for Linux": {
			trees: map[string]tree{"/": {wsl: true, dev: true}}, state: Unsupported, says: "Windows Subsystem for Linux is not supported",
		},
		"Windows Subsystem for Linux, as NVIDIA's validator finds it": {
			marks: mark(onHost), trees: map[string]tree{"/": {wsl: true, dev: true}}, state: Unsupported, says: "is not supported",
		},
		"Tegra": {marks: marks{tegra: true}, trees: map[string]tree{"/": whole}, state: Unsupported, says: "Tegra"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			requested := tc.requested
			if requested == "" {
				requested = Auto
			}
			roots, err := locate(requested, tc.marks, func(root string) tree { return tc.trees[root] })
			if tc.says == "" {
				g.Expect(roots, err).To(Equal(tc.roots))
				return
			}
			none, is := errors.AsType[*Missing](err)
			g.Expect(is).To(BeTrue(), "%v", err)
			g.Expect(none.State).To(Equal(tc.state))
			g.Expect(none.Message).To(ContainSubstring(tc.says))
		})
	}
}
