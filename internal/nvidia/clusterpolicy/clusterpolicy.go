// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package clusterpolicy reads NVIDIA's ClusterPolicy, whose Go types are no module that can be imported: which one
// counts, and what it says of the DaemonSets that NVIDIA's operator makes of it. It knows how their tolerations are
// changed and restored. It is pure: internal/controller/pluginconfig patches the ClusterPolicy.
package clusterpolicy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Active is the ClusterPolicy that the GPU Operator follows. Since v26.7 that is the oldest, then the first by name
// (controllers/active_config.go: getSingletonClusterPolicy); up to v26.3 the first that it has reconciled since its
// start, whatever its age. Either writes status.state ignored on each other one, so of several those do not count, as
// long as there is one without. Nil if there is none.
func Active(policies []unstructured.Unstructured) *unstructured.Unstructured {
	if len(policies) == 0 {
		return nil
	}
	active := slices.MinFunc(policies, func(a, b unstructured.Unstructured) int {
		created, than := a.GetCreationTimestamp(), b.GetCreationTimestamp()
		return cmp.Or(cmp.Compare(ignored(&a), ignored(&b)), created.Compare(than.Time), strings.Compare(a.GetName(), b.GetName()))
	})
	return &active
}

// ignored is 1 if the GPU Operator follows another ClusterPolicy.
func ignored(policy *unstructured.Unstructured) int {
	if state, _, _ := unstructured.NestedString(policy.Object, "status", "state"); state == "ignored" {
		return 1
	}
	return 0
}

// RunsPlugin reports whether the GPU Operator runs the device plugin, by its ClusterPolicy; nil: there is none. The
// deploy labels of its nodes do not tell that: it sets nvidia.com/gpu.deploy.device-plugin also where the plugin is
// disabled (NVIDIA/gpu-operator controllers/state_manager.go).
func RunsPlugin(policy *unstructured.Unstructured) bool {
	return policy != nil && enabled(policy, true, "devicePlugin", "enabled")
}

// NoMIGManager says why NVIDIA's mig-manager cannot be asked for anything; empty: as far as the ClusterPolicy says, it
// can.
func NoMIGManager(policy *unstructured.Unstructured) string {
	if enabled(policy, true, "migManager", "enabled") {
		return ""
	}
	return fmt.Sprintf("ClusterPolicy %s has spec.migManager.enabled false; enable it", policy.GetName())
}

// Operands is what a ClusterPolicy says of the DaemonSets that NVIDIA's operator runs on nodes with GPUs.
type Operands struct {
	// Name of the ClusterPolicy.
	Name string
	// Tolerations are those of all these DaemonSets, ours among them: spec.daemonsets.tolerations or, where that is
	// empty, the one that they have by themselves.
	Tolerations []corev1.Toleration
	// Ours are those of them that we added.
	Ours []corev1.Toleration
	// Taken is the field manager that has written the tolerations since we added to them; empty: nobody has.
	Taken string
	// Removed says that another client has removed the tolerations that we had added.
	Removed bool
	// NotBefore is when tolerations that were removed a few times may be added again.
	NotBefore time.Time
	// Driver says that one of the DaemonSets is that of the driver. Its pods are never replaced by Kubernetes, so they
	// take a changed template over only when another controller or a user restarts them.
	Driver bool
	// Upgrades says that NVIDIA's operator does that: it takes every change of the driver's template for an upgrade. Up
	// to v26.3 it first deletes the pods that use GPUs, node by node, and before v26.3 the driver is loaded anew; from
	// v26.7 on it cordons a node and restarts NVIDIA's programs there (controllers/upgrade_controller.go,
	// k8s-operator-libs pkg/upgrade: podInSyncWithDS, internal/predicates/restart_only.go, k8s-driver-manager:
	// shouldSkipUninstall).
	Upgrades bool
	// Workload is what nodes are for whose label nvidia.com/gpu.workload.config does not tell it: container, or one for
	// virtual machines. Empty: that label counts for nothing, since spec.sandboxWorkloads is off
	// (controllers/state_manager.go: getWorkloadConfig).
	Workload string
	// MPSRoot is where the device plugin looks for MPS daemons, spec.devicePlugin.mps.root; empty: NVIDIA's default,
	// deviceplugin.MPSRoot.
	MPSRoot string
	// Toolkit says that one of the DaemonSets is that of the container toolkit. When its pod ends it restarts the
	// container runtime and so, on some systems, the kubelet; if the device plugin restarts at that time too, the
	// kubelet fails the pods that hold GPUs (NVIDIA/gpu-operator issue 596).
	Toolkit bool
}

// OperandsOf reads a ClusterPolicy. What a field means that is not there is NVIDIA's
// (api/nvidia/v1/clusterpolicy_types.go: IsEnabled, UseNvidiaDriverCRDType, UpgradePolicy).
func OperandsOf(policy *unstructured.Unstructured) Operands {
	driver := enabled(policy, true, "driver", "enabled") && !enabled(policy, false, "driver", "useNvidiaDriverCRD")
	have := tolerations(policy)
	if len(have) == 0 {
		have = byDefault()
	}
	sandbox, workload := enabled(policy, false, "sandboxWorkloads", "enabled"), ""
	if sandbox {
		named, _, _ := unstructured.NestedString(policy.Object, "spec", "sandboxWorkloads", "defaultWorkload")
		workload = cmp.Or(named, "container")
	}
	ours, removed := recorded(policy)
	mpsRoot, _, _ := unstructured.NestedString(policy.Object, "spec", "devicePlugin", "mps", "root")
	return Operands{
		Name: policy.GetName(), MPSRoot: mpsRoot, Tolerations: have, Ours: ours.Added, Removed: removed,
		Taken: taken(policy), Driver: driver,
		Upgrades: driver && enabled(policy, false, "driver", "upgradePolicy", "autoUpgrade") && !sandbox,
		Workload: workload, Toolkit: enabled(policy, true, "toolkit", "enabled"),
	}
}

// enabled is the switch at a path below spec, or what it is when it is not there.
func enabled(policy *unstructured.Unstructured, otherwise bool, path ...string) bool {
	value, found, err := unstructured.NestedBool(policy.Object, append([]string{"spec"}, path...)...)
	if !found || err != nil {
		return otherwise
	}
	return value
}
