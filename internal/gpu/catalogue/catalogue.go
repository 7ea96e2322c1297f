// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package catalogue lists GPUs that the operator knows without having seen one: their names, their memory and their MIG
// profiles. The facts were gathered from NVIDIA's documents and programs. The state of a GPU that a node has is always
// read from its driver. The catalogue is for GPUs that no node has yet, and for simulated ones. It is pure.
package catalogue

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Model names a GPU of the catalogue: an id of mig-profiles.json, or one of the GPUs without MIG below.
type Model string

// The models that tests name most; Models lists all.
const (
	A100   Model = "a100-40gb"
	A10080 Model = "a100-80gb"
	A30    Model = "a30-24gb"
	H100   Model = "h100-80gb"
	H200   Model = "h200-141gb"
	B200   Model = "b200-180gb"
	T4     Model = "t4"
	V100   Model = "v100" // compute capability 7.0: 16 MPS clients
	L40S   Model = "l40s"
	GB10   Model = "gb10" // shares the memory of the host, of which NVML says nothing
	VGPU   Model = "vgpu" // a virtual GPU in a guest
)

// Spec is what does not change about a GPU of a model.
type Spec struct {
	Model             Model
	Product           string // as NVML names it
	PCIDeviceID       uint32 // device in the upper half, vendor in the lower, as NVML packs it
	MemoryMiB         int64  // 0: NVML does not tell
	ComputeCapability gpu.ComputeCapability
	Virtual           bool
	ComputeSlices     int // 0: no MIG
	MemorySlices      int // placement slots
	ResetOnModeChange bool
	ModeSurvivesBoot  bool
	Profiles          []Profile // by driver id
}

// MIGCapable reports whether GPUs of the model can be split.
func (s Spec) MIGCapable() bool { return s.ComputeSlices > 0 }

// Profile is a MIG profile with all that NVML tells about it.
type Profile struct {
	gpu.Profile
	Enum            int // NVML_GPU_INSTANCE_PROFILE_*
	Multiprocessors int
	CopyEngines     int
	Decoders        int
	Encoders        int
	JPEGs           int
	OFAs            int
	MediaKnown      bool // the four numbers above are facts
}

// board is what the table of profiles does not say about a model.
type board struct {
	product   string
	memoryMiB int64
}

