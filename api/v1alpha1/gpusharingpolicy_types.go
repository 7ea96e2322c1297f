// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// GPUSharingPolicy says how the GPUs of the nodes that it selects are shared.
//
// +genclient
// +genclient:nonNamespaced
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=gsp,categories=gpusharing
// +kubebuilder:printcolumn:name="Strategy",type=string,JSONPath=`.spec.sharing.strategy`
// +kubebuilder:printcolumn:name="Nodes",type=integer,JSONPath=`.status.nodes.matched`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.nodes.ready`
// +kubebuilder:printcolumn:name="Updated",type=integer,JSONPath=`.status.nodes.updated`
// +kubebuilder:printcolumn:name="Blocked",type=integer,JSONPath=`.status.nodes.blocked`
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Generation",type=integer,priority=1,JSONPath=`.metadata.generation`
// +kubebuilder:printcolumn:name="Observed",type=integer,priority=1,JSONPath=`.status.observedGeneration`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
type GPUSharingPolicy struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is the desired state.
	// +required
	Spec GPUSharingPolicySpec `json:"spec,omitzero"`

	// status is the observed state. Its conditions are Unknown until the controller has observed the policy.
	// +optional
	// +kubebuilder:default={observedGeneration: 0, conditions: {{type: "Accepted", status: "Unknown", reason: "AwaitingReport", message: "The controller has not observed the policy yet; if that lasts, look at the pods with app.kubernetes.io/name=gpu-sharing-controller", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Ready", status: "Unknown", reason: "AwaitingReport", message: "The controller has not observed the policy yet; if that lasts, look at the pods with app.kubernetes.io/name=gpu-sharing-controller", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Reconciling", status: "Unknown", reason: "AwaitingReport", message: "The controller has not observed the policy yet", lastTransitionTime: "1970-01-01T00:00:00Z"}, {type: "Stalled", status: "Unknown", reason: "AwaitingReport", message: "The controller has not observed the policy yet", lastTransitionTime: "1970-01-01T00:00:00Z"}}}
	Status GPUSharingPolicyStatus `json:"status,omitzero"`
}

// GPUSharingPolicySpec is the desired state: which GPUs, how shared, and how carefully to get there.
//
// +kubebuilder:validation:XValidation:rule="!has(self.gpuSelector) || !has(self.sharing.mig) || self.sharing.mig.layouts.all(l, !has(l.gpus) || ((!has(self.gpuSelector.indexes) || !has(l.gpus.indexes) || l.gpus.indexes.all(i, i in self.gpuSelector.indexes)) && (!has(self.gpuSelector.products) || !has(l.gpus.products) || l.gpus.products.exists(p, self.gpuSelector.products.exists(q, p.startsWith(q.replace('?', '*').split('*')[0]) || q.startsWith(p.replace('?', '*').split('*')[0]))))))",message="a layout names an index, or only products, that gpuSelector does not select",fieldPath=".sharing.mig.layouts"
type GPUSharingPolicySpec struct {
	// nodeSelector selects nodes by matchLabels and matchExpressions, unlike a Pod's; {} selects every GPU node. Labels that this operator or NVIDIA's programs
	// write as a consequence of sharing are refused, since selecting by them would undo itself.
	// +required
	NodeSelector *NodeSelector `json:"nodeSelector,omitempty"`

	// gpuSelector selects GPUs of those nodes. Absent: all of them. NVIDIA's device plugin shares per node, not per GPU,
	// so with the strategies TimeSlicing and MPS it must select all GPUs of a node or none.
	// +optional
	GPUSelector *GPUMatch `json:"gpuSelector,omitempty"`

	// priority decides when several policies select one node: the highest governs it, from -1000000 to 1000000; among equals the
	// oldest, then the first by name. Default: 0.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=-1000000
	// +kubebuilder:validation:Maximum=1000000
	Priority int32 `json:"priority,omitempty"`

	// sharing is how the selected GPUs are shared.
	// +required
	Sharing Sharing `json:"sharing,omitzero"`

	// rollout is how a change is brought to the nodes.
	// +optional
	// +kubebuilder:default={}
	Rollout Rollout `json:"rollout,omitzero"`

	// taints are kept on the nodes that the policy governs, and taken off again with it: to keep pods that ask for no GPU
	// off them, or to set nodes apart. A taint that was there before stays. NVIDIA's programs have to tolerate them first:
	// those of key nvidia.com/gpu they do by themselves; for others the toleration is added to the ClusterPolicy's
	// daemonsets.tolerations where that disturbs nothing that runs, and otherwise the condition Tainted says what to add.
	// +optional
	// +listType=map
	// +listMapKey=key
	// +listMapKey=effect
	// +kubebuilder:validation:MaxItems=8
	Taints []Taint `json:"taints,omitempty"`

	// autoscaling decides how autoscalers learn what a new node will advertise. No autoscaler knows shared GPUs by itself.
	// +optional
	// +kubebuilder:default={}
	Autoscaling Autoscaling `json:"autoscaling,omitzero"`

	// releasePolicy decides what happens to a node when the policy releases it: when the policy is deleted or no longer
	// selects the node, and no other policy selects it. Restore: it goes back to the baseline, its state before the operator changed it.
	// Retain: it stays as it is. Default: Restore.
	// +optional
	// +kubebuilder:default=Restore
	ReleasePolicy ReleasePolicy `json:"releasePolicy,omitempty"`
}

