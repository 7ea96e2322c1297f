// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package autoscaling decides what autoscalers must be told, so that they start nodes for pods that ask for shared
// GPUs. No autoscaler knows nvidia.com/gpu.shared or nvidia.com/mig-1g.5gb before a node advertises it.
//
// Advise is a function of the policies, the nodes and the objects of autoscalers. For each node group it works out what
// a new node will advertise, by the code that works out what a live node is expected to advertise
// (internal/engine/policy). Then it compares that with what the autoscaler of the group is told, and returns what to
// write and what to report. It is pure.
//
// The rules of autoscalers that it follows were read in kubernetes/autoscaler cluster-autoscaler-1.36.1,
// sigs.k8s.io/karpenter v1.14.1, openshift/kubernetes-autoscaler and openshift/cluster-autoscaler-operator of 2026.
package autoscaling

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// FieldManager owns what the operator writes for autoscalers, and what it reports about that.
const FieldManager = "gpusharing-controller-autoscaling"

// API groups of node groups. Those of clouds have none.
const (
	GroupKarpenter  = "karpenter.sh"
	GroupClusterAPI = "cluster.x-k8s.io"
	GroupOpenShift  = "machine.openshift.io"
)

// Snapshot is everything that Advise depends on. Advise changes none of it.
type Snapshot struct {
	Now time.Time
	// Policies are all policies, with their last status.
	Policies []v1alpha1.GPUSharingPolicy
	// Nodes are all nodes that have a GPUNode; their pods do not matter.
	Nodes []cluster.Node
	// Starting are the nodes without a GPUNode that Starts picks.
	Starting []cluster.Node
	// Discovery is what the pods of Node Feature Discovery that run on nodes tolerate.
	Discovery [][]corev1.Toleration
	// MachineSets of OpenShift by the Machines that they made, both as namespace/name.
	MachineSets map[string]string
	// Pools are the NodePools of Karpenter.
	Pools []Pool
	// Overlays are the NodeOverlays of Karpenter.
	Overlays []Overlay
	// OverlayVersion is the apiVersion in which NodeOverlays are served; empty: they are not.
	OverlayVersion string
	// Scalables are MachineSets and MachineDeployments.
	Scalables []Scalable
	// OpenShift is the version of OpenShift, such as 4.19.3; empty if it is another cluster, or not known.
	OpenShift string
	// Refused is why the API server refused the last write to an object, by Write.ObjectName.
	Refused map[string]Refusal
}

// Refusal is why the API server refused a write.
type Refusal struct {
	// Forbidden reports that the operator lacks the right.
	Forbidden bool
	// Conflict reports that another field manager owns a field.
	Conflict bool
	Message  string
}

// Ref names a node group.
type Ref struct {
	// Group is the API group of the kind; empty for groups of clouds, which have no object in the cluster.
	Group string
	Kind  v1alpha1.NodeGroupKind
	// Namespace of a MachineSet or MachineDeployment.
	Namespace string
	Name      string
}

// String names the group for a message, such as "MachineSet openshift-machine-api/gpu".
func (r Ref) String() string {
	if r.Namespace != "" {
		return string(r.Kind) + " " + r.Namespace + "/" + r.Name
	}
	return string(r.Kind) + " " + r.Name
}

// autoscaler is the program that scales the group.
func (r Ref) autoscaler() string {
	if r.Group == GroupKarpenter {
		return "Karpenter"
	}
	return "ClusterAutoscaler"
}

// The labels and annotations by which a node tells its group. Sources: sigs.k8s.io/karpenter pkg/apis/v1/labels.go;
// openshift/machine-api-operator pkg/controller/nodelink; kubernetes-sigs/cluster-api api/core/v1beta2/common_types.go;
// the documents of EKS, AKS and GKE.
const (
	labelNodePool           = "karpenter.sh/nodepool"
	annotationOpenShift     = "machine.openshift.io/machine"
	annotationCAPIOwner     = "cluster.x-k8s.io/owner-name"
	annotationCAPIKind      = "cluster.x-k8s.io/owner-kind"
	annotationCAPINamespace = "cluster.x-k8s.io/cluster-namespace"
	labelEKS                = "eks.amazonaws.com/nodegroup"
	labelAKS                = "kubernetes.azure.com/agentpool"
	labelGKE                = "cloud.google.com/gke-nodepool"
	labelInstanceType       = "node.kubernetes.io/instance-type"
)

// OfGroup reports whether an annotation of a Node tells its node group.
func OfGroup(annotation string) bool {
	switch annotation {
	case annotationOpenShift, annotationCAPIOwner, annotationCAPIKind, annotationCAPINamespace:
		return true
	}
	return false
}

// Scalable is a MachineSet or MachineDeployment.
type Scalable struct {
	Ref
	// Version is its apiVersion as served.
	Version         string
	UID             string
	ResourceVersion string
	// Owner is the MachineDeployment that scales it; nil: nothing else does.
	Owner *Ref
	// Labels are those of its template that its nodes get.
	Labels map[string]string
	// StartupTaint says that its template gives new nodes the startup taint that Cluster Autoscaler waits for, once.
	StartupTaint bool
	// Template is the infrastructure template of Cluster API that its machines are made of.
	Template Template
	// Capacity is status.capacity of that template, of GPUs; nil: it is not known.
	Capacity map[string]int64
	// Annotations are those for autoscalers, and the operator's record.
	Annotations map[string]string
	// Managers own these annotations: field managers by annotation.
	Managers map[string][]string
	// LastManager wrote to the object last, besides the operator.
	LastManager string
}

// Template names an infrastructure template, in the namespace of what refers to it.
type Template struct{ Group, Kind, Name string }

// Pool is a NodePool of Karpenter.
type Pool struct {
	Name string
	// Labels are those that its nodes get from spec.template, and those that its requirements leave no choice of.
	Labels map[string]string
	// InstanceTypes are those that its requirements name; none: they name none.
	InstanceTypes []string
	// NodeClassGroup is the API group of its node class, which tells the cloud.
	NodeClassGroup string
	// Limits are spec.limits.
	Limits map[string]string
}

// Requirement is a requirement on labels of instance types.
type Requirement struct {
	Key      string
	Operator string
	Values   []string
}

// Overlay is a NodeOverlay of Karpenter.
type Overlay struct {
	Name string
	UID  string
	// Policy is the policy that it was written for by the operator; empty: the operator did not write it.
	Policy string
	// Owner is the UID of the policy with which the garbage collector deletes it; empty: it outlives all.
	Owner        string
	Created      time.Time
	Weight       int64
	Requirements []Requirement
	Capacity     map[string]string
	// Observed reports that Karpenter has written a status.
	Observed bool
	// NotReady is why Karpenter does not apply it; empty: it does.
	NotReady string
}
