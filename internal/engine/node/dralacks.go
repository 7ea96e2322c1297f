// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// draLacks says what Kubernetes or NVIDIA's DRA driver lacks for the target of the node; nil if nothing is lacking.
func draLacks(v *View) *plan.Problem {
	for _, find := range []func(*View) *plan.Problem{draDriverLacks, kubernetesLacks, classesLack, sharesDiffer, intervalDiffers} {
		if problem := find(v); problem != nil {
			return problem
		}
	}
	return nil
}

func draDriverLacks(v *View) *plan.Problem {
	if problem := dynamicMIG(v); problem != nil {
		return problem
	}
	return v.Node.Published.Unusable()
}

// dynamicMIG is the problem of a driver that makes MIG instances on demand, alone or beside the device plugin: the instances of the node are
// its own, and the operator neither makes nor destroys any. Nil: it makes none.
func dynamicMIG(v *View) *plan.Problem {
	if v.Stack == dra.DevicePlugin {
		return nil
	}
	if slices.ContainsFunc(v.Node.Pods, func(p cluster.Pod) bool { return p.DynamicMIG }) {
		return dra.DynamicMIG("FEATURE_GATES of its pod on the node")
	}
	if v.Node.DynamicMIG {
		return dra.DynamicMIG("FEATURE_GATES of " + v.Node.DRA)
	}
	if problem := v.Node.Published.Unusable(); problem != nil && problem.Reason == v1alpha1.ReasonDynamicMIGActive {
		return problem
	}
	return nil
}

// kubernetesLacks says what the API server does not serve. Taints of devices are needed where instances go.
func kubernetesLacks(v *View) *plan.Problem {
	partitions := slices.ContainsFunc(v.Target.Devices, func(d v1alpha1.DeviceSpec) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled }) ||
		slices.ContainsFunc(v.Devices, func(d gpu.Device) bool { return d.State.MIG })
	if problem := noTaintRule(v); partitions && v.Snapshot.DRA.ServesClasses && problem != nil {
		return problem
	}
	if v.Snapshot.DRA.ServesClasses {
		return nil
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonDRAUnavailable,
		Message: "The API server serves no DeviceClasses of resource.k8s.io/v1 with an extended resource, so pods cannot request nvidia.com/gpu of NVIDIA's DRA driver. " +
			"Use Kubernetes 1.36 or newer, or leave the node out of nodeSelector",
	}
}

// noTaintRule says why the operator cannot have a DeviceTaintRule for the node, which keeps new pods off its GPUs while they are changed; nil if it can.
func noTaintRule(v *View) *plan.Problem {
	var message string
	switch {
	case !v.Snapshot.DRA.ServesRules:
		message = "The API server serves no DeviceTaintRules, which keep new pods off the GPUs while they are changed. Use Kubernetes 1.37, or 1.36 with the feature gate " +
			"DRADeviceTaintRules"
	case v.Node.RuleTaken:
		message = fmt.Sprintf("DeviceTaintRule %s exists and is not the operator's, which needs one of that name to keep new pods off the GPUs while they are changed. "+
			"Delete it", dra.RuleName(v.Node.Name))
	default:
		return nil
	}
	if v.Policy != nil {
		message += ", or leave the node out of nodeSelector"
	}
	return &plan.Problem{Reason: v1alpha1.ReasonDRAUnavailable, Message: message}
}

func classesLack(v *View) *plan.Problem {
	for _, class := range DeviceClasses(v) {
		if problem := dra.ClassProblem(v.Snapshot.DRA.Classes, class); problem != nil {
			return problem
		}
	}
	return nil
}

// DeviceClasses are the DeviceClasses by which pods get what a policy asks of the node, unless others serve the same resources.
func DeviceClasses(v *View) []dra.Write {
	if v.Policy == nil {
		return nil
	}
	classes := DeviceClassesOf(v.Target.Devices)
	if v.Target.Expected[plan.ResourceGPU] > 0 {
		classes = append(classes, dra.ForGPUs())
	}
	return classes
}

// DeviceClassesOf are those of the MIG instances that the GPUs are to have.
func DeviceClassesOf(devices []v1alpha1.DeviceSpec) []dra.Write {
	var classes []dra.Write
	for _, profile := range profilesOf(devices) {
		classes = append(classes, dra.ForInstances(profile))
	}
	return classes
}

// sharesDiffer compares the shares of whole GPUs with what the policy needs. Nodes without whole GPUs need no number, and neither do
// policies that only leave GPUs whole.
func sharesDiffer(v *View) *plan.Problem {
	if v.Target.Expected[plan.ResourceGPU] == 0 || v.Target.Shares == 0 {
		return nil
	}
	return dra.SharesProblem(v.Node.Published, v.Target.Shares, v.Policy.Name, v.Snapshot.DRA.Asked)
}

// intervalDiffers compares the time slice that the DeviceClass of whole GPUs gives them with what the policy needs.
func intervalDiffers(v *View) *plan.Problem {
	if v.Target.Expected[plan.ResourceGPU] == 0 {
		return nil
	}
	off := ""
	for _, p := range draPluginPods(v) {
		if !p.SetsTimeSlices && !p.Terminating {
			off = p.Namespace + "/" + p.Name
		}
	}
	return dra.IntervalProblem(v.Snapshot.DRA.Classes, dra.Interval(v.Policy.Spec.Sharing), v.Policy.Name, off)
}

// profilesOf are the MIG profiles of which the GPUs are to have instances, each once.
func profilesOf(devices []v1alpha1.DeviceSpec) []string {
	var profiles []string
	for _, d := range devices {
		for _, i := range d.Sharing.Instances {
			profiles = append(profiles, i.Profile)
		}
	}
	slices.Sort(profiles)
	return slices.Compact(profiles)
}
