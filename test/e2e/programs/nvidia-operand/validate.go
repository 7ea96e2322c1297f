// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// program is this one, in its image.
	program      = "/nvidia-operand"
	workloadName = "nvidia-cuda-validator"
	// patience is how long the validator waits for its workload.
	patience = 5 * time.Minute
	poll     = time.Second
)

// validate replaces the workload that an earlier validation left on the node, and waits until the new one has succeeded
// (NVIDIA/gpu-operator cmd/nvidia-validator/main.go, CUDA.runWorkload).
func validate(ctx context.Context) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	namespace, node := os.Getenv("OPERATOR_NAMESPACE"), os.Getenv("NODE_NAME")
	pods := client.CoreV1().Pods(namespace)
	old, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "app=" + workloadName, FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return fmt.Errorf("listing workloads: %w", err)
	}
	for i := range old.Items {
		err := pods.Delete(ctx, old.Items[i].Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("deleting pod %s: %w", old.Items[i].Name, err)
		}
	}
	set, err := client.AppsV1().DaemonSets(namespace).Get(ctx, "nvidia-operator-validator", metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading the validator's DaemonSet: %w", err)
	}
	pod, err := pods.Create(ctx, workload(node, set), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("creating the workload: %w", err)
	}
	return wait.PollUntilContextTimeout(ctx, poll, patience, true, func(ctx context.Context) (bool, error) {
		now, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		return err == nil && now.Status.Phase == corev1.PodSucceeded, err
	})
}

// workload is the pod that computes: in an init container, on all GPUs of the node and without asking for any.
// The owner of the validator's DaemonSet owns it.
func workload(node string, set *appsv1.DaemonSet) *corev1.Pod {
	validator := &set.Spec.Template.Spec
	image := validator.Containers[0].Image
	container := func(name string, command ...string) corev1.Container {
		return corev1.Container{
			Name: name, Image: image, Command: command, ImagePullPolicy: corev1.PullIfNotPresent,
			SecurityContext: &corev1.SecurityContext{Privileged: new(true)},
		}
	}
	computes := container("cuda-validation", program, "workload")
	computes.Env = []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"}}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: workloadName + "-", Labels: map[string]string{"app": workloadName}, OwnerReferences: set.OwnerReferences,
			Annotations: map[string]string{"nvidia.cdi.k8s.io/container.cuda-validation": "management.nvidia.com/gpu=all"},
		},
		Spec: corev1.PodSpec{
			NodeName: node, Tolerations: validator.Tolerations, RestartPolicy: corev1.RestartPolicyOnFailure,
			ServiceAccountName: validator.ServiceAccountName, RuntimeClassName: validator.RuntimeClassName,
			InitContainers: []corev1.Container{computes},
			Containers:     []corev1.Container{container(workloadName, program, "done")},
		},
	}
}
