// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

var update = flag.Bool("update", false, "write the golden files anew")

func multiUser(s v1alpha1.DeviceSharing) v1alpha1.DeviceSharing {
	daemon := *s.MPS
	daemon.MultiUser = true
	s.MPS = &daemon
	return s
}

// TestGoldenPlans shows what a plan is to its readers. The names of the cases are those of the files in testdata.
func TestGoldenPlans(t *testing.T) {
	four := served(plan.ResourceGPU, 25, 3840)
	cases := map[string]struct {
		text    string
		models  []sim.Model
		before  []v1alpha1.DeviceSharing // reached first; empty: freshly booted
		change  func(*world)             // then
		desired []v1alpha1.DeviceSharing
	}{
		"time-slicing": {
			text:   "Time-slicing changes nothing on a GPU.",
			models: []sim.Model{sim.T4}, desired: []v1alpha1.DeviceSharing{whole()},
		},
		"mps": {
			text:   "Two whole GPUs are shared by four through MPS.",
			models: []sim.Model{sim.T4, sim.T4}, desired: []v1alpha1.DeviceSharing{four, four},
		},
		"mps-limits": {
			text:   "Ten instead of four share two GPUs: the daemon goes on, beside a client that it serves.",
			models: []sim.Model{sim.T4, sim.T4}, before: []v1alpha1.DeviceSharing{four, four},
			change:  client("trainer", 0),
			desired: []v1alpha1.DeviceSharing{served(plan.ResourceGPU, 10, 1536), served(plan.ResourceGPU, 10, 1536)},
		},
		"mps-grows": {
			text:   "A second GPU is shared by MPS: a server that runs may not know it, so the daemon starts anew.",
			models: []sim.Model{sim.T4, sim.T4}, before: []v1alpha1.DeviceSharing{four, whole()},
			desired: []v1alpha1.DeviceSharing{four, four},
		},
		"mps-multi-user": {
			text:   "One server for all users takes a daemon of its own kind: its clients block the restart.",
			models: []sim.Model{sim.T4}, before: []v1alpha1.DeviceSharing{four}, change: client("trainer", 0),
			desired: []v1alpha1.DeviceSharing{multiUser(four)},
		},
		"mps-renamed": {
			text:   "The replicas get another name, which is another daemon's: the clients of the old one block it.",
			models: []sim.Model{sim.T4}, before: []v1alpha1.DeviceSharing{four}, change: client("trainer", 0),
			desired: []v1alpha1.DeviceSharing{served(plan.ResourceGPUShared, 25, 3840)},
		},
		"mps-shrinks": {
			text:   "One of two GPUs leaves MPS: the daemon holds both, so it starts anew.",
			models: []sim.Model{sim.T4, sim.T4}, before: []v1alpha1.DeviceSharing{four, four},
			desired: []v1alpha1.DeviceSharing{four, whole()},
		},
		"mps-died": {
			text:   "The daemon died. It is brought back although a pod still holds the GPU.",
			models: []sim.Model{sim.T4}, before: []v1alpha1.DeviceSharing{four},
			change:  func(w *world) { client("trainer", 0)(w); clear(w.daemons) },
			desired: []v1alpha1.DeviceSharing{four},
		},
		"mps-of-different-gpus": {
			text:    "GPUs of different memory have different limits.",
			models:  []sim.Model{sim.T4, sim.L40S},
			desired: []v1alpha1.DeviceSharing{four, served(plan.ResourceGPU, 25, 11517)},
		},
		"mig": {
			text:    "A whole GPU is split into seven; the one without MIG stays as it is.",
			models:  []sim.Model{sim.A100, sim.T4},
			desired: []v1alpha1.DeviceSharing{split(count("1g.5gb", 7)), whole()},
		},
		"mig-from-mps": {
			text:   "MPS makes room for MIG.",
			models: []sim.Model{sim.A100}, before: []v1alpha1.DeviceSharing{served(plan.ResourceGPU, 25, 10240)},
			desired: []v1alpha1.DeviceSharing{split(count("3g.20gb", 2))},
		},
		"mig-from-interval": {
			text:   "MIG mode hides the time slice, so the former one comes first.",
			models: []sim.Model{sim.H100}, before: []v1alpha1.DeviceSharing{timed(whole(), v1alpha1.TimeSliceIntervalShort)},
			desired: []v1alpha1.DeviceSharing{timed(split(count("7g.80gb", 1)), v1alpha1.TimeSliceIntervalDefault)},
		},
		"mig-repartitioned": {
			text:   "Sevenths become a mix. The instance that a pod uses stays; what blocks 3g.20gb and is free goes.",
			models: []sim.Model{sim.A100}, before: []v1alpha1.DeviceSharing{split(count("1g.5gb", 7))},
			change:  holder("notebook", 0, 3),
			desired: []v1alpha1.DeviceSharing{split(count("3g.20gb", 1), count("1g.5gb", 2))},
		},
		"mig-in-the-way": {
			text:   "No 4g.20gb fits without the instance that a pod and its process use.",
			models: []sim.Model{sim.A100}, before: []v1alpha1.DeviceSharing{split(count("1g.5gb", 7))},
			change:  func(w *world) { holder("notebook", 0, 3)(w); process("python", 0, 3)(w) },
			desired: []v1alpha1.DeviceSharing{split(count("4g.20gb", 1), count("1g.5gb", 3))},
		},
		"mig-off": {
			text:   "The instances go, then MIG mode, and MPS comes.",
			models: []sim.Model{sim.H100}, before: []v1alpha1.DeviceSharing{split(count("3g.40gb", 1), count("1g.10gb+me", 1))},
			desired: []v1alpha1.DeviceSharing{served(plan.ResourceGPU, 25, 20389)},
		},
		"mig-pending": {
			text:   "MIG mode was set on both GPUs and waits for a reset: one is finished, the other set back.",
			models: []sim.Model{sim.A100, sim.A100},
			change: func(w *world) {
				w.Update(func(n *sim.Node) { n.GPUs[0].PendingMIG, n.GPUs[1].PendingMIG = true, true })
			},
			desired: []v1alpha1.DeviceSharing{split(count("7g.40gb", 1)), whole()},
		},
		"mig-orphan": {
			text:   "A crash left a GPU instance without its compute instance: it is made anew.",
			models: []sim.Model{sim.A100}, before: []v1alpha1.DeviceSharing{split(count("3g.20gb", 2))},
			change:  func(w *world) { w.Update(func(n *sim.Node) { n.GPUs[0].Instances[1].Compute = nil }) },
			desired: []v1alpha1.DeviceSharing{split(count("3g.20gb", 2))},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			w := newWorld(c.models...)
			g.Expect(w.settle(t, specs(t, w, c.before))).To(Succeed())
			if c.change != nil {
				c.change(w)
			}
			golden(t, name, fmt.Sprintf("%s\n\n%s", c.text, prose(t, w, specs(t, w, c.desired))))
		})
	}
}

