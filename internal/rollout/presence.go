// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
)

// Another controller that offers the GPUs of a node shows by a pod, a DaemonSet, a ResourceSlice or the name of a resource.
// Each of them goes for a moment when its plugin restarts, so presence is remembered on the Node, in the annotation
// v1alpha1.AnnotationOtherController: the reason, and once all signs are gone the reason and the time. After absentFor without
// any sign the annotation goes, and the node is the policy's.

// The slicer's resource with quantity 0 is no sign: the kubelet lists it for ever. Where it is all that there is, absence begins with
// the pass that first sees it so. Afterwards the annotation stays, as slicerGone, until the resource is listed no more.

// slicerGone is the annotation of a node that lists a resource of the slicer with quantity 0, absentFor after its last sign.
const slicerGone = "SlicerGone"

// Sightings remembers which other controller was seen on each node, and when last, in case the write of the annotation fails or the
// annotation went with the policy. It is kept by the program that carries decisions out and is lost with it. The zero value has
// seen none.
type Sightings struct{ seen map[string]sighting }

// sighting is the reason by which another controller was seen on a node, and when last.
type sighting struct {
	reason string
	at     time.Time
}

// note remembers the signs of a pass, the reason for each node or none, and forgets what is past.
func (s *Sightings) note(signs iter.Seq2[*Node, string], now time.Time) {
	if s == nil {
		return
	}
	kept := map[string]sighting{}
	for n, reason := range signs {
		if reason != "" {
			kept[n.Name] = sighting{reason: reason, at: now}
		} else if was, seen := s.seen[n.Name]; seen && was.at.After(n.Created) && now.Sub(was.at) < absentFor {
			kept[n.Name] = was
		}
	}
	s.seen = kept
}

// of is what was seen on a node a moment ago and is not there any more.
func (s *Sightings) of(n *Node) (was sighting) {
	if s == nil || len(s.seen) == 0 {
		return was
	}
	if reason, _ := shownBy(n); reason != "" {
		return was
	}
	return s.seen[n.Name]
}

// absentFor is how long no sign of another controller may be there before the operator takes the node over. A pod of a
// DaemonSet is replaced within it, its image included; the kubelet deletes the ResourceSlices of a plugin after 30 s.
const absentFor = 5 * time.Minute

// shownBy is what shows another controller on the node: the reason, and the resource or object. Both are empty if nothing does.
func shownBy(n *Node) (reason, object string) {
	if n.Slicer != "" {
		return v1alpha1.ReasonSlicerActive, n.Slicer
	}
	if n.DRA != "" {
		return v1alpha1.ReasonDRADriverActive, n.DRA
	}
	for i := range n.Pods {
		if p := &n.Pods[i]; p.DRA {
			return v1alpha1.ReasonDRADriverActive, "pod " + p.Namespace + "/" + p.Name
		}
	}
	return "", ""
}

// signOf is shownBy with a message for users in place of the object.
func signOf(n *Node) (reason, message string) {
	reason, object := shownBy(n)
	switch reason {
	case "":
		return "", ""
	case v1alpha1.ReasonSlicerActive:
		return reason, fmt.Sprintf("the node lists the resource %s, so Red Hat's Dynamic Accelerator Slicer (InstaSlice) "+
			"partitions its GPUs, and two must not; leave the node out of nodeSelector, or uninstall the slicer", object)
	}
	return reason, fmt.Sprintf("%s of NVIDIA's DRA driver offers the GPUs of the node through ResourceClaims, and pods of both "+
		"sides would get the same ones; leave the node out of nodeSelector, or turn the driver's GPUs off "+
		"(resources.gpus.enabled=false of its chart)", object)
}

// remembered is which other controller the annotation names, or was seen after what it says; since is when its last sign went, zero
// if that is not recorded.
func (v *view) remembered() (reason string, since time.Time) {
	note, noted := v.node.Annotations[v1alpha1.AnnotationOtherController]
	if note != slicerGone {
		reason, _, _ = strings.Cut(note, "@")
		since, _ = stamped(note, reason)
	}
	was := v.world.Sightings.of(v.node)
	switch {
	case was.reason != "" && (reason == "" || !since.IsZero() && since.Before(was.at)):
		return was.reason, was.at
	case !noted && v.node.SlicerLeft != "":
		return v1alpha1.ReasonSlicerActive, time.Time{}
	}
	return reason, since
}

// takenByOthers reports which other controller offers the GPUs of the node, or did a moment ago, so that a policy cannot be
// honoured there.
func (v *view) takenByOthers() *plan.Problem {
	if reason, message := signOf(v.node); reason != "" {
		return &plan.Problem{Reason: reason, Message: message}
	}
	reason, since := v.remembered()
	switch {
	case reason == "":
		return nil
	case since.IsZero():
		return &plan.Problem{Reason: reason, Message: "Waiting: the controller that offered the GPUs of the node is gone"}
	}
	return &plan.Problem{Reason: reason, Message: fmt.Sprintf("Waiting: the controller that offered the GPUs of the node was last seen at %s. "+
		"The operator takes the node over at %s unless it returns", clock(since), clock(since.Add(absentFor)))}
}

// forgetsOthers is why the annotation goes.
const forgetsOthers = "forgetting the controller that offered the GPUs"

// rememberOthers keeps the annotation true on a node that a policy governs, and removes it from others.
func (m *member) rememberOthers(governed bool) {
	value, why, left := "", forgetsOthers, time.Duration(0)
	if governed {
		value, why, left = m.noteOfOthers()
	}
	m.after = Sooner(m.after, left)
	if value == m.node.Annotations[v1alpha1.AnnotationOtherController] {
		return
	}
	patch := m.patch(why)
	patch.Annotations[v1alpha1.AnnotationOtherController] = nil
	if value != "" {
		patch.Annotations[v1alpha1.AnnotationOtherController] = &value
	}
	m.actions = append(m.actions, patch)
}

// noteOfOthers is what the annotation is to hold on a node that a policy governs, empty: there is to be none; why it changes, and when
// it changes next by itself.
func (v *view) noteOfOthers() (value, why string, left time.Duration) {
	note, gone := v.node.Annotations[v1alpha1.AnnotationOtherController], ""
	if v.node.SlicerLeft != "" {
		gone = slicerGone
	}
	reason, _ := signOf(v.node)
	was, since := v.remembered()
	switch {
	case reason != "":
		return reason, "recording that another controller offers the GPUs", 0
	case was == "" && gone != "":
		return note, "", 0
	case was == "":
		return "", forgetsOthers, 0
	case since.IsZero():
		since = v.world.Now
	}
	if left := since.Add(absentFor).Sub(v.world.Now); left > 0 {
		return stamp(was, since), "recording when the controller that offered the GPUs was last seen", left
	}
	return gone, "the controller that offered the GPUs does not return", 0
}
