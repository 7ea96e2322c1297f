// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import "k8s.io/apimachinery/pkg/api/resource"

// Strategy names one of the ways to share a GPU.
// +kubebuilder:validation:Enum=Exclusive;TimeSlicing;MPS;MIG
type Strategy string

// The strategies.
const (
	StrategyExclusive   Strategy = "Exclusive"
	StrategyTimeSlicing Strategy = "TimeSlicing"
	StrategyMPS         Strategy = "MPS"
	StrategyMIG         Strategy = "MIG"
)

// Sharing says how GPUs are shared: a strategy, and exactly the member that belongs to it. replicas, wherever they stand, are how many times
// what they stand at is advertised; advertise says how.
//
// +kubebuilder:validation:XValidation:rule="has(self.timeSlicing) == (self.strategy == 'TimeSlicing')",message="timeSlicing must be set exactly when strategy is TimeSlicing"
// +kubebuilder:validation:XValidation:rule="has(self.mps) == (self.strategy == 'MPS')",message="mps must be set exactly when strategy is MPS"
// +kubebuilder:validation:XValidation:rule="has(self.mig) == (self.strategy == 'MIG')",message="mig must be set exactly when strategy is MIG"
// +kubebuilder:validation:XValidation:rule="!has(self.advertise) || self.strategy in ['TimeSlicing', 'MPS'] || (self.strategy == 'MIG' && has(self.mig) && (has(self.mig.wholeGPUs) || self.mig.layouts.exists(l, has(l.replicas) || (has(l.instances) && l.instances.exists(i, has(i.replicas))))))",message="nothing has replicas, so there is nothing to say of them: remove advertise",fieldPath=".advertise"
// +kubebuilder:validation:XValidation:rule="!has(self.advertise) || self.strategy != 'MPS' || !has(self.advertise.failRequestsGreaterThanOne) || self.advertise.failRequestsGreaterThanOne",message="under MPS NVIDIA's device plugin always refuses a container that asks for more than one replica: remove failRequestsGreaterThanOne",fieldPath=".advertise"
type Sharing struct {
	// strategy is how the GPUs are shared. Exclusive: one container has a whole GPU. TimeSlicing: containers take turns
	// on a GPU, without any isolation of memory or faults. MPS: containers run at the same time on a GPU, each with a
	// limit of memory and threads, without isolation of faults. MIG: the GPU is partitioned in hardware into instances
	// that are isolated from each other.
	// +required
	Strategy Strategy `json:"strategy,omitempty"`

	// timeSlicing is how a GPU is time-sliced; set exactly when strategy is TimeSlicing.
	// +optional
	TimeSlicing *TimeSlicing `json:"timeSlicing,omitempty"`

	// mps is how a GPU is shared through NVIDIA's Multi-Process Service; set exactly when strategy is MPS.
	// +optional
	MPS *MPS `json:"mps,omitempty"`

	// mig is how a GPU is partitioned into MIG instances; set exactly when strategy is MIG.
	// +optional
	MIG *MIG `json:"mig,omitempty"`

	// advertise is how everything that has replicas is advertised on a node: GPUs under TimeSlicing and MPS, MIG instances, and the whole
	// GPUs beside them. Absent: as the defaults of its fields say.
	// +optional
	Advertise *Advertise `json:"advertise,omitempty"`
}

// RefusesMoreThanOne reports whether NVIDIA's device plugin refuses containers that ask for more than one of a resource
// that has replicas. Under MPS its versions up to v0.19 always do (internal/rm/rm.go, ValidateRequest).
func (s *Sharing) RefusesMoreThanOne() bool {
	served := s.Advertise != nil && s.Advertise.FailRequestsGreaterThanOne != nil && !*s.Advertise.FailRequestsGreaterThanOne
	return s.MPS != nil || !served && (s.TimeSlicing != nil || s.MIG != nil)
}

