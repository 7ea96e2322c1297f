// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// shape is GPUs of a node that are partitioned alike.
type shape struct {
	product   string  // empty: not known
	indexes   []int32 // empty: all GPUs of the node
	all       bool    // all GPUs of that product on the node
	mig       bool
	instances []v1alpha1.InstanceCount // by profile
	fill      v1alpha1.MIGProfile      // instead, where only the name of a built-in layout is known
}

// errNothing says that a node needs no policy.
var errNothing = errors.New("whole GPUs that are not shared need no policy")

// sharing is how a node is shared; an error says why no policy is to describe it.
func (c configuration) sharing(gpus []shape, f *found) (v1alpha1.Sharing, error) {
	r, mps := c.shared()
	partitioned := slices.ContainsFunc(gpus, func(s shape) bool { return s.mig })
	replicas := r.replicas(plan.ResourceGPU)
	switch {
	case partitioned && mps:
		return v1alpha1.Sharing{}, errors.New("a GPU is in MIG mode and the key asks for MPS, which NVIDIA's device plugin refuses; " +
			"decide for one of them and write that policy")
	case partitioned:
		return c.partitioned(gpus, r, f)
	case replicas < 2:
		return v1alpha1.Sharing{}, errNothing
	case mps:
		return v1alpha1.Sharing{}, byNVIDIAMPS(r, replicas)
	}
	f.notes = append(f.notes, inert(r, plan.ResourceGPU)...)
	return v1alpha1.Sharing{
		Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: replicas}, Advertise: r.advertised(),
	}, nil
}

// byNVIDIAMPS says why no policy describes MPS: the operator's daemons would end NVIDIA's, and with them their clients.
func byNVIDIAMPS(r *replicated, replicas int32) error {
	const most = 48
	if replicas > most {
		return fmt.Errorf("the key asks for %d MPS replicas, but MPS serves at most %d clients on a GPU, so "+
			"NVIDIA's daemon does not start; write a policy with fewer", replicas, most)
	}
	return fmt.Errorf("NVIDIA's MPS DaemonSet shares its GPUs, and the operator's MPS daemons take its place, for which the node is drained once. If that "+
		"may be, apply a policy with sharing: {strategy: MPS, mps: {replicas: %d}, advertise: {renameByDefault: %t}}", replicas, r.RenameByDefault)
}

// inert tells of resources that no GPU of the node gives.
func inert(r *replicated, but ...string) []string {
	var names []string
	for _, one := range r.Resources {
		if !slices.Contains(but, one.Name) {
			names = append(names, fmt.Sprintf("%s (%d replicas)", one.Name, one.Replicas))
		}
	}
	if len(names) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("the key also shares %s, which no GPU of these nodes gives; the policy leaves it out", strings.Join(names, ", "))}
}

// partitioned is the sharing of a node with MIG.
func (c configuration) partitioned(gpus []shape, r *replicated, f *found) (v1alpha1.Sharing, error) {
	names, known := resourceNames[c.migStrategy()]
	if err := sayable(names, known, gpus); err != nil {
		return v1alpha1.Sharing{}, err
	}
	m := &v1alpha1.MIG{ResourceNames: names}
	sharing := v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: m}
	shares := []string{}
	for _, s := range gpus {
		if !s.mig {
			continue
		}
		layout, shared := s.layout(names, r)
		m.Layouts, shares = append(m.Layouts, layout), append(shares, shared...)
	}
	if len(m.Layouts) == 1 && len(gpus) == 1 {
		m.Layouts[0].GPUs = nil
	}
	if r != nil {
		beside := slices.ContainsFunc(gpus, func(s shape) bool { return !s.mig })
		if n := r.replicas(plan.ResourceGPU); n > 1 && beside && names == v1alpha1.MIGResourceNamesPerProfile {
			m.WholeGPUs, shares = &v1alpha1.MIGWholeGPUs{Replicas: n}, append(shares, plan.ResourceGPU)
		}
		f.notes = append(f.notes, inert(r, shares...)...)
		if len(shares) > 0 {
			sharing.Advertise = r.advertised()
		}
	}
	f.notes = append(f.notes, "NVIDIA's mig-manager is kept off these nodes while the policy governs them, and "+v1alpha1.LabelMIGConfig+" has no effect")
	f.byDefault = false // a new node would not be partitioned
	return sharing, nil
}

// resourceNames are NVIDIA's MIG strategies by which instances are advertised.
var resourceNames = map[string]v1alpha1.MIGResourceNames{
	"mixed": v1alpha1.MIGResourceNamesPerProfile, "single": v1alpha1.MIGResourceNamesUniform,
}