// NodeSelector selects nodes by their labels. All requirements must match.
//
// +kubebuilder:validation:XValidation:rule="!has(self.matchLabels) || self.matchLabels.all(k, !k.matches('^gpusharing[.]io/|^nvidia[.]com/(gpu[.](product|replicas|count|memory|sharing-strategy|multiprocessors|slices[.].*|engines[.].*|deploy[.].*)|mig[.](config.*|strategy)|mig-.*|mps[.]capable|device-plugin[.]config)$'))",message="must not select by a label that this operator or NVIDIA's programs write as a consequence of sharing; select by your own labels, and GPUs by gpuSelector",fieldPath=".matchLabels"
// +kubebuilder:validation:XValidation:rule="!has(self.matchExpressions) || self.matchExpressions.all(e, !e.key.matches('^gpusharing[.]io/|^nvidia[.]com/(gpu[.](product|replicas|count|memory|sharing-strategy|multiprocessors|slices[.].*|engines[.].*|deploy[.].*)|mig[.](config.*|strategy)|mig-.*|mps[.]capable|device-plugin[.]config)$'))",message="must not select by a label that this operator or NVIDIA's programs write as a consequence of sharing; select by your own labels, and GPUs by gpuSelector",fieldPath=".matchExpressions"
// +kubebuilder:validation:XValidation:rule="!has(self.matchLabels) || self.matchLabels.all(k, k.size() <= 317 && k.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))",message="must have label keys, such as example.com/pool",fieldPath=".matchLabels"
// +kubebuilder:validation:XValidation:rule=`!has(self.matchLabels) || self.matchLabels.all(k, self.matchLabels[k].size() <= 63 && !self.matchLabels[k].matches(r'[^\w.-]'))`,message="must have label values: at most 63 letters, digits, dashes, dots and underscores, such as team-a",fieldPath=".matchLabels"
// +kubebuilder:validation:XValidation:rule=`!has(self.matchLabels) || self.matchLabels.all(k, !['-', '_', '.'].exists(c, self.matchLabels[k].startsWith(c) || self.matchLabels[k].endsWith(c)))`,message="must have label values: at most 63 letters, digits, dashes, dots and underscores, which begin and end with a letter or digit",fieldPath=".matchLabels"
type NodeSelector struct {
	// matchLabels are labels that a node must have, with these values.
	// +optional
	// +kubebuilder:validation:MaxProperties=12
	MatchLabels map[string]string `json:"matchLabels,omitempty"`

	// matchExpressions are requirements on the labels of a node.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	MatchExpressions []NodeSelectorRequirement `json:"matchExpressions,omitempty"`
}

// NodeSelectorOperator relates a label to values, as in every Kubernetes label selector.
// +kubebuilder:validation:Enum=In;NotIn;Exists;DoesNotExist
type NodeSelectorOperator string

// NodeSelectorRequirement is one requirement on the labels of a node or namespace.
//
// +kubebuilder:validation:XValidation:rule="(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",message="values must be given for the operators In and NotIn, and only for them"
type NodeSelectorRequirement struct {
	// key of the label.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:XValidation:rule="self.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$')",message="must be a label key, such as example.com/pool"
	Key string `json:"key,omitempty"`

	// operator that relates the label to the values.
	// +required
	Operator NodeSelectorOperator `json:"operator,omitempty"`

	// values for the operators In and NotIn.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:XValidation:rule=`self.matches(r'^([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?$')`,message="must be a label value, such as team-a"
	Values []string `json:"values,omitempty"`
}

