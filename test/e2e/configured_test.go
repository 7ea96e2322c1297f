// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
)

// configuredForUs reports whether NVIDIA's programs run with our ConfigMap, all of them.
func configuredForUs(ctx context.Context) error {
	pods := &corev1.PodList{}
	if err := kube.List(ctx, pods, client.InNamespace(gpuoperator.Namespace)); err != nil {
		return err
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		if !gpuoperator.ReadsConfig(p.Labels["app"]) {
			continue
		}
		if !mountsOurs(&p.Spec) || !gpuoperator.PodReady(p) || p.DeletionTimestamp != nil {
			return fmt.Errorf("pod %s does not run with ConfigMap %s yet: %s", p.Name, ourConfigMap, state(p))
		}
	}
	return nil
}

// restoredFromUs reports whether NVIDIA's programs are to run without our ConfigMap, all of them. They may not do so
// yet.
func restoredFromUs(ctx context.Context) error {
	sets := &appsv1.DaemonSetList{}
	if err := kube.List(ctx, sets, client.InNamespace(gpuoperator.Namespace)); err != nil {
		return err
	}
	for i := range sets.Items {
		if s := &sets.Items[i]; mountsOurs(&s.Spec.Template.Spec) || s.Status.ObservedGeneration != s.Generation {
			return fmt.Errorf("DaemonSet %s mounts ConfigMap %s", s.Name, ourConfigMap)
		}
	}
	return nil
}

func mountsOurs(spec *corev1.PodSpec) bool {
	return slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == ourConfigMap })
}
