// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Condition types.
const (
	// ConditionAccepted says whether a policy governs the nodes that it selects.
	ConditionAccepted = "Accepted"
	// ConditionReady reports whether a policy's nodes, or a node, advertise what is desired. The controller writes it.
	ConditionReady = "Ready"
	// ConditionReconciling is true when the rollout of a policy, or on a node, is at work or waits for something that ends: a drain, a
	// maintenance window, the budget, an agent that does not report. The controller writes it.
	ConditionReconciling = "Reconciling"
	// ConditionStalled is true when nothing more happens until the desired state, the node or the cluster is changed. The controller
	// writes it.
	ConditionStalled = "Stalled"
	// ConditionTainted says whether the nodes of a policy have the taints that it asks for. It is absent if it asks for none.
	ConditionTainted = "Tainted"
	// ConditionWorkloadsAffected is true when workloads ask for what no node offers once the policies are in force: those that
	// run go on and would not start again, those that wait never start.
	ConditionWorkloadsAffected = "WorkloadsAffected"
	// ConditionAutoscalingConfigured reports whether autoscalers know what new nodes of the policy will advertise. It is absent if no
	// node group is known. It never makes a policy not Ready.
	ConditionAutoscalingConfigured = "AutoscalingConfigured"
	// ConditionMemoryPressure is true when the memory guard of a policy finds a GPU almost full while a container uses more than its share, and
	// Unknown if the agents of some nodes do not measure. It never makes a policy not Ready.
	ConditionMemoryPressure = "MemoryPressure"
	// ConditionDemandMet reports whether no pod waits for MIG instances that a policy may make on demand and that are not idle. It is absent
	// if no layout has onDemand. It never makes a policy not Ready.
	ConditionDemandMet = "DemandMet"
	// ConditionMemoryGuarded is true, on a GPUNode whose policy has a memory guard, if the agent measures for it. An agent that is older than
	// the guard does not report it for the generation that has the guard, nor one that has a GPU whose memory NVML does not report.
	ConditionMemoryGuarded = "MemoryGuarded"
	// ConditionMemoryLimited reports, on a GPUNode, whether the driver keeps every pod to its share of the memory of time-sliced GPUs. It is
	// absent if no policy asks for that and no limit of the operator is left. Of its reasons only NotEnforced fails the change of a node.
	ConditionMemoryLimited = "MemoryLimited"
	// ConditionDiscovered reports whether the agent could read the GPUs of its node.
	ConditionDiscovered = "Discovered"
	// ConditionApplied reports whether the GPUs of a node match its spec. The agent writes it.
	ConditionApplied = "Applied"
	// ConditionApplyStalled is true when the agent can do nothing more until the desired state or the node is changed.
	ConditionApplyStalled = "ApplyStalled"
	// ConditionRebootRequired is true when a GPU takes the desired MIG mode only at the next reboot.
	ConditionRebootRequired = "RebootRequired"
	// ConditionLicenseMissing is true when a vGPU of the node has no license. It changes nothing about how the GPU is shared.
	ConditionLicenseMissing = "LicenseMissing"
)

// ConditionsOfOthers are the conditions of a policy that other controllers report than that of the rollout.
func ConditionsOfOthers() []string {
	return []string{ConditionAutoscalingConfigured, ConditionMemoryPressure, ConditionDemandMet}
}

// Reasons of a policy's Accepted condition.
const (
	// ReasonAccepted: the policy governs every node that it selects.
	ReasonAccepted = "Accepted"
	// ReasonConflicted: another policy governs some or all of the nodes that this one selects.
	ReasonConflicted = "Conflicted"
	// ReasonDRAStackActive: NVIDIA's DRA driver serves this cluster (a GPUCluster exists), so there is no device plugin
	// to configure.
	ReasonDRAStackActive = "DRAStackActive"
	// ReasonNoDevicePlugin: neither a ClusterPolicy exists nor was a stand-alone device plugin named by the controller's
	// flags.
	ReasonNoDevicePlugin = "NoDevicePlugin"
	// ReasonNoMatchingNodes: no GPU node has the labels, or no GPU the products, that the policy selects.
	ReasonNoMatchingNodes = "NoMatchingNodes"
	// ReasonTooManyPolicies: the cluster has more policies than the operator follows, and this one is among those beyond. It governs nothing.
	ReasonTooManyPolicies = "TooManyPolicies"
	// ReasonPaused: the policy's rollout is paused.
	ReasonPaused = "Paused"
	// ReasonInvalidWindow: a maintenance window of the policy (rollout.windows) has a schedule that never opens it, or a time
	// zone that is unknown. The policy changes nothing until that is corrected.
	ReasonInvalidWindow = "InvalidWindow"
)

// Reasons of a policy's Tainted condition.
const (
	// ReasonTaintsPresent: the nodes have the taints.
	ReasonTaintsPresent = "TaintsPresent"
	// ReasonTolerationsChanging: NVIDIA's programs get the toleration first. The taints follow.
	ReasonTolerationsChanging = "TolerationsChanging"
	// ReasonTolerationMissing: NVIDIA's programs do not tolerate a taint, and the operator may not change that.
	ReasonTolerationMissing = "TolerationMissing"
	// ReasonTaintConflict: a node has a taint of that key and effect with another value, which the operator did not put there.
	ReasonTaintConflict = "TaintConflict"
	// ReasonNodeNotInitialized: Karpenter has not initialized a node yet. The taints of the policy follow, because Karpenter takes a new node
	// with a taint that it does not know for one without room, and starts another.
	ReasonNodeNotInitialized = "NodeNotInitialized"
	// ReasonStartupTaintMissing: a NodePool of Karpenter does not list the startup taint, so its nodes start without it.
	ReasonStartupTaintMissing = "StartupTaintMissing"
	// ReasonStartupTaintInMachineSet: OpenShift puts the startup taint back, because it is in the MachineSet.
	ReasonStartupTaintInMachineSet = "StartupTaintInMachineSet"
)