// boards holds the names and memory sizes that NVML reports.
func boards() map[Model]board {
	return map[Model]board{
		A100:                          {"NVIDIA A100-SXM4-40GB", 40960},
		A10080:                        {"NVIDIA A100-SXM4-80GB", 81920},
		A30:                           {"NVIDIA A30", 24576},
		H100:                          {"NVIDIA H100 80GB HBM3", 81559},
		"h100-94gb":                   {"NVIDIA H100 NVL", 95830},
		"h100-96gb":                   {"NVIDIA GH200 480GB", 97871},
		H200:                          {"NVIDIA H200", 143771},
		"gh200-144gb":                 {"NVIDIA GH200 144G HBM3e", 146831},
		B200:                          {"NVIDIA B200", 183359},
		"gb200-186gb":                 {"NVIDIA GB200", 189471},
		"b300-269gb":                  {"NVIDIA B300 SXM6 AC", 275040},
		"gb300-278gb":                 {"NVIDIA GB300", 284208},
		"rtx-pro-6000-blackwell-96gb": {"NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887},
	}
}

func withoutMIG() []Spec {
	return []Spec{
		{Model: T4, Product: "Tesla T4", PCIDeviceID: 0x1EB810DE, MemoryMiB: 15360, ComputeCapability: gpu.ComputeCapability{Major: 7, Minor: 5}},
		{Model: V100, Product: "Tesla V100-SXM2-32GB", PCIDeviceID: 0x1DB510DE, MemoryMiB: 32768, ComputeCapability: gpu.ComputeCapability{Major: 7}},
		{Model: L40S, Product: "NVIDIA L40S", PCIDeviceID: 0x26B910DE, MemoryMiB: 46068, ComputeCapability: gpu.ComputeCapability{Major: 8, Minor: 9}},
		{Model: GB10, Product: "NVIDIA GB10", PCIDeviceID: 0x2E1210DE, ComputeCapability: gpu.ComputeCapability{Major: 12, Minor: 1}},
		{Model: VGPU, Product: "GRID A100-20C", PCIDeviceID: 0x20B010DE, MemoryMiB: 20480, ComputeCapability: gpu.ComputeCapability{Major: 8}, Virtual: true},
	}
}

//go:embed mig-profiles.json
var profileTable []byte

// Specs are the GPUs with MIG in the order of the table, then those without. They are read once: the table is embedded, so an error is a mistake of the
// build and shows in every test.
var Specs = sync.OnceValues(readCatalogue)

// Find returns a GPU of a product as it is before anything is changed, with the product as labels write it
// (gpu.ProductLabel), such as NVIDIA-A100-SXM4-40GB. It has neither UUID nor PCI address. It returns false if the
// catalogue lacks the product.
func Find(product string) (gpu.Device, bool) {
	specs, _ := Specs()
	i := slices.IndexFunc(specs, func(s Spec) bool { return gpu.ProductLabel(s.Product) == product })
	if i < 0 {
		return gpu.Device{}, false
	}
	s := specs[i]
	d := gpu.Device{
		Product: s.Product, MemoryMiB: s.MemoryMiB, ComputeCapability: s.ComputeCapability, Virtual: s.Virtual, MIGCapable: s.MIGCapable(),
	}
	for _, p := range s.Profiles {
		d.Profiles = append(d.Profiles, p.Profile)
	}
	return d, true
}

// Products lists the products that Find knows.
func Products() []string {
	specs, _ := Specs()
	products := make([]string, 0, len(specs))
	for _, s := range specs {
		products = append(products, gpu.ProductLabel(s.Product))
	}
	return products
}

func readCatalogue() ([]Spec, error) {
	var file struct{ GPUs []tableGPU }
	if err := json.Unmarshal(profileTable, &file); err != nil {
		return nil, fmt.Errorf("reading the table of MIG profiles: %w", err)
	}
	var specs []Spec
	known := boards()
	for _, g := range file.GPUs {
		b, ok := known[Model(g.ID)]
		if !ok {
			continue // the table knows names only
		}
		s, err := g.spec(b)
		if err != nil {
			return nil, fmt.Errorf("reading %s of the table of MIG profiles: %w", g.ID, err)
		}
		specs = append(specs, s)
	}
	return append(specs, withoutMIG()...), nil
}

type tableGPU struct {
	ID                       string
	ComputeCapability        string
	ComputeSlices            int
	PlacementSlots           int
	GPUResetOnModeChange     bool
	ModePersistsAcrossReboot bool
	PCIDeviceIDs             []struct{ DeviceFilter string }
	Profiles                 []tableProfile
}

type tableProfile struct {
	Name                   string
	ComputeSlices          int
	MaxInstances           int
	NVMLGPUInstanceProfile struct{ Value int }
	DriverProfileID        int
	MemoryGiBObserved      *float64
	Multiprocessors        int
	CopyEngines            int
	Media                  *struct{ NVDEC, NVENC, JPEG, OFA int }
	Placements             struct {
		Starts []int
		Size   int
	}
}

func (g tableGPU) spec(b board) (Spec, error) {
	s := Spec{
		Model: Model(g.ID), Product: b.product, MemoryMiB: b.memoryMiB,
		ComputeSlices: g.ComputeSlices, MemorySlices: g.PlacementSlots,
		ResetOnModeChange: g.GPUResetOnModeChange, ModeSurvivesBoot: g.ModePersistsAcrossReboot,
	}
	if _, err := fmt.Sscanf(g.ComputeCapability, "%d.%d", &s.ComputeCapability.Major, &s.ComputeCapability.Minor); err != nil {
		return Spec{}, fmt.Errorf("reading compute capability %q: %w", g.ComputeCapability, err)
	}
	id, err := strconv.ParseUint(g.PCIDeviceIDs[0].DeviceFilter, 0, 32)
	if err != nil {
		return Spec{}, fmt.Errorf("reading the PCI device id: %w", err)
	}
	s.PCIDeviceID = uint32(id)
	for _, p := range g.Profiles {
		s.Profiles = append(s.Profiles, p.profile(s))
	}
	slices.SortFunc(s.Profiles, func(a, b Profile) int { return a.ID - b.ID })
	return s, nil
}

func (t tableProfile) profile(s Spec) Profile {
	p := Profile{
		Profile: gpu.Profile{
			Name: t.Name, ID: t.DriverProfileID, Slices: t.ComputeSlices, Max: t.MaxInstances,
			Size: t.Placements.Size, Starts: t.Placements.Starts,
		},
		Enum:            t.NVMLGPUInstanceProfile.Value,
		Multiprocessors: t.Multiprocessors, CopyEngines: t.CopyEngines,
	}
	if t.MemoryGiBObserved != nil {
		p.MemoryMiB = int64(*t.MemoryGiBObserved * 1024)
	} else { // somewhat less than its share of the memory, as where it was observed
		p.MemoryMiB = s.MemoryMiB * int64(p.Size) * 97 / int64(s.MemorySlices*100)
	}
	if t.Media != nil {
		p.Decoders, p.Encoders, p.JPEGs, p.OFAs = t.Media.NVDEC, t.Media.NVENC, t.Media.JPEG, t.Media.OFA
		p.MediaKnown = true
	}
	return p
}
