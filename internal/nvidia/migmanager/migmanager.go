// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package migmanager renders configurations for NVIDIA's mig-manager and knows what it does to GPUs when it applies
// one. It is pure. The format is `version: v1` of NVIDIA/mig-parted, api/spec/v1; what happens is in its
// cmd/nvidia-mig-parted/apply.
//
// mig-manager reads one file with all configurations, each with a name that a node's label selects. A configuration has
// to cover every GPU of the node, and its entries must not overlap: later ones would overwrite earlier ones.
package migmanager

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// FileKey is the key of a ConfigMap under which mig-manager looks for the file.
const FileKey = "config.yaml"

// prefix is of the names of our configurations.
const prefix = "gpusharing-"

// Ours reports whether a name is that of a configuration that was rendered here.
func Ours(name string) bool { return strings.HasPrefix(name, prefix) }

// Config is a configuration for nodes whose GPUs are to be partitioned alike.
type Config struct {
	// Name tells the content: it differs whenever Entries does, so that mig-manager, which only notices another name,
	// applies it. It is valid as a label's value.
	Name string
	// Entries is the list of entries as YAML.
	Entries string
}

// Render is the configuration for a node whose GPUs have the desired state, and those that it does not list stay as
// they are.
func Render(desired []v1alpha1.DeviceSpec, have []gpu.Device) Config {
	var entries []entry
	for _, d := range sorted(have) {
		e := entry{Devices: flow{d.Index}, MIGDevices: map[string]int32{}}
		sharing := sharingOf(desired, d)
		e.MIGEnabled = sharing.MIGMode == v1alpha1.MIGModeEnabled
		for _, i := range sharing.Instances {
			e.MIGDevices[i.Profile] += i.Count
		}
		same := func(o entry) bool { return o.MIGEnabled == e.MIGEnabled && maps.Equal(o.MIGDevices, e.MIGDevices) }
		if at := slices.IndexFunc(entries, same); at >= 0 {
			entries[at].Devices = append(entries[at].Devices, d.Index)
			continue
		}
		entries = append(entries, e)
	}
	data := marshal(entries)
	sum := sha256.Sum256([]byte(data))
	return Config{Name: prefix + hex.EncodeToString(sum[:6]), Entries: data}
}

// entry is an element of a configuration.
type entry struct {
	Devices    flow             `yaml:"devices,flow"`
	MIGEnabled bool             `yaml:"mig-enabled"`
	MIGDevices map[string]int32 `yaml:"mig-devices"`
}

// flow is a list that is written in one line.
type flow []int

func sorted(have []gpu.Device) []gpu.Device {
	return slices.SortedFunc(slices.Values(have), func(a, b gpu.Device) int { return a.Index - b.Index })
}

func sharingOf(desired []v1alpha1.DeviceSpec, d gpu.Device) v1alpha1.DeviceSharing {
	for _, spec := range desired {
		if spec.UUID == d.UUID {
			return spec.Sharing
		}
	}
	return plan.Observed(d)
}

// Clears are the GPUs that mig-manager clears of all their instances, so that nobody may use them, when it brings a
// node to a desired state: every GPU where the mode of one has to change, since it then sets the mode of all and resets
// all; else those whose instances differ.
func Clears(desired []v1alpha1.DeviceSpec, have []gpu.Device) []gpu.Device {
	var differ []gpu.Device
	for _, d := range sorted(have) {
		want, is := sharingOf(desired, d), plan.Observed(d)
		if want.MIGMode != is.MIGMode || d.PendingMIG != d.State.MIG {
			return sorted(have)
		}
		partial := slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return i.Partial })
		want.MPS, is.MPS = nil, nil
		if partial || !plan.Met(want, is) {
			differ = append(differ, d)
		}
	}
	return differ
}

// Parse reads a file of configurations, each with its entries as they are written. Errors: it is not one.
func Parse(file string) (map[string]string, error) {
	var doc struct {
		Version string               `yaml:"version"`
		Configs map[string]yaml.Node `yaml:"mig-configs"`
	}
	if err := yaml.Unmarshal([]byte(file), &doc); err != nil {
		return nil, fmt.Errorf("parsing a mig-manager configuration: %w", err)
	}
	if doc.Version != "v1" {
		return nil, fmt.Errorf("parsing a mig-manager configuration: unknown version %q", doc.Version)
	}
	configs := map[string]string{}
	for name, node := range doc.Configs {
		configs[name] = marshal(&node)
	}
	return configs, nil
}

// File is the file with these configurations, by their names.
func File(configs map[string]string) string {
	var b strings.Builder
	b.WriteString("version: v1\nmig-configs:\n")
	for _, name := range slices.Sorted(maps.Keys(configs)) {
		b.WriteString("  " + strings.TrimSuffix(marshal(name), "\n") + ":\n")
		for line := range strings.Lines(configs[name]) {
			b.WriteString("  " + line)
		}
	}
	return b.String()
}

func marshal(v any) string {
	var b strings.Builder
	encoder := yaml.NewEncoder(&b)
	encoder.SetIndent(2)
	if err := encoder.Encode(v); err != nil {
		return "" // cannot be: strings, numbers and what was parsed
	}
	return b.String()
}
