// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"fmt"
	"maps"

	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

// KeepCopy keeps a copy of our keys, and of the record of what the ClusterPolicy said before, in the operator's own
// namespace. A config that only a node without a policy names could not be rendered again if a user deleted our
// ConfigMap, or the namespace of the GPU Operator. It comes after WriteKeys; without that, what another controller has
// taken from our ConfigMap stays in the copy.
func (c *Configurer) KeepCopy(ctx context.Context, o *Observed) error {
	if c.own == "" || o.ConfigMap.Name == "" || o.ConfigMap.Name == ConfigMapName && o.ConfigMap.Namespace == c.own || len(o.Applied) == 0 {
		return nil
	}
	keys := map[string]string{}
	if !o.written {
		maps.Copy(keys, o.Copied)
	}
	maps.Copy(keys, o.Applied)
	want := corev1ac.ConfigMap(ConfigMapName, c.own).WithData(keys).WithLabels(map[string]string{managedBy: operator})
	if o.record != "" {
		want.WithAnnotations(map[string]string{v1alpha1.AnnotationBaseline: o.record})
	}
	owner := ssa.Owner{Client: c.client, Name: fieldManager}
	if _, err := ssa.Apply(ctx, owner, o.copied, want, extract); err != nil {
		return fmt.Errorf("copying ConfigMap %s to namespace %s: %w", o.ConfigMap, c.own, err)
	}
	return nil
}

// keepStrategy makes the default config that of the MIG strategy which the ClusterPolicy had, and never the other way
// round.
func (o *Observed) keepStrategy() {
	mixed, had := deviceplugin.Default(deviceplugin.StrategyMixed).Key, deviceplugin.Default(o.baseline.strategy()).Key
	if o.KeepStrategy && o.defaultKey == mixed && had != mixed {
		o.defaultKey, o.Ready = had, false
	}
}

// repoints reports whether devicePlugin.config has to change.
func (o *Observed) repoints() bool {
	return stringAt(o.clusterPolicy, configNamePath()...) != ConfigMapName || stringAt(o.clusterPolicy, defaultKeyPath()...) != o.defaultKey
}

// Waits returns why the ClusterPolicy is not restored yet; empty if it need not wait.
func (o *Observed) Waits() string {
	if o.clusterPolicy == nil || stringAt(o.clusterPolicy, configNamePath()...) != ConfigMapName {
		return ""
	}
	return o.Held
}
