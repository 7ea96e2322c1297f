// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// observation is one look at the node, complete or not at all: who decides on half of it destroys what is in use.
type observation struct {
	driverVersion string
	daemons       []v1alpha1.MPSStatus
	devices       []gpu.Device
	at            time.Time
}

// observationError says why there is no observation.
type observationError struct {
	reason string // one of the constants of the API
	err    error
}

func (e *observationError) Error() string { return e.err.Error() }
func (e *observationError) Unwrap() error { return e.err }

func notObserved(reason, what string, err error) error {
	return &observationError{reason: reason, err: fmt.Errorf("%s: %w", what, err)}
}

// notRead says why the GPUs could not be read.
func notRead(err error) error {
	if none, is := errors.AsType[*driver.Missing](err); is {
		return &observationError{reason: missingReason(none.State), err: err}
	}
	if errors.Is(err, gpu.ErrDriverMismatch) {
		return &observationError{reason: v1alpha1.ReasonDriverMismatch, err: fmt.Errorf(
			"the driver's library is of another version than the loaded kernel module: wait for the driver upgrade, or reboot the node: %w", err)}
	}
	return notObserved(v1alpha1.ReasonNVMLFailed, "reading the GPUs through NVML", err)
}

func missingReason(s driver.State) string {
	switch s {
	case driver.NotReady:
		return v1alpha1.ReasonDriverNotReady
	case driver.Unsupported:
		return v1alpha1.ReasonPlatformNotSupported
	case driver.NotFound:
	}
	return v1alpha1.ReasonDriverNotFound
}

// observer looks at the node.
type observer struct {
	tools

	admin  []string                  // ResourceClaims whose containers hold nothing
	timed  []string                  // UUIDs of the GPUs whose time slice is read, those for which the spec names one
	before map[string][]gpu.Instance // by UUID, as last reported, or as many as were reported before that
}

// of is the observer of what a GPUNode is about.
func (o observer) of(node *v1alpha1.GPUNode) observer {
	o.admin, o.timed = node.Spec.AdminClaims, nil
	for _, d := range plan.Devices(node.Status.Devices) {
		if len(d.State.Instances) >= len(o.before[d.UUID]) { // fewer may be all that could be made so far
			o.before[d.UUID] = d.State.Instances
		}
	}
	for _, d := range node.Spec.Devices {
		if d.Sharing.TimeSliceInterval != "" {
			o.timed = append(o.timed, d.UUID)
		}
	}
	return o
}

// observe looks at the GPUs, at the MPS daemons that serve them and at who uses them.
func (o observer) observe(ctx context.Context) (observation, error) {
	ctx, cancel := context.WithTimeout(ctx, observeTimeout)
	defer cancel()
	at := o.clock.Now()
	inventory, err := o.hardware.Observe(ctx)
	if err != nil {
		return observation{}, notRead(err)
	}
	if err := o.readTimeSlices(ctx, inventory.Devices); err != nil {
		return observation{}, notRead(err)
	}
	serving, err := o.mps.Observe(ctx)
	if err != nil {
		return observation{}, notObserved(v1alpha1.ReasonMPSDaemonFailed, "looking for MPS control daemons", err)
	}
	if err := o.markUnsupported(inventory.Devices); err != nil {
		return observation{}, notObserved(v1alpha1.ReasonMPSDaemonFailed, "looking for what cannot be held", err)
	}
	allocations, err := o.allocations.List(ctx)
	if err != nil {
		return observation{}, notObserved(v1alpha1.ReasonPodResourcesFailed, "reading the kubelet's pod resources", err)
	}
	allocations = withoutAdmin(allocations, o.admin)
	devices := mps.Assign(inventory.Devices, serving)
	for i := range devices {
		devices[i].Before = o.before[devices[i].UUID]
		devices[i].Processes = o.described(devices[i].Processes)
		devices[i].Holders = append(slices.Clone(devices[i].Holders), holdersOf(devices[i], allocations)...)
		slices.SortStableFunc(devices[i].Holders, byPod)
		devices[i].Holders = slices.Compact(devices[i].Holders)
	}
	return observation{driverVersion: inventory.DriverVersion, daemons: mpsStatus(serving), devices: devices, at: at}, nil
}

// readTimeSlices adds the time slices that matter. A GPU in MIG mode has none.
func (o observer) readTimeSlices(ctx context.Context, devices []gpu.Device) error {
	var uuids []string
	for _, d := range devices {
		if !d.State.MIG && slices.Contains(o.timed, d.UUID) {
			uuids = append(uuids, d.UUID)
		}
	}
	if len(uuids) == 0 {
		return nil
	}
	read, err := o.hardware.TimeSlices(ctx, uuids...)
	if err != nil {
		return err
	}
	for i := range devices {
		devices[i].State.TimeSlice = read[devices[i].UUID]
	}
	return nil
}

// described adds what the host knows of processes to what NVML does. A process of a container that calls itself an MPS
// server is none.
func (o observer) described(processes []gpu.Process) []gpu.Process {
	described := slices.Clone(processes)
	for i := range described {
		p := &described[i]
		on := o.processes.Describe(p.PID)
		p.Name = cmp.Or(on.Name, p.Name)
		p.PodUID = cmp.Or(on.PodUID, p.PodUID)
		p.ContainerID = cmp.Or(on.ContainerID, p.ContainerID)
		p.MPSServer = on.Runs(gpu.MPSServer)
		if p.Name == gpu.MPSServer && !p.MPSServer { // the controller goes by the name that is reported
			p.Name += " (by its own account)"
		}
	}
	return described
}

