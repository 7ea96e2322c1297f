// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// step lets one thing happen, the agent look at it more often than not, and time pass.
func (w *limitWorld) step() {
	w.t.Helper()
	for happened := false; !happened; {
		h := pick(w.r, w.happenings())
		w.note("%s", h.name)
		if happened = h.do(); happened {
			w.count(h.name)
		}
	}
	w.clock.Step(time.Duration(w.r.IntN(20)) * time.Second)
	if w.r.IntN(4) > 0 {
		w.settle()
	}
	w.checkForeign()
}

type limitHappening struct {
	name string
	do   func() bool // reports whether it could happen
}

// happenings are what may happen, each as often as it stands there.
func (w *limitWorld) happenings() (all []limitHappening) {
	for _, h := range []struct {
		often int
		limitHappening
	}{
		{22, limitHappening{"a pod is admitted", w.admit}},
		{80, limitHappening{"a pod gets further", w.advance}},
		{25, limitHappening{"a program allocates", w.allocate}},
		{10, limitHappening{"programs of a pod free memory", w.free}},
		{6, limitHappening{"a pod ends", w.endPod}},
		{10, limitHappening{"a container restarts", w.restartContainer}},
		{8, limitHappening{"another program limits a pod", w.limitByOthers}},
		{17, limitHappening{"another program removes its limit", w.unlimitByOthers}},
		{13, limitHappening{"a container lifts its limit by the hook", w.hook}},
		{4, limitHappening{"the policy changes", w.policy}},
		{3, limitHappening{"another owner comes", w.owner}},
		{3, limitHappening{"the driver is initialized anew", w.reload}},
		{9, limitHappening{"the agent's process ends before a call", func() bool { return w.crash(&w.hardware.crashBefore) }}},
		{9, limitHappening{"the agent's process ends after a call", func() bool { return w.crash(&w.hardware.crashAfter) }}},
		{3, limitHappening{"the agent's process ends at rest", func() bool { w.startAgent(); return true }}},
		{5, limitHappening{"two agents look at once", w.twoAgents}},
		{5, limitHappening{"a call fails", w.callFails}},
		{3, limitHappening{"the record cannot be written", w.recordFails}},
		{5, limitHappening{"the kubelet lists no pods", w.kubeletRestarts}},
		{3, limitHappening{"the kubelet's record cannot be read", w.recordOfKubeletBreaks}},
		{3, limitHappening{"the device plugin advertises nothing", w.pluginRestarts}},
		{50, limitHappening{"a new cgroup inherits a stale limit", w.inherit}},
		{8, limitHappening{"a cgroup goes between look and set", w.vanishes}},
		{8, limitHappening{"a set has no effect", w.ignored}},
		{45, limitHappening{"a container's limit changes between set and look", w.hookRaces}},
		{45, limitHappening{"a program frees between set and look", w.freesInTime}},
		{10, limitHappening{"a pod of the same name is still there", w.sameName}},
		{9, limitHappening{"a link and a folder that look like pods", w.disguised}},
		{3, limitHappening{"what a limit needs is lacking", w.lacking}},
		{3, limitHappening{"the node boots", w.reboot}},
	} {
		for range h.often {
			all = append(all, h.limitHappening)
		}
	}
	return all
}

// anew asks for other limits, so that the agent has something to set.
func (w *limitWorld) anew() {
	w.node.Generation++
	w.node.Spec.MemoryOwner = ""
	w.node.Spec.Memory = &v1alpha1.TimeSlicedMemory{Limit: v1alpha1.MemoryLimitEnforce, PerReplica: resource.NewQuantity(int64(1+w.serial%7)<<30+int64(w.r.IntN(100))<<20, resource.BinarySI)}
	w.uncover()
}

// crash ends the agent's process within its next look.
func (w *limitWorld) crash(counter *int) bool {
	w.anew()
	*counter = w.r.IntN(8)
	was := w.limiter
	w.settle()
	return w.limiter != was
}

