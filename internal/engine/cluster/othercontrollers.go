// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// OtherControllers remembers which other controller was seen on each node, and when last, in case the write of the
// annotation fails or the annotation went with the policy. It is kept by the program that carries decisions out and is
// lost with it. The zero value has seen none.
type OtherControllers struct{ seen map[string]OtherController }

// OtherController is the reason by which another controller was seen on a node, and when last.
type OtherController struct {
	Reason string
	At     time.Time
}

// IsOtherPartitionerResource reports whether an extended resource is one of Red Hat's Dynamic Accelerator Slicer, which
// offers instances as mig.das.com/<profile>, or of its predecessor InstaSlice (openshift/instaslice-operator).
func IsOtherPartitionerResource(resource string) bool {
	return strings.HasPrefix(resource, "mig.das.com/") || strings.HasPrefix(resource, "instaslice.redhat.com/")
}

// Signs of programs that limit GPU memory: a condition of NVIDIA's gpu-fractioning, which it writes with the rights of a
// node; an annotation of HAMi's device plugin, and its resource.
const (
	conditionFractioning = "gpu-fractioning.nvidia.com/Ready"
	annotationHAMi       = "hami.io/node-nvidia-register"
	resourceHAMi         = "nvidia.com/gpumem"
)

// OfMemoryOwner reports whether an annotation or a condition of a node is a sign of a program that limits GPU memory.
// Its value says nothing more.
func OfMemoryOwner(name string) bool { return name == conditionFractioning || name == annotationHAMi }

// memoryOwner is the program beside the operator that limits GPU memory on a node; empty: none shows.
func memoryOwner(node *corev1.Node) string {
	for _, c := range node.Status.Conditions {
		if c.Type == conditionFractioning && c.Status == corev1.ConditionTrue {
			return "gpu-fractioning"
		}
	}
	_, annotated := node.Annotations[annotationHAMi]
	if memory := node.Status.Allocatable[resourceHAMi]; annotated || memory.Sign() > 0 {
		return "HAMi"
	}
	return ""
}

// draContainer is the container of the kubelet plugin of NVIDIA's DRA driver that offers GPUs. Where it is left out,
// the driver serves compute domains only, which are no business of ours.
const draContainer = "gpus"

// draPlugin has the labels by which NVIDIA tells the programs of its DRA driver apart, with their values on the kubelet
// plugin: those of the driver's chart, since and before the driver was renamed, and the one of the GPU Operator, which
// runs the driver for a GPUCluster (manifests/state-dra-driver, v26.7.0).
var draPlugin = []struct{ label, value string }{
	{"dra-driver-nvidia-gpu-component", "kubelet-plugin"},
	{"nvidia-dra-driver-gpu-component", "kubelet-plugin"},
	{LabelApp, "nvidia-dra-driver-kubelet-plugin"},
}

// DRALabels are the labels by which NVIDIA tells the programs of its DRA driver apart, first that of the driver's
// chart.
func DRALabels() []string {
	names := make([]string, len(draPlugin))
	for i, l := range draPlugin {
		names[i] = l.label
	}
	return names
}

// IsDRAPlugin reports whether labels of a pod are those of the kubelet plugin of NVIDIA's DRA driver.
func IsDRAPlugin(labels map[string]string) bool {
	for _, l := range draPlugin {
		if labels[l.label] == l.value {
			return true
		}
	}
	return false
}

// OffersGPUs reports whether a pod looks like one that offers GPUs through ResourceClaims: the kubelet plugin of
// NVIDIA's DRA driver. Programs tell whether it is one.
func OffersGPUs(pod *corev1.Pod) bool { return offersGPUs(pod.Labels, &pod.Spec) }

// MakesGPUOffers reports whether the pods of a DaemonSet look like that.
func MakesGPUOffers(set *appsv1.DaemonSet) bool {
	return offersGPUs(set.Spec.Template.Labels, &set.Spec.Template.Spec)
}

func offersGPUs(labels map[string]string, spec *corev1.PodSpec) bool {
	return IsDRAPlugin(labels) && slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == draContainer })
}

// The variable of that container that lists the feature gates of the driver, as name=value by comma, and the gate by
// which the driver makes MIG instances on demand.
const (
	featureGates = "FEATURE_GATES"
	dynamicMIG   = "DynamicMIG"
)

