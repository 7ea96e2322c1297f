// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// clusterPolicy is what of the ClusterPolicy the DaemonSets depend on.
type clusterPolicy struct {
	CDI struct {
		// Enabled is true if it is unset.
		Enabled *bool `json:"enabled"`
		// NRI lets a plugin of the container runtime give NVIDIA's pods the driver, in place of a runtime class.
		NRI bool `json:"nriPluginEnabled"`
	} `json:"cdi"`
	Daemonsets struct {
		Tolerations   []corev1.Toleration `json:"tolerations"`
		RollingUpdate struct {
			MaxUnavailable string `json:"maxUnavailable"`
		} `json:"rollingUpdate"`
	} `json:"daemonsets"`
	DevicePlugin struct {
		toggle
		Config struct {
			Name    string `json:"name"`
			Default string `json:"default"`
		} `json:"config"`
		MPS struct {
			Root string `json:"root"`
		} `json:"mps"`
		Env []corev1.EnvVar `json:"env"`
	} `json:"devicePlugin"`
	GFD struct {
		toggle
		Env []corev1.EnvVar `json:"env"`
	} `json:"gfd"`
	DCGM               toggle `json:"dcgm"`
	DCGMExporter       toggle `json:"dcgmExporter"`
	NodeStatusExporter toggle `json:"nodeStatusExporter"`
	MIGManager         struct {
		toggle
		Config struct {
			Name    string `json:"name"`
			Default string `json:"default"`
		} `json:"config"`
	} `json:"migManager"`
	MIG struct {
		Strategy string `json:"strategy"`
	} `json:"mig"`
}

// toggle turns an operand on or off.
type toggle struct {
	Enabled *bool `json:"enabled"`
}

// enabled reports whether the operand is on. The API's default is on.
func (t toggle) enabled() bool { return t.Enabled == nil || *t.Enabled }

// cdi reports whether devices are handed out by CDI, which is the default.
func (p *clusterPolicy) cdi() bool { return p.CDI.Enabled == nil || *p.CDI.Enabled }

func parsePolicy(found *unstructured.Unstructured) (*clusterPolicy, error) {
	p := &clusterPolicy{}
	spec, err := json.Marshal(found.Object["spec"])
	if err == nil {
		err = json.Unmarshal(spec, p)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the ClusterPolicy: %w", err)
	}
	if p.DevicePlugin.MPS.Root == "" {
		p.DevicePlugin.MPS.Root = "/run/nvidia/mps"
	}
	if p.Daemonsets.Tolerations == nil { // as the operator's own manifests have it
		p.Daemonsets.Tolerations = []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
	}
	if p.Daemonsets.RollingUpdate.MaxUnavailable == "" {
		p.Daemonsets.RollingUpdate.MaxUnavailable = "1"
	}
	return p, nil
}
