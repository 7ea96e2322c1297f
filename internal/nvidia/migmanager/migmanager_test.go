// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package migmanager_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func node(t *testing.T, models ...sim.Model) []gpu.Device {
	t.Helper()
	inventory, err := sim.New(models...).Observe(t.Context())
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return inventory.Devices
}

func desired(d gpu.Device, instances ...v1alpha1.InstanceCount) v1alpha1.DeviceSpec {
	return v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: instances}}
}

func count(profile string, n int32) v1alpha1.InstanceCount {
	return v1alpha1.InstanceCount{Profile: profile, Count: n}
}

func TestAConfigurationCoversEveryGPUOnce(t *testing.T) {
	g := NewWithT(t)
	have := node(t, sim.A100, sim.A100, sim.A100, sim.T4)
	c := migmanager.Render([]v1alpha1.DeviceSpec{
		desired(have[0], count("1g.5gb", 7)), desired(have[1], count("1g.5gb+me", 1), count("3g.20gb", 1)), desired(have[2], count("1g.5gb", 7)),
	}, have)
	g.Expect(migmanager.File(map[string]string{c.Name: c.Entries, "all-disabled": "- devices: all\n  mig-enabled: false\n"})).To(Equal(
		`version: v1
mig-configs:
  all-disabled:
  - devices: all
    mig-enabled: false
  ` + c.Name + `:
  - devices: [0, 2]
    mig-enabled: true
    mig-devices:
      1g.5gb: 7
  - devices: [1]
    mig-enabled: true
    mig-devices:
      1g.5gb+me: 1
      3g.20gb: 1
  - devices: [3]
    mig-enabled: false
    mig-devices: {}
`))
	g.Expect(c.Name).To(MatchRegexp(`^gpusharing-[0-9a-f]{12}$`))
	g.Expect(migmanager.Ours(c.Name)).To(BeTrue())
	g.Expect(migmanager.Ours("all-balanced")).To(BeFalse())
}

func TestTheNameTellsTheContent(t *testing.T) {
	g := NewWithT(t)
	have, other := node(t, sim.A100, sim.A100), node(t, sim.A100, sim.A100)
	sevenths := func(d []gpu.Device) string {
		return migmanager.Render([]v1alpha1.DeviceSpec{desired(d[0], count("1g.5gb", 7))}, d).Name
	}
	g.Expect(sevenths(have)).To(Equal(sevenths(other)), "nodes that are alike share one")
	g.Expect(sevenths(have)).NotTo(Equal(migmanager.Render([]v1alpha1.DeviceSpec{desired(have[1], count("1g.5gb", 7))}, have).Name))
}

func TestConfigurationsOfOthersStayAsTheyAre(t *testing.T) {
	g := NewWithT(t)
	const file = `version: v1
mig-configs:
  all-1g.10gb:
  # H100-80GB, H800-80GB, A100-80GB, A800-80GB, A100-40GB, A800-40GB
  - device-filter: ["0x233010DE", "0x20B010DE"]
    devices: all
    mig-enabled: true
    mig-devices:
      "1g.10gb": 7
  "odd: name":
  - devices: [0, 3]
    mig-enabled: false
`
	configs, err := migmanager.Parse(file)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(configs).To(HaveLen(2))
	again, err := migmanager.Parse(migmanager.File(configs))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(again).To(Equal(configs))
	g.Expect(migmanager.File(configs)).To(And(MatchYAML(file), ContainSubstring("# H100-80GB")))
}

func TestWhatIsNoFileOfConfigurationsIsRefused(t *testing.T) {
	for file, says := range map[string]string{
		"":                            `unknown version ""`,
		"version: v2":                 `unknown version "v2"`,
		"version: [":                  "parsing a mig-manager configuration",
		"version: v1\nmig-configs: 7": "parsing a mig-manager configuration",
	} {
		_, err := migmanager.Parse(file)
		NewWithT(t).Expect(err).To(MatchError(ContainSubstring(says)), file)
	}
}

func TestWhichGPUsAreCleared(t *testing.T) {
	h := sim.New(sim.A100, sim.A100, sim.A100)
	ctx := t.Context()
	g := NewWithT(t)
	observe := func() []gpu.Device {
		inventory, err := h.Observe(ctx)
		g.Expect(err).NotTo(HaveOccurred())
		return inventory.Devices
	}
	indexes := func(devices []gpu.Device) (indexes []int) {
		for _, d := range devices {
			indexes = append(indexes, d.Index)
		}
		return indexes
	}
	have := observe()
	g.Expect(migmanager.Clears(nil, have)).To(BeEmpty())
	mode := []v1alpha1.DeviceSpec{desired(have[1], count("1g.5gb", 7))}
	g.Expect(indexes(migmanager.Clears(mode, have))).To(Equal([]int{0, 1, 2}), "a mode that changes concerns all")
	for _, d := range have[:2] {
		g.Expect(h.SetMIG(ctx, d.UUID, true)).To(Succeed())
		g.Expect(h.CreateInstance(ctx, d.UUID, "1g.5gb", gpu.Placement{Start: 0, Size: 1})).To(Succeed())
	}
	have = observe()
	one := []v1alpha1.DeviceSpec{desired(have[0], count("1g.5gb", 1)), desired(have[1], count("1g.5gb", 2))}
	g.Expect(indexes(migmanager.Clears(one, have))).To(Equal([]int{1}), "all instances of it, also the one that stays")
	g.Expect(migmanager.Clears(one[:1], have)).To(BeEmpty())
}
