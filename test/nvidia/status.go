// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Reports are the writes by which the GPU Operator tells in the status of a ClusterPolicy or GPUCluster that it follows
// where it runs and, of a new one, that its pods are not there yet. The condition has a write of its own
// (clusterpolicy_controller.go: updateCRState; internal/conditions). Each makes a patch fail that names the resource
// version before it.
func Reports(object *unstructured.Unstructured, namespace string, now time.Time) []map[string]any {
	state, ready := "notReady", "False"
	switch stateOf(object) {
	case "ready":
		return nil
	case "notReady":
		state, ready = "ready", "True"
	}
	return []map[string]any{{"state": state, "namespace": namespace}, {"conditions": conditions("Ready", ready, "Reconciled", state, now)}}
}

// Ignores are those for a ClusterPolicy beside the one that counts.
func Ignores(object *unstructured.Unstructured, namespace string) []map[string]any {
	if stateOf(object) == "ignored" {
		return nil
	}
	return []map[string]any{{"state": "ignored", "namespace": namespace}}
}

// Refuses are those for a GPUCluster beside a ClusterPolicy (controllers/gpucluster_controller.go: validatePrerequisites).
func Refuses(object *unstructured.Unstructured, namespace string, now time.Time) []map[string]any {
	if stateOf(object) == "notReady" {
		return nil
	}
	return []map[string]any{{
		"state": "notReady", "namespace": namespace,
		"conditions": conditions("Error", "True", "PrerequisiteNotMet", "A ClusterPolicy CR exists; a ClusterPolicy CR and GPUCluster CR may not exist at the same time", now),
	}}
}

func stateOf(object *unstructured.Unstructured) string {
	state, _, _ := unstructured.NestedString(object.Object, "status", "state")
	return state
}

func conditions(of, status, reason, message string, now time.Time) []any {
	return []any{map[string]any{
		"type": of, "status": status, "reason": reason, "message": message, "lastTransitionTime": now.UTC().Format(time.RFC3339),
	}}
}
