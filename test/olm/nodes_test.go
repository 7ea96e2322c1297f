// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	mpsfake "github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// The nodes. On the first one all pods of Deployments run.
const (
	nodeT4   = "gpu-t4"
	nodeA100 = "gpu-a100"
)

func (s *site) startNodes() {
	s.t.Helper()
	for name, model := range map[string]sim.Model{nodeT4: sim.T4, nodeA100: sim.A100} {
		hardware := sim.New(model)
		node := nodesim.New(nodesim.Options{
			Name: name, Client: s.client, Clock: clock.RealClock{}, Inventory: hardware.Observe, Tell: s.tell,
			Start: func(ctx context.Context, pod *corev1.Pod) (nodesim.Program, error) {
				return s.startPod(ctx, pod, hardware)
			},
			StatusPeriod: time.Second, RestartDelay: time.Second, RetryDelay: time.Second, ProjectionDelay: time.Second,
		})
		s.Expect(node.ServePodResources(s.t.Context(), s.podResources(name))).To(Succeed())
		s.background(func(ctx context.Context) { node.Run(ctx, poll) })
	}
	s.background(func(ctx context.Context) { s.each(ctx, poll, func() error { return s.schedule(ctx) }) })
	for _, name := range []string{nodeT4, nodeA100} {
		s.Eventually(s.offers, wait, poll).WithArguments(name).Should(Equal(map[string]int64{"nvidia.com/gpu": 1}))
		node := object("v1", "Node", "", name)
		s.Eventually(func() (map[string]string, error) {
			err := s.client.Get(s.t.Context(), client.ObjectKeyFromObject(node), node)
			return node.GetLabels(), err
		}, wait, poll).Should(HaveKey("nvidia.com/gpu.product"), "what is compared in the end begins with its features")
	}
}

// podResources is the socket on which the kubelet of a node tells which pods hold its GPUs.
func (s *site) podResources(node string) string { return filepath.Join(s.dir, node+".sock") }

// tell logs what happens on the nodes, in a file.
func (s *site) tell(format string, args ...any) {
	file, err := s.root.OpenFile("nodes.log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		_, _ = fmt.Fprintf(file, format+"\n", args...)
		_ = file.Close()
	}
}

// offers is what a node offers of NVIDIA's resources.
func (s *site) offers(name string) (map[string]int64, error) {
	node := &corev1.Node{}
	if err := s.client.Get(s.t.Context(), types.NamespacedName{Name: name}, node); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	offered := map[string]int64{}
	for resource, quantity := range node.Status.Allocatable {
		if strings.HasPrefix(string(resource), "nvidia.com/") && !quantity.IsZero() {
			offered[string(resource)] = quantity.Value()
		}
	}
	return offered, nil
}

// schedule binds the pods of Deployments, and plays the node of the pods of Jobs.
func (s *site) schedule(ctx context.Context) error {
	pods := &corev1.PodList{}
	if err := s.client.List(ctx, pods, client.MatchingFields{"spec.nodeName": ""}); err != nil {
		return err
	}
	s.stopServing(pods.Items)
	for i := range pods.Items {
		pod := &pods.Items[i]
		owner := metav1.GetControllerOf(pod)
		switch {
		case owner == nil:
		case pod.DeletionTimestamp != nil: // no kubelet has it
			if err := s.client.Delete(ctx, pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
				return err
			}
		case owner.Kind == "ReplicaSet":
			binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: nodeT4}}
			err := s.client.SubResource("binding").Create(ctx, pod, binding)
			if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
				return fmt.Errorf("binding pod %s: %w", pod.Name, err)
			}
		case owner.Kind == "Job" && pod.Status.Phase == corev1.PodPending:
			if err := s.unpack(ctx, pod); err != nil {
				return fmt.Errorf("running pod %s: %w", pod.Name, err)
			}
		case owner.Kind == "CatalogSource" && pod.Status.Phase == corev1.PodPending:
			if err := s.serve(ctx, pod); err != nil {
				return fmt.Errorf("running pod %s: %w", pod.Name, err)
			}
		}
	}
	return nil
}

// stopServing stops the catalogs whose pods are gone.
func (s *site) stopServing(pods []corev1.Pod) {
	for uid, catalog := range s.serving {
		if !slices.ContainsFunc(pods, func(pod corev1.Pod) bool { return pod.UID == uid }) {
			catalog.Stop()
			delete(s.serving, uid)
		}
	}
}