func pick[T any](r *rand.Rand, all []T) T { return all[r.IntN(len(all))] }

// admit: the kubelet has allocated devices, and the pod has no cgroup yet.
func (w *limitWorld) admit() bool {
	if len(w.pods) >= 8 {
		return false
	}
	w.serial++
	p := &limitPod{
		name: fmt.Sprintf("pod-%d", w.serial), uid: fmt.Sprintf("%08x-0000-4000-8000-%012x", w.serial, w.serial), class: pick(w.r, []string{"", "burstable", "besteffort"}),
		replicas: map[string]int{}, bare: w.r.IntN(12) == 0, bareContainers: w.r.IntN(3) == 0, pids: map[int]string{}, uncounted: map[int]bool{}, covered: map[string]bool{},
	}
	if w.r.IntN(10) == 0 { // a static pod
		p.uid = fmt.Sprintf("%032x", w.serial)
	}
	for _, uuid := range w.gpus {
		switch w.r.IntN(4) {
		case 0:
			p.replicas[uuid] = 2
		case 1, 2:
			p.replicas[uuid] = 1
		}
	}
	if len(p.replicas) == 0 {
		p.replicas[w.gpus[0]] = w.r.IntN(2)
	}
	p.listed = map[string]int{}
	for _, uuid := range w.gpus {
		p.listed[uuid] = w.r.IntN(p.replicas[uuid] + 1)
	}
	w.pods = append(w.pods, p)
	w.allocated()
	w.checkpoint()
	return true
}

func (w *limitWorld) kubelet() host.Kubelet {
	return host.Kubelet{Host: w.hostRoot, Folder: "/var/lib/kubelet"}
}

// checkpoint lets the kubelet record what it has allocated, also to init containers: at an allocation, so that pods which end stay there until
// the next.
func (w *limitWorld) checkpoint() {
	type entry struct {
		PodUID, ContainerName, ResourceName string
		DeviceIDs                           map[string][]string
	}
	entries := []entry{}
	for _, p := range w.pods {
		for _, container := range []string{"init", "main"} {
			e := entry{p.uid, container, "nvidia.com/gpu", map[string][]string{}}
			for uuid, n := range p.replicas {
				if container == "main" {
					n = min(n, p.listed[uuid])
				}
				for i := range n {
					e.DeviceIDs["-1"] = append(e.DeviceIDs["-1"], fmt.Sprintf("%s::%d", uuid, i))
				}
			}
			entries = append(entries, e)
		}
	}
	content, err := json.Marshal(map[string]any{"Data": map[string]any{"PodDeviceEntries": entries}, "Checksum": 1})
	w.must(err)
	folder := filepath.Join(w.hostRoot, "var/lib/kubelet/device-plugins")
	w.must(os.MkdirAll(folder, 0o755))
	w.must(os.WriteFile(filepath.Join(folder, "kubelet_internal_checkpoint"), content, 0o600))
}

// allocated lets the kubelet list what the pods have.
func (w *limitWorld) allocated() {
	var list []agent.Allocation
	for _, p := range w.pods {
		for _, uuid := range w.gpus {
			n, has := p.replicas[uuid]
			if has && n == 0 {
				list = append(list, agent.Allocation{Namespace: "team", Pod: p.name, Container: "main", Device: uuid})
			}
			for i := range p.listed[uuid] { // a sidecar and the main one have the same replicas
				for _, container := range []string{"sidecar", "main"} {
					list = append(list, agent.Allocation{Namespace: "team", Pod: p.name, Container: container, Device: fmt.Sprintf("%s::%d", uuid, i)})
				}
			}
		}
	}
	w.held.mu.Lock()
	w.held.list, w.held.err = list, nil
	w.held.mu.Unlock()
}

func (w *limitWorld) logFolder(p *limitPod) string {
	return filepath.Join(w.hostRoot, "var/log/pods", "team_"+p.name+"_"+p.uid)
}