// TaintEffect is what a taint does to pods that do not tolerate it. NoExecute is not offered: it would evict what runs
// without regard to any PodDisruptionBudget.
// +kubebuilder:validation:Enum=NoSchedule;PreferNoSchedule
type TaintEffect string

// The effects of a taint.
const (
	TaintEffectNoSchedule       TaintEffect = "NoSchedule"
	TaintEffectPreferNoSchedule TaintEffect = "PreferNoSchedule"
)

// Taint is a taint that a policy keeps on its nodes.
type Taint struct {
	// key of the taint, such as example.com/shared-gpu.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +kubebuilder:validation:XValidation:rule="self.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$')",message="must be a label key, such as example.com/shared-gpu"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^(gpusharing[.]io|node[.]kubernetes[.]io|node[.]cloudprovider[.]kubernetes[.]io)/|^(startup-taint[.]cluster-autoscaler[.]kubernetes[.]io|readiness[.]k8s[.]io)/gpusharing$')",message="must not be a taint that Kubernetes or this operator itself puts on nodes; use a key of your own"
	Key string `json:"key,omitempty"`

	// value of the taint.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule=`self.matches(r'^([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?$')`,message="must be a label value, such as team-a"
	Value string `json:"value,omitempty"`

	// effect of the taint on pods that do not tolerate it. Default: NoSchedule.
	// +optional
	// +kubebuilder:default=NoSchedule
	Effect TaintEffect `json:"effect,omitempty"`
}

// RebootMode says whether the agent may reboot a node.
// +kubebuilder:validation:Enum=Never;IfRequired
type RebootMode string

// The reboot modes.
const (
	RebootModeNever      RebootMode = "Never"
	RebootModeIfRequired RebootMode = "IfRequired"
)

// StartupTaintMode decides whether a node that joins the cluster has the startup taint.
// +kubebuilder:validation:Enum=None;UntilReady
type StartupTaintMode string

// The modes of the startup taint.
const (
	StartupTaintNone       StartupTaintMode = "None"
	StartupTaintUntilReady StartupTaintMode = "UntilReady"
)

