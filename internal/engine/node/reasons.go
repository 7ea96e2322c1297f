// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"

// Class is what a reason means for a rollout, whatever the state of the node: some of the bits below.
type Class uint8

// The bits of a Class.
const (
	// Transient: the node waits for its turn, or for a step of the rollout that ends by itself.
	Transient Class = 1 << iota
	// UnderWay: the node is being changed, as opposed to one that waits for its turn or is blocked.
	UnderWay
	// Ends: nothing more happens to the node until the policy or the cluster is changed.
	Ends
	// NeedsAttention: a person should look at the node, though its change did not fail: something on it is left undone.
	NeedsAttention
	// First: a policy gives it as its own reason, whatever other nodes wait for.
	First
	// Chosen: a user wants it so, for as long as he wants.
	Chosen
)

// Plain is the class of a reason that blocks a node until something is done about it, of one of a node that waits for
// nothing, and of one that no node has.
const Plain Class = 0

// reason is what this package knows of a reason of the API. What it means is said where it is declared.
type reason struct {
	class Class
	do    string // what a person does about it, in a sentence or two without the last full stop; docs/PAGE.md has more
}

// ClassOf is the class of a reason.
func ClassOf(reason string) Class { return reasons[reason].class }

// WhatToDo is what a person does about a reason; empty for a word that is none. docs/troubleshooting.md shows it too.
func WhatToDo(reason string) string { return reasons[reason].do }

// Is reports whether a class has a bit.
func (c Class) Is(bit Class) bool { return c&bit != 0 }

// What to do about many reasons.
const (
	doNothing = "Nothing"
	doWait    = "Wait: the change goes on by itself, or fails within its time"
)

