// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// Option is a way to share the GPUs of a fleet.
type Option struct {
	Name    string // such as "MIG, 7 × 1g.5gb"
	Sharing v1alpha1.Sharing
	// Shares are what one GPU is divided into.
	Shares []Share
	// Against is why it does not fit; empty: it fits. Notes are what else to know.
	Against, Notes []string

	// offers is what each node would be, refused why it could not, by node.
	offers  map[string]policy.Desired
	refused map[string]string
}

// Share is a part of a GPU that one container gets, a number of times.
type Share struct {
	Name      string // of the profile
	Count     int
	MemoryMiB int64   // 0: not known
	Compute   float64 // part of the streaming multiprocessors, 0 to 1
}

// perGPU is how many containers find a share of one GPU at the same time.
func (o Option) perGPU() (room int) {
	for _, s := range o.Shares {
		room += s.Count
	}
	return room
}

// The largest numbers of replicas that the API takes.
const (
	maxReplicas = 256
	minReplicas = 2
)

// options are the ways to share the GPUs, the one that is advised first if it fits: isolated ones before others, and of
// these the smallest, which leaves the most room.
func (f Fleet) options() []Option {
	options := f.partitions()
	replicas := minReplicas
	for _, n := range f.Nodes {
		gpus := max(1, healthyGPUs(n))
		replicas = max(replicas, (f.held[n.Name]+gpus-1)/gpus)
	}
	if !f.Device.Virtual {
		turns := replicas
		for _, n := range f.Nodes {
			if published, _ := n.Published.Shares(); published > 1 { // of NVIDIA's DRA driver, which has them already
				turns = max(turns, int(published))
			}
		}
		options = append(options, f.mps(min(replicas, int(plan.MaxClients(f.Device)))), f.timeSlicing(min(turns, maxReplicas)))
	}
	return append(options, Option{
		Name: "Exclusive", Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive},
		Shares: []Share{{Name: "a GPU", Count: 1, MemoryMiB: f.Device.MemoryMiB, Compute: 1}},
	})
}

func (f Fleet) mps(replicas int) Option {
	limits := &v1alpha1.MPS{Replicas: int32(replicas)}
	share := Share{Name: fmt.Sprintf("1/%d of a GPU", replicas), Count: replicas, MemoryMiB: f.Device.MemoryMiB / int64(replicas), Compute: 1 / float64(replicas)}
	if f.present.MPS != nil {
		limits = f.present.MPS.DeepCopy()
		limits.Replicas = int32(replicas)
		if limit := plan.MiB(limits.PinnedMemoryLimit); limit > 0 {
			share.MemoryMiB = limit
		}
		if threads := limits.ActiveThreadPercentage; threads != nil {
			share.Compute = float64(*threads) / percent
		}
	}
	return Option{
		Name: fmt.Sprintf("MPS with %d replicas", replicas), Shares: []Share{share},
		Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: limits, Advertise: f.advertise(v1alpha1.StrategyMPS)},
	}
}

func (f Fleet) timeSlicing(replicas int) Option {
	turns := &v1alpha1.TimeSlicing{}
	if f.present.TimeSlicing != nil {
		turns = f.present.TimeSlicing.DeepCopy()
	}
	turns.Replicas = int32(replicas)
	return Option{
		Name:    fmt.Sprintf("TimeSlicing with %d replicas", replicas),
		Sharing: v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: turns, Advertise: f.advertise(v1alpha1.StrategyTimeSlicing)},
		Shares:  []Share{{Name: "a GPU", Count: replicas, MemoryMiB: f.Device.MemoryMiB, Compute: 1}},
	}
}

// advertise is how replicas are advertised: as now, or by the name that pods request.
func (f Fleet) advertise(s v1alpha1.Strategy) *v1alpha1.Advertise {
	a := f.present.Advertise.DeepCopy()
	if a != nil && f.present.Strategy != s {
		a.FailRequestsGreaterThanOne = nil // MPS refuses it, and time-slicing had it so
	}
	if a == nil || a.RenameByDefault == nil {
		if !f.requested(plan.ResourceGPUShared) {
			return a
		}
		a = &v1alpha1.Advertise{RenameByDefault: new(true)}
	}
	return a
}