// sayable says why no policy can say how the GPUs of a node with MIG are shared.
func sayable(names v1alpha1.MIGResourceNames, advertised bool, gpus []shape) error {
	if !advertised {
		return errors.New("a GPU is in MIG mode, but the MIG strategy is none, so its instances are not advertised; write a " +
			"policy with the strategy that you want")
	}
	profiles := map[string]bool{}
	for _, s := range gpus {
		if !s.mig {
			continue
		}
		if len(s.instances) == 0 && s.fill == "" {
			return errors.New("a GPU is in MIG mode without instances, which a policy cannot say; write a policy with the " +
				"instances that you want")
		}
		if err := s.admissible(len(gpus) == 1); err != nil {
			return err
		}
		profiles[string(s.fill)] = true
		for _, i := range s.instances {
			profiles[i.Profile] = true
		}
	}
	delete(profiles, "")
	if names == v1alpha1.MIGResourceNamesUniform && len(profiles) > 1 {
		return errors.New("the MIG strategy is single and the node has instances of several profiles, of which NVIDIA's device plugin advertises none; write a policy")
	}
	return nil
}

// profileName is that of an instance which a policy can ask for (api/v1alpha1, MIGProfile).
var profileName = regexp.MustCompile(`^[1-7]g(\.[1-9][0-9]{0,3}gb)?(\+(me|gfx|me\.all)|-me)?$`)

// admissible says why the API server refuses a layout; nil: it does not. alone is whether the node has no other.
func (s shape) admissible(alone bool) error {
	const mostSlices, mostMemory, mostIndexes = 7, 8, 16
	compute, memory, extended := int32(0), int32(0), int32(0)
	for _, i := range s.instances {
		if !profileName.MatchString(i.Profile) {
			return fmt.Errorf("its instances are %s, which a policy cannot ask for, since NVIDIA's device plugin advertises no compute instance that is smaller than "+
				"its GPU instance; write a policy with the instances that you want", i.Profile)
		}
		parts := int32(i.Profile[0] - '0')
		compute += parts * i.Count
		if parts == 3 { //nolint:mnd // 3g takes 4 of 8 memory slices
			parts++
		}
		memory += parts * i.Count
		if strings.Contains(i.Profile, "+me") {
			extended += i.Count
		}
	}
	switch {
	case compute > mostSlices || memory > mostMemory || extended > 1:
		return errors.New("the layout has more instances than any GPU holds; correct it")
	case len(s.indexes) > mostIndexes && (!s.all || s.product == ""):
		return fmt.Errorf("more than %d GPUs of one product are partitioned alike and others are not, which a policy cannot say", mostIndexes)
	case !alone && len(s.indexes) == 0:
		return errors.New("the layout has several parts, of which one is for all GPUs; import again once the operator runs")
	}
	return nil
}

// advertised is what holds for every resource of a node that has replicas.
func (r *replicated) advertised() *v1alpha1.Advertise {
	fail := r.FailRequestsGreaterThanOne != nil && *r.FailRequestsGreaterThanOne
	return &v1alpha1.Advertise{RenameByDefault: new(r.RenameByDefault), FailRequestsGreaterThanOne: &fail}
}

// layout is the layout of a shape, and the resources of it that are advertised more than once.
func (s shape) layout(names v1alpha1.MIGResourceNames, r *replicated) (layout v1alpha1.MIGLayout, shares []string) {
	replicas := func(profile v1alpha1.MIGProfile) int32 {
		name := plan.ResourceGPU
		if names == v1alpha1.MIGResourceNamesPerProfile {
			name = plan.ResourceOf(string(profile))
		}
		n := r.replicas(name)
		if n < 2 {
			return 0
		}
		shares = append(shares, name)
		return n
	}
	if s.fill != "" {
		layout.Fill, layout.Replicas = s.fill, replicas(s.fill)
	}
	for _, i := range s.instances {
		profile := v1alpha1.MIGProfile(i.Profile)
		layout.Instances = append(layout.Instances, v1alpha1.MIGInstances{Profile: profile, Count: i.Count, Replicas: replicas(profile)})
	}
	switch {
	case s.all && s.product != "":
		layout.GPUs = &v1alpha1.GPUMatch{Products: []string{s.product}}
	case len(s.indexes) > 0:
		layout.GPUs = &v1alpha1.GPUMatch{Indexes: s.indexes}
	}
	return layout, shares
}

// shapes groups the GPUs of a node as its agent reported them.
func shapes(devices []v1alpha1.DeviceStatus) []shape {
	var all []shape
	products := map[string]int{}
	for _, d := range slices.SortedFunc(slices.Values(devices), func(a, b v1alpha1.DeviceStatus) int { return cmp.Compare(a.Index, b.Index) }) {
		products[d.Product]++
		mig := d.Sharing.MIGMode == v1alpha1.MIGModeEnabled
		at := slices.IndexFunc(all, func(s shape) bool {
			return s.product == d.Product && s.mig == mig && slices.Equal(s.instances, d.Sharing.Instances)
		})
		if at < 0 {
			at = len(all)
			all = append(all, shape{product: d.Product, mig: mig, instances: d.Sharing.Instances})
		}
		all[at].indexes = append(all[at].indexes, d.Index)
	}
	for i := range all {
		all[i].all = len(all[i].indexes) == products[all[i].product]
	}
	return all
}
