// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// hangingClaims finds pods that wait for a device which is gone: their claims keep it, and nothing allocates another one. Until the driver
// publishes what is there, nothing tells which devices are gone.
func hangingClaims(v *View, s State) finding {
	if !v.ByDriver() || s != UpToDate {
		return finding{}
	}
	var hanging []string
	for _, c := range v.Node.Claims {
		gone := c.Gone(v.Node.Name, v.Node.Published)
		if len(gone) == 0 {
			continue
		}
		for _, p := range v.Node.Pods {
			if p.Starting && !p.Terminating && p.Has(c) {
				hanging = append(hanging, fmt.Sprintf("pod %s/%s (%s)", p.Namespace, p.Name, strings.Join(gone, ", ")))
			}
		}
	}
	if len(hanging) == 0 {
		return finding{}
	}
	slices.Sort(hanging)
	return finding{
		Reason: v1alpha1.ReasonDeviceGone, Beside: true,
		Message: fmt.Sprintf("These pods were allocated devices that no longer exist, and cannot start: %s. Delete them, so that their workloads "+
			"make others", format.List(slices.Compact(hanging))),
	}
}

// duplicatedClasses finds that several DeviceClasses serve a resource of the node: another one was made after the operator had looked for an owner.
func duplicatedClasses(v *View, s State) finding {
	if !v.ByDriver() || v.Policy == nil || s != UpToDate {
		return finding{}
	}
	var says []string
	for _, resource := range slices.Sorted(maps.Keys(v.Target.Expected)) {
		if duplicates := dra.Duplicates(v.Snapshot.DRA.Classes, resource); duplicates != "" {
			says = append(says, duplicates)
		}
	}
	if len(says) == 0 {
		return finding{}
	}
	return finding{Reason: v1alpha1.ReasonDeviceClassConflict, Beside: true, Message: strings.Join(says, ". ")}
}

// upgradeUnvalidated finds an upgrade of NVIDIA's driver that does not end by itself: with a GPUCluster it waits for NVIDIA's validator, whose pod claims a whole
// GPU, and without a pod it waits without a deadline (NVIDIA/gpu-operator manifests/state-dra-validation, v26.7.0, and NVIDIA/k8s-operator-libs
// pkg/upgrade/validation_manager.go).
func upgradeUnvalidated(v *View, s State) finding {
	whole := func(d gpu.Device) bool { return !d.State.MIG }
	validates := cluster.OfGPUCluster(v.Node.Labels) && v.Node.Labels[cluster.LabelUpgrade] == cluster.UpgradeValidates
	if s != UpToDate || !validates || slices.ContainsFunc(v.Devices, whole) {
		return finding{}
	}
	return finding{
		Reason: v1alpha1.ReasonDriverUpgrade, Beside: true,
		Message: fmt.Sprintf("The upgrade of NVIDIA's driver does not end by itself: it waits for NVIDIA's validator, which claims a whole GPU, and all "+
			"GPUs of the node are in MIG mode. The driver runs. End the upgrade: kubectl label node %s --overwrite %s=%s",
			v.Node.Name, cluster.LabelUpgrade, cluster.UpgradeUncordons),
	}
}

// draPluginStartsWithin is how long the DaemonSet of the driver may take to bring a pod to the node.
const draPluginStartsWithin = time.Minute

// draPluginFailing finds that the pod of the driver does not run as it should, or is missing, where that is waited for.
func draPluginFailing(v *View, s State) finding {
	if !v.ByDriver() || !slices.Contains([]State{Verifying, Degraded, UpToDate, Failed}, s) {
		return finding{}
	}
	f := finding{}
	var says []string
	running := false
	for _, p := range draPluginPods(v) {
		running = running || !p.Terminating
		for _, t := range p.Troubles {
			left, is := t.Counts(v.Snapshot.Now)
			if f.After = timing.Sooner(f.After, left); is {
				says = append(says, fmt.Sprintf("container %s of pod %s/%s %s; look at `kubectl logs -n %s %s -c %s --previous`",
					t.Container, p.Namespace, p.Name, t.Why, p.Namespace, p.Name, t.Container))
			}
		}
	}
	if waits := s == Verifying || s == Degraded; !running && waits {
		if left := ConfigSelectedAt(v).Add(draPluginStartsWithin).Sub(v.Snapshot.Now); left > 0 {
			return finding{After: left} // it may be on its way
		}
		says = append(says, "no pod of NVIDIA's DRA driver is on the node; look at its DaemonSet, and whether its pods tolerate the node's taints")
	}
	if len(says) > 0 {
		slices.Sort(says)
		f.Reason, f.Message = v1alpha1.ReasonDRADriverFailing, strings.Join(says, "; ")
	}
	return f
}
