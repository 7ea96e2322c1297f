// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"text/tabwriter"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// row is what the demo is about, for one node.
type row struct {
	node, policy, strategy string
	before, under          string // what the node advertised before and under the policy
	gpus                   string // how they were shared
}

// noteResult notes what each node advertises under its policy.
func (d *demo) noteResult(ctx, _ context.Context, _ *sync.WaitGroup) error {
	for _, m := range d.machines {
		r, err := d.row(ctx, m.name)
		if err != nil {
			return err
		}
		d.result = append(d.result, r)
	}
	if err := d.showKubectl(ctx, "get", "gpusharingpolicies"); err != nil {
		return err
	}
	return d.isHealthy(ctx)
}

// isHealthy waits until `kubectl gpusharing doctor` finds no error.
func (d *demo) isHealthy(ctx context.Context) (err error) {
	if ended := until(ctx, func() (bool, error) {
		_, err = d.askKubectl(ctx, "gpusharing", "doctor")
		return err == nil, nil
	}); ended != nil {
		return errors.Join(ended, err)
	}
	return nil
}

func (d *demo) row(ctx context.Context, name string) (row, error) {
	gpuNode, policy := &v1alpha1.GPUNode{}, &v1alpha1.GPUSharingPolicy{}
	if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: name}, gpuNode); err != nil {
		return row{}, fmt.Errorf("reading GPUNode %s: %w", name, err)
	}
	if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: gpuNode.Spec.PolicyName}, policy); err != nil {
		return row{}, fmt.Errorf("reading the policy of node %s: %w", name, err)
	}
	under, err := d.advertises(ctx, name)
	return row{
		node: name, policy: policy.Name, strategy: string(policy.Spec.Sharing.Strategy),
		before: d.was[name], under: under, gpus: describeDevices(gpuNode.Status.Devices),
	}, err
}

// showResult prints the table that the demo is about.
func (d *demo) showResult(ctx, _ context.Context, _ *sync.WaitGroup) error {
	d.narration.chapter("What it was about (resources of nvidia.com)")
	header := "NODE\tPOLICY\tSTRATEGY\tADVERTISED BEFORE\tADVERTISED UNDER THE POLICY"
	if d.keep {
		header += "\tHOW ITS GPUS ARE SHARED"
	} else {
		header += "\tAFTER ITS DELETION\tHOW ITS GPUS WERE SHARED"
	}
	lines := []string{header}
	for _, r := range d.result {
		cells := []string{r.node, r.policy, r.strategy, r.before, r.under}
		if !d.keep {
			after, err := d.advertises(ctx, r.node)
			if err != nil {
				return err
			}
			cells = append(cells, after)
		}
		lines = append(lines, strings.Join(append(cells, r.gpus), "\t"))
	}
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 3, ' ', 0)
	_, _ = io.WriteString(table, strings.Join(lines, "\n")+"\n")
	if err := table.Flush(); err != nil {
		return err
	}
	d.narration.show(text.String())
	d.narration.show("\nEvery policy was Ready. No GPU was needed: the drivers are simulated, and so is what kubelet and NVIDIA's programs do.\n" +
		"The API server, the controller and the agents, with the rights that they ship with, are the real ones.")
	return nil
}

// showInvitation says what to try while the demo is left running.
func (d *demo) showInvitation() {
	d.narration.chapter("It is left running until you press Ctrl-C. In another terminal:")
	d.narration.show(fmt.Sprintf(`
export KUBECONFIG=%s
export PATH=$PWD/%s:%s:$PATH     # our kubectl plugin, and kubectl

1. Look around: the GPUs as a picture, what is desired and what is so, and what a node's agent sees:
     kubectl gpusharing status
     kubectl get gpusharing
     kubectl get gpunode gpu-a100 -o yaml

2. Change your mind, and see the node follow within seconds:
     kubectl patch gsp time-slicing-t4 --type merge -p '{"spec":{"sharing":{"timeSlicing":{"replicas":8}}}}'
     kubectl get node gpu-t4 -o jsonpath='{.status.allocatable}'

3. Let a pod hold an instance and ask for another layout. Nothing in use is taken away, and the node's status names what
   blocks; delete the pod, and the node follows:
     kubectl apply -f test/demo/holder.yaml
     kubectl patch gsp mig-a100 --type merge -p '{"spec":{"sharing":{"mig":{"layouts":[{"fill":"1g"}]}}}}'
     kubectl get gsp mig-a100 -o wide
     kubectl delete pod holder

And in the end, delete the policies, and see every node, and NVIDIA's ClusterPolicy, go back to what they were:
     kubectl delete gsp --all`, d.kubeconfig, d.programs, filepath.Dir(d.kubectl)))
}
