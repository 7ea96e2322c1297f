// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// The kinds around NVIDIA's DRA driver.
const (
	kindSlice     = "ResourceSlice"
	kindClaim     = "ResourceClaim"
	kindClass     = "DeviceClass"
	kindTaintRule = "DeviceTaintRule"
)

// withoutDRA is what is not known without each of them, in the order in which it is printed. DeviceTaintRules tell only
// how far a change is.
var withoutDRA = []struct{ kind, plural, lacks string }{
	{kindSlice, "ResourceSlices", "what NVIDIA's DRA driver publishes is not known, and no number of shares is compared"},
	{kindClaim, "ResourceClaims", "pods and claims that have a device by a ResourceClaim are not named, unless the agent reports them"},
	{kindClass, "DeviceClasses", "the DeviceClass gpu.nvidia.com of the driver's chart is taken for granted, and no other is known"},
	{kindTaintRule, "DeviceTaintRules", "it is not known which nodes' devices are tainted"},
}

// driverObjects are the objects of resource.k8s.io, as far as the API server serves them and the user may read them.
type driverObjects struct {
	of     map[string][]unstructured.Unstructured // by kind
	served map[string]string                      // the version, by kind
	unread map[string]bool                        // kinds that the user may not read
}

// readDRA reads what NVIDIA's DRA driver publishes, and what Kubernetes has around it. Clusters before Kubernetes 1.34
// serve less.
func readDRA(ctx context.Context, c client.Client) (driverObjects, error) {
	o := driverObjects{of: map[string][]unstructured.Unstructured{}, served: map[string]string{}, unread: map[string]bool{}}
	for _, w := range withoutDRA {
		kind, err := listOf(c, schema.GroupVersionKind{Group: draGroup, Version: "v1", Kind: w.kind})
		if meta.IsNoMatchError(err) {
			continue
		}
		if err != nil {
			return o, fmt.Errorf("reading %s: %w", w.plural, err)
		}
		o.served[w.kind] = kind.Version
		for more, next := true, ""; more; more = next != "" {
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(kind)
			err := c.List(ctx, list, client.Limit(page), client.Continue(next))
			if apierrors.IsForbidden(err) {
				o.unread[w.kind] = true
				break
			}
			if err != nil {
				return o, fmt.Errorf("reading %s: %w", w.plural, err)
			}
			o.of[w.kind] = append(o.of[w.kind], list.Items...)
			next = list.GetContinue()
		}
	}
	return o, nil
}

// draGroup is the API group of dynamic resource allocation.
const draGroup = "resource.k8s.io"

// tell puts into the snapshot what the controller reads of these objects. It returns what is not known because the user
// may not read it, where NVIDIA's DRA driver serves a node.
func (o *driverObjects) tell(s *cluster.Snapshot) (lacks []string) {
	cluster.DRAObjects{
		Slices: o.of[kindSlice], Claims: o.of[kindClaim], Classes: o.of[kindClass], TaintRules: o.of[kindTaintRule],
		ServesClasses: o.served[kindClass] == "v1", ServesTaintRules: o.served[kindTaintRule] != "",
	}.Read().AddTo(s)
	if o.unread[kindClass] {
		s.DRA.Classes = []dra.Class{{Name: dra.DriverName, Resource: plan.ResourceGPU, Unread: true}}
	}
	for i := range s.Nodes {
		// Its DaemonSet may be there while its pod and ResourceSlices are not: the controller has recorded that.
		if n := &s.Nodes[i]; n.DRA == "" && n.Annotations[v1alpha1.AnnotationOtherController] == v1alpha1.ReasonDRADriverActive {
			n.DRA = "the annotation " + v1alpha1.AnnotationOtherController
		}
	}
	if !slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool { return s.Plugin.StackOf(&n) != dra.DevicePlugin }) {
		return nil
	}
	for _, without := range withoutDRA {
		if o.unread[without.kind] {
			lacks = append(lacks, fmt.Sprintf("You may not list %s, so %s. Ask an administrator to bind the ClusterRole gpu-sharing-cli of the installed "+
				"version to you", without.plural, without.lacks))
		}
	}
	return lacks
}
