// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

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
// true, or stopped, tells that the device plugin is to come.
func (s *Snapshot) StackOf(n *Node) dra.Stack {
	reason, _ := shownByDRA(n)
	f := dra.Facts{Driver: reason != ""}
	if !f.Driver {
		return dra.StackOf(f)
	}
	deploy := n.Labels[DeployLabels()[0]]
	f.Plugin = s.Plugin.ClusterPolicy && deploy != "" && deploy != LabelFalse || slices.ContainsFunc(n.Pods, func(p Pod) bool {
		return p.KeptBy(DeployLabels()[0]) || !s.Plugin.ClusterPolicy && p.MountsConfig && p.Controller == daemonSet
	})
	for name, count := range n.Allocatable {
		f.Allocatable = f.Allocatable || count > 0 && IsGPUResource(name)
	}
	return dra.StackOf(f)
}

// Offered returns the extended resources of GPUs and instances that pods can get on the node, each with its number:
// what the kubelet lists as allocatable, or what NVIDIA's DRA driver publishes where it alone serves the node.
func (n *Node) Offered(stack dra.Stack) map[string]int64 {
	if stack == dra.DRADriver {
		return n.Published.Published()
	}
	return n.Allocatable
}

// DRAObjects are the objects of resource.k8s.io as they are listed, of the versions that the API server prefers.
type DRAObjects struct {
	Slices, Claims, Classes, TaintRules []unstructured.Unstructured
	// ServesClasses and ServesTaintRules are those of DRA.
	ServesClasses, ServesTaintRules bool
}

// AddTo adds to a snapshot what they tell of the cluster, of each node and of its pods. A program that keeps a cache
// reads them one by one.
func (o DRAObjects) AddTo(s *Snapshot) {
	s.DRA.ServesClasses, s.DRA.ServesTaintRules = o.ServesClasses, o.ServesTaintRules
	for i := range o.Classes {
		s.DRA.Classes = append(s.DRA.Classes, dra.ClassOf(&o.Classes[i]))
	}
	slices.SortFunc(s.DRA.Classes, func(a, b dra.Class) int { return cmp.Compare(a.Name, b.Name) })
	published, claimed, withTaintRuleAt, taken := o.read(s)
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if found := published[n.Name]; found != nil {
			n.Published = new(dra.PoolOf(found))
			n.DRA = cmp.Or(n.DRA, "ResourceSlices")
		}
		n.Claims, n.DevicesTaintedAt, n.TaintRuleTaken = claimed[n.Name], withTaintRuleAt[n.Name], taken[n.Name]
		for p := range n.Pods {
			for _, c := range n.Claims {
				if len(c.Of(n.Name)) > 0 && n.Pods[p].Has(c) {
					n.Pods[p].Claim = c.Name
				}
			}
		}
	}
}

// read reads the slices, claims and rules of each node.
func (o DRAObjects) read(s *Snapshot) (published map[string][]dra.Slice, claimed map[string][]dra.Claim, withTaintRuleAt map[string]time.Time, taken map[string]bool) {
	published, claimed, withTaintRuleAt, taken = map[string][]dra.Slice{}, map[string][]dra.Claim{}, map[string]time.Time{}, map[string]bool{}
	for i := range o.Slices {
		driver, _, _ := unstructured.NestedString(o.Slices[i].Object, "spec", "driver")
		node, _, _ := unstructured.NestedString(o.Slices[i].Object, "spec", "nodeName")
		if driver == dra.DriverName && node != "" {
			published[node] = append(published[node], dra.SliceOf(o.Slices[i].Object))
		}
	}
	for i := range o.Claims {
		claim, counts := dra.ClaimOf(o.Claims[i].GetNamespace(), o.Claims[i].GetName(), o.Claims[i].Object)
		if !counts {
			continue
		}
		s.DRA.Named = append(s.DRA.Named, claim.Classes...)
		for _, pool := range claim.Pools() {
			claimed[pool] = append(claimed[pool], claim)
		}
	}
	for i := range o.TaintRules {
		if node, since, ours := dra.TaintRuleOf(&o.TaintRules[i]); ours {
			withTaintRuleAt[node] = since
			s.DRA.DevicesTaintedOn = append(s.DRA.DevicesTaintedOn, node)
		} else if named, is := dra.TaintRuleNode(o.TaintRules[i].GetName()); is {
			taken[named] = true
		}
		if node, edited := dra.EditedTaintRule(&o.TaintRules[i]); edited {
			s.DRA.Edited = append(s.DRA.Edited, node)
		}
	}
	slices.Sort(s.DRA.Named)
	s.DRA.Named = slices.Compact(s.DRA.Named)
	slices.Sort(s.DRA.DevicesTaintedOn)
	return published, claimed, withTaintRuleAt, taken
}
