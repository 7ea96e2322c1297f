// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// GPUNode is what the operator knows of one node with GPUs. It has the node's name and goes with the node. The controller alone
// writes its spec, and only when it is safe to apply at once. In its status the controller writes rollout, observedGeneration, demand,
// memoryEvictions and the conditions Ready, Reconciling and Stalled; the node's agent writes everything else.
//
// +genclient
// +genclient:nonNamespaced
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=gpun,categories=gpusharing
// +kubebuilder:printcolumn:name="Policy",type=string,JSONPath=`.spec.policyName`
// +kubebuilder:printcolumn:name="Strategy",type=string,JSONPath=`.spec.strategy`
// +kubebuilder:printcolumn:name="GPUs",type=string,JSONPath=`.status.gpus`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
type GPUNode struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is the desired state of each GPU of the node, written by the controller.
	// +optional
	Spec GPUNodeSpec `json:"spec,omitzero"`

	// status is the observed state of the node. Ready, Reconciling and Stalled are Unknown until the controller has reported.
	// +optional
	// +kubebuilder:default={observedGeneration: 0, conditions: {{type: "Ready", status: "Unknown", reason: "AwaitingReport", message: "The controller has not reported yet; if that lasts, look at the pod with app.kubernetes.io/name=gpu-sharing-controller and at the agent, app.kubernetes.io/name=gpu-sharing-agent, on the node", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Reconciling", status: "Unknown", reason: "AwaitingReport", message: "The controller has not reported yet", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Stalled", status: "Unknown", reason: "AwaitingReport", message: "The controller has not reported yet", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status GPUNodeStatus `json:"status,omitzero"`
}

// GPUNodeSpec is the desired state of each GPU of the node. It has one writer, so that managed fields name it once.
//
// +structType=atomic
type GPUNodeSpec struct {
	// policyName is the name of the GPUSharingPolicy that asked for devices; empty if none did. status.rollout.policyName governs now.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PolicyName string `json:"policyName,omitempty"`

	// strategy is the strategy of the policy that asked for devices. Absent if none did.
	// +optional
	Strategy Strategy `json:"strategy,omitempty"`

	// configName is the name of the device-plugin config that belongs to devices, a key of the operator's ConfigMap. The
	// node's label selects it once the agent has applied devices. Where NVIDIA's DRA driver serves the node, it is dra:<hash> and only names
	// what is asked for.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	ConfigName string `json:"configName,omitempty"`

	// devices are the GPUs to change, each with its desired state. A GPU that is not listed is left as it is.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Devices []DeviceSpec `json:"devices,omitempty"`

	// numbering are the GPUs by the indexes that they had when gpuSelector.indexes of the policy was resolved on this node. The
	// operator keeps it while a GPU is missing, because the driver then counts the others anew. Absent if the policy names no
	// index.
	// +optional
	Numbering *Numbering `json:"numbering,omitempty"`

	// migActuator is who partitions the GPUs. MIGManager: NVIDIA's mig-manager; the agent then changes neither MIG mode nor
	// instances, and reports. Absent: the agent.
	// +optional
	MIGActuator MIGActuator `json:"migActuator,omitempty"`

	// migConfigName is the config that NVIDIA's mig-manager is to apply now. As long as it is set the agent leaves the
	// driver closed, since mig-manager may reset GPUs, for which nobody may have it open.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	MIGConfigName string `json:"migConfigName,omitempty"`

	// changeTime is when the controller asked the agent for this desired state, which makes two requests for the same state
	// different. The deadline for reaching it counts from it, and status.config names it.
	// +optional
	ChangeTime metav1.Time `json:"changeTime,omitzero"`

	// baseline is the state of the node before the operator first changed it, which is restored when no policy
	// governs it any more. It is in spec because it must survive the loss of status, as when the GPUNode is restored from a backup. The
	// annotation gpusharing.io/baseline of the Node holds a copy.
	// +optional
	Baseline *Baseline `json:"baseline,omitempty"`

	// release is how the baseline is restored, as the policy that governs the node, or governed it last, says.
	// +optional
	Release *Release `json:"release,omitempty"`

	// reboot lets the agent reboot the node once, because a GPU takes the desired MIG mode only so. Absent: the node must not
	// be rebooted.
	// +optional
	Reboot *RebootPermission `json:"reboot,omitempty"`

	// memory is sharing.timeSlicing.memory of the policy that governs the node. Absent: the agent measures only while it is read.
	// +optional
	Memory *TimeSlicedMemory `json:"memory,omitempty"`

	// memoryOwner is the program beside the operator that limits GPU memory on the node, such as gpu-fractioning: the agent then sets and
	// removes no limit. Absent: none is known, or no policy asks for limits.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	MemoryOwner string `json:"memoryOwner,omitempty"`

	// onDemand is the mode of MIG on demand of the policy that governs the node: the agent then reports lastHeldTime of instances. Absent: the
	// policy has none.
	// +optional
	OnDemand OnDemandMode `json:"onDemand,omitempty"`

	// adminClaims are the ResourceClaims, as namespace/name, by which pods of the node have devices of NVIDIA's DRA driver with adminAccess
	// and no others, such as monitors. Their containers block no change.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=317
	AdminClaims []string `json:"adminClaims,omitempty"`
}

