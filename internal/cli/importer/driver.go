// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// errNotPublished says that nothing is known of the GPUs of a node.
var errNotPublished = errors.New("NVIDIA's DRA driver publishes no device of it; look at its pod on the node, and import again")

// driven finds how a node is shared that NVIDIA's DRA driver serves; why says that no policy is to describe it.
func (c Cluster) driven(n *cluster.Node) (f found, why string) {
	f.node = n
	if problem := c.refuses(n); problem != nil {
		return f, problem.Error()
	}
	gpus, err := drivenGPUs(n, &f)
	if err != nil {
		return f, err.Error()
	}
	config := configuration{Flags: map[string]any{flagMIGStrategy: "mixed"}}
	count, known := n.Published.Shares()
	partitioned := slices.ContainsFunc(gpus, func(s shape) bool { return s.mig })
	switch {
	case partitioned:
		if count > 1 && slices.ContainsFunc(gpus, func(s shape) bool { return !s.mig }) {
			f.notes = append(f.notes, fmt.Sprintf("the whole GPUs have %d shares each, as consumableShares of the chart of NVIDIA's DRA driver says. The policy asks for no number", count))
		}
	case known && count == 0:
		return f, "consumableShares of NVIDIA's DRA driver is unlimited or memory, and a policy asks for a number of shares"
	case count > maxReplicas:
		return f, fmt.Sprintf("NVIDIA's DRA driver gives each GPU %d shares, but a policy can ask for at most %d", count, maxReplicas)
	case count > 1:
		config.Sharing.TimeSlicing = &replicated{Resources: []resource{{Name: plan.ResourceGPU, Replicas: int32(count)}}}
		f.notes = append(f.notes, fmt.Sprintf("the %d shares are consumableShares of the chart of NVIDIA's DRA driver, which stays as you set it. The operator compares", count))
	}
	if f.sharing, err = config.sharing(gpus, &f); err != nil {
		f.whole = errors.Is(err, errNothing)
		return f, err.Error()
	}
	f.notes = slices.DeleteFunc(f.notes, func(note string) bool { return strings.Contains(note, v1alpha1.LabelMIGConfig) }) // mig-manager has no part in this
	f.notes = append(f.notes, c.classesFor(f.sharing)...)
	f.name, f.byDefault = "shared", false
	f.sharing.Advertise = nil // neither is a setting of the driver
	if why := c.changes(n, f.sharing); why != "" {
		return f, why
	}
	if f.sharing.TimeSlicing != nil {
		f.name = fmt.Sprintf("shares-%d", count)
	}
	return f, ""
}

// refuses says why no policy can describe a node of the driver.
func (c Cluster) refuses(n *cluster.Node) error {
	switch {
	case c.stackOf(n) == dra.Both:
		return errors.New("NVIDIA's DRA driver and its device plugin both offer its GPUs, so that pods of both get the same ones. Drain the node and keep " +
			"one of them off it, then import again")
	case slices.ContainsFunc(n.Pods, func(p cluster.Pod) bool { return p.DynamicMIG }):
		return dra.DynamicMIG("FEATURE_GATES of its pod on the node")
	}
	if problem := n.Published.Unusable(); problem != nil {
		return problem
	}
	return nil
}

// drivenGPUs are the GPUs of a node as its agent reported them or, where no agent runs yet, as the driver publishes
// them.
func drivenGPUs(n *cluster.Node, f *found) ([]shape, error) {
	if reported := n.GPU.Status.Devices; len(reported) > 0 {
		return shapes(reported), nil
	}
	if n.Published == nil || len(n.Published.Devices) == 0 {
		return nil, errNotPublished
	}
	instances := map[string]map[string]int32{} // of each GPU in MIG mode, by profile
	all := []shape{}
	for _, d := range n.Published.Devices {
		if d.Profile == "" {
			all = append(all, shape{})
			continue
		}
		if instances[d.Parent] == nil {
			instances[d.Parent] = map[string]int32{}
		}
		instances[d.Parent][d.Profile]++
	}
	for _, counts := range instances {
		s := shape{mig: true}
		for profile, n := range counts {
			s.instances = append(s.instances, v1alpha1.InstanceCount{Profile: profile, Count: n})
		}
		slices.SortFunc(s.instances, func(a, b v1alpha1.InstanceCount) int { return cmp.Compare(a.Profile, b.Profile) })
		all = append(all, s)
	}
	for _, s := range all[1:] {
		if s.mig != all[0].mig || !slices.Equal(s.instances, all[0].instances) {
			return nil, errors.New("its GPUs are not partitioned alike, and no agent has reported which one is which; import again once the operator runs")
		}
	}
	f.notes = append(f.notes, "no agent has reported the GPUs of these nodes, so this is what NVIDIA's DRA driver publishes, which is no GPU in MIG mode "+
		"without instances; import again once the operator runs, to be sure that it is so")
	return all[:1], nil
}

// classesFor tells by which DeviceClasses pods get the instances of a policy.
func (c Cluster) classesFor(s v1alpha1.Sharing) (notes []string) {
	if s.MIG == nil {
		return nil
	}
	seen := map[string]bool{}
	for _, layout := range s.MIG.Layouts {
		for _, i := range layout.Instances {
			profile := string(i.Profile)
			if seen[profile] {
				continue
			}
			seen[profile] = true
			name := plan.ResourceOf(profile)
			if class, offered := dra.Offering(c.Classes, name); offered {
				notes = append(notes, fmt.Sprintf("pods get %s by DeviceClass %s, which the operator uses and does not change", name, class.Name))
			} else {
				notes = append(notes, fmt.Sprintf("no DeviceClass serves %s. The operator creates %s once you apply the policy; your own classes stay", name, dra.ClassName(profile)))
			}
		}
	}
	slices.Sort(notes)
	return notes
}
