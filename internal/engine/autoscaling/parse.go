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
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// Add adds an object of an autoscaler, or the ClusterVersion of OpenShift. Of other kinds nothing is read.
func (s *Snapshot) Add(o *unstructured.Unstructured) {
	switch o.GetKind() {
	case "NodePool":
		s.Pools = append(s.Pools, PoolOf(o))
	case "NodeOverlay":
		s.Overlays = append(s.Overlays, OverlayOf(o))
	case kindMachineSet, "MachineDeployment":
		s.Scalables = append(s.Scalables, ScalableOf(o))
	case "ClusterVersion":
		s.OpenShift = OpenShiftVersion(o)
	}
}

// kindMachineSet is the kind of OpenShift's MachineSets, and of those of the Cluster API.
const kindMachineSet = "MachineSet"

// AddMachine adds which MachineSet made a Machine of OpenShift, if one did.
func (s *Snapshot) AddMachine(m metav1.Object) {
	if owner := metav1.GetControllerOf(m); owner != nil && owner.Kind == kindMachineSet {
		if s.MachineSets == nil {
			s.MachineSets = map[string]string{}
		}
		s.MachineSets[m.GetNamespace()+"/"+m.GetName()] = m.GetNamespace() + "/" + owner.Name
	}
}

// OpenShiftVersion is the version of OpenShift that a ClusterVersion reports.
func OpenShiftVersion(o *unstructured.Unstructured) string {
	version, _, _ := unstructured.NestedString(o.Object, "status", "desired", "version")
	return version
}

// PoolOf reads a NodePool. What it cannot read counts as absent.
func PoolOf(o *unstructured.Unstructured) Pool {
	p := Pool{Name: o.GetName(), Labels: map[string]string{labelNodePool: o.GetName()}, Limits: map[string]string{}}
	maps.Copy(p.Labels, stringsIn(o, "spec", "template", "metadata", "labels"))
	for _, r := range requirementsIn(o, "spec", "template", "spec", "requirements") {
		if r.Operator != "In" {
			continue
		}
		if r.Key == labelInstanceType {
			p.InstanceTypes = r.Values
		}
		if len(r.Values) == 1 {
			p.Labels[r.Key] = r.Values[0]
		}
	}
	p.NodeClassGroup, _, _ = unstructured.NestedString(o.Object, "spec", "template", "spec", "nodeClassRef", "group")
	limits, _, _ := unstructured.NestedMap(o.Object, "spec", "limits")
	for name, limit := range limits {
		p.Limits[name] = fmt.Sprint(limit)
	}
	return p
}

// OverlayOf reads a NodeOverlay.
func OverlayOf(o *unstructured.Unstructured) Overlay {
	v := Overlay{
		Name: o.GetName(), UID: string(o.GetUID()), Created: o.GetCreationTimestamp().Time, Capacity: map[string]string{},
		Requirements: requirementsIn(o, "spec", "requirements"),
	}
	ours := func(entry metav1.ManagedFieldsEntry) bool { return entry.Manager == FieldManager }
	if strings.HasPrefix(v.Name, OverlayPrefix) && slices.ContainsFunc(o.GetManagedFields(), ours) { // a copy has the label too
		v.Policy = o.GetLabels()[LabelPolicy]
	}
	for _, owner := range o.GetOwnerReferences() {
		if owner.Kind == "GPUSharingPolicy" {
			v.Owner = string(owner.UID)
		}
	}
	v.Weight, _, _ = unstructured.NestedInt64(o.Object, "spec", "weight")
	capacity, _, _ := unstructured.NestedMap(o.Object, "spec", "capacity")
	for name, count := range capacity {
		v.Capacity[name] = fmt.Sprint(count)
	}
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	v.Observed = len(conditions) > 0
	for _, c := range conditions {
		c, _ := c.(map[string]any)
		if c["status"] == "False" && (v.NotReady == "" || c["type"] != "Ready") {
			v.NotReady = fmt.Sprintf("%v: %v", c["reason"], c["message"])
		}
	}
	return v
}