// Numbering are the GPUs of a node by index.
type Numbering struct {
	// indexes are the indexes that the policy names. If it names others, they are resolved anew.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=512
	Indexes []int32 `json:"indexes,omitempty"`
	// uuids are the GPUs of the node: the first had index 0.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=96
	UUIDs []string `json:"uuids,omitempty"`
}

// RebootPermission lets the agent end one boot of its node. A second boot it does not end, so that no desired state reboots a node
// twice.
type RebootPermission struct {
	// hash names the desired state that needs the reboot: a hash of its device-plugin config and its devices.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Hash string `json:"hash,omitempty"`
	// bootID is the boot that may be ended, as the agent reported it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	BootID string `json:"bootID,omitempty"`
}

// FailedChange is a desired state that a node could not reach, and why.
type FailedChange struct {
	// hash names the desired state: a hash of its device-plugin config and its devices.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Hash string `json:"hash,omitempty"`
	// reason is the same word that the conditions use.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// message says what failed, and where.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
	// attempt tells one attempt from the next: a hash of the UID and generation of the policy, and of the annotation
	// gpusharing.io/retry. With another one the desired state is tried again.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Attempt string `json:"attempt,omitempty"`
	// time is when the change failed. A later spec.changeTime for the same desired state is another attempt.
	// +optional
	Time metav1.Time `json:"time,omitzero"`
}

// Release is how a node goes back to its baseline when no policy governs it any more.
type Release struct {
	// releasePolicy decides whether the baseline is restored.
	// +optional
	ReleasePolicy ReleasePolicy `json:"releasePolicy,omitempty"`
	// drain decides what happens to pods that block the release.
	// +optional
	Drain Drain `json:"drain,omitzero"`
	// maxUnavailable is how many nodes of a deleted policy may be restored at the same time, as a number or a percentage of
	// those that are. If its nodes differ in that, the smallest counts.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:MaxLength=4
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
	// reboot says whether the node may be rebooted where a GPU takes its former MIG mode only so.
	// +optional
	Reboot RebootMode `json:"reboot,omitempty"`
	// policyName is the policy that governs the node or governed it last. The nodes that it releases share its maxUnavailable, with
	// those that it governs and also once it is deleted.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PolicyName string `json:"policyName,omitempty"`
}

// NodeSharing is how the GPUs of a node are shared, and the device-plugin configuration that belongs to it.
type NodeSharing struct {
	// policyName is the name of the policy that asked for it.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PolicyName string `json:"policyName,omitempty"`
	// strategy is the strategy of that policy.
	// +optional
	Strategy Strategy `json:"strategy,omitempty"`
	// configName is the name of the device-plugin config.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	ConfigName string `json:"configName,omitempty"`
	// devices are the GPUs and how each is shared.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Devices []DeviceSpec `json:"devices,omitempty"`
}

