// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

const (
	deployPlugin, deployClient = LabelDeploy + "device-plugin", LabelDeploy + "client"
	migManager, noOperands     = LabelDeploy + "mig-manager", LabelDeploy + "operands"
	labelCapable, labelProduct = "nvidia.com/mig.capable", "nvidia.com/gpu.product"
	gpuLabel                   = "feature.node.kubernetes.io/pci-10de.present"
)

// TestLabels checks the labels that the stand-in writes against those of NVIDIA/gpu-operator v26.7.0,
// controllers/nodelabeling_controller.go and state_manager.go. An empty value says that the label is not there.
func TestLabels(t *testing.T) {
	onPCI := map[string]string{gpuLabel: "true"}
	for name, c := range map[string]struct {
		labels, want map[string]string
	}{
		"no GPU":              {nil, map[string]string{LabelPresent: "", deployPlugin: ""}},
		"a GPU":               {onPCI, map[string]string{LabelPresent: "true", deployPlugin: "true", deployClient: "true", migManager: "", LabelMIGConfig: ""}},
		"a GPU by its class":  {map[string]string{"feature.node.kubernetes.io/pci-0302_10de.present": "true"}, map[string]string{LabelPresent: "true"}},
		"a GPU that was":      {map[string]string{LabelPresent: "true", deployPlugin: "true", migManager: "true"}, map[string]string{LabelPresent: "false", deployPlugin: "", migManager: ""}},
		"no operands":         {with(onPCI, noOperands, "false"), map[string]string{LabelPresent: "true", deployPlugin: ""}},
		"stopped":             {with(onPCI, deployPlugin, "paused-for-mig-change"), map[string]string{deployPlugin: "paused-for-mig-change"}},
		"stopped before":      {with(onPCI, deployPlugin, ""), map[string]string{deployPlugin: "true"}},
		"capable of MIG":      {with(onPCI, labelCapable, "true"), map[string]string{migManager: "true", LabelMIGConfig: migDisabled}},
		"a product with MIG":  {with(onPCI, labelProduct, "NVIDIA-A100-SXM4-40GB"), map[string]string{migManager: "true"}},
		"incapable by label":  {with(onPCI, labelProduct, "NVIDIA-A100-SXM4-40GB", labelCapable, "false"), map[string]string{migManager: "", LabelMIGConfig: ""}},
		"a layout":            {with(onPCI, labelCapable, "true", LabelMIGConfig, "all-1g.5gb"), map[string]string{LabelMIGConfig: "all-1g.5gb"}},
		"no mig-manager, off": {with(onPCI, labelCapable, "true", migManager, "false"), map[string]string{migManager: "false"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := &clusterPolicy{}
			p.MIGManager.Config.Default = migDisabled
			got := labelled(c.labels, p)
			for key, want := range c.want {
				if got[key] != want {
					t.Errorf("label %s is %q, expected %q", key, got[key], want)
				}
			}
		})
	}
}

// TestLabelsOfAGPUCluster: those of the device plugin's programs go, whatever their value, and what stops a program of
// the GPUCluster stays.
func TestLabelsOfAGPUCluster(t *testing.T) {
	const deployDriver, validator = LabelDeploy + "dra-driver", LabelDeploy + "dra-validator"
	onPCI := map[string]string{gpuLabel: "true"}
	for name, c := range map[string]struct {
		labels, want map[string]string
	}{
		"no GPU": {map[string]string{deployClient: "true"}, map[string]string{LabelPresent: "", deployDriver: "", deployClient: ""}},
		"a GPU":  {onPCI, map[string]string{LabelPresent: "true", deployDriver: "true", validator: "true", deployPlugin: "", deployClient: ""}},
		"swept": {
			with(onPCI, deployClient, "paused-for-mig-change", deployPlugin, "true", migManager, "true"),
			map[string]string{deployClient: "", deployPlugin: "", migManager: ""},
		},
		"stopped": {with(onPCI, validator, "paused-for-driver-upgrade"), map[string]string{validator: "paused-for-driver-upgrade", deployDriver: "true"}},
		"empty":   {with(onPCI, validator, ""), map[string]string{validator: "true"}},
		"others": {
			with(onPCI, noOperands, "false", LabelDeploy+"vgpu-manager", "true"),
			map[string]string{deployDriver: "true", LabelDeploy + "vgpu-manager": "true"},
		},
		"a GPU gone": {map[string]string{LabelPresent: "true", deployDriver: "true"}, map[string]string{LabelPresent: "false", deployDriver: ""}},
	} {
		t.Run(name, func(t *testing.T) {
			got := clusterLabelled(c.labels)
			for key, want := range c.want {
				if got[key] != want {
					t.Errorf("label %s is %q, expected %q", key, got[key], want)
				}
			}
		})
	}
}

func TestNoLayoutWithoutDefault(t *testing.T) {
	labels := map[string]string{gpuLabel: "true", labelCapable: "true"}
	for name, change := range map[string]func(*clusterPolicy){
		"mig-manager off":   func(p *clusterPolicy) { p.MIGManager.Config.Default, p.MIGManager.Enabled = migDisabled, new(false) },
		"no default layout": func(*clusterPolicy) {},
	} {
		p := &clusterPolicy{}
		change(p)
		if got := labelled(labels, p)[LabelMIGConfig]; got != "" {
			t.Errorf("%s: label %s is %q, expected none", name, LabelMIGConfig, got)
		}
	}
}

// TestLabelsAreSetByEvents: a label that a user removes stays away until something else changes, and one that a user
// sets on a node without operands goes at once.
func TestLabelsAreSetByEvents(t *testing.T) {
	o, policy := &Operator{events: map[string]nvidia.Event{}}, &unstructured.Unstructured{Object: map[string]any{}}
	policy.SetGeneration(1)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{gpuLabel: "true"}}}
	pass := func() {
		for range 3 {
			node.Labels = o.labelledByEvents(node, policy, &clusterPolicy{})
		}
	}
	expect := func(key, value, when string) {
		t.Helper()
		if got := node.Labels[key]; got != value {
			t.Errorf("%s: label %s is %q, expected %q", when, key, got, value)
		}
	}
	pass()
	expect(deployPlugin, "true", "a new node")
	delete(node.Labels, deployPlugin)
	pass()
	expect(deployPlugin, "", "removed by a user")
	policy.SetGeneration(2)
	pass()
	expect(deployPlugin, "true", "with another ClusterPolicy")
	node.Labels[noOperands], node.Labels[deployClient] = "false", "true"
	pass()
	expect(deployClient, "", "without operands")
	node.Labels[deployClient] = "true"
	pass()
	expect(deployClient, "", "set by a user")
	delete(node.Labels, noOperands)
	pass()
	expect(deployClient, "true", "with operands again")
}

// with returns labels with others, given as keys and values.
func with(labels map[string]string, more ...string) map[string]string {
	all := maps.Clone(labels)
	for i := 0; i < len(more); i += 2 {
		all[more[i]] = more[i+1]
	}
	return all
}