// reasons has every reason of the API. States of nodes, conditions, metrics, Events and docs/troubleshooting.md follow from it.
var reasons = map[string]reason{
	v1alpha1.ReasonAccepted:        {Plain, doNothing},
	v1alpha1.ReasonConflicted:      {Plain, "Give one of the policies a higher `priority`, or make their selectors disjoint"},
	v1alpha1.ReasonDRAStackActive:  {Plain, "Look at the pods of NVIDIA's DRA driver (docs/dra.md), or remove the GPUCluster. Beside a ClusterPolicy delete one of both"},
	v1alpha1.ReasonNoDevicePlugin:  {Plain, "Install NVIDIA's GPU Operator or its device plugin, then `helm upgrade`. If it is not found, `kubectl gpusharing doctor` prints the values to set"},
	v1alpha1.ReasonNoMatchingNodes: {Plain, "Compare `nodeSelector` with the labels of your nodes, and `gpuSelector.products` with `kubectl get gpunodes -o yaml`. If an autoscaler makes the nodes, set `autoscaling.emptyPool: Expected`"},
	v1alpha1.ReasonTooManyPolicies: {Plain, "The operator follows 500 policies: those that govern nodes, then the oldest. Delete policies that nobody needs, or join those that ask for the same"},
	v1alpha1.ReasonPaused:          {Transient | First | Chosen, "Set `rollout.paused: false`. Until then new nodes keep whole GPUs, and autoscalers are told nothing"},
	v1alpha1.ReasonInvalidWindow:   {Transient | Ends | First, "Correct `schedule` or `timeZone` of `rollout.windows`"},

	v1alpha1.ReasonTaintsPresent:            {Plain, doNothing},
	v1alpha1.ReasonTolerationsChanging:      {Plain, "Wait: NVIDIA's programs get the toleration first"},
	v1alpha1.ReasonTolerationMissing:        {Plain, "Add the toleration that the message names"},
	v1alpha1.ReasonTaintConflict:            {Plain, "Remove the other taint from the node, or the taint from the policy"},
	v1alpha1.ReasonNodeNotInitialized:       {Plain, "Wait for Karpenter: the node has the label `karpenter.sh/initialized=true` once all that its pods ask for is there"},
	v1alpha1.ReasonStartupTaintMissing:      {Plain, "List the startup taint in the NodePool, which makes Karpenter replace its nodes; or, from Karpenter v1.13 on, install with `--set karpenter.readinessTaint=true`"},
	v1alpha1.ReasonStartupTaintInMachineSet: {Plain, "Remove the startup taint from the MachineSet, and from the Machine that the message names. The operator adds one to new nodes itself"},

	v1alpha1.ReasonConfigured:           {Plain, doNothing},
	v1alpha1.ReasonConfiguring:          {Plain, doNothing},
	v1alpha1.ReasonAdviceOnly:           {Plain, "Run `kubectl gpusharing plan -f POLICY` and apply what it prints for the node group, or set `spec.autoscaling.mode: Manage`"},
	v1alpha1.ReasonUnknownShape:         {Plain, "Declare product and number of GPUs in `spec.autoscaling.nodeShapes`, as the message shows"},
	v1alpha1.ReasonAmbiguousShape:       {Plain, "Give each kind of node a node group of its own, or correct `nodeShapes`"},
	v1alpha1.ReasonNodesDisagree:        {Plain, "Look at the node that the message names, and at the agent's pod there: it reports GPUs that neither the kubelet nor other nodes confirm"},
	v1alpha1.ReasonNodeGroupNotFound:    {Plain, "Correct the name in `nodeShapes`"},
	v1alpha1.ReasonNodeGroupNotSelected: {Plain, "Add the labels of `nodeSelector` to the template of the node group, or remove the node group from `nodeShapes`"},
	v1alpha1.ReasonResourceNotSupported: {Plain, "Set `minReplicas: 1` for the node group (with NVIDIA's DRA driver as many as you need), or keep the name `nvidia.com/gpu`"},
	v1alpha1.ReasonMultipleResources:    {Plain, "Use one MIG profile, or keep one node of the group"},
	v1alpha1.ReasonOverlayNotServed:     {Plain, "Install Karpenter v1.7 or newer with its CRD `nodeoverlays.karpenter.sh`"},
	v1alpha1.ReasonFeatureGateOff:       {Plain, "Start Karpenter with `--feature-gates=NodeOverlay=true`"},
	v1alpha1.ReasonOverlayConflict:      {Plain, "Delete the other NodeOverlay that sets the same resource, or change its weight"},
	v1alpha1.ReasonGPUCountRises:        {Plain, "Set `renameByDefault: true`, or `rollout.startupTaint: UntilReady` with `autoscaling.unrenamedReplicas: Announce`"},
	v1alpha1.ReasonOwnedByOther:         {Plain, "Let the field manager that the message names write the value, or remove it there"},
	v1alpha1.ReasonRemovedByOther:       {Plain, "Add the annotations, or the NodeOverlay, to the source from which the field manager applies. Then set `autoscaling.mode` to `Advise` and back"},
	v1alpha1.ReasonInvalidValue:         {Plain, "Correct the annotation that the message names"},
	v1alpha1.ReasonNotPermitted:         {Plain, "Install the chart with `--set autoscaling.manage=true`"},
	v1alpha1.ReasonWriteFailed:          {NeedsAttention, "Read the answer of the API server in the message, and look for an admission webhook or policy that refuses the write. The operator tries again; other nodes go on"},
	v1alpha1.ReasonAcceleratorLabel:     {Plain, "Remove the GPU label from the node group and its nodes, or keep the name `nvidia.com/gpu`"},
	v1alpha1.ReasonLimitsNotCounted:     {Plain, "Change the limit as the message says"},
	v1alpha1.ReasonStaleTemplate:        {Plain, "Restart Cluster Autoscaler"},
	v1alpha1.ReasonStartupGap:           {Plain, "Register new nodes of the group with the startup taint as the message says, or bound the size of the group"},
	v1alpha1.ReasonScaleDownCandidate:   {Plain, "Annotate full nodes with `cluster-autoscaler.kubernetes.io/scale-down-disabled=true` if their pods must not be moved"},

	v1alpha1.ReasonRequestNotOffered: {Plain, "Change the workloads, or the policy, as the message says: they ask for a resource that no node will have"},

	v1alpha1.ReasonNoDemand:           {Plain, doNothing},
	v1alpha1.ReasonInstancesIdle:      {Plain, "Wait for the scheduler. If that lasts, `kubectl describe pod` says what else a pod lacks: CPU, memory, a volume"},
	v1alpha1.ReasonRepartitionAdvised: {Plain, "Change the layouts to what `status.onDemand.changes` lists, or leave it: pods start as others end"},
	v1alpha1.ReasonRepartitioning:     {Plain, "Wait; `status.demand` of GPUNodes says which GPUs change"},
	v1alpha1.ReasonProfileNotAllowed:  {Plain, "Add the profile to `onDemand.profiles`, or let the pods ask for another"},
	v1alpha1.ReasonNoIdleRoom:         {Plain, "Wait until pods end (`status.onDemand.requests[].holders`), or add nodes"},
	v1alpha1.ReasonReserveKept:        {Plain, "Lower `onDemand.reserve`, or add nodes"},
	v1alpha1.ReasonIdleTooShort:       {Plain, "Wait (`status.onDemand.requests[].untilTime`), or lower `onDemand.idleSeconds`"},
	v1alpha1.ReasonGPUsChanging:       {Plain, "Wait until the nodes of the policy are ready; its condition Ready says what they wait for"},

	v1alpha1.ReasonAdvertisedNotScheduled: {Plain, "Mend what `kubectl describe pod` says, or delete the pods; `kubectl gpusharing status` says when the next attempt is"},

	v1alpha1.ReasonAutoscalerRaces: {Plain, "Let the autoscaler wait: Cluster Autoscaler by `--new-pod-scale-up-delay=60s`, Karpenter by `BATCH_IDLE_DURATION`; or set `onDemand.reserve`"},

	v1alpha1.ReasonContainerOverShare: {Plain, "Lower what the container that the message names uses, or give its pod a MIG instance, or MPS with a limit. With `memory.guard.mode: Evict` the message says why a pod is not evicted"},
	v1alpha1.ReasonNotMeasured:        {Plain, "Wait for the update of the agents, or look at the pods on the nodes that the message names: their agents do not measure for the memory guard, as on GPUs that report no memory (GB10)"},

	v1alpha1.ReasonEnforced:          {Plain, doNothing},
	v1alpha1.ReasonNotVerified:       {Plain, "Nothing. With `memory.limit: Enforce` the first pod with a share shows it"},
	v1alpha1.ReasonLimitGateOff:      {Plain, "Turn the feature gate on (docs/monitoring.md#limit-the-memory-of-time-sliced-gpus), or set `memory.limit: None`"},
	v1alpha1.ReasonCgroupV1:          {Plain, "Use `memory.guard` on the node, or boot it with cgroup v2"},
	v1alpha1.ReasonDriverTooOld:      {Plain, "Update the driver to 615 or later, or use `memory.guard`"},
	v1alpha1.ReasonNoController:      {Plain, "Use a kernel with the controller misc, or 6.14 and later with dmem"},
	v1alpha1.ReasonBackendOff:        {Plain, "Remove `RmMemacctMode` from `NVreg_RegistryDwords` of the kernel module, and load it anew"},
	v1alpha1.ReasonNotDelegated:      {Plain, "Look at `cgroup.subtree_control` of the control groups above the pods: one does not pass the controller `dmem` or `misc` on"},
	v1alpha1.ReasonNoPermission:      {Plain, "Look at the mount `/sys/fs/cgroup` of the agent's pod: it must be the node's, and writable"},
	v1alpha1.ReasonFractioningActive: {Plain, "Let one of them limit memory: set `memory.limit: None`, or keep the program that the message names off the node"},
	v1alpha1.ReasonForeignLimit:      {Plain, "Remove the limit that another program has set (`nvidia-smi memory-limits`), or `NVIDIA_GPU_MEMORY_LIMIT` from the pod. Other pods are limited all the same"},
	v1alpha1.ReasonNoPersistence:     {Plain, "Start nvidia-persistenced on the node, as NVIDIA's driver container does"},
	v1alpha1.ReasonNotEnforced:       {Plain, "Set `memory.limit: None` and use `memory.guard`; please report driver and kernel"},
	v1alpha1.ReasonShareTooLarge:     {Plain, "Lower `memory.perReplica`, or give GPUs with less memory a policy of their own"},
	v1alpha1.ReasonAboveLimit:        {Plain, "Restart the pods that the message names, or let them use less"},
	v1alpha1.ReasonEarlierMemory:     {Plain, "Restart the pods that the message names, or let them end"},
	v1alpha1.ReasonCgroupNotFound:    {Plain, "Wait, if the pod has just started. Otherwise its control group is not where kubelets make it, at `kubepods` or `kubepods.slice`"},
	v1alpha1.ReasonLimitFailed:       {Plain, "Look at the log of the agent on the node, which has NVML's error"},

	v1alpha1.ReasonReady:                   {Plain, doNothing},
	v1alpha1.ReasonAgentNotReporting:       {Plain, "Look at the pods with `app.kubernetes.io/name=gpu-sharing-agent` on the node. If there are none, look at its labels (docs/install.md#where-the-agents-run)"},
	v1alpha1.ReasonGPUNodeMissing:          {NeedsAttention, "The log of the controller says why the GPUNode cannot be made again: usually an admission webhook or policy refuses it. The node stays as it is until then, and other nodes go on"},
	v1alpha1.ReasonNodeOptedOut:            {Plain, "Remove `nvidia.com/gpu.deploy.operands=false`, or set `nvidia.com/gpu.workload.config=container` where the ClusterPolicy has `sandboxWorkloads`; or leave the node out of the policy"},
	v1alpha1.ReasonConfiguringDevicePlugin: {Transient | First, doWait},
	v1alpha1.ReasonConfigMapFull:           {Ends | NeedsAttention, "Join policies that ask for the same into one, or delete some. If the ConfigMap that NVIDIA's device plugin read before is large, remove what no node selects"},
	v1alpha1.ReasonOutsideWindow:           {Transient | Chosen, "Wait for `status.nextWindowTime`, or edit `rollout.windows`"},
	v1alpha1.ReasonWaitingForFirst:         {Transient, "Wait for the first node. If it failed, look at its reason"},
	v1alpha1.ReasonWaitingForBudget:        {Transient, "Wait, or raise `rollout.maxUnavailable`"},
	v1alpha1.ReasonRolloutHalted:           {Transient | Ends, "Repair the nodes that failed, then edit the policy or annotate their GPUNodes with gpusharing.io/retry (docs/troubleshooting.md)"},
	v1alpha1.ReasonGPUInUse:                {Plain, "Let the pods in the message end, or set `rollout.drain.mode: Evict`. End a process outside of pods on the node"},
	v1alpha1.ReasonDrainTimedOut:           {Plain, "End the pod that the message names, or raise `rollout.drain.timeoutSeconds`. If a PodDisruptionBudget refuses the eviction, give its workload another replica"},
	v1alpha1.ReasonDriverUpgrade:           {Plain, "Wait for the end of the upgrade. If it failed, look at NVIDIA's driver pod or at the MachineConfigPool"},
	v1alpha1.ReasonNodeMaintenance:         {Plain, "Wait for the end of the upgrade. If it failed, look at NVIDIA's driver pod or at the MachineConfigPool"},
	v1alpha1.ReasonStoppingOperands:        {Transient | UnderWay, doWait},
	v1alpha1.ReasonDisablingNVIDIAMPS:      {Transient | UnderWay, doWait},
	v1alpha1.ReasonNodeFeatureIgnored:      {NeedsAttention, "Let Node Feature Discovery accept the operator's NodeFeature (docs/install.md#mps-beside-nvidias-own-mps-daemonset)"},
	v1alpha1.ReasonMPSCapableReset:         {NeedsAttention, "Stop the field manager that the message names from setting the label, for example in a MachineSet"},
	v1alpha1.ReasonApplying:                {Transient | UnderWay, doWait},
	v1alpha1.ReasonSelecting:               {Transient | UnderWay, doWait},
	v1alpha1.ReasonVerifying:               {Transient | UnderWay, doWait},
	v1alpha1.ReasonNotAdvertised:           {NeedsAttention, "Look at the log of NVIDIA's device plugin on the node. After a kubelet lost the plugin, restart the kubelet (docs/install.md#a-kubelet-that-loses-the-device-plugin)"},
	v1alpha1.ReasonRestoring:               {UnderWay, doWait},
	v1alpha1.ReasonClusterNotRead:          {Plain, "Look at what the message names: a CustomResourceDefinition, a conversion webhook, or a right that the controller lacks. Its log has the error"},
	v1alpha1.ReasonProgressing:             {Transient | UnderWay, doWait},

	v1alpha1.ReasonProfileNotAvailable:      {Plain, "Ask for a profile of the GPU. `kubectl gpusharing status <node>` lists them"},
	v1alpha1.ReasonLayoutDoesNotFit:         {Plain, "Ask for fewer or smaller instances. The message says what fits"},
	v1alpha1.ReasonMIGNotSupported:          {Plain, "Leave the node out of the policy, or use TimeSlicing or MPS"},
	v1alpha1.ReasonNoLayoutMatches:          {Plain, "Add a layout for the node's GPUs to `sharing.mig.layouts`"},
	v1alpha1.ReasonMixedInstances:           {Plain, "Use `mig.resourceNames: PerProfile`, or the same single profile on all GPUs of the node"},
	v1alpha1.ReasonPartialSelection:         {Plain, "Select all GPUs of the node, or none. NVIDIA's device plugin shares all GPUs that have one resource name"},
	v1alpha1.ReasonMPSClientLimitExceeded:   {Plain, "Use at most 48 replicas, and 16 on GPUs below compute capability 7.5"},
	v1alpha1.ReasonNoNodeFeatures:           {Plain, "Install Node Feature Discovery v0.17 or later"},
	v1alpha1.ReasonMPSMultiUserNotSupported: {Plain, "Remove `multiUser`: the GPU is older than Volta"},
	v1alpha1.ReasonTimeSliceNotSupported:    {Plain, "Remove `sharing.timeSlicing.interval`: the driver has no time slice for the GPU, which is older than Volta or virtual"},
	v1alpha1.ReasonMemoryLimitExceeded:      {Plain, "Use a `pinnedMemoryLimit` or `memory.perReplica` that the GPU has"},
	v1alpha1.ReasonLaterVersion:             {Plain, "Install the later version of the operator again, or change the policy"},
	v1alpha1.ReasonVirtualGPUNotSupported:   {Plain, "Leave the node out of the policy: NVIDIA's vGPU software has split its GPUs already"},
	v1alpha1.ReasonProcessesUnknown:         {Plain, "Update the driver, or drain the node and share it while it is empty"},
	v1alpha1.ReasonMIGActive:                {Plain, "Let a MIG policy select the GPU, or disable its MIG mode"},
	v1alpha1.ReasonNoMIGManager:             {Plain, "Enable mig-manager in the ClusterPolicy, or remove `mig.actuator`"},
	v1alpha1.ReasonReplicasDiffer:           {Plain, "Use the same replicas in both layouts"},

	v1alpha1.ReasonOperandsLeftStopped:  {NeedsAttention, "Wait: the operator repairs it. If it stays, look at the GPU Operator's log"},
	v1alpha1.ReasonOperandsNotEnding:    {NeedsAttention, "Look at the pod that the message names: why it does not end"},
	v1alpha1.ReasonMIGManagerBusy:       {Plain, "Wait for mig-manager. If it is stuck, restart its pod"},
	v1alpha1.ReasonMIGManagerStuck:      {NeedsAttention, "Wait for mig-manager. If it is stuck, restart its pod"},
	v1alpha1.ReasonConfigManagerFailing: {NeedsAttention, "Correct the label `nvidia.com/device-plugin.config`, which names a config that the ConfigMap does not have"},
	v1alpha1.ReasonDevicePluginFailing:  {NeedsAttention, "Look at the log of NVIDIA's device plugin on the node"},
	v1alpha1.ReasonDevicePluginOutdated: {NeedsAttention, "Wait: the operator repairs it. If it stays, look at the GPU Operator's log"},
	v1alpha1.ReasonMPSCapableStale:      {NeedsAttention, "Wait: the operator repairs it. If it stays, look at the GPU Operator's log"},
	v1alpha1.ReasonLimitsPending:        {Plain, "Restart the pods that the message names, or let them end"},
	v1alpha1.ReasonMPSUnreachable:       {Plain, "Restart the pods that use the MPS daemon that the message names. Keep NVIDIA's MPS DaemonSet off the node"},
	v1alpha1.ReasonMPSUserWaiting:       {Plain, "Run the pods as one user ID, or set `multiUser` (docs/mps.md#run-pods-of-several-users)"},
	v1alpha1.ReasonMPSClientsRunning:    {First, "Let the pods in the message end"},
	v1alpha1.ReasonGPUMissing:           {Plain, "Replace the GPU, or select by `products` instead of `indexes`"},
	v1alpha1.ReasonComputeModeLeft:      {NeedsAttention, "Set the GPU's compute mode to default with `nvidia-smi -c 0`, if no other program needs it"},
	v1alpha1.ReasonComputeModeLost:      {NeedsAttention, "Start nvidia-persistenced on the node, as NVIDIA's driver container does. To have the compute mode set at once, let the pods that use the GPU end (docs/mps.md)"},

	v1alpha1.ReasonSlicerActive:        {Plain, "Let one of them serve the node. The operator takes over five minutes after the other has gone"},
	v1alpha1.ReasonDRADriverActive:     {Plain, "Drain the node, then keep NVIDIA's device plugin or its DRA driver off it (docs/dra.md#move-a-node-from-one-stack-to-the-other)"},
	v1alpha1.ReasonConfigLabelReset:    {Plain, "Stop the field manager that the message names from setting the label, for example in a MachineSet"},
	v1alpha1.ReasonMIGManagerReenabled: {NeedsAttention, "Stop setting mig-manager's labels on the node"},
	v1alpha1.ReasonMIGConfigIgnored:    {NeedsAttention, "Stop setting mig-manager's labels on the node"},
	v1alpha1.ReasonChangedByOthers:     {NeedsAttention, "Find the other writer with `kubectl get … --show-managed-fields`"},

	v1alpha1.ReasonNotOnDRA:            {Plain, "Use MIG, `Exclusive` or TimeSlicing as the message says, or leave the node out of the policy"},
	v1alpha1.ReasonDRAUnavailable:      {Plain, "Use Kubernetes 1.37, turn on the feature gate that the message names, or delete the DeviceTaintRule that it names. A node that is being restored waits for that too"},
	v1alpha1.ReasonDRADriverUnknown:    {Plain, "Install v0.5.0 of NVIDIA's DRA driver: the message names a device whose ResourceSlice has another form"},
	v1alpha1.ReasonDRADriverFailing:    {Plain, "Look at the container that the message names. If the driver has no pod on the node, look at its DaemonSet"},
	v1alpha1.ReasonDRASharesDiffer:     {Plain, "Set the values that the message names in the driver's chart. If two policies ask for different numbers, give them the same `replicas`"},
	v1alpha1.ReasonDRAIntervalDiffers:  {Plain, "Set the feature gate, or the config of the DeviceClass, that the message names (docs/dra.md#set-the-time-slice). Or remove `timeSlicing.interval`"},
	v1alpha1.ReasonDynamicMIGActive:    {Plain, "Set `featureGates.DynamicMIG=false` in the driver's chart, or leave the node out of the policy"},
	v1alpha1.ReasonDeviceClassConflict: {Plain, "Give the DeviceClass that the message names the resource name, or delete it. If several serve one resource, keep one, and have the scheduler read it again as the message says"},
	v1alpha1.ReasonNotPublished:        {Plain, "Look at the log of the driver's pod on the node: its ResourceSlices do not show the GPUs and instances that are there"},
	v1alpha1.ReasonDeviceGone:          {Plain, "Delete the pods that the message names. They were allocated devices that no longer exist"},

	v1alpha1.ReasonMeasuring:              {Plain, doNothing},
	v1alpha1.ReasonDiscovered:             {Plain, doNothing},
	v1alpha1.ReasonNVMLFailed:             {Plain, "Run `nvidia-smi` on the node. The message has NVML's error"},
	v1alpha1.ReasonDriverNotFound:         {Plain, "Install the driver, or set the chart's value `driver.root`"},
	v1alpha1.ReasonDriverNotReady:         {Plain, "Wait for NVIDIA's driver pod on the node"},
	v1alpha1.ReasonDriverMismatch:         {Plain, "Reboot the node, so that the loaded kernel module and the driver's library have one version"},
	v1alpha1.ReasonPlatformNotSupported:   {Plain, "Leave the node out: its platform has no such driver"},
	v1alpha1.ReasonDeviceNodesMissing:     {Plain, "Look at the message: the agent could not write below the driver's `/dev`, or NVIDIA's CDI specification"},
	v1alpha1.ReasonPodResourcesFailed:     {Plain, "Look at the kubelet's socket `/var/lib/kubelet/pod-resources`, and set the chart's value `kubelet.root` if it is elsewhere"},
	v1alpha1.ReasonApplied:                {Plain, doNothing},
	v1alpha1.ReasonNoPolicy:               {Plain, doNothing},
	v1alpha1.ReasonApplyTimedOut:          {Plain, "Look at the log of the agent on the node. The message has the step and NVML's error"},
	v1alpha1.ReasonStepFailed:             {Plain, "Look at the log of the agent on the node. The message has the step and NVML's error"},
	v1alpha1.ReasonMPSDaemonFailed:        {Plain, "Look at the log of the MPS pod: `kubectl -n gpu-sharing-operator logs -l app.kubernetes.io/name=gpu-sharing-mps`"},
	v1alpha1.ReasonUnknownDevice:          {Plain, "Wait: the controller sees the new GPUs. If it stays, look at the GPUs of the node"},
	v1alpha1.ReasonVGPUUnlicensed:         {Plain, "The vGPU works, but slowly. Look at `driver.licensingConfig` of the ClusterPolicy and at the license server"},
	v1alpha1.ReasonRebootRequired:         {Plain, "Reboot the node, or set `rollout.reboot: IfRequired` and the chart's value `agent.allowReboot`"},
	v1alpha1.ReasonMIGManagerPartitioning: {Transient | UnderWay, doNothing},
	v1alpha1.ReasonMIGManagerFailed:       {Plain, "Look at the log of mig-manager: the message has the command"},
	v1alpha1.ReasonRebooting:              {Transient | UnderWay, "Wait for the node"},
	v1alpha1.ReasonRebootInVain:           {Plain, "Look for a setting of the hypervisor or cloud that keeps MIG off, then annotate the GPUNode with gpusharing.io/retry"},
	v1alpha1.ReasonAwaitingReport:         {Plain, doNothing},
}
