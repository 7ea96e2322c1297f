// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
)

// limitsFieldManager owns status.memoryLimits and the condition MemoryLimited, which follow from pods, not from
// reconciles of the GPUs.
const limitsFieldManager = FieldManager + "-limits"

const (
	// limitsTimeout bounds a look at all pods.
	limitsTimeout = observeTimeout
	// limitsResync is how often pods are looked for without an event, limitsFull how often the driver is asked about those
	// that have not changed: it forgets limits when it is initialized anew.
	limitsResync, limitsFull = time.Minute, 5 * time.Minute
	// limitsSoon is when to look again at a pod whose cgroup, or whose containers', may be about to come, and limitsRetry
	// at what the driver refused or use is above.
	limitsSoon, limitsRetry = time.Second, 15 * time.Second
)

// LimitSources are what a MemoryLimiter works with beside what the Controller has.
type LimitSources struct {
	Gate        bool // the feature gate MemoryLimits
	Cgroups     host.Cgroups
	PodNames    func() (map[string]host.ContainerName, error) // by UID
	Devices     func() (map[string][]string, error)           // that the kubelet has on record for pods, by UID
	MemacctMode func() string
	Record      host.RecordFile
	PodLogs     string // folder with one for the logs of each pod
}

// MemoryLimiter has the driver limit the memory of the pods on time-sliced GPUs, as GPUNode.spec.memory.limit asks, and
// removes the limits that it has set when nothing asks for them any more. It stops and evicts no pod: one without a limit
// is reported.
//
//	facts, pods and their cgroups, the record of what was set → memoryguard decides → limitCells carries out → report
//
// Without a limit that is asked for or recorded it looks at nothing.
type MemoryLimiter struct {
	tools
	LimitSources

	owner  ssa.Owner
	bootID string
	// What is known from one look to the next, until the next full one.
	full     time.Time
	of       int64 // generation of the GPUNode
	facts    memoryguard.NodeFacts
	verified map[string]uint64    // what a cgroup on a GPU was last found to have, by cellKey
	shown    map[string]uint64    // the same of containers on dmem
	memory   map[string]uint64    // of GPUs, in bytes
	halted   bool                 // a limit did not read back: no further one is set
	replicas map[string]int       // how often a GPU is advertised, as last seen
	devices  map[string][]string  // that the kubelet had on record for pods, as last read
	unread   error                // why not now
	missing  map[string]time.Time // since when pods have no cgroup
	running  map[string]bool      // IDs of the cgroups of containers, and of pods that have some
	again    chan struct{}        // the watch looks for new directories
}

// NewMemoryLimiter makes the limiter of a controller's node.
func NewMemoryLimiter(c *Controller, sources LimitSources) *MemoryLimiter {
	return &MemoryLimiter{
		tools: c.tools, LimitSources: sources, owner: ssa.Owner{Client: c.tools.client, Name: limitsFieldManager}, bootID: c.bootID,
		replicas: map[string]int{}, again: make(chan struct{}, 1),
	}
}

// Name is the name in logs and metrics.
func (*MemoryLimiter) Name() string { return "agent-memory-limits" }

// Register adds the limiter to a manager. A new spec wakes it, and pods that come and go do.
func (m *MemoryLimiter) Register(mgr ctrl.Manager) error {
	if err := m.metrics.registerLimits(registry.Registry); err != nil {
		return err
	}
	changes := make(chan event.GenericEvent)
	err := onNode(mgr, m.Name(), m.node, controller.Options{
		ReconciliationTimeout: 2*limitsTimeout + reportTimeout, // it waits for a reconcile of the GPUs
	}).
		WatchesRawSource(source.Channel(changes, &handler.EnqueueRequestForObject{})).
		Complete(reconcile.AsReconciler(m.client, m))
	if err != nil {
		return fmt.Errorf("registering the agent's memory limits: %w", err)
	}
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error { return m.watch(ctx, changes) })); err != nil {
		return fmt.Errorf("registering the watch of pods: %w", err)
	}
	return nil
}

