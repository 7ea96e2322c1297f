// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// DRA is what of the cluster matters where NVIDIA's DRA driver serves GPUs.
type DRA struct {
	// Classes are all DeviceClasses; nil: Kubernetes serves none that can have an extended resource.
	Classes []dra.Class
	// ServesClasses reports whether the API server has DeviceClasses of resource.k8s.io/v1, which can serve an extended
	// resource.
	ServesClasses bool
	// ServesTaintRules reports whether the API server has DeviceTaintRules.
	ServesTaintRules bool
	// Named are the DeviceClasses that some ResourceClaim names.
	Named []string
	// DevicesTaintedOn are the nodes for which the operator has a DeviceTaintRule, also those that are gone.
	DevicesTaintedOn []string
	// Edited are the nodes whose DeviceTaintRule of the operator another controller edited, so that it does not taint all
	// devices.
	Edited []string
	// RequestedShares is how many shares policies need of the GPUs on nodes of the driver. rollout.Decide finds them.
	RequestedShares dra.RequestedShares
}

// Has reports whether a ResourceClaim is reserved for the pod.
func (p *Pod) Has(c dra.Claim) bool { return c.ReservedFor(p.Namespace, p.UID, p.PodGroup) }

// Signature differs if something of the cluster differs on which the view of a node of the driver depends.
func (d *DRA) Signature() string {
	return fmt.Sprintf("%v %t %t %s", d.Classes, d.ServesClasses, d.ServesTaintRules, d.RequestedShares)
}

// StackOf returns which of NVIDIA's programs offers the GPUs of a node. Under the GPU Operator a deploy label that is
// true, or stopped, tells that the device plugin is to come. A stand-alone one may only restart as long as the kubelet lists
// its devices as capacity, five minutes after it is gone.
func (p *DevicePlugin) StackOf(n *Node) dra.Stack {
	reason, _ := shownByDRA(n)
	f := dra.Facts{Driver: reason != ""}
	if !f.Driver {
		return dra.StackOf(f)
	}
	deploy := n.Labels[DeployLabels()[0]]
	restarts := !p.ClusterPolicy && p.Reason == "" && len(n.Unallocatable) > 0
	f.Plugin = restarts || p.ClusterPolicy && deploy != "" && deploy != LabelFalse || slices.ContainsFunc(n.Pods, func(o Pod) bool {
		return o.KeptBy(DeployLabels()[0]) || !p.ClusterPolicy && o.MountsConfig && o.Controller == daemonSet
	})
	for name, count := range n.Allocatable {
		f.Allocatable = f.Allocatable || count > 0 && IsGPUResource(name)
	}
	return dra.StackOf(f)
}

// FoundOnDRA reports whether the rollout has found that NVIDIA's DRA driver offers the GPUs of the node, as its GPUNode tells: for those who read
// neither pods nor ResourceSlices. It is false where no policy governs the node.
func (n *Node) FoundOnDRA() bool {
	return dra.IsConfig(n.GPU.Spec.ConfigName) || slices.ContainsFunc(n.GPU.Status.Conditions, func(c metav1.Condition) bool { return c.Reason == v1alpha1.ReasonNotOnDRA })
}

// OtherShares reports whether NVIDIA's DRA driver publishes another number of shares of each GPU than a sharing needs. It has one for all nodes,
// which the administrator sets.
func (n *Node) OtherShares(s v1alpha1.Sharing) (published, needed int64, other bool) {
	published, known := n.Published.Shares()
	needed = dra.Shares(s)
	return published, needed, known && needed > 0 && published != needed
}

// Offered returns the extended resources of GPUs and instances that pods can get on the node, each with its number:
// what the kubelet lists as allocatable, or what NVIDIA's DRA driver publishes where it alone serves the node.
func (n *Node) Offered(stack dra.Stack) map[string]int64 {
	if stack == dra.DRADriver {
		return n.Published.Published()
	}
	return n.Allocatable
}

// OfferedGPUs are those of Offered that are of GPUs and instances, and not 0.
func (n *Node) OfferedGPUs(stack dra.Stack) map[string]int64 {
	gpus := map[string]int64{}
	for name, count := range n.Offered(stack) {
		if count != 0 && IsGPUResource(name) {
			gpus[name] = count
		}
	}
	return gpus
}