// Baseline is the state of a node before the operator first changed it.
type Baseline struct {
	// labels are the node's labels that the operator writes, with the values that they had; one that was absent is not
	// listed.
	// +optional
	// +kubebuilder:validation:MaxProperties=16
	Labels map[string]string `json:"labels,omitempty"`

	// devices are the GPUs and how each was shared, also those that are gone, of which the newest are kept.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Devices []DeviceSpec `json:"devices,omitempty"`
}

// DeviceSpec is the desired state of one GPU.
type DeviceSpec struct {
	// uuid of the GPU, as NVML reports it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	UUID string `json:"uuid,omitempty"`

	// sharing is how the GPU must be, or was, shared.
	// +optional
	Sharing DeviceSharing `json:"sharing,omitzero"`
}

// LicenseState is whether a vGPU has its license.
// +kubebuilder:validation:Enum=Licensed;Unlicensed
type LicenseState string

// The states of a license.
const (
	LicenseStateLicensed   LicenseState = "Licensed"
	LicenseStateUnlicensed LicenseState = "Unlicensed"
)

// MIGMode says whether a GPU is in MIG mode.
// +kubebuilder:validation:Enum=Enabled;Disabled
type MIGMode string

// The MIG modes.
const (
	MIGModeEnabled  MIGMode = "Enabled"
	MIGModeDisabled MIGMode = "Disabled"
)

// DeviceSharing is how one GPU is, or must be, shared: the normal form to which every strategy reduces. Of time-slicing it has the interval
// alone, for nothing else changes on the GPU: NVIDIA's device plugin advertises it more than once.
//
// +kubebuilder:validation:XValidation:rule="self.migMode == 'Enabled' || !has(self.instances)",message="instances need MIG mode"
// +kubebuilder:validation:XValidation:rule="self.migMode == 'Disabled' || !has(self.mps)",message="MPS is not supported on GPUs in MIG mode"
type DeviceSharing struct {
	// migMode says whether the GPU is in MIG mode.
	// +required
	MIGMode MIGMode `json:"migMode,omitempty"`

	// instances are the MIG instances of the GPU, by profile, by their exact names on this GPU.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Instances []InstanceCount `json:"instances,omitempty"`

	// mps is the MPS control daemon that serves the GPU; absent if none does.
	// +optional
	MPS *MPSDaemon `json:"mps,omitempty"`

	// timeSliceInterval is how long a process keeps the GPU before another one takes its turn. Absent: it is not to be changed or, in
	// status, was not read. In MIG mode it does not apply.
	// +optional
	TimeSliceInterval TimeSliceInterval `json:"timeSliceInterval,omitempty"`
}

// InstanceCount is a number of MIG instances of one profile.
type InstanceCount struct {
	// profile is the exact name, such as 1g.10gb.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=32
	Profile string `json:"profile,omitempty"`
	// count is the number of instances.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16
	Count int32 `json:"count,omitempty"`
}

// MPSDaemonOwner says who runs the MPS control daemon of a GPU.
// +kubebuilder:validation:Enum=GPUSharing;NVIDIA
type MPSDaemonOwner string

// The owners of an MPS control daemon.
const (
	// MPSDaemonOwnerGPUSharing is the MPS pod of this operator.
	MPSDaemonOwnerGPUSharing MPSDaemonOwner = "GPUSharing"
	// MPSDaemonOwnerNVIDIA is NVIDIA's own MPS DaemonSet.
	MPSDaemonOwnerNVIDIA MPSDaemonOwner = "NVIDIA"
)

// MPSDaemon is the MPS control daemon that serves a GPU. GPUs with the same resource are served by one daemon.
type MPSDaemon struct {
	// resourceName is the extended resource whose clients the daemon serves. It names the daemon's pipe directory.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ResourceName string `json:"resourceName,omitempty"`
	// owner is who runs the daemon.
	// +required
	Owner MPSDaemonOwner `json:"owner,omitempty"`
	// activeThreadPercentage is the share of the GPU's threads that one client may use, in percent.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	ActiveThreadPercentage int32 `json:"activeThreadPercentage,omitempty"`
	// pinnedMemoryLimit is the memory of this GPU that one client may allocate, a whole number of MiB. Absent: no limit, as on
	// a GPU whose memory NVML does not report.
	// +optional
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="quantity(string(self)).isGreaterThan(quantity('0')) && quantity(string(self)).isInteger() && quantity(string(self)).asInteger() % 1048576 == 0",message="must be a whole number of MiB, such as 512Mi or 4Gi"
	PinnedMemoryLimit *resource.Quantity `json:"pinnedMemoryLimit,omitempty"`
	// multiUser is true if one MPS server serves the clients of all user IDs.
	// +optional
	MultiUser bool `json:"multiUser,omitempty"`
}

