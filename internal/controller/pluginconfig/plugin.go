// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ConfigMapNames are the names that our ConfigMap can have.
func (c *Configurer) ConfigMapNames() []string {
	if c.standAlone.ConfigMap == "" {
		return []string{ConfigMapName}
	}
	return []string{ConfigMapName, c.standAlone.ConfigMap}
}

// Subject is what an event about the configuration of the device plugin is about: the ClusterPolicy or, without one,
// our ConfigMap.
func (o *Observed) Subject() runtime.Object {
	if o.clusterPolicy != nil {
		return o.clusterPolicy
	}
	return &corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Namespace: o.ConfigMap.Namespace, Name: o.ConfigMap.Name},
	}
}

// Describe says what Configure or Restore changed.
func (o *Observed) Describe() string { return strings.Join(o.did, "; ") }
