// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// writeConfigs is what our ConfigMap must hold. It is written when something is missing, for all nodes at once; keys
// that nothing names any more go at that occasion, so that a new revision of a policy costs one write.
func writeConfigs(s *cluster.Snapshot, all []*member, configureMIG bool) (action.WriteConfigs, bool) {
	want := map[string]string{}
	last := "" // of thousands of nodes, most name the same
	name := func(key string) {
		if key == last {
			return
		}
		if data, has := configContent(s, key); has {
			want[key], last = data, key
		}
	}
	for _, m := range all {
		for _, config := range m.Summary.Configs {
			name(config)
		}
		if m.Desired != nil && !m.ByDriver() && (m.Desired.Config.Key != last || m.Desired.Config.Data != want[last]) {
			want[m.Desired.Config.Key], last = m.Desired.Config.Data, ""
		}
	}
	maps.Copy(want, s.Plugin.Configs)
	if file, has := configContent(s, migmanager.FileKey); has && (configureMIG || s.Plugin.MIGReady) {
		want[migmanager.FileKey] = managerFile(file, all)
	}
	for key, data := range want {
		if has, written := s.Configs[key]; !written || has != data {
			return action.WriteConfigs{Data: want}, true
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
// that a node is labelled with or about to be. One that nothing names any more goes when another is added.
func managerFile(file string, all []*member) string {
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