// Advertise is how NVIDIA's device plugin advertises what has replicas.
// +kubebuilder:validation:MinProperties=1
type Advertise struct {
	// renameByDefault appends .shared to the name of each resource that has replicas, such as nvidia.com/gpu.shared and
	// nvidia.com/mig-1g.5gb.shared, so that pods that ask for a whole GPU or instance do not get a shared one. Pods then
	// have to ask for the new name. Default: false, as NVIDIA's.
	// +optional
	RenameByDefault *bool `json:"renameByDefault,omitempty"`

	// failRequestsGreaterThanOne refuses a container that asks for more than one replica, because two replicas are not
	// twice the GPU or instance and may be the same one. Default: true, as NVIDIA advises; NVIDIA's is false. Under MPS it is always so.
	// +optional
	FailRequestsGreaterThanOne *bool `json:"failRequestsGreaterThanOne,omitempty"`
}

// TimeSlicing is NVIDIA's sharing.timeSlicing for the resource nvidia.com/gpu.
type TimeSlicing struct {
	// replicas is how many times each GPU is advertised, from 2 to 256. Replicas give no isolation: every container sees the
	// whole memory of the GPU, unless memory.limit is Enforce.
	// +required
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=256
	Replicas int32 `json:"replicas,omitempty"`

	// interval is how long a process keeps a GPU before another one takes its turn, in the driver's words (nvidia-smi compute-policy
	// --set-timeslice). NVIDIA publishes no durations. A short interval answers sooner, a long one
	// switches less often. The agent sets it on each selected GPU, again after a reset or a reboot, and restores the former one in the
	// end. Running pods are not disturbed. On nodes of NVIDIA's DRA driver the config of the DeviceClass that serves nvidia.com/gpu must have
	// it: the driver sets it, and the operator compares. Absent: the interval is neither read nor changed.
	// +optional
	Interval TimeSliceInterval `json:"interval,omitempty"`

	// memory says what of a GPU's memory each container is meant to use, and watches over it. Absent: nothing does. The agents then
	// measure only while they are read, or at their sampling interval.
	// +optional
	Memory *TimeSlicedMemory `json:"memory,omitempty"`
}

// TimeSliceInterval is how long a process keeps a GPU before another one takes its turn.
// +kubebuilder:validation:Enum=Default;Short;Medium;Long
type TimeSliceInterval string

// The intervals, as NVIDIA's DRA driver names them. nvidia-smi numbers them from 0.
const (
	TimeSliceIntervalDefault TimeSliceInterval = "Default"
	TimeSliceIntervalShort   TimeSliceInterval = "Short"
	TimeSliceIntervalMedium  TimeSliceInterval = "Medium"
	TimeSliceIntervalLong    TimeSliceInterval = "Long"
)

// MemoryGuardMode decides what happens to a container that uses more than its share of the memory of a GPU that is almost full.
// +kubebuilder:validation:Enum=Report;Evict
type MemoryGuardMode string

// The modes of the memory guard.
const (
	MemoryGuardReport MemoryGuardMode = "Report"
	MemoryGuardEvict  MemoryGuardMode = "Evict"
)

// MemoryLimitMode is whether NVIDIA's driver keeps pods to their share of the memory of time-sliced GPUs.
// +kubebuilder:validation:Enum=None;Report;Enforce
type MemoryLimitMode string

// The modes of the driver's limit.
const (
	MemoryLimitNone    MemoryLimitMode = "None"
	MemoryLimitReport  MemoryLimitMode = "Report"
	MemoryLimitEnforce MemoryLimitMode = "Enforce"
)

// TimeSlicedMemory says what of the memory of a time-sliced GPU each container is meant to use, watches over it, and has the driver limit it.
//
// +kubebuilder:validation:XValidation:rule="has(self.guard) || has(self.limit)",message="nothing watches or limits the memory: add guard or limit"
type TimeSlicedMemory struct {
	// perReplica is the share of a container: the GPU memory that it is meant to use, such as 4Gi: a whole number of MiB, less
	// than the GPU has. A container with two replicas has twice as much. Default: the GPU's memory, for limit less 4 %, divided by replicas.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && [quantity(string(self))].all(q, q.isGreaterThan(quantity('0')) && q.isLessThan(quantity('1Ti')) && [int(q.asApproximateFloat() + 0.5)].all(i, i % 1048576 == 0 && q.sub(i).compareTo(quantity('0')) == 0))",message="must be a whole number of MiB, less than 1Ti, such as 512Mi, 4Gi or 1.5Gi"
	PerReplica *resource.Quantity `json:"perReplica,omitempty"`

	// guard watches the memory of the GPUs and reports containers that use more than their share while a GPU is almost full,
	// or evicts their pods. It isolates nothing: an allocation can fail before the guard acts. If you need isolation, use MIG.
	// Absent: nothing watches.
	// +optional
	Guard MemoryGuard `json:"guard,omitzero"`

	// limit is whether the driver refuses a pod more than its share: perReplica times its replicas on a GPU, for all its containers
	// together; 4 % of the GPU's memory are the driver's. An allocation beyond it fails with
	// CUDA_ERROR_OUT_OF_MEMORY. Managed memory, imported memory and privileged pods escape. None: no limit, and one of the operator is
	// removed. Report: status.memoryLimits of the GPUNodes says what would be limited, and why not; nothing is changed. Enforce: the agents set
	// it. It needs driver 615, cgroup v2 and the feature gate MemoryLimits (alpha); it is not tested on a GPU. Absent: None.
	// +optional
	Limit MemoryLimitMode `json:"limit,omitempty"`
}

