// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// report is what a reconcile found and did.
type report struct {
	observed observation // the last one; meaningless if failed is set
	outcome  outcome
	failed   error // why there is no observation
	rebuilds []metav1.Time
	aside    bool // the driver was left closed, for NVIDIA's mig-manager
}

// report writes the status, if it changed. waits is true if it is to be written with what the ConfigReporter finds, for which it waits no
// longer than ackDelay after the spec was first seen.
func (c *Controller) report(ctx context.Context, node *v1alpha1.GPUNode, r report) (waits bool, err error) {
	if c.seen.generation != node.Generation {
		c.seen.generation, c.seen.at = node.Generation, c.clock.Now()
	}
	mayWait := c.clock.Since(c.seen.at) < ackDelay
	return c.writer.change(ctx, node, mayWait, func(part v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus { return c.status(part, node, r) })
}

// status is all that the agent reports after a reconcile beside what it reported before. Without an observation it holds the devices last
// seen.
func (c *Controller) status(status v1alpha1.GPUNodeStatus, node *v1alpha1.GPUNode, r report) v1alpha1.GPUNodeStatus {
	if r.failed == nil && !r.aside {
		devices := plan.Reported(r.observed.devices)
		if node.Spec.OnDemand != "" {
			sinceHeld(status.Devices, devices, r.observed.devices, c.clock.Now())
		}
		status.DriverVersion, status.BootID, status.Devices = r.observed.driverVersion, c.bootID, devices
		status.GPUs, status.MPS = sumOf(status.Devices), r.observed.daemons
	}
	if r.rebuilds != nil || r.failed == nil {
		status.RebuildTimes = r.rebuilds
	}
	able := c.rebooter.Able()
	status.CanReboot = able == nil
	conditions, now := status.Conditions, c.clock.Now()
	set := func(s metav1.Condition) {
		s.ObservedGeneration = node.Generation
		conditions = condition.SetInFull(conditions, s, now)
	}
	set(discovered(r, len(status.Devices)))
	set(applied(node, r, able))
	guarded := memoryGuarded(node, status.Devices)
	guarded.ObservedGeneration = node.Generation
	conditions = condition.SetWhenTrue(conditions, guarded, now)
	reboot := rebootRequired(r.outcome, able)
	reboot.ObservedGeneration = node.Generation
	conditions = condition.SetWhenTrue(conditions, reboot, now)
	license := licenseMissing(status.Devices)
	license.ObservedGeneration = node.Generation
	conditions = condition.SetWhenTrue(conditions, license, now)
	halted := stalled(r.outcome)
	halted.ObservedGeneration = node.Generation
	status.Conditions = condition.SetWhenTrue(conditions, halted, now)
	return status
}

// sinceHeld sets in what is to be reported of GPUs since when no pod or process has had a MIG instance, by all that was seen, of which the
// report may list a part. What was reported before remembers it, also for an agent that starts anew.
func sinceHeld(was, is []v1alpha1.DeviceStatus, seen []gpu.Device, now time.Time) {
	before, held := map[string]metav1.Time{}, map[string]bool{}
	for i := range was {
		for _, instance := range was[i].Instances {
			before[instance.UUID] = instance.LastHeldTime
		}
	}
	for _, d := range seen {
		for _, instance := range d.State.Instances {
			held[instance.UUID] = hasHolder(&d, instance.ID)
		}
	}
	for i := range is {
		for n := range is[i].Instances {
			instance := &is[i].Instances[n]
			if instance.UUID == "" || held[instance.UUID] {
				continue
			}
			instance.LastHeldTime = before[instance.UUID]
			if instance.LastHeldTime.IsZero() || instance.LastHeldTime.After(now) { // the clock may have been ahead
				instance.LastHeldTime = metav1.NewTime(now.Truncate(time.Second)) // the API keeps no more
			}
		}
	}
}

// hasHolder reports whether a pod or process has an instance.
func hasHolder(d *gpu.Device, instance int) bool {
	return slices.ContainsFunc(d.Holders, func(h gpu.Holder) bool { return h.Instance == instance }) ||
		slices.ContainsFunc(d.Processes, func(p gpu.Process) bool { return p.Instance == instance })
}

// maxSum is the bound of status.gpus.
const maxSum = 256

// sumOf sums up GPUs by product, in the order of their indexes.
func sumOf(devices []v1alpha1.DeviceStatus) string {
	var products []string
	counts := map[string]int{}
	for _, d := range devices {
		if counts[d.Product]++; counts[d.Product] == 1 {
			products = append(products, d.Product)
		}
	}
	for i, product := range products {
		products[i] = fmt.Sprintf("%d× %s", counts[product], cmp.Or(product, "unknown"))
	}
	return format.First(strings.Join(products, ", "), maxSum)
}

// own returns the conditions that the StatusWriter writes: all but the controller's and the MemoryLimiter's.
func own(conditions []metav1.Condition) []metav1.Condition {
	for _, theirs := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionReconciling, v1alpha1.ConditionStalled, v1alpha1.ConditionMemoryLimited} {
		conditions = condition.Remove(conditions, theirs)
	}
	return conditions
}