// Rollout says how a change is brought to the nodes.
//
// +kubebuilder:validation:XValidation:rule="!has(self.onWindowEnd) || has(self.windows)",message="no window ends: give windows, or remove onWindowEnd",fieldPath=".onWindowEnd"
// +kubebuilder:validation:XValidation:rule="!has(self.drain) || !has(self.drain.beforeReboot) || (has(self.reboot) && self.reboot == 'IfRequired')",message="nothing is rebooted: set reboot to IfRequired, or remove drain.beforeReboot",fieldPath=".drain"
type Rollout struct {
	// maxUnavailable is how many of the policy's nodes may be changing at the same time, as a number or a percentage
	// (rounded up). Default: 1.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:validation:MaxLength=4
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? (self >= 1 && self <= 10000) : self.matches('^([1-9][0-9]?|100)%$')",message="must be a number of nodes from 1 to 10000, or a percentage from 1% to 100%"
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`

	// paused holds back every change; status then says what would be done. Default: false.
	// +optional
	Paused bool `json:"paused,omitempty"`

	// drain decides what happens to pods that hold a GPU or a MIG instance that a change needs to be idle, and to the other
	// pods of a node that has to be rebooted.
	// +optional
	// +kubebuilder:default={}
	Drain Drain `json:"drain,omitzero"`

	// failureThreshold is the number of failed nodes at which the rollout halts: no further node is started. A node whose pods do
	// not leave in time (DrainTimedOut) does not count. Default: 1.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	FailureThreshold int32 `json:"failureThreshold,omitempty"`

	// reboot says whether a node may be rebooted when a GPU takes its MIG mode only so, since it cannot be reset there
	// (virtual machines of clouds). IfRequired: all pods of the node that hold a GPU are drained as drain says, and the
	// node is rebooted, never twice for one desired state; its other pods go down with it and come back, unless
	// drain.beforeReboot is AllPods. Never: the condition RebootRequired says that a user has to. Default: Never.
	// +optional
	// +kubebuilder:default=Never
	Reboot RebootMode `json:"reboot,omitempty"`

	// startupTaint decides whether a node that joins the cluster has the taint gpusharing.io/startup. UntilReady: the node has
	// the taint until it is ready, so that no pod starts on its whole GPUs. Nodes that are older than the policy, or that
	// advertise GPUs already, get no taint. To leave no gap at all, register nodes with that taint (kubelet
	// --register-with-taints): the operator removes it from any node that is ready, and from a node that no policy governs.
	// Nodes that belong to a machine of Cluster API or OpenShift, or to a node group of AKS, EKS or GKE, get the taint
	// startup-taint.cluster-autoscaler.kubernetes.io/gpusharing instead, which Cluster Autoscaler waits for. Karpenter's nodes get
	// none: list gpusharing.io/startup in spec.template.spec.startupTaints of the NodePool.
	// NVIDIA's programs and Node Feature Discovery have to tolerate the taint, see taints. None: the operator adds no taint,
	// and takes one off that they do not tolerate. Default: None.
	// +optional
	// +kubebuilder:default=None
	StartupTaint StartupTaintMode `json:"startupTaint,omitempty"`

	// windows are maintenance windows: disruptive changes start only while at least one of them is open, and so do reboots.
	// Changes that disrupt nothing, rolling back a failed change, and restoring a node that the policy releases do not wait,
	// nor does a new node that still has a startup taint, or that Karpenter made and has not initialized. Absent: always open.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Windows []MaintenanceWindow `json:"windows,omitempty"`

	// onWindowEnd decides what happens to a node that is draining when its window closes. FinishDrain: the drain continues,
	// as long as drain.timeoutSeconds allows, and the change follows. CancelDrain: the node becomes schedulable again and
	// drains anew in the next window. A change that has reached the GPUs is always finished. It needs windows. Absent: FinishDrain.
	// +optional
	OnWindowEnd WindowEndMode `json:"onWindowEnd,omitempty"`
}

// WindowEndMode decides what happens to a node that is draining when its maintenance window closes.
// +kubebuilder:validation:Enum=FinishDrain;CancelDrain
type WindowEndMode string

// The modes of the end of a maintenance window.
const (
	WindowEndFinishDrain WindowEndMode = "FinishDrain"
	WindowEndCancelDrain WindowEndMode = "CancelDrain"
)

// MaintenanceWindow is a time that comes again and again, in which disruptive changes may start.
type MaintenanceWindow struct {
	// schedule is when the window opens, as for a CronJob: minute, hour, day of the month, month of the year, day of
	// the week (0 to 6 or SUN to SAT), or one of @hourly, @daily (@midnight), @weekly, @monthly and @yearly (@annually). Example: "0 22 * * FRI". If
	// daylight saving skips that time, the window opens as much later as the clock jumps. If it comes twice, it opens once.
	// +required
	// +kubebuilder:validation:MinLength=6
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:XValidation:rule="self.matches('^(@(hourly|daily|midnight|weekly|monthly|yearly|annually)|(?i:([*?]|[0-5]?[0-9])([-,/]([*?]|[0-5]?[0-9]))* ([*?]|(1?[0-9]|0[0-9]|2[0-3]))([-,/]([*?]|(1?[0-9]|0[0-9]|2[0-3])))* ([*?]|(0?[1-9]|[12][0-9]|3[01]))([-,/]([*?]|(0?[1-9]|[12][0-9]|3[01])))* ([*?]|(0?[1-9]|1[0-2]|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec))([-,/]([*?]|(0?[1-9]|1[0-2]|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)))* ([*?]|([0-6]|sun|mon|tue|wed|thu|fri|sat))([-,/]([*?]|([0-6]|sun|mon|tue|wed|thu|fri|sat)))*))$')",message="must be five fields of cron (minute, hour, day of the month, month of the year, day of the week), such as 0 22 * * FRI, or one of @hourly, @daily, @midnight, @weekly, @monthly, @yearly and @annually"
	// +kubebuilder:validation:XValidation:rule="!self.matches('(?i)^[^ ]+ [^ ]+ ((30|31)([-,](30|31))* (0?2|feb)|31([-,]31)* (0?[2469]|11|feb|apr|jun|sep|nov)(,(0?[2469]|11|feb|apr|jun|sep|nov))*) [*?]$')",message="names a date that does not exist"
	// +kubebuilder:validation:XValidation:rule="!self.matches('/0*([ ,]|$)|/[^ ,]*[^0-9 ,]|-[^ ,/]*-') && self.findAll('[0-9]{1,2}-[0-9]{1,2}').all(r, int(r.split('-')[0]) <= int(r.split('-')[1])) && ['janfebmaraprmayjunjulaugsepoctnovdecsunmontuewedthufrisat'].all(names, self.lowerAscii().findAll('[a-z]{3}-[a-z]{3}').all(r, names.indexOf(r.substring(0, 3)) <= names.indexOf(r.substring(4))))",message="a range must not end before it begins, and a step must be a number above 0: FRI-MON is FRI,SAT,SUN,MON"
	Schedule string `json:"schedule,omitempty"`

	// duration is how long the window stays open: hours and minutes, such as 4h or 1h30m, from 5m to 168h. Daylight saving
	// does not change it.
	// +required
	// +kubebuilder:validation:MaxLength=16
	// +kubebuilder:validation:XValidation:rule="self.matches('^([0-9]+h)?([0-9]+m)?(0s)?$') && duration(self) >= duration('5m') && duration(self) <= duration('168h')",message="must be hours and minutes from 5m to 168h, such as 4h or 1h30m"
	Duration string `json:"duration,omitempty"`

	// timeZone is the name of a time zone of the IANA database, such as Europe/Berlin, in which schedule counts. Default: UTC.
	// +optional
	// +kubebuilder:default=UTC
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.matches('^[A-Z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}$') && self != 'Local'",message="must be the name of a time zone of the IANA database, such as Europe/Berlin"
	// +kubebuilder:validation:XValidation:rule="timestamp('2026-01-01T00:00:00Z').getHours(self) >= 0",message="must be a time zone of the IANA database"
	TimeZone string `json:"timeZone,omitempty"`
}

// DrainMode decides what happens to pods that block a change.
// +kubebuilder:validation:Enum=Evict;WaitForIdle;Never
type DrainMode string

// The drain modes.
const (
	DrainModeEvict       DrainMode = "Evict"
	DrainModeWaitForIdle DrainMode = "WaitForIdle"
	DrainModeNever       DrainMode = "Never"
)

// BeforeReboot decides which pods a node is drained of before the operator reboots it.
// +kubebuilder:validation:Enum=GPUPods;AllPods
type BeforeReboot string

// The pods that a node is drained of before a reboot.
const (
	BeforeRebootGPUPods BeforeReboot = "GPUPods"
	BeforeRebootAllPods BeforeReboot = "AllPods"
)

// Drain decides how the GPUs of a node become idle for a change.
type Drain struct {
	// mode is how GPUs become idle. WaitForIdle: new GPU pods are kept off the node by a taint, those that run are left to finish, for as long
	// as timeoutSeconds. Evict: they are evicted through the Eviction API, so PodDisruptionBudgets hold. Never: a change
	// only goes ahead on a node that happens to be idle, and the node takes new pods meanwhile. Default: WaitForIdle.
	// +optional
	// +kubebuilder:default=WaitForIdle
	Mode DrainMode `json:"mode,omitempty"`

	// timeoutSeconds is how long to wait for the node to become idle before it takes pods again and counts as
	// failed, from 30 to 604800 (a week). Default: 600.
	// +optional
	// +kubebuilder:default=600
	// +kubebuilder:validation:Minimum=30
	// +kubebuilder:validation:Maximum=604800
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`

	// beforeReboot decides which pods the node is drained of before the operator reboots it (rollout.reboot IfRequired). GPUPods:
	// those that hold a GPU; the others go down with the node. AllPods: all pods, by mode and within timeoutSeconds, but mirrors
	// of static pods, pods of DaemonSets, pods that have finished and the operator's own. Like pods that hold a GPU, they are evicted even
	// with an emptyDir volume, whose content is lost, and without a controller that replaces them. Absent: GPUPods.
	// +optional
	BeforeReboot BeforeReboot `json:"beforeReboot,omitempty"`
}