// Guarded reports whether a guard watches the memory.
func (m *TimeSlicedMemory) Guarded() bool { return m != nil && m.Guard != (MemoryGuard{}) }

// Limited is the mode of the driver's limit.
func (m *TimeSlicedMemory) Limited() MemoryLimitMode {
	if m == nil || m.Limit == "" {
		return MemoryLimitNone
	}
	return m.Limit
}

// MemoryGuard acts on a container that uses more than its share of a time-sliced GPU that is almost full.
type MemoryGuard struct {
	// mode is what the guard does. Report: an Event on the pod and the policy, the condition MemoryPressure of the policy, and a metric. Evict: the same, and the
	// controller evicts the pod of the container that exceeds its share the most, of those that may be evicted, through the Eviction API, so
	// PodDisruptionBudgets hold; it waits for one before it that ends within two minutes. It evicts no pod of a DaemonSet and no static pod,
	// at most one pod for a GPU in a minute, and no pod twice in ten minutes.
	// Default: Report.
	// +optional
	// +kubebuilder:default=Report
	Mode MemoryGuardMode `json:"mode,omitempty"`

	// freeBelowPercent is when a GPU counts as almost full: its free memory is less than that part of its memory, from 1 to 50. Default: 5.
	// +optional
	// +kubebuilder:default=5
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=50
	FreeBelowPercent int32 `json:"freeBelowPercent,omitempty"`

	// gracePeriodSeconds is how long a GPU must be almost full, without a break, before the guard acts: from 10 to 3600. Default: 60.
	// +optional
	// +kubebuilder:default=60
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=3600
	GracePeriodSeconds int32 `json:"gracePeriodSeconds,omitempty"`
}

// MPS is NVIDIA's sharing.mps for the resource nvidia.com/gpu, and the limits of its control daemon, for clients that connect later.
type MPS struct {
	// replicas is how many times each GPU is advertised, from 2 to 48, the most clients of a GPU under MPS. Below compute capability 7.5
	// these are 16: with more the node reports MPSClientLimitExceeded.
	// +required
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=48
	Replicas int32 `json:"replicas,omitempty"`

	// activeThreadPercentage is the share of the GPU's threads that one client may use, in percent. Default: 100 divided
	// by replicas, like NVIDIA's default.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	ActiveThreadPercentage *int32 `json:"activeThreadPercentage,omitempty"`

	// pinnedMemoryLimit is the GPU memory that one client may allocate: a whole number of MiB, less than 1Ti, such as 4Gi.
	// Default: the GPU's memory divided by replicas, like NVIDIA's default. GPUs that do not report their memory, such as
	// GB10, have no default limit.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="isQuantity(string(self)) && [quantity(string(self))].all(q, q.isGreaterThan(quantity('0')) && q.isLessThan(quantity('1Ti')) && [int(q.asApproximateFloat() + 0.5)].all(i, i % 1048576 == 0 && q.sub(i).compareTo(quantity('0')) == 0))",message="must be a whole number of MiB, less than 1Ti, such as 512Mi, 4Gi or 1.5Gi"
	PinnedMemoryLimit *resource.Quantity `json:"pinnedMemoryLimit,omitempty"`

	// multiUser lets pods of different user IDs use a GPU at the same time. Default: false, like NVIDIA's.
	//
	// If it is false, MPS serves one user ID at a time on a node. Pods of another one wait in CUDA's initialization, without an error,
	// until no pod of the first uses the GPUs: MPSUserWaiting in status.pending. On OpenShift each namespace has its own user IDs, so only
	// pods of one namespace can share a GPU.
	//
	// If it is true, one MPS server, which runs as root, serves all users (nvidia-cuda-mps-control -multiuser-server). A fatal GPU fault of
	// one pod then ends the GPU work of the pods of all users, and a fault in the server is one in a root process. It needs compute
	// capability 7.0 or newer (Volta). A change of this field drains the node, since the MPS control daemon restarts.
	// +optional
	// +kubebuilder:default=false
	MultiUser *bool `json:"multiUser,omitempty"`
}

