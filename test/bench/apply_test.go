// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// node is the name of the node in the cluster.
const nodeName = "bench"

// bench is one simulated node on which both programs work, and the API server that our agent reports to. Ours is the
// shipped reconciler on NVML, from the object that it has read to the status that it has written; theirs the whole run
// of the program, as its users start it.
type bench struct {
	driver     *simdriver.Driver
	scale      int
	cluster    *env.Cluster
	controller *agent.Controller
	program    string // mig-parted
	config     string // its file
}

func newBench(t *testing.T, scale int) *bench {
	t.Helper()
	g := NewWithT(t)
	cache, err := simdriver.CacheDir()
	g.Expect(err).NotTo(HaveOccurred())
	programs, err := simdriver.Build(t.Context(), cache)
	g.Expect(err).NotTo(HaveOccurred())
	program, err := simdriver.BuildMIGParted(t.Context(), cache)
	g.Expect(err).NotTo(HaveOccurred())
	d, err := simdriver.New(filepath.Join(t.TempDir(), "root"), programs, simdriver.Times(nodeName, sim.A100, 8))
	g.Expect(err).NotTo(HaveOccurred())
	b := &bench{
		driver: d, scale: scale, cluster: env.Start(t), program: program, config: filepath.Join(t.TempDir(), "config.yaml"),
	}
	library, err := drivers.Node{Host: "/"}.Library(d.Root())
	g.Expect(err).NotTo(HaveOccurred())
	root, err := os.OpenRoot(t.TempDir())
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	b.controller = agent.New(agent.Config{
		Node: nodeName, BootID: "boot", Client: b.cluster.Client, Hardware: nvml.New(nvml.Options{Library: library, SMI: b.smi}),
		MPS:       mps.NewView(mps.NewControl(hostfake.NewRunner(), root, clock.RealClock{})),
		Processes: hostfake.NewProcesses("boot"), Allocations: agent.NoAllocations{}, Clock: clock.RealClock{}, Resync: time.Hour,
	})
	return b
}

func (b *bench) smi(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(b.driver.Root(), "usr", "bin", "nvidia-smi"), args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%w: %s", err, out)
	}
	return string(out), nil
}

// measure brings the node to where a scenario begins, lets a program apply where it ends, and counts what that cost.
func (b *bench) measure(
	t *testing.T, m sim.Model, s scenario, n names, prepare func(t *testing.T, to [8]layout) (apply func() error),
) figures {
	t.Helper()
	g := NewWithT(t)
	from, to := s.from(n), s.to(n)
	g.Expect(b.driver.Replace(simdriver.Times(nodeName, m, 8))).To(Succeed())
	g.Expect(b.driver.Update(func(s *simdriver.State) error { return place(&s.Node, from) })).To(Succeed())
	apply := prepare(t, to)
	for call, takes := range latencies(m) {
		g.Expect(b.driver.SetLatency(call, takes/time.Duration(b.scale))).To(Succeed())
	}
	g.Expect(os.RemoveAll(b.log())).To(Succeed())
	before, err := b.driver.Node()
	g.Expect(err).NotTo(HaveOccurred())

	start := time.Now()
	err = apply()
	took := time.Since(start)

	after, read := b.driver.Node()
	g.Expect(read).NotTo(HaveOccurred())
	if !s.unfit {
		g.Expect(err).NotTo(HaveOccurred())
		expectLayouts(g, after, to)
	}
	return counted(g, b.log(), before, after, from, to, took)
}

func (b *bench) log() string {
	return filepath.Join(b.driver.Root(), "var", "lib", "simdriver", "calls.log")
}

// expectNothingToDo lets a program apply what the other has just applied: it accepts that as it is.
func (b *bench) expectNothingToDo(t *testing.T, s scenario, n names, prepare func(t *testing.T, to [8]layout) (apply func() error)) {
	t.Helper()
	if s.unfit {
		return
	}
	g := NewWithT(t)
	apply := prepare(t, s.to(n))
	g.Expect(os.RemoveAll(b.log())).To(Succeed())
	g.Expect(apply()).To(Succeed())
	g.Expect(b.log()).NotTo(BeAnExistingFile(), "a call that writes")
}

// place gives GPUs their instances, wherever the driver puts them.
func place(n *sim.Node, to [8]layout) error {
	for i, l := range to {
		uuid := n.GPUs[i].UUID
		if _, err := n.SetMIG(uuid, l != nil, 0); err != nil {
			return err
		}
		packing, err := mig.Pack(n.Observe().Devices[i], l)
		if err != nil {
			return err
		}
		for _, instance := range packing.Create {
			slices := 0
			for _, p := range n.GPUs[i].Spec().Profiles {
				if p.Name == instance.Profile {
					slices = p.Slices
				}
			}
			if err := n.CreatePartial(uuid, instance.Profile, instance.Placement, slices); err != nil {
				return err
			}
		}
	}
	return nil
}

func expectLayouts(g Gomega, n *sim.Node, to [8]layout) {
	for i, d := range n.Observe().Devices {
		found := layout{}
		for _, instance := range d.State.Instances {
			found[instance.Profile]++
		}
		g.Expect(d.State.MIG).To(Equal(to[i] != nil))
		g.Expect(fmt.Sprint(found)).To(Equal(fmt.Sprint(to[i])), "GPU %d", i)
	}
}

