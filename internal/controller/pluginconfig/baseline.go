// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"encoding/json"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

// baseline is what a ClusterPolicy said before it was pointed at us. It lies as annotation gpusharing.io/baseline on
// our ConfigMap, written before the ClusterPolicy is, and as a copy on the ClusterPolicy. What a user changes
// afterwards to anything but our own values is recorded in turn: it is what they want once we are gone.
type baseline struct {
	ClusterPolicy string    `json:"clusterPolicy"`
	UID           types.UID `json:"uid"`
	// Config is spec.devicePlugin.config; nil if there was none.
	Config *pluginConfig `json:"config,omitempty"`
	// MIGStrategy is spec.mig.strategy; nil if there was none.
	MIGStrategy *string `json:"migStrategy,omitempty"`
	// MIGManager is spec.migManager.config; nil if there was none.
	MIGManager *pluginConfig `json:"migManager,omitempty"`
	// Adopted says that the ConfigMap which Config names was read with MIGStrategy in force, and Keys copied from it.
	Adopted bool `json:"adopted,omitempty"`
	// Keys are those keys of our ConfigMap.
	Keys []string `json:"keys,omitempty"`
	// Overruled are the field managers that reverted what we had set in the ClusterPolicy, of late, and were overruled.
	Overruled map[string]overruling `json:"overruled,omitempty"`
	// Revision counts the changes: of several copies the one with the highest counts.
	Revision int64 `json:"revision,omitempty"`
}

// pluginConfig is spec.devicePlugin.config or spec.migManager.config.
type pluginConfig struct {
	Name    *string `json:"name,omitempty"`
	Default *string `json:"default,omitempty"`
}

func (c *pluginConfig) fields() map[string]any {
	fields := map[string]any{}
	if c.Name != nil {
		fields["name"] = *c.Name
	}
	if c.Default != nil {
		fields["default"] = *c.Default
	}
	return fields
}

// configMap is the name of the ConfigMap that the device plugin read; empty if it read none.
func (b baseline) configMap() string {
	if b.Config == nil || b.Config.Name == nil {
		return ""
	}
	return *b.Config.Name
}

// key is the key that nodes without a label used; empty if they used none.
func (b baseline) key() string {
	if b.Config == nil || b.Config.Default == nil {
		return ""
	}
	return *b.Config.Default
}

func (b baseline) strategy() string {
	if b.MIGStrategy == nil {
		return ""
	}
	return *b.MIGStrategy
}

// String is the annotation.
func (b baseline) String() string {
	data, err := json.Marshal(b)
	if err != nil {
		return "" // cannot happen: strings only
	}
	return string(data)
}

// recorded is the baseline of a ClusterPolicy as the latest of the annotations gpusharing.io/baseline has it. Those of
// another ClusterPolicy do not count, unless this one was restored from a copy that was taken while the operator was in
// charge: then it holds the operator's values, and the record is all that tells what was there before.
func recorded(policy *unstructured.Unstructured, annotations ...string) baseline {
	latest := baseline{Revision: -1}
	for _, annotation := range annotations {
		var b baseline
		if err := json.Unmarshal([]byte(annotation), &b); err != nil {
			continue
		}
		restored := b.ClusterPolicy == policy.GetName() && stringAt(policy, configNamePath()...) == ConfigMapName
		if (b.UID == policy.GetUID() || restored) && b.Revision > latest.Revision {
			latest = b
		}
	}
	latest.ClusterPolicy, latest.UID, latest.Revision = policy.GetName(), policy.GetUID(), max(latest.Revision, 0)
	return latest
}

// remember returns the baseline with all that the ClusterPolicy says now and that is not our own doing.
func (b baseline) remember(policy *unstructured.Unstructured) baseline {
	before := b
	if stringAt(policy, configNamePath()...) != ConfigMapName {
		b.Config = configAt(policy, configPath()...)
	}
	if stringAt(policy, managerNamePath()...) != ConfigMapName {
		b.MIGManager = configAt(policy, managerPath()...)
	}
	if strategy := pointerAt(policy, strategyPath()...); strategy != nil {
		b.MIGStrategy = strategy
	}
	if b.configMap() != before.configMap() || b.strategy() != before.strategy() {
		b.Adopted, b.Keys = false, nil
	}
	return b
}

func configAt(policy *unstructured.Unstructured, path ...string) *pluginConfig {
	if _, found, err := unstructured.NestedMap(policy.Object, path...); !found || err != nil {
		return nil
	}
	return &pluginConfig{
		Name:    pointerAt(policy, slices.Concat(path, []string{"name"})...),
		Default: pointerAt(policy, slices.Concat(path, []string{"default"})...),
	}
}

// keys are the keys that nodes which no policy governs need, given the content of the ConfigMap that was there before,
// and the one of them for nodes without a label, whose MIG strategy is given unless a user has chosen that key. Those
// of both strategies are there at any time: while one takes the other's place, pods that were started with the first
// look for it until NVIDIA's operator has replaced them.
func (b baseline) keys(before map[string]string, unlabelled string) (keys map[string]string, defaultKey string) {
	keys = make(map[string]string, len(before)+1)
	for key, data := range before {
		adopted, err := deviceplugin.Adopt(data, b.strategy())
		if err != nil {
			adopted = data // the plugin did not accept it before either
		}
		keys[key] = adopted
	}
	if _, found := keys[b.key()]; found {
		return keys, b.key()
	}
	for _, strategy := range []string{b.strategy(), deviceplugin.StrategyMixed} {
		config := deviceplugin.Default(strategy)
		keys[config.Key] = config.Data
	}
	return keys, deviceplugin.Default(unlabelled).Key
}

// standAloneKeys are the keys that nodes without a label need once there are others in the ConfigMap. NVIDIA's chart
// makes such a node use the key "default" or, if there is only one key, that one.
func standAloneKeys(theirs, ours map[string]string) map[string]string {
	const named = "default"
	if data, found := ours[named]; found {
		return map[string]string{named: data}
	}
	if _, found := theirs[named]; found || len(theirs) > 1 {
		return nil
	}
	for _, data := range theirs {
		return map[string]string{named: data}
	}
	return map[string]string{named: deviceplugin.Default("").Data}
}