// MPSStatus is an MPS control daemon of this operator, as the MPS pod last saw it in use.
type MPSStatus struct {
	// resourceName is the extended resource whose clients the daemon serves.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ResourceName string `json:"resourceName,omitempty"`
	// user is the user ID whose clients the MPS server serves now. Absent if no server runs, or if it serves all users.
	// +optional
	// +kubebuilder:validation:Minimum=0
	User *int64 `json:"user,omitempty"`
	// clients is the number of connected clients.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Clients int32 `json:"clients,omitempty"`
	// outdatedClients is the number of clients that connected before the limits last changed. They keep the limits from
	// before until they end.
	// +optional
	// +kubebuilder:validation:Minimum=0
	OutdatedClients int32 `json:"outdatedClients,omitempty"`
	// outdatedPodUIDs are the UIDs of the pods with outdated clients: the first 64.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=63
	OutdatedPodUIDs []string `json:"outdatedPodUIDs,omitempty"`
	// waitingPods are the pods that run as another user ID than the one that is served, so that their CUDA programs wait:
	// the first 64.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	WaitingPods []MPSWaitingPod `json:"waitingPods,omitempty"`
	// unreachable reports that another program replaced the shared memory of MPS on the node, so that new clients cannot reach
	// the daemon. The MPS pod starts the daemon again when no client is connected.
	// +optional
	Unreachable bool `json:"unreachable,omitempty"`
}

// MPSWaitingPod is a pod that waits for an MPS server of its user.
type MPSWaitingPod struct {
	// uid of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	UID string `json:"uid,omitempty"`
	// user is the user ID of its processes: the lowest if they have several.
	// +optional
	// +kubebuilder:validation:Minimum=0
	User int64 `json:"user"`
}

// GPUNodeStatus is the observed state of a node.
type GPUNodeStatus struct {
	// observedGeneration is the generation of the GPUNode that Ready, Reconciling and Stalled are about. 0: the controller has not
	// reported yet.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions of the controller: Ready (the node advertises what is desired), Reconciling (a change is at work, or waits for
	// something that ends) and Stalled (nothing more happens until something is changed), of which one is True or all are Unknown. Conditions of
	// the agent: Discovered (the GPUs were read), Applied (the GPUs match spec.devices) and, while they are True, RebootRequired,
	// ApplyStalled, MemoryGuarded (the agent measures for spec.memory.guard) and LicenseMissing (a vGPU lacks its license); MemoryLimited
	// (whether the driver keeps pods to spec.memory) while a limit is asked for, or set.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// rollout is how far the controller has brought the node to the desired state.
	// +optional
	Rollout RolloutStatus `json:"rollout,omitzero"`

	// demand are the GPUs that have, or are to have, other MIG instances than their layout says, because pods wait or waited for them (mode
	// Apply of onDemand).
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Demand []GPUDemand `json:"demand,omitempty"`

	// gpus sums up the GPUs of the node by product, such as 2× NVIDIA-A100-SXM4-40GB.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	GPUs string `json:"gpus,omitempty"`

	// driverVersion is the version of the NVIDIA driver.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	DriverVersion string `json:"driverVersion,omitempty"`

	// bootID is the boot of the node in which all this was observed.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	BootID string `json:"bootID,omitempty"`

	// canReboot is true if the agent may reboot the node (its flag --allow-reboot) and can (systemd runs the node).
	// +optional
	CanReboot bool `json:"canReboot,omitempty"`

	// config says which of NVIDIA's programs on the node have the config spec.configName before them.
	// +optional
	Config ConfigStatus `json:"config,omitzero"`

	// rebuildTimes are when, within the last hour, the agent made MIG instances again that another program had changed. It does so
	// three times in an hour.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	RebuildTimes []metav1.Time `json:"rebuildTimes,omitempty"`

	// mps are the MPS control daemons of this operator on the node, by resource.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	MPS []MPSStatus `json:"mps,omitempty"`

	// devices are the GPUs of the node.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Devices []DeviceStatus `json:"devices,omitempty"`

	// memoryPressure lists the GPUs that are almost full while a container uses more than its share, if spec.memory.guard asks: with mode Evict
	// several containers of each, the worst first. It is written when a GPU or its containers are others than before, and with mode Evict every minute.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=128
	MemoryPressure []MemoryPressure `json:"memoryPressure,omitempty"`

	// memoryEvictions are the pods that the controller evicted for the memory guard, as far as they limit further evictions: those of the
	// ten minutes before the last one.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	MemoryEvictions []MemoryEviction `json:"memoryEvictions,omitempty"`

	// memoryLimits is what the agent found and did about the limits that spec.memory.limit asks for, and about those that it has set and that
	// nothing asks for any more. Absent: neither. The condition MemoryLimited says whether they hold.
	// +optional
	MemoryLimits MemoryLimitsStatus `json:"memoryLimits,omitzero"`
}