// MIGResourceNames is how NVIDIA's device plugin names MIG instances.
// +kubebuilder:validation:Enum=PerProfile;Uniform
type MIGResourceNames string

// The ways to name MIG instances.
const (
	// MIGResourceNamesPerProfile is NVIDIA's strategy mixed.
	MIGResourceNamesPerProfile MIGResourceNames = "PerProfile"
	// MIGResourceNamesUniform is NVIDIA's strategy single.
	MIGResourceNamesUniform MIGResourceNames = "Uniform"
)

// MIGActuator names the program that partitions the GPUs.
// +kubebuilder:validation:Enum=Agent;MIGManager
type MIGActuator string

// The MIG actuators.
const (
	MIGActuatorAgent      MIGActuator = "Agent"
	MIGActuatorMIGManager MIGActuator = "MIGManager"
)

// MIG says which instances the GPUs are partitioned into.
//
// +kubebuilder:validation:XValidation:rule="!has(self.wholeGPUs) || self.resourceNames != 'Uniform'",message="wholeGPUs needs resourceNames PerProfile: under Uniform no GPU of a node stays whole",fieldPath=".wholeGPUs"
// +kubebuilder:validation:XValidation:rule="!has(self.wholeGPUs) || self.layouts.all(l, has(l.gpus))",message="wholeGPUs needs GPUs that stay whole: each layout must name its GPUs in gpus",fieldPath=".wholeGPUs"
// +kubebuilder:validation:XValidation:rule="self.resourceNames != 'Uniform' || self.layouts.all(l, !has(l.instances) || l.instances.size() <= 1)",message="resourceNames Uniform advertises one kind of instance as nvidia.com/gpu: each layout must have one profile only; use PerProfile for different profiles",fieldPath=".layouts"
// +kubebuilder:validation:XValidation:rule="[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]].all(n, n.all(j, j >= self.layouts.size() || n.all(i, i >= j || !(!has(self.layouts[i].gpus) || ((!has(self.layouts[i].gpus.products) || '*' in self.layouts[i].gpus.products || (has(self.layouts[j].gpus) && has(self.layouts[j].gpus.products) && self.layouts[j].gpus.products.all(p, self.layouts[i].gpus.products.exists(q, p == q || (q.endsWith('*') && p.startsWith(q.substring(0, q.size() - 1))))))) && (!has(self.layouts[i].gpus.indexes) || (has(self.layouts[j].gpus) && has(self.layouts[j].gpus.indexes) && self.layouts[j].gpus.indexes.exists(x, x in self.layouts[i].gpus.indexes))))))))",message="a layout is for GPUs that an earlier one takes: no index may be in two layouts for the same products, a product must come before a glob for it, and a layout without gpus must be the last",fieldPath=".layouts"
// +kubebuilder:validation:XValidation:rule="self.resourceNames != 'Uniform' || self.layouts.all(a, (has(a.gpus) && has(a.gpus.products)) || has(a.fill) == has(a.instances) || self.layouts.all(b, (has(b.gpus) && has(b.gpus.products)) || has(b.fill) == has(b.instances) || (has(a.fill) ? a.fill : a.instances[0].profile) == (has(b.fill) ? b.fill : b.instances[0].profile)))",message="resourceNames Uniform needs one profile on all GPUs of a node: layouts that differ by indexes alone must have the same one; use PerProfile for different profiles",fieldPath=".layouts"
// +kubebuilder:validation:XValidation:rule="self.layouts.all(a, (has(a.gpus) && has(a.gpus.products)) || has(a.fill) == has(a.instances) || self.layouts.all(b, (has(b.gpus) && has(b.gpus.products)) || has(b.fill) == has(b.instances) || (has(a.fill) ? (!a.fill.contains('.') || (has(b.fill) ? a.fill != b.fill || (has(a.replicas) ? a.replicas : 1) == (has(b.replicas) ? b.replicas : 1) : b.instances.all(y, a.fill != y.profile || (has(a.replicas) ? a.replicas : 1) == (has(y.replicas) ? y.replicas : 1)))) : has(b.fill) || a.instances.all(x, !x.profile.contains('.') || b.instances.all(y, x.profile != y.profile || (has(x.replicas) ? x.replicas : 1) == (has(y.replicas) ? y.replicas : 1))))))",message="a profile must have the same replicas in all layouts for one node: NVIDIA's device plugin has one number for a resource of a node",fieldPath=".layouts"
// +kubebuilder:validation:XValidation:rule="self.layouts.all(l, !has(l.onDemand)) || (self.resourceNames == 'PerProfile' && self.actuator == 'Agent')",message="onDemand needs resourceNames PerProfile and actuator Agent",fieldPath=".layouts"
// +kubebuilder:validation:XValidation:rule="self.layouts.filter(l, has(l.onDemand)).size() <= 1",message="one layout at most may have onDemand; give other GPUs a policy of their own",fieldPath=".layouts"
type MIG struct {
	// resourceNames is how NVIDIA's device plugin advertises the instances. PerProfile, NVIDIA's strategy mixed: each profile as
	// nvidia.com/mig-<profile>, GPUs without MIG as nvidia.com/gpu. Uniform, NVIDIA's strategy single: all instances as nvidia.com/gpu;
	// every GPU of a node must then have the same profile. Default: PerProfile.
	// +optional
	// +kubebuilder:default=PerProfile
	ResourceNames MIGResourceNames `json:"resourceNames,omitempty"`

	// actuator is who partitions the GPUs. Agent: this operator's agent, which keeps every instance that stays and disturbs
	// no other GPU. MIGManager: NVIDIA's mig-manager, driven through its ConfigMap and nvidia.com/mig.config; it destroys
	// all instances of every GPU that it changes, so each of those must be idle, and reboots by its own setting. Default: Agent.
	// +optional
	// +kubebuilder:default=Agent
	Actuator MIGActuator `json:"actuator,omitempty"`

	// layouts are tried in order for each GPU that the policy selects: it takes the first that matches it. One behind another that takes
	// its GPUs is refused. A GPU that no layout matches stays whole; wholeGPUs shares it.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Layouts []MIGLayout `json:"layouts,omitempty"`

	// wholeGPUs is how the GPUs are shared that no layout is for. It needs resourceNames PerProfile, and gpus in each layout. Absent: not;
	// each is advertised once, as nvidia.com/gpu.
	// +optional
	WholeGPUs *MIGWholeGPUs `json:"wholeGPUs,omitempty"`
}