// watch asks for a look whenever a pod comes or goes. It begins with the first limit that is asked for.
func (m *MemoryLimiter) watch(ctx context.Context, changes chan<- event.GenericEvent) error {
	select {
	case <-ctx.Done():
		return nil
	case <-m.again:
	}
	node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: m.node}}
	changed := func() {
		select {
		case changes <- event.GenericEvent{Object: node}:
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil {
		if err := m.Cgroups.Watch(ctx, []string{m.PodLogs}, m.again, changed); err != nil { // root of a container can take all that there is of inotify
			log(ctx).Info("Pods that come are seen only each minute", "reason", err.Error())
			select {
			case <-ctx.Done():
			case <-m.again:
			}
		}
	}
	return nil
}

// Reconcile looks at the pods and reports. While NVIDIA's mig-manager works the driver stays closed.
func (m *MemoryLimiter) Reconcile(ctx context.Context, node *v1alpha1.GPUNode) (reconcile.Result, error) {
	if !node.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, nil
	}
	if idle, err := m.idle(node); idle || err != nil {
		return m.report(ctx, node, Limits{}, err)
	}
	done, err := m.lock.take(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	defer done()
	now := &v1alpha1.GPUNode{} // whose the GPUs are may have changed until its turn has come
	if err := m.client.Get(ctx, client.ObjectKeyFromObject(node), now); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if now.Spec.MIGConfigName != "" {
		return reconcile.Result{RequeueAfter: limitsRetry}, nil
	}
	found, err := m.Settle(ctx, now)
	return m.report(ctx, now, found, err)
}

// idle reports whether nothing asks for limits, and none is on record.
func (m *MemoryLimiter) idle(node *v1alpha1.GPUNode) (bool, error) {
	there, err := m.Record.There()
	if err != nil || there || node.Spec.Memory.Limited() != v1alpha1.MemoryLimitNone {
		return false, err //nolint:wrapcheck // names the file
	}
	m.full, m.verified, m.shown, m.halted = time.Time{}, nil, nil, false
	m.metrics.limited(nil)
	return true, nil
}

// Limits are what a look at the pods came to.
type Limits struct {
	Status    v1alpha1.MemoryLimitsStatus
	Condition *metav1.Condition // nil: nothing asks for limits, and none is left
	After     time.Duration     // when to look again; 0: not before the next event
}

// Settle looks at all pods once, and sets and removes what there is to, while nobody else uses the hardware. Only what
// keeps it from knowing pods and its own record is an error: anything else is a reason of the pods.
func (m *MemoryLimiter) Settle(ctx context.Context, node *v1alpha1.GPUNode) (Limits, error) {
	if idle, err := m.idle(node); idle || err != nil {
		return Limits{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	unlock, err := m.Record.Lock()
	if err != nil {
		return Limits{}, err //nolint:wrapcheck // names the folder
	}
	defer unlock()
	content, err := m.Record.Read()
	if err != nil {
		return Limits{}, err //nolint:wrapcheck // names the file
	}
	select {
	case m.again <- struct{}{}:
	default:
	}
	found, err := m.settle(ctx, node, content)
	return found, errors.Join(err, m.hardware.Close())
}

// settle is Settle with the record in hand.
func (m *MemoryLimiter) settle(ctx context.Context, node *v1alpha1.GPUNode, content []byte) (Limits, error) {
	mode := node.Spec.Memory.Limited()
	m.look(ctx, node, content != nil)
	obstacle := m.facts.Obstruct()
	visible := m.facts.Unified && m.facts.HostRooted
	if m.facts.Gate && visible && m.facts.Version == "" {
		obstacle = &memoryguard.Obstacle{Reason: v1alpha1.ReasonLimitFailed, Message: "the driver could not be asked; see the condition Discovered"}
	}
	pods, err := m.pods(ctx, node)
	if err != nil {
		return Limits{}, err
	}
	c := &limitCells{
		MemoryLimiter: m, record: readLimits(ctx, content, m.bootID), saved: string(content), backend: m.facts.Backend(),
		visible: visible, able: visible && m.facts.Calls && m.facts.Owner == "",
		sets: mode == v1alpha1.MemoryLimitEnforce && obstacle == nil,
	}
	if c.backend == v1alpha1.MemoryBackendDmem { // recorded while the back end was not known: here they go with their cgroups
		c.record.Stale = nil
	}
	limits := c.carryOut(ctx, pods, mode, obstacle)
	if err := c.save(); err != nil {
		return Limits{}, err
	}
	m.metrics.limited(limits)
	found := Limits{Status: memoryguard.LimitsStatus(c.backend, limits, c.remaining), After: c.after(limits)}
	if mode == v1alpha1.MemoryLimitNone && c.remaining == 0 {
		found.Status = v1alpha1.MemoryLimitsStatus{}
		return found, nil
	}
	is := memoryguard.LimitedCondition(mode, obstacle, found.Status)
	if is.ObservedGeneration = node.Generation; m.unread != nil && is.Status == metav1.ConditionTrue {
		is.Status, is.Reason = metav1.ConditionFalse, v1alpha1.ReasonLimitFailed
		is.Message += "; what init containers of new pods alone have is not: " + m.unread.Error()
	}
	found.Condition = &is
	return found, nil
}

// look finds out about the node what changes seldom.
func (m *MemoryLimiter) look(ctx context.Context, node *v1alpha1.GPUNode, recorded bool) {
	comes := func(d v1alpha1.DeviceStatus) bool { _, is := m.memory[d.UUID]; return !is }
	known := (m.facts.Version != "" || !m.facts.Unified) && !slices.ContainsFunc(node.Status.Devices, comes)
	if known && m.of == node.Generation && !m.full.IsZero() && m.clock.Since(m.full) < limitsFull {
		return
	}
	if m.of != node.Generation || m.shown == nil {
		m.shown = map[string]uint64{}
	}
	m.of, m.full, m.verified, m.halted = node.Generation, m.clock.Now(), map[string]uint64{}, false
	tree := m.Cgroups.Facts()
	m.facts = memoryguard.NodeFacts{
		Gate: m.Gate, Owner: node.Spec.MemoryOwner, Unified: tree.Unified, HostRooted: tree.HostRooted, Writable: tree.Writable,
		Controllers: tree.Controllers, Delegated: tree.Delegated, MemacctMode: m.MemacctMode(),
	}
	var uuids []string
	m.memory = map[string]uint64{}
	for _, d := range node.Status.Devices {
		uuids = append(uuids, d.UUID)
		m.memory[d.UUID] = uint64(d.MemoryMiB) << 20
		if d.Sharing.MIGMode == v1alpha1.MIGModeEnabled {
			m.facts.MIG = append(m.facts.MIG, d.UUID)
		}
	}
	if !tree.Unified || !m.Gate && !recorded {
		return // the driver is not opened for nothing
	}
	support, err := m.hardware.LimitsMemory(ctx, uuids...)
	if err != nil {
		log(ctx).Info("The driver could not be asked for memory limits", "reason", err.Error())
	}
	m.facts.Version, m.facts.Calls, m.facts.Fleeting = support.Version, support.Calls, support.Fleeting
}

// limitedPod is a pod with replicas of a GPU.
type limitedPod struct {
	memoryguard.PodLimit

	// cgroups of it and, if a tenant had one deleted by force that runs on, of others of its name.
	cgroups []host.PodCgroup
	sliced  bool // it has a share, which the policy limits; else whatever it has of the GPU is no business of ours
}

func (p *limitedPod) name() string { return p.Namespace + "/" + p.Pod }

// holding is a pod that holds a GPU.
type holding struct{ namespace, pod, gpu string }

// pods are the pods that hold GPUs, each once for each GPU, with their shares and their cgroups.
func (m *MemoryLimiter) pods(ctx context.Context, node *v1alpha1.GPUNode) ([]limitedPod, error) {
	allocations, err := m.allocations.List(ctx)
	if err != nil {
		return nil, err
	}
	m.advertised(ctx, node)
	var found []host.PodCgroup
	if m.facts.Unified {
		if found, err = m.Cgroups.Pods(); err != nil {
			return nil, err //nolint:wrapcheck // says what it lists
		}
	}
	names, err := m.PodNames()
	if err != nil {
		return nil, err
	}
	devices, err := m.Devices()
	if m.unread = err; err == nil {
		m.devices = devices
	}
	m.running = map[string]bool{}
	of := map[host.ContainerName][]host.PodCgroup{}
	allocated := [][]Allocation{withoutAdmin(allocations, node.Spec.AdminClaims)} // and by pod what the kubelet has on record
	for _, pod := range found {
		m.running[pod.ID] = len(pod.Containers) > 0
		for _, container := range pod.Containers {
			m.running[container.ID] = true
		}
		if name, known := names[pod.UID]; known {
			of[name] = append(of[name], pod)
			var one []Allocation
			for _, id := range m.devices[pod.UID] {
				one = append(one, Allocation{Namespace: name.Namespace, Pod: name.Pod, Device: id})
			}
			allocated = append(allocated, one)
		}
	}
	held, order := replicas(allocated)
	pods := make([]limitedPod, 0, len(order))
	for _, h := range order {
		p := limitedPod{PodLimit: memoryguard.PodLimit{Namespace: h.namespace, Pod: h.pod, GPU: h.gpu}}
		p.sliced = m.share(node, &p.PodLimit, held[h])
		p.cgroups = of[host.ContainerName{Namespace: h.namespace, Pod: h.pod}]
		pods = append(pods, p)
	}
	return pods, nil
}

// replicas are what each pod holds of each GPU, and these in order: of several lists the longest, since the kubelet lists nobody what an init
// container alone has, and its record may have an earlier pod of that name.
func replicas(lists [][]Allocation) (held map[holding][]string, order []holding) {
	held = map[holding][]string{}
	for _, list := range lists {
		one := map[holding][]string{}
		for _, a := range list {
			uuid, _, _ := strings.Cut(a.Device, "::")
			h := holding{a.Namespace, a.Pod, uuid}
			if !slices.Contains(one[h], a.Device) { // an init container's may be another container's later
				one[h] = append(one[h], a.Device)
			}
			if held[h] == nil {
				order = append(order, h)
			}
			if len(one[h]) > len(held[h]) {
				held[h] = one[h]
			}
		}
	}
	return held, order
}

// share finds the limit of a pod that has these replicas of a GPU, and reports whether it has a share at all.
func (m *MemoryLimiter) share(node *v1alpha1.GPUNode, p *memoryguard.PodLimit, held []string) bool {
	spec := node.Spec.Memory
	if spec.Limited() == v1alpha1.MemoryLimitNone {
		return false
	}
	if claimedDevice.MatchString(p.GPU) { // by a ResourceClaim
		p.Reason = v1alpha1.ReasonNotOnDRA
		return true
	}
	if whole := slices.Contains(held, p.GPU); whole || !strings.HasPrefix(p.GPU, "GPU-") {
		return false
	}
	i := slices.IndexFunc(node.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.UUID == p.GPU })
	switch {
	case i < 0 || spec.PerReplica == nil && m.replicas[p.GPU] == 0: // how much there is, or for how many, is not known
		p.Reason = v1alpha1.ReasonLimitFailed
	case node.Status.Devices[i].Sharing.MPS != nil:
		return false
	default:
		total := uint64(node.Status.Devices[i].MemoryMiB) << 20
		p.Bytes, p.Reason = memoryguard.ShareOf(*spec, m.replicas[p.GPU], len(held), total)
	}
	return true
}

// advertised remembers how often each GPU is advertised. A device plugin that restarts advertises nothing for a while.
func (m *MemoryLimiter) advertised(ctx context.Context, node *v1alpha1.GPUNode) {
	ids, err := m.allocations.Advertised(ctx)
	if err != nil {
		log(ctx).V(1).Info("The kubelet did not list what it can allocate", "reason", err.Error())
		return
	}
	counts := map[string]int{}
	for _, id := range ids {
		uuid, _, shared := strings.Cut(id, "::")
		if shared {
			counts[uuid]++
		}
	}
	for _, d := range node.Status.Devices {
		if counts[d.UUID] > 0 {
			m.replicas[d.UUID] = counts[d.UUID]
		}
	}
}

// report writes what a look came to, if it changed. After one that failed nobody knows whether what was found before still holds, unless another
// agent is at work, which reports itself. A node that is gone needs no report.
func (m *MemoryLimiter) report(ctx context.Context, node *v1alpha1.GPUNode, found Limits, failed error) (reconcile.Result, error) {
	switch {
	case errors.Is(failed, host.ErrLocked):
		return reconcile.Result{}, failed
	case failed != nil:
		m.metrics.limitErrors.WithLabelValues(v1alpha1.ReasonLimitFailed).Inc()
		found = Limits{Status: node.Status.MemoryLimits, Condition: &metav1.Condition{
			Type: v1alpha1.ConditionMemoryLimited, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonLimitFailed,
			Message: "the agent could not look: " + failed.Error(), ObservedGeneration: node.Generation,
		}}
	}
	_, reported := condition.Find(node.Status.Conditions, v1alpha1.ConditionMemoryLimited)
	if found.Condition == nil && !reported {
		return reconcile.Result{}, nil // an apply without any field would be one more write
	}
	want := ac.GPUNode(node.Name)
	if found.Condition != nil {
		all := condition.SetInFull(slices.Clone(node.Status.Conditions), *found.Condition, m.clock.Now())
		is, _ := condition.Find(all, v1alpha1.ConditionMemoryLimited)
		status, err := ssa.Configuration[ac.GPUNodeStatusApplyConfiguration](v1alpha1.GPUNodeStatus{
			MemoryLimits: found.Status, Conditions: []metav1.Condition{is},
		})
		if err != nil {
			return reconcile.Result{}, err
		}
		want.WithStatus(status)
	}
	_, err := ssa.ApplyStatus(ctx, m.owner, node, want, ac.ExtractGPUNodeStatus)
	if err := client.IgnoreNotFound(err); err != nil {
		return reconcile.Result{}, errors.Join(failed, fmt.Errorf("reporting the memory limits: %w", err))
	}
	return reconcile.Result{RequeueAfter: found.After}, failed
}
