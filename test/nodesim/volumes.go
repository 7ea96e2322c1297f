// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// projection is a ConfigMap as a pod sees it.
type projection struct {
	data  map[string]string // nil: the ConfigMap does not exist
	since time.Time
}

// project brings ConfigMaps into a pod: at once when the pod is new or was changed, otherwise after the delay.
func (k *kubelet) project(ctx context.Context, state *podState, touched bool) error {
	for _, volume := range state.pod.Spec.Volumes {
		if volume.ConfigMap == nil {
			continue
		}
		name := volume.ConfigMap.Name
		old, ok := state.volumes[name]
		if ok && old.data != nil && !touched && k.Clock.Since(old.since) < k.ProjectionDelay {
			continue
		}
		configMap := &corev1.ConfigMap{}
		err := k.Client.Get(ctx, types.NamespacedName{Namespace: state.pod.Namespace, Name: name}, configMap)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("projecting ConfigMap %s: %w", name, err)
		}
		state.volumes[name] = &projection{data: dataOf(configMap, err == nil), since: k.Clock.Now()}
	}
	return nil
}

func dataOf(configMap *corev1.ConfigMap, exists bool) map[string]string {
	if !exists {
		return nil
	}
	if configMap.Data == nil {
		return map[string]string{}
	}
	return configMap.Data
}

// missingVolume says why the containers cannot be created yet; empty if they can.
func (s *podState) missingVolume() string {
	for name, p := range s.volumes {
		if p.data == nil {
			return fmt.Sprintf("ContainerCreating: configmap %q not found", name)
		}
	}
	return ""
}
