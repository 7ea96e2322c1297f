// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Desired is what a policy asks of one node.
type Desired struct {
	// Policy is the name of the policy.
	Policy string
	// Devices are the selected GPUs and those of Restored, each with its desired state, by UUID.
	Devices []v1alpha1.DeviceSpec
	// Restored are the GPUs that the policy does not select and that the operator changed before: each returns to its
	// baseline.
	Restored []v1alpha1.DeviceSpec
	// OnDemand are the GPUs whose instances follow pods that wait, by UUID.
	OnDemand []string
	// Config is the device-plugin configuration that belongs to them.
	Config deviceplugin.Config
}

// Hash names the desired state: it differs whenever the configuration or a device does.
func (w Desired) Hash() string { return Hash(w.Config.Key, w.Devices) }

// Hash names a desired state by the key of its configuration and its devices.
func Hash(key string, devices []v1alpha1.DeviceSpec) string {
	content, err := json.Marshal(struct {
		Key     string
		Devices []v1alpha1.DeviceSpec
	}{key, devices})
	if err != nil { // cannot be: the types hold strings and numbers only
		return key
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:8])
}

// NVIDIA's labels that report whether its device plugin serves a node. Sharing never changes them.
const (
	labelOperands = "nvidia.com/gpu.deploy.operands"
	labelWorkload = "nvidia.com/gpu.workload.config"
)

// DesiredState is what a policy asks of a node whose agent has reported. Errors: a *plan.Problem when it cannot be
// honoured there until the policy or the node changes.
func DesiredState(p *v1alpha1.GPUSharingPolicy, n Node) (Desired, error) {
	if problem := unknown(p); problem != nil {
		return Desired{}, problem
	}
	if problem := OptedOut(n.Labels, n.Workload); problem != nil {
		return Desired{}, problem
	}
	all := n.devices(p)
	selected := selectGPUs(p, all)
	if missing := Missing(p, n); len(selected) == 0 && len(missing) > 0 {
		return Desired{}, &plan.Problem{
			Reason: v1alpha1.ReasonGPUMissing,
			Message: fmt.Sprintf("The node no longer has any GPU that gpuSelector.indexes selected: %s. Replace the GPU, or change "+
				"gpuSelector.indexes", strings.Join(missing, ", ")),
		}
	}
	devices, err := plan.Resolve(p.Spec.Sharing, selected)
	if err != nil {
		return Desired{}, err
	}
	if n.Stack == dra.DRADriver { // it sets them itself, on GPUs that are selected
		devices = plan.WithoutIntervals(devices)
	}
	if !n.SetsTimeSlices {
		devices = plan.WithFormer(devices, n.Changed)
	}
	replicas, err := plan.Replicas(p.Spec.Sharing, selected)
	if err != nil {
		return Desired{}, err
	}
	restored := restoredGPUs(n.Changed, all, selected)
	if err := partial(p, n.Stack, after(restored, all), selected, replicas); err != nil {
		return Desired{}, err
	}
	devices = append(devices, restored...)
	slices.SortFunc(devices, func(a, b v1alpha1.DeviceSpec) int { return cmp.Compare(a.UUID, b.UUID) })
	config, err := render(p, n, deviceplugin.Node{Devices: n.Devices, Desired: devices, Replicas: replicas})
	if err != nil {
		return Desired{}, err
	}
	w := Desired{Policy: p.Name, Devices: devices, Restored: restored, Config: config}
	if w.Devices, w.OnDemand = onDemand(p, n, selected, devices); len(w.OnDemand) > 0 {
		rests := config
		if config, err = render(p, n, deviceplugin.Node{Devices: n.Devices, Desired: w.Devices, Replicas: replicas}); err != nil {
			return Desired{}, err
		}
		if n.Stack == dra.DRADriver {
			config.Key, config.Twin = dra.Twins(rests.Key)
		} else {
			config = config.WithTwin(p.Name, rests)
		}
		w.Config = inTurn(config, n, w.Devices, w.OnDemand)
	}
	return w, nil
}