// lingers reports whether a process of a pod uses a GPU that no container holds: one that is about to end, of which no
// event tells. The controller waits for it.
func lingers(devices []gpu.Device) bool {
	return slices.ContainsFunc(devices, func(d gpu.Device) bool {
		ofPod := func(p gpu.Process) bool { return p.PodUID != "" && !p.MPSServer }
		return len(d.Holders) == 0 && slices.ContainsFunc(d.Processes, ofPod)
	})
}

func byPod(a, b gpu.Holder) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
		cmp.Compare(a.Container, b.Container), cmp.Compare(a.Instance, b.Instance))
}

// reasonOf is the reason of a condition about an observation that failed.
func reasonOf(err error) string {
	if failed, is := errors.AsType[*observationError](err); is {
		return failed.reason
	}
	return v1alpha1.ReasonNVMLFailed
}

// licenseMissing is true when a vGPU has no license. It names the vGPUs and where NVIDIA's GPU Operator takes their
// license from.
func licenseMissing(devices []v1alpha1.DeviceStatus) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionLicenseMissing, Status: metav1.ConditionFalse}
	var without []string
	for _, d := range devices {
		if d.License == v1alpha1.LicenseStateUnlicensed {
			without = append(without, fmt.Sprintf("GPU %d (%s)", d.Index, d.Product))
		}
	}
	if len(without) == 0 {
		return c
	}
	c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonVGPUUnlicensed
	c.Message = fmt.Sprintf("%s: no vGPU license, so NVIDIA's driver slows the GPU down; look at driver.licensingConfig of the ClusterPolicy "+
		"and at the license server", strings.Join(without, ", "))
	return c
}

// errNeverReported is the illness of an agent that has just started: what the GPUNode says is of the one before it.
var errNeverReported = errors.New("the agent has not reported since it started; if that lasts, look whether the node has a GPUNode")

// health is how the last reconcile went as far as the agent itself is concerned: whether it could read the node and
// report.
type health struct {
	mu       sync.Mutex
	reported bool // or has tried to
	last     error
}

func (h *health) set(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reported, h.last = true, err
}

func (h *health) get() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.reported {
		return errNeverReported
	}
	return h.last
}

// Ready is a readiness check: the node counts as reporting while it passes. A step that failed is not the agent's
// illness and does not count.
func (c *Controller) Ready(*http.Request) error {
	err := c.health.get()
	if err != nil && !errors.Is(err, errNeverReported) {
		return fmt.Errorf("the last reconcile could not read the node or report: %w", err)
	}
	return err
}

// persistence holds GPUs for the steps of a plan, by the driver's own persistence mode.
type persistence struct{ tools }

var _ plan.Persistence = persistence{}

// TurnOn implements plan.Persistence. It is recorded first, so that a crash leaves nothing on for ever.
func (p persistence) TurnOn(ctx context.Context, uuid string) error {
	if err := p.mps.RecordPersistence(uuid, mps.PersistenceHeld); err != nil {
		return err //nolint:wrapcheck // names the file
	}
	err := p.hardware.SetPersistence(ctx, uuid, true)
	if errors.Is(err, gpu.ErrNotSupported) || errors.Is(err, gpu.ErrPermission) {
		return p.mps.RecordPersistence(uuid, mps.PersistenceUnsupported) //nolint:wrapcheck // names the file
	}
	return err //nolint:wrapcheck // names the GPU
}

// Restore implements plan.Persistence.
func (p persistence) Restore(ctx context.Context, uuid string) error {
	now, err := p.mps.Persistence(uuid)
	if now == mps.PersistenceNotHeld || err != nil {
		return err //nolint:wrapcheck // names the file
	}
	if now == mps.PersistenceHeld {
		if err := p.hardware.SetPersistence(ctx, uuid, false); err != nil {
			return err //nolint:wrapcheck // names the GPU
		}
	}
	return p.mps.RecordPersistence(uuid, mps.PersistenceNotHeld) //nolint:wrapcheck // names the file
}

// restoreUnused releases the GPUs that no daemon serves or is to serve, before another program partitions them. What
// fails is tried again with the next reconcile.
func (p persistence) restoreUnused(ctx context.Context, desired []v1alpha1.DeviceSpec, devices []gpu.Device) {
	for _, d := range devices {
		awaits := func(spec v1alpha1.DeviceSpec) bool { return spec.UUID == d.UUID && spec.Sharing.MPS != nil }
		if d.State.MPS != nil || slices.ContainsFunc(desired, awaits) {
			continue
		}
		if err := p.Restore(ctx, d.UUID); err != nil {
			log(ctx).Error(err, "Turning persistence mode off again", "gpu", d.UUID)
		}
	}
}

// markUnsupported marks the GPUs of which it is known that persistence mode cannot be turned on.
func (o observer) markUnsupported(devices []gpu.Device) error {
	for i := range devices {
		d := &devices[i]
		if d.Persistence != gpu.PersistenceOff {
			continue
		}
		known, err := o.mps.Persistence(d.UUID)
		if err != nil {
			return err //nolint:wrapcheck // names the file
		}
		if known == mps.PersistenceUnsupported {
			d.Persistence = gpu.PersistenceUnsupported
		}
	}
	return nil
}

// fleeting are the GPUs that a daemon of the operator serves and whose compute mode no program keeps, in words.
func fleeting(devices []gpu.Device) []string {
	var names []string
	for _, d := range devices {
		if d.Persistence == gpu.PersistenceUnsupported && d.State.MPS != nil && !d.State.MPS.External {
			names = append(names, d.String())
		}
	}
	return names
}
