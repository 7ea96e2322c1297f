// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"

	"go.yaml.in/yaml/v3"
)

// served is what of a configuration NVIDIA's MPS control daemon heeds: the names of its resources and their replicas,
// from which its pipe directories and limits follow.
type served struct {
	Sharing struct {
		MPS *struct {
			RenameByDefault bool `yaml:"renameByDefault"`
			Resources       []struct {
				Name     string `yaml:"name"`
				Replicas int32  `yaml:"replicas"`
			} `yaml:"resources"`
		} `yaml:"mps"`
	} `yaml:"sharing"`
}

// SameMPS reports whether NVIDIA's MPS control daemon does the same under two configurations, no matter which program
// wrote them. It is false where one of them does not ask for MPS.
func SameMPS(a, b string) bool {
	var one, other served
	if yaml.Unmarshal([]byte(a), &one) != nil || yaml.Unmarshal([]byte(b), &other) != nil {
		return false
	}
	if one.Sharing.MPS == nil || other.Sharing.MPS == nil {
		return false
	}
	return one.Sharing.MPS.RenameByDefault == other.Sharing.MPS.RenameByDefault && maps.Equal(one.replicas(), other.replicas())
}

// replicas are those of each resource; of several entries for one the largest counts.
func (s served) replicas() map[string]int32 {
	by := map[string]int32{}
	for _, r := range s.Sharing.MPS.Resources {
		by[r.Name] = max(by[r.Name], r.Replicas)
	}
	return by
}