// memoryGuarded reports whether the agent measures for a memory guard. The controller asks for that, because an older
// agent does not, and none can on a GPU whose memory NVML does not report.
func memoryGuarded(node *v1alpha1.GPUNode, devices []v1alpha1.DeviceStatus) metav1.Condition {
	c := metav1.Condition{
		Type: v1alpha1.ConditionMemoryGuarded, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonMeasuring,
		Message: "The agent measures for the memory guard of the policy",
	}
	if node.Spec.Memory.Guarded() && !slices.ContainsFunc(devices, func(d v1alpha1.DeviceStatus) bool { return d.MemoryMiB == 0 }) {
		c.Status = metav1.ConditionTrue
	}
	return c
}

// discovered reports whether the GPUs were read. Those last seen are still believed in, so then it is not known.
func discovered(r report, seen int) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionDiscovered}
	switch {
	case r.aside:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonDiscovered
		c.Message = fmt.Sprintf("%s as last seen, before NVIDIA's mig-manager was let work on them", gpus(seen))
	case r.failed == nil:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonDiscovered
		c.Message = fmt.Sprintf("read %s with driver %s", gpus(seen), r.observed.driverVersion)
	case seen > 0:
		c.Status, c.Reason = metav1.ConditionUnknown, reasonOf(r.failed)
		c.Message = fmt.Sprintf("%v; the status shows the GPUs as they were last seen, and none is changed", r.failed)
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, reasonOf(r.failed), r.failed.Error()
	}
	return c
}

