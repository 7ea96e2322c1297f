// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard_test

import (
	"fmt"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
)

// able is a node on which nothing is lacking.
func able() memoryguard.NodeFacts {
	both := []string{"cpu", "dmem", "misc"}
	return memoryguard.NodeFacts{
		Gate: true, Unified: true, HostRooted: true, Writable: true, Controllers: both, Delegated: both,
		Version: "615.71.09", Calls: true,
	}
}

func TestTheFirstThingThatALimitLacksIsTheReason(t *testing.T) {
	g := NewWithT(t)
	g.Expect(able().Obstruct()).To(BeNil())
	lacking := []struct {
		reason string
		take   func(f *memoryguard.NodeFacts)
	}{ // from the last probe to the first
		{v1alpha1.ReasonNoPersistence, func(f *memoryguard.NodeFacts) { f.Fleeting = []string{"GPU-1"} }},
		{v1alpha1.ReasonFractioningActive, func(f *memoryguard.NodeFacts) { f.Owner = "HAMi" }},
		{v1alpha1.ReasonNoPermission, func(f *memoryguard.NodeFacts) { f.Writable = false }},
		{v1alpha1.ReasonNoPermission, func(f *memoryguard.NodeFacts) { f.HostRooted = false }},
		{v1alpha1.ReasonNotDelegated, func(f *memoryguard.NodeFacts) { f.Delegated = []string{"cpu"} }},
		{v1alpha1.ReasonNoController, func(f *memoryguard.NodeFacts) { f.Controllers = []string{"cpu"} }},
		{v1alpha1.ReasonBackendOff, func(f *memoryguard.NodeFacts) { f.MemacctMode = "0" }},
		{v1alpha1.ReasonMIGActive, func(f *memoryguard.NodeFacts) { f.MIG = []string{"GPU-1"} }},
		{v1alpha1.ReasonDriverTooOld, func(f *memoryguard.NodeFacts) { f.Calls = false }},
		{v1alpha1.ReasonDriverTooOld, func(f *memoryguard.NodeFacts) { f.Version = "610.43.02" }},
		{v1alpha1.ReasonCgroupV1, func(f *memoryguard.NodeFacts) { f.Unified = false }},
		{v1alpha1.ReasonLimitGateOff, func(f *memoryguard.NodeFacts) { f.Gate = false }},
	}
	all := able()
	for _, l := range lacking {
		alone := able()
		l.take(&alone)
		l.take(&all)
		g.Expect(alone.Obstruct()).To(HaveField("Reason", l.reason))
		g.Expect(all.Obstruct()).To(HaveField("Reason", l.reason), "with all that come later")
	}
}

func TestTheBackendIsWhatTheKernelHasAndTheModuleMayUse(t *testing.T) {
	for in, want := range map[[2]string]v1alpha1.MemoryBackend{
		{"dmem misc", ""}: v1alpha1.MemoryBackendDmem, {"dmem misc", "3"}: v1alpha1.MemoryBackendDmem, {"dmem misc", "1"}: v1alpha1.MemoryBackendMisc,
		{"misc", ""}: v1alpha1.MemoryBackendMisc, {"misc", "2"}: "", {"dmem misc", "0"}: "", {"cpu", ""}: "", {"dmem", "1"}: "",
	} {
		f := memoryguard.NodeFacts{Controllers: strings.Fields(in[0]), MemacctMode: in[1]}
		NewWithT(t).Expect(f.Backend()).To(Equal(want), fmt.Sprint(in))
	}
	// Writing needs no permission where the driver keeps its own table.
	f := able()
	f.MemacctMode, f.Writable = "1", false
	NewWithT(t).Expect(f.Obstruct()).To(BeNil())
}

