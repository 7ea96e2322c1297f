// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// The node that NVIDIA's DRA driver serves, which pod runs there, and one that asks for what no node offers.
const (
	draNode      = "gpu-a30-dra"
	draNamespace = "nvidia-dra-driver-gpu"
	draPod       = "on-dra"
	draResource  = "nvidia.com/mig-1g.6gb"
	unoffered    = "test/demo/unoffered.yaml"
)

// draLabels are those by which NVIDIA's DRA driver serves a node, and its device plugin does not.
func draLabels(node string) map[string]string {
	if node != draNode {
		return nil
	}
	return map[string]string{"example.com/gpu-stack": "dra", "nvidia.com/gpu.deploy.device-plugin": "false"}
}

// installDRADriver installs NVIDIA's DRA driver, as far as its chart matters.
func (d *demo) installDRADriver(ctx context.Context) error {
	set, class := nodesim.NewDRADriver(draNamespace, map[string]string{"example.com/gpu-stack": "dra"})
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: draNamespace}}
	for _, o := range append(nodesim.NewDRAAccess(draNamespace), namespace, set, class) {
		if err := d.cluster.Client.Create(ctx, o); err != nil {
			return fmt.Errorf("installing NVIDIA's DRA driver: %w", err)
		}
	}
	return nil
}

// ofDRA lists the objects of a kind of resource.k8s.io.
func (s *site) ofDRA(ctx context.Context, kind string) ([]unstructured.Unstructured, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: kind + "List"})
	if err := s.cluster.Client.List(ctx, list); err != nil {
		return nil, fmt.Errorf("reading %ss: %w", kind, err)
	}
	return list.Items, nil
}

// published is what NVIDIA's DRA driver publishes of a node, by resource.
func (s *site) published(ctx context.Context, node string) (map[string]int64, error) {
	all, err := s.ofDRA(ctx, "ResourceSlice")
	if err != nil {
		return nil, err
	}
	var its []dra.Slice
	for i := range all {
		if name, _, _ := unstructured.NestedString(all[i].Object, "spec", "nodeName"); name == node {
			its = append(its, dra.SliceOf(all[i].Object))
		}
	}
	pool := dra.PoolOf(its)
	return pool.Published(), nil
}

// snapshotDRA adds what NVIDIA's DRA driver publishes, and the classes and taints of devices.
func (s *site) snapshotDRA(ctx context.Context, into snapshot) error {
	for _, kind := range []string{"ResourceSlice", "DeviceClass", "DeviceTaintRule"} {
		all, err := s.ofDRA(ctx, kind)
		if err != nil {
			return err
		}
		for i := range all {
			into.put(kind+" "+all[i].GetName(), all[i].Object["spec"])
		}
	}
	return nil
}

// askForShares lets two pods ask for shares: one gets it, on the node of NVIDIA's DRA driver as on any other, and one
// asks for what no node offers.
func (d *demo) askForShares(ctx, _ context.Context, _ *sync.WaitGroup) error {
	d.narration.chapter("Teams ask for shares in resources.limits of their pods; why says which a pod has, or why none")
	if err := d.startOnDRA(ctx); err != nil {
		return err
	}
	if _, err := d.askKubectl(ctx, "apply", "-f", unoffered); err != nil {
		return err
	}
	d.narration.say("Two pods: %s asks for %s: 1, unoffered for nvidia.com/mig-4g.20gb: 1.", draPod, draResource)
	if err := d.showKubectl(ctx, answer, "gpusharing", "why", draPod); err != nil {
		return err
	}
	return d.showKubectl(ctx, answer, "gpusharing", "why", "unoffered")
}

// startOnDRA starts a pod that requests an instance as it would beside the device plugin.
func (d *demo) startOnDRA(ctx context.Context) error {
	one := corev1.ResourceList{draResource: resource.MustParse("1")}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: draPod},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "example.invalid/main", Resources: corev1.ResourceRequirements{Limits: one, Requests: one},
		}}},
	}
	err := until(ctx, func() (bool, error) {
		why, err := (&nodesim.DRAScheduler{Client: d.cluster.Client}).Schedule(ctx, pod, draNode)
		return why == "", err
	})
	if err != nil {
		return fmt.Errorf("scheduling pod %s: %w", draPod, err)
	}
	err = until(ctx, func() (bool, error) { // until its holder is reported, which why names
		node := &v1alpha1.GPUNode{}
		err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: draNode}, node)
		return slices.ContainsFunc(node.Status.Devices, func(g v1alpha1.DeviceStatus) bool { return len(g.Holders) > 0 }), err
	})
	if err != nil {
		return fmt.Errorf("starting pod %s: %w", draPod, err)
	}
	return nil
}

// endOnDRA ends the pod. Nothing here plays the controller of Kubernetes that deletes the claim with its pod.
func (d *demo) endOnDRA(ctx, _ context.Context, _ *sync.WaitGroup) error {
	if _, err := d.askKubectl(ctx, "delete", "pod", draPod, "unoffered"); err != nil {
		return err
	}
	return d.cluster.Client.DeleteAllOf(ctx, &resourcev1.ResourceClaim{}, client.InNamespace("default"))
}
