// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryguard

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// The driver limits the memory of a cgroup on a GPU (docs/dev/contracts.md, "Limits of memory"). What a node lacks for it, Obstruct finds; what a
// pod may have, Share; what to do about one cgroup on one GPU, Cell.Next before a write and Cell.After after it.

// minDriver is the first driver with memory limits.
const minDriver = 615

// Backends that the kernel module can have, by controller.
const (
	dmem = "dmem"
	misc = "misc"
)

// NodeFacts is what an agent finds out about limits without a write.
type NodeFacts struct {
	Gate        bool   // the feature gate is on
	Owner       string // another program that limits memory on the node
	Unified     bool   // cgroup v2
	HostRooted  bool   // the tree of cgroups is the node's own
	Writable    bool
	Controllers []string // of the kernel
	Delegated   []string // those that the root of the tree passes on
	MemacctMode string   // RmMemacctMode of the kernel module; empty: not set
	Version     string   // of the driver; empty: not known
	Calls       bool     // the driver has those for limits
	Fleeting    []string // UUIDs of GPUs that lose limits when the last program closes them
	MIG         []string // UUIDs of GPUs in MIG mode
}

// Reading is what the driver says of a cgroup on a GPU, in bytes.
type Reading struct{ Soft, Hard, Used uint64 }

// NoLimit is the hard limit that is none.
const NoLimit = ^uint64(0)

// Obstacle is why a node, or a pod, has no limit.
type Obstacle struct{ Reason, Message string }

// Backend is what the kernel module charges memory with, as far as its choice is known: dmem if the kernel has it, else
// misc, and RmMemacctMode 1 rules out dmem, 2 misc and 0 both.
func (f NodeFacts) Backend() v1alpha1.MemoryBackend {
	switch has := func(c string) bool { return slices.Contains(f.Controllers, c) }; {
	case f.MemacctMode == "0":
	case has(dmem) && f.MemacctMode != "1":
		return v1alpha1.MemoryBackendDmem
	case has(misc) && f.MemacctMode != "2":
		return v1alpha1.MemoryBackendMisc
	}
	return ""
}

// Controller is the one of the kernel that belongs to a back end.
func Controller(b v1alpha1.MemoryBackend) string {
	return map[v1alpha1.MemoryBackend]string{v1alpha1.MemoryBackendDmem: dmem, v1alpha1.MemoryBackendMisc: misc}[b]
}

// Obstruct returns the first thing that keeps the driver from limiting pods on a node; nil: none that can be seen
// without a limit.
func (f NodeFacts) Obstruct() *Obstacle {
	controller := Controller(f.Backend())
	for _, probe := range []struct {
		fails           bool
		reason, message string
	}{
		{!f.Gate, v1alpha1.ReasonLimitGateOff, "the agent runs without the feature gate MemoryLimits"},
		{!f.Unified, v1alpha1.ReasonCgroupV1, "/sys/fs/cgroup is no cgroup2 file system"},
		{tooOld(f.Version), v1alpha1.ReasonDriverTooOld, fmt.Sprintf("driver %s is older than %d", f.Version, minDriver)},
		{!f.Calls, v1alpha1.ReasonDriverTooOld, fmt.Sprintf("the library of driver %s has no nvmlDeviceSetMemoryLimits", f.Version)},
		{len(f.MIG) > 0, v1alpha1.ReasonMIGActive, "the driver limits nothing while a GPU is in MIG mode: " + first(f.MIG)},
		{f.MemacctMode == "0", v1alpha1.ReasonBackendOff, "the kernel module was loaded with RmMemacctMode=0"},
		{controller == "", v1alpha1.ReasonNoController, "the kernel has no controller dmem or misc that the driver may use"},
		{!slices.Contains(f.Delegated, controller), v1alpha1.ReasonNotDelegated, controller + " is not in /sys/fs/cgroup/cgroup.subtree_control"},
		{!f.HostRooted, v1alpha1.ReasonNoPermission, "the agent sees a part of the tree of cgroups, not that of the node"},
		{controller == dmem && !f.Writable, v1alpha1.ReasonNoPermission, "the agent may not write to /sys/fs/cgroup"},
		{f.Owner != "", v1alpha1.ReasonFractioningActive, f.Owner + " limits memory on this node; the operator sets and removes nothing"},
		{len(f.Fleeting) > 0, v1alpha1.ReasonNoPersistence, "nothing keeps GPU " + first(f.Fleeting) + " initialized while no program uses it"},
	} {
		if probe.fails {
			return &Obstacle{probe.reason, probe.message}
		}
	}
	return nil
}

