// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"maps"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// keys is what our ConfigMap must hold. It is written when something is missing, for all nodes at once; keys that
// nothing names any more go at that occasion, so that a new revision of a policy costs one write.
func keys(w *World, all []member) (WriteKeys, bool) {
	want := map[string]string{}
	for _, m := range all {
		spec := m.node.GPU.Spec
		named := []string{m.node.Labels[v1alpha1.LabelConfig], spec.ConfigKey}
		if spec.LastGood != nil {
			named = append(named, spec.LastGood.ConfigKey)
		}
		for _, key := range named {
			if data, has := w.Keys[key]; has {
				want[key] = data
			}
		}
		if m.wish != nil {
			want[m.wish.Config.Key] = m.wish.Config.Data
		}
	}
	maps.Copy(want, w.Wiring.Keys)
	for key, data := range want {
		if has, written := w.Keys[key]; !written || has != data {
			return WriteKeys{Data: want}, true
		}
	}
	return WriteKeys{}, false
}
