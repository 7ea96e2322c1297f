// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Write is a change of an object of an autoscaler. Exactly one member is set.
type Write struct {
	Overlay  *WriteOverlay
	Delete   *DeleteOverlay
	Annotate *Annotate
	Startup  *Startup
}

// ObjectName names the object that is written, as Refused has it.
func (w Write) ObjectName() string {
	switch {
	case w.Overlay != nil:
		return "NodeOverlay/" + w.Overlay.Name
	case w.Delete != nil:
		return "NodeOverlay/" + w.Delete.Name
	case w.Startup != nil:
		return "Node/" + w.Startup.Node
	}
	return objectNameOf(w.Annotate.Ref)
}

// WriteOverlay applies a NodeOverlay without force.
type WriteOverlay struct {
	Name   string
	Object map[string]any
}

// DeleteOverlay deletes a NodeOverlay of the operator with that UID. One that is gone is no error.
type DeleteOverlay struct{ Name, UID string }

// Annotate applies annotations to a MachineSet or MachineDeployment with that UID and resource version: exactly these
// are the operator's afterwards. One that is gone is no error.
type Annotate struct {
	Ref
	Version, UID, ResourceVersion string
	Annotations                   map[string]string
	// Force takes over defaults of OpenShift's cluster-autoscaler-operator.
	Force bool
}

// Startup puts the startup taint of a node without a GPU label on it, or takes it off. A node that is gone is no error.
type Startup struct {
	Node string
	On   bool
}

// wants is what policies in mode Manage want to be written, and nodes that are to have the startup taint, whatever the mode.
type wants struct {
	overlays    []overlayWant
	annotations []annotationWant
	startups    []string
}

type overlayWant struct {
	Overlay
	by *v1alpha1.GPUSharingPolicy
}

type annotationWant struct {
	scalable *Scalable
	by       *v1alpha1.GPUSharingPolicy
	want     map[string]string
}

func (s *Scalable) objectName() string { return objectNameOf(s.Ref) }

func objectNameOf(r Ref) string {
	return string(r.Kind) + "." + r.Group + "/" + r.Namespace + "/" + r.Name
}

// refused reports that the API server refused the last write to an object, which is still wanted.
func (e *entry) refused(object string) bool {
	r, is := e.s.Refused[object]
	switch {
	case !is:
		return false
	case r.Conflict:
		e.find(v1alpha1.ReasonOwnedByOther, "Another field manager owns what the operator would write to %s: %s. Remove it there", object, r.Message)
	case r.Forbidden:
		e.find(v1alpha1.ReasonNotPermitted, "The operator may not write %s. Install it with autoscaling.manage=true, or apply config/autoscaling. %s", object, r.Message)
	default:
		e.find(v1alpha1.ReasonWriteFailed, "The API server refused %s, and the operator tries again: %s", object, r.Message)
	}
	return true
}

// writes brings what is there to what is wanted: what nobody wants any more is undone.
func (s *Snapshot) writes(wanted wants) []Write {
	var all []Write
	for _, want := range wanted.overlays {
		have := s.overlay(want.Name)
		if have == nil || have.Policy != "" && (!have.same(want.Overlay) || !have.of(want.by)) {
			all = append(all, Write{Overlay: &WriteOverlay{Name: want.Name, Object: want.Object(s.OverlayVersion, string(want.by.UID))}})
		}
	}
	for i := range s.Overlays {
		o := &s.Overlays[i]
		if o.Policy != "" && !slices.ContainsFunc(wanted.overlays, func(want overlayWant) bool { return want.Name == o.Name }) {
			all = append(all, Write{Delete: &DeleteOverlay{Name: o.Name, UID: o.UID}})
		}
	}
	for i := range s.Scalables {
		s := &s.Scalables[i]
		at := slices.IndexFunc(wanted.annotations, func(want annotationWant) bool { return want.scalable == s })
		switch {
		case at >= 0:
			if a := s.announce(wanted.annotations[at]); a != nil {
				all = append(all, Write{Annotate: a})
			}
		case s.Annotations[v1alpha1.AnnotationAutoscaling] != "":
			if a := s.restore(); a != nil {
				all = append(all, Write{Annotate: a})
			}
		}
	}
	return all
}

// announce is the write that makes annotations as they are wanted, with the record of what was there before; nil: they
// are.
func (s *Scalable) announce(want annotationWant) *Annotate {
	record, lost := s.record(), s.Annotations[v1alpha1.AnnotationAutoscaling] != ""
	if record == nil {
		record = &Record{Previous: map[string]string{}}
		for key := range want.want {
			if value, found := s.Annotations[key]; found && (!s.owns(key) || !lost && value != want.want[key]) { // what is ours was not there before, unless it was restored
				record.Previous[key] = value
			}
		}
	}
	record.Policy = want.by.Name
	text, err := json.Marshal(record)
	if err != nil { // cannot be: it holds strings only
		return nil
	}
	annotations := maps.Clone(want.want)
	annotations[v1alpha1.AnnotationAutoscaling] = string(text)
	is := func(key string) bool { return s.Annotations[key] == annotations[key] && s.owns(key) }
	if !s.surplus(want.want) && !slices.ContainsFunc(slices.Collect(maps.Keys(annotations)), func(key string) bool { return !is(key) }) {
		return nil
	}
	a := s.apply(annotations)
	for key, value := range want.want {
		if have, found := s.Annotations[key]; found && have != value && slices.Contains(s.Managers[key], defaulter) {
			a.Force = true
		}
	}
	return a
}

// surplus reports whether the operator has annotations on the object that it wants no more, such as the taints of a policy that has none now.
func (s *Scalable) surplus(want map[string]string) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(s.Annotations)), func(key string) bool {
		_, wanted := want[key]
		return s.owns(key) && !wanted && key != v1alpha1.AnnotationAutoscaling
	})
}

// restore is the write that gives back what was there before the operator: its own annotations become the former ones
// or go. What another has taken over meanwhile stays. Nil: nothing is left to give back, such as on a copy of an
// object, which has the annotations of another.
func (s *Scalable) restore() *Annotate {
	annotations := map[string]string{}
	if record := s.record(); record != nil {
		for key, value := range record.Previous {
			if s.owns(key) && len(s.others(key)) == 0 {
				annotations[key] = value
			}
		}
	}
	for key, value := range s.Annotations {
		if former, stays := annotations[key]; s.owns(key) && (!stays || former != value) {
			return s.apply(annotations)
		}
	}
	return nil
}

func (s *Scalable) apply(annotations map[string]string) *Annotate {
	return &Annotate{Ref: s.Ref, Version: s.Version, UID: s.UID, ResourceVersion: s.ResourceVersion, Annotations: annotations}
}

// Announces reports whether annotations are on the object that the operator has written and not undone yet.
func (s *Scalable) Announces() bool {
	return s.Annotations[v1alpha1.AnnotationAutoscaling] != "" && s.restore() != nil
}