// counted reads the driver's log of the calls that write.
func counted(g Gomega, log string, before, after *sim.Node, from, to [8]layout, took time.Duration) figures {
	raw, err := os.ReadFile(log)
	if !os.IsNotExist(err) {
		g.Expect(err).NotTo(HaveOccurred())
	}
	f := figures{wall: took}
	hurt := map[string]bool{}
	for line := range strings.Lines(string(raw)) {
		words := strings.Fields(line)
		uuid, done := words[len(words)-2], words[len(words)-1] == sim.Success.String()
		f.writes++
		switch {
		case !done:
		case strings.Contains(line, " nvmlGpuInstanceDestroy "):
			f.destroyed++
			hurt[uuid] = true
		case strings.Contains(line, simdriver.GPUReset):
			f.resets++
			hurt[uuid] = true
		}
	}
	for i := range before.GPUs {
		was, is := &before.GPUs[i], &after.GPUs[i]
		if was.MIG != is.MIG {
			f.modes++
			if was.Spec().ResetOnModeChange {
				f.resets++ // the driver's own
			}
		}
		if fmt.Sprint(from[i]) == fmt.Sprint(to[i]) && hurt[was.UUID] {
			f.bystanders++
		}
	}
	return f
}

// asOnTheNode runs a program as on the simulated node: its PCI bus and kernel modules, its driver.
const asOnTheNode = `set -e
mount --make-rprivate /
mount --bind "$ROOT/sys/bus/pci/devices" /sys/bus/pci/devices
modules=$(cat "$ROOT/proc/modules")
mount -t tmpfs none /proc
echo "$modules" >/proc/modules
exec "$@"`

// migParted is one nvidia-mig-parted apply.
func (b *bench) migParted(t *testing.T, to [8]layout) func() error {
	t.Helper()
	g := NewWithT(t)
	var entries []any
	for i, l := range to {
		entry := map[string]any{"devices": []int{i}, "mig-enabled": l != nil}
		if l != nil {
			entry["mig-devices"] = l
		}
		entries = append(entries, entry)
	}
	spec, err := yaml.Marshal(map[string]any{"version": "v1", "mig-configs": map[string]any{nodeName: entries}})
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(os.WriteFile(b.config, spec, 0o600)).To(Succeed())
	return func() error {
		c := exec.CommandContext(t.Context(), "/bin/sh", "-c", asOnTheNode, "sh", b.program, "apply", "-f", b.config, "-c", nodeName)
		c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
		c.Env = []string{
			"ROOT=" + b.driver.Root(), "LD_LIBRARY_PATH=" + filepath.Join(b.driver.Root(), "usr", "lib64"),
			"PATH=" + filepath.Join(b.driver.Root(), "usr", "bin") + ":/usr/sbin:/usr/bin:/sbin:/bin",
		}
		out, err := c.CombinedOutput()
		if err != nil {
			return fmt.Errorf("mig-parted: %w\n%s", err, out)
		}
		return nil
	}
}

// agent is one reconcile of our agent.
func (b *bench) agent(t *testing.T, to [8]layout) func() error {
	t.Helper()
	g := NewWithT(t)
	n, err := b.driver.Node()
	g.Expect(err).NotTo(HaveOccurred())
	devices := n.Observe().Devices
	var want []v1alpha1.DeviceSpec
	for i, l := range to {
		want = append(want, v1alpha1.DeviceSpec{UUID: devices[i].UUID, Sharing: sharing(l)})
	}
	spec, err := ssa.Configuration[ac.GPUNodeSpecApplyConfiguration](v1alpha1.GPUNodeSpec{Devices: want})
	g.Expect(err).NotTo(HaveOccurred())
	// A GPUNode of its own for each run: in one that the agent has brought to its desired state, a GPU that is back
	// where a scenario begins is one that another program changes, which the agent leaves alone in the end.
	old := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	g.Expect(client.IgnoreNotFound(b.cluster.Client.Delete(t.Context(), old))).To(Succeed())
	object := ac.GPUNode(nodeName).WithSpec(spec)
	g.Expect(b.cluster.Client.Apply(t.Context(), object, client.FieldOwner("bench"), client.ForceOwnership)).To(Succeed())
	node := &v1alpha1.GPUNode{}
	g.Expect(b.cluster.Client.Get(t.Context(), client.ObjectKey{Name: nodeName}, node)).To(Succeed())
	return func() error {
		_, err := b.controller.Reconcile(t.Context(), node)
		return err
	}
}

func sharing(l layout) v1alpha1.DeviceSharing {
	if l == nil {
		return v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}
	}
	s := v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled}
	for profile, count := range l {
		s.Instances = append(s.Instances, v1alpha1.InstanceCount{Profile: profile, Count: int32(count)})
	}
	slices.SortFunc(s.Instances, func(a, b v1alpha1.InstanceCount) int { return strings.Compare(a.Profile, b.Profile) })
	return s
}
