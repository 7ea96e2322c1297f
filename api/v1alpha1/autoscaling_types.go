// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// AutoscalingMode decides whether the operator tells the autoscaler what new nodes will advertise.
// +kubebuilder:validation:Enum=Advise;Manage
type AutoscalingMode string

// The modes of autoscaling.
const (
	AutoscalingModeAdvise AutoscalingMode = "Advise"
	AutoscalingModeManage AutoscalingMode = "Manage"
)

// UnrenamedReplicas decides whether Karpenter is told of replicas that keep the name nvidia.com/gpu.
// +kubebuilder:validation:Enum=Withhold;Announce
type UnrenamedReplicas string

// The values of unrenamedReplicas.
const (
	UnrenamedReplicasWithhold UnrenamedReplicas = "Withhold"
	UnrenamedReplicasAnnounce UnrenamedReplicas = "Announce"
)

// EmptyPool decides whether a policy may be without nodes.
// +kubebuilder:validation:Enum=Unexpected;Expected
type EmptyPool string

// The values of emptyPool.
const (
	EmptyPoolUnexpected EmptyPool = "Unexpected"
	EmptyPoolExpected   EmptyPool = "Expected"
)

// Autoscaling decides how autoscalers learn what a new node of the policy will advertise.
type Autoscaling struct {
	// mode decides whether the operator writes to the objects of autoscalers. Advise: it writes nothing. status.nodeGroups reports what
	// each node group needs, and `kubectl gpusharing plan` prints it. Manage: it writes NodeOverlays of Karpenter, and the annotations
	// gpu-type, gpu-count, labels and taints of Cluster API, and gpu-count of OpenShift. The operator needs the rights for that (chart value autoscaling.manage).
	// When the mode changes back, it restores what was there before. Default: Advise.
	// +optional
	// +kubebuilder:default=Advise
	Mode AutoscalingMode `json:"mode,omitempty"`

	// emptyPool decides whether a policy that matches no node is Ready. Unexpected: it is not, and is Stalled with the reason NoMatchingNodes,
	// so that a misspelt selector is noticed. Expected: it is, because an autoscaler makes the nodes when pods ask for them.
	// Default: Unexpected.
	// +optional
	// +kubebuilder:default=Unexpected
	EmptyPool EmptyPool `json:"emptyPool,omitempty"`

	// nodeShapes are the GPUs of nodes that the operator has not seen yet. A node group that has, or had, nodes needs no entry.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	NodeShapes []NodeShape `json:"nodeShapes,omitempty"`

	// unrenamedReplicas decides whether Karpenter is told of nodes that advertise more nvidia.com/gpu than they have GPUs: by replicas
	// without renameByDefault, or by mig.resourceNames Uniform. Withhold: the operator writes no NodeOverlay for them. Announce: it does. A
	// new node that advertises its whole GPUs for a moment then makes Karpenter start further nodes, so set rollout.startupTaint too.
	// Default: Withhold.
	// +optional
	// +kubebuilder:default=Withhold
	UnrenamedReplicas UnrenamedReplicas `json:"unrenamedReplicas,omitempty"`
}

// NodeShape describes the GPUs of the nodes of node groups.
//
// +kubebuilder:validation:XValidation:rule="!has(self.instanceTypes) || self.nodeGroups.exists(g, g.kind == 'NodePool')",message="instanceTypes is for NodePools of Karpenter only: name one in nodeGroups",fieldPath=".instanceTypes"
type NodeShape struct {
	// product of the GPUs as the agent reports it, such as NVIDIA-A100-SXM4-40GB.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	// +kubebuilder:validation:XValidation:rule=`self.matches(r'^[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?$')`,message="must be one product with dashes for spaces, such as NVIDIA-A100-SXM4-40GB"
	// +kubebuilder:validation:XValidation:rule="!self.matches('-SHARED$|-MIG-[0-9]g')",message="must be the product without the suffixes -SHARED and -MIG-… of NVIDIA's label"
	Product string `json:"product,omitempty"`

	// gpusPerNode is the number of GPUs of a node, from 1 to 16.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16
	GPUsPerNode int32 `json:"gpusPerNode,omitempty"`

	// instanceTypes are the values of the label node.kubernetes.io/instance-type of such nodes, for NodePools of Karpenter, which can have
	// nodes of many types. Absent: those that the requirements of the NodePool name or, on AWS, those with that GPU.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:Pattern=`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`
	InstanceTypes []string `json:"instanceTypes,omitempty"`

	// nodeGroups are the node groups whose nodes have these GPUs.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	NodeGroups []NodeGroupReference `json:"nodeGroups,omitempty"`
}

