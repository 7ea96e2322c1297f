// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import "testing"

// TestDeployLabelsOfAnUpgrade checks the values of deploy labels that the stand-in writes against those of NVIDIA/k8s-driver-manager
// v0.12.0, cmd/driver-manager/main.go.
func TestDeployLabelsOfAnUpgrade(t *testing.T) {
	for found, want := range map[string]struct{ meanwhile, afterwards string }{
		"":      {"", ""},
		"false": {"false", "false"},
		"true":  {"paused-for-driver-upgrade", "true"},
		// An earlier attempt has left it.
		"paused-for-driver-upgrade": {"paused-for-driver-upgrade", "true"},
		"paused-for-mig-change":     {"paused-for-mig-change_paused-for-driver-upgrade", "paused-for-mig-change"},
		"paused-for-mig-change_paused-for-driver-upgrade": {
			"paused-for-mig-change_paused-for-driver-upgrade", "paused-for-mig-change",
		},
	} {
		if got := pausedForUpgrade(found); got != want.meanwhile {
			t.Errorf("%q is stopped as %q, want %q", found, got, want.meanwhile)
		}
		if got := restored(found); got != want.afterwards {
			t.Errorf("%q is restored as %q, want %q", found, got, want.afterwards)
		}
	}
}
