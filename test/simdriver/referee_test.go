// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// refereeEnv, set to all, lets the referee check every configuration, which takes minutes.
const refereeEnv = "REFEREE"

// NVIDIA's mig-parted, unmodified, applies and asserts what it has built in: the balanced configuration for one GPU of
// each way to lay out slices, or with REFEREE=all every configuration for every GPU.
func TestMIGPartedAcceptsTheDriver(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs NVIDIA's mig-parted")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a mount namespace in which mig-parted sees the PCI bus of the simulated node")
	}
	program := migParted(t)
	all := os.Getenv(refereeEnv) == "all"
	for model, configs := range builtinConfigs(t) {
		if !all && !slices.Contains(representative(), model) {
			continue
		}
		t.Run(string(model), func(t *testing.T) {
			r := referee{t: t, program: program, driver: root(t, model, model), config: filepath.Join(t.TempDir(), "config.yaml")}
			for name, counts := range configs {
				if all || name == "all-balanced" {
					r.apply(name, counts)
				}
			}
			r.apply("all-disabled", nil)
		})
	}
}

// NVIDIA's mig-parted, which mig-manager runs, accepts, reaches and asserts the configurations that are rendered for
// it, on nodes that also have GPUs without MIG and another model with MIG: representative layouts and random ones, or
// with REFEREE=all many random ones for every model.
func TestMIGPartedReachesWhatIsRenderedForMIGManager(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs NVIDIA's mig-parted")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a mount namespace in which mig-parted sees the PCI bus of the simulated node")
	}
	program, models, rounds := migParted(t), representative(), 1
	if os.Getenv(refereeEnv) == "all" {
		models, rounds = sim.Models(), 10
	}
	for _, model := range models {
		spec, err := sim.SpecOf(model)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		if !spec.MIGCapable() {
			continue
		}
		t.Run(string(model), func(t *testing.T) {
			driver := root(t, sim.T4, model, sim.V100, model, sim.H100)
			r := referee{t: t, program: program, driver: driver, config: filepath.Join(t.TempDir(), "config.yaml")}
			random := rand.New(rand.NewPCG(uint64(len(model)), 1))
			r.reach(layout{}, randomLayout(t, spec, random), nil) // MIG mode without instances, and GPUs without MIG mode
			r.reach(fill(spec), randomLayout(t, spec, random), layout{"3g.40gb": 1, "1g.10gb+me": 1})
			for range rounds {
				r.reach(randomLayout(t, spec, random), randomLayout(t, spec, random), nil)
			}
			r.reach(nil, nil, nil)
		})
	}
}

// representative lists a model for each way to lay out slices.
func representative() []sim.Model {
	return []sim.Model{sim.A100, sim.A30, sim.H100, "rtx-pro-6000-blackwell-96gb"}
}

// layout counts the MIG instances of a GPU by profile; nil is a GPU without MIG mode.
type layout map[string]int

// fill returns the layout with as many instances of the smallest profile as fit.
func fill(spec sim.Spec) layout {
	smallest := slices.MaxFunc(spec.Profiles, func(a, b sim.Profile) int { return cmp.Or(a.Max-b.Max, b.Size-a.Size) })
	return layout{smallest.Name: smallest.Max}
}

// randomLayout adds instances of random profiles to a GPU until the first that does not fit.
func randomLayout(t *testing.T, spec sim.Spec, random *rand.Rand) layout {
	t.Helper()
	n, err := sim.NewNode("layouts", spec.Model)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	n.GPUs[0].MIG, n.GPUs[0].PendingMIG = true, true
	device, chosen := n.Observe().Devices[0], layout{}
	for {
		next := maps.Clone(chosen)
		next[spec.Profiles[random.IntN(len(spec.Profiles))].Name]++
		if _, err := mig.Pack(device, next); err != nil {
			return chosen
		}
		chosen = next
	}
}