// ReleasePolicy decides what happens to nodes that a policy releases.
// +kubebuilder:validation:Enum=Restore;Retain
type ReleasePolicy string

// The release policies.
const (
	ReleasePolicyRestore ReleasePolicy = "Restore"
	ReleasePolicyRetain  ReleasePolicy = "Retain"
)

// GPUSharingPolicyStatus is the observed state of a policy.
type GPUSharingPolicyStatus struct {
	// observedGeneration is the generation of the policy that the status is about. 0: the controller has not observed the policy yet.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// conditions: Accepted (the policy governs what it selects), Ready (every node advertises what the policy asks for),
	// Reconciling (the rollout goes on, or waits for a node, a drain, a window or the budget), Stalled (the rollout goes on only after a
	// change of the policy, a node or the cluster), Tainted (if the policy asks for taints, whether they are there), AutoscalingConfigured
	// (if its nodes belong to node groups, whether autoscalers know what new nodes will advertise), DemandMet (if a layout has onDemand,
	// whether pods wait for MIG instances that are not idle) and, when true,
	// WorkloadsAffected (workloads ask for what no node offers then) and MemoryPressure (the memory guard finds a container over its share on a
	// GPU that is almost full). One of Ready, Reconciling and Stalled is true, or all are Unknown.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// nodes counts the nodes that the policy selects. ready, changing, waiting, failed and conflicted add up to matched; updated and
	// blocked count some of these nodes once more.
	// +optional
	Nodes NodeCounts `json:"nodes,omitzero"`

	// resources are the extended resources that the governed nodes advertise, and what they must advertise.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Resources []ResourceCount `json:"resources,omitempty"`

	// nodeGroups are the node groups whose nodes the policy governs or will govern, and what their autoscaler knows: at most 64.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	NodeGroups []NodeGroupStatus `json:"nodeGroups,omitempty"`

	// onDemand is what pods wait for, and what would be changed for them, if a layout has onDemand and the feature gate OnDemandMIG is on.
	// +optional
	OnDemand *OnDemandStatus `json:"onDemand,omitempty"`

	// nextWindowTime is when the next maintenance window opens (rollout.windows). Absent: no change waits for one.
	// +optional
	NextWindowTime *metav1.Time `json:"nextWindowTime,omitempty"`

	// pending lists at most ten nodes on which something is left to do, with the reason for each: failed, unsupported, blocked and waiting
	// nodes, then ready ones, each by name, and nodes that another policy governs. nodes counts all.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10
	Pending []PendingNode `json:"pending,omitempty"`
}

