// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// cgroupTree is a tree of control groups as a kubelet and its runtime make it, in a folder. It refuses to remove what
// has children, and makes nothing where the parent is gone.
type cgroupTree struct {
	root       string
	systemd    bool
	crun       bool // it puts the processes of containers into a control group below theirs, and knows no dmem
	controller string
	unified    bool
}

func newCgroupTree(root string, systemd bool, controller string) (*cgroupTree, error) {
	c := &cgroupTree{root: root, systemd: systemd, controller: controller, unified: true}
	for name, content := range map[string]string{"cgroup.controllers": "cpu memory misc " + controller, "cgroup.subtree_control": "cpu memory misc " + controller} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content+"\n"), 0o600); err != nil {
			return nil, err
		}
	}
	for _, level := range []string{"", "burstable", "besteffort"} {
		if err := os.Mkdir(c.level(level), 0o700); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// level is the folder of a class of quality of service.
func (c *cgroupTree) level(class string) string {
	switch {
	case c.systemd && class == "":
		return filepath.Join(c.root, "kubepods.slice")
	case c.systemd:
		return filepath.Join(c.root, "kubepods.slice", "kubepods-"+class+".slice")
	}
	return filepath.Join(c.root, "kubepods", class)
}

// pod is the path of a pod's control group.
func (c *cgroupTree) pod(class, uid string) string {
	if !c.systemd {
		return filepath.Join(c.level(class), "pod"+uid)
	}
	name := "kubepods-"
	if class != "" {
		name += class + "-"
	}
	return filepath.Join(c.level(class), name+"pod"+strings.ReplaceAll(uid, "-", "_")+".slice")
}

func (c *cgroupTree) container(pod string, id int) string {
	name := fmt.Sprintf("%064x", id)
	if c.systemd {
		name = "cri-containerd-" + name + ".scope"
	}
	return filepath.Join(pod, name)
}

func (c *cgroupTree) make(path string, delegated bool) error {
	if err := os.Mkdir(path, 0o700); err != nil || !delegated {
		return err
	}
	return os.WriteFile(filepath.Join(path, c.controller+".max"), nil, 0o600)
}

// remove refuses a control group with children, as the kernel does.
func (c *cgroupTree) remove(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			return fmt.Errorf("%s: device or resource busy", path)
		}
	}
	return os.RemoveAll(path)
}

// crashed is how a simulated end of the agent's process unwinds.
type crashed struct{}

// limitHardware is the driver, with what may happen around its calls.
type limitHardware struct {
	*sim.Hardware

	calls         int
	crashBefore   int // how many calls until the process ends, before one; -1: it does not
	crashAfter    int
	before, after func(uuid, path string) (done bool) // what happens right before a set, and between it and the look after it
	ignores, lies bool                                // a set has no effect
	sets          []limitSet
}

type limitSet struct {
	gpu, path string
	hard      uint64
}

func (h *limitHardware) end(counter *int) {
	if *counter >= 0 {
		if *counter--; *counter < 0 {
			panic(crashed{})
		}
	}
}

// MemoryLimit implements gpu.Hardware.
func (h *limitHardware) MemoryLimit(ctx context.Context, uuid, path string) (gpu.MemoryLimit, error) {
	h.calls++
	h.end(&h.crashBefore)
	defer h.end(&h.crashAfter)
	return h.Hardware.MemoryLimit(ctx, uuid, path)
}

// SetMemoryLimit implements gpu.Hardware.
func (h *limitHardware) SetMemoryLimit(ctx context.Context, uuid, path string, soft, hard uint64) error {
	h.calls++
	h.end(&h.crashBefore)
	if h.before != nil && h.before(uuid, path) {
		h.before = nil
	}
	h.sets = append(h.sets, limitSet{uuid, path, hard})
	var err error
	if !h.ignores || hard == gpu.NoMemoryLimit {
		err = h.Hardware.SetMemoryLimit(ctx, uuid, path, soft, hard)
	} else if is, e := h.Hardware.MemoryLimit(ctx, uuid, path); e != nil || is.Hard != hard { // else it is there already
		h.lies = true
	}
	if h.after != nil && h.after(uuid, path) {
		h.after = nil
	}
	h.end(&h.crashAfter)
	return err
}