// applied reports whether the GPUs match the spec. It is Unknown if they could not be read and nothing was tried.
func applied(node *v1alpha1.GPUNode, r report, able error) metav1.Condition {
	o := r.outcome
	c := metav1.Condition{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse}
	switch {
	case r.aside:
		c.Reason = v1alpha1.ReasonMIGManagerPartitioning
		c.Message = "NVIDIA's mig-manager applies " + node.Spec.MIGConfigName + "; the driver is left closed until it has"
	case o.problem != nil:
		c.Reason, c.Message = o.problem.Reason, beside(o)
	case len(o.failures) > 0:
		c.Reason, c.Message = failureOf(o)
	case len(o.pending) > 0:
		reboot := rebootRequired(o, able)
		c.Reason, c.Message = reboot.Reason, reboot.Message
	case len(o.waits) > 0:
		c.Reason, c.Message = v1alpha1.ReasonGPUInUse, strings.Join(o.waits, "; ")
	case o.nodes != nil:
		c.Reason, c.Message = v1alpha1.ReasonDeviceNodesMissing, o.nodes.Error()+"; it is tried again"
	case r.failed != nil:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, reasonOf(r.failed), "not known, see Discovered"
	case len(o.unknown) > 0:
		c.Reason = v1alpha1.ReasonUnknownDevice
		c.Message = fmt.Sprintf("the node has no GPU %s (any more); the controller plans anew from status.devices", format.Join(o.unknown))
	case len(o.unmet) > 0 && node.Spec.MIGActuator == v1alpha1.MIGActuatorMIGManager:
		c.Reason = v1alpha1.ReasonApplying
		c.Message = "not in the desired state: " + format.Join(o.unmet) + "; NVIDIA's mig-manager partitions the GPUs of this node"
	case len(o.unrecorded) > 0 && len(o.unmet) == len(o.unrecorded):
		c.Reason = v1alpha1.ReasonApplying
		c.Message = "the time-slice interval of " + format.Join(o.unmet) + " is set once the controller has recorded the former one in spec.baseline"
	case len(o.unmet) > 0:
		c.Reason = v1alpha1.ReasonApplying
		c.Message = "not in the desired state yet: " + format.Join(o.unmet) +
			"; the agent waits for a change by another program, such as the end of NVIDIA's own MPS daemon"
	case len(node.Spec.Devices) == 0:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonNoPolicy, "no policy asks for a change of a GPU"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonApplied
		c.Message = gpus(len(node.Spec.Devices)) + " in the desired state" + notKept(r.observed.devices)
	}
	return c
}

// notKept adds to a message which GPUs lose their compute mode; empty: none does.
func notKept(devices []gpu.Device) string {
	lost := fleeting(devices)
	if len(lost) == 0 {
		return ""
	}
	return "; the compute mode of " + format.Join(lost) + " is not kept until an MPS server runs, since its driver has no persistence mode; " +
		"start nvidia-persistenced on the node"
}

// beside is the message of a spec that cannot be reached for some GPUs, with what is the matter with the others.
func beside(o outcome) string {
	said := append([]string{o.problem.Message}, o.waits...)
	if len(o.failures) > 0 {
		_, message := failureOf(o)
		said = append(said, message)
	}
	return strings.Join(said, "; ")
}

// failureOf is reason and message of steps that failed: the reason of the first, what each said and what was rolled
// back.
func failureOf(o outcome) (reason, message string) {
	reason = v1alpha1.ReasonStepFailed
	switch first := o.failures[0].err; {
	case errors.Is(first, gpu.ErrBusy):
		reason = v1alpha1.ReasonGPUInUse
	case errors.Is(first, mps.ErrDaemon):
		reason = v1alpha1.ReasonMPSDaemonFailed
	}
	said := make([]string, 0, len(o.failures)+len(o.restored))
	for _, f := range o.failures {
		said = append(said, f.err.Error())
	}
	said = append(said, o.restored...)
	return reason, strings.Join(said, "; ") + "; it is tried again"
}

// stalled is true when only another desired state helps.
func stalled(o outcome) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionFalse}
	switch {
	case o.problem != nil:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, o.problem.Reason, o.problem.Message
	case o.reboot.inVain:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonRebootInVain, rebootState(o, nil)
	}
	return c
}

// rebootRequired is true when a MIG mode is pending on a GPU that cannot be reset here. Able is why the agent cannot
// reboot the node; nil if it can.
func rebootRequired(o outcome, able error) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionRebootRequired, Status: metav1.ConditionFalse}
	if len(o.pending) == 0 {
		return c
	}
	c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonRebootRequired, rebootState(o, able)
	switch {
	case o.reboot.inVain:
		c.Reason = v1alpha1.ReasonRebootInVain
	case o.reboot.now || o.reboot.failed != nil:
		c.Reason = v1alpha1.ReasonRebooting
	}
	return c
}