// serve runs the pod with which OLM v0 serves a catalog: of the image that it names, the folder that it extracts.
func (s *site) serve(ctx context.Context, pod *corev1.Pod) error {
	extract := pod.Spec.InitContainers[1]
	root, known := s.catalogs[extract.Image]
	if !known {
		return fmt.Errorf("there is no image %s", extract.Image)
	}
	args := slices.Clone(pod.Spec.Containers[0].Args) // serve FOLDER
	args[1] = filepath.Join(root, strings.TrimPrefix(extract.Args[0], "--catalog.from="))
	p, err := s.run("opm", filepath.Join(s.bin, "opm"), nil, append(args, "--termination-log="+filepath.Join(s.dir, "termination"))...)
	if err != nil {
		return err
	}
	s.serving[pod.UID] = p
	s.t.Cleanup(p.Stop)
	before := pod.DeepCopy()
	pod.Status.Phase = corev1.PodRunning
	return s.client.Status().Patch(ctx, pod, client.MergeFrom(before))
}

// unpack runs the pod with which OLM v0 unpacks a bundle: what is in the image that it names, and opm with the account
// of the pod.
func (s *site) unpack(ctx context.Context, pod *corev1.Pod) error {
	container := &pod.Spec.Containers[0]
	kubeconfig, err := s.kubeconfigOf(ctx, pod, "")
	if err != nil {
		return err
	}
	folder, known := s.bundles[pod.Spec.InitContainers[1].Image]
	if _, err := os.Stat(folder); !known || err != nil {
		return fmt.Errorf("there is no image %s", pod.Spec.InitContainers[1].Image)
	}
	args := slices.Clone(container.Command[1:])
	for i, arg := range args {
		if arg == "/bundle/" {
			args[i] = folder + "/"
		}
	}
	var variables []string
	for _, e := range container.Env {
		variables = append(variables, e.Name+"="+e.Value)
	}
	p, err := s.run("unpack", filepath.Join(s.bin, "opm"), variables, append(args, "--kubeconfig="+kubeconfig)...)
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		p.Stop()
		return ctx.Err()
	}
	before := pod.DeepCopy()
	pod.Status.Phase = corev1.PodSucceeded
	if p.Failed() != nil {
		pod.Status.Phase = corev1.PodFailed
	}
	return s.client.Status().Patch(ctx, pod, client.MergeFrom(before))
}

// startPod runs the program of a pod of the operator, as a process of its manifest with its account, or the reconciler
// of the agent. Other pods are objects only.
func (s *site) startPod(ctx context.Context, pod *corev1.Pod, hardware gpu.Hardware) (nodesim.Program, error) {
	switch name := pod.Spec.Containers[0].Name; {
	case !strings.HasPrefix(pod.Spec.ServiceAccountName, "gpu-sharing-"):
		return nil, nil
	case name == "agent":
		return s.startAgent(ctx, pod, hardware)
	case name == "controller", name == "operands":
		return s.startProcess(ctx, pod)
	}
	return nil, nil
}

// startProcess runs the program of the controller's image.
func (s *site) startProcess(ctx context.Context, pod *corev1.Pod) (nodesim.Program, error) {
	container := &pod.Spec.Containers[0]
	address, err := nodesim.FreeAddress(ctx)
	if err != nil {
		return nil, err
	}
	kubeconfig, err := s.kubeconfigOf(ctx, pod, "")
	if err != nil {
		return nil, err
	}
	variables, err := s.variables(ctx, pod)
	if err != nil {
		return nil, err
	}
	var args []string
	for _, arg := range container.Args {
		name, value, _ := strings.Cut(arg, "=")
		switch name {
		case "--health-probe-bind-address":
			value = address
		case "--manifests":
			if value, err = s.volume(ctx, pod, value); err != nil {
				return nil, err
			}
		}
		if value != "" {
			name += "=" + value
		}
		args = append(args, name)
	}
	program := filepath.Join(s.bin, "controller")
	if !strings.HasPrefix(container.Image, s.registry+"/") {
		program = filepath.Join(s.bin, "previous", "controller")
	}
	p, err := s.run(container.Name, program, append(variables, "KUBECONFIG="+kubeconfig), args...)
	if err != nil {
		return nil, err
	}
	p.Health = "http://" + address + container.ReadinessProbe.HTTPGet.Path
	return p, nil
}

