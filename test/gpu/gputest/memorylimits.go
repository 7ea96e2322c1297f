// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gputest

import (
	"maps"
	"path/filepath"
	"runtime"
	"testing"

	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"
	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// MemoryLimits is a node with GPUs that nobody uses. Its driver, of 615 or later, limits the GPU memory of cgroups. A
// GPU, or a MIG instance, is named by its UUID, a cgroup by the full path of its directory.
type MemoryLimits interface {
	LimitedCgroups
	LimitCalls
	// Program starts a CUDA program in a cgroup that uses one GPU. It ends with the test.
	Program(t *testing.T, gpu, cgroup string) LimitedProgram
	// Disturb does to the node what may cost limits, or returns why it cannot.
	Disturb(how Disturbance) error
	// Simulated reports whether there is no GPU. Then the rules hold that sources only let us infer.
	Simulated() bool
}

// LimitCalls are those of NVML, and what they are called for.
type LimitCalls interface {
	// Backend is what the kernel module charges memory with.
	Backend() sim.Backend
	// GPUs are those of the node, MIGInstance a MIG instance; empty where none can be made.
	GPUs() []string
	MIGInstance(t *testing.T) string
	// Set and Get are nvmlDeviceSetMemoryLimits_v1 and nvmlDeviceGetMemoryLimits_v1. Sizes are in bytes.
	Set(gpu, cgroup string, soft, hard uint64) sim.Return
	Get(gpu, cgroup string) (sim.MemoryLimit, sim.Return)
	// SetByUser is Set by a user who is not root.
	SetByUser(gpu, cgroup string, soft, hard uint64) sim.Return
}

// LimitedCgroups are the cgroups of a test.
type LimitedCgroups interface {
	// Root is the root of the hierarchy.
	Root() string
	// Cgroup makes a cgroup below another, or, for "", below one of the test. delegated: with the controller's files.
	Cgroup(t *testing.T, parent string, delegated bool) string
	// Remove removes a cgroup in which no program is, Remake makes it at the same path.
	Remove(t *testing.T, cgroup string)
	Remake(t *testing.T, cgroup string)
}

// LimitedProgram is a CUDA program on one GPU. It answers with CUDA's name of an error; empty: none.
type LimitedProgram interface {
	// Allocate takes memory until Free.
	Allocate(kind sim.MemoryKind, bytes uint64) string
	Free()
	// Export allocates memory and names it, so that another program may import it.
	Export(bytes uint64) string
	Import(exported string) string
	// Memory is the GPU's as the program sees it.
	Memory() (total, free uint64)
	// End ends the program and waits until it is gone.
	End()
}

// Disturbance is something that happens to a node.
type Disturbance string

// The disturbances. LastClose: the last program closes the GPUs, which no persistence mode keeps.
const (
	LastClose    Disturbance = "last close without persistence"
	Reset        Disturbance = "GPU reset"
	Reload       Disturbance = "reload of the kernel module"
	DaemonReload Disturbance = "systemctl daemon-reload"
)

const (
	mib         = 1 << 20
	hard        = 4096 * mib // above what two contexts and part take
	part        = 2048 * mib // two of them with their contexts are above hard
	outOfMemory = "CUDA_ERROR_OUT_OF_MEMORY"
)

// MemoryLimitContract checks the memory limits of a driver. node makes a node whose kernel module has that back end, or
// skips. Nobody has seen the rules on a GPU; their sources are NVML's header (go-nvml 0.13.4-1), the MPS documentation
// (memory partitioning), and the sources of NVIDIA's kernel modules 615.71.09 and of Linux. What they leave open is
// logged as unknown; what they only let us infer is logged, and asked of simulators alone. The probes only log.
func MemoryLimitContract(t *testing.T, node func(t *testing.T, b sim.Backend) MemoryLimits) {
	t.Helper()
	for backend, cases := range map[sim.Backend][]map[string]func(limitBench){
		sim.NoBackend: {{"supports no limits": supportsNone}},
		sim.Dmem:      {limitRules(), dmemRules(), limitProbes()},
		sim.Misc:      {limitRules(), miscRules(), limitProbes()},
	} {
		all := map[string]func(limitBench){}
		for _, group := range cases {
			maps.Copy(all, group)
		}
		for name, check := range all {
			t.Run(string(backend)+"/"+name, func(t *testing.T) {
				n := node(t, backend)
				check(limitBench{T: t, WithT: NewWithT(t), MemoryLimits: n, gpu: n.GPUs()[0]})
			})
		}
	}
}

func limitRules() map[string]func(limitBench) {
	return map[string]func(limitBench){
		"keeps a limit for each GPU and cgroup":             keepsEach,
		"clears a limit by soft 0 and the maximum":          clears,
		"refuses what is no limit":                          refusesNoLimit,
		"refuses who is not root":                           refusesUsers,
		"refuses the root cgroup":                           refusesRoot,
		"refuses MIG instances":                             refusesMIG,
		"has one budget for the programs of a cgroup":       sharesBudget,
		"limits every kind of allocation":                   limitsKinds,
		"limits a cgroup that is made below":                limitsNewCgroup,
		"charges neither managed memory nor imports":        escapes,
		"shows a program its cgroup's limit as the memory":  showsLimit,
		"ends nobody above its soft limit without MPS":      softAlone,
		"loses limits when the driver is initialised again": losesLimits,
	}
}

func dmemRules() map[string]func(limitBench) {
	return map[string]func(limitBench){
		"has no limit where none is set":                       func(b limitBench) { b.unset(b.pod()) },
		"counts every ancestor":                                countsAncestors,
		"counts memory from before the limit":                  countsEarlier,
		"says nothing of a limit below use":                    keepsInSilence,
		"refuses a cgroup without files, and reads its parent": needsFiles,
		"shows the whole GPU under a parent's limit":           showsWhole,
		"forgets the limit of a cgroup that is removed":        forgetsRemoved,
		"keeps ancestors' soft limits raised":                  keepsRaised,
	}
}

func miscRules() map[string]func(limitBench) {
	return map[string]func(limitBench){
		"has no limit where none is set":              func(b limitBench) { b.unset(b.pod()) },
		"counts the nearest limited ancestor alone":   countsNearest,
		"never counts memory from before the limit":   ignoresEarlier,
		"refuses a limit below use":                   refusesBelowUse,
		"takes limits without files that never match": neverMatches,
		"shows a parent's limit":                      showsParent,
		"may keep the limit of a removed cgroup":      staysStale,
	}
}

// limitBench is what a case works with.
type limitBench struct {
	*testing.T
	*WithT
	MemoryLimits

	gpu string
}

// inferred logs what the sources do not say. A simulator is held to what we infer.
func (b limitBench) inferred(what string, got any, matcher types.GomegaMatcher) {
	b.Helper()
	b.Logf("inferred: %s: %v", what, got)
	if b.Simulated() {
		b.Expect(got).To(matcher, what)
	}
}

func (b limitBench) unknown(what string, got ...any) {
	b.Helper()
	b.Logf("unknown: %s: %v", what, got)
}

func (b limitBench) pod() string { return b.Cgroup(b.T, "", true) }

func (b limitBench) container(pod string) string { return b.Cgroup(b.T, pod, true) }

func (b limitBench) program(cgroup string) LimitedProgram { return b.Program(b.T, b.gpu, cgroup) }

// limit sets a hard limit, and expects to read it back.
func (b limitBench) limit(cgroup string, soft, hard uint64) {
	b.Helper()
	b.Expect(b.Set(b.gpu, cgroup, soft, hard)).To(Equal(sim.Success))
	b.limited(cgroup, soft, hard)
}

func (b limitBench) limited(cgroup string, soft, hard uint64) {
	b.Helper()
	got, ret := b.Get(b.gpu, cgroup)
	b.Expect(ret).To(Equal(sim.Success))
	b.Expect([]uint64{got.Soft, got.Hard}).To(Equal([]uint64{soft, hard}))
}

// unset expects no limit. Misc says of that what it says where there is no support.
func (b limitBench) unset(cgroup string) {
	b.Helper()
	if b.Backend() == sim.Dmem {
		b.limited(cgroup, 0, sim.NoLimit)
		return
	}
	_, ret := b.Get(b.gpu, cgroup)
	b.Expect(ret).To(Equal(sim.NotSupported))
}

func (b limitBench) takes(p LimitedProgram, bytes uint64) {
	b.Helper()
	b.Expect(p.Allocate(sim.DeviceMemory, bytes)).To(BeEmpty())
}

func (b limitBench) lacks(p LimitedProgram, bytes uint64) {
	b.Helper()
	b.Expect(p.Allocate(sim.DeviceMemory, bytes)).To(Equal(outOfMemory))
}

func supportsNone(b limitBench) {
	pod := b.pod()
	b.Expect(b.Set(b.gpu, pod, 0, hard)).To(Equal(sim.NotSupported))
	_, ret := b.Get(b.gpu, pod)
	b.Expect(ret).To(Equal(sim.NotSupported))
	b.takes(b.program(pod), 2*part)
}

func keepsEach(b limitBench) {
	one, other := b.pod(), b.pod()
	b.limit(one, 0, hard)
	b.limit(one, part, hard+part)
	b.unset(other)
	if len(b.GPUs()) > 1 {
		b.gpu = b.GPUs()[1]
		b.unset(one)
	}
}

func clears(b limitBench) {
	pod := b.pod()
	b.limit(pod, part, hard)
	b.Expect(b.Set(b.gpu, pod, 0, sim.NoLimit)).To(Equal(sim.Success))
	got, ret := b.Get(b.gpu, pod)
	b.unknown("get of a limit that was cleared", got, ret)
	b.takes(b.program(pod), 2*part)
}

func refusesNoLimit(b limitBench) {
	pod := b.pod()
	whole, _ := b.program(pod).Memory()
	b.Expect(b.Set(b.gpu, pod, hard+1, hard)).To(Equal(sim.InvalidArgument), "soft above hard")
	b.Expect(b.Set(b.gpu, pod, 0, 2*whole)).To(Equal(sim.InvalidArgument), "above the GPU's memory")
	nowhere := filepath.Join(pod, "nowhere")
	b.Expect(b.Set(b.gpu, nowhere, 0, hard)).To(Equal(sim.OperatingSystem))
	_, ret := b.Get(b.gpu, nowhere)
	b.Expect(ret).To(Equal(sim.OperatingSystem))
	b.unset(pod)
}

func refusesUsers(b limitBench) {
	pod := b.pod()
	b.Expect(b.SetByUser(b.gpu, pod, 0, hard)).To(Equal(sim.NoPermission))
	b.unset(pod)
}

func refusesRoot(b limitBench) {
	ret := b.Set(b.gpu, b.Root(), 0, hard)
	b.Expect(ret).NotTo(Equal(sim.Success))
	b.inferred("the root cgroup", ret, Equal(sim.NotSupported))
}

func refusesMIG(b limitBench) {
	instance := b.MIGInstance(b.T)
	if instance == "" {
		b.Skip("no MIG instance can be made")
	}
	ret := b.Set(instance, b.pod(), 0, hard)
	b.Expect(ret).NotTo(Equal(sim.Success))
	b.inferred("a MIG instance", ret, Equal(sim.NotSupported))
}

func sharesBudget(b limitBench) {
	pod, neighbour := b.pod(), b.pod()
	b.limit(pod, 0, hard)
	first, second := b.program(pod), b.program(pod)
	b.takes(first, part)
	b.lacks(second, part)
	b.takes(b.program(neighbour), part)
	got, _ := b.Get(b.gpu, pod)
	b.Expect(got.Used).To(And(BeNumerically(">=", part), BeNumerically("<=", hard)))
	first.Free()
	b.takes(second, part)
	first.End()
	second.End()
	b.takes(b.program(pod), part+part/2)
}

func limitsKinds(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	for _, kind := range []sim.MemoryKind{sim.DeviceMemory, sim.PoolMemory, sim.VirtualMemory} {
		p := b.program(pod)
		b.Expect(p.Allocate(kind, part)).To(BeEmpty(), string(kind))
		b.Expect(p.Allocate(kind, part)).To(Equal(outOfMemory), string(kind))
		p.End()
	}
}

// limitsNewCgroup: a container that starts again has a new cgroup, and the limit of its pod.
func limitsNewCgroup(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	p := b.program(b.container(pod))
	b.takes(p, part)
	b.lacks(p, part)
}

func escapes(b limitBench) {
	pod, other := b.pod(), b.pod()
	b.limit(pod, 0, hard)
	p, owner := b.program(pod), b.program(other)
	b.Expect(p.Allocate(sim.ManagedMemory, hard+part)).To(BeEmpty())
	p.Free()
	exported := owner.Export(hard)
	b.Expect(p.Import(exported)).To(BeEmpty())
	b.takes(p, part)
}

func showsLimit(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	p := b.program(pod)
	b.takes(p, part)
	total, free := p.Memory()
	b.Expect(total).To(BeNumerically("==", hard))
	b.Expect(free).To(BeNumerically("<=", hard-part))
}

func softAlone(b limitBench) {
	pod := b.pod()
	b.limit(pod, part/2, hard)
	p := b.program(pod)
	b.takes(p, part)
	b.takes(b.program(b.pod()), part)
	b.takes(p, part/4)
}

func losesLimits(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	reset, reload := b.Disturb(Reset), b.Disturb(Reload)
	if reset != nil && reload != nil {
		b.Skip("neither can be done: ", reset, "; ", reload)
	}
	b.unset(pod)
}

func countsAncestors(b limitBench) {
	pod := b.pod()
	one, other := b.container(pod), b.container(pod)
	b.limit(pod, 0, hard)
	b.limit(one, 0, 2*hard)
	b.takes(b.program(other), part)
	b.lacks(b.program(one), part)
}

func countsNearest(b limitBench) {
	pod := b.pod()
	one, other := b.container(pod), b.container(pod)
	b.limit(pod, 0, hard)
	b.limit(one, 0, 2*hard)
	p, q := b.program(one), b.program(other)
	b.takes(p, hard)
	b.takes(q, part)
	b.lacks(q, part)
}

func countsEarlier(b limitBench) {
	pod := b.pod()
	p := b.program(pod)
	b.takes(p, part)
	b.limit(pod, 0, hard)
	b.lacks(p, part)
}

func ignoresEarlier(b limitBench) {
	pod := b.pod()
	p := b.program(pod)
	b.takes(p, part)
	b.limit(pod, 0, hard)
	got, _ := b.Get(b.gpu, pod)
	b.Expect(got.Used).To(BeNumerically("<", part))
	b.takes(p, part)
	b.lacks(p, hard)
}

// usedPod is a pod with a limit that uses more than half of it.
func (b limitBench) usedPod() (pod string, p LimitedProgram) {
	pod = b.pod()
	b.limit(pod, 0, hard)
	p = b.program(pod)
	b.takes(p, part)
	return pod, p
}

func keepsInSilence(b limitBench) {
	pod, p := b.usedPod()
	b.Expect(b.Set(b.gpu, pod, 0, part)).To(Equal(sim.Success))
	got, _ := b.Get(b.gpu, pod)
	b.Expect(got.Hard).To(BeElementOf(uint64(part), uint64(hard)))
	b.inferred("the kernel keeps the limit, before a release that we do not know", got.Hard, BeNumerically("==", hard))
	if got.Hard == hard {
		b.takes(p, part/2)
	} else {
		b.lacks(p, part/2)
	}
}

func refusesBelowUse(b limitBench) {
	pod, p := b.usedPod()
	ret := b.Set(b.gpu, pod, 0, part)
	b.Expect(ret).NotTo(Equal(sim.Success))
	b.unknown("the return of a limit below use", ret)
	b.limited(pod, 0, hard)
	b.takes(p, part/2)
}

func needsFiles(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	leaf := b.Cgroup(b.T, pod, false)
	ret := b.Set(b.gpu, leaf, 0, part)
	b.Expect(ret).NotTo(Equal(sim.Success))
	b.unknown("the return of a cgroup without files", ret)
	b.limited(leaf, 0, hard)
	b.lacks(b.program(leaf), hard)
}

func neverMatches(b limitBench) {
	pod := b.pod()
	leaf := b.Cgroup(b.T, pod, false)
	b.limit(leaf, 0, hard)
	b.inferred("an allocation beyond the limit of a cgroup without files",
		b.program(leaf).Allocate(sim.DeviceMemory, hard+part), BeEmpty())
}

func showsWhole(b limitBench) {
	pod := b.pod()
	whole, _ := b.program(pod).Memory()
	b.limit(pod, 0, hard)
	total, _ := b.program(b.container(pod)).Memory()
	b.Expect(total).To(Equal(whole))
}

func showsParent(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	total, _ := b.program(b.container(pod)).Memory()
	b.inferred("the memory that a program sees below a limited cgroup", total, BeNumerically("==", hard))
}

func forgetsRemoved(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	b.Remove(b.T, pod)
	b.Remake(b.T, pod)
	b.unset(pod)
}

// staysStale: the header has the removal clear a limit, the source of the kernel module keeps it.
func staysStale(b limitBench) {
	pod := b.pod()
	b.limit(pod, 0, hard)
	b.Remove(b.T, pod)
	b.Remake(b.T, pod)
	got, ret := b.Get(b.gpu, pod)
	b.unknown("the limit of a cgroup that was removed and made again", got, ret)
}

func keepsRaised(b limitBench) {
	pod := b.pod()
	zeroed, removed := b.container(pod), b.container(pod)
	b.limit(zeroed, part, hard)
	got, _ := b.Get(b.gpu, pod)
	b.Expect(got.Soft).To(BeNumerically(">=", part))
	b.limit(zeroed, 0, hard)
	b.Remove(b.T, zeroed)
	b.limited(pod, 0, sim.NoLimit)
	b.limit(removed, part, hard)
	b.Remove(b.T, removed)
	got, _ = b.Get(b.gpu, pod)
	b.Expect(got.Soft).To(BeNumerically(">=", part))
}

// ByUser calls NVML by a thread of a user who is not root.
func ByUser(call func() sim.Return) sim.Return {
	const nobody, same = 65534, ^uintptr(0)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, nobody, same); errno != 0 {
		return sim.Unknown
	}
	defer unix.RawSyscall(unix.SYS_SETRESUID, same, 0, same) //nolint:errcheck // the saved user stays root
	return call()
}
