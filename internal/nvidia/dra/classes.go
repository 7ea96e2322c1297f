// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

const (
	// namePrefix begins the names of all objects of the operator in the group resource.k8s.io.
	namePrefix = "gpusharing-"
	// classPrefix begins the names of the operator's DeviceClasses for MIG instances, and gpuClass is the name of the
	// one for whole GPUs.
	classPrefix = namePrefix + "mig-"
	gpuClass    = namePrefix + "gpu"
)

// TaintRuleName is the name of the operator's DeviceTaintRule for a node.
func TaintRuleName(node string) string { return namePrefix + node }

// TaintRuleNode is the node of the operator's DeviceTaintRule of that name; ok is false if the name is another's.
func TaintRuleNode(rule string) (node string, ok bool) { return strings.CutPrefix(rule, namePrefix) }

// ClassName is the name of the operator's DeviceClass for a profile.
func ClassName(profile string) string {
	return classPrefix + strings.ToLower(strings.ReplaceAll(profile, "+", "."))
}

// implicitPrefix begins the extended resource that every DeviceClass has beside the one that it names
// (k8s.io/api/resource/v1, ResourceDeviceClassPrefix).
const implicitPrefix = "deviceclass.resource.kubernetes.io/"

// ResourceRequestedBy is the extended resource of GPUs or MIG instances that pods get by a resource of theirs: that one
// itself, or the one of the operator's DeviceClass that they name by its implicit resource.
func ResourceRequestedBy(resource string) string {
	if profile, is := strings.CutPrefix(resource, implicitPrefix+classPrefix); is {
		return plan.ResourcePrefix + profile
	}
	if resource == implicitPrefix+gpuClass {
		return plan.ResourceGPU
	}
	return resource
}

// Means reports whether a profile of a policy's layout, exact (1g.10gb+me) or a number of slices (1g+me), can be that
// of one of the operator's classes.
func Means(profile, class string) bool {
	if ClassName(profile) == class {
		return true
	}
	size, attributes := profile, ""
	if at := strings.IndexAny(profile, "+-"); at >= 0 {
		size, attributes = profile[:at], profile[at:]
	}
	rest, is := strings.CutPrefix(class, classPrefix+size+".")
	_, with, sized := strings.Cut(rest, "gb")
	return is && sized && with == strings.ReplaceAll(attributes, "+", ".")
}

// Ours reports whether a DeviceClass has the name of one of the operator's.
func Ours(class string) bool { return strings.HasPrefix(class, classPrefix) || class == gpuClass }

// Write is a DeviceClass of the operator's that must exist: its name, the extended resource that it serves, the CEL
// expression by which it selects devices, and the other classes of its resource, by comma.
type Write struct{ Name, Resource, Selector, Beside string }

// ForInstances is the operator's class of the instances of a profile.
func ForInstances(profile string) Write {
	return Write{Name: ClassName(profile), Resource: plan.ResourceOf(profile), Selector: fmt.Sprintf(
		"device.driver == '%[1]s' && device.attributes['%[1]s'].type == 'mig' && device.attributes['%[1]s'].profile == '%[2]s'", DriverName, profile)}
}

// ForGPUs is the operator's class of whole GPUs. It is needed where the GPU Operator runs the driver for a GPUCluster:
// the class gpu.nvidia.com that it keeps there serves no extended resource (manifests/state-dra-driver, v26.7.0). The
// one of the driver's chart does.
func ForGPUs() Write {
	return Write{Name: gpuClass, Resource: plan.ResourceGPU, Selector: fmt.Sprintf(
		"device.driver == '%[1]s' && device.attributes['%[1]s'].type == 'gpu'", DriverName)}
}

// Class is a DeviceClass.
type Class struct {
	Name string
	// Resource is the extended resource that it serves; empty if none.
	Resource string
	// Strategy is the sharing strategy that its config gives whole GPUs, and Interval the time slice; empty if it gives
	// none.
	Strategy, Interval string
	// Unread says that only Name and Resource are known.
	Unread bool
	// Own says that it has the label by which the operator tells its objects.
	Own bool
	// Selector is the CEL expression by which it selects devices; empty if it has none, or more than one. Of the
	// operator's only.
	Selector string
	// Beside are the other classes of its resource for which it was last written, by comma. Of the operator's only.
	Beside string
	// Configured says that it has more than selectors and a resource, such as a configuration of its devices. Of the
	// operator's only.
	Configured bool
	// Age orders classes by their time of creation, in seconds since 1970: of two with the same resource the scheduler
	// uses the later one.
	Age int64
}

// Offering returns the class by which pods get an extended resource: the one that the scheduler uses. ok is false if
// there is none.
func Offering(classes []Class, resource string) (c Class, ok bool) {
	for _, candidate := range classes {
		newer := candidate.Age > c.Age || candidate.Age == c.Age && candidate.Name < c.Name
		if candidate.Resource == resource && (!ok || newer) {
			c, ok = candidate, true
		}
	}
	return c, ok
}