// advance takes a pod one step further on its way to its containers.
func (w *limitWorld) advance() bool {
	starting := slices.DeleteFunc(slices.Clone(w.pods), func(p *limitPod) bool { return p.stage == stageRuns })
	if len(starting) == 0 {
		return false
	}
	p := pick(w.r, starting)
	path := w.tree.pod(p.class, p.uid)
	p.stage++
	switch p.stage {
	case stageCgroup:
		w.must(w.tree.make(path, !p.bare))
		w.known[path] = true
	case stageLogs:
		w.must(os.MkdirAll(w.logFolder(p), 0o755))
	case stageSandbox, stageRuns:
		w.addContainer(p)
		if p.stage == stageRuns && w.r.IntN(2) == 0 {
			w.addContainer(p)
		}
	}
	return true
}

func (w *limitWorld) addContainer(p *limitPod) {
	p.next++
	path := w.tree.container(w.tree.pod(p.class, p.uid), w.serial*1000+p.next)
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return // its pod's cgroup vanished
	}
	w.must(w.tree.make(path, !p.bare && !p.bareContainers && (!w.tree.crun || w.backend != sim.Dmem)))
	if w.tree.crun {
		w.must(w.tree.make(w.processes(path), w.backend == sim.Misc))
	}
	w.known[path], w.known[w.processes(path)] = true, true
	p.containers = append(p.containers, path)
}

// inside are the cgroups of containers, and those of their processes.
func (w *limitWorld) inside(p *limitPod) (all []string) {
	for _, path := range p.containers {
		if all = append(all, path); w.tree.crun {
			all = append(all, w.processes(path))
		}
	}
	return all
}

// processes is the cgroup in which the processes of a container are.
func (w *limitWorld) processes(container string) string {
	if w.tree.crun {
		return filepath.Join(container, "container")
	}
	return container
}

// running are pods with a container beside the sandbox.
func (w *limitWorld) running() []*limitPod {
	return slices.DeleteFunc(slices.Clone(w.pods), func(p *limitPod) bool { return len(p.containers) < 2 })
}

// allocate: a pod that is said to be limited never has more than its share.
func (w *limitWorld) allocate() bool {
	all := w.running()
	if len(all) == 0 {
		return false
	}
	p := pick(w.r, all)
	uuid := pick(w.r, w.gpus)
	if _, has := p.replicas[uuid]; !has {
		return false
	}
	w.serial++
	w.hardware.Update(func(n *sim.Node) {
		pid := 1000 + w.serial
		if n.StartProgram(uuid, gpu.Process{PID: pid, Name: "python3", Instance: gpu.WholeGPU}, w.processes(p.containers[1+w.r.IntN(len(p.containers)-1)])) != nil {
			return
		}
		p.pids[pid] = uuid
		p.uncounted[pid] = w.backend == sim.Misc && slices.ContainsFunc(w.inside(p), func(path string) bool { return w.foreign[uuid+" "+path] > 0 })
		_ = n.Allocate(uuid, pid, pick(w.r, []sim.MemoryKind{sim.DeviceMemory, sim.PoolMemory, sim.VirtualMemory}), uint64(1+w.r.IntN(12))<<30)
	})
	if p.covered[uuid] {
		w.within(p, uuid)
	}
	return true
}

// within: a pod has no more than its share.
func (w *limitWorld) within(p *limitPod, uuid string) {
	w.t.Helper()
	sum, limit := uint64(0), w.limitOf(uuid, w.tree.pod(p.class, p.uid))
	w.hardware.Update(func(n *sim.Node) {
		g, _ := n.GPU(uuid)
		for _, a := range g.Allocations {
			if p.pids[a.PID] == uuid && !p.uncounted[a.PID] { // also what the driver does not count
				sum += a.Bytes
			}
		}
	})
	if limit == sim.NoLimit || sum > limit {
		w.fails("pod %s is said to be limited, and has %d of %d on %s", p.name, sum, limit, uuid)
	}
}

func (w *limitWorld) free() bool {
	all := w.running()
	if len(all) == 0 {
		return false
	}
	for pid := range pick(w.r, all).pids {
		w.hardware.Update(func(n *sim.Node) { n.FreeMemory(pid) })
	}
	return true
}