// rebootState says where a reboot stands.
func rebootState(o outcome, able error) string {
	what := format.Join(o.pending) + " cannot be reset on this node; "
	switch {
	case o.reboot.inVain:
		return what + "it was rebooted, and the MIG mode has not changed all the same; it is not rebooted again for this; " +
			"look at what nvidia-smi -q -d MIG says there"
	case o.reboot.now:
		return what + "it is being rebooted, and the MIG mode changes"
	case o.reboot.failed != nil:
		return fmt.Sprintf("%sit could not be rebooted: %v; it is tried again", what, o.reboot.failed)
	case len(o.reboot.waits) > 0:
		return what + "it is rebooted once nobody uses its GPUs, now: " + format.Join(o.reboot.waits)
	case able != nil:
		return fmt.Sprintf("%sreboot the node, and the MIG mode changes; the agent cannot do it: %v", what, able)
	}
	return what + "reboot the node, and the MIG mode changes"
}

// ackDelay is how long the agent keeps the news to itself that it has seen a spec which changes nothing on the GPUs, while a report of
// the configuration is due, which then tells both: a write of a GPUNode costs the API server as much as a change of a few Pods.
const ackDelay = 3 * time.Second

// StatusWriter writes the part of the GPUNode's status that a Controller and a ConfigReporter report, each from its own goroutine. What
// an apply leaves out, it deletes, so it keeps the part of both; of a GPUNode that it has not written to, it takes what is there.
type StatusWriter struct {
	owner ssa.Owner
	mu    sync.Mutex
	of    types.UID // of the GPUNode
	part  v1alpha1.GPUNodeStatus
}

// NewStatusWriter makes a writer for the GPUNode of one node.
func NewStatusWriter(c client.Client) *StatusWriter {
	return &StatusWriter{owner: ssa.Owner{Client: c, Name: FieldManager}}
}

// change sets the part as it is to be reported, and reports it if that changes something. A GPUNode that is gone needs no report.
// Where it may wait, it waits for the report on the configuration if that is due and nothing but the generation of the spec is news.
func (w *StatusWriter) change(
	ctx context.Context, node *v1alpha1.GPUNode, mayWait bool, set func(v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus,
) (waits bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.of != node.UID {
		w.of, w.part = node.UID, agentPart(node.Status)
	}
	part := set(*w.part.DeepCopy())
	if mayWait && ackOnly(w.part, part) && configDue(node, part) {
		w.part = part
		return true, nil
	}
	configuration, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](part)
	if err != nil {
		return false, err
	}
	_, err = ssa.ApplyStatus(ctx, w.owner, node, ac.GPUNode(node.Name).WithStatus(configuration), ac.ExtractGPUNodeStatus)
	if err := client.IgnoreNotFound(err); err != nil {
		return false, fmt.Errorf("reporting: %w", err)
	}
	w.part = part
	return false, nil
}

// agentPart is what the writer reports in a status.
func agentPart(s v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus {
	part := *s.DeepCopy()
	part.Rollout, part.ObservedGeneration = v1alpha1.RolloutStatus{}, 0 // are the controller's
	part.MemoryPressure, part.MemoryEvictions = nil, nil                // are the MemoryGuard's and the controller's
	part.Demand = nil                                                   // is the controller's
	part.MemoryLimits = v1alpha1.MemoryLimitsStatus{}                   // is the MemoryLimiter's
	part.Conditions = own(part.Conditions)
	return part
}

// ackOnly reports whether two parts differ in nothing but the generation of the spec that was seen.
func ackOnly(was, is v1alpha1.GPUNodeStatus) bool {
	was, is = *was.DeepCopy(), *is.DeepCopy()
	for _, part := range []v1alpha1.GPUNodeStatus{was, is} {
		for i := range part.Conditions {
			part.Conditions[i].ObservedGeneration = 0
		}
	}
	return equality.Semantic.DeepEqual(was, is)
}

// configDue reports whether the configuration of a spec is still to be reported.
func configDue(node *v1alpha1.GPUNode, part v1alpha1.GPUNodeStatus) bool {
	return node.Spec.ConfigName != "" && (part.Config.Name != node.Spec.ConfigName || !part.Config.ChangeTime.Equal(&node.Spec.ChangeTime))
}
