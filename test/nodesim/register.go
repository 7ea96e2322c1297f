// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// labelConfig names the configuration of the device plugin.
const labelConfig = "nvidia.com/device-plugin.config"

// register makes sure that the Node exists, as a kubelet does when it starts.
func (k *kubelet) register(ctx context.Context) (*corev1.Node, error) {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: k.Name, Labels: k.registrationLabels()},
		Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.37.1"}},
	}
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
		corev1.LabelHostname: m.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64", nvidia.LabelPresent: "true",
	}
	maps.Copy(labels, m.Labels)
	return labels
}

// labelNode sets the labels of the GPU Operator after an event, unless it runs NVIDIA's DRA driver for a GPUCluster. From
// a node that has opted out it removes them, also those that a user sets.
func (d *discovery) labelNode(ctx context.Context, node *corev1.Node) error {
	if node.Labels[nvidia.LabelDeploy+"dra-driver"] != "" {
		d.labelled = nvidia.Event{}
		return nil
	}
	inventory, err := d.Inventory(ctx)
	if err != nil {
		return nil //nolint:nilerr // GPU Feature Discovery leaves its labels, and the kubelet and the DaemonSets work on
	}
	capable := migCapable(inventory.Devices)
	event := nvidia.EventOf(node, "", capable)
	if event == d.labelled && nvidia.Deploys(node.Labels) {
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
	return relabel(ctx, c, node, func(labels map[string]string) { nvidia.LabelForClusterPolicy(labels, migCapable, "") })
}

// relabel changes the labels of a node.
func relabel(ctx context.Context, c client.Client, node *corev1.Node, change func(labels map[string]string)) error {
	base := node.DeepCopy()
	if change(node.Labels); maps.Equal(node.Labels, base.Labels) {
		return nil
	}
	if err := c.Patch(ctx, node, client.MergeFrom(base)); err != nil {
		return fmt.Errorf("labelling node %s: %w", node.Name, err)
	}
	return nil
}

func migCapable(gpus []gpu.Device) bool {
	return slices.ContainsFunc(gpus, func(d gpu.Device) bool { return d.MIGCapable })
}

// featureLabels are the labels of GPU Feature Discovery that say how the GPUs are shared (internal/lm).
func (d *discovery) featureLabels(gpus []gpu.Device) (map[string]*string, error) {
	labels := map[string]*string{"nvidia.com/mig.capable": new(strconv.FormatBool(migCapable(gpus)))}
	if len(gpus) == 0 {
		return labels, nil
	}
	config, strategy := d.loaded()
	capable, err := nvidia.MPSCapable(config, func() []gpu.Device { return gpus })
	if err != nil {
		return nil, err
	}
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
	labels["nvidia.com/gpu.sharing-strategy"] = new(string(config.Sharing.SharingStrategy()))
	labels["nvidia.com/mps.capable"] = new(strconv.FormatBool(capable))
	labels["nvidia.com/mig.strategy"] = nil
	if strategy != spec.MigStrategyNone {
		labels["nvidia.com/mig.strategy"] = &strategy
	}
	return labels, nil
}
