// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node brings up a real Kubernetes node on this machine, without Docker: etcd, kube-apiserver,
// kube-controller-manager, kube-scheduler, containerd and a kubelet, with their usual paths. It takes the machine for
// its own, so it belongs inside a sandbox.
//
// There is no kube-proxy and no DNS: the API server listens on the address of the service kubernetes itself, which is
// all that pods need here.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// Address is the node's.
	Address = "10.99.0.1"
	// ServiceAddress is that of the service kubernetes: the first of serviceRange.
	ServiceAddress = "10.96.0.1"

	serviceRange = "10.96.0.0/16"
	podRange     = "10.244.0.0/24"
)

// Options say how a node is brought up.
type Options struct {
	// Name of the node.
	Name string
	// Bin is the folder with the programs (hack/e2e/build.sh).
	Bin string
	// Pause is the archive of the image that holds a pod's namespaces.
	Pause string
	// PauseImage is its name.
	PauseImage string
	// Apart are the processes of other machines, which go on when this one's power goes.
	Apart func() []int
	// StatusEvery is how often the kubelet computes and publishes its status. Kubernetes' default is 10s.
	StatusEvery time.Duration
	// Log gets what happens, as it happens.
	Log io.Writer
}

// Node is a control plane with one node.
type Node struct {
	// Config is an administrator's.
	Config *rest.Config
	// Client is an administrator's.
	Client kubernetes.Interface

	options Options
	// power is held while programs are stopped or started.
	power sync.Mutex
	lost  atomic.Int64
	// kubeletBegan is where in the log the last kubelet began, in bytes.
	kubeletBegan atomic.Int64
	// programs in the order in which they were started.
	programs []*program
	kubelet  *program
}

// Start brings a node up until it is Ready. What was started is stopped again when that fails.
func Start(ctx context.Context, o Options) (*Node, error) {
	n := &Node{options: o}
	if err := n.start(ctx); err != nil {
		return nil, errors.Join(err, n.Stop())
	}
	return n, nil
}

func (n *Node) start(ctx context.Context) error {
	began := time.Now()
	if err := n.writeFiles(); err != nil {
		return err
	}
	if err := showBootID(); err != nil {
		return err
	}
	// containerd needs nothing of the control plane, so it starts beside it.
	containerd, err := n.run("containerd", containerdArguments()...)
	if err != nil {
		return err
	}
	if err := n.startControlPlane(ctx); err != nil {
		return err
	}
	n.say("control plane up after %s", since(began))
	if err := n.waitFor(ctx, containerd, "containerd", n.containerdAnswers); err != nil {
		return err
	}
	if err := n.Import(ctx, n.options.Pause); err != nil {
		return err
	}
	if err := n.startKubelet(); err != nil {
		return err
	}
	if err := n.waitFor(ctx, n.kubelet, "the node to be Ready", n.ready); err != nil {
		return err
	}
	n.say("node %s Ready after %s", n.options.Name, since(began))
	return nil
}

func since(began time.Time) time.Duration { return time.Since(began).Round(100 * time.Millisecond) }

func (n *Node) say(format string, args ...any) {
	_, _ = fmt.Fprintf(n.options.Log, "   "+format+"\n", args...)
}

// Stop stops everything, the kubelet first. Containers are left to the end of the sandbox.
func (n *Node) Stop() error {
	n.power.Lock()
	defer n.power.Unlock()
	var errs []error
	for _, p := range slices.Backward(n.programs) {
		errs = append(errs, p.stop())
	}
	n.programs = nil
	return errors.Join(errs...)
}

// RestartKubelet stops the kubelet and starts it again, as an administrator would, and waits until the node is Ready.
func (n *Node) RestartKubelet(ctx context.Context) error {
	n.power.Lock()
	defer n.power.Unlock()
	if !n.kubelet.runs() {
		return errors.New("the kubelet does not run")
	}
	if err := n.kubelet.stop(); err != nil {
		return err
	}
	if err := n.startKubelet(); err != nil {
		return err
	}
	return n.waitFor(ctx, n.kubelet, "the node to be Ready", n.ready)
}

// ready reports whether the node is Ready by the kubelet that runs now.
func (n *Node) ready(ctx context.Context) error {
	node, err := n.Client.CoreV1().Nodes().Get(ctx, n.options.Name, getOptions)
	if err != nil {
		return err
	}
	for _, c := range node.Status.Conditions {
		if c.Type != corev1.NodeReady {
			continue
		}
		// Times in the API have seconds: one of this second may be of the kubelet that ran before.
		if c.Status == corev1.ConditionTrue && c.LastHeartbeatTime.After(n.kubelet.started) {
			return nil
		}
		return fmt.Errorf("%s: %s", c.Reason, c.Message)
	}
	return errors.New("the kubelet has not reported yet")
}

// CopyLogs copies what the programs wrote to a folder, with the logs of all pods.
func (n *Node) CopyLogs(to string) error {
	if err := os.RemoveAll(to); err != nil {
		return fmt.Errorf("clearing the folder for logs: %w", err)
	}
	if err := os.CopyFS(to, os.DirFS(logs)); err != nil {
		return fmt.Errorf("keeping the logs: %w", err)
	}
	return nil
}

func (n *Node) program(name string) string { return filepath.Join(n.options.Bin, name) }