// limitPod is a pod with shares of GPUs, or whole ones.
type limitPod struct {
	name, uid, class string
	replicas         map[string]int // by GPU; 0: it has the whole GPU
	listed           map[string]int // of these by the kubelet: those of an init container alone it leaves out
	stage            int            // admitted, cgroup, log folder, sandbox, containers
	bare             bool           // its cgroup has no files of the controller
	bareContainers   bool
	containers       []string
	next             int
	pids             map[int]string  // of its programs, with their GPU
	uncounted        map[int]bool    // those that took memory past the pod's limit, as the agent has not seen
	covered          map[string]bool // by GPU: the agent has said that the limit holds
}

const (
	stageAdmitted = iota
	stageCgroup
	stageLogs
	stageSandbox
	stageRuns
)

// limitWorld is a node in which pods, cgroups, the driver, other programs and the agent's process do what they do.
type limitWorld struct {
	t         *testing.T
	r         *rand.Rand
	backend   sim.Backend
	tree      *cgroupTree
	hostRoot  string
	record    host.RecordFile
	hardware  *limitHardware
	held      *allocations
	clock     *testclock.FakeClock
	limiter   *agent.MemoryLimiter
	node      *v1alpha1.GPUNode
	gpus      []string
	pods      []*limitPod
	foreign   map[string]uint64      // limits of other programs, by GPU and cgroup
	disturbed map[string]disturbance // by GPU and cgroup
	serial    int
	gate      bool
	memacct   string
	boot      int
	known     map[string]bool // paths of cgroups of pods
	names     func() (map[string]host.ContainerName, error)
	counts    map[string]int
	last      agent.Limits
	log       []string
}

func newLimitWorld(t *testing.T, seed uint64, counts map[string]int) *limitWorld {
	t.Helper()
	w := &limitWorld{
		t: t, r: rand.New(rand.NewPCG(seed, 45)), foreign: map[string]uint64{}, disturbed: map[string]disturbance{}, known: map[string]bool{}, counts: counts, gate: true,
		clock: testclock.NewFakeClock(time.Unix(1_800_000_000, 0)), held: &allocations{}, hostRoot: t.TempDir(),
	}
	w.backend = []sim.Backend{sim.Dmem, sim.Misc, sim.Misc}[seed%3]
	controller := string(w.backend)
	tree, err := newCgroupTree(t.TempDir(), seed%4 < 2, controller)
	w.must(err)
	w.tree, tree.crun = tree, seed%5 == 0
	w.record = host.RecordFile{Path: filepath.Join(w.hostRoot, "mps/.memory-limits/record.json")}
	w.must(os.MkdirAll(filepath.Join(w.hostRoot, "var/log/pods"), 0o755))
	w.must(os.MkdirAll(filepath.Join(w.hostRoot, "mps"), 0o755))
	root, err := os.OpenRoot(w.hostRoot)
	w.must(err)
	t.Cleanup(func() { _ = root.Close() })
	w.names = host.NewContainerLogs(root).Pods
	w.hardware = &limitHardware{Hardware: sim.New(sim.A100, sim.A100), crashBefore: -1, crashAfter: -1}
	w.hardware.Update(func(n *sim.Node) {
		n.DriverVersion = "615.71.09"
		n.Cgroups = sim.Cgroups{Backend: w.backend, Root: tree.root, AppliesBelowUse: seed%8 == 4}
		for i := range n.GPUs {
			n.GPUs[i].Persistence = true
			w.gpus = append(w.gpus, n.GPUs[i].UUID)
		}
	})
	w.node = &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1", Generation: 1}}
	for _, uuid := range w.gpus {
		w.node.Status.Devices = append(w.node.Status.Devices, v1alpha1.DeviceStatus{UUID: uuid, MemoryMiB: 40960})
		for i := range 4 {
			w.held.advertised = append(w.held.advertised, fmt.Sprintf("%s::%d", uuid, i))
		}
	}
	w.startAgent()
	return w
}

func (w *limitWorld) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatalf("%v\n%s", err, strings.Join(w.log, "\n"))
	}
}

// fails ends the test with the last of what happened.
func (w *limitWorld) fails(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf(format+"\n%s", append(args, strings.Join(w.log[max(0, len(w.log)-60):], "\n"))...)
}

func (w *limitWorld) note(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf(format, args...))
	if len(w.log) > 500 {
		w.log = w.log[250:]
	}
}

