// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// nothing is what a node without GPUs advertises.
const nothing = "-"

// advertises is what a node offers to pods of NVIDIA's resources.
func (d *demo) advertises(ctx context.Context, name string) (string, error) {
	node := &corev1.Node{}
	if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return nothing, client.IgnoreNotFound(err)
	}
	var parts []string
	for resource, quantity := range node.Status.Allocatable {
		if short, is := strings.CutPrefix(string(resource), "nvidia.com/"); is && !quantity.IsZero() {
			parts = append(parts, fmt.Sprintf("%s: %s", short, quantity.String()))
		}
	}
	if len(parts) == 0 {
		return nothing, nil
	}
	slices.Sort(parts)
	return strings.Join(parts, ", "), nil
}

// showResult prints the table that the demo is about.
func (d *demo) showResult(ctx context.Context) error {
	d.story.chapter("What the nodes advertise now (resources of nvidia.com)")
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 3, ' ', 0)
	rows := []string{"NODE\tPOLICY\tSTRATEGY\tADVERTISED BEFORE\tADVERTISES NOW\tHOW ITS GPUS ARE"}
	for _, m := range d.machines {
		row, err := d.row(ctx, m.name)
		if err != nil {
			return err
		}
		rows = append(rows, row)
	}
	_, _ = io.WriteString(table, strings.Join(rows, "\n")+"\n")
	if err := table.Flush(); err != nil {
		return err
	}
	d.story.show(text.String())
	d.story.show("\nEvery policy is Ready. No GPU was needed: the drivers are simulated, the API server, the controller and the\n" +
		"agents with their rights are the real ones.")
	return nil
}

func (d *demo) row(ctx context.Context, name string) (string, error) {
	gpuNode, policy := &v1alpha1.GPUNode{}, &v1alpha1.GPUSharingPolicy{}
	if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: name}, gpuNode); err != nil {
		return "", fmt.Errorf("reading GPUNode %s: %w", name, err)
	}
	if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: gpuNode.Spec.Policy}, policy); err != nil {
		return "", fmt.Errorf("reading the policy of node %s: %w", name, err)
	}
	now, err := d.advertises(ctx, name)
	if err != nil {
		return "", err
	}
	return strings.Join([]string{
		name, policy.Name, string(policy.Spec.Sharing.Strategy), d.was[name], now, describeDevices(gpuNode.Status.Devices),
	}, "\t"), nil
}

// showInvitation says what to try while the demo is left running.
func (d *demo) showInvitation() {
	d.story.chapter("It is left running until you press Ctrl-C. In another terminal:")
	d.story.show(fmt.Sprintf(`
export KUBECONFIG=%s
export PATH=%s:$PATH     # for kubectl, if you have none

1. Look around. Policies say what is wished and what is so, GPUNodes what each node's agent sees:
     kubectl get gpusharing
     kubectl get gpunode gpu-a100 -o yaml

2. Change your mind, and see the node follow within seconds:
     kubectl patch gsp time-slicing-t4 --type merge -p '{"spec":{"sharing":{"timeSlicing":{"replicas":8}}}}'
     kubectl get node gpu-t4 -o jsonpath='{.status.allocatable}'

3. Let a pod hold an instance and ask for another layout. Nothing in use is taken away, and the policy says who is in the
   way; delete the pod, and the node follows:
     kubectl apply -f test/demo/holder.yaml
     kubectl patch gsp mig-a100 --type merge -p '{"spec":{"sharing":{"mig":{"layouts":[{"fill":"1g"}]}}}}'
     kubectl get gsp mig-a100 -o wide
     kubectl delete pod holder

And in the end, delete the policies, and see every node, and NVIDIA's ClusterPolicy, go back to what they were:
     kubectl delete gsp --all`, d.kubeconfig, filepath.Dir(d.kubectl)))
}