// MemoryBackend is what the kernel module charges the GPU memory of pods with.
// +kubebuilder:validation:Enum=Dmem;Misc
type MemoryBackend string

// The back ends.
const (
	MemoryBackendDmem MemoryBackend = "Dmem" // a controller of Linux 6.14 and later
	MemoryBackendMisc MemoryBackend = "Misc" // a table of the driver
)

// MemoryLimitsStatus is how the memory of the pods of a node is limited. A pod with shares of two GPUs counts twice.
//
// +structType=atomic
type MemoryLimitsStatus struct {
	// backend is what the kernel module charges memory with. Absent: nothing, or it is not known.
	// +optional
	Backend MemoryBackend `json:"backend,omitempty"`
	// limited is how many pods have the limit, read back. With Report: how many would have it.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Limited int32 `json:"limited,omitempty"`
	// remaining is how many limits of the agent are set though nothing asks for them any more; it removes them as soon as it can.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Remaining int32 `json:"remaining,omitempty"`
	// uncovered is how many pods have no limit though the policy asks for one, by reason.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Uncovered []UncoveredPods `json:"uncovered,omitempty"`
	// pods are those with a share: the first 32, those without a limit first.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Pods []PodMemoryLimit `json:"pods,omitempty"`
}

// UncoveredPods is how many pods have no limit for one reason.
type UncoveredPods struct {
	// reason is the same word that the condition MemoryLimited uses.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// count of pods.
	// +required
	// +kubebuilder:validation:Minimum=1
	Count int32 `json:"count,omitempty"`
}

// PodMemoryLimit is the limit of a pod on a GPU.
type PodMemoryLimit struct {
	// namespace of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// podName is the name of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName,omitempty"`
	// deviceUUID is the GPU.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	DeviceUUID string `json:"deviceUUID,omitempty"`
	// limitBytes is the share, which is the limit if there is no reason.
	// +optional
	// +kubebuilder:validation:Minimum=0
	LimitBytes int64 `json:"limitBytes,omitempty"`
	// reason is why the limit does not hold. Absent: it does or, with Report, would.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
}

// MemoryPressure is a GPU that is almost full while a container uses more than its share. Figures are those of observedTime.
type MemoryPressure struct {
	// deviceUUID is the GPU.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	DeviceUUID string `json:"deviceUUID,omitempty"`
	// sinceTime is when the GPU was first measured as almost full. It has been almost full in every measurement after that.
	// +required
	SinceTime metav1.Time `json:"sinceTime,omitzero"`
	// observedTime is when the agent last wrote this.
	// +required
	ObservedTime metav1.Time `json:"observedTime,omitzero"`
	// totalBytes is the memory of the GPU.
	// +required
	// +kubebuilder:validation:Minimum=1
	TotalBytes int64 `json:"totalBytes,omitempty"`
	// freeBytes is the memory of the GPU that is free.
	// +optional
	// +kubebuilder:validation:Minimum=0
	FreeBytes int64 `json:"freeBytes"`
	// container is one that exceeds its share.
	// +required
	Container MemoryUser `json:"container,omitzero"`
	// neighbours are the pods of the other containers on the GPU, as namespace/name: the first 16.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=320
	Neighbours []string `json:"neighbours,omitempty"`
}