func TestAShareIsWhatAPodMayHaveOfAGPU(t *testing.T) {
	const gib = uint64(1) << 30
	for name, c := range map[string]struct {
		perReplica       string
		advertised, held int
		total, want      uint64
		reason           string
	}{
		"of the policy":                            {"4Gi", 8, 1, 40 * gib, 4 * gib, ""},
		"of the policy, for two replicas":          {"4Gi", 8, 2, 40 * gib, 8 * gib, ""},
		"all that there is at most":                {"30Gi", 8, 2, 40 * gib, 40 * gib, ""},
		"more for one replica than there is":       {"41Gi", 8, 1, 40 * gib, 0, v1alpha1.ReasonShareTooLarge},
		"without one, less what the driver has":    {"", 4, 1, 40 * gib, 40 * gib / 100 * 96 / 4 >> 20 << 20, ""},
		"all replicas together leave it":           {"", 4, 4, 40 * gib, 4 * (40 * gib / 100 * 96 / 4 >> 20 << 20), ""},
		"of a GPU that does not report its memory": {"", 4, 1, 0, 0, v1alpha1.ReasonShareTooLarge},
	} {
		spec := v1alpha1.TimeSlicedMemory{}
		if c.perReplica != "" {
			spec.PerReplica = new(resource.MustParse(c.perReplica))
		}
		bytes, reason := memoryguard.ShareOf(spec, c.advertised, c.held, c.total)
		NewWithT(t).Expect(bytes).To(Equal(c.want), name)
		NewWithT(t).Expect(reason).To(Equal(c.reason), name)
	}
}

func TestWhatIsDoneAboutACgroup(t *testing.T) {
	const want, former, other = 4 << 30, 2 << 30, 5 << 30
	free := memoryguard.Reading{Hard: memoryguard.NoLimit}
	has := func(hard uint64) memoryguard.Reading { return memoryguard.Reading{Hard: hard} }
	for name, c := range map[string]struct {
		cell   memoryguard.Cell
		do     memoryguard.Do
		reason string
	}{
		"a new pod":                      {memoryguard.Cell{Want: want, Read: free}, memoryguard.Set, ""},
		"a pod that has it":              {memoryguard.Cell{Want: want, Ours: []uint64{want}, Read: has(want)}, memoryguard.Leave, ""},
		"one of which it is not certain": {memoryguard.Cell{Want: want, Ours: []uint64{former, want}, Read: has(want)}, memoryguard.Set, ""},
		"a limit that the driver lost":   {memoryguard.Cell{Want: want, Ours: []uint64{want}, Read: free}, memoryguard.Set, ""},
		"another share":                  {memoryguard.Cell{Want: want, Ours: []uint64{former}, Read: has(former)}, memoryguard.Set, ""},
		"a pod above its share":          {memoryguard.Cell{Want: want, Read: memoryguard.Reading{Hard: memoryguard.NoLimit, Used: want + 1}}, memoryguard.Leave, v1alpha1.ReasonAboveLimit},
		"another program's limit":        {memoryguard.Cell{Want: want, Read: has(other)}, memoryguard.Leave, v1alpha1.ReasonForeignLimit},
		"another program's, the same":    {memoryguard.Cell{Want: want, Read: has(want)}, memoryguard.Leave, v1alpha1.ReasonForeignLimit},
		"another program's, over ours":   {memoryguard.Cell{Want: want, Ours: []uint64{want}, Read: has(other)}, memoryguard.Forget, v1alpha1.ReasonForeignLimit},
		"another program's soft limit":   {memoryguard.Cell{Want: want, Read: memoryguard.Reading{Soft: 1, Hard: memoryguard.NoLimit}}, memoryguard.Leave, v1alpha1.ReasonForeignLimit},
		"a soft limit on dmem": {
			memoryguard.Cell{Backend: v1alpha1.MemoryBackendDmem, Want: want, Read: memoryguard.Reading{Soft: 1, Hard: memoryguard.NoLimit}}, memoryguard.Set, "",
		},
		"to be removed":                    {memoryguard.Cell{Ours: []uint64{want}, Read: has(want)}, memoryguard.Clear, ""},
		"removed already":                  {memoryguard.Cell{Ours: []uint64{want}, Read: free}, memoryguard.Forget, ""},
		"never set, though about to be":    {memoryguard.Cell{Ours: []uint64{former, want}, Read: has(former)}, memoryguard.Clear, ""},
		"another's where none is wanted":   {memoryguard.Cell{Read: has(other)}, memoryguard.Leave, ""},
		"another's over one to be removed": {memoryguard.Cell{Ours: []uint64{want}, Read: has(other)}, memoryguard.Forget, ""},
		"inherited on misc": {
			memoryguard.Cell{Backend: v1alpha1.MemoryBackendMisc, Want: want, Stale: []uint64{former}, Read: has(former)}, memoryguard.Set, "",
		},
		"inherited on misc, none wanted": {memoryguard.Cell{Backend: v1alpha1.MemoryBackendMisc, Stale: []uint64{former}, Read: has(former)}, memoryguard.Clear, ""},
		"dmem has none to inherit": {
			memoryguard.Cell{Backend: v1alpha1.MemoryBackendDmem, Stale: []uint64{former}, Read: has(former)}, memoryguard.Leave, "",
		},
	} {
		do, reason := c.cell.Next()
		NewWithT(t).Expect(do).To(Equal(c.do), name)
		NewWithT(t).Expect(reason).To(Equal(c.reason), name)
	}
}