// Reasons of a policy's AutoscalingConfigured condition, and of its node groups.
const (
	// ReasonConfigured: the autoscaler knows what new nodes will advertise.
	ReasonConfigured = "Configured"
	// ReasonConfiguring: the operator has written what the autoscaler needs, and waits for the autoscaler to take it.
	ReasonConfiguring = "Configuring"
	// ReasonAdviceOnly: the operator writes nothing for this node group. `kubectl gpusharing plan` prints what to write.
	ReasonAdviceOnly = "AdviceOnly"
	// ReasonUnknownShape: no node of the group was seen, and no shape is declared for it.
	ReasonUnknownShape = "UnknownShape"
	// ReasonAmbiguousShape: the nodes of the group, or the shapes declared for it, differ.
	ReasonAmbiguousShape = "AmbiguousShape"
	// ReasonNodesDisagree: the agent of a node reports GPUs that neither its kubelet nor the other nodes of the group confirm. What it reports
	// is not written for the group.
	ReasonNodesDisagree = "NodesDisagree"
	// ReasonNodeGroupNotFound: nodeShapes names a node group that does not exist.
	ReasonNodeGroupNotFound = "NodeGroupNotFound"
	// ReasonNodeGroupNotSelected: nodeShapes names a node group whose nodes the policy will not govern.
	ReasonNodeGroupNotSelected = "NodeGroupNotSelected"
	// ReasonResourceNotSupported: the autoscaler cannot learn of this resource before a node has it.
	ReasonResourceNotSupported = "ResourceNotSupported"
	// ReasonMultipleResources: annotations of Cluster API announce one resource only, and a node will advertise several.
	ReasonMultipleResources = "MultipleResources"
	// ReasonOverlayNotServed: the cluster has no NodeOverlay of Karpenter, or none of a version with the fields that the operator writes.
	ReasonOverlayNotServed = "OverlayNotServed"
	// ReasonFeatureGateOff: Karpenter does not look at NodeOverlays.
	ReasonFeatureGateOff = "FeatureGateOff"
	// ReasonOverlayConflict: Karpenter does not apply the NodeOverlay, or another NodeOverlay takes its place.
	ReasonOverlayConflict = "OverlayConflict"
	// ReasonGPUCountRises: a new node advertises its whole GPUs first and more nvidia.com/gpu afterwards, so Karpenter would start
	// further nodes.
	ReasonGPUCountRises = "GPUCountRises"
	// ReasonOwnedByOther: another field manager owns what the operator would write.
	ReasonOwnedByOther = "OwnedByOther"
	// ReasonRemovedByOther: another field manager removed what the operator had written.
	ReasonRemovedByOther = "RemovedByOther"
	// ReasonInvalidValue: an annotation for the autoscaler has a value that the autoscaler cannot read.
	ReasonInvalidValue = "InvalidValue"
	// ReasonNotPermitted: the operator may not write what the policy asks for.
	ReasonNotPermitted = "NotPermitted"
	// ReasonWriteFailed: the API server refused what the operator wrote. Nodes have it too.
	ReasonWriteFailed = "WriteFailed"
	// ReasonAcceleratorLabel: nodes have a GPU label of Cluster Autoscaler and will not advertise nvidia.com/gpu, so Cluster Autoscaler
	// takes them for broken.
	ReasonAcceleratorLabel = "AcceleratorLabel"
	// ReasonLimitsNotCounted: limits of the autoscaler count something else than the operator's nodes advertise.
	ReasonLimitsNotCounted = "LimitsNotCounted"
	// ReasonStaleTemplate: the policy has changed while the node group was empty, and Cluster Autoscaler keeps a copy of a former node.
	ReasonStaleTemplate = "StaleTemplate"
	// ReasonStartupGap: a new node has no startup taint for a while, and Cluster Autoscaler adds further nodes meanwhile.
	ReasonStartupGap = "StartupGap"
	// ReasonScaleDownCandidate: Cluster Autoscaler does not count shared GPUs as used, so a full node may be scaled down.
	ReasonScaleDownCandidate = "ScaleDownCandidate"
)

// Reasons of a policy's WorkloadsAffected condition.
const (
	// ReasonRequestNotOffered: no node will offer what the workloads ask for; the message says what to change.
	ReasonRequestNotOffered = "RequestNotOffered"
)

// Reasons of a policy's DemandMet condition, and of the requests in its status.onDemand.
const (
	// ReasonNoDemand: no pod waits for MIG instances of the policy's GPUs.
	ReasonNoDemand = "NoDemand"
	// ReasonInstancesIdle: the instances for which pods wait are idle. It is the scheduler's turn.
	ReasonInstancesIdle = "InstancesIdle"
	// ReasonRepartitionAdvised: other MIG instances would let pods start that wait. Mode Advise makes none.
	ReasonRepartitionAdvised = "RepartitionAdvised"
	// ReasonRepartitioning: MIG instances are being made for pods that wait.
	ReasonRepartitioning = "Repartitioning"
	// ReasonProfileNotAllowed: pods wait for a MIG profile that onDemand.profiles does not list.
	ReasonProfileNotAllowed = "ProfileNotAllowed"
	// ReasonNoIdleRoom: pods hold what would have to be destroyed for the instances for which others wait.
	ReasonNoIdleRoom = "NoIdleRoom"
	// ReasonReserveKept: the instances that would have to be destroyed are those that onDemand.reserve keeps idle.
	ReasonReserveKept = "ReserveKept"
	// ReasonIdleTooShort: the instances that would have to be destroyed have not been idle for onDemand.idleSeconds.
	ReasonIdleTooShort = "IdleTooShort"
	// ReasonGPUsChanging: the GPUs that could have the instances are being changed, or not ready.
	ReasonGPUsChanging = "GPUsChanging"
	// ReasonAdvertisedNotScheduled: instances were idle for the pods for a minute, and the scheduler left them waiting.
	ReasonAdvertisedNotScheduled = "AdvertisedNotScheduled"
	// ReasonAutoscalerRaces (of an Event): GPUs change for a pod for which an autoscaler may add a node at the same time.
	ReasonAutoscalerRaces = "AutoscalerRaces"
)

