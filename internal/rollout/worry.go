// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Worrying reports whether a person should look at a node with that state and reason: its change failed or cannot be made, or something
// on it is left undone. Others are on their way, or wait for something that passes.
func Worrying(state, reason string) bool {
	if state == string(StateFailed) || state == string(StateImpossible) {
		return true
	}
	return slices.Contains([]string{
		v1alpha1.ReasonNotAdvertised, v1alpha1.ReasonClientsLeftPaused, v1alpha1.ReasonClientsNotEnding,
		v1alpha1.ReasonMIGManagerStuck, v1alpha1.ReasonMIGManagerUnfenced, v1alpha1.ReasonMIGConfigIgnored,
		v1alpha1.ReasonConfigManagerFailing, v1alpha1.ReasonDevicePluginFailing, v1alpha1.ReasonDevicePluginOutdated,
		v1alpha1.ReasonComputeModeLeft, v1alpha1.ReasonNodeFeatureIgnored, v1alpha1.ReasonMPSCapableReset, v1alpha1.ReasonMPSCapableStale,
		v1alpha1.ReasonChangedByOthers,
	}, reason)
}