func TestALimitCountsWhenItReadsBack(t *testing.T) {
	const want, former = 4 << 30, 6 << 30
	for name, c := range map[string]struct {
		before, after memoryguard.Reading
		ours          []uint64
		reason        string
	}{
		"as set": {memoryguard.Reading{Hard: memoryguard.NoLimit}, memoryguard.Reading{Hard: want, Used: 1}, []uint64{want}, ""},
		"dmem kept none, since more is in use": {
			memoryguard.Reading{Hard: memoryguard.NoLimit}, memoryguard.Reading{Hard: memoryguard.NoLimit, Used: want + 1}, nil, v1alpha1.ReasonAboveLimit,
		},
		"dmem kept the former one":              {memoryguard.Reading{Hard: former}, memoryguard.Reading{Hard: former, Used: want + 1}, []uint64{former}, v1alpha1.ReasonAboveLimit},
		"nothing, without any excuse":           {memoryguard.Reading{Hard: memoryguard.NoLimit}, memoryguard.Reading{Hard: memoryguard.NoLimit}, []uint64{want}, v1alpha1.ReasonNotEnforced},
		"something else":                        {memoryguard.Reading{Hard: former}, memoryguard.Reading{Hard: 1}, []uint64{former, want}, v1alpha1.ReasonNotEnforced},
		"the one that it had, set or inherited": {memoryguard.Reading{Hard: former}, memoryguard.Reading{Hard: former}, []uint64{former, want}, v1alpha1.ReasonNotEnforced},
	} {
		ours, reason := memoryguard.Cell{Want: want, Read: c.before}.After(c.after)
		NewWithT(t).Expect(ours).To(Equal(c.ours), name)
		NewWithT(t).Expect(reason).To(Equal(c.reason), name)
	}
}

func TestAReportOfLimitsIsBoundedAndNamesWhoHasNone(t *testing.T) {
	g := NewWithT(t)
	var pods []memoryguard.PodLimit
	for i := range 250 {
		p := memoryguard.PodLimit{Namespace: "team", Pod: fmt.Sprintf("p-%03d", i), GPU: "GPU-1", Bytes: 1 << 30}
		if i%50 == 49 {
			p.Reason = v1alpha1.ReasonForeignLimit
		}
		pods = append(pods, p)
	}
	s := memoryguard.LimitsStatus(v1alpha1.MemoryBackendDmem, pods, 0)
	g.Expect(s.Limited).To(BeEquivalentTo(245))
	g.Expect(s.Pods).To(HaveLen(32))
	g.Expect(s.Pods[4].PodName).To(Equal("p-249"))
	g.Expect(s.Uncovered).To(Equal([]v1alpha1.UncoveredPods{{Reason: v1alpha1.ReasonForeignLimit, Count: 5}}))
	is := memoryguard.LimitedCondition(v1alpha1.MemoryLimitEnforce, nil, s)
	g.Expect(is).To(And(HaveField("Status", BeEquivalentTo("False")), HaveField("Reason", v1alpha1.ReasonForeignLimit),
		HaveField("Message", "245 pods are limited, not: 5 ForeignLimit, such as team/p-049")))
	is = memoryguard.LimitedCondition(v1alpha1.MemoryLimitReport, nil, s)
	g.Expect(is).To(And(HaveField("Status", BeEquivalentTo("Unknown")), HaveField("Message", ContainSubstring("245 pods would be"))))
	s = memoryguard.LimitsStatus(v1alpha1.MemoryBackendDmem, pods[:10], 0)
	g.Expect(memoryguard.LimitedCondition(v1alpha1.MemoryLimitEnforce, nil, s)).To(HaveField("Reason", v1alpha1.ReasonEnforced))
}