// first is the first of some, or a dash.
func first(all []string) string {
	if len(all) == 0 {
		return "-"
	}
	return all[0]
}

func tooOld(version string) bool {
	branch, _, _ := strings.Cut(version, ".")
	number, err := strconv.Atoi(branch)
	return err != nil || number < minDriver
}

// reserved is the part of a GPU's memory, in percent, that a share leaves to the driver where the policy names no share:
// shares of the whole would add up to more than it lets programs have (NVML reports 1 to 3 % as reserved).
const reserved = 4

const mib = 1 << 20

// ShareOf is the limit, in bytes, of a pod with so many replicas of a GPU. It is never more than the GPU has, which the
// driver would refuse. The reason is set if the policy asks for more for one replica.
func ShareOf(spec v1alpha1.TimeSlicedMemory, advertised, held int, total uint64) (bytes uint64, reason string) {
	one := total / 100 * (100 - reserved) / uint64(max(advertised, 1))
	if spec.PerReplica != nil {
		one = uint64(max(spec.PerReplica.Value(), 0))
	}
	one = one / mib * mib
	if one == 0 || one > total {
		return 0, v1alpha1.ReasonShareTooLarge
	}
	return min(one*uint64(max(held, 0)), total), ""
}

// Cell is a cgroup on a GPU: what is wanted, what we have recorded, and what the driver says.
type Cell struct {
	Backend v1alpha1.MemoryBackend
	Want    uint64   // bytes; 0: no limit
	Ours    []uint64 // limits that we have set, or were about to set when this was recorded
	Stale   []uint64 // on misc: limits of ours on this GPU whose cgroups are gone, which a new cgroup may inherit
	Read    Reading
}

// Do is what to do about a Cell.
type Do int

// What there is to do.
const (
	Leave  Do = iota // nothing
	Forget           // the record alone: there is no limit of ours
	Set              // Want
	Clear            // remove the limit, which is ours
)

// soft reports whether another owner has set a soft limit. On dmem it proves nothing: one of a container, which a tenant
// may ask for, raises that of its pod.
func (c Cell) soft(read Reading) bool {
	return read.Soft > 0 && c.Backend != v1alpha1.MemoryBackendDmem
}

// Next decides what to do, and why the cgroup has not the limit that is wanted. A finite limit that we have not set is
// another owner's, and so is a soft limit on misc: neither is touched. A limit below use is not set: dmem would keep the former
// one in silence, and misc refuses.
func (c Cell) Next() (do Do, reason string) {
	free, recorded := !c.soft(c.Read) && c.Read.Hard == NoLimit, len(c.Ours) > 0
	if !free && !c.own() {
		if c.Want > 0 {
			reason = v1alpha1.ReasonForeignLimit
		}
		if recorded {
			return Forget, reason
		}
		return Leave, reason
	}
	switch {
	case c.Want == 0 && !free:
		return Clear, ""
	case c.Want == 0 && recorded:
		return Forget, ""
	case c.Want == 0, c.Read.Hard == c.Want && len(c.Ours) == 1:
		return Leave, ""
	case c.Read.Used > c.Want:
		return Leave, v1alpha1.ReasonAboveLimit
	}
	return Set, ""
}

// own reports whether the limit is ours: as recorded, or inherited from a cgroup of ours that is gone.
func (c Cell) own() bool {
	stale := c.Backend == v1alpha1.MemoryBackendMisc && len(c.Ours) == 0 && slices.Contains(c.Stale, c.Read.Hard)
	return !c.soft(c.Read) && (slices.Contains(c.Ours, c.Read.Hard) || stale)
}

// After decides by what reads back after Want was set: which limits may be ours now, and why it does not hold. The limit
// from before with more use than wanted is dmem's silence about a limit below use. Anything else proves that the driver
// does not limit as it says, but for no limit on dmem: a program may have freed meanwhile, and one that no use can be above proves it.
func (c Cell) After(read Reading) (ours []uint64, reason string) {
	switch {
	case !c.soft(read) && read.Hard == c.Want:
		return []uint64{c.Want}, ""
	case read.Hard == c.Read.Hard && read.Used > c.Want && read.Hard == NoLimit:
		return nil, v1alpha1.ReasonAboveLimit
	case read.Hard == c.Read.Hard && read.Hard != NoLimit && (read.Used > c.Want || c.Backend == v1alpha1.MemoryBackendDmem):
		return []uint64{read.Hard}, v1alpha1.ReasonAboveLimit // on dmem a program may have freed in the moment between
	}
	if c.Read.Hard == NoLimit {
		return []uint64{c.Want}, v1alpha1.ReasonNotEnforced
	}
	return []uint64{c.Read.Hard, c.Want}, v1alpha1.ReasonNotEnforced // also one that was inherited
}

