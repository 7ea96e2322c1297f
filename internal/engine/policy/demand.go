// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

// Where a layout is on demand (mode Apply), a GPU of it has the instances that were decided for pods that wait
// (GPUNode.status.demand), and those of the layout where nothing was. Whatever was decided, a GPU never has what the
// policy does not allow.

// Applies reports whether a policy lets MIG instances be made for pods that wait.
func Applies(p *v1alpha1.GPUSharingPolicy) bool {
	of := p.OnDemand()
	return of != nil && of.Mode == v1alpha1.OnDemandModeApply && p.Spec.Sharing.MIG.Actuator != v1alpha1.MIGActuatorMIGManager
}

// Admits reports whether a policy lets a GPU have these instances on demand: of onDemand.profiles or of its layout, as many as fit.
func Admits(p *v1alpha1.GPUSharingPolicy, d gpu.Device, instances []v1alpha1.InstanceCount) bool {
	layout := plan.LayoutOf(*p.Spec.Sharing.MIG, d)
	if layout == nil || layout.OnDemand == nil || !d.MIGCapable || len(instances) == 0 {
		return false
	}
	resting := Resting(p, d)
	asked := make([]v1alpha1.MIGInstances, 0, len(instances))
	for _, i := range instances {
		named := func(name v1alpha1.MIGProfile) bool { return plan.Means(name, d, i.Profile) }
		rests := slices.ContainsFunc(resting, func(r v1alpha1.InstanceCount) bool { return r.Profile == i.Profile })
		if !rests && !slices.ContainsFunc(layout.OnDemand.Profiles, named) {
			return false
		}
		asked = append(asked, v1alpha1.MIGInstances{Profile: v1alpha1.MIGProfile(i.Profile), Count: i.Count})
	}
	return resolved(v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{Instances: asked}}}}, d) != nil
}

func resolved(s v1alpha1.Sharing, d gpu.Device) []v1alpha1.InstanceCount {
	specs, err := plan.Resolve(s, []gpu.Device{d})
	if err != nil || len(specs) == 0 {
		return nil
	}
	return specs[0].Sharing.Instances
}

// Resting are the instances of the layout of a GPU; nil: it has none that fits.
func Resting(p *v1alpha1.GPUSharingPolicy, d gpu.Device) []v1alpha1.InstanceCount {
	return resolved(p.Spec.Sharing, d)
}

// onDemand gives GPUs the instances that were decided for pods that wait, and returns which GPUs of a policy that applies are on demand.
func onDemand(p *v1alpha1.GPUSharingPolicy, n Node, selected []gpu.Device, resting []v1alpha1.DeviceSpec) (devices []v1alpha1.DeviceSpec, of []string) {
	if !Applies(p) {
		return resting, nil
	}
	devices = slices.Clone(resting)
	for _, d := range selected {
		if layout := plan.LayoutOf(*p.Spec.Sharing.MIG, d); layout == nil || layout.OnDemand == nil {
			continue
		}
		of = append(of, d.UUID)
		for _, decided := range n.Demand {
			at := slices.IndexFunc(devices, func(s v1alpha1.DeviceSpec) bool { return s.UUID == d.UUID })
			if decided.UUID == d.UUID && at >= 0 && Admits(p, d, decided.Instances) {
				devices[at].Sharing.Instances = decided.Instances
			}
		}
	}
	return devices, of
}

// inTurn gives the configuration of a node on demand its key: that which the node was asked to select while its GPUs stay as they were asked
// for, else the other one, so that what offers them looks again.
func inTurn(c deviceplugin.Config, n Node, devices []v1alpha1.DeviceSpec, of []string) deviceplugin.Config {
	stays := !slices.ContainsFunc(devices, func(d v1alpha1.DeviceSpec) bool {
		asked := func(a v1alpha1.DeviceSpec) bool { return a.UUID == d.UUID && plan.Same(a.Sharing, d.Sharing) }
		return slices.Contains(of, d.UUID) && !slices.ContainsFunc(n.Asked, asked)
	})
	if n.ConfigName == c.Key && !stays || n.ConfigName == c.Twin && stays {
		c.Key, c.Twin = c.Twin, c.Key
	}
	return c
}
