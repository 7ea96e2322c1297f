// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mig_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const rtxPro6000 sim.Model = "rtx-pro-6000-blackwell-96gb"

// device is a GPU of a model in MIG mode.
func device(t *testing.T, m sim.Model) gpu.Device {
	t.Helper()
	n, err := sim.NewNode("mig", m)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	n.GPUs[0].MIG, n.GPUs[0].PendingMIG = true, true
	return n.Observe().Devices[0]
}

// occupy gives a GPU instances, written "3g.20gb@4"; a trailing ! means that a process uses it, ? that it is partial.
func occupy(t *testing.T, d gpu.Device, instances ...string) gpu.Device {
	t.Helper()
	for id, text := range instances {
		name, rest, _ := strings.Cut(text, "@")
		i := gpu.Instance{Profile: name, ID: id, Partial: strings.Contains(rest, "?")}
		_, err := fmt.Sscanf(rest, "%d", &i.Placement.Start)
		NewWithT(t).Expect(err).NotTo(HaveOccurred(), text)
		i.Placement.Size = 1
		if p, ok := d.Profile(name); ok {
			i.Placement.Size = p.Size
		}
		d.State.Instances = append(d.State.Instances, i)
		if strings.Contains(rest, "!") {
			d.Processes = append(d.Processes, gpu.Process{PID: 100 + id, Instance: id})
		}
	}
	return d
}

func written(instances []gpu.Instance) string {
	parts := make([]string, 0, len(instances))
	for _, i := range instances {
		parts = append(parts, fmt.Sprintf("%s@%d", i.Profile, i.Placement.Start))
	}
	return strings.Join(parts, " ")
}

func TestPack(t *testing.T) {
	cases := map[string]struct {
		model                        sim.Model
		has                          []string
		want                         map[string]int
		keep, destroy, create, inUse string
	}{
		"an empty GPU that stays empty": {model: sim.A100},
		"the last place is taken first, so that larger ones still fit": {
			model: sim.A100, want: map[string]int{"1g.5gb": 1}, create: "1g.5gb@6",
		},
		"small ones are put together beside the room for 3g": {
			model: sim.A100, want: map[string]int{"1g.5gb": 2, "2g.10gb": 1},
			create: "2g.10gb@0 1g.5gb@2 1g.5gb@3",
		},
		"seven of the smallest": {
			model: sim.A100, want: map[string]int{"1g.5gb": 7},
			create: "1g.5gb@0 1g.5gb@1 1g.5gb@2 1g.5gb@3 1g.5gb@4 1g.5gb@5 1g.5gb@6",
		},
		"nothing changes where the desired state is met, wherever the instances lie": {
			model: sim.A100, has: []string{"1g.5gb@2", "3g.20gb@4"}, want: map[string]int{"3g.20gb": 1, "1g.5gb": 1},
			keep: "1g.5gb@2 3g.20gb@4",
		},
		"instances that are used stay where they are": {
			model: sim.A100, has: []string{"1g.5gb@0!", "1g.5gb@1", "1g.5gb@2"},
			want: map[string]int{"1g.5gb": 1, "3g.20gb": 1},
			keep: "1g.5gb@0", destroy: "1g.5gb@1 1g.5gb@2", create: "3g.20gb@4",
		},
		"a free instance goes rather than two, a used one only if it must": {
			model: sim.A100, has: []string{"1g.5gb@0!", "1g.5gb@4!"}, want: map[string]int{"1g.5gb": 2, "4g.20gb": 1},
			keep: "1g.5gb@4", destroy: "1g.5gb@0", create: "4g.20gb@0 1g.5gb@5", inUse: "1g.5gb@0",
		},
		"two free ones go rather than a used one": {
			model: sim.A100, has: []string{"1g.5gb@0", "1g.5gb@1", "2g.10gb@4!"},
			want: map[string]int{"2g.10gb": 1, "3g.20gb": 1},
			keep: "2g.10gb@4", destroy: "1g.5gb@0 1g.5gb@1", create: "3g.20gb@0",
		},
		"everything that is not wanted goes": {
			model: sim.A100, has: []string{"2g.10gb@0!", "1g.5gb@3", "3g.20gb@4"},
			destroy: "2g.10gb@0 1g.5gb@3 3g.20gb@4", inUse: "2g.10gb@0",
		},
		"a partial instance is no instance, even where it would lie well": {
			model: sim.A100, has: []string{"7g.40gb@0?"}, want: map[string]int{"7g.40gb": 1},
			destroy: "7g.40gb@0", create: "7g.40gb@0",
		},
		"a partial instance that is used must be freed": {
			model: sim.A100, has: []string{"3g.20gb@0?!"}, want: map[string]int{"3g.20gb": 1},
			destroy: "3g.20gb@0", create: "3g.20gb@4", inUse: "3g.20gb@0",
		},
		"an instance of a profile that the driver does not list is nobody's desired state": {
			model: sim.A100, has: []string{"9g.99gb@0!"}, want: map[string]int{"1g.5gb": 1},
			destroy: "9g.99gb@0", create: "1g.5gb@6", inUse: "9g.99gb@0",
		},
		"the one instance with media extensions is kept for the desired state that names it": {
			model: sim.H100, has: []string{"1g.10gb+me@3!", "1g.10gb@6!"}, want: map[string]int{"1g.10gb+me": 1, "1g.10gb": 2},
			keep: "1g.10gb+me@3 1g.10gb@6", create: "1g.10gb@2",
		},
		"slices that are three wide": {
			model: rtxPro6000, has: []string{"1g.24gb@3!"}, want: map[string]int{"1g.24gb": 1, "2g.48gb": 1},
			keep: "1g.24gb@3", create: "2g.48gb@6",
		},
		"all media in one instance, the others without": {
			model: rtxPro6000, want: map[string]int{"1g.24gb+me.all": 1, "1g.24gb-me": 3},
			create: "1g.24gb+me.all@0 1g.24gb-me@3 1g.24gb-me@6 1g.24gb-me@9",
		},
		"a GPU of four slices": {
			model: sim.A30, has: []string{"1g.6gb@0!"}, want: map[string]int{"1g.6gb": 1, "2g.12gb+me": 1},
			keep: "1g.6gb@0", create: "2g.12gb+me@2",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			d := occupy(t, device(t, c.model), c.has...)
			p, err := mig.Pack(d, c.want)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(written(p.Keep)).To(Equal(c.keep), "kept")
			g.Expect(written(p.Destroy)).To(Equal(c.destroy), "destroyed")
			g.Expect(written(p.Create)).To(Equal(c.create), "created")
			g.Expect(written(p.InUse)).To(Equal(c.inUse), "in use")
		})
	}
}

