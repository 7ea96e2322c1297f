// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nodesim plays the programs that tests and demo do not run: the kubelet, the DaemonSet controller and NVIDIA's
// stack (GPU Operator, device plugin with its config-manager, GPU Feature Discovery, MPS DaemonSet) and Node Feature
// Discovery, as far as this operator can tell
// them from the real ones.
//
// It is as stubborn as they are. A new key of a ConfigMap is seen by a pod only once the kubelet projects it: after a
// delay, or at once when the pod changes. A label that names a key which is not visible puts the config-manager into a
// crash loop, and the plugin keeps what it had. Nothing reads content again under the same key. A configuration is
// parsed by NVIDIA's own types and refused for NVIDIA's own reasons; a plugin that refuses takes the GPUs off the node.
// The device plugin looks at the GPUs when it starts or loads a configuration and at no other time. The kubelet
// publishes the node's status at intervals.
//
// What each rule is taken from is said where it stands; the sources are NVIDIA/k8s-device-plugin v0.19.3 (cmd/config-
// manager, internal/rm, internal/plugin, cmd/nvidia-device-plugin) and NVIDIA/gpu-operator v26.7.0 (controllers).
package nodesim

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Options say what a node is and how slow its kubelet is. The zero value of a duration means the real one's.
type Options struct {
	// Name of the node.
	Name string
	// Labels that the node is registered with, besides NVIDIA's.
	Labels map[string]string
	// Client is an administrator's, not cached.
	Client client.Client
	// Clock paces everything that takes time.
	Clock clock.WithTicker

	// Inventory observes the GPUs.
	Inventory func(context.Context) (gpu.Inventory, error)
	// OpenNVML opens NVML as a program that stays connected to the driver, such as the device plugin, does; the
	// returned function closes it. Nil: nobody minds.
	OpenNVML func() (func() error, error)
	// MPSAnswers reports whether an MPS control daemon answers on the pipe directory of a resource. Nil: none does.
	MPSAnswers func(ctx context.Context, resource string) bool
	// MountShm is told that a pod of NVIDIA's MPS DaemonSet has unmounted the shared memory of the MPS daemons that run
	// on the node. Nil: nobody is.
	MountShm func(context.Context)
	// NFD says how Node Feature Discovery is installed.
	NFD NFD
	// Start starts the program of a pod. It returns nil for a pod that is an object only. Nil: all pods are.
	Start func(context.Context, *corev1.Pod) (Program, error)
	// Tell is told what happens on the node. Nil: nobody is.
	Tell func(format string, args ...any)

	// ToolkitMissing reports whether NVIDIA's container toolkit is not done yet, so that the device plugin finds no
	// GPU. Nil: it is.
	ToolkitMissing func() bool

	// OtherDrivers are further DRA drivers that run on the node, such as that of a network device, each with its answer
	// when it is to prepare a claim. A driver that is not listed is not there.
	OtherDrivers map[string]func() error

	// Pulls reports whether an image of a pod is being pulled, so that its containers have not started. Nil: all images
	// are there.
	Pulls func(*corev1.Pod) bool

	// Wake tells Run that something happened which concerns the node, as watches tell a kubelet. Nil: nobody does, so that
	// Run looks at each interval.
	Wake <-chan struct{}

	// StatusPeriod is how often the node's status is published. Real: 10 s.
	StatusPeriod time.Duration
	// ProjectionDelay is how long a change of a ConfigMap takes to reach a pod that nothing else changes. Real: about
	// 60 s.
	ProjectionDelay time.Duration
	// RestartDelay is how long the kubelet waits before it starts a container for the second time that has ended. From
	// then on it waits twice as long each time. Real: 10 s, up to 5 minutes.
	RestartDelay time.Duration
	// RetryDelay is how long the device plugin waits before it tries to start again. Real: 30 s.
	RetryDelay time.Duration
}

// Program is the process of a pod.
type Program interface {
	// Alive reports whether the process runs.
	Alive() bool
	// Ready reports whether it answers its readiness probe.
	Ready(context.Context) bool
	// Stop ends it and returns when it is gone.
	Stop()
}

// Node plays one node: what all its programs know of it (machine), the kubelet with what it runs, the DaemonSet
// controller as far as it concerns the node, and the discovery of features.
type Node struct {
	*machine

	*kubelet
	daemonSets
	*discovery
}

// machine is what the programs of a node know of it.
type machine struct {
	Options

	mu        sync.Mutex // guards what the pod-resources server reads
	pods      map[types.UID]*podState
	endpoints map[string]*endpoint // of device plugins, by resource
}

// New is a node that is not registered yet; the first Reconcile does that.
func New(o Options) *Node {
	withDefault(&o.StatusPeriod, 10*time.Second)
	withDefault(&o.ProjectionDelay, 60*time.Second)
	withDefault(&o.RestartDelay, 10*time.Second)
	withDefault(&o.RetryDelay, 30*time.Second)
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Tell == nil {
		o.Tell = func(string, ...any) {}
	}
	m := &machine{Options: o, pods: map[types.UID]*podState{}, endpoints: map[string]*endpoint{}}
	return &Node{
		machine: m, daemonSets: daemonSets{m}, discovery: &discovery{machine: m},
		kubelet: &kubelet{machine: m, plugin: devicePlugin{m}, published: map[string]counts{}, prepared: map[types.UID]preparedClaim{}},
	}
}

func withDefault(d *time.Duration, kubelets time.Duration) {
	if *d == 0 {
		*d = kubelets
	}
}

// Run reconciles until the context ends, and then stops the programs of the node. Errors of a reconcile are told and
// tried again. Where another controller or a user wakes it, the interval doubles while nobody does, up to eight times.
func (n *Node) Run(ctx context.Context, interval time.Duration) {
	defer n.stopPrograms()
	wait := interval
	for {
		if err := n.Reconcile(ctx); err != nil && ctx.Err() == nil {
			n.Tell("kubelet: %v", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-n.Wake:
			wait = interval
		case <-n.Clock.After(wait):
			if n.Wake != nil {
				wait = min(2*wait, 8*interval)
			}
		}
	}
}

// Reconcile lets everything on the node do what is due. It is idempotent, and never waits.
func (n *Node) Reconcile(ctx context.Context) error {
	node, err := n.register(ctx)
	if err != nil {
		return err
	}
	if err := n.mergeFeatures(ctx, node); err != nil {
		return err
	}
	if err := n.discoverFeatures(ctx); err != nil {
		return err
	}
	if err := n.labelNode(ctx, node); err != nil {
		return err
	}
	pods := &corev1.PodList{}
	if err := n.Client.List(ctx, pods, client.MatchingFields{"spec.nodeName": n.Name}); err != nil {
		return fmt.Errorf("listing the pods of node %s: %w", n.Name, err)
	}
	// No kubelet waits for the DaemonSet controller, which creates no pod in a namespace that is being deleted: that goes once its pods are gone.
	refused := n.runDaemonSets(ctx, node, pods.Items)
	if err := n.syncPods(ctx, node, pods.Items); err != nil {
		return errors.Join(refused, err)
	}
	return errors.Join(refused, n.publish(ctx, node))
}