// kill ends the programs of a pod.
func (w *limitWorld) kill(p *limitPod) {
	for pid := range p.pids {
		w.hardware.RemoveProcess(pid)
	}
	clear(p.pids)
}

// gone removes a cgroup, and with it what others have set on it.
func (w *limitWorld) gone(path string) {
	if _, err := os.Stat(path); err != nil {
		return
	}
	inner := w.processes(path)
	if _, err := os.Stat(inner); err == nil && inner != path {
		w.must(w.tree.remove(inner))
	}
	w.must(w.tree.remove(path))
	delete(w.known, path)
	delete(w.known, inner)
	for _, uuid := range w.gpus {
		delete(w.foreign, uuid+" "+path)
		delete(w.foreign, uuid+" "+inner)
	}
}

func (w *limitWorld) endPod() bool {
	if len(w.pods) == 0 {
		return false
	}
	w.remove(pick(w.r, w.pods))
	return true
}

func (w *limitWorld) remove(p *limitPod) {
	w.kill(p)
	for _, path := range p.containers {
		w.gone(path)
	}
	w.gone(w.tree.pod(p.class, p.uid))
	w.pods = slices.DeleteFunc(w.pods, func(other *limitPod) bool { return other == p })
	w.allocated()
	if w.r.IntN(2) == 0 { // the kubelet keeps the logs for a while
		w.must(os.RemoveAll(w.logFolder(p)))
	}
}

func (w *limitWorld) restartContainer() bool {
	all := w.running()
	if len(all) == 0 {
		return false
	}
	p := pick(w.r, all)
	w.kill(p)
	last := p.containers[len(p.containers)-1]
	w.gone(last)
	p.containers = p.containers[:len(p.containers)-1]
	w.addContainer(p)
	return true
}

// odd is a limit that the agent would never set.
func (w *limitWorld) odd() uint64 { return uint64(1+w.r.IntN(30))<<30 + 1 }

// limitByOthers: the new limit replaces whatever is there.
func (w *limitWorld) limitByOthers() bool {
	if len(w.pods) == 0 {
		return false
	}
	p := pick(w.r, w.pods)
	return w.other(p, w.tree.pod(p.class, p.uid), false)
}

func (w *limitWorld) hook() bool {
	all := w.running()
	if len(all) == 0 {
		return false
	}
	p := pick(w.r, all)
	return w.other(p, w.processes(p.containers[len(p.containers)-1]), true)
}

// other: another program sets a limit; NVIDIA's hook a soft one too, which on dmem raises those above.
func (w *limitWorld) other(p *limitPod, path string, both bool) bool {
	uuid, hard, soft, set := pick(w.r, w.gpus), w.odd(), uint64(0), false
	if both {
		soft = hard
	}
	w.hardware.Update(func(n *sim.Node) { set = n.SetMemoryLimit(uuid, path, soft, hard, true) == nil })
	if !set || w.limitOf(uuid, path) != hard {
		return false
	}
	w.note("another program: %s %s %d", uuid, path, hard)
	w.foreign[uuid+" "+path] = hard
	w.disturb(uuid + " " + path)
	delete(p.covered, uuid)
	return true
}

func (w *limitWorld) unlimitByOthers() bool {
	for key := range w.foreign {
		uuid, path, _ := strings.Cut(key, " ")
		w.hardware.Update(func(n *sim.Node) { _ = n.SetMemoryLimit(uuid, path, 0, sim.NoLimit, true) })
		delete(w.foreign, key)
		w.disturb(key)
		return true
	}
	return false
}

func (w *limitWorld) policy() bool {
	w.node.Generation++
	w.node.Spec.Memory, w.node.Spec.MemoryOwner = nil, ""
	if mode := pick(w.r, []v1alpha1.MemoryLimitMode{"", "None", "Report", "Enforce", "Enforce", "Enforce", "Enforce"}); mode != "" {
		w.node.Spec.Memory = &v1alpha1.TimeSlicedMemory{Limit: mode, PerReplica: w.quantity()}
	}
	w.uncover()
	w.note("the policy says %+v", w.node.Spec.Memory)
	return true
}

