// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// GPUCluster is NVIDIA's GPU Operator v26.7.0 where a GPUCluster has it run the DRA driver: its labels on nodes, the
// DaemonSets that they start and stop, and the DeviceClass of whole GPUs. Sources:
// controllers/nodelabeling_controller.go, manifests/state-dra-driver and manifests/state-dcgm-exporter of
// NVIDIA/gpu-operator.
type GPUCluster struct {
	Client    client.Client
	Namespace string

	mu    sync.Mutex
	swept map[string]int
}

// draApp is the label app of the driver's kubelet plugin there.
const draApp = "nvidia-dra-driver-kubelet-plugin"

// clusterDeployed are the programs that run on a node of a GPUCluster.
var clusterDeployed = []string{"driver", "dra-driver", "dra-validator", "dcgm-dra", "dcgm-exporter-dra"}

// policyOnly are the programs that only a ClusterPolicy has.
var policyOnly = []string{
	"device-plugin", "gpu-feature-discovery", "container-toolkit", "dcgm", "dcgm-exporter", "node-status-exporter", "operator-validator", "client", "mig-manager",
	"sandbox-device-plugin", "kata-sandbox-device-plugin", "sandbox-validator", "vfio-manager", "kata-manager", "cc-manager", "vgpu-device-manager",
}

// LabelForGPUCluster changes the labels of a node as the GPU Operator does for a GPUCluster, and returns those of a
// ClusterPolicy's programs, which it removes whatever their value. Where a label of its own programs has a value, it
// stays: k8s-driver-manager stops programs by it.
func LabelForGPUCluster(labels map[string]string) (swept []string) {
	for _, program := range policyOnly {
		if _, has := labels[deployPrefix+program]; has {
			swept = append(swept, deployPrefix+program)
			delete(labels, deployPrefix+program)
		}
	}
	for _, program := range clusterDeployed {
		switch {
		case labels[labelPresent] != "true":
			delete(labels, deployPrefix+program)
		case labels[deployPrefix+program] == "":
			labels[deployPrefix+program] = "true"
		}
	}
	return swept
}

// Run reconciles until the context ends.
func (o *GPUCluster) Run(ctx context.Context, interval time.Duration) {
	for ctx.Err() == nil {
		_ = o.Reconcile(ctx) // the next one tries again
		select {
		case <-ctx.Done():
		case <-time.After(interval):
		}
	}
}

// Swept is how often each label was removed from a node that had it.
func (o *GPUCluster) Swept() map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.swept)
}

// Reconcile reconciles once. Beside a ClusterPolicy it refuses the GPUCluster and deploys nothing.
func (o *GPUCluster) Reconcile(ctx context.Context) error {
	const exporter = "nvidia-dcgm-exporter-dra"
	policies, err := listed(ctx, o.Client, "v1", "ClusterPolicy")
	if err != nil {
		return err
	}
	if len(policies) > 0 {
		return o.report(ctx, map[string]any{"state": "notReady", "namespace": o.Namespace, "conditions": []any{map[string]any{
			"type": "Error", "status": "True", "reason": "PrerequisiteNotMet", "lastTransitionTime": policies[0].GetCreationTimestamp().UTC().Format(time.RFC3339),
			"message": "A ClusterPolicy CR exists; a ClusterPolicy CR and GPUCluster CR may not exist at the same time",
		}}})
	}
	for _, object := range []client.Object{o.class(), o.daemonSet(draApp, "dra-driver", "gpus"), o.daemonSet(exporter, "dcgm-exporter-dra", exporter)} {
		if err := o.Client.Create(ctx, object); client.IgnoreAlreadyExists(err) != nil {
			return fmt.Errorf("creating %s: %w", object.GetName(), err)
		}
	}
	if err := o.report(ctx, map[string]any{"state": "ready", "namespace": o.Namespace}); err != nil {
		return err
	}
	nodes := &corev1.NodeList{}
	if err := o.Client.List(ctx, nodes); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	for i := range nodes.Items {
		if err := o.label(ctx, &nodes.Items[i]); err != nil && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}

// report tells in the status of the GPUCluster where the GPU Operator runs, and whether it follows it.
func (o *GPUCluster) report(ctx context.Context, status map[string]any) error {
	clusters, err := listed(ctx, o.Client, "v1alpha1", "GPUCluster")
	if err != nil {
		return err
	}
	for i := range clusters {
		c := &clusters[i]
		if state, _, _ := unstructured.NestedString(c.Object, "status", "state"); state == status["state"] {
			continue
		}
		base := c.DeepCopy()
		c.Object["status"] = status
		if err := o.Client.Status().Patch(ctx, c, client.MergeFrom(base)); err != nil {
			return fmt.Errorf("reporting GPUCluster %s: %w", c.GetName(), err)
		}
	}
	return nil
}

func (o *GPUCluster) label(ctx context.Context, n *corev1.Node) error {
	base := n.DeepCopy()
	if n.Labels[labelPresent] != "true" {
		return nil
	}
	o.count(LabelForGPUCluster(n.Labels))
	if maps.Equal(n.Labels, base.Labels) {
		return nil
	}
	if err := o.Client.Patch(ctx, n, client.MergeFrom(base)); err != nil {
		return fmt.Errorf("labelling node %s: %w", n.Name, err)
	}
	return nil
}

func (o *GPUCluster) count(swept []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.swept == nil {
		o.swept = map[string]int{}
	}
	for _, name := range swept {
		o.swept[name]++
	}
}

// class serves no extended resource.
func (o *GPUCluster) class() *resourcev1.DeviceClass {
	_, class := NewDRADriver(o.Namespace, nil)
	class.Spec.ExtendedResourceName = nil
	return class
}

func (o *GPUCluster) daemonSet(app, deploy, container string) *appsv1.DaemonSet {
	labels := map[string]string{"app": app}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: app},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					NodeSelector: map[string]string{deployPrefix + deploy: "true"},
					Containers:   []corev1.Container{{Name: container, Image: "example.invalid/simulated"}},
					Tolerations:  []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
				},
			},
		},
	}
}