// MemoryUser is a container that uses the memory of a GPU.
type MemoryUser struct {
	// namespace of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// podName is the name of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName,omitempty"`
	// containerName is the name of the container.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ContainerName string `json:"containerName,omitempty"`
	// usedBytes is the memory of the GPU that its processes use.
	// +required
	// +kubebuilder:validation:Minimum=1
	UsedBytes int64 `json:"usedBytes,omitempty"`
	// shareBytes is the memory of the GPU that it is meant to use.
	// +required
	// +kubebuilder:validation:Minimum=1
	ShareBytes int64 `json:"shareBytes,omitempty"`
}

// MemoryEviction is an eviction that the controller asked for because of the memory guard.
type MemoryEviction struct {
	// time of the request.
	// +required
	Time metav1.Time `json:"time,omitzero"`
	// deviceUUID is the GPU that was almost full.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	DeviceUUID string `json:"deviceUUID,omitempty"`
	// namespace of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// podName is the name of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName,omitempty"`
}

// RolloutStatus is how far the controller has brought a node to the desired state. It is written when a node begins to wait, fails or
// is done, and for a change that takes long; not for each step. Whether the node is ready, and why not, is in the conditions.
//
// +structType=atomic
type RolloutStatus struct {
	// policyName is the name of the policy that governs the node; empty if none does.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PolicyName string `json:"policyName,omitempty"`

	// state is how far the node is: PendingNonDisruptive or PendingDisruptive, then Draining, StoppingOperands, Idle, Applying, Selecting,
	// Verifying, Finishing and UpToDate; or Unknown, Unsupported, Failed or Degraded. Further states may come: programs use the conditions.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	State string `json:"state,omitempty"`

	// steps bring the GPUs to the desired state, in their order: the first 64, in words for people.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=256
	Steps []string `json:"steps,omitempty"`

	// blockers are the pods and processes that use what the steps need to be idle: the first 32.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Blockers []BlockerStatus `json:"blockers,omitempty"`

	// resources are the extended resources that the node advertises, and that it is expected to advertise.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Resources []ResourceCount `json:"resources,omitempty"`

	// shares is how many ResourceClaims can share each whole GPU of the node, as the ResourceSlices of NVIDIA's DRA driver show it: 1 if
	// each claim has a GPU alone. Absent unless that driver alone serves the node, and while it publishes no device or no number.
	// +optional
	// +kubebuilder:validation:Minimum=1
	Shares int64 `json:"shares,omitempty"`

	// lastGood is the last desired state that the node reached and the controller verified: the node is rolled back to it if
	// another one fails. Absent: the node is rolled back to its baseline.
	// +optional
	LastGood *NodeSharing `json:"lastGood,omitempty"`

	// failed is the desired state that the node could not reach. The operator tries it again when it changes, or the policy, or the
	// annotation gpusharing.io/retry.
	// +optional
	Failed *FailedChange `json:"failed,omitempty"`
}

// BlockerKind is what blocks a change.
// +kubebuilder:validation:Enum=Pod;Process;ResourceClaim
type BlockerKind string

// The kinds of blockers.
const (
	BlockerKindPod     BlockerKind = "Pod"
	BlockerKindProcess BlockerKind = "Process" // of no pod that exists
	// BlockerKindResourceClaim is a ResourceClaim that has a device of the node though no pod of the node uses the claim.
	BlockerKindResourceClaim BlockerKind = "ResourceClaim"
)