// PodLimit is what came out for a pod on a GPU. Without a reason the limit holds or, under Report, would.
type PodLimit struct {
	Namespace, Pod, GPU string
	Bytes               uint64
	Reason              string
}

// The bounds of the API's lists.
const (
	maxPods    = 32
	maxReasons = 16
)

// LimitsStatus is what to report of the pods of a node.
func LimitsStatus(backend v1alpha1.MemoryBackend, pods []PodLimit, remaining int) v1alpha1.MemoryLimitsStatus {
	s := v1alpha1.MemoryLimitsStatus{Backend: backend, Remaining: int32(remaining)}
	pods = slices.SortedFunc(slices.Values(pods), func(a, b PodLimit) int {
		return cmp.Or(-cmp.Compare(min(len(a.Reason), 1), min(len(b.Reason), 1)), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.GPU, b.GPU))
	})
	counts := map[string]int32{}
	for i, p := range pods {
		if p.Reason == "" {
			s.Limited++
		} else {
			counts[p.Reason]++
		}
		if i < maxPods {
			s.Pods = append(s.Pods, v1alpha1.PodMemoryLimit{
				Namespace: p.Namespace, PodName: p.Pod, DeviceUUID: p.GPU, LimitBytes: int64(p.Bytes), Reason: p.Reason,
			})
		}
	}
	for reason, count := range counts {
		s.Uncovered = append(s.Uncovered, v1alpha1.UncoveredPods{Reason: reason, Count: count})
	}
	broken := func(u v1alpha1.UncoveredPods) bool { return u.Reason == v1alpha1.ReasonNotEnforced }
	slices.SortFunc(s.Uncovered, func(a, b v1alpha1.UncoveredPods) int {
		if broken(a) != broken(b) { // which stops the rollout, so it is the reason of the condition
			return map[bool]int{true: -1, false: 1}[broken(a)]
		}
		return cmp.Or(-cmp.Compare(a.Count, b.Count), cmp.Compare(a.Reason, b.Reason))
	})
	s.Uncovered = s.Uncovered[:min(len(s.Uncovered), maxReasons)]
	return s
}

// LimitedCondition is the condition MemoryLimited of a node.
func LimitedCondition(mode v1alpha1.MemoryLimitMode, obstacle *Obstacle, s v1alpha1.MemoryLimitsStatus) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionMemoryLimited, Status: metav1.ConditionFalse}
	switch {
	case mode == v1alpha1.MemoryLimitNone:
		c.Reason = v1alpha1.ReasonLimitFailed
		c.Message = fmt.Sprintf("%d limits remain that nothing asks for; the agent removes them as soon as it can", s.Remaining)
		if obstacle != nil {
			c.Reason, c.Message = obstacle.Reason, fmt.Sprintf("%d limits remain that nothing asks for: %s", s.Remaining, obstacle.Message)
		}
	case obstacle != nil:
		c.Reason, c.Message = obstacle.Reason, obstacle.Message
	case mode == v1alpha1.MemoryLimitReport:
		c.Status, c.Reason = metav1.ConditionUnknown, v1alpha1.ReasonNotVerified
		c.Message = fmt.Sprintf("nothing is limited (Report); %d pods would be%s", s.Limited, except(s))
	case len(s.Uncovered) > 0:
		c.Reason, c.Message = s.Uncovered[0].Reason, fmt.Sprintf("%d pods are limited%s", s.Limited, except(s))
	case s.Limited == 0:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, v1alpha1.ReasonNotVerified, "no pod has a share yet"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonEnforced
		c.Message = fmt.Sprintf("%d pods are limited, as read back (%s)", s.Limited, Controller(s.Backend))
	}
	return c
}

// except says which pods are not limited, and why, with the first of them.
func except(s v1alpha1.MemoryLimitsStatus) string {
	if len(s.Uncovered) == 0 {
		return ""
	}
	reasons := make([]string, 0, len(s.Uncovered))
	for _, u := range s.Uncovered {
		reasons = append(reasons, fmt.Sprintf("%d %s", u.Count, u.Reason))
	}
	return fmt.Sprintf(", not: %s, such as %s/%s", strings.Join(reasons[:min(len(reasons), 3)], ", "), s.Pods[0].Namespace, s.Pods[0].PodName)
}
