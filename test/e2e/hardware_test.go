// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// fitted are the GPUs that are in the node, and how often it got others, so that no two of them have the same UUID.
var (
	fitted  = []sim.Model{sim.A100, sim.A100}
	fitting int
)

// begin gives a container of specs a node that nobody shares or uses, with these GPUs. If it has others they are replaced
// and what has the driver open starts anew, as after a visit to the data centre.
func begin(ctx context.Context, models ...sim.Model) {
	GinkgoHelper()
	whole := map[string]int64{"nvidia.com/gpu": int64(len(models))}
	stopPods(ctx)
	Expect(kube.DeleteAllOf(ctx, &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	Eventually(nodeLabels).WithContext(ctx).ShouldNot(HaveKey(configLabel))
	if slices.Equal(models, fitted) {
		expectAllocatable(ctx, whole)
		return
	}
	fitting++
	Expect(gpus.Replace(simdriver.Spec{Name: fmt.Sprintf("%s-%d", nodeName, fitting), Models: models})).To(Succeed())
	fitted = models
	restartClients(ctx)
	expectAllocatable(ctx, whole)
}

// restartClients deletes the pods that have the driver open and waits until others run instead.
func restartClients(ctx context.Context) {
	GinkgoHelper()
	old := map[string]bool{}
	for _, namespace := range []string{gpuoperator.Namespace, operatorNamespace} {
		pods := &corev1.PodList{}
		Expect(kube.List(ctx, pods, client.InNamespace(namespace))).To(Succeed())
		for i := range pods.Items {
			p := &pods.Items[i]
			if p.Labels["app.kubernetes.io/name"] == "gpu-sharing-controller" {
				continue
			}
			old[p.Name] = true
			Expect(client.IgnoreNotFound(kube.Delete(ctx, p, &client.DeleteOptions{GracePeriodSeconds: ptr.To[int64](1)}))).To(Succeed())
		}
	}
	Eventually(func(g Gomega) {
		for _, namespace := range []string{gpuoperator.Namespace, operatorNamespace} {
			pods := &corev1.PodList{}
			g.Expect(kube.List(ctx, pods, client.InNamespace(namespace))).To(Succeed())
			for i := range pods.Items {
				g.Expect(old).NotTo(HaveKey(pods.Items[i].Name))
				g.Expect(podReady(&pods.Items[i])).To(BeTrue(), "%s: %s", pods.Items[i].Name, state(&pods.Items[i]))
			}
		}
	}).WithContext(ctx).Should(Succeed())
}

func podReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// instances are the UUIDs of the MIG instances that the driver has.
func instances() ([]string, error) {
	n, err := gpus.Node()
	if err != nil {
		return nil, err
	}
	var found []string
	for _, g := range n.GPUs {
		for _, i := range g.Instances {
			for _, c := range i.Compute {
				found = append(found, c.UUID)
			}
		}
	}
	return found, nil
}

func resourceOf(profile string) corev1.ResourceName {
	return corev1.ResourceName("nvidia.com/mig-" + profile)
}

func resourceName(name string) corev1.ResourceName { return corev1.ResourceName(name) }
