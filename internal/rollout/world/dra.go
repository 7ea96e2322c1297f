// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package world

import (
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/dra"
)

// DRA is what of the cluster matters where NVIDIA's DRA driver serves GPUs.
type DRA struct {
	// Classes are all DeviceClasses; nil: Kubernetes serves none that can have an extended resource.
	Classes []dra.Class
	// ServesClasses reports whether the API server has DeviceClasses of resource.k8s.io/v1, which can serve an extended resource.
	ServesClasses bool
	// ServesRules reports whether the API server has DeviceTaintRules.
	ServesRules bool
	// Named are the DeviceClasses that some ResourceClaim names.
	Named []string
	// Ruled are the nodes for which the operator has a DeviceTaintRule, also those that are gone.
	Ruled []string
	// Asked is how many shares policies need of the GPUs on nodes of the driver. Decide finds them.
	Asked dra.Asked
}

// Signature differs if something of the cluster differs on which the view of a node of the driver depends.
func (d *DRA) Signature() string {
	return fmt.Sprintf("%v %t %t %s", d.Classes, d.ServesClasses, d.ServesRules, d.Asked)
}

// StackOf returns which of NVIDIA's programs offers the GPUs of a node. Under the GPU Operator a deploy label that is true, or paused, tells
// that the device plugin is to come.
func (w *World) StackOf(n *Node) dra.Stack {
	reason, _ := shownByDRA(n)
	f := dra.Facts{Driver: reason != ""}
	if !f.Driver {
		return dra.StackOf(f)
	}
	deploy := n.Labels[DeployLabels()[0]]
	f.Plugin = w.Plugin.ClusterPolicy && deploy != "" && deploy != LabelFalse || slices.ContainsFunc(n.Pods, func(p Pod) bool {
		return p.NodeSelector[DeployLabels()[0]] != "" || !w.Plugin.ClusterPolicy && p.MountsConfig && p.Controller == daemonSet
	})
	for name, count := range n.Allocatable {
		f.Allocatable = f.Allocatable || count > 0 && OfGPU(name)
	}
	return dra.StackOf(f)
}

// Offered returns the extended resources of GPUs and instances that pods can get on the node, each with its number: what the kubelet lists
// as allocatable, or what NVIDIA's DRA driver publishes where it alone serves the node.
func (n *Node) Offered(stack dra.Stack) map[string]int64 {
	if stack == dra.Driver {
		return n.Published.Published()
	}
	return n.Allocatable
}