// MIGWholeGPUs is how the GPUs are shared that stay whole beside MIG instances.
type MIGWholeGPUs struct {
	// replicas is how many times each of these GPUs is advertised, from 2 to 256. They are time-sliced. Replicas give no isolation: every
	// container sees the whole memory of the GPU.
	// +required
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=256
	Replicas int32 `json:"replicas,omitempty"`
}

// MIGLayout says which instances one GPU is partitioned into.
//
// +kubebuilder:validation:XValidation:rule="!has(self.onDemand) || (!has(self.replicas) && (!has(self.instances) || self.instances.all(i, !has(i.replicas))))",message="onDemand and replicas cannot be combined in one layout",fieldPath=".onDemand"
// +kubebuilder:validation:XValidation:rule="has(self.instances) != has(self.fill)",message="exactly one of instances and fill must be set"
// +kubebuilder:validation:XValidation:rule="!has(self.replicas) || has(self.fill)",message="replicas of a layout are those of fill: give each of instances its own",fieldPath=".replicas"
// +kubebuilder:validation:XValidation:rule="!has(self.instances) || (self.instances.map(i, i.profile.matches('^[1-7]') ? i.count * int(i.profile.substring(0, 1)) : 0).sum() <= 7 && self.instances.map(i, i.profile.matches('^[1-7]') ? i.count * (i.profile.startsWith('3g') ? 4 : int(i.profile.substring(0, 1))) : 0).sum() <= 8)",message="are more instances than any GPU holds: it has at most 7 compute slices, and 8 memory slices, of which 3g and 4g take 4",fieldPath=".instances"
// +kubebuilder:validation:XValidation:rule="!has(self.instances) || self.instances.map(i, i.profile.contains('+me') ? i.count : 0).sum() <= 1",message="one instance of a GPU at most has media extensions (+me, +me.all)",fieldPath=".instances"
type MIGLayout struct {
	// gpus says which GPUs the layout is for. Absent: every GPU that the policy selects.
	// +optional
	GPUs *GPUMatch `json:"gpus,omitempty"`

	// instances lists the instances of a GPU, by profile. Their placement on the GPU is found by the operator, and
	// instances that are there already are kept.
	// +optional
	// +listType=map
	// +listMapKey=profile
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Instances []MIGInstances `json:"instances,omitempty"`

	// fill partitions the GPU into as many instances as fit of one profile: 1g.5gb, or 1g for the smallest of one slice on each GPU.
	// +optional
	Fill MIGProfile `json:"fill,omitempty"`

	// replicas is how many times each instance of fill is advertised, from 2 to 256, without isolation; instances have their own. Absent: once.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=256
	Replicas int32 `json:"replicas,omitempty"`

	// onDemand says which instances the GPUs of the layout may have instead, for pods that wait for some. One layout of a policy may have
	// it, without replicas, with resourceNames PerProfile and actuator Agent. It has no effect without the controller's feature gate
	// OnDemandMIG (alpha). Absent: nothing looks at pods that wait.
	// +optional
	OnDemand *MIGOnDemand `json:"onDemand,omitempty"`
}

