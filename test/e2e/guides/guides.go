// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package guides lists what published guides have an administrator do by hand, and what takes its place here: a case
// file for each guide. `make e2e` replays the entries, docs/dev/guides.md shows them, and an index of each guide's text,
// which is stored elsewhere, makes sure that no command and no document of a guide is left out.
package guides

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

//go:embed *.yaml index/*.yaml
var files embed.FS

// Guide is a published guide.
type Guide struct {
	// Name is that of the case file and of the index, such as 000-sharing-your-gpu.
	Name string `json:"-"`
	// Title, By and URL say which guide it is, as its readers know it.
	Title string `json:"title"`
	By    string `json:"by"`
	URL   string `json:"url,omitempty"`
	// GPUs are those of the node on which the guide is replayed.
	GPUs    []sim.Model `json:"gpus"`
	Entries []Entry     `json:"entries"`
}

// Kind is what an entry of a guide is to its reader.
type Kind string

// The kinds of entries.
const (
	Step        Kind = "step"        // the guide has the reader do something
	Check       Kind = "check"       // the guide has the reader look whether it worked
	Caveat      Kind = "caveat"      // the guide says what does not work, or what to beware of
	Observation Kind = "observation" // the guide reports what it saw
)

// Entry is what a guide says at one place. It is replayed by `make e2e`, by itself or in a spec that is named, or it is
// not ours.
type Entry struct {
	// Lines of the guide's text, as 12-34 or 12.
	Lines string `json:"lines"`
	Is    Kind   `json:"is"`
	// Guide is what the guide does or says there, in our words.
	Guide string `json:"guide"`
	// Here is what takes its place: a field, a command or a condition. Empty for what is not ours.
	Here string `json:"here,omitempty"`
	// NotOurs is why nothing takes its place, and See where the reader finds it.
	NotOurs string `json:"not ours,omitempty"`
	See     string `json:"see,omitempty"`
	// Spec are specs of `make e2e` that replay it, by their texts; Test is a Go test that does, as "internal/cli
	// TestX"; With are the lines of another entry of the guide whose replay is its own too.
	Spec []string `json:"spec,omitempty"`
	Test string   `json:"test,omitempty"`
	With string   `json:"with,omitempty"`
	// Alone is why a Go test shows it and the node of `make e2e` does not.
	Alone string `json:"alone,omitempty"`

	Replay `json:",inline"`
}

// Replay is how an entry is replayed: by a policy, by the deletion of the policy, or by pods that use what is
// advertised.
type Replay struct {
	// GPUs are put into the node first.
	GPUs []sim.Model `json:"gpus,omitempty"`
	// Holding are pods that hold what the policy changes. It evicts them.
	Holding *Pods `json:"holding,omitempty"`
	// Policy is the spec of the one policy of the guide.
	Policy *v1alpha1.GPUSharingPolicySpec `json:"policy,omitempty"`
	// Deleted reports that the policy is deleted.
	Deleted bool `json:"deleted,omitempty"`
	// Plan is what `kubectl gpusharing plan` prints of the policy, or of its deletion. Neither is carried out.
	Plan []string `json:"plan,omitempty"`
	// Apart is how the policy keeps other pods off the node, while the entry is replayed.
	Apart *Apart `json:"apart,omitempty"`
	// Reboots reports that the GPUs cannot be reset, so that the policy takes effect by a reboot. Pods that use no GPU
	// leave the node before that if the policy says so, and stay there otherwise.
	Reboots bool `json:"reboots,omitempty"`
	// Refused is the reason for which the policy is not satisfied, in its status.
	Refused string `json:"refused,omitempty"`
	// Advertised is what the kubelet then advertises, and Labels are labels that the node then has.
	Advertised map[string]int64  `json:"advertised,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	// Programs reports that NVIDIA's programs then all run.
	Programs bool `json:"programs,omitempty"`
	// Pods use what is advertised.
	Pods *Pods `json:"pods,omitempty"`
	// Limits are those of MPS as a workload asks for them.
	Limits *Limits `json:"limits,omitempty"`
}

// Pods are pods that ask for a resource.
type Pods struct {
	Asking string `json:"asking"`
	// Each is how many one pod asks for; 0 is 1.
	Each    int64 `json:"each,omitempty"`
	Running int   `json:"running"`
	Pending int   `json:"pending"`
	// Visible is how the device begins that each gets.
	Visible string `json:"visible,omitempty"`
	// Pipe is the MPS pipe directory that each gets.
	Pipe string `json:"pipe,omitempty"`
}

// Apart is how a policy keeps other pods off a node.
type Apart struct {
	// Taint is key=value:effect.
	Taint string `json:"taint"`
	// Asking is the resource for which pods that may run there ask.
	Asking string `json:"asking"`
	// Ends is when the taint goes.
	Ends string `json:"ends"`
}

// Limits are what the control daemon of MPS answers to a workload that asks for the defaults, and what the GPUNode
// reports.
type Limits struct {
	// Percentage is the answer to get_default_active_thread_percentage, and Memory the one to
	// get_default_device_pinned_mem_limit for GPU 0.
	Percentage string `json:"percentage"`
	Memory     string `json:"memory"`
	// Status is activeThreadPercentage and pinnedMemoryLimit of the GPUNode, as "25, 3840Mi".
	Status string `json:"status"`
}

// Replayed reports whether the entry is replayed by itself, and not in a spec or test that it names.
func (e *Entry) Replayed() bool {
	return e.Policy != nil || e.Deleted || e.Pods != nil || e.Limits != nil
}

// Range are the first and the last line of an entry. Errors: it is not written as 12-34 or 12.
func (e *Entry) Range() (first, last int, err error) {
	from, to, several := strings.Cut(e.Lines, "-")
	if !several {
		to = from
	}
	first, err = strconv.Atoi(from)
	if err == nil {
		last, err = strconv.Atoi(to)
	}
	if err != nil || first < 1 || last < first {
		return 0, 0, fmt.Errorf("%q are no lines: write 12-34 or 12", e.Lines)
	}
	return first, last, nil
}

// All reads the case files, by their names.
func All() ([]Guide, error) {
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return nil, err
	}
	all := make([]Guide, 0, len(names))
	for _, name := range names {
		g := Guide{Name: strings.TrimSuffix(name, ".yaml")}
		if err := parse(name, &g); err != nil {
			return nil, err
		}
		all = append(all, g)
	}
	return all, nil
}

// Index is the committed index of the guide's text.
func (g *Guide) Index() (Index, error) {
	var x Index
	err := parse(path.Join("index", g.Name+".yaml"), &x)
	return x, err
}

func parse(name string, into any) error {
	raw, err := files.ReadFile(name)
	if err == nil {
		err = yaml.UnmarshalStrict(raw, into)
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", name, err)
	}
	return nil
}
