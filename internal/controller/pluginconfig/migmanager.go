// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"cmp"
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// NVIDIA's mig-manager reads one key, config.yaml, of the ConfigMap that spec.migManager.config names. Where a policy
// asks for it that is ours, so that one ConfigMap serves both of NVIDIA's programs; the configurations that were there
// before are copied first, since nodes that no policy governs go on naming them.

// builtIn is the ConfigMap of the GPU Operator that mig-manager reads unless it is told otherwise.
const builtIn = "default-mig-parted-config"

func managerPath() []string     { return []string{"spec", "migManager", "config"} }
func managerNamePath() []string { return append(managerPath(), "name") }

// readsOurs says that the ClusterPolicy makes mig-manager read our ConfigMap.
func readsOurs(policy *unstructured.Unstructured) bool {
	return stringAt(policy, managerNamePath()...) == ConfigMapName
}

// noManager says why mig-manager cannot be asked for anything; empty: it can.
func noManager(policy *unstructured.Unstructured, keys map[string]string) string {
	if why := clusterpolicy.NoMIGManager(policy); why != "" {
		return why
	}
	if _, taken := keys[migmanager.FileKey]; taken {
		return fmt.Sprintf("the ConfigMap of device-plugin configurations that was there before has a key %s, which mig-manager "+
			"would read; give that configuration another name", migmanager.FileKey)
	}
	return ""
}

// ConfigureMIG points mig-manager at our ConfigMap, after the configurations that it read before were copied there. It
// comes after Configure, and reports whether it changed the ClusterPolicy.
func (c *Configurer) ConfigureMIG(ctx context.Context, o *Observed) (bool, error) {
	if o.clusterPolicy == nil {
		return false, nil
	}
	return c.retry(ctx, o, func() (bool, error) { return c.configureMIG(ctx, o) })
}

func (c *Configurer) configureMIG(ctx context.Context, o *Observed) (bool, error) {
	if o.NoMIGManager != "" || o.MIGReady || !o.Ready {
		return false, nil
	}
	_, filed := o.Applied[migmanager.FileKey]
	if _, copied := o.Copied[migmanager.FileKey]; !filed && copied && readsOurs(o.clusterPolicy) {
		return false, nil // the decision writes it, as often as it may
	}
	if !filed {
		file, err := c.fileBefore(ctx, o)
		if err != nil {
			return false, err
		}
		keys := maps.Clone(o.Applied)
		keys[migmanager.FileKey] = file
		if _, err := c.writeKeys(ctx, o, keys); err != nil {
			return false, err
		}
	}
	want := o.clusterPolicy.DeepCopy()
	if err := unstructured.SetNestedField(want.Object, ConfigMapName, managerNamePath()...); err != nil {
		return false, fmt.Errorf("pointing mig-manager at ConfigMap %s: %w", o.ConfigMap, err)
	}
	return c.patch(ctx, o.clusterPolicy, want)
}

// RestoreMIG lets mig-manager read again what it read before us. It reports whether it changed the ClusterPolicy.
func (c *Configurer) RestoreMIG(ctx context.Context, o *Observed) (bool, error) {
	if o.clusterPolicy == nil {
		return false, nil
	}
	return c.retry(ctx, o, func() (bool, error) { return c.restoreMIG(ctx, o) })
}

func (c *Configurer) restoreMIG(ctx context.Context, o *Observed) (bool, error) {
	if !readsOurs(o.clusterPolicy) {
		return false, nil
	}
	want := o.clusterPolicy.DeepCopy()
	if err := restoreManager(want, o.baseline); err != nil {
		return false, fmt.Errorf("putting spec.migManager.config of ClusterPolicy %s back: %w", want.GetName(), err)
	}
	return c.patch(ctx, o.clusterPolicy, want)
}

// restoreManager restores spec.migManager.config, unless another controller has changed it since.
func restoreManager(policy *unstructured.Unstructured, b baseline) error {
	if !readsOurs(policy) {
		return nil
	}
	path := managerPath()
	unstructured.RemoveNestedField(policy.Object, path...)
	if b.MIGManager == nil {
		if parent, _, err := unstructured.NestedMap(policy.Object, path[:2]...); err == nil && len(parent) == 0 {
			unstructured.RemoveNestedField(policy.Object, path[:2]...)
		}
		return nil
	}
	return unstructured.SetNestedMap(policy.Object, b.MIGManager.fields(), managerPath()...)
}

// fileBefore is the file that mig-manager read before; one without configurations if there was none.
func (c *Configurer) fileBefore(ctx context.Context, o *Observed) (string, error) {
	name := builtIn
	if b := o.baseline.MIGManager; b != nil && b.Name != nil {
		name = cmp.Or(*b.Name, builtIn)
	}
	before, key := &corev1.ConfigMap{}, types.NamespacedName{Namespace: o.ConfigMap.Namespace, Name: name}
	if err := c.reader.Get(ctx, key, before); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("reading ConfigMap %s, which NVIDIA's mig-manager reads: %w", key, err)
	}
	configs, err := migmanager.Parse(before.Data[migmanager.FileKey])
	if err != nil { // mig-manager did not accept it either
		configs = map[string]string{}
	}
	return migmanager.File(configs), nil
}