// startAgent starts the agent's process: all that it knew is gone.
func (w *limitWorld) startAgent() {
	w.hardware.crashBefore, w.hardware.crashAfter = -1, -1
	c := agent.New(agent.Config{Node: "n1", BootID: fmt.Sprintf("boot-%d", w.boot), Hardware: w.hardware, Allocations: w.held, Clock: w.clock})
	w.limiter = agent.NewMemoryLimiter(c, agent.LimitSources{
		Gate: w.gate, Cgroups: host.Cgroups{Folder: w.tree.root, Unified: func(string) bool { return w.tree.unified }},
		PodNames: w.names, Devices: w.kubelet().Devices, MemacctMode: func() string { return w.memacct }, Record: w.record,
	})
}

// settle lets the agent look, and reports whether it came to an end.
func (w *limitWorld) settle() (ended bool) {
	defer func() {
		if r := recover(); r != nil {
			if _, is := r.(crashed); !is {
				panic(r)
			}
			w.note("the agent's process ended")
			w.startAgent()
		}
	}()
	mode := w.node.Spec.Memory.Limited()
	w.hardware.sets, w.hardware.lies = nil, false
	found, err := w.limiter.Settle(w.t.Context(), w.node.DeepCopy())
	w.checkSets(mode)
	if w.hardware.lies {
		w.disturb(lied)
	}
	if err != nil {
		w.note("settle: %v", err)
		return false
	}
	w.last = found
	w.note("settle %s: %+v %v", mode, found.Status, found.Condition)
	w.cover(mode, found)
	return true
}

// checkSets: limits are set on cgroups of pods alone, under Enforce alone, and none where another program limits.
func (w *limitWorld) checkSets(mode v1alpha1.MemoryLimitMode) {
	w.t.Helper()
	for _, s := range w.hardware.sets {
		switch {
		case !w.known[s.path]:
			w.fails("set %s, which is no cgroup of a pod", s.path)
		case s.hard != gpu.NoMemoryLimit && mode != v1alpha1.MemoryLimitEnforce:
			w.fails("set %s to %d under %s", s.path, s.hard, mode)
		case w.node.Spec.MemoryOwner != "":
			w.fails("set %s beside %s", s.path, w.node.Spec.MemoryOwner)
		}
	}
}

// cover notes which pods the agent says to be limited, and holds it to that.
func (w *limitWorld) cover(mode v1alpha1.MemoryLimitMode, found agent.Limits) {
	w.t.Helper()
	for _, p := range w.pods {
		p.covered = map[string]bool{}
	}
	w.checkNamed(mode, found)
	if mode != v1alpha1.MemoryLimitEnforce {
		return
	}
	for _, l := range found.Status.Pods {
		i := slices.IndexFunc(w.pods, func(p *limitPod) bool { return p.name == l.PodName && p.stage >= stageLogs })
		if i >= 0 && l.Reason == v1alpha1.ReasonForeignLimit && w.foreign[l.DeviceUUID+" "+w.tree.pod(w.pods[i].class, w.pods[i].uid)] == 0 {
			maps.DeleteFunc(w.pods[i].uncounted, func(pid int, _ bool) bool { return w.pods[i].pids[pid] == l.DeviceUUID })
		}
		if l.Reason == v1alpha1.ReasonNotEnforced && !w.lately(lied) {
			w.fails("a limit of pod %s is said not to read back, and the driver keeps all limits", l.PodName)
		}
		if l.Reason == "" && i >= 0 {
			w.coverPod(l, w.pods[i])
		}
	}
}

// checkNamed: each pod with a share is in the report, with its limit or a reason, also one whose init container alone has it.
func (w *limitWorld) checkNamed(mode v1alpha1.MemoryLimitMode, found agent.Limits) {
	w.t.Helper()
	for _, p := range w.pods {
		_, err := os.Stat(w.tree.pod(p.class, p.uid))
		for uuid, n := range p.replicas {
			is := func(l v1alpha1.PodMemoryLimit) bool { return l.PodName == p.name && l.DeviceUUID == uuid }
			if mode != v1alpha1.MemoryLimitNone && err == nil && n > 0 && p.stage >= stageLogs && w.tree.unified && !slices.ContainsFunc(found.Status.Pods, is) {
				w.fails("pod %s has %d replicas of %s, and is not reported", p.name, n, uuid)
			}
		}
	}
}