func TestPackRefuses(t *testing.T) {
	cases := map[string]struct {
		model   sim.Model
		want    map[string]int
		message string
	}{
		"more compute slices than there are": {
			model: sim.A100, want: map[string]int{"4g.20gb": 1, "2g.10gb": 2},
			message: "GPU 0 (NVIDIA-A100-SXM4-40GB) cannot hold 2 × 2g.10gb + 1 × 4g.20gb: they need 8 compute slices and the " +
				"GPU has 7; 1 × 2g.10gb + 1 × 4g.20gb would fit",
		},
		"more memory slices than there are": {
			model: sim.A100, want: map[string]int{"3g.20gb": 2, "1g.5gb": 1},
			message: "GPU 0 (NVIDIA-A100-SXM4-40GB) cannot hold 1 × 1g.5gb + 2 × 3g.20gb: they need 9 memory slices and the " +
				"GPU has 8; 2 × 3g.20gb would fit",
		},
		"more of a profile than there can be": {
			model: sim.A100, want: map[string]int{"1g.5gb": 8},
			message: "GPU 0 (NVIDIA-A100-SXM4-40GB) cannot hold 8 × 1g.5gb: the GPU can have 7 × 1g.5gb at most; " +
				"7 × 1g.5gb would fit",
		},
		"two with media extensions": {
			model: sim.A30, want: map[string]int{"1g.6gb+me": 1, "2g.12gb+me": 1},
			message: "GPU 0 (NVIDIA-A30) cannot hold 1 × 1g.6gb+me + 1 × 2g.12gb+me: one instance of a GPU at most can have " +
				"media extensions (+me, +me.all); 1 × 2g.12gb+me would fit",
		},
		"media beside the one that has all": {
			model: rtxPro6000, want: map[string]int{"1g.24gb+me.all": 1, "1g.24gb": 1},
			message: "GPU 0 (NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition) cannot hold 1 × 1g.24gb + 1 × 1g.24gb+me.all: an " +
				"instance with +me.all has all media engines, so every other one must be without (-me); 1 × 1g.24gb would fit",
		},
		"a profile of another GPU": {
			model: sim.A30, want: map[string]int{"3g.20gb": 1},
			message: "GPU 0 (NVIDIA-A30) has no MIG profile 3g.20gb; it has 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb",
		},
		"anything on a GPU without MIG": {
			model: sim.T4, want: map[string]int{"1g.5gb": 1},
			message: "GPU 0 (Tesla-T4) has no MIG profile 1g.5gb, for it has no MIG",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := mig.Pack(device(t, c.model), c.want)
			NewWithT(t).Expect(err).To(MatchError(c.message))
		})
	}
}