// reach lets mig-parted bring the node's MIG-capable GPUs to the layouts, in their order, by the configuration that is
// rendered for them.
func (r referee) reach(layouts ...layout) {
	r.t.Helper()
	g := NewWithT(r.t)
	devices := func() []gpu.Device {
		n, err := r.driver.Node()
		g.Expect(err).NotTo(HaveOccurred())
		return n.Observe().Devices
	}
	var desired []v1alpha1.DeviceSpec
	before := devices()
	for _, d := range before {
		sharing := v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}
		if d.MIGCapable {
			if layouts[0] != nil {
				sharing.MIGMode = v1alpha1.MIGModeEnabled
			}
			for _, profile := range slices.Sorted(maps.Keys(layouts[0])) {
				count := v1alpha1.InstanceCount{Profile: profile, Count: int32(layouts[0][profile])}
				sharing.Instances = append(sharing.Instances, count)
			}
			layouts = layouts[1:]
		}
		desired = append(desired, v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: sharing})
	}
	c, clears := migmanager.Render(desired, before), migmanager.Clears(desired, before)
	g.Expect(os.WriteFile(r.config, []byte(migmanager.File(map[string]string{c.Name: c.Entries})), 0o600)).To(Succeed())
	r.run("assert", "--valid-config", "-f", r.config, "-c", c.Name)
	r.run("apply", "-f", r.config, "-c", c.Name)
	r.run("assert", "-f", r.config, "-c", c.Name)
	g.Expect(migmanager.Clears(desired, devices())).To(BeEmpty(), "the GPUs are as desired: %s", c.Entries)
	for i, d := range devices() {
		cleared := slices.ContainsFunc(clears, func(c gpu.Device) bool { return c.UUID == d.UUID })
		g.Expect(cleared || reflect.DeepEqual(d.State, before[i].State)).To(BeTrue(), "%s keeps its instances: %s", d, c.Entries)
	}
}

// migParted builds mig-parted from its Go module, once.
func migParted(t *testing.T) string {
	t.Helper()
	g := NewWithT(t)
	cache, err := simdriver.CacheDir()
	g.Expect(err).NotTo(HaveOccurred())
	program, err := simdriver.BuildMIGParted(t.Context(), cache)
	g.Expect(err).NotTo(HaveOccurred())
	return program
}

// builtinConfigs are mig-parted's own configurations for each GPU: counts by profile, by name.
func builtinConfigs(t *testing.T) map[sim.Model]map[string]map[string]int {
	t.Helper()
	g := NewWithT(t)
	raw, err := os.ReadFile(filepath.Join("..", "..", "internal", "gpu", "catalogue", "mig-profiles.json"))
	g.Expect(err).NotTo(HaveOccurred())
	var table struct {
		GPUs []struct {
			ID                      sim.Model
			BuiltinMigPartedConfigs map[string]map[string]int
		}
	}
	g.Expect(json.Unmarshal(raw, &table)).To(Succeed())
	configs := map[sim.Model]map[string]map[string]int{}
	for _, gpu := range table.GPUs {
		if _, err := sim.SpecOf(gpu.ID); err == nil {
			configs[gpu.ID] = gpu.BuiltinMigPartedConfigs
		}
	}
	return configs
}

type referee struct {
	t       *testing.T
	program string
	driver  *simdriver.Driver
	config  string
}

// apply lets mig-parted apply a configuration to all GPUs, and checks with it and behind its back that it is so.
// Without counts (nil) it is MIG off.
func (r referee) apply(name string, counts map[string]int) {
	r.t.Helper()
	g := NewWithT(r.t)
	entry := map[string]any{"devices": "all", "mig-enabled": counts != nil, "mig-devices": counts}
	if counts == nil {
		delete(entry, "mig-devices")
	}
	spec, err := yaml.Marshal(map[string]any{"version": "v1", "mig-configs": map[string]any{name: []any{entry}}})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.WriteFile(r.config, spec, 0o600)).To(Succeed())

	r.run("apply", "-f", r.config, "-c", name)
	r.run("assert", "-f", r.config, "-c", name)

	n, err := r.driver.Node()
	g.Expect(err).NotTo(HaveOccurred())
	for _, device := range n.Observe().Devices {
		g.Expect(device.State.MIG).To(Equal(counts != nil), name)
		found := map[string]int{}
		for _, i := range device.State.Instances {
			g.Expect(i.Partial).To(BeFalse(), name)
			found[i.Profile]++
		}
		g.Expect(fmt.Sprint(found)).To(Equal(fmt.Sprint(counts)), name)
	}
}

// asOnTheNode runs a program as on the simulated node: its PCI bus and kernel modules, its driver.
const asOnTheNode = `set -e
mount --make-rprivate /
mount --bind "$ROOT/sys/bus/pci/devices" /sys/bus/pci/devices
modules=$(cat "$ROOT/proc/modules")
mount -t tmpfs none /proc
echo "$modules" >/proc/modules
exec "$@"`

func (r referee) run(args ...string) {
	r.t.Helper()
	c := exec.CommandContext(r.t.Context(), "/bin/sh", append([]string{"-c", asOnTheNode, "sh", r.program}, args...)...)
	c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	c.Env = []string{
		"ROOT=" + r.driver.Root(), "LD_LIBRARY_PATH=" + filepath.Join(r.driver.Root(), "usr", "lib64"),
		"PATH=" + filepath.Join(r.driver.Root(), "usr", "bin") + ":/usr/sbin:/usr/bin:/sbin:/bin",
	}
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Run(); err != nil {
		r.t.Fatalf("mig-parted %s: %v\n%s", strings.Join(args, " "), err, out.String())
	}
}