// specs are the desired states for the first GPUs of a node.
func specs(t *testing.T, w *world, desired []v1alpha1.DeviceSharing) []v1alpha1.DeviceSpec {
	t.Helper()
	devices := w.devices(t)
	list := make([]v1alpha1.DeviceSpec, 0, len(desired))
	for i, s := range desired {
		list = append(list, v1alpha1.DeviceSpec{UUID: devices[i].UUID, Sharing: s})
	}
	return list
}

// prose writes a plan with what each step needs and who is in its way.
func prose(t *testing.T, w *world, desired []v1alpha1.DeviceSpec) string {
	t.Helper()
	have := w.devices(t)
	steps, err := plan.Node(desired, have)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	if len(steps) == 0 {
		return "Nothing to do.\n"
	}
	var b strings.Builder
	for _, s := range steps {
		b.WriteString(s.String() + needs(s) + "\n")
		for _, in := range plan.Blockers(s, have) {
			fmt.Fprintf(&b, "    blocked by: %s\n", blocker(in))
		}
	}
	return b.String()
}

func needs(s plan.Step) string {
	text := map[plan.Scope]string{
		plan.NeedsNothing: "", plan.NeedsInstance: "; the instance must be idle", plan.NeedsGPU: "; the GPU must be idle",
	}[s.Needs()]
	if s.Closes() {
		text += ", also NVIDIA's own clients closed"
	}
	return text
}

func blocker(b plan.Blocker) string {
	if b.Process != nil {
		return fmt.Sprintf("process %d (%s), instance %d", b.Process.PID, b.Process.Name, b.Instance)
	}
	return fmt.Sprintf("container %s of pod %s/%s, instance %d", b.Holder.Container, b.Holder.Namespace, b.Holder.Pod, b.Instance)
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		NewWithT(t).Expect(os.WriteFile(file, []byte(got), 0o600)).To(Succeed())
	}
	want, err := os.ReadFile(file)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(got).To(Equal(string(want)), "go test ./internal/gpu/plan -run Golden -update writes %s anew", file)
}

// client lets a pod use a whole GPU through MPS, whose server then holds it too.
func client(pod string, index int) func(*world) {
	return func(w *world) {
		w.Update(func(n *sim.Node) {
			n.GPUs[index].Processes = append(n.GPUs[index].Processes,
				gpu.Process{PID: 70, Name: "nvidia-cuda-mps-server", Instance: gpu.WholeGPU, MPSServer: true},
				gpu.Process{PID: 4711, Name: "python", Instance: gpu.WholeGPU})
		})
		holder(pod, index, gpu.WholeGPU)(w)
	}
}

// holder allocates a GPU, or the instance that begins at a slice, to a pod.
func holder(pod string, index, start int) func(*world) {
	return func(w *world) {
		w.Update(func(n *sim.Node) {
			h := gpu.Holder{Namespace: "research", Pod: pod, Container: "main", Instance: instanceAt(n, index, start)}
			n.GPUs[index].Holders = append(n.GPUs[index].Holders, h)
		})
	}
}

// process runs a program on the instance of a GPU that begins at a slice.
func process(name string, index, start int) func(*world) {
	return func(w *world) {
		w.Update(func(n *sim.Node) {
			p := gpu.Process{PID: 4242, Name: name, Instance: instanceAt(n, index, start)}
			n.GPUs[index].Processes = append(n.GPUs[index].Processes, p)
		})
	}
}

func instanceAt(n *sim.Node, index, start int) int {
	for _, i := range n.GPUs[index].Instances {
		if i.Placement.Start == start {
			return i.ID
		}
	}
	return gpu.WholeGPU
}
