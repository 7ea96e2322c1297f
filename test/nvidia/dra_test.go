// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

func TestPrepare(t *testing.T) {
	g := NewWithT(t)
	const instance = "gpu-0-mig-1g5gb--1-0"
	there := Devices([]gpu.Device{split("b", "1g.5gb"), {UUID: "c", Minor: 2}}, 1)
	g.Expect(Prepare("gpu-2", false, there, 0)).To(Succeed())
	g.Expect(Prepare("gpu-3", false, there, 0)).To(MatchError("device gpu-3 does not exist"))
	g.Expect(Prepare("gpu-2", false, there, 1)).To(MatchError(ContainSubstring("already allocated to different claim")))
	g.Expect(Prepare("gpu-2", true, there, 1)).To(Succeed())
	g.Expect(Prepare(instance, false, there, 0)).To(Succeed())
	g.Expect(Prepare(instance, true, there, 0)).To(MatchError(ContainSubstring("admin access on a non-full-GPU device")))
	there[1].Shares = 2
	g.Expect(Prepare("gpu-2", false, there, 1)).To(Succeed())
	g.Expect(Serves(there[1], "nvidia.com/gpu", 1)).To(BeTrue())
	g.Expect(Serves(there[1], "nvidia.com/gpu", 2)).To(BeFalse())
	there[0].Shares = 2
	g.Expect(Serves(there[0], "nvidia.com/mig-1g.5gb", 0)).To(BeTrue())
	g.Expect(Serves(there[0], "nvidia.com/mig-1g.5gb", 1)).To(BeFalse(), "the first has all of an instance")
}

// TestClasses: of two classes the newer one serves, and the scheduler forgets the resource with either.
func TestClasses(t *testing.T) {
	g := NewWithT(t)
	c, first, second := Classes{}, dra.Class{Name: "b", Resource: "r", Age: 1}, dra.Class{Name: "c", Resource: "r", Age: 2}
	serves := func(name string) { t.Helper(); g.Expect(c["r"].Name).To(Equal(name)) }
	c.Set(nil, first)
	c.Set(nil, second)
	serves("c")
	c.Set(&first, first)
	serves("c")
	c.Set(nil, dra.Class{Name: "a", Resource: "r", Age: 2})
	serves("a")
	c.Drop(first)
	serves("")
	c.Set(&second, second)
	serves("c")
	c.Set(&second, dra.Class{Name: "c", Resource: "other", Age: 2})
	serves("")
}

// TestDeployLabelsOfAnUpgrade checks the values of deploy labels that the stand-in writes against those of NVIDIA/k8s-driver-manager
// v0.12.0, cmd/driver-manager/main.go.
func TestDeployLabelsOfAnUpgrade(t *testing.T) {
	for found, want := range map[string]struct{ meanwhile, afterwards string }{
		"":      {"", ""},
		"false": {"false", "false"},
		"true":  {"paused-for-driver-upgrade", "true"},
		// An earlier attempt has left it.
		"paused-for-driver-upgrade": {"paused-for-driver-upgrade", "true"},
		"paused-for-mig-change":     {"paused-for-mig-change_paused-for-driver-upgrade", "paused-for-mig-change"},
		"paused-for-mig-change_paused-for-driver-upgrade": {
			"paused-for-mig-change_paused-for-driver-upgrade", "paused-for-mig-change",
		},
	} {
		if got := pausedForUpgrade(found); got != want.meanwhile {
			t.Errorf("%q is stopped as %q, want %q", found, got, want.meanwhile)
		}
		if got := restored(found); got != want.afterwards {
			t.Errorf("%q is restored as %q, want %q", found, got, want.afterwards)
		}
	}
}
