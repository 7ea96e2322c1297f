// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	spec "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Labels of NVIDIA's.
const (
	labelPresent   = "nvidia.com/gpu.present"
	labelConfig    = "nvidia.com/device-plugin.config"
	labelOptOut    = "nvidia.com/gpu.deploy.operands"
	deployPrefix   = "nvidia.com/gpu.deploy."
	labelMIGDeploy = deployPrefix + "mig-manager"
)

// register makes sure that the Node exists, as a kubelet does when it starts.
func (k *kubelet) register(ctx context.Context) (*corev1.Node, error) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: k.Name, Labels: k.registrationLabels()}}
	err := k.Client.Get(ctx, client.ObjectKeyFromObject(node), node)
	if apierrors.IsNotFound(err) {
		return k.create(ctx, node)
	}
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", k.Name, err)
	}
	return node, nil
}

func (k *kubelet) create(ctx context.Context, node *corev1.Node) (*corev1.Node, error) {
	if err := k.Client.Create(ctx, node); err != nil {
		return nil, fmt.Errorf("registering node %s: %w", k.Name, err)
	}
	// The API server taints a new node as not ready; the node controller would take that off again.
	base := node.DeepCopy()
	node.Spec.Taints = nil
	if err := k.Client.Patch(ctx, node, client.MergeFrom(base)); err != nil {
		return nil, fmt.Errorf("untainting the new node %s: %w", k.Name, err)
	}
	base = node.DeepCopy()
	amounts := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("512Gi"),
		corev1.ResourcePods: resource.MustParse("110"),
	}
	node.Status.Capacity, node.Status.Allocatable = amounts, amounts
	node.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "simulated",
		LastHeartbeatTime: metav1.NewTime(k.Clock.Now()), LastTransitionTime: metav1.NewTime(k.Clock.Now()),
	}}
	if err := k.Client.Status().Patch(ctx, node, client.MergeFrom(base)); err != nil {
		return nil, fmt.Errorf("reporting the new node %s ready: %w", k.Name, err)
	}
	return node, nil
}

func (m *machine) registrationLabels() map[string]string {
	labels := map[string]string{
		corev1.LabelHostname: m.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64", labelPresent: "true",
	}
	maps.Copy(labels, m.Labels)
	return labels
}

// labelEvent is what of a node makes the GPU Operator set its labels when it changes. It does not when a user removes
// a label that it has set (controllers/nodelabeling_controller.go, v26.7.0: getNodeLabelUpdateReasons).
type labelEvent struct {
	node                        types.UID
	present, operands, workload string
	migCapable                  bool
}

// labelNode sets the labels of the GPU Operator after such an event, unless it runs NVIDIA's DRA driver for a
// GPUCluster. From a node that has opted out it removes them, also those that a user sets.
func (d *discovery) labelNode(ctx context.Context, node *corev1.Node) error {
	if node.Labels[deployPrefix+"dra-driver"] != "" {
		d.labelled = labelEvent{}
		return nil
	}
	inventory, err := d.Inventory(ctx)
	if err != nil {
		return nil //nolint:nilerr // GPU Feature Discovery leaves its labels, and the kubelet and the DaemonSets work on
	}
	capable := migCapable(inventory.Devices)
	event := labelEvent{
		node: node.UID, present: node.Labels[labelPresent], operands: node.Labels[labelOptOut], workload: node.Labels["nvidia.com/gpu.workload.config"],
		migCapable: capable,
	}
	if event == d.labelled && event.operands != "false" {
		return nil
	}
	if err := setDeployLabels(ctx, d.Client, node, capable); err != nil {
		return err
	}
	d.labelled = event
	return nil
}

// setDeployLabels gives a node those labels that it has not.
func setDeployLabels(ctx context.Context, c client.Client, node *corev1.Node, migCapable bool) error {
	patch := deployLabels(node.Labels, migCapable)
	for key, value := range patch {
		if old, ok := node.Labels[key]; value != nil && ok && old == *value || value == nil && !ok {
			delete(patch, key)
		}
	}
	if len(patch) == 0 {
		return nil
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": patch}})
	if err != nil {
		return err
	}
	if err := c.Patch(ctx, node, client.RawPatch("application/merge-patch+json", body)); err != nil {
		return fmt.Errorf("labelling node %s: %w", node.Name, err)
	}
	return nil
}

// deployLabels is controllers/state_manager.go of the GPU Operator: a value that is there stays, what is missing or
// empty is set, and a node that opted out has none.
func deployLabels(have map[string]string, migCapable bool) map[string]*string {
	operands := []string{
		"driver", "gpu-feature-discovery", "container-toolkit", "device-plugin", "dcgm", "dcgm-exporter",
		"node-status-exporter", "operator-validator", "client",
	}
	if migCapable {
		operands = append(operands, "mig-manager")
	}
	patch := map[string]*string{}
	for _, operand := range operands {
		label := deployPrefix + operand
		switch {
		case have[labelOptOut] == "false":
			patch[label] = nil
		case have[label] == "":
			patch[label] = new("true")
		}
	}
	return patch
}

func migCapable(gpus []gpu.Device) bool {
	return slices.ContainsFunc(gpus, func(d gpu.Device) bool { return d.MIGCapable })
}

// featureLabels are the labels of GPU Feature Discovery that say how the GPUs are shared (internal/lm).
func (d *discovery) featureLabels(gpus []gpu.Device) map[string]*string {
	labels := map[string]*string{"nvidia.com/mig.capable": new(strconv.FormatBool(migCapable(gpus)))}
	if len(gpus) == 0 {
		return labels
	}
	config, strategy := d.loaded()
	sharing := config.Sharing.SharingStrategy()
	product := strings.ReplaceAll(gpus[0].Product, " ", "-")
	replicas := 1
	if resources := config.Sharing.ReplicatedResources(); resources != nil && len(resources.Resources) > 0 {
		replicas = resources.Resources[0].Replicas
		if !resources.RenameByDefault {
			product += "-SHARED"
		}
	}
	labels["nvidia.com/gpu.product"] = &product
	labels["nvidia.com/gpu.count"] = new(strconv.Itoa(len(gpus)))
	labels["nvidia.com/gpu.memory"] = new(strconv.FormatInt(gpus[0].MemoryMiB, 10))
	labels["nvidia.com/gpu.replicas"] = new(strconv.Itoa(replicas))
	labels["nvidia.com/gpu.sharing-strategy"] = new(string(sharing))
	labels["nvidia.com/mps.capable"] = new(strconv.FormatBool(sharing == spec.SharingStrategyMPS))
	labels["nvidia.com/mig.strategy"] = nil
	if strategy != spec.MigStrategyNone {
		labels["nvidia.com/mig.strategy"] = &strategy
	}
	return labels
}