func (w *limitWorld) uncover() {
	for _, p := range w.pods {
		clear(p.covered)
	}
}

func (w *limitWorld) owner() bool {
	w.node.Generation++
	w.node.Spec.MemoryOwner = pick(w.r, []string{"HAMi", "gpu-fractioning"})
	w.uncover()
	return true
}

// reload: no program has a GPU then, and the driver loses all limits.
func (w *limitWorld) reload() bool {
	for _, p := range w.pods {
		w.kill(p)
	}
	w.hardware.Update(func(n *sim.Node) {
		n.Reload()
		for i := range n.GPUs {
			n.GPUs[i].Persistence = true
		}
	})
	clear(w.foreign)
	w.uncover()
	return true
}

// twoAgents: another process of the agent is at work while this one looks, as during an upgrade.
func (w *limitWorld) twoAgents() bool {
	unlock, err := w.record.Lock()
	w.must(err)
	calls := w.hardware.calls
	if w.settle() && w.hardware.calls != calls && w.node.Spec.Memory.Limited() == v1alpha1.MemoryLimitEnforce {
		w.fails("the agent worked beside another one")
	}
	unlock()
	return true
}

func (w *limitWorld) callFails() bool {
	left := w.r.IntN(3)
	w.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpMemoryLimit || op == sim.OpSetMemoryLimit || op == sim.OpLimitsMemory {
			if left--; left < 0 {
				return errLimits
			}
		}
		return nil
	}
	w.settle()
	w.hardware.Fail = nil
	return true
}

func (w *limitWorld) recordFails() bool {
	w.anew()
	w.must(os.MkdirAll(w.record.Path+".new", 0o700)) // which nothing can be written to
	w.settle()
	_ = os.Remove(w.record.Path + ".new")
	return true
}

func (w *limitWorld) kubeletRestarts() bool {
	w.held.mu.Lock()
	advertised := w.held.advertised
	w.held.list, w.held.advertised = nil, nil
	w.held.mu.Unlock()
	w.settle()
	w.held.advertised = advertised
	w.allocated()
	return true
}