// NodeCounts counts nodes by how far they are.
type NodeCounts struct {
	// matched is the number of nodes that the policy selects.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Matched int32 `json:"matched"`
	// ready is the number of nodes that advertise what the policy asks for.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Ready int32 `json:"ready"`
	// changing is the number of nodes on which a change is under way.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Changing int32 `json:"changing"`
	// waiting is the number of nodes on which a change has not begun.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Waiting int32 `json:"waiting"`
	// failed is the number of nodes on which the change failed, or that cannot satisfy the policy.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Failed int32 `json:"failed"`
	// updated is the number of nodes whose GPUs are in the desired state and which select its device-plugin config. Those of them that are
	// not ready do not advertise yet, or no longer, what the policy asks for.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Updated int32 `json:"updated"`
	// blocked is the number of nodes, changing or waiting, whose change waits for something that the rollout does not bring about: pods
	// or processes that use the GPUs, an agent that does not report, NVIDIA's programs, another controller.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Blocked int32 `json:"blocked"`
	// conflicted is the number of nodes that another policy governs.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Conflicted int32 `json:"conflicted"`
}

// ResourceCount counts an extended resource of a node, or of the nodes that a policy governs.
type ResourceCount struct {
	// name of the extended resource, such as nvidia.com/gpu.shared.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`
	// expected is how much is advertised once all is ready.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Expected int64 `json:"expected"`
	// advertised is how much is advertised now.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Advertised int64 `json:"advertised"`
	// oversubscription is how many containers share what advertises one of them, when it is more than one: the replicas
	// of a GPU or of a MIG instance; the highest among the nodes.
	// +optional
	// +kubebuilder:validation:Minimum=2
	Oversubscription int32 `json:"oversubscription,omitempty"`
}

// MostPending is the largest number of nodes that status.pending of a policy lists.
const MostPending = 10

// PendingNode says why a node is not ready.
type PendingNode struct {
	// nodeName is the name of the node.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`
	// state is how far the node is, as status.rollout.state of its GPUNode.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	State string `json:"state,omitempty"`
	// reason is the same word that the conditions use.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// message says what, where and what to do next.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`
}

// GPUSharingPolicyList is a list of policies.
//
// +kubebuilder:object:root=true
type GPUSharingPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	// items of the list.
	Items []GPUSharingPolicy `json:"items"`
}