// TestPackOnGPUsNeverHeardOf packs GPUs that no table knows: all there is to go by is what the driver says.
func TestPackOnGPUsNeverHeardOf(t *testing.T) {
	unheard := func(slots int) gpu.Device {
		d := gpu.Device{Product: "NVIDIA X1", MIGCapable: true}
		for size, slice := slots, slots; size >= 1; size, slice = size/2, slice/2 {
			p := gpu.Profile{Name: fmt.Sprintf("%dg.%dgb", slice, 10*size), Slices: slice, Size: size, Max: slots / size}
			for start := 0; start+size <= slots; start += size {
				p.Starts = append(p.Starts, start)
			}
			d.Profiles = append(d.Profiles, p)
		}
		return d
	}
	t.Run("sixteen slices", func(t *testing.T) {
		g := NewWithT(t)
		d := occupy(t, unheard(16), "1g.10gb@5!", "4g.40gb@12!", "2g.20gb@8")
		p, err := mig.Pack(d, map[string]int{"8g.80gb": 1, "4g.40gb": 1, "1g.10gb": 3})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(written(p.Keep)).To(Equal("4g.40gb@12"))
		g.Expect(written(p.Create)).To(Equal("8g.80gb@0 1g.10gb@8 1g.10gb@9 1g.10gb@10"))
		g.Expect(written(p.InUse)).To(Equal("1g.10gb@5"), "8g fits nowhere else")
	})
	t.Run("as many slices as a set can have", func(t *testing.T) {
		p, err := mig.Pack(unheard(64), map[string]int{"32g.320gb": 2})
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		NewWithT(t).Expect(written(p.Create)).To(Equal("32g.320gb@0 32g.320gb@32"))
	})
	t.Run("so many ways that not all are tried", func(t *testing.T) {
		p, err := mig.Pack(unheard(32), map[string]int{"1g.10gb": 15, "2g.20gb": 4})
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		NewWithT(t).Expect(p.Create).To(HaveLen(19))
	})
	t.Run("places that overlap each other", func(t *testing.T) {
		d := gpu.Device{Product: "NVIDIA X2", Profiles: []gpu.Profile{
			{Name: "2g.20gb", Slices: 2, Size: 3, Max: 2, Starts: []int{0, 2, 3}},
			{Name: "4g.40gb", Slices: 4, Size: 6, Max: 1, Starts: []int{0}},
			{Name: "1g.10gb", Slices: 1, Size: 2, Max: 2, Starts: []int{2, 3}},
		}}
		p, err := mig.Pack(d, map[string]int{"2g.20gb": 2})
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		NewWithT(t).Expect(written(p.Create)).To(Equal("2g.20gb@0 2g.20gb@3"))
		_, err = mig.Pack(d, map[string]int{"1g.10gb": 2})
		NewWithT(t).Expect(err).To(MatchError(
			"GPU 0 (NVIDIA-X2) cannot hold 2 × 1g.10gb: the places where they may lie overlap; 1 × 1g.10gb would fit"))
	})
}

