// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

// The label by which a ConfigMap is known as ours.
const (
	managedBy = "app.kubernetes.io/managed-by"
	operator  = "gpu-sharing-operator"
)

// WriteKeys makes exactly these keys ours in our ConfigMap, which are all that are needed, and creates it if there is none.
// Keys of others stay. It reports whether it wrote.
func (c *Configurer) WriteKeys(ctx context.Context, o *Observed, data map[string]string) (wrote bool, err error) {
	wrote, err = c.writeKeys(ctx, o, data)
	o.written = err == nil
	return wrote, err
}

func (c *Configurer) writeKeys(ctx context.Context, o *Observed, data map[string]string) (bool, error) {
	if o.Reason != "" {
		return false, nil
	}
	want := corev1ac.ConfigMap(o.ConfigMap.Name, o.ConfigMap.Namespace)
	if len(data) > 0 {
		want.WithData(data)
	}
	record := ""
	if o.clusterPolicy != nil {
		record = o.baseline.String()
		want.WithLabels(map[string]string{managedBy: operator})
		want.WithAnnotations(map[string]string{v1alpha1.AnnotationBaseline: record})
	}
	owner := ssa.Owner{Client: c.client, Name: fieldManager}
	wrote, err := ssa.Apply(ctx, owner, o.configMap, want, extract)
	if err != nil {
		return false, fmt.Errorf("writing ConfigMap %s: %w", o.ConfigMap, err)
	}
	o.Applied, o.record = data, record
	return wrote, nil
}

// keysToStay are the keys that a stand-alone plugin's ConfigMap keeps without us: one that is all ours still serves the
// nodes without a label.
func (o *Observed) keysToStay() map[string]string {
	if len(o.theirs()) > 0 {
		return nil
	}
	return o.Configs
}

// theirs are the keys of the ConfigMap that are not ours.
func (o *Observed) theirs() map[string]string {
	theirs := make(map[string]string, len(o.configMap.Data))
	for key, data := range o.configMap.Data {
		if _, ours := o.Applied[key]; !ours {
			theirs[key] = data
		}
	}
	return theirs
}

func (c *Configurer) remove(ctx context.Context, configMap *corev1.ConfigMap) error {
	precondition := client.Preconditions{UID: &configMap.UID, ResourceVersion: &configMap.ResourceVersion}
	err := client.IgnoreNotFound(c.client.Delete(ctx, configMap, precondition))
	if err != nil {
		return fmt.Errorf("removing ConfigMap %s: %w", client.ObjectKeyFromObject(configMap), err)
	}
	return nil
}

// appliedKeys are those keys of a ConfigMap that we applied; nil if there are none.
func appliedKeys(configMap *corev1.ConfigMap) (map[string]string, error) {
	if !exists(configMap) {
		return nil, nil
	}
	applied, err := extract(configMap, fieldManager)
	if err != nil {
		return nil, fmt.Errorf("reading our keys of ConfigMap %s: %w", client.ObjectKeyFromObject(configMap), err)
	}
	return applied.Data, nil
}

// extract is corev1ac.ExtractConfigMap for the fields that we apply. That one parses the schema of all kinds of Kubernetes
// first, which takes 21 MB and keeps 1.
func extract(configMap *corev1.ConfigMap, manager string) (*corev1ac.ConfigMapApplyConfiguration, error) {
	was := corev1ac.ConfigMap(configMap.Name, configMap.Namespace)
	at := slices.IndexFunc(configMap.ManagedFields, func(e metav1.ManagedFieldsEntry) bool {
		return e.Manager == manager && e.Operation == metav1.ManagedFieldsOperationApply && e.Subresource == "" && e.FieldsV1 != nil
	})
	if at < 0 {
		return was, nil
	}
	var owned struct {
		Data     map[string]any `json:"f:data"`
		Metadata struct {
			Labels      map[string]any `json:"f:labels"`
			Annotations map[string]any `json:"f:annotations"`
		} `json:"f:metadata"`
	}
	if err := json.NewDecoder(configMap.ManagedFields[at].FieldsV1.GetRawReader()).Decode(&owned); err != nil {
		return nil, fmt.Errorf("reading the managed fields of %s: %w", manager, err)
	}
	was.WithData(ownedOf(configMap.Data, owned.Data)).WithLabels(ownedOf(configMap.Labels, owned.Metadata.Labels))
	return was.WithAnnotations(ownedOf(configMap.Annotations, owned.Metadata.Annotations)), nil
}

// ownedOf are the entries of a map that managed fields list.
func ownedOf(all map[string]string, owned map[string]any) map[string]string {
	entries := map[string]string{}
	for field := range owned {
		key, _ := strings.CutPrefix(field, "f:")
		if value, found := all[key]; found {
			entries[key] = value
		}
	}
	return entries
}

func exists(configMap *corev1.ConfigMap) bool { return configMap.ResourceVersion != "" }

func contains(all, some map[string]string) bool {
	for key, data := range some {
		if found, isThere := all[key]; !isThere || found != data {
			return false
		}
	}
	return true
}

func selectKeys(all map[string]string, names []string) map[string]string {
	selected := make(map[string]string, len(names))
	for _, name := range names {
		if data, found := all[name]; found {
			selected[name] = data
		}
	}
	return selected
}

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