// kubeconfigOf is that of a pod's account, which must be there: nobody but OLM makes accounts here.
func (s *site) kubeconfigOf(ctx context.Context, pod *corev1.Pod, node string) (string, error) {
	account := types.NamespacedName{Namespace: pod.Namespace, Name: cmp.Or(pod.Spec.ServiceAccountName, "default")}
	if err := s.client.Get(ctx, account, &corev1.ServiceAccount{}); err != nil {
		return "", err
	}
	config, err := s.cluster.ConfigAs(ctx, env.Identity{Namespace: pod.Namespace, ServiceAccount: account.Name, Pod: pod.Name, Node: node})
	if err != nil {
		return "", err
	}
	file := filepath.Join(s.dir, pod.Name+".kubeconfig")
	return file, env.WriteKubeconfig(config, file)
}

// variables is the environment of the first container of a pod.
func (s *site) variables(ctx context.Context, pod *corev1.Pod) ([]string, error) {
	var all []string
	for _, e := range pod.Spec.Containers[0].Env {
		value := e.Value
		switch from := e.ValueFrom; {
		case from == nil:
		case from.FieldRef != nil && from.FieldRef.FieldPath == "metadata.namespace":
			value = pod.Namespace
		case from.ConfigMapKeyRef != nil:
			data := &corev1.ConfigMap{}
			err := s.client.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: from.ConfigMapKeyRef.Name}, data)
			if client.IgnoreNotFound(err) != nil {
				return nil, err
			}
			content, is := data.Data[from.ConfigMapKeyRef.Key]
			if !is {
				continue
			}
			value = content
		default:
			return nil, fmt.Errorf("nobody plays variable %s", e.Name)
		}
		all = append(all, e.Name+"="+value)
	}
	return all, nil
}

// volume writes the ConfigMap that is mounted at a path into a folder.
func (s *site) volume(ctx context.Context, pod *corev1.Pod, path string) (string, error) {
	for _, mount := range pod.Spec.Containers[0].VolumeMounts {
		for _, v := range pod.Spec.Volumes {
			if mount.MountPath != path || v.Name != mount.Name || v.ConfigMap == nil {
				continue
			}
			data := &corev1.ConfigMap{}
			if err := s.client.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: v.ConfigMap.Name}, data); err != nil {
				return "", err
			}
			folder := filepath.Join(s.dir, pod.Name)
			if err := os.MkdirAll(folder, 0o700); err != nil {
				return "", err
			}
			for name, content := range data.Data {
				if err := os.WriteFile(filepath.Join(folder, name), []byte(content), 0o600); err != nil {
					return "", err
				}
			}
			return folder, nil
		}
	}
	return "", fmt.Errorf("pod %s mounts no ConfigMap at %s", pod.Name, path)
}

// running is an agent's reconciler. It implements nodesim.Program.
type running struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// Alive implements nodesim.Program.
func (r running) Alive() bool { return true }

// Ready implements nodesim.Program.
func (r running) Ready(context.Context) bool { return true }

// Stop implements nodesim.Program.
func (r running) Stop() { r.cancel(); <-r.done }

// startAgent runs the reconciler of the operator's agent with the token of its pod.
func (s *site) startAgent(ctx context.Context, pod *corev1.Pod, hardware gpu.Hardware) (nodesim.Program, error) {
	if _, err := s.kubeconfigOf(ctx, pod, pod.Spec.NodeName); err != nil { // there is no such account
		return nil, err
	}
	c, err := s.cluster.ClientAs(ctx, env.Identity{
		Namespace: pod.Namespace, ServiceAccount: pod.Spec.ServiceAccountName, Pod: pod.Name, Node: pod.Spec.NodeName,
	})
	if err != nil {
		return nil, err
	}
	node := pod.Spec.NodeName
	allocations, err := agent.DialPodResources(s.podResources(node))
	if err != nil {
		return nil, err
	}
	a := agent.New(agent.Config{
		Node: node, BootID: "boot", Client: c, Hardware: hardware, Clock: clock.RealClock{},
		MPS:       mps.NewView(mps.NewControl(hostfake.NewRunner().Add("nvidia-cuda-mps-control", mpsfake.NewDaemons().Program), s.root, mpsfake.NewClock(time.Now()))),
		Processes: hostfake.NewProcesses("boot"), Allocations: allocations, Resync: time.Minute,
	})
	until, cancel := context.WithCancel(s.t.Context())
	r := running{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		defer allocations.Close() //nolint:errcheck // of a socket
		s.each(until, poll, func() error {
			gpuNode := &v1alpha1.GPUNode{}
			if err := c.Get(until, types.NamespacedName{Name: node}, gpuNode); err == nil {
				_, _ = a.Reconcile(until, gpuNode) // tried again
			}
			return nil
		})
	}()
	return r, nil
}