// MIGProfile is the name of a MIG profile: exact, as nvidia-smi lists it (1g.10gb, 1g.10gb+me, 1g.24gb-me), or by
// compute slices alone (3g), which is then the smallest plain profile of that many slices on each GPU.
//
// +kubebuilder:validation:MinLength=2
// +kubebuilder:validation:MaxLength=24
// +kubebuilder:validation:XValidation:rule="!self.matches('^[0-9]+c[.]')",message="a compute instance smaller than its GPU instance cannot be advertised by NVIDIA's device plugin; name the GPU instance profile, such as 3g.20gb"
// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]+c[.]') || self.matches('^[1-467]g([.][1-9][0-9]{0,3}gb)?([+](me|gfx|me[.]all)|-me)?$')",message="must be a MIG profile such as 1g.10gb, 1g.10gb+me or 1g.24gb-me, or a number of slices: 1g, 2g, 3g, 4g, 6g or 7g"
type MIGProfile string

// MIGInstances asks for a number of instances of one profile.
type MIGInstances struct {
	// profile of the instances: exact, such as 1g.5gb, or by slices, such as 1g.
	// +required
	Profile MIGProfile `json:"profile,omitempty"`

	// count is how many instances of that profile a GPU gets.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=7
	Count int32 `json:"count,omitempty"`

	// replicas is how many times each of these instances is advertised, from 2 to 256. Replicas of an instance are not isolated from each
	// other; status shows them as oversubscription. Absent: once.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=256
	Replicas int32 `json:"replicas,omitempty"`
}

// GPUMatch selects GPUs of a node. All given members must match; an absent one matches every GPU.
// +kubebuilder:validation:MinProperties=1
type GPUMatch struct {
	// products are names or glob patterns of the GPU's product as the node's agent reports it, with dashes for spaces:
	// NVIDIA-A100-SXM4-40GB, NVIDIA-A100-*. The suffixes -SHARED and -MIG-… of NVIDIA's label are never part of it.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:XValidation:rule=`!self.matches(r'[^\w*?.-]')`,message="must be a product with dashes for spaces, such as NVIDIA-A100-SXM4-40GB, or a glob with * and ?"
	// +kubebuilder:validation:items:XValidation:rule="!self.matches('-SHARED$|-MIG-[0-9]g')",message="must be the product without the suffixes -SHARED and -MIG-… of NVIDIA's label"
	Products []string `json:"products,omitempty"`

	// indexes are positions of GPUs in the node as nvidia-smi counts them, from 0 to 63. With products, both must match.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Minimum=0
	// +kubebuilder:validation:items:Maximum=63
	Indexes []int32 `json:"indexes,omitempty"`
}