// recordOfKubeletBreaks: only what the kubelet lists is known then, and what pods had before, so not whether all are limited.
func (w *limitWorld) recordOfKubeletBreaks() bool {
	path := filepath.Join(w.hostRoot, "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
	content, err := os.ReadFile(path)
	if err != nil || !w.settle() {
		return false // it has allocated nothing yet, or the agent has not read it
	}
	w.must(os.WriteFile(path, content[:len(content)/2], 0o600))
	if w.settle() && w.last.Condition != nil && w.last.Condition.Status == "True" {
		w.fails("all pods are said to be limited, and which there are is not known")
	}
	w.must(os.WriteFile(path, content, 0o600))
	return true
}

func (w *limitWorld) pluginRestarts() bool {
	advertised := w.held.advertised
	w.held.advertised = nil
	if w.r.IntN(2) == 0 {
		w.startAgent() // which has never seen any
	}
	w.settle()
	w.held.advertised = advertised
	return true
}

// inherit gives the cgroup of a pod the address of one that is gone.
func (w *limitWorld) inherit() bool {
	if all := w.running(); w.backend == sim.Misc && len(all) > 1 {
		w.remove(pick(w.r, all)) // and maybe the agent sees it go
		if w.r.IntN(2) == 0 {
			w.settle()
		}
		w.admit()
		w.advance()
	}
	young := slices.DeleteFunc(slices.Clone(w.pods), func(p *limitPod) bool { return p.stage != stageCgroup && p.stage != stageLogs })
	if len(young) == 0 || w.backend != sim.Misc {
		return false
	}
	p := pick(w.r, young)
	path := w.tree.pod(p.class, p.uid)
	if _, err := os.Stat(path); err != nil {
		return false
	}
	stale := false
	w.hardware.Update(func(n *sim.Node) {
		for _, g := range n.GPUs {
			if slices.ContainsFunc(g.Limits, func(l sim.CgroupLimit) bool { return l.Path == path }) {
				return // it has limits already
			}
		}
		_ = n.Inherit(path)
		for _, g := range n.GPUs {
			for _, l := range g.Limits {
				stale = stale || l.Path == path
				if l.Path == path && l.Hard%2 == 1 { // another program's, which it left stale
					w.foreign[g.UUID+" "+path] = l.Hard
				}
			}
		}
	})
	return stale
}

func (w *limitWorld) vanishes() bool {
	happened := false
	w.anew()
	w.hardware.before = func(_, path string) bool {
		for _, p := range w.pods {
			if pod := w.tree.pod(p.class, p.uid); strings.HasPrefix(path, pod) {
				w.note("%s goes", pod)
				for pid := range p.pids {
					w.hardware.RemoveProcess(pid)
				}
				_ = os.RemoveAll(pod)
				for _, uuid := range w.gpus {
					for _, container := range append(w.inside(p), pod) {
						delete(w.foreign, uuid+" "+container)
					}
				}
				clear(p.pids)
				p.containers, happened = nil, true
				if w.r.IntN(2) == 0 { // and comes back at its path
					w.must(w.tree.make(pod, !p.bare))
					p.stage = stageLogs
				}
			}
		}
		return true
	}
	w.settle()
	w.hardware.before = nil
	for _, p := range slices.Clone(w.pods) {
		if _, err := os.Stat(w.tree.pod(p.class, p.uid)); err != nil && p.stage >= stageCgroup {
			w.remove(p)
		}
	}
	return happened
}

func (w *limitWorld) ignored() bool {
	w.anew()
	w.hardware.ignores = true
	ended := w.settle()
	w.hardware.ignores = false
	if ended && w.hardware.lies && w.last.Condition.Status == "True" {
		w.fails("a limit that did not read back is said to hold")
	}
	return w.hardware.lies
}

// hookRaces: NVIDIA's hook sets the limits of a container by a variable of its pod, which a tenant may choose, as the agent looks at its own.
func (w *limitWorld) hookRaces() (happened bool) {
	w.anew()
	w.hardware.after = func(_, path string) bool {
		for _, p := range w.pods {
			if slices.Contains(p.containers, path) && w.other(p, path, true) {
				happened = true
			}
		}
		return happened
	}
	w.settle()
	w.hardware.after = nil
	return happened
}

// freesInTime: a program has more than its share as the agent sets the limit, so that dmem keeps the former one in silence, and no more as it
// looks.
func (w *limitWorld) freesInTime() (happened bool) {
	w.anew()
	const pid = 999
	w.hardware.before = func(uuid, path string) bool {
		w.hardware.Update(func(n *sim.Node) {
			for _, p := range w.running() {
				if w.tree.pod(p.class, p.uid) != path || n.StartProgram(uuid, gpu.Process{PID: pid, Name: "python3", Instance: gpu.WholeGPU}, w.processes(p.containers[1])) != nil {
					continue
				}
				for _, gib := range []uint64{39, 20, 10, 5, 3} {
					happened = happened || n.Allocate(uuid, pid, sim.DeviceMemory, gib<<30) == nil
				}
			}
		})
		return happened
	}
	ends := func(string, string) bool { w.hardware.RemoveProcess(pid); return happened }
	w.hardware.after = ends
	w.settle()
	ends("", "")
	w.hardware.before, w.hardware.after = nil, nil
	return happened && w.backend == sim.Dmem
}

// sameName: an earlier pod of a StatefulSet still has its cgroup.
func (w *limitWorld) sameName() bool {
	all := w.running()
	if len(all) == 0 {
		return false
	}
	p := pick(w.r, all)
	w.serial++
	old := &limitPod{name: p.name, class: p.class, uid: fmt.Sprintf("%08x-0000-4000-8000-%012x", w.serial, w.serial)}
	path := w.tree.pod(old.class, old.uid)
	w.must(w.tree.make(path, true))
	w.known[path] = true
	w.must(os.MkdirAll(w.logFolder(old), 0o755))
	w.settle()
	w.gone(path)
	return true
}

// disguised: names that a tenant may choose in its own cgroup, and what no kubelet makes. checkSets sees whether one is
// set.
func (w *limitWorld) disguised() bool {
	all := w.running()
	if len(all) == 0 {
		return false
	}
	p := pick(w.r, all)
	link := w.tree.pod(p.class, "ffffffff-0000-4000-8000-000000000000")
	inner := filepath.Join(w.tree.pod(p.class, p.uid), "pod"+p.uid)
	w.must(os.Symlink(w.tree.pod(p.class, p.uid), link))
	own := filepath.Join(p.containers[1], "container") // as root with a writable tree may, and crun does
	w.must(w.tree.make(inner, true))
	if !w.tree.crun {
		w.must(w.tree.make(own, true))
		defer func() { w.must(w.tree.remove(own)) }()
	}
	w.settle()
	w.must(os.Remove(link))
	w.must(w.tree.remove(inner))
	return true
}

// lacking takes for a while away what a limit needs.
func (w *limitWorld) lacking() bool {
	restore := func() {}
	switch w.r.IntN(6) {
	case 0:
		w.tree.unified = false
		restore = func() { w.tree.unified = true }
	case 1:
		w.hardware.Update(func(n *sim.Node) { n.DriverVersion = "580.95.05" })
		restore = func() { w.hardware.Update(func(n *sim.Node) { n.DriverVersion = "615.71.09" }) }
	case 2:
		w.hardware.Update(func(n *sim.Node) { n.GPUs[0].Persistence = false })
		restore = func() { w.hardware.Update(func(n *sim.Node) { n.GPUs[0].Persistence = true }) }
	case 3:
		w.memacct = "0"
		restore = func() { w.memacct = "" }
	case 4:
		w.node.Status.Devices[1].Sharing.MIGMode = v1alpha1.MIGModeEnabled
		restore = func() { w.node.Status.Devices[1].Sharing.MIGMode = "" }
	case 5:
		w.gate = false
		restore = func() { w.gate = true }
	}
	w.node.Generation++
	w.startAgent()
	if w.settle(); w.last.Condition != nil && w.last.Condition.Status == "True" {
		w.fails("a limit is said to hold, though something is lacking")
	}
	restore()
	w.node.Generation++
	w.startAgent()
	w.uncover()
	return true
}

// reboot: the cgroups, the driver's limits and what is in /run are gone.
func (w *limitWorld) reboot() bool {
	for _, p := range slices.Clone(w.pods) {
		w.remove(p)
	}
	w.reload()
	w.boot++
	if w.r.IntN(2) == 0 { // or on a disk
		w.must(os.RemoveAll(filepath.Dir(w.record.Path)))
	}
	w.startAgent()
	return true
}

// end ends the faults, then the policy, and then nothing of ours may be left.
func (w *limitWorld) end() {
	w.t.Helper()
	for _, p := range w.pods { // before its logs have a folder nobody knows whose a cgroup is, and nothing runs in it
		w.must(os.MkdirAll(w.logFolder(p), 0o755))
	}
	w.hardware.Fail, w.node.Spec.MemoryOwner, w.node.Spec.Memory = nil, "", nil
	w.node.Generation++
	w.startAgent()
	for range 3 {
		w.clock.Step(10 * time.Minute)
		w.settle()
	}
	w.checkForeign()
	w.checkNone("after the policy is gone")
	for _, p := range slices.Clone(w.pods) {
		w.remove(p)
	}
	w.settle()
	if _, err := os.Stat(w.record.Path); err == nil && w.backend == sim.Dmem {
		w.fails("a record is left")
	}
	if w.last.Condition != nil {
		w.fails("a condition is left: %v", w.last.Condition)
	}
}