// unknown is what of a policy this version does not know, as after a downgrade: the API server drops fields that the former CRD does not have, and
// keeps values that it would refuse. Nil: nothing.
func unknown(p *v1alpha1.GPUSharingPolicy) *plan.Problem {
	s := p.Spec.Sharing
	var what string
	switch {
	case unreadable(p.Spec.NodeSelector):
		what = "an operator of nodeSelector"
	case isNone(s.Strategy, v1alpha1.StrategyExclusive, v1alpha1.StrategyTimeSlicing, v1alpha1.StrategyMPS, v1alpha1.StrategyMIG):
		what = "strategy " + string(s.Strategy)
	case s.Strategy == v1alpha1.StrategyTimeSlicing && unknownTimeSlicing(s.TimeSlicing), s.Strategy == v1alpha1.StrategyMPS && s.MPS == nil,
		s.Strategy == v1alpha1.StrategyMIG && unknownMIG(s.MIG):
		what = "what the policy says of " + string(s.Strategy)
	default:
		return nil
	}
	return &plan.Problem{
		Reason:  v1alpha1.ReasonLaterVersion,
		Message: fmt.Sprintf("A later version of the operator knows %s, and this one changes nothing until it is back or the policy is changed", what),
	}
}

func unknownTimeSlicing(s *v1alpha1.TimeSlicing) bool {
	return s == nil || isNone(s.Interval, v1alpha1.TimeSliceIntervalDefault, v1alpha1.TimeSliceIntervalShort, v1alpha1.TimeSliceIntervalMedium,
		v1alpha1.TimeSliceIntervalLong)
}

func unknownMIG(s *v1alpha1.MIG) bool {
	return s == nil || isNone(s.ResourceNames, v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGResourceNamesUniform) ||
		isNone(s.Actuator, v1alpha1.MIGActuatorAgent, v1alpha1.MIGActuatorMIGManager) ||
		slices.ContainsFunc(s.Layouts, func(l v1alpha1.MIGLayout) bool { return len(l.Instances) == 0 && l.Fill == "" })
}

// isNone reports whether a value that is there is none of these.
func isNone[T ~string](value T, of ...T) bool { return value != "" && !slices.Contains(of, value) }

// render is the configuration of the program that offers the GPUs of the node.
func render(p *v1alpha1.GPUSharingPolicy, of Node, n deviceplugin.Node) (deviceplugin.Config, error) {
	if of.Stack == dra.DRADriver {
		return dra.Render(p.Spec.Sharing, n, of.Shares)
	}
	return deviceplugin.Render(p.Name, p.Spec.Sharing, n)
}

// restoredGPUs lists the changed GPUs that the node still has and that the policy does not select. NVIDIA's MPS daemon,
// which served one of them before, is no part of that: it follows the configuration of the whole node, so it returns
// when no policy governs the node.
func restoredGPUs(changed []v1alpha1.DeviceSpec, all, selected []gpu.Device) []v1alpha1.DeviceSpec {
	var restored []v1alpha1.DeviceSpec
	for _, c := range changed {
		is := func(d gpu.Device) bool { return d.UUID == c.UUID }
		if !slices.ContainsFunc(all, is) || slices.ContainsFunc(selected, is) {
			continue
		}
		if m := c.Sharing.MPS; m != nil && m.Owner == v1alpha1.MPSDaemonOwnerNVIDIA {
			c.Sharing.MPS = nil
		}
		restored = append(restored, c)
	}
	return restored
}

// after returns the GPUs with those of restored in their baseline, as far as it can be worked out; the plan reports a
// baseline that cannot be restored.
func after(restored []v1alpha1.DeviceSpec, all []gpu.Device) []gpu.Device {
	all = slices.Clone(all)
	for _, r := range restored {
		at := slices.IndexFunc(all, func(d gpu.Device) bool { return d.UUID == r.UUID })
		if state, err := plan.Want(r.Sharing, all[at]); err == nil {
			all[at].State = state
		}
	}
	return all
}