// NodeGroupKind is what scales a group of nodes.
// +kubebuilder:validation:Enum=NodePool;MachineDeployment;MachineSet;EKSNodeGroup;AKSNodePool;GKENodePool
type NodeGroupKind string

// The kinds of node groups.
const (
	// NodeGroupNodePool is a NodePool of Karpenter.
	NodeGroupNodePool NodeGroupKind = "NodePool"
	// NodeGroupMachineDeployment is a MachineDeployment of Cluster API.
	NodeGroupMachineDeployment NodeGroupKind = "MachineDeployment"
	// NodeGroupMachineSet is a MachineSet of OpenShift, or one of Cluster API that no MachineDeployment owns.
	NodeGroupMachineSet NodeGroupKind = "MachineSet"
	// NodeGroupEKS is a managed node group of EKS.
	NodeGroupEKS NodeGroupKind = "EKSNodeGroup"
	// NodeGroupAKS is a node pool of AKS.
	NodeGroupAKS NodeGroupKind = "AKSNodePool"
	// NodeGroupGKE is a node pool of GKE.
	NodeGroupGKE NodeGroupKind = "GKENodePool"
)

// NodeGroupReference names a node group.
//
// +kubebuilder:validation:XValidation:rule="(self.kind in ['MachineDeployment', 'MachineSet']) == has(self.namespace)",message="namespace must be given for MachineDeployment and MachineSet, and only for them"
type NodeGroupReference struct {
	// kind of the node group.
	// +required
	Kind NodeGroupKind `json:"kind,omitempty"`

	// namespace of a MachineDeployment or MachineSet.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`

	// name of the node group.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
}

// MostNodeGroups is the largest number of node groups that status.nodeGroups of a policy lists.
const MostNodeGroups = 64

// NodeGroupStatus reports what a new node of a node group will advertise, and whether the autoscaler knows.
type NodeGroupStatus struct {
	// kind of the node group.
	// +required
	Kind NodeGroupKind `json:"kind,omitempty"`
	// namespace of a MachineDeployment or MachineSet.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
	// name of the node group.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`
	// uid of the MachineDeployment or MachineSet that written is about.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	UID string `json:"uid,omitempty"`
	// autoscaler is the program that scales groups of this kind: Karpenter or ClusterAutoscaler.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Autoscaler string `json:"autoscaler,omitempty"`
	// nodes is the number of its nodes that the operator has seen.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Nodes int32 `json:"nodes"`
	// product of the GPUs of a node. If the nodes are gone, it is that of the last one.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Product string `json:"product,omitempty"`
	// gpusPerNode is the number of GPUs of a node.
	// +optional
	// +kubebuilder:validation:Minimum=1
	GPUsPerNode int32 `json:"gpusPerNode,omitempty"`
	// instanceTypes are the values of the label node.kubernetes.io/instance-type of its nodes.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=63
	InstanceTypes []string `json:"instanceTypes,omitempty"`
	// resources are the extended resources that a new node advertises once it is ready.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Resources []NodeResource `json:"resources,omitempty"`
	// advertised are the extended resources that the last ready node of the group advertised. Cluster Autoscaler keeps a copy of
	// that node when the group is empty.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	Advertised []NodeResource `json:"advertised,omitempty"`
	// written lists what the operator has written for the autoscaler: a NodeOverlay, or annotations.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MaxLength=512
	Written []string `json:"written,omitempty"`
	// reason is the same word that the condition AutoscalingConfigured uses.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// message reports what, where and what to do next.
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	Message string `json:"message,omitempty"`
}

// NodeResource is an extended resource of one node.
type NodeResource struct {
	// name of the extended resource, such as nvidia.com/gpu.shared.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name,omitempty"`
	// count is how much of it the node has.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Count int64 `json:"count"`
}
