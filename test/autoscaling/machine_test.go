// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"context"
	"slices"
	"sync"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	mpsfake "github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// statusPeriod is how often a kubelet publishes what the device plugin offers. It is the kubelet's own.
const statusPeriod = 10 * time.Second

// playMachines plays each machine that Karpenter starts. Its Nodes get these taints of the test at once.
func (s *site) playMachines(taints ...corev1.Taint) {
	s.t.Helper()
	s.background(func(ctx context.Context) {
		var machines sync.WaitGroup
		defer machines.Wait()
		played := map[string]bool{}
		ticker := time.NewTicker(poll)
		defer ticker.Stop()
		for {
			nodes := &corev1.NodeList{}
			if err := s.client.List(ctx, nodes); err != nil && ctx.Err() == nil {
				s.t.Errorf("reading the Nodes: %v", err)
			}
			for i := range nodes.Items {
				name := nodes.Items[i].Name
				if !played[name] {
					played[name] = true
					s.t.Logf("Node %d after %s", len(played), time.Since(s.requested).Round(poll))
					machines.Go(func() { s.play(ctx, name, taints) })
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
}

// play plays a machine with one GPU until the context ends.
func (s *site) play(ctx context.Context, name string, taints []corev1.Taint) {
	hardware := held{Hardware: sim.New(sim.A100), until: s.changing}
	if err := s.boot(ctx, name, taints); err != nil {
		if ctx.Err() == nil {
			s.t.Errorf("booting %s: %v", name, err)
		}
		return
	}
	node := nodesim.New(nodesim.Options{
		Name: name, Client: s.client, Inventory: hardware.Observe, Tell: s.t.Logf,
		ToolkitMissing: func() bool {
			select {
			case <-s.toolkit:
				return false
			default:
				return true
			}
		},
		StatusPeriod: statusPeriod, RestartDelay: time.Second, RetryDelay: time.Second,
	})
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { node.Run(ctx, time.Second) })
	parts.Go(func() { s.runAgent(ctx, name, hardware) })
}

// boot is what a kubelet reports first. The node lifecycle controller then takes its taint off, and NVIDIA's GPU
// Operator labels the node.
func (s *site) boot(ctx context.Context, name string, taints []corev1.Taint) error {
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		node := &corev1.Node{}
		if err := s.client.Get(ctx, types.NamespacedName{Name: name}, node); err != nil {
			return err
		}
		amounts := corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("16"), corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("110"),
		}
		node.Status.Capacity, node.Status.Allocatable = amounts, amounts
		node.Status.Conditions = []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "simulated",
			LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
		}}
		if err := s.client.Status().Update(ctx, node); err != nil {
			return err
		}
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady })
		node.Spec.Taints = append(node.Spec.Taints, taints...)
		node.Labels["nvidia.com/gpu.present"] = "true"
		return s.client.Update(ctx, node)
	})
}

// runAgent runs the reconciler of the operator's agent.
func (s *site) runAgent(ctx context.Context, node string, hardware gpu.Hardware) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: own, Name: node + "-agent", Labels: map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"},
		},
		Spec: corev1.PodSpec{
			NodeName: node, Containers: []corev1.Container{{Name: "agent", Image: "example.invalid/agent"}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		},
	}
	if err := s.client.Create(ctx, pod); err != nil && ctx.Err() == nil {
		s.t.Errorf("creating the agent's pod: %v", err)
	}
	a := agent.New(agent.Config{
		Node: node, BootID: "boot", Client: s.client, Hardware: hardware, Clock: clock.RealClock{},
		MPS:       mps.NewView(mps.NewControl(hostfake.NewRunner().Add("nvidia-cuda-mps-control", mpsfake.NewDaemons().Program), s.root, mpsfake.NewClock(time.Now()))),
		Processes: hostfake.NewProcesses("boot"), Allocations: agent.NoAllocations{}, Resync: time.Minute,
	})
	select {
	case <-s.driver:
	case <-ctx.Done():
		return
	}
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		gpuNode := &v1alpha1.GPUNode{}
		if err := s.client.Get(ctx, types.NamespacedName{Name: node}, gpuNode); err == nil {
			_, _ = a.Reconcile(ctx, gpuNode) // tried again
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// held is a GPU that changes its MIG mode no sooner than the test lets it.
type held struct {
	gpu.Hardware
	until <-chan struct{}
}

// SetMIG implements gpu.Hardware.
func (h held) SetMIG(ctx context.Context, uuid string, enabled bool) error {
	select {
	case <-h.until:
	case <-ctx.Done():
		return ctx.Err()
	}
	return h.Hardware.SetMIG(ctx, uuid, enabled)
}

// nodes are all Nodes.
func (s *site) nodes() []corev1.Node {
	s.t.Helper()
	nodes := &corev1.NodeList{}
	s.Expect(s.client.List(s.t.Context(), nodes)).To(Succeed())
	return nodes.Items
}

// taints are the keys of the taints of all Nodes.
func (s *site) taints() []string {
	s.t.Helper()
	var keys []string
	for _, node := range s.nodes() {
		for _, taint := range node.Spec.Taints {
			keys = append(keys, taint.Key)
		}
	}
	return keys
}

// partitioning reports whether the GPUs of a Node are being changed.
func (s *site) partitioning() bool {
	s.t.Helper()
	gpuNodes := &v1alpha1.GPUNodeList{}
	s.Expect(s.client.List(s.t.Context(), gpuNodes)).To(Succeed())
	return slices.ContainsFunc(gpuNodes.Items, func(n v1alpha1.GPUNode) bool { return len(n.Spec.Devices) > 0 })
}

// policy is the policy.
func (s *site) policy() *v1alpha1.GPUSharingPolicy {
	s.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	s.Expect(s.client.Get(s.t.Context(), client.ObjectKey{Name: "research"}, p)).To(Succeed())
	return p
}
