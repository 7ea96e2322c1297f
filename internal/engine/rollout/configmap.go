// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

const (
	// mostConfigBytes is how much our ConfigMap holds of the operator's own configs: half of what the API server takes.
	mostConfigBytes = 512 << 10
	// mostConfigMapBytes is how much it holds with the configs of others that it has copied. The API server takes 1 MiB
	// (k8s.io/kubernetes pkg/apis/core/validation ValidateConfigMap), of which the rest is for what these grow by.
	mostConfigMapBytes = 1<<20 - 64<<10
)

// configs is what our ConfigMap must hold, and the keys that nodes are to select and for which it has no room.
type configs struct {
	want map[string]string
	full map[string]bool
}

// configsOf is what our ConfigMap must hold: first what nodes name already, and what others need of it, then what nodes
// are to select, those that have begun first, as far as there is room. A node whose config has none does not begin.
func configsOf(s *cluster.Snapshot, all []*member, configureMIG bool) configs {
	c := configs{want: map[string]string{}, full: map[string]bool{}}
	own, others := c.named(s, all), 0
	for key, data := range s.Plugin.Configs {
		c.want[key] = data
		others += len(key) + len(data)
	}
	file, manages := configContent(s, migmanager.FileKey)
	manages = manages && (configureMIG || s.Plugin.MIGReady)
	var entries map[string]string
	if manages {
		others += len(file)
		entries, _ = migmanager.Parse(file) // one that cannot be read stays as it is
	}
	room := min(mostConfigBytes-own, mostConfigMapBytes-own-others)
	for _, begun := range []bool{true, false} {
		last := "" // of thousands of nodes, most name the same
		for _, m := range all {
			if m.Desired != nil && m.ReadsConfigs() && m.HoldsSlot == begun && (m.Desired.Config.Key != last || c.want[last] != m.Desired.Config.Data) {
				room, last = c.add(m, entries, room), m.Desired.Config.Key
			}
		}
	}
	if manages {
		c.want[migmanager.FileKey] = managerFile(file, all, c.full)
	}
	return c
}

// named adds the configs that nodes name already, but for those of others, and returns their size in bytes.
func (c *configs) named(s *cluster.Snapshot, all []*member) (size int) {
	last := "" // of thousands of nodes, most name the same
	for _, m := range all {
		for _, key := range m.Summary.Configs {
			if _, copied := s.Plugin.Configs[key]; key == last || copied {
				continue
			}
			data, has := configContent(s, key)
			if !has {
				continue
			}
			if _, counted := c.want[key]; !counted {
				size += len(key) + len(data)
			}
			c.want[key], last = data, key
		}
	}
	return size
}

// add adds what a node is to select, if there is room for it, and for the configurations of mig-manager that the file
// has not yet. It returns the room that is left.
func (c *configs) add(m *member, file map[string]string, room int) int {
	config, needs := &m.Desired.Config, 0
	for _, key := range config.Keys() {
		if c.want[key] != config.Data {
			needs += len(key) + len(config.Data)
		}
	}
	if file != nil {
		for name, entries := range node.MIGConfigs(m.View) {
			if _, has := file[name]; !has {
				needs += len(name) + 2*len(entries) // it is indented
			}
		}
	}
	named := m.HoldsSlot || slices.Contains(m.Summary.Configs[:], config.Key)
	if needs > room && !named {
		c.full[config.Key] = true
		return room
	}
	for _, key := range config.Keys() {
		c.want[key] = config.Data
	}
	return room - needs
}

// write is the write that our ConfigMap needs, if it lacks something: for all nodes at once. Keys that nothing names any
// more go at that occasion, so that a new revision of a policy costs one write.
func (c *configs) write(s *cluster.Snapshot) (action.WriteConfigs, bool) {
	for key, data := range c.want {
		if has, written := s.Configs[key]; !written || has != data {
			return action.WriteConfigs{Data: c.want}, true
		}
	}
	return action.WriteConfigs{}, false
}

// configContent returns the content of a config: from the ConfigMap or, if that was deleted, from its copy. Nobody
// could render again what only a node names that no policy governs.
func configContent(s *cluster.Snapshot, key string) (string, bool) {
	if data, has := s.Configs[key]; has {
		return data, true
	}
	data, has := s.ConfigsCopy[key]
	return data, has
}

// managerFile is the file that NVIDIA's mig-manager has to read: with every configuration of others', and those of ours
// that a node is labelled with or about to be, if there is room. One that nothing names any more goes when another is added.
func managerFile(file string, all []*member, full map[string]bool) string {
	has, err := migmanager.Parse(file)
	if err != nil {
		return file // it was written by us
	}
	want, complete := map[string]string{}, true
	for name, entries := range has {
		named := func(m *member) bool {
			return m.Node.Labels[v1alpha1.LabelMIGConfig] == name || m.Node.GPU.Spec.MIGConfigName == name
		}
		if !migmanager.Ours(name) || slices.ContainsFunc(all, named) {
			want[name] = entries
		}
	}
	for _, m := range all {
		if m.Desired != nil && full[m.Desired.Config.Key] {
			continue
		}
		for name, entries := range node.MIGConfigs(m.View) {
			_, there := has[name]
			want[name], complete = entries, complete && there
		}
	}
	if complete {
		return file
	}
	return migmanager.File(want)
}
