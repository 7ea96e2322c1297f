// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// gpusOf are the GPUs of a node: as its agent reported them or, where no agent runs yet, as the label of NVIDIA's
// mig-manager says.
func (c Cluster) gpusOf(n *cluster.Node, f *found) ([]shape, error) {
	layout := n.Labels[v1alpha1.LabelMIGConfig]
	reported, state := n.GPU.Status.Devices, n.Labels[v1alpha1.LabelMIGConfigState]
	unfinished := layout != "" && state != "" && state != "success"
	switch {
	case unfinished && len(reported) == 0:
		return nil, fmt.Errorf("NVIDIA's mig-manager has not brought %s about (%s=%s), and no agent has reported what is there now; import again once the "+
			"operator runs", layout, v1alpha1.LabelMIGConfigState, state)
	case unfinished:
		f.notes = append(f.notes, fmt.Sprintf("NVIDIA's mig-manager has not brought %s about on node %s (%s=%s), so this is what is there now",
			layout, n.Name, v1alpha1.LabelMIGConfigState, state))
	}
	if len(reported) > 0 {
		return shapes(reported), nil
	}
	gpus, err := c.labelled(layout)
	if err == nil {
		f.notes = append(f.notes, "no agent has reported the GPUs of these nodes, so this is what their labels ask for; import again "+
			"once the operator runs, to be sure that it is so")
	}
	return gpus, err
}

// labelled is what a layout of mig-manager makes of the GPUs of a node.
func (c Cluster) labelled(layout string) ([]shape, error) {
	if c.MIGConfigs == "" {
		return builtin(layout)
	}
	var file struct {
		Configs map[string][]entry `json:"mig-configs"`
	}
	if err := yaml.Unmarshal([]byte(c.MIGConfigs), &file); err != nil {
		return nil, fmt.Errorf("the ConfigMap of NVIDIA's mig-manager holds no layouts: %w", err)
	}
	if layout == "" {
		return whole(), nil
	}
	entries, known := file.Configs[layout]
	if !known {
		return nil, fmt.Errorf("the ConfigMap of NVIDIA's mig-manager has no layout %s (%s)", layout, v1alpha1.LabelMIGConfig)
	}
	gpus := make([]shape, 0, len(entries))
	for _, e := range entries {
		s, err := e.shape(layout)
		if err != nil {
			return nil, err
		}
		gpus = append(gpus, s)
	}
	return gpus, nil
}

// entry is how some GPUs of a node are partitioned.
type entry struct {
	DeviceFilter any              `json:"device-filter"`
	Devices      any              `json:"devices"`
	Enabled      bool             `json:"mig-enabled"`
	Instances    map[string]int32 `json:"mig-devices"`
}

func (e entry) shape(layout string) (shape, error) {
	s := shape{mig: e.Enabled}
	if e.DeviceFilter != nil {
		return s, fmt.Errorf("the layout %s says by PCI ids (device-filter) which GPUs are partitioned, and no agent has told "+
			"which GPUs there are; import again once the operator runs", layout)
	}
	if indexes, is := e.Devices.([]any); is {
		for _, index := range indexes {
			n, isNumber := index.(float64)
			if !isNumber || n != math.Trunc(n) {
				return s, fmt.Errorf("the layout %s has a device %v, which is no number", layout, index)
			}
			s.indexes = append(s.indexes, int32(min(max(n, 0), maxIndex)))
		}
	}
	for profile, count := range e.Instances {
		if count > 0 {
			s.instances = append(s.instances, v1alpha1.InstanceCount{Profile: profile, Count: count})
		}
	}
	slices.SortFunc(s.instances, func(a, b v1alpha1.InstanceCount) int { return strings.Compare(a.Profile, b.Profile) })
	return s, nil
}

// maxIndex is the highest position of a GPU in a node.
const maxIndex = 63

// builtin is what NVIDIA's own layouts make of a node.
func builtin(layout string) ([]shape, error) {
	switch layout {
	case "", "all-disabled":
		return whole(), nil
	case "all-enabled":
		return []shape{{mig: true}}, nil
	case "all-balanced":
		return []shape{{mig: true, instances: []v1alpha1.InstanceCount{
			{Profile: "1g", Count: 2}, {Profile: "2g", Count: 1}, {Profile: "3g", Count: 1},
		}}}, nil
	}
	if parts := regexp.MustCompile(`^all-([1-7]g\.[1-9][0-9]*gb)(\.(me|me\.all|gfx)|-me)?$`).FindStringSubmatch(layout); parts != nil {
		return []shape{{mig: true, fill: v1alpha1.MIGProfile(parts[1] + strings.Replace(parts[2], ".", "+", 1))}}, nil
	}
	return nil, fmt.Errorf("the layout %s (%s) is none of NVIDIA's own, and mig-manager has no ConfigMap that holds it", layout, v1alpha1.LabelMIGConfig)
}

func whole() []shape { return []shape{{}} }