// DRANode is what the objects of NVIDIA's DRA driver, and of Kubernetes around it, tell of one node.
type DRANode struct {
	// DRA is an object, besides pods, by which the driver shows that it offers the GPUs of the node, such as
	// "DaemonSet nvidia-dra/kubelet-plugin"; empty: none does.
	DRA string
	// DynamicMIG says that the DaemonSet of that driver has its feature gate DynamicMIG on, so that the next pod on the
	// node makes MIG instances on demand, also while there is no pod.
	DynamicMIG bool
	// SetsTimeSlices says the same of its feature gate TimeSlicingSettings: it sets the time slices of GPUs for its claims.
	SetsTimeSlices bool
	// Published is what the ResourceSlices of the driver show of the node; nil: there are none.
	Published *dra.Pool
	// Claims are the ResourceClaims to which devices of the node are allocated, by name.
	Claims []dra.Claim
	// DevicesTaintedAt is since when the operator's DeviceTaintRule keeps new pods off the GPUs of the node; zero: there
	// is none.
	DevicesTaintedAt time.Time
	// TaintRuleTaken reports whether the DeviceTaintRule with the name of the operator's for the node is another's.
	TaintRuleTaken bool
}

// DRAObjects are the objects of resource.k8s.io as they are listed, of the versions that the API server prefers.
type DRAObjects struct {
	Slices, Claims, Classes, TaintRules []unstructured.Unstructured
	// ServesClasses and ServesTaintRules are those of DRA.
	ServesClasses, ServesTaintRules bool
	// Deleted are the DeviceTaintRules that the operator has deleted though they are listed still, by UID. A node whose
	// rule is gone must not be taken for one that new pods are kept off.
	Deleted map[types.UID]bool
	// PoolOf reads what ResourceSlices, by name, publish of a node, for a program that remembers it; nil: PoolOf.
	PoolOf func(node string, slices []*unstructured.Unstructured) *dra.Pool
}

// DRARead is what they tell.
type DRARead struct {
	Cluster DRA
	// Nodes by name, which is that of their pools.
	Nodes map[string]DRANode
	// Claimed is by which ResourceClaim pods have GPUs, by UID or PodGroup. An allocation precedes the start of the pod,
	// and older kubelets do not report to the agent who has GPUs by claims.
	Claimed map[string]string
	// Classes are the UIDs of the DeviceClasses by name, Rules those of the operator's DeviceTaintRules by node.
	Classes, Rules map[string]types.UID
}

// PoolOf reads what ResourceSlices publish of a node, whose name does not matter.
func PoolOf(_ string, published []*unstructured.Unstructured) *dra.Pool {
	read := make([]dra.Slice, 0, len(published))
	for _, slice := range published {
		read = append(read, dra.SliceOf(slice.Object))
	}
	return new(dra.PoolOf(read))
}

// Read reads the objects.
func (o DRAObjects) Read() *DRARead {
	r := &DRARead{
		Cluster: DRA{ServesClasses: o.ServesClasses, ServesTaintRules: o.ServesTaintRules},
		Nodes:   map[string]DRANode{}, Claimed: map[string]string{}, Classes: map[string]types.UID{}, Rules: map[string]types.UID{},
	}
	o.readSlices(r)
	o.readClaims(r)
	for i := range o.Classes {
		r.Cluster.Classes = append(r.Cluster.Classes, dra.ClassOf(&o.Classes[i]))
		r.Classes[o.Classes[i].GetName()] = o.Classes[i].GetUID()
	}
	slices.SortFunc(r.Cluster.Classes, func(a, b dra.Class) int { return cmp.Compare(a.Name, b.Name) })
	o.readTaintRules(r)
	return r
}

// change changes what is known of a node.
func (r *DRARead) change(node string, do func(*DRANode)) {
	n := r.Nodes[node]
	do(&n)
	r.Nodes[node] = n
}