// ScalableOf reads a MachineSet or MachineDeployment.
func ScalableOf(o *unstructured.Unstructured) Scalable {
	kind := o.GroupVersionKind()
	s := Scalable{
		Ref:     Ref{Group: kind.Group, Kind: v1alpha1.NodeGroupKind(kind.Kind), Namespace: o.GetNamespace(), Name: o.GetName()},
		Version: o.GetAPIVersion(), UID: string(o.GetUID()), ResourceVersion: o.GetResourceVersion(),
		Labels: map[string]string{}, Annotations: map[string]string{}, Managers: map[string][]string{},
	}
	if owner := metav1.GetControllerOf(o); owner != nil && owner.Kind == string(v1alpha1.NodeGroupMachineDeployment) {
		s.Owner = &Ref{Group: kind.Group, Kind: v1alpha1.NodeGroupMachineDeployment, Namespace: s.Namespace, Name: owner.Name}
	}
	path := []string{"spec", "template", "metadata", "labels"}
	if kind.Group == GroupOpenShift {
		path = []string{"spec", "template", "spec", "metadata", "labels"} // those of metadata are the labels of Machines
	}
	for k, v := range stringsIn(o, path...) {
		if kind.Group == GroupOpenShift || synced(k) {
			s.Labels[k] = v
		}
	}
	if kind.Group == GroupClusterAPI {
		of := stringsIn(o, "spec", "template", "spec", "infrastructureRef")
		group, _, _ := strings.Cut(cmp.Or(of["apiGroup"], of["apiVersion"]), "/") // v1beta2, and before
		s.Template = Template{Group: group, Kind: of["kind"], Name: of["name"]}
	}
	taints, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "taints")
	s.StartupTaint = kind.Group == GroupClusterAPI && slices.ContainsFunc(taints, func(taint any) bool {
		t, _ := taint.(map[string]any)
		return t["key"] == v1alpha1.TaintStartupAutoscaler && t["propagation"] == "OnInitialization"
	})
	for k, v := range o.GetAnnotations() {
		if OfScalable(k) {
			s.Annotations[k] = v
		}
	}
	s.manage(o.GetManagedFields())
	return s
}

// CapacityOf is what an infrastructure template says of the GPUs of a machine, for Cluster Autoscaler
// (cloudprovider/clusterapi/clusterapi_unstructured.go).
func CapacityOf(template *unstructured.Unstructured) map[string]int64 {
	capacity := map[string]int64{}
	for name, count := range stringsIn(template, "status", "capacity") {
		if n, err := strconv.ParseInt(count, 10, 64); err == nil && n > 0 && strings.HasPrefix(name, cluster.NvidiaDomain) {
			capacity[name] = n
		}
	}
	return capacity
}

// manage records who manages the annotations of the scalable, and who but the operator has written it last.
func (s *Scalable) manage(entries []metav1.ManagedFieldsEntry) {
	var last time.Time
	for _, entry := range entries {
		for _, key := range annotationsOf(entry) {
			if OfScalable(key) && !slices.Contains(s.Managers[key], entry.Manager) {
				s.Managers[key] = append(s.Managers[key], entry.Manager)
			}
		}
		if entry.Manager != FieldManager && entry.Subresource == "" && entry.Time != nil && !entry.Time.Time.Before(last) {
			s.LastManager, last = entry.Manager, entry.Time.Time
		}
	}
}

// synced reports whether Cluster API gives a label of a Machine to its Node. Others need --additional-sync-machine-labels, which nothing
// in the cluster shows (https://cluster-api.sigs.k8s.io/reference/api/metadata-propagation).
func synced(label string) bool {
	domain, _, _ := strings.Cut(label, "/")
	return domain == "node-role.kubernetes.io" || slices.ContainsFunc([]string{"node-restriction.kubernetes.io", "node.cluster.x-k8s.io"}, func(d string) bool {
		return domain == d || strings.HasSuffix(domain, "."+d)
	})
}

// annotationsOf are the annotations that an entry of managed fields names.
func annotationsOf(entry metav1.ManagedFieldsEntry) []string {
	if entry.FieldsV1 == nil {
		return nil
	}
	var fields struct {
		Metadata struct {
			Annotations map[string]any `json:"f:annotations"`
		} `json:"f:metadata"`
	}
	if json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
		return nil
	}
	var all []string
	for field := range fields.Metadata.Annotations {
		if key, is := strings.CutPrefix(field, "f:"); is {
			all = append(all, key)
		}
	}
	slices.Sort(all)
	return all
}

func stringsIn(o *unstructured.Unstructured, path ...string) map[string]string {
	found, _, _ := unstructured.NestedMap(o.Object, path...)
	all := map[string]string{}
	for k, v := range found {
		if text, is := v.(string); is {
			all[k] = text
		}
	}
	return all
}

func requirementsIn(o *unstructured.Unstructured, path ...string) []Requirement {
	list, _, _ := unstructured.NestedSlice(o.Object, path...)
	var all []Requirement
	for _, item := range list {
		fields, is := item.(map[string]any)
		if !is {
			continue
		}
		r := Requirement{Key: fmt.Sprint(fields["key"]), Operator: fmt.Sprint(fields["operator"])}
		values, _ := fields["values"].([]any)
		for _, v := range values {
			r.Values = append(r.Values, fmt.Sprint(v))
		}
		all = append(all, r)
	}
	return all
}

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

// NeedsNodes reports whether GPUs of nodes matter: policies have node groups, or a node has the taint of AwaitsLabel.
func (s *Snapshot) NeedsNodes(all []corev1.Node) bool {
	asked := len(s.Policies) > 0
	return asked && len(s.Pools)+len(s.Scalables)+len(s.clouds()) > 0 || slices.ContainsFunc(all, func(n corev1.Node) bool {
		_, tells := s.groupOf(&cluster.Node{Labels: n.Labels, Annotations: n.Annotations})
		return asked && tells || slices.ContainsFunc(n.Spec.Taints, AwaitsLabel)
	})
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
	return slices.Contains([]string{annotationOpenShift, annotationCAPIOwner, annotationCAPIKind, annotationCAPINamespace}, annotation)
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