// Reasons of a policy's MemoryPressure condition.
const (
	// ReasonContainerOverShare: containers use more than their share while their GPUs are almost full; the message names the first of them.
	ReasonContainerOverShare = "ContainerOverShare"
	// ReasonNotMeasured: the agents of some nodes have not reported for two minutes that they measure, as agents that are older than the
	// memory guard, or that have a GPU whose memory NVML does not report.
	ReasonNotMeasured = "NotMeasured"
)

// Reasons of a GPUNode's MemoryLimited condition, and of its status.memoryLimits.
const (
	// ReasonEnforced: the driver limits every pod that has a share, as read back.
	ReasonEnforced = "Enforced"
	// ReasonNotVerified: nothing that can be looked at without a limit keeps the driver from limiting pods. Whether it does shows with the first
	// limit that is set.
	ReasonNotVerified = "NotVerified"
	// ReasonLimitGateOff: the agents run without the feature gate MemoryLimits.
	ReasonLimitGateOff = "LimitGateOff"
	// ReasonCgroupV1: the node has no unified hierarchy of control groups, by which the driver limits.
	ReasonCgroupV1 = "CgroupV1"
	// ReasonDriverTooOld: the driver has no memory limits. They come with 615.
	ReasonDriverTooOld = "DriverTooOld"
	// ReasonNoController: the kernel has neither of the controllers dmem and misc.
	ReasonNoController = "NoController"
	// ReasonBackendOff: the kernel module was told not to charge memory (RmMemacctMode).
	ReasonBackendOff = "BackendOff"
	// ReasonNotDelegated: a control group above the pods, or the pod's, does not have the controller.
	ReasonNotDelegated = "NotDelegated"
	// ReasonNoPermission: the agent does not see the node's own tree of control groups, or may not write to it.
	ReasonNoPermission = "NoPermission"
	// ReasonFractioningActive: another program limits GPU memory on the node, so the operator sets and removes nothing.
	ReasonFractioningActive = "FractioningActive"
	// ReasonForeignLimit: another program has limited the pod, or one of its containers, which the operator leaves as it is.
	ReasonForeignLimit = "ForeignLimit"
	// ReasonNoPersistence: nothing keeps the GPU initialized while no program uses it, and the driver then loses all limits.
	ReasonNoPersistence = "NoPersistence"
	// ReasonNotEnforced: a limit that was set does not read back, so the agent sets no further one on the node.
	ReasonNotEnforced = "NotEnforced"
	// ReasonShareTooLarge: perReplica is more than the GPU has.
	ReasonShareTooLarge = "ShareTooLarge"
	// ReasonAboveLimit: the pod already uses more than its share. It gets the limit when it uses less.
	ReasonAboveLimit = "AboveLimit"
	// ReasonEarlierMemory: the pod ran before its limit was set, and the driver does not count what it had allocated before.
	ReasonEarlierMemory = "EarlierMemory"
	// ReasonCgroupNotFound: the control group of the pod was not found.
	ReasonCgroupNotFound = "CgroupNotFound"
	// ReasonLimitFailed: the driver, or a file, refused; it is tried again.
	ReasonLimitFailed = "LimitFailed"
)

