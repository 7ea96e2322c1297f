// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// limitProbes are the questions that an hour on a GPU of driver 615 would answer, on each back end. They log.
func limitProbes() map[string]func(limitBench) {
	return map[string]func(limitBench){
		"probe 1: a hard limit without MPS, and its overhead":  probeHard,
		"probe 2: a limit on the pod only":                     probePodOnly,
		"probe 3: a limit below use":                           probeBelowUse,
		"probe 4: memory from before the limit":                probeEarlier,
		"probe 5: files of the controllers":                    probeFiles,
		"probe 6: what costs limits":                           probeLosses,
		"probe 7: cgroups that are removed":                    probeRemoved,
		"probe 8: what escapes":                                probeEscapes,
		"probe 9: two GPUs, and limits above a GPU's memory":   probeSum,
		"probe 10: returns, and the time to the first program": probeReturns,
	}
}

func (b limitBench) found(what string, got ...any) {
	b.Helper()
	b.Logf("found: %s: %v", what, got)
}

// fill is how much memory a program gets, to 16 MiB, and the error that ended it.
func (b limitBench) fill(p LimitedProgram, kind sim.MemoryKind, most uint64) (got uint64, failed string) {
	for step := uint64(1024 * mib); got < most && step >= 16*mib; {
		if said := p.Allocate(kind, step); said != "" {
			failed = said
			step /= 2
			continue
		}
		got += step
	}
	return got, failed
}

func probeHard(b limitBench) {
	for _, kind := range []sim.MemoryKind{sim.DeviceMemory, sim.VirtualMemory, sim.PoolMemory} {
		pod := b.pod()
		b.limit(pod, 0, part)
		p := b.program(pod)
		got, failed := b.fill(p, kind, hard)
		b.found(string(kind)+" of 2048 MiB: got MiB, overhead MiB, error", got/mib, int64(part-got)/mib, failed)
		p.End()
	}
}

func probePodOnly(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	container := b.container(pod)
	p := b.program(container)
	total, free := p.Memory()
	b.found("cuMemGetInfo in the container: total, free", total, free)
	got, failed := b.fill(p, sim.DeviceMemory, hard+part)
	b.found("got MiB of 4096, error", got/mib, failed)
	seen, ret := b.Get(b.gpu, container)
	b.found("get of the container", seen, ret)
}

func probeBelowUse(b limitBench) {
	pod, p := b.usedPod()
	b.found("set", b.Set(b.gpu, pod, 0, part/2))
	for range 2 {
		got, ret := b.Get(b.gpu, pod)
		b.found("get, then an allocation of 16 MiB", got, ret, p.Allocate(sim.DeviceMemory, 16*mib))
	}
	p.Free()
	b.found("set once the memory is free", b.Set(b.gpu, pod, 0, part/2))
}

func probeEarlier(b limitBench) {
	pod := b.pod()
	p := b.program(pod)
	b.takes(p, part)
	before, ret := b.Get(b.gpu, pod)
	b.found("get before the limit", before, ret)
	b.limit(pod, 0, hard)
	after, ret := b.Get(b.gpu, pod)
	b.found("get after it", after, ret)
	got, failed := b.fill(p, sim.DeviceMemory, hard)
	b.found("got MiB more, error", got/mib, failed)
}

// probeFiles also logs what runc or crun has made, where the node has pods.
func probeFiles(b limitBench) {
	log := func() {
		pods, _ := filepath.Glob(filepath.Join(b.Root(), "kubepods*"))
		for _, dir := range append(pods, b.Root(), b.pod()) {
			_ = filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
				if err != nil || entry.IsDir() && dir == b.Root() && path != dir {
					return filepath.SkipDir
				}
				name := entry.Name()
				if strings.HasPrefix(name, "dmem.") || slices.Contains([]string{"cgroup.controllers", "cgroup.subtree_control", "misc.max"}, name) {
					content, _ := os.ReadFile(path)
					b.found(path, strings.TrimSpace(string(content)))
				}
				return nil
			})
		}
	}
	log()
	if err := b.Disturb(DaemonReload); err != nil {
		b.found("not done", err)
		return
	}
	b.found("after", DaemonReload)
	log()
}

func probeLosses(b limitBench) {
	for _, how := range []Disturbance{LastClose, Reset, Reload} {
		pod := b.pod()
		b.limit(pod, 0, hard)
		if err := b.Disturb(how); err != nil {
			b.found("not done", how, err)
			continue
		}
		got, ret := b.Get(b.gpu, pod)
		b.found("after "+string(how), got, ret)
	}
}

func probeRemoved(b limitBench) {
	parent := b.pod()
	rounds, inherited := 10_000, 0
	if b.Simulated() {
		rounds = 20
	}
	begin := time.Now()
	for range rounds {
		pod := b.container(parent)
		if got, ret := b.Get(b.gpu, pod); ret == sim.Success && got.Hard != sim.NoLimit {
			inherited++
		}
		b.Expect(b.Set(b.gpu, pod, part, hard)).To(Equal(sim.Success))
		b.Remove(b.T, pod)
	}
	got, ret := b.Get(b.gpu, parent)
	b.found("rounds, new cgroups with a limit, the parent's, time", rounds, inherited, got, ret, time.Since(begin))
}

func probeEscapes(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, part)
	p, owner := b.program(pod), b.program(b.pod())
	for _, kind := range []sim.MemoryKind{sim.ManagedMemory, sim.DeviceMemory} {
		b.found(string(kind)+" beyond the limit", p.Allocate(kind, hard))
		p.Free()
	}
	b.found("import of IPC memory beyond the limit", p.Import(owner.Export(hard)))
	got, _ := b.Get(b.gpu, pod)
	b.found("used", got.Used)
	b.found("not done", "import of VMM handles; allocations of a graphics API")
}

func probeSum(b limitBench) {
	for _, gpu := range b.GPUs() {
		b.gpu = gpu
		whole, _ := b.program(b.pod()).Memory()
		share := whole / 4 * 3 / mib * mib
		for range 2 {
			pod := b.pod()
			b.limit(pod, 0, share)
			got, failed := b.fill(b.program(pod), sim.DeviceMemory, whole)
			b.found("of three quarters of "+gpu+": got MiB, error", got/mib, failed)
		}
	}
}

func probeReturns(b limitBench) {
	pod := b.pod()
	file := filepath.Join(pod, "cgroup.procs")
	for what, path := range map[string]string{
		"root": b.Root(), "empty path": "", "no directory": file, "nowhere": pod + "/nowhere", "no cgroup": os.TempDir(), "relative": "a/b",
	} {
		_, ret := b.Get(b.gpu, path)
		b.found(what+": set, get", b.Set(b.gpu, path, 0, hard), ret)
	}
	for name, size := range map[string]uint64{"1 byte": 1, "0": 0, "1 MiB and a byte": mib + 1, "maximum less 1": sim.NoLimit - 1} {
		ret := b.Set(b.gpu, pod, 0, size)
		got, _ := b.Get(b.gpu, pod)
		b.found("hard "+name+": set, get", ret, got)
	}
	namespace, _ := os.Readlink("/proc/self/ns/cgroup")
	b.found("cgroup namespace", namespace)
	begin := time.Now()
	p := b.program(b.pod())
	failed := p.Allocate(sim.DeviceMemory, mib)
	b.found("from the cgroup to the first allocation", time.Since(begin), failed)
}
