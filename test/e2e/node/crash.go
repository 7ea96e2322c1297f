// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"os"
)

// Crash ends everything that runs on the node at once, as a power failure does, but for the control plane, which is
// somewhere else in a real cluster. What was in memory is gone: mounts of pods, state of containers. What runs from now
// on runs in another boot. The caller reboots the hardware and calls Boot.
func (n *Node) Crash() error {
	n.power.Lock()
	defer n.power.Unlock()
	spared := n.spared()
	var stays []*program
	for _, p := range n.programs {
		if p.name != "kubelet" && p.name != "containerd" {
			spared = append(spared, p.cmd.Process.Pid)
			stays = append(stays, p)
		}
	}
	n.programs = stays
	if err := powerOff(spared, "/run/containerd", "/run/netns", "/run/nvidia", "/run/cdi", "/var/lib/kubelet/pods"); err != nil {
		return err
	}
	return newBoot()
}

// Wipe ends everything that was started, the control plane too, and forgets all that was written but logs and
// certificates: a node started after it is a new one.
func (n *Node) Wipe() error {
	n.power.Lock()
	defer n.power.Unlock()
	n.programs = nil
	return powerOff(n.spared(), "/run/containerd", "/run/netns", "/run/nvidia", "/run/cdi", "/var/lib/kubelet",
		"/var/lib/containerd", "/var/lib/etcd", "/var/lib/cni")
}

// spared are the processes that are not the node's.
func (n *Node) spared() []int { return append([]int{1, os.Getpid()}, n.options.Apart()...) }

// powerOff ends all processes that are not spared, and empties folders.
func powerOff(spared []int, folders ...string) error {
	if err := killOthers(spared); err != nil {
		return err
	}
	for _, folder := range folders {
		if err := forget(folder); err != nil {
			return err
		}
	}
	return removeGroups()
}

// Boot starts containerd and kubelet after a crash and waits until the node is Ready.
func (n *Node) Boot(ctx context.Context) error {
	n.power.Lock()
	defer n.power.Unlock()
	containerd, err := n.run("containerd", containerdArguments()...)
	if err != nil {
		return err
	}
	if err := n.waitFor(ctx, containerd, "containerd", n.containerdAnswers); err != nil {
		return err
	}
	if err := n.startKubelet(); err != nil {
		return err
	}
	return n.waitFor(ctx, n.kubelet, "the node to be Ready", n.ready)
}