// workloads are what the GPU Operator makes nodes for, by their label nvidia.com/gpu.workload.config
// (controllers/state_manager.go: isValidWorkloadConfig).
var workloads = []string{container, "vm-passthrough", "vm-vgpu"}

const container = "container"

// OptedOut is why NVIDIA's device plugin does not serve a node, as its labels say; nil: it does. The workload is what
// nodes are for whose label does not tell it; empty: that label counts for nothing, as with the GPU Operator unless
// spec.sandboxWorkloads of the ClusterPolicy is on.
func OptedOut(labels map[string]string, workload string) *plan.Problem {
	if labels[labelOperands] == "false" {
		return &plan.Problem{
			Reason: v1alpha1.ReasonNodeOptedOut,
			Message: fmt.Sprintf("the node carries %s=false, for which the GPU Operator takes its programs and the operator's agent off it; "+
				"remove the label, or leave the node out of nodeSelector", labelOperands),
		}
	}
	label := labels[labelWorkload]
	named := slices.Contains(workloads, label)
	switch {
	case workload == "" || named && label == container || !named && workload == container:
		return nil
	case named:
		return &plan.Problem{
			Reason: v1alpha1.ReasonNodeOptedOut,
			Message: fmt.Sprintf("the node carries %s=%s, so its GPUs are for virtual machines; "+
				"set the label to container, or leave the node out of nodeSelector", labelWorkload, label),
		}
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonNodeOptedOut,
		Message: fmt.Sprintf("spec.sandboxWorkloads.defaultWorkload of the ClusterPolicy is %s, so the GPUs of the node are for virtual machines; "+
			"set its label %s to container, or leave the node out of nodeSelector", workload, labelWorkload),
	}
}

// partial rejects a selection that leaves out GPUs which NVIDIA's device plugin, or its DRA driver, would share too:
// either has one number of replicas for a resource of a node. replicas are those of MIG instances, by profile.
func partial(p *v1alpha1.GPUSharingPolicy, stack dra.Stack, all, selected []gpu.Device, replicas map[string]int32) error {
	var left []string
	for _, d := range all {
		isSelected := slices.ContainsFunc(selected, func(s gpu.Device) bool { return s.UUID == d.UUID })
		if !isSelected && multiplied(p.Spec.Sharing, d, replicas) {
			left = append(left, d.String())
		}
	}
	if len(left) == 0 {
		return nil
	}
	program := "device plugin"
	if stack == dra.DRADriver {
		program = "DRA driver"
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonPartialSelection,
		Message: fmt.Sprintf("gpuSelector leaves out %s, but NVIDIA's %s shares all GPUs of a node alike under %s; "+
			"select all GPUs of the node, or leave the node out of nodeSelector", strings.Join(left, ", "), program, shares(p.Spec.Sharing)),
	}
}

// multiplied reports whether the device plugin advertises a GPU, or an instance on it, more than once.
func multiplied(s v1alpha1.Sharing, d gpu.Device, replicas map[string]int32) bool {
	switch s.Strategy {
	case v1alpha1.StrategyTimeSlicing, v1alpha1.StrategyMPS:
		return true
	case v1alpha1.StrategyMIG:
		if !d.State.MIG {
			return s.MIG.WholeGPUs != nil
		}
		return slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return replicas[i.Profile] > 1 })
	case v1alpha1.StrategyExclusive:
	}
	return false
}

// shares names what shares the GPUs of a node alike.
func shares(s v1alpha1.Sharing) string {
	if s.Strategy == v1alpha1.StrategyMIG {
		return "replicas of sharing.mig"
	}
	return string(s.Strategy)
}