// Reasons of a policy's Ready condition, and of its pending nodes.
const (
	// ReasonReady: everything matches the desired state.
	ReasonReady = "Ready"
	// ReasonAgentNotReporting: the agent of the node does not run or has not reported its GPUs.
	ReasonAgentNotReporting = "AgentNotReporting"
	// ReasonGPUNodeMissing: the operator has changed the node, and its GPUNode is gone and could not be made again.
	ReasonGPUNodeMissing = "GPUNodeMissing"
	// ReasonNodeOptedOut: the node carries nvidia.com/gpu.deploy.operands=false, or runs virtual machines, so NVIDIA's
	// device plugin does not serve it.
	ReasonNodeOptedOut = "NodeOptedOut"
	// ReasonConfiguringDevicePlugin: the operator configures NVIDIA's device plugin to read the operator's ConfigMap.
	ReasonConfiguringDevicePlugin = "ConfiguringDevicePlugin"
	// ReasonConfigMapFull: the operator's ConfigMap has no room for the device-plugin configuration of the node.
	ReasonConfigMapFull = "ConfigMapFull"
	// ReasonOutsideWindow: a disruptive change waits for a maintenance window of the policy (rollout.windows).
	ReasonOutsideWindow = "OutsideWindow"
	// ReasonWaitingForFirst: one node goes first with this configuration; the others follow once it has verified.
	ReasonWaitingForFirst = "WaitingForFirst"
	// ReasonWaitingForBudget: as many nodes as maxUnavailable allows are changing already.
	ReasonWaitingForBudget = "WaitingForBudget"
	// ReasonRolloutHalted: as many nodes failed as failureThreshold says; no further node is started.
	ReasonRolloutHalted = "RolloutHalted"
	// ReasonGPUInUse: a process or a pod holds a GPU, or an instance, that the change needs to be idle, or a pod has to
	// leave the node before its reboot (drain.beforeReboot AllPods).
	ReasonGPUInUse = "GPUInUse"
	// ReasonDrainTimedOut: the node did not become idle in the time that the policy allows.
	ReasonDrainTimedOut = "DrainTimedOut"
	// ReasonDriverUpgrade: NVIDIA's driver is being upgraded on the node; nothing is changed meanwhile.
	ReasonDriverUpgrade = "DriverUpgrade"
	// ReasonNodeMaintenance: OpenShift's machine-config operator is updating the node; nothing is changed meanwhile.
	ReasonNodeMaintenance = "NodeMaintenance"
	// ReasonStoppingOperands: NVIDIA's own operands are being stopped, since the change needs all handles closed.
	ReasonStoppingOperands = "StoppingOperands"
	// ReasonDisablingNVIDIAMPS: the operator keeps NVIDIA's MPS DaemonSet off the node, before its own MPS daemons start.
	ReasonDisablingNVIDIAMPS = "DisablingNVIDIAMPS"
	// ReasonNodeFeatureIgnored: Node Feature Discovery does not set nvidia.com/mps.capable to false, as the operator's
	// NodeFeature asks. NVIDIA's MPS DaemonSet would run beside the operator's MPS daemons.
	ReasonNodeFeatureIgnored = "NodeFeatureIgnored"
	// ReasonMPSCapableReset: another controller sets nvidia.com/mps.capable on the node again, which the operator had set
	// to false. The operator sets it at most once in an hour.
	ReasonMPSCapableReset = "MPSCapableReset"
	// ReasonApplying: the agent is changing the GPUs.
	ReasonApplying = "Applying"
	// ReasonSelecting: the device-plugin configuration is being written, made visible on the node and selected.
	ReasonSelecting = "Selecting"
	// ReasonVerifying: the node does not advertise yet what the policy asks for.
	ReasonVerifying = "Verifying"
	// ReasonNotAdvertised: the node did not advertise in time what the policy asks for.
	ReasonNotAdvertised = "NotAdvertised"
	// ReasonRestoring: no policy governs the node any more, and it goes back to the state in which it was found.
	ReasonRestoring = "Restoring"
	// ReasonClusterNotRead: for more than a minute the controller could not read what it decides by, such as the objects of a
	// kind of NVIDIA's. It decides nothing meanwhile; the message names what it waits for.
	ReasonClusterNotRead = "ClusterNotRead"
	// ReasonProgressing: the nodes of the policy are on their way.
	ReasonProgressing = "Progressing"
)

// Reasons for which a node cannot satisfy a policy until the policy or the node is changed.
const (
	// ReasonProfileNotAvailable: the GPU has no such MIG profile.
	ReasonProfileNotAvailable = "ProfileNotAvailable"
	// ReasonLayoutDoesNotFit: the instances of the layout do not fit on the GPU together.
	ReasonLayoutDoesNotFit = "LayoutDoesNotFit"
	// ReasonMIGNotSupported: the GPU has no MIG.
	ReasonMIGNotSupported = "MIGNotSupported"
	// ReasonNoLayoutMatches: the strategy is MIG and no layout is for any GPU of the node.
	ReasonNoLayoutMatches = "NoLayoutMatches"
	// ReasonMixedInstances: resourceNames Uniform needs the same single profile on every GPU of the node.
	ReasonMixedInstances = "MixedInstances"
	// ReasonPartialSelection: time-slicing and MPS share all GPUs of a node, but the policy selects some of them only.
	ReasonPartialSelection = "PartialSelection"
	// ReasonMPSClientLimitExceeded: the GPU serves fewer MPS clients than the replicas asked for.
	ReasonMPSClientLimitExceeded = "MPSClientLimitExceeded"
	// ReasonNoNodeFeatures: the cluster has no kind NodeFeature of Node Feature Discovery, by which the operator would keep
	// NVIDIA's MPS DaemonSet off the node.
	ReasonNoNodeFeatures = "NoNodeFeatures"
	// ReasonMPSMultiUserNotSupported: sharing.mps.multiUser is set for a GPU older than Volta.
	ReasonMPSMultiUserNotSupported = "MPSMultiUserNotSupported"
	// ReasonTimeSliceNotSupported: sharing.timeSlicing.interval names an interval, and the driver has none for a GPU.
	ReasonTimeSliceNotSupported = "TimeSliceNotSupported"
	// ReasonMemoryLimitExceeded: the memory of one client or replica is more than the GPU has.
	ReasonMemoryLimitExceeded = "MemoryLimitExceeded"
	// ReasonLaterVersion: a later version of the operator has stored the policy, and this one does not know what it says. Nothing changes.
	ReasonLaterVersion = "LaterVersion"
	// ReasonVirtualGPUNotSupported: the node's GPUs are virtual and cannot be shared further.
	ReasonVirtualGPUNotSupported = "VirtualGPUNotSupported"
	// ReasonProcessesUnknown: the driver does not report which processes use a GPU, so that no disruptive change is safe.
	ReasonProcessesUnknown = "ProcessesUnknown"
	// ReasonMIGActive: a GPU in MIG mode rules out MPS or time-slicing on the same node.
	ReasonMIGActive = "MIGActive"
	// ReasonNoMIGManager: the policy asks for NVIDIA's mig-manager, which does not run on the node.
	ReasonNoMIGManager = "NoMIGManager"
	// ReasonReplicasDiffer: two layouts of one node ask for different replicas of one resource; NVIDIA's device plugin
	// shares per resource name.
	ReasonReplicasDiffer = "ReplicasDiffer"
)