// partitions are the layouts of MIG instances: of one profile each, the smallest first, and one of several if the
// containers need it.
func (f Fleet) partitions() []Option {
	if !f.Device.MIGCapable {
		return nil // the catalogue knows the product's profiles all the same
	}
	var options []Option
	profiles := f.profiles()
	for _, p := range profiles {
		n := mig.Fill(f.Device, p)
		if n < minReplicas {
			continue // the whole GPU is not shared
		}
		names, as := v1alpha1.MIGResourceNamesUniform, plan.ResourceGPU
		if f.requestsInstances() {
			names, as = v1alpha1.MIGResourceNamesPerProfile, plan.ResourceOf(p.Name)
		}
		options = append(options, Option{
			Name:    fmt.Sprintf("MIG, %d × %s", n, p.Name),
			Shares:  []Share{f.instances(p, n)},
			Notes:   []string{"each instance is advertised as " + as},
			Sharing: f.mig(names, v1alpha1.MIGLayout{Fill: v1alpha1.MIGProfile(p.Name)}),
		})
	}
	if o, found := f.layout(profiles); found {
		options = append(options, o)
	}
	return options
}

// mig is a layout for all GPUs, made by what makes instances now.
func (f Fleet) mig(names v1alpha1.MIGResourceNames, layout v1alpha1.MIGLayout) v1alpha1.Sharing {
	m := &v1alpha1.MIG{ResourceNames: names, Layouts: []v1alpha1.MIGLayout{layout}}
	if f.present.MIG != nil {
		m.Actuator = f.present.MIG.Actuator
	}
	return v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: m}
}

func (f Fleet) instances(p gpu.Profile, n int) Share {
	return Share{Name: p.Name, Count: n, MemoryMiB: p.MemoryMiB, Compute: float64(p.Slices) / float64(f.Device.ComputeSlices())}
}

// profiles are those without extra engines, the smallest first.
func (f Fleet) profiles() []gpu.Profile {
	plain := slices.DeleteFunc(slices.Clone(f.Device.Profiles), func(p gpu.Profile) bool {
		name, err := mig.ParseName(p.Name)
		return err != nil || name.Compute != 0 || len(name.With)+len(name.Without) > 0
	})
	slices.SortFunc(plain, func(a, b gpu.Profile) int {
		return cmp.Or(cmp.Compare(a.MemoryMiB, b.MemoryMiB), cmp.Compare(a.Slices, b.Slices), cmp.Compare(a.Name, b.Name))
	})
	return plain
}

// layout gives each container the smallest instance that holds it, where one profile is not enough, and fills up with
// the smallest.
func (f Fleet) layout(profiles []gpu.Profile) (Option, bool) {
	need := map[string]int{}
	for _, c := range f.Containers {
		at := slices.IndexFunc(profiles, func(p gpu.Profile) bool { return c.fits(f.instances(p, 1)) && c.works(f.instances(p, 1)) })
		if at < 0 {
			return Option{}, false
		}
		need[profiles[at].Name] += c.Held
	}
	if len(need) < 2 { //nolint:mnd // one profile is an option of its own
		return Option{}, false
	}
	layout := map[string]int{}
	for name, held := range need {
		layout[name] = (max(1, min(held, f.Concurrent)) + f.GPUs - 1) / f.GPUs
	}
	if _, err := mig.Pack(f.Device, layout); err != nil {
		return Option{}, false
	}
	smallest := profiles[slices.IndexFunc(profiles, func(p gpu.Profile) bool { return need[p.Name] > 0 })].Name
	for fits := true; fits; {
		layout[smallest]++
		if _, err := mig.Pack(f.Device, layout); err != nil {
			layout[smallest]--
			fits = false
		}
	}
	o := Option{Sharing: f.mig(v1alpha1.MIGResourceNamesPerProfile, v1alpha1.MIGLayout{})}
	var parts []string
	for _, p := range slices.Backward(profiles) {
		if n := layout[p.Name]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d × %s", n, p.Name))
			o.Shares = append(o.Shares, f.instances(p, n))
			o.Sharing.MIG.Layouts[0].Instances = append(o.Sharing.MIG.Layouts[0].Instances,
				v1alpha1.MIGInstances{Profile: v1alpha1.MIGProfile(p.Name), Count: int32(n)})
		}
	}
	o.Name = "MIG, " + strings.Join(parts, " and ")
	o.Notes = []string{"pods request the instance that they need, such as nvidia.com/mig-" + smallest}
	return o, true
}