// BlockerStatus is a pod or a process that uses what a change needs to be idle, or a pod on a node that is to be empty before its reboot
// (drain.beforeReboot AllPods).
type BlockerStatus struct {
	// kind is Pod, or Process for a process that belongs to no pod, or ResourceClaim for one that has a device and that no pod of the node uses.
	// +required
	Kind BlockerKind `json:"kind,omitempty"`
	// namespace of the pod or ResourceClaim.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// name of the pod or ResourceClaim, or of the program.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
	// containerName is the name of the container to which the kubelet has allocated the GPU. Absent if it is not known.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	ContainerName string `json:"containerName,omitempty"`
	// pid of the process on the node. Absent for pods.
	// +optional
	// +kubebuilder:validation:Minimum=1
	PID int64 `json:"pid,omitempty"`
	// deviceUUID is the GPU that the blocker uses. Absent if it is not known which, or if it uses none.
	// +optional
	// +kubebuilder:validation:MaxLength=96
	DeviceUUID string `json:"deviceUUID,omitempty"`
	// instance is the id of the MIG instance that it uses; absent if it uses the whole GPU.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Instance *int32 `json:"instance,omitempty"`
	// handling is what happens to the blocker, in words for people, such as "is evicted, as far as PodDisruptionBudgets allow".
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Handling string `json:"handling,omitempty"`
}

// ConfigStatus says which of NVIDIA's programs have a device-plugin configuration before them, so that the node's label
// may select it.
//
// +structType=atomic
type ConfigStatus struct {
	// name is the config that was looked for: spec.configName.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`
	// changeTime is spec.changeTime of the desired state that the config belongs to.
	// +optional
	ChangeTime metav1.Time `json:"changeTime,omitzero"`
	// podUIDs are the UIDs of the pods whose config-manager sees the config.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=63
	PodUIDs []string `json:"podUIDs,omitempty"`
}

// DeviceStatus is one GPU as the agent observed it.
type DeviceStatus struct {
	// uuid of the GPU, as NVML reports it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	UUID string `json:"uuid,omitempty"`
	// index is the position of the GPU in the node as nvidia-smi counts them, from 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Index int32 `json:"index"`
	// product is the name of the GPU with dashes for spaces, such as NVIDIA-A100-SXM4-40GB.
	// +optional
	// +kubebuilder:validation:MaxLength=96
	Product string `json:"product,omitempty"`
	// memoryMiB is the memory of the GPU in MiB.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MemoryMiB int64 `json:"memoryMiB,omitempty"`
	// computeCapability of the GPU, such as 8.0.
	// +optional
	// +kubebuilder:validation:MaxLength=8
	ComputeCapability string `json:"computeCapability,omitempty"`
	// virtual is true for a vGPU, which cannot be shared further.
	// +optional
	Virtual bool `json:"virtual,omitempty"`
	// license is whether a vGPU has its license from NVIDIA. Absent for other GPUs, and where the driver does not
	// report it.
	// +optional
	License LicenseState `json:"license,omitempty"`
	// migCapable is true if the GPU can be put into MIG mode.
	// +optional
	MIGCapable bool `json:"migCapable,omitempty"`
	// pendingMIGMode is the MIG mode that the GPU takes at its next reset, if it is not the current one.
	// +optional
	PendingMIGMode MIGMode `json:"pendingMIGMode,omitempty"`
	// resetPeers are the UUIDs of the GPUs that must be reset together with this one, as far as a reset has shown it:
	// without a fabric manager, NVSwitches let no GPU be reset alone.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=96
	ResetPeers []string `json:"resetPeers,omitempty"`
	// processesUnknown is true if the driver's lists of processes cannot be used, so that the operator changes nothing that
	// could end a process on the GPU.
	// +optional
	ProcessesUnknown bool `json:"processesUnknown,omitempty"`
	// computeMode of the GPU.
	// +optional
	ComputeMode ComputeMode `json:"computeMode,omitempty"`
	// sharing is how the GPU is shared, in the shape of the spec.
	// +optional
	Sharing DeviceSharing `json:"sharing,omitzero"`
	// instances are the MIG instances of the GPU.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Instances []InstanceStatus `json:"instances,omitempty"`
	// profilesUnknown is true if the driver does not tell the MIG profiles of a GPU that has some: some drivers do in MIG mode only.
	// +optional
	ProfilesUnknown bool `json:"profilesUnknown,omitempty"`
	// profiles are the MIG profiles that the GPU has, with the places where an instance can lie. They are left out where they are those of
	// the first GPU of its product in the list, and of that one where they are those of the operator's catalogue.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Profiles []ProfileStatus `json:"profiles,omitempty"`
	// processes are the processes that use the GPU: the first 32 by PID, and fewer where the lists of all GPUs would be longer than 128 KiB.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Processes []ProcessStatus `json:"processes,omitempty"`
	// holders are the containers to which the kubelet has allocated the GPU, a replica of it or one of its instances,
	// whether or not they use it now: the first 64 by namespace, pod and container, and fewer where the lists of all GPUs would be longer
	// than 128 KiB.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Holders []HolderStatus `json:"holders,omitempty"`
}

