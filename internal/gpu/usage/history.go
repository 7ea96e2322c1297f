// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// HistoryQuery is the query with which Path answers with the History that the agent keeps, instead of a measurement.
const HistoryQuery = "history"

// MaxObserved is how many pairs of a container and a GPU or MIG instance a History has at most. A container that goes
// on is dropped for none that has ended.
const MaxObserved = 1024

// History is what the samples of a node have come to since its agent started. Samples themselves are not kept.
type History struct {
	Node  string    `json:"node"`
	Since time.Time `json:"since"`
	// Interval is the time from one sample to the next.
	Interval time.Duration `json:"intervalNanoseconds"`
	// Samples are those that measured all GPUs; Incomplete those that did not.
	Samples    int `json:"samples"`
	Incomplete int `json:"incomplete,omitempty"`
	// Dropped counts those that are not kept any more, because there were more than MaxObserved: those that ended
	// first.
	Dropped int `json:"dropped,omitempty"`
	// Containers are by name, GPU and instance.
	Containers []Observed `json:"containers"`
}

// Time is how long the GPUs were observed: the time for which the complete samples stand.
func (h History) Time() time.Duration { return time.Duration(h.Samples) * h.Interval }

// Observed is how a container has used a GPU or a MIG instance.
type Observed struct {
	Name

	GPU      string `json:"gpu"` // UUID
	Instance *int   `json:"instance,omitempty"`
	Profile  string `json:"profile,omitempty"`
	// First and Last are the samples between which the container held the GPU.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	// Memory is in bytes, and nil if the driver did not report it in every sample.
	Memory *Distribution `json:"memory,omitempty"`
	// Compute is the utilization of the streaming multiprocessors, 0 to 1, in those samples in which the driver
	// reported one; nil: in none.
	Compute *Distribution `json:"compute,omitempty"`
}

// Distribution is how often values lay in fixed ranges, and the largest of them.
type Distribution struct {
	Peak float64 `json:"peak"`
	// Counts are by range: MemoryBounds or ComputeBounds has the upper end of each, which belongs to it. The last range
	// has none.
	Counts []int `json:"counts"`
}

// MemoryBounds are the upper ends of the ranges of used memory, in bytes.
func MemoryBounds() []float64 {
	const gib = 1 << 30
	bounds := []float64{0, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256}
	for i := range bounds {
		bounds[i] *= gib
	}
	return bounds
}

// ComputeBounds are the upper ends of the ranges of utilization.
func ComputeBounds() []float64 {
	const ranges = 20
	bounds := make([]float64, ranges)
	for i := range bounds {
		bounds[i] = float64(i+1) / ranges
	}
	return bounds
}

// add counts a value.
func (d *Distribution) add(value float64, bounds []float64) *Distribution {
	if d == nil {
		d = &Distribution{Counts: make([]int, len(bounds)+1)}
	}
	d.Peak = max(d.Peak, value)
	at, _ := slices.BinarySearch(bounds, value)
	d.Counts[at]++
	return d
}

// Quantile is a value that at least the given part of all values, 0 to 1, does not exceed: the upper end of the range
// in which it lies, and never more than the peak.
func (d *Distribution) Quantile(part float64, bounds []float64) float64 {
	total := 0
	for _, n := range d.Counts {
		total += n
	}
	need, sum := int(math.Ceil(part*float64(total))), 0
	for i, n := range d.Counts {
		if sum += n; sum >= need && i < len(bounds) {
			return min(bounds[i], d.Peak)
		}
	}
	return d.Peak
}

// Recorder makes a History of samples.
type Recorder struct {
	history History
	kept    map[place]*Observed
}

// place is a container on a GPU or an instance.
type place struct {
	Name

	gpu, profile string
	instance     int
}

// NewRecorder begins a History.
func NewRecorder(node string, since time.Time, interval time.Duration) *Recorder {
	return &Recorder{history: History{Node: node, Since: since, Interval: interval}, kept: map[place]*Observed{}}
}

// Add adds a sample. One that lacks GPUs does not count as time for which the node was observed, but what it has
// counts.
func (r *Recorder) Add(report Report, complete bool, at time.Time) {
	if complete {
		r.history.Samples++
	} else {
		r.history.Incomplete++
	}
	for i := range report.Units {
		for _, c := range report.Units[i].Containers {
			r.observe(&report.Units[i], c, at)
		}
	}
	for len(r.kept) > MaxObserved {
		r.drop()
	}
}

func (r *Recorder) observe(u *Unit, c Container, at time.Time) {
	const wholeGPU = -1
	key := place{Name: c.Name, gpu: u.GPU, profile: u.Profile, instance: wholeGPU}
	if u.Instance != nil {
		key.instance = *u.Instance
	}
	o, known := r.kept[key]
	if !known {
		o = &Observed{Name: c.Name, GPU: u.GPU, Instance: u.Instance, Profile: u.Profile, First: at}
		r.kept[key] = o
	}
	switch {
	case c.MemoryBytes == nil:
		o.Memory = nil
	case !known || o.Memory != nil:
		o.Memory = o.Memory.add(float64(*c.MemoryBytes), MemoryBounds())
	}
	if c.Utilization != nil {
		o.Compute = o.Compute.add(c.Utilization.Compute, ComputeBounds())
	}
	o.Last = at
}

// drop drops the one that ended first.
func (r *Recorder) drop() {
	var oldest *Observed
	var at place
	for key, o := range r.kept {
		if oldest == nil || oldestFirst(o, oldest) < 0 {
			oldest, at = o, key
		}
	}
	delete(r.kept, at)
	r.history.Dropped++
}

func oldestFirst(a, b *Observed) int {
	return cmp.Or(a.Last.Compare(b.Last), a.First.Compare(b.First), byName(*a, *b))
}

func byName(a, b Observed) int {
	instance := func(o Observed) int {
		if o.Instance == nil {
			return -1
		}
		return *o.Instance
	}
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container),
		cmp.Compare(a.GPU, b.GPU), cmp.Compare(instance(a), instance(b)), cmp.Compare(a.Profile, b.Profile))
}

// History returns what the samples have come to. It shares no memory with the recorder.
func (r *Recorder) History() History {
	h := r.history
	h.Containers = make([]Observed, 0, len(r.kept))
	for _, o := range r.kept {
		copied := *o
		copied.Memory, copied.Compute = o.Memory.clone(), o.Compute.clone()
		h.Containers = append(h.Containers, copied)
	}
	slices.SortFunc(h.Containers, byName)
	return h
}

func (d *Distribution) clone() *Distribution {
	if d == nil {
		return nil
	}
	return &Distribution{Peak: d.Peak, Counts: slices.Clone(d.Counts)}
}