// Reasons of a node on which something is left half-done. Its policy lists such a node in status.pending, also one
// that advertises what it must.
const (
	// ReasonOperandsLeftStopped: NVIDIA's operands are stopped by their deploy labels though nobody changes anything any more;
	// they are started again.
	ReasonOperandsLeftStopped = "OperandsLeftStopped"
	// ReasonOperandsNotEnding: a pod of NVIDIA's was deleted and does not end, and the change waits for it or failed by it.
	ReasonOperandsNotEnding = "OperandsNotEnding"
	// ReasonMIGManagerBusy: NVIDIA's mig-manager is changing the node; nothing else is changed meanwhile.
	ReasonMIGManagerBusy = "MIGManagerBusy"
	// ReasonMIGManagerStuck: NVIDIA's mig-manager began to change the node and has not ended within its time.
	ReasonMIGManagerStuck = "MIGManagerStuck"
	// ReasonConfigManagerFailing: the container config-manager of NVIDIA's device plugin or GPU Feature Discovery keeps
	// ending, as it does when the label nvidia.com/device-plugin.config selects a key that its ConfigMap does not hold.
	ReasonConfigManagerFailing = "ConfigManagerFailing"
	// ReasonDevicePluginFailing: the pod of NVIDIA's device plugin does not run on the node, or keeps ending.
	ReasonDevicePluginFailing = "DevicePluginFailing"
	// ReasonDevicePluginOutdated: pods of NVIDIA's device plugin still read another ConfigMap than the operator's, long after
	// the ClusterPolicy named that.
	ReasonDevicePluginOutdated = "DevicePluginOutdated"
	// ReasonMPSCapableStale: GPU Feature Discovery still says that the node shares its GPUs by MPS, though it does not any more.
	// The operator's NodeFeature stays meanwhile.
	ReasonMPSCapableStale = "MPSCapableStale"
	// ReasonLimitsPending: pods that ran when the limits of MPS last changed keep their former limits until they end. New pods
	// have the limits of the policy.
	ReasonLimitsPending = "LimitsPending"
	// ReasonMPSUnreachable: another program replaced the shared memory of MPS on the node, as NVIDIA's MPS DaemonSet does when it
	// starts. New pods cannot use MPS until the connected clients have ended and the MPS pod has started the daemons again.
	ReasonMPSUnreachable = "MPSUnreachable"
	// ReasonMPSUserWaiting: pods wait for a GPU because MPS serves one user ID at a time, and another one has it.
	ReasonMPSUserWaiting = "MPSUserWaiting"
	// ReasonMPSClientsRunning: the ClusterPolicy has to name the operator's ConfigMap, which restarts NVIDIA's MPS daemons, and pods
	// use these daemons on nodes that are shared by MPS by hand. The change waits until the pods have ended.
	ReasonMPSClientsRunning = "MPSClientsRunning"
	// ReasonGPUMissing: a GPU that gpuSelector.indexes selected is no longer in the node. The policy keeps the other GPUs that it
	// selected, though their indexes have changed.
	ReasonGPUMissing = "GPUMissing"
	// ReasonComputeModeLeft: a GPU lets only one process in, or none, and no MPS control daemon serves it.
	ReasonComputeModeLeft = "ComputeModeLeft"
	// ReasonComputeModeLost: an MPS control daemon serves a GPU that programs can use without it, so without its limits.
	ReasonComputeModeLost = "ComputeModeLost"
)

// Reasons of a node on which another controller works too. The operator reports it, and does not fight.
const (
	// ReasonSlicerActive: another operator that partitions GPUs, such as Red Hat's Dynamic Accelerator Slicer (InstaSlice),
	// serves the node; nothing is changed there.
	ReasonSlicerActive = "SlicerActive"
	// ReasonDRADriverActive: NVIDIA's DRA driver and its device plugin both offer the GPUs of the node; nothing is changed there.
	ReasonDRADriverActive = "DRADriverActive"
	// ReasonConfigLabelReset: another controller sets nvidia.com/device-plugin.config on the node again, after the operator had
	// selected a configuration by it. The operator sets it at most once in an hour.
	ReasonConfigLabelReset = "ConfigLabelReset"
	// ReasonMIGManagerReenabled: a user or another controller lets NVIDIA's mig-manager back onto a node that the operator
	// partitions. It was set back once, and is left alone for an hour after that.
	ReasonMIGManagerReenabled = "MIGManagerReenabled"
	// ReasonMIGConfigIgnored: a user or another controller changed nvidia.com/mig.config on a node that the operator partitions, where it has no
	// effect.
	ReasonMIGConfigIgnored = "MIGConfigIgnored"
	// ReasonChangedByOthers: another controller undoes again and again what the operator does. If it changes the MIG instances of a
	// GPU, the agent makes them three times within an hour. Everything else is written eight times within an hour while no policy
	// changes. After that the operator waits until the hour is over. What the operator itself replaced, and what it wrote to another
	// Node of the same name, does not count.
	ReasonChangedByOthers = "ChangedByOthers"
)

