// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Another controller that offers or partitions the GPUs of a node is noticed, and recorded on the Node.
//
//	sign → offeredByOthers, NoteOfOthers → sign gone for five minutes → forgotten

// instancesLeftToOthers reports whether the agent leaves the instances to another program, which changes them again and
// again.
func instancesLeftToOthers(v *View) bool {
	reason, _, stalled := v.ApplyStalled()
	return stalled && reason == v1alpha1.ReasonChangedByOthers && specMatches(v.Node.GPU.Spec, v.Target)
}

// A node that NVIDIA's DRA driver alone serves is the policy's too. It carries the annotation all the same, so that
// nothing is done for the device plugin while the driver restarts.

// Another controller that offers the GPUs of a node shows by a pod, a DaemonSet, a ResourceSlice or the name of a
// resource. Each of them goes for a moment when its plugin restarts, so presence is recorded on the Node, in the
// annotation v1alpha1.AnnotationOtherController: the reason, and once all signs are gone the reason and the time. After
// cluster.AbsentFor without any sign the annotation goes, and the node is the policy's.

// The resource of another partitioner with quantity 0 is no sign: the kubelet lists it for ever. Where it is all that
// there is, absence begins with the reconcile that first sees it so. Afterwards the annotation stays, as
// cluster.OtherPartitionerGone, until the resource is listed no more.

// signOfOthers is cluster.ShownBy with a message for users in place of the object.
func signOfOthers(n *cluster.Node) (reason, message string) {
	reason, object := cluster.ShownBy(n)
	switch reason {
	case "":
		return "", ""
	case v1alpha1.ReasonSlicerActive:
		return reason, fmt.Sprintf("the node lists the resource %s, so Red Hat's Dynamic Accelerator Slicer (InstaSlice) "+
			"partitions its GPUs, and two must not; leave the node out of nodeSelector, or uninstall the slicer", object)
	}
	return reason, fmt.Sprintf("%s of NVIDIA's DRA driver and the device plugin offer its GPUs. Drain it, "+
		"then label it %s=false or keep the driver off", object, cluster.DeployLabels()[0])
}

// rememberedOthers is which other controller the annotation names, or was seen after what it says; since is when its
// last sign went, zero if that is not recorded.
func rememberedOthers(v *View) (reason string, since time.Time) {
	_, noted := v.Node.Annotations[v1alpha1.AnnotationOtherController]
	note := v.Node.NotedOther()
	reason, since = note.Reason, note.At
	was := v.Snapshot.OtherControllers.Of(v.Node)
	switch {
	case was.Reason != "" && (reason == "" || !since.IsZero() && since.Before(was.At)):
		return was.Reason, was.At
	case !noted && v.Node.OtherPartitionerLeft != "":
		return v1alpha1.ReasonSlicerActive, time.Time{}
	}
	return reason, since
}

// offeredByOthers reports which other controller offers the GPUs of the node, or did a moment ago, so that a policy
// cannot be honoured there.
func offeredByOthers(v *View) *plan.Problem {
	if reason, message := signOfOthers(v.Node); reason != "" {
		if reason == v1alpha1.ReasonDRADriverActive && v.ByClaims() {
			return nil // alone
		}
		return &plan.Problem{Reason: reason, Message: message}
	}
	reason, since := rememberedOthers(v)
	switch {
	case reason == "":
		return nil
	case since.IsZero():
		return &plan.Problem{Reason: reason, Message: "Waiting: the controller that offered the GPUs of the node is gone"}
	}
	return &plan.Problem{Reason: reason, Message: fmt.Sprintf("Waiting: the controller that offered the GPUs of the node was last seen at %s. "+
		"The operator takes the node over at %s unless it returns", format.Clock(since), format.Clock(since.Add(cluster.AbsentFor)))}
}

// ForgetsOthers is why the annotation goes.
const ForgetsOthers = "forgetting the controller that offered the GPUs"

// NoteOfOthers is what the annotation is to hold on a node that a policy governs, empty: there is to be none; why it
// changes, and when it changes next by itself.
func NoteOfOthers(v *View) (value, why string, remaining time.Duration) {
	note, gone := v.Node.Annotations[v1alpha1.AnnotationOtherController], ""
	if v.Node.OtherPartitionerLeft != "" {
		gone = cluster.OtherPartitionerGone
	}
	reason, _ := signOfOthers(v.Node)
	was, since := rememberedOthers(v)
	switch {
	case reason != "" && v.ByClaims():
		return reason, "recording that NVIDIA's DRA driver serves the GPUs", 0
	case reason != "":
		return reason, "recording that another controller offers the GPUs", 0
	case was == "" && gone != "":
		return note, "", 0
	case was == "":
		return "", ForgetsOthers, 0
	case since.IsZero(), fromFuture(v, since):
		since = v.Snapshot.Now
	}
	if remaining := since.Add(cluster.AbsentFor).Sub(v.Snapshot.Now); remaining > 0 {
		return timing.Stamp(was, since), "recording when the controller that offered the GPUs was last seen", remaining
	}
	return gone, "the controller that offered the GPUs does not return", 0
}