// Duplicates says what to do about several classes that serve one extended resource; empty if there are not two. The
// scheduler uses one of them. When any of them goes, it forgets the resource until one that is left is written again
// (k8s.io/dynamic-resource-allocation deviceclass/extendedresourcecache, v0.37).
func Duplicates(classes []Class, resource string) string {
	var names []string
	for _, c := range classes {
		if c.Resource == resource {
			names = append(names, c.Name)
		}
	}
	if len(names) < 2 {
		return ""
	}
	slices.Sort(names)
	used, _ := Offering(classes, resource)
	return fmt.Sprintf("DeviceClasses %s all serve %s; when one is deleted, the scheduler can forget it. Keep one, then: "+
		"kubectl annotate deviceclass %s --overwrite read-again=$(date +%%s)",
		format.List(names), resource, used.Name)
}

// ClassProblem says why pods cannot get GPUs or instances by the resource of a class; nil if they can, or will once the
// operator has made the class.
func ClassProblem(classes []Class, w Write) *plan.Problem {
	if _, offered := Offering(classes, w.Resource); offered {
		return nil
	}
	at := slices.IndexFunc(classes, func(c Class) bool { return c.Name == w.Name })
	switch {
	case at < 0:
		return nil
	case !classes[at].Own:
		return &plan.Problem{
			Reason: v1alpha1.ReasonDeviceClassConflict,
			Message: fmt.Sprintf("DeviceClass %s exists and is not the operator's, and it does not serve %s. Give it extendedResourceName: %s, or "+
				"delete it", w.Name, w.Resource, w.Resource),
		}
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonDRAUnavailable,
		Message: fmt.Sprintf("DeviceClass %s of the operator does not have extendedResourceName: %s, so no pod can get that. Stop what edits it, "+
			"or turn on the feature gate DRAExtendedResource", w.Name, w.Resource),
	}
}

// Classes decides which DeviceClasses of the operator must be written, and which must be deleted, so that pods get what
// these classes are for. A class that serves the resource already is used, also one of an administrator: two classes
// with one resource make the scheduler forget the name when one of them goes. One of the operator's that another
// controller edited is written again. A configuration that it was given is another field manager's: such a class is
// deleted, and the next reconcile writes it if it is needed. named reports whether a policy, pod or claim names a class
// or its resource: such a class stays. So does one beside another class of its resource, which the scheduler would
// forget: it is written again when the other one comes or goes, so that the scheduler reads it.
func Classes(have []Class, want []Write, named func(Class) bool) (write []Write, remove []string) {
	wanted := map[string]bool{}
	for _, w := range want {
		if !wanted[w.Name] && lacks(have, w) {
			w.Beside = beside(have, w.Name, w.Resource)
			write = append(write, w)
		}
		wanted[w.Name] = true
	}
	for _, c := range have {
		if !c.Own || !Ours(c.Name) {
			continue
		}
		others := beside(have, c.Name, c.Resource)
		again, known := asWritten(c)
		again.Beside = others
		switch {
		case others == "" && (c.Configured || !wanted[c.Name] && !named(c)):
			remove = append(remove, c.Name)
		case others != c.Beside && known && !slices.ContainsFunc(write, func(w Write) bool { return w.Name == c.Name }):
			write = append(write, again)
		}
	}
	slices.SortFunc(write, func(a, b Write) int { return strings.Compare(a.Name, b.Name) })
	slices.Sort(remove)
	return write, remove
}

// beside are the other classes that serve the resource of a class, by comma, or a hash of them if they are many; empty if
// it has none.
func beside(have []Class, name, resource string) string {
	var others []string
	for _, c := range have {
		if resource != "" && c.Resource == resource && c.Name != name {
			others = append(others, c.Name)
		}
	}
	slices.Sort(others)
	const most = 1024 // of an annotation
	text := strings.Join(others, ",")
	if len(text) <= most {
		return text
	}
	sum := sha256.Sum256([]byte(text))
	return fmt.Sprintf("%d classes, %x", len(others), sum[:8])
}

// asWritten is a class of the operator's as it was written, by its name: another controller may have edited the rest. known
// is false if it serves another resource than that.
func asWritten(c Class) (w Write, known bool) {
	if w = ForGPUs(); c.Name != w.Name {
		size, attributes, _ := strings.Cut(strings.TrimPrefix(c.Name, classPrefix), "gb")
		w = ForInstances(size + "gb" + strings.Replace(attributes, ".", "+", 1))
	}
	return w, w.Name == c.Name && w.Resource == c.Resource
}

// lacks reports whether a class of the operator's must be written: nothing serves its resource, or another controller
// edited it.
func lacks(have []Class, w Write) bool {
	_, offered := Offering(have, w.Resource)
	at := slices.IndexFunc(have, func(c Class) bool { return c.Name == w.Name })
	if at < 0 {
		return !offered
	}
	is := have[at]
	edited := is.Resource == w.Resource && is.Selector != w.Selector
	stays := is.Resource != w.Resource && beside(have, is.Name, is.Resource) != "" // until its resource is its own again (2^40+725652)
	return is.Own && (!is.Configured || stays) && (!offered || edited)             // one that lost its resource too
}