// Reasons of a node whose GPUs NVIDIA's DRA driver serves.
const (
	// ReasonNotOnDRA: the policy asks for something that NVIDIA's DRA driver does not offer. The node stays as it was.
	ReasonNotOnDRA = "NotOnDRA"
	// ReasonDRAUnavailable: this Kubernetes serves no DeviceTaintRules, or no extended resources of DeviceClasses, or the DeviceTaintRule of the
	// node is not the operator's. The node stays as it was.
	ReasonDRAUnavailable = "DRAUnavailable"
	// ReasonDRADriverUnknown: the ResourceSlices of NVIDIA's DRA driver have another form than those that the operator knows.
	ReasonDRADriverUnknown = "DRADriverUnknown"
	// ReasonDRADriverFailing: the pod of NVIDIA's DRA driver on the node does not run as it should.
	ReasonDRADriverFailing = "DRADriverFailing"
	// ReasonDRASharesDiffer: the number of shares that NVIDIA's DRA driver gives each GPU is another than the policy needs. The driver
	// has one number for all nodes, which the administrator sets.
	ReasonDRASharesDiffer = "DRASharesDiffer"
	// ReasonDRAIntervalDiffers: the DeviceClass of whole GPUs does not give them the time slice that the policy needs, or the feature gate
	// TimeSlicingSettings of NVIDIA's DRA driver is off. Both are the administrator's.
	ReasonDRAIntervalDiffers = "DRAIntervalDiffers"
	// ReasonDynamicMIGActive: NVIDIA's DRA driver makes and destroys MIG instances itself, so the operator does not.
	ReasonDynamicMIGActive = "DynamicMIGActive"
	// ReasonDeviceClassConflict: a DeviceClass of another owner has the name of the operator's and serves another resource, no
	// DeviceClass serves nvidia.com/gpu, or several serve one resource.
	ReasonDeviceClassConflict = "DeviceClassConflict"
	// ReasonNotPublished: the ResourceSlices of the node do not show the GPUs and instances that are there, by UUID.
	ReasonNotPublished = "NotPublished"
	// ReasonDeviceGone: pods of the node wait for a device that NVIDIA's DRA driver no longer publishes. Each must be deleted, because
	// nothing allocates another one to it.
	ReasonDeviceGone = "DeviceGone"
)

// Reasons of Events about nodes, besides those above.
const (
	// EventRecovered: what an earlier Event told of a node is so no more.
	EventRecovered = "Recovered"
)

// Reasons of a GPUNode's conditions.
const (
	// ReasonMeasuring: the agent measures for the memory guard of the policy.
	ReasonMeasuring = "Measuring"
	// ReasonDiscovered: the GPUs were read.
	ReasonDiscovered = "Discovered"
	// ReasonNVMLFailed: NVML could not be loaded or failed.
	ReasonNVMLFailed = "NVMLFailed"
	// ReasonDriverNotFound: the node has no NVIDIA driver, neither in a container nor on the host.
	ReasonDriverNotFound = "DriverNotFound"
	// ReasonDriverNotReady: the driver is being installed, replaced or removed. The agent holds nothing of it open and waits.
	ReasonDriverNotReady = "DriverNotReady"
	// ReasonDriverMismatch: the driver's library is of another version than the loaded kernel module.
	ReasonDriverMismatch = "DriverMismatch"
	// ReasonPlatformNotSupported: the node's platform, such as Tegra or WSL, has no driver through which GPUs can be shared.
	ReasonPlatformNotSupported = "PlatformNotSupported"
	// ReasonDeviceNodesMissing: device nodes of MIG instances, or NVIDIA's CDI specification that lists them, could not be
	// brought up to date, so pods on these instances cannot start.
	ReasonDeviceNodesMissing = "DeviceNodesMissing"
	// ReasonPodResourcesFailed: the kubelet's pod resources could not be read, so it is not known which containers hold
	// the GPUs.
	ReasonPodResourcesFailed = "PodResourcesFailed"
	// ReasonApplied: the GPUs match the spec.
	ReasonApplied = "Applied"
	// ReasonNoPolicy: no policy governs the node.
	ReasonNoPolicy = "NoPolicy"
	// ReasonApplyTimedOut: the agent did not bring the GPUs to the desired state in time.
	ReasonApplyTimedOut = "ApplyTimedOut"
	// ReasonStepFailed: a step failed and is tried again.
	ReasonStepFailed = "StepFailed"
	// ReasonMPSDaemonFailed: the MPS control daemon does not run or does not answer.
	ReasonMPSDaemonFailed = "MPSDaemonFailed"
	// ReasonUnknownDevice: the spec names a GPU that the node does not have.
	ReasonUnknownDevice = "UnknownDevice"
	// ReasonVGPUUnlicensed: a vGPU of the node has no license, so that the driver slows it down.
	ReasonVGPUUnlicensed = "VGPUUnlicensed"
	// ReasonRebootRequired: the GPU cannot be reset here; the MIG mode changes at the next reboot.
	ReasonRebootRequired = "RebootRequired"
	// ReasonMIGManagerPartitioning: NVIDIA's mig-manager partitions the GPUs; the agent leaves the driver closed meanwhile.
	ReasonMIGManagerPartitioning = "MIGManagerPartitioning"
	// ReasonMIGManagerFailed: NVIDIA's mig-manager did not bring the GPUs to what was asked for.
	ReasonMIGManagerFailed = "MIGManagerFailed"
	// ReasonRebooting: the node is being rebooted, as the policy allows, since the MIG mode changes only so.
	ReasonRebooting = "Rebooting"
	// ReasonRebootInVain: the node was rebooted, and the MIG mode has not changed all the same. It is not rebooted again.
	ReasonRebootInVain = "RebootInVain"
	// ReasonAwaitingReport: the condition is not known yet.
	ReasonAwaitingReport = "AwaitingReport"
)