// HolderStatus is a container to which the kubelet has allocated a GPU or an instance.
type HolderStatus struct {
	// namespace of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// podName is the name of the pod.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PodName string `json:"podName,omitempty"`
	// containerName is the name of the container.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ContainerName string `json:"containerName,omitempty"`
	// instance is the id of the MIG instance that it holds; absent if it holds the whole GPU or a replica of it.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Instance *int32 `json:"instance,omitempty"`
}

// ComputeMode says how many processes may use a GPU without MPS.
// +kubebuilder:validation:Enum=Default;ExclusiveProcess;Prohibited
type ComputeMode string

// The compute modes.
const (
	ComputeModeDefault          ComputeMode = "Default"
	ComputeModeExclusiveProcess ComputeMode = "ExclusiveProcess"
	ComputeModeProhibited       ComputeMode = "Prohibited"
)

// InstanceStatus is one MIG instance.
type InstanceStatus struct {
	// id of the GPU instance.
	// +required
	// +kubebuilder:validation:Minimum=0
	ID int32 `json:"id"`
	// profile is its name, such as 1g.10gb.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=32
	Profile string `json:"profile,omitempty"`
	// start is the first memory slice that it occupies.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Start int32 `json:"start"`
	// size is the number of memory slices that it occupies.
	// +required
	// +kubebuilder:validation:Minimum=1
	Size int32 `json:"size,omitempty"`
	// uuid of the MIG device; empty if its compute instance is missing.
	// +optional
	// +kubebuilder:validation:MaxLength=96
	UUID string `json:"uuid,omitempty"`
	// lastHeldTime is when a pod or process was last seen to have it, or when it was first seen; absent while one has it, and without
	// spec.onDemand.
	// +optional
	LastHeldTime metav1.Time `json:"lastHeldTime,omitzero"`
}

// ProfileStatus is a MIG profile of a GPU.
type ProfileStatus struct {
	// name, such as 1g.10gb+me.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=32
	Name string `json:"name,omitempty"`
	// id is the driver's number of the profile.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ID int32 `json:"id"`
	// slices is the number of compute slices of an instance.
	// +required
	// +kubebuilder:validation:Minimum=1
	Slices int32 `json:"slices,omitempty"`
	// memoryMiB is the memory of an instance in MiB.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MemoryMiB int64 `json:"memoryMiB,omitempty"`
	// max is the largest number of such instances on the GPU.
	// +required
	// +kubebuilder:validation:Minimum=1
	Max int32 `json:"max,omitempty"`
	// size is the number of memory slices of an instance.
	// +required
	// +kubebuilder:validation:Minimum=1
	Size int32 `json:"size,omitempty"`
	// starts are the memory slices at which an instance may begin.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=32
	Starts []int32 `json:"starts,omitempty"`
}

// ProcessStatus is a process that uses a GPU.
type ProcessStatus struct {
	// pid of the process on the node.
	// +required
	// +kubebuilder:validation:Minimum=1
	PID int64 `json:"pid,omitempty"`
	// name of the program.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Name string `json:"name,omitempty"`
	// instance is the id of the MIG instance that the process uses; absent if it uses the whole GPU.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Instance *int32 `json:"instance,omitempty"`
	// podUID is the UID of the pod that the process belongs to; empty if it belongs to none.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	PodUID string `json:"podUID,omitempty"`
	// containerID is the container that the process belongs to; empty if it belongs to none.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	ContainerID string `json:"containerID,omitempty"`
}

// GPUNodeList is a list of GPUNodes.
//
// +kubebuilder:object:root=true
type GPUNodeList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	// items of the list.
	Items []GPUNode `json:"items"`
}