func (o *DRAObjects) readSlices(r *DRARead) {
	of := map[string][]*unstructured.Unstructured{}
	for i := range o.Slices {
		if node := PublishedOn(&o.Slices[i]); node != "" {
			of[node] = append(of[node], &o.Slices[i])
		}
	}
	poolOf := o.PoolOf
	if poolOf == nil {
		poolOf = PoolOf
	}
	for node, its := range of {
		slices.SortFunc(its, func(a, b *unstructured.Unstructured) int { return cmp.Compare(a.GetName(), b.GetName()) })
		r.Nodes[node] = DRANode{DRA: "ResourceSlice " + its[len(its)-1].GetName(), Published: poolOf(node, its)}
	}
}

// PublishedOn is the node whose GPUs a ResourceSlice of NVIDIA's DRA driver publishes; empty: it is none of these.
func PublishedOn(slice *unstructured.Unstructured) string {
	driver, _, _ := unstructured.NestedString(slice.Object, "spec", "driver")
	if driver != dra.DriverName {
		return ""
	}
	node, _, _ := unstructured.NestedString(slice.Object, "spec", "nodeName")
	return node
}

func (o *DRAObjects) readClaims(r *DRARead) {
	for i := range o.Claims {
		namespace := o.Claims[i].GetNamespace()
		claim, counts := dra.ClaimOf(namespace, o.Claims[i].GetName(), o.Claims[i].Object)
		if !counts {
			continue
		}
		r.Cluster.Named = append(r.Cluster.Named, claim.Classes...)
		for _, pool := range claim.Pools() {
			r.change(pool, func(n *DRANode) { n.Claims = append(n.Claims, claim) })
		}
		if len(claim.Devices) == 0 {
			continue
		}
		for _, uid := range claim.Pods {
			r.Claimed[uid] = claim.Name
		}
		for _, other := range claim.Others {
			if other.IsPodGroup() {
				r.Claimed[podGroup(namespace, other.Name)] = claim.Name
			}
		}
	}
	slices.Sort(r.Cluster.Named)
	r.Cluster.Named = slices.Compact(r.Cluster.Named)
	for _, n := range r.Nodes {
		slices.SortFunc(n.Claims, func(a, b dra.Claim) int { return cmp.Compare(a.Name, b.Name) })
	}
}

func (o *DRAObjects) readTaintRules(r *DRARead) {
	for i := range o.TaintRules {
		rule := &o.TaintRules[i]
		gone := o.Deleted[rule.GetUID()]
		if edited, is := dra.EditedTaintRule(rule); is && !gone {
			r.Rules[edited] = rule.GetUID()
			r.Cluster.Edited = append(r.Cluster.Edited, edited)
			continue
		}
		node, since, ours := dra.TaintRuleOf(rule)
		if named, is := dra.TaintRuleNode(rule.GetName()); is && !ours {
			r.change(named, func(n *DRANode) { n.TaintRuleTaken = true })
		}
		if !ours || gone || rule.GetDeletionTimestamp() != nil {
			continue
		}
		r.Rules[node] = rule.GetUID()
		r.Cluster.DevicesTaintedOn = append(r.Cluster.DevicesTaintedOn, node)
		r.change(node, func(n *DRANode) { n.DevicesTaintedAt = since })
	}
	slices.Sort(r.Cluster.DevicesTaintedOn)
	slices.Sort(r.Cluster.Edited)
}

// podGroup names a PodGroup as no UID of a pod is.
func podGroup(namespace, name string) string { return namespace + "/" + name }

// ClaimOf is by which of the claims a pod has GPUs; empty: by none.
func ClaimOf(p *Pod, claimed map[string]string) string {
	return cmp.Or(claimed[p.UID], claimed[podGroup(p.Namespace, p.PodGroup)])
}

// AddTo puts what they tell into a snapshot whose nodes have their pods, which another snapshot may have too.
func (r *DRARead) AddTo(s *Snapshot) {
	s.DRA = r.Cluster
	for i := range s.Nodes {
		n := &s.Nodes[i]
		n.DRANode, n.Pods = r.Nodes[n.Name], slices.Clone(n.Pods)
		for p := range n.Pods {
			n.Pods[p].Claim = ClaimOf(&n.Pods[p], r.Claimed)
		}
	}
}