// Reasons of Events, besides those of conditions.
const (
	// EventGPUSchedulingDisabled: the taint gpusharing.io/changing keeps new GPU pods off a node before its GPUs change.
	EventGPUSchedulingDisabled = "GPUSchedulingDisabled"
	// EventGPUSchedulingEnabled: that taint was removed.
	EventGPUSchedulingEnabled = "GPUSchedulingEnabled"
	// EventPolicyTaintsChanged: taints of a policy were added to a node or removed from it.
	EventPolicyTaintsChanged = "PolicyTaintsChanged"
	// EventEvicting: a pod that holds what must be freed is being evicted.
	EventEvicting = "Evicting"
	// EventEvictionBlocked: a PodDisruptionBudget does not allow an eviction for now, or the API server denies one of the memory guard;
	// it is asked for again.
	EventEvictionBlocked = "EvictionBlocked"
	// EventMemoryPressure: a container uses more than its share of a GPU that is almost full.
	EventMemoryPressure = "MemoryPressure"
	// EventDesiredStateChanged: the controller changed the spec of a GPUNode. Nodes that change together for the same reason have
	// one Event.
	EventDesiredStateChanged = "DesiredStateChanged"
	// EventBaselineForgotten: a node has had so many GPUs that spec.baseline of its GPUNode has no room for those that are gone. Such a GPU
	// counts as a new one if it comes back: its baseline is then the state in which it comes.
	EventBaselineForgotten = "BaselineForgotten"
	// EventNodeLabelsChanged: labels or annotations of a node were changed: a configuration was selected, or NVIDIA's programs
	// were stopped or started again. Nodes that change together for the same reason have one Event.
	EventNodeLabelsChanged = "NodeLabelsChanged"
	// EventNVIDIAPodRestarted: a pod of NVIDIA's was deleted, so that its DaemonSet starts a new one.
	EventNVIDIAPodRestarted = "NVIDIAPodRestarted"
	// EventNVIDIAMPSDisabled: the operator wrote the NodeFeature that keeps NVIDIA's MPS DaemonSet off a node.
	EventNVIDIAMPSDisabled = "NVIDIAMPSDisabled"
	// EventNVIDIAMPSEnabled: the operator deleted that NodeFeature.
	EventNVIDIAMPSEnabled = "NVIDIAMPSEnabled"
	// EventClusterPolicyConfigured: the controller changed the ClusterPolicy as the policies need it.
	EventClusterPolicyConfigured = "ClusterPolicyConfigured"
	// EventClusterPolicyRestored: the controller restored the ClusterPolicy.
	EventClusterPolicyRestored = "ClusterPolicyRestored"
	// EventClusterPolicyRestoreWaiting: the ClusterPolicy is not restored yet, because that would end pods.
	EventClusterPolicyRestoreWaiting = "ClusterPolicyRestoreWaiting"
	// EventClusterPolicyReverted: another controller reverts the ClusterPolicy again and again. The operator waits before
	// it sets its fields again: a minute, then twice as long each time, an hour at most.
	EventClusterPolicyReverted = "ClusterPolicyReverted"
	// EventKindsGone: one of the operator's own CustomResourceDefinitions is being deleted, or is gone. The controller changes and
	// restores nothing until both are back.
	EventKindsGone = "KindsGone"
	// EventOperandsNotInstalled: under the Operator Lifecycle Manager a DaemonSet or another object that a bundle cannot hold could not
	// be applied. It is tried again.
	EventOperandsNotInstalled = "OperandsNotInstalled"
)

