// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
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