// Gates are the feature gates of the driver that matter here and are on, as the environment of a container; nil if
// there are none.
func Gates(spec *corev1.PodSpec) []corev1.EnvVar {
	var on []string
	for _, gate := range []string{dynamicMIG, dra.TimeSlicingSettings} {
		if gateIsOn(spec, gate) {
			on = append(on, gate+"=true")
		}
	}
	if len(on) == 0 {
		return nil
	}
	return []corev1.EnvVar{{Name: featureGates, Value: strings.Join(on, ",")}}
}

// MakesInstances reports whether the kubelet plugin of NVIDIA's DRA driver makes MIG instances on demand, by its
// feature gates.
func MakesInstances(spec *corev1.PodSpec) bool { return gateIsOn(spec, dynamicMIG) }

// SetsTimeSlices reports whether it sets the time slices of GPUs, by its feature gates.
func SetsTimeSlices(spec *corev1.PodSpec) bool { return gateIsOn(spec, dra.TimeSlicingSettings) }

// gateIsOn reports whether a feature gate of the driver that is off by default is on.
func gateIsOn(spec *corev1.PodSpec, gate string) bool {
	for i := range spec.Containers {
		for _, variable := range spec.Containers[i].Env {
			if variable.Name == featureGates && isSet(variable.Value, gate) {
				return true
			}
		}
	}
	return false
}

// isSet reports whether a list of feature gates sets one, as k8s.io/component-base/featuregate reads it.
func isSet(list, gate string) bool {
	for listed := range strings.SplitSeq(list, ",") {
		name, value, _ := strings.Cut(listed, "=")
		if on, err := strconv.ParseBool(strings.TrimSpace(value)); err == nil && on && strings.TrimSpace(name) == gate {
			return true
		}
	}
	return false
}

// OtherPartitionerGone is the annotation v1alpha1.AnnotationOtherController of a node that lists a resource of another
// partitioner with quantity 0, AbsentFor after its last sign.
const OtherPartitionerGone = "SlicerGone"

// NotedOther is which other controller the annotation of the node names, and when its last sign went, zero if that is
// not recorded.
func (n *Node) NotedOther() OtherController {
	note := n.Annotations[v1alpha1.AnnotationOtherController]
	if reason, at, gone := timing.Parse(note); gone {
		return OtherController{Reason: reason, At: at}
	} else if note == OtherPartitionerGone {
		return OtherController{}
	}
	reason, _, _ := strings.Cut(note, "@")
	return OtherController{Reason: reason}
}

// Note records the signs of a reconcile, the reason for each node or none, and forgets what is past. What a leader
// before has noted on a node is remembered, in the first reconcile as of now: without a policy the annotation goes, and
// the clock of that one may have been another (2^40+710753).
func (s *OtherControllers) Note(signs iter.Seq2[*Node, string], now time.Time) {
	if s == nil {
		return
	}
	kept := map[string]OtherController{}
	for n, reason := range signs {
		was, seen := s.seen[n.Name]
		if !seen {
			if was = n.NotedOther(); s.seen == nil || was.At.IsZero() {
				was.At = now
			}
		}
		if reason != "" {
			kept[n.Name] = OtherController{Reason: reason, At: now}
		} else if was.Reason != "" && was.At.After(n.Created) && now.Sub(was.At) < AbsentFor {
			kept[n.Name] = was
		}
	}
	s.seen = kept
}

// Of is what was seen on a node a moment ago and is not there any more.
func (s *OtherControllers) Of(n *Node) (was OtherController) {
	if s == nil || len(s.seen) == 0 {
		return was
	}
	if reason, _ := ShownBy(n); reason != "" {
		return was
	}
	return s.seen[n.Name]
}

// AbsentFor is how long no sign of another controller may be there before the operator takes the node over. A pod of a
// DaemonSet is replaced within it, its image included; the kubelet deletes the ResourceSlices of a plugin after 30 s.
const AbsentFor = 5 * time.Minute

// ShownBy is what shows another controller on the node: the reason, and the resource or object. Both are empty if
// nothing does.
func ShownBy(n *Node) (reason, object string) {
	if n.OtherPartitioner != "" {
		return v1alpha1.ReasonSlicerActive, n.OtherPartitioner
	}
	return shownByDRA(n)
}

// shownByDRA is what shows NVIDIA's DRA driver on the node.
func shownByDRA(n *Node) (reason, object string) {
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
