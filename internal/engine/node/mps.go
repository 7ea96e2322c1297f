// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// sharedByOwnMPS reports whether an MPS daemon of the operator shares one of the GPUs.
func sharedByOwnMPS(devices []v1alpha1.DeviceSpec) bool {
	return sharedByDaemonOf(devices, v1alpha1.MPSDaemonOwnerGPUSharing)
}

// sharedByDaemonOf reports whether a GPU of the list is shared by an MPS daemon of that owner.
func sharedByDaemonOf(devices []v1alpha1.DeviceSpec, owner v1alpha1.MPSDaemonOwner) bool {
	return slices.ContainsFunc(devices, func(d v1alpha1.DeviceSpec) bool {
		return d.Sharing.MPS != nil && d.Sharing.MPS.Owner == owner
	})
}

// servesMPS reports whether the operator's MPS daemons serve the node, or the agent is asked to start them.
func servesMPS(v *View) bool {
	return sharedByOwnMPS(v.Node.GPU.Spec.Devices) || slices.ContainsFunc(v.Devices, func(d gpu.Device) bool {
		return d.State.MPS != nil && !d.State.MPS.External
	})
}

// mustRemoveNVIDIAMPS reports whether NVIDIA's MPS daemon must leave the node and to pause NVIDIA's clients does not keep it off: beside a stand-alone
// plugin no deploy label stops it, and where the node selects its configuration already, another client has let it back.
func mustRemoveNVIDIAMPS(v *View) bool {
	letBack := v.Target.Config != "" && !v.Target.Before && v.Selects()
	return (!v.Snapshot.Plugin.ClusterPolicy || letBack) && len(v.EndingNVIDIAMPS()) > 0
}

// ExcludesNVIDIAMPS reports whether NVIDIA's MPS DaemonSet must have no pod on the node.
func ExcludesNVIDIAMPS(v *View) bool {
	return sharedByOwnMPS(v.Target.Devices) || servesMPS(v) || mustRemoveNVIDIAMPS(v)
}

// OverriddenByNodeFeature reports whether a NodeFeature overrides the label of the node.
func OverriddenByNodeFeature(v *View) bool {
	return v.Snapshot.Plugin.NodeFeatures && (v.Snapshot.Plugin.ClusterPolicy || v.Node.Features.Others != "")
}

// mpsLabelBefore is what the label was before the operator first set it (empty: it was not set), and when the operator set it
// last.
func mpsLabelBefore(v *View) (before string, at time.Time, recorded bool) {
	before, seconds, recorded := strings.Cut(v.Node.Annotations[v1alpha1.AnnotationMPSCapable], "@")
	if n, err := strconv.ParseInt(seconds, 10, 64); recorded && err == nil {
		at = time.Unix(n, 0)
	}
	return before, at, recorded
}

// Selects reports whether the node selects the configuration of the target.
func (v *View) Selects() bool { return v.Node.Labels[v1alpha1.LabelConfig] == v.Target.Config }

// MPSLabelOverridden reports whether something of the operator's overrides the label.
func MPSLabelOverridden(v *View) bool {
	_, _, patched := mpsLabelBefore(v)
	return patched || !v.Node.Features.OverriddenSince.IsZero()
}