func TestResolve(t *testing.T) {
	cases := map[string]struct {
		model               sim.Model
		name, want, message string
	}{
		"by its exact name":                        {model: sim.A100, name: "3g.20gb", want: "3g.20gb"},
		"by slices":                                {model: sim.A100, name: "3g", want: "3g.20gb"},
		"never double memory by slices":            {model: sim.A100, name: "1g", want: "1g.5gb"},
		"double memory by its exact name":          {model: sim.A100, name: "1g.10gb", want: "1g.10gb"},
		"media extensions by slices":               {model: sim.H200, name: "1g+me", want: "1g.18gb+me"},
		"graphics by slices":                       {model: rtxPro6000, name: "2g+gfx", want: "2g.48gb+gfx"},
		"all media by slices":                      {model: rtxPro6000, name: "1g+me.all", want: "1g.24gb+me.all"},
		"without media by slices":                  {model: rtxPro6000, name: "1g-me", want: "1g.24gb-me"},
		"plain is neither with nor without":        {model: rtxPro6000, name: "1g", want: "1g.24gb"},
		"the same number of slices on another GPU": {model: "h100-94gb", name: "3g", want: "3g.47gb"},
		"slices that the GPU does not have": {
			model: sim.A30, name: "3g",
			message: "GPU 0 (NVIDIA-A30) has no MIG profile 3g; it has 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb",
		},
		"attributes that the GPU does not have": {
			model: sim.A30, name: "1g+gfx",
			message: "GPU 0 (NVIDIA-A30) has no MIG profile 1g+gfx; it has 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb",
		},
		"a size that the GPU does not have is not taken for another": {
			model: sim.A30, name: "1g.5gb",
			message: "GPU 0 (NVIDIA-A30) has no MIG profile 1g.5gb; it has 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb",
		},
		"a compute instance smaller than its GPU instance": {
			model: sim.A100, name: "1c.3g.20gb",
			message: "GPU 0 (NVIDIA-A100-SXM4-40GB) cannot have profile 1c.3g.20gb: a compute instance smaller than its GPU " +
				"instance cannot be advertised by NVIDIA's device plugin",
		},
		"what is no name": {
			model: sim.A100, name: "half",
			message: `GPU 0 (NVIDIA-A100-SXM4-40GB) cannot have profile half: "half" is not the name of a MIG profile, such as ` +
				"1g.10gb, 1g.10gb+me or 3g",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			p, err := mig.Resolve(device(t, c.model), c.name)
			if c.message != "" {
				g.Expect(err).To(MatchError(c.message))
				var unknown *mig.ProfileError
				g.Expect(errors.As(err, &unknown)).To(BeTrue())
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(p.Name).To(Equal(c.want))
		})
	}
}

func TestFillIsWhatTheDriverCounts(t *testing.T) {
	for _, m := range withMIG(t) {
		d := device(t, m)
		for _, p := range d.Profiles {
			NewWithT(t).Expect(mig.Fill(d, p)).To(Equal(p.Max), "%s %s", m, p.Name)
		}
	}
	wide := gpu.Device{Profiles: []gpu.Profile{{Name: "3g.20gb", Slices: 3, Size: 4, Max: 9, Starts: []int{0, 4, 8}}}}
	wide.Profiles = append(wide.Profiles, gpu.Profile{Name: "7g.40gb", Slices: 7, Size: 12, Max: 1, Starts: []int{0}})
	NewWithT(t).Expect(mig.Fill(wide, wide.Profiles[0])).To(Equal(2), "compute slices run out first")
	NewWithT(t).Expect(mig.Fill(wide, gpu.Profile{Max: 3, Slices: 1, Size: 1})).To(Equal(0), "the driver names no place")
}

func TestPackIsDeterministic(t *testing.T) {
	d := occupy(t, device(t, sim.A100), "1g.5gb@1!", "2g.10gb@4", "1g.5gb@6")
	want := map[string]int{"1g.5gb": 3, "1g.10gb": 1, "1g.5gb+me": 1}
	first, err := mig.Pack(d, want)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for range 50 {
		slices.Reverse(d.Profiles)
		slices.Reverse(d.State.Instances)
		again, err := mig.Pack(d, want)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		NewWithT(t).Expect(again).To(Equal(first))
	}
}

func FuzzPack(f *testing.F) {
	f.Add(uint8(0), uint64(1))
	f.Fuzz(func(t *testing.T, model uint8, seed uint64) {
		models := withMIG(t)
		fuzzPack(t, models[int(model)%len(models)], seed)
	})
}