func (w *limitWorld) coverPod(l v1alpha1.PodMemoryLimit, p *limitPod) {
	w.t.Helper()
	path := w.tree.pod(p.class, p.uid)
	lately, inside := func(path string) bool { return w.lately(l.DeviceUUID + " " + path) }, w.inside(p)
	if lately(path) || slices.ContainsFunc(inside, lately) {
		return
	}
	if w.backend == sim.Misc && slices.ContainsFunc(inside, func(path string) bool { return w.foreign[l.DeviceUUID+" "+path] > 0 }) {
		w.fails("pod %s is said to be limited on %s, and a container has a limit of its own", p.name, l.DeviceUUID)
	}
	is := w.limitOf(l.DeviceUUID, path)
	if is != uint64(l.LimitBytes) {
		w.fails("pod %s is said to be limited to %d on %s, and has %d", p.name, l.LimitBytes, l.DeviceUUID, is)
	}
	if spec := w.node.Spec.Memory; spec.PerReplica != nil && l.LimitBytes != min(spec.PerReplica.Value()*int64(p.replicas[l.DeviceUUID]), 40<<30) {
		w.fails("pod %s has %d replicas, and a limit of %d", p.name, p.replicas[l.DeviceUUID], l.LimitBytes)
	}
	p.covered[l.DeviceUUID] = true
}

// disturbance is when another program last set or removed a limit, and what the agent had looked at fully by then.
type disturbance struct {
	at         time.Time
	generation int64
	by         *agent.MemoryLimiter
}

// lied is the key of the moment in which the driver last ignored a limit.
const lied = "the driver"

func (w *limitWorld) disturb(key string) {
	w.disturbed[key] = disturbance{w.clock.Now(), w.node.Generation, w.limiter}
}

// lately reports whether the agent need not know yet: it asks again about what has not changed only every five minutes,
// for another generation, and when it starts.
func (w *limitWorld) lately(key string) bool {
	d, is := w.disturbed[key]
	return is && w.clock.Since(d.at) < 6*time.Minute && d.generation == w.node.Generation && d.by == w.limiter
}

// limitOf is what the driver has of a cgroup on a GPU; NoLimit: nothing.
func (w *limitWorld) limitOf(uuid, path string) (hard uint64) {
	hard = sim.NoLimit
	w.hardware.Update(func(n *sim.Node) {
		if found, err := n.MemoryLimit(uuid, path); err == nil {
			hard = found.Hard
		}
	})
	return hard
}

// checkForeign: no limit of another program was touched.
func (w *limitWorld) checkForeign() {
	w.t.Helper()
	for key, hard := range w.foreign {
		uuid, path, _ := strings.Cut(key, " ")
		if is := w.limitOf(uuid, path); is != hard {
			w.fails("another program set %s to %d on %s, and it has %d", path, hard, uuid, is)
		}
	}
}

// checkNone: no limit of ours is left on a cgroup that exists.
func (w *limitWorld) checkNone(when string) {
	w.t.Helper()
	for _, uuid := range w.gpus {
		for path := range w.known {
			if _, err := os.Stat(path); err != nil {
				continue
			}
			if hard := w.limitOf(uuid, path); hard != sim.NoLimit && w.foreign[uuid+" "+path] != hard && w.ofParent(uuid, path) != hard {
				w.fails("%s: %s has %d on %s", when, path, hard, uuid)
			}
		}
	}
}

// ofParent is the foreign limit that reads on a container without files.
func (w *limitWorld) ofParent(uuid, path string) uint64 {
	for dir := filepath.Dir(path); dir != w.tree.root; dir = filepath.Dir(dir) {
		if is := w.foreign[uuid+" "+dir]; is > 0 {
			return is
		}
	}
	return 0
}

func (w *limitWorld) count(fault string) { w.counts[fault]++ }

var errLimits = errors.New("a fault")

// limitSteps is how many steps the test takes.
func limitSteps() int {
	if n, err := strconv.Atoi(os.Getenv("LIMIT_STEPS")); err == nil {
		return n
	}
	return 1500
}

// TestLimitsInARandomWorld plays worlds of 250 steps each. LIMIT_STEPS=100000: so many steps in all.
func TestLimitsInARandomWorld(t *testing.T) {
	counts := map[string]int{}
	const each = 250
	for seed := range uint64((limitSteps() + each - 1) / each) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			w := newLimitWorld(t, seed, counts)
			for range each {
				w.step()
			}
			w.end()
		})
		if t.Failed() {
			return
		}
	}
	for _, fault := range slices.Sorted(maps.Keys(counts)) {
		t.Logf("%7d %s", counts[fault], fault)
	}
}

// quantity is a share that no other program chooses: theirs are odd.
func (w *limitWorld) quantity() *resource.Quantity {
	if w.r.IntN(3) == 0 {
		return nil
	}
	return resource.NewQuantity(int64(1+w.r.IntN(9))<<30, resource.BinarySI)
}
