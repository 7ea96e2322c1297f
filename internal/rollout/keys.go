// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/migmanager"
)

// keys is what our ConfigMap must hold. It is written when something is missing, for all nodes at once; keys that
// nothing names any more go at that occasion, so that a new revision of a policy costs one write.
func keys(w *World, all []*member, wireMIG bool) (WriteKeys, bool) {
	want := map[string]string{}
	last := "" // of thousands of nodes, most name the same
	name := func(key string) {
		if key == last {
			return
		}
		if data, has := w.content(key); has {
			want[key], last = data, key
		}
	}
	for _, m := range all {
		for _, config := range m.brief.configs {
			name(config)
		}
		if m.wish != nil && (m.wish.Config.Key != last || m.wish.Config.Data != want[last]) {
			want[m.wish.Config.Key], last = m.wish.Config.Data, ""
		}
	}
	maps.Copy(want, w.Wiring.Keys)
	if file, has := w.content(migmanager.FileKey); has && (wireMIG || w.Wiring.MIGReady) {
		want[migmanager.FileKey] = managerFile(file, all)
	}
	for key, data := range want {
		if has, written := w.Keys[key]; !written || has != data {
			return WriteKeys{Data: want}, true
		}
	}
	return WriteKeys{}, false
}

// content returns the content of a config: from the ConfigMap or, if that was deleted, from its copy. Nobody could render again
// what only a node names that no policy governs.
func (w *World) content(key string) (string, bool) {
	if data, has := w.Keys[key]; has {
		return data, true
	}
	data, has := w.Copied[key]
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
			return m.node.Labels[v1alpha1.LabelMIGConfig] == name || m.node.GPU.Spec.MIGConfigName == name
		}
		if !migmanager.Ours(name) || slices.ContainsFunc(all, named) {
			want[name] = entries
		}
	}
	for _, m := range all {
		for name, entries := range m.configs() {
			_, there := has[name]
			want[name], complete = entries, complete && there
		}
	}
	if complete {
		return file
	}
	return migmanager.File(want)
}