// Labels, annotations and taints.
const (
	// TaintChanging keeps new GPU pods off a node whose GPUs are to be changed. Effect NoSchedule.
	TaintChanging = Group + "/changing"
	// TaintStartup keeps GPU pods off a new node until it is as its policy asks. Effect NoSchedule.
	TaintStartup = Group + "/startup"
	// TaintStartupAutoscaler keeps GPU pods off a new node in a group that Cluster Autoscaler may scale. Cluster Autoscaler (1.29 and
	// newer) leaves taints with this prefix out of its templates, and waits for nodes that have one. Effect NoSchedule.
	TaintStartupAutoscaler = "startup-taint.cluster-autoscaler.kubernetes.io/gpusharing"
	// TaintStartupReadiness keeps GPU pods off a new node of Karpenter. Karpenter (v1.13 and newer) waits for nodes that have a taint
	// with this prefix; for one that its NodePool does not list it starts another node. Effect NoSchedule.
	TaintStartupReadiness = "readiness.k8s.io/gpusharing"
	// AnnotationBaseline records, on the operator's ConfigMaps and on the ClusterPolicy, the fields of the ClusterPolicy before the
	// operator changed them. On a Node it is the copy of spec.baseline of its GPUNode.
	AnnotationBaseline = Group + "/baseline"
	// AnnotationMachine names, on a GPUNode, the machine that it was made for, so that a Node that is deleted and registers again
	// is known: the UUID of the machine's firmware.
	AnnotationMachine = Group + "/machine"
	// AnnotationOrphaned tells, on a GPUNode, since when its Node is gone.
	AnnotationOrphaned = Group + "/orphaned"
	// LabelManagedBy has the value gpu-sharing-operator on the operator's own DeviceClasses and DeviceTaintRules.
	LabelManagedBy = "app.kubernetes.io/managed-by"
	// ManagedByOperator is the value of app.kubernetes.io/managed-by.
	ManagedByOperator = "gpu-sharing-operator"
	// AnnotationSync is changed on pods that mount the operator's ConfigMap, so that the kubelet projects it at once.
	AnnotationSync = Group + "/config"
	// AnnotationSelected tells, on a Node, which key was selected last and when: <key>@<seconds since 1970>. The deadline
	// for advertising what the key promises counts from it.
	AnnotationSelected = Group + "/selected"
	// AnnotationInstances tells, on a Node, which MIG instances NVIDIA's device plugin has seen: a hash of their UUIDs,
	// none where it has seen none, then @ and the UIDs of pods of it that have seen others and go first.
	AnnotationInstances = Group + "/instances"
	// AnnotationRetry is set by users on a GPUNode. Each new value makes the operator try again what failed on the node.
	AnnotationRetry = Group + "/retry"
	// AnnotationAllowFewerNodes is set by users, with value true, on the DaemonSet gpu-sharing-mps in the update that leaves out nodes. Without
	// it the API server denies that update, because Kubernetes would end the MPS pods on those nodes, and with them all MPS clients there.
	AnnotationAllowFewerNodes = Group + "/allow-fewer-nodes"
	// AnnotationNamespace on the ValidatingAdmissionPolicyBinding gpu-sharing-mps-nodes says in which namespace the MPS pods
	// of the operator are, also once it is uninstalled: no second operator begins in another one.
	AnnotationNamespace = Group + "/namespace"
	// AnnotationRestarted tells, on a Node, for which MIG instances, boot and configuration the operator restarted NVIDIA's device
	// plugin, which did not advertise what it must. It does so once.
	AnnotationRestarted = Group + "/plugin-restarted"
	// AnnotationStopped lists, on a Node, the deploy labels of NVIDIA's operands that the operator stopped, by comma: those
	// and no others are set to true again. The last entry says when: since@<seconds since 1970>.
	AnnotationStopped = Group + "/stopped"
	// AnnotationTimedOut records, on a Node, that a change with nothing to fall back to did not end in time, and when:
	// <reason>.<change>.<times in succession>@<seconds since 1970>. The operator has removed its taint and started NVIDIA's
	// programs again then, and begins that change again an hour later, the next time two hours later, and so on up to eight. A change that
	// was interrupted for too long counts from the second time on. With the reason OutsideWindow the drain ended with its maintenance
	// window, so that other nodes come first in the next.
	AnnotationTimedOut = Group + "/timed-out"
	// AnnotationInterrupted records, on a Node, that a driver upgrade or other maintenance interrupted a change there, or that
	// its agent was lost, and when: maintenance@<seconds since 1970> or agent-lost@<seconds since 1970>. The change continues
	// after that, with new deadlines.
	AnnotationInterrupted = Group + "/interrupted"
	// AnnotationBeside lists, on a DeviceClass of the operator's, the other DeviceClasses that served the same extended resource when it was
	// written. It is written again when they change: when one of several goes, Kubernetes' scheduler forgets the resource until one that is left is
	// written.
	AnnotationBeside = Group + "/beside"
	// AnnotationAutoscaling records, on the object of a node group, the annotations for the autoscaler before the operator wrote them, and
	// the policy that asked for that.
	AnnotationAutoscaling = Group + "/autoscaling"
	// AnnotationRunsAgent records, on a Node, that the operator set nvidia.com/gpu.deploy.client there, and when:
	// true@<seconds since 1970>. Only then uninstalling removes it.
	AnnotationRunsAgent = Group + "/client"
	// AnnotationOverruled tells, on a Node, which labels that another controller had set the operator set back last, and when:
	// <label>@<seconds since 1970>, by comma. It does so once in an hour for each.
	AnnotationOverruled = Group + "/overruled"
	// AnnotationOtherController tells, on a Node that a policy governs, that another controller offers its GPUs: the reason, such
	// as DRADriverActive. Once the other controller is gone it has a time too: <reason>@<seconds since 1970>.
	AnnotationOtherController = Group + "/other-controller"
	// AnnotationTaints lists, on a Node, the taints that the operator put there for a policy, as key:effect, by comma: those
	// and no others are taken off again.
	AnnotationTaints = Group + "/taints"
	// AnnotationTolerations records, on the ClusterPolicy, the tolerations that the operator added to daemonsets.tolerations:
	// those and no others are removed again.
	AnnotationTolerations = Group + "/tolerations"
	// AnnotationMPSCapable records, on a Node, the value that the label nvidia.com/mps.capable had before the operator set it
	// to false, and when the operator did so last: <value>@<seconds since 1970>. The value is empty if there was no label. On the
	// operator's NodeFeature it records when the operator applied it: false@<seconds since 1970>.
	AnnotationMPSCapable = Group + "/mps-capable"
	// AnnotationMIGConfig tells, on a Node, which configuration NVIDIA's mig-manager was asked for last and when:
	// <name>@<seconds since 1970>.
	AnnotationMIGConfig = Group + "/mig-config"
	// LabelOverridden is on a Node, with value true, where Node Feature Discovery honours the operator's NodeFeature. It tells
	// an override of nvidia.com/mps.capable that works from a label that happens to be false.
	LabelOverridden = Group + "/mps.capable-overridden"
	// LabelConfig selects, on a Node, a key of the device-plugin configuration. It is NVIDIA's.
	LabelConfig = "nvidia.com/device-plugin.config"
	// LabelRunsAgent starts and stops, on a Node, the agent and GPU clients of third parties. It is NVIDIA's: the GPU
	// Operator sets it since v26.7, and its driver manager and mig-manager stop it.
	LabelRunsAgent = "nvidia.com/gpu.deploy.client"
	// LabelMIGManager starts and stops NVIDIA's mig-manager on a Node. It is NVIDIA's.
	LabelMIGManager = "nvidia.com/gpu.deploy.mig-manager"
	// LabelMIGConfig selects, on a Node, the configuration that NVIDIA's mig-manager applies. It is NVIDIA's.
	LabelMIGConfig = "nvidia.com/mig.config"
	// LabelMIGConfigState is what became of that: pending, rebooting, success or failed. mig-manager writes it.
	LabelMIGConfigState = "nvidia.com/mig.config.state"
)
