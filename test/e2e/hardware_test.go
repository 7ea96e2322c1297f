// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// fitted are the GPUs that are in the node, and fitting how often it got any, so that no two of them have the same
// UUID.
var (
	fitted  []sim.Model
	fitting int
)

// nextNode names the node's next GPUs.
func nextNode() string {
	fitting++
	return fmt.Sprintf("%s-%d", nodeName, fitting)
}

// begin gives a container of specs a node that nobody shares or uses, with these GPUs. If it has others they are
// replaced and what has the driver open starts anew, as after a visit to the data centre. After a failure, and after
// specs on NVIDIA's DRA driver, the node is built anew.
func begin(ctx context.Context, models ...sim.Model) {
	GinkgoHelper()
	if broken || onDRA {
		rebuild(ctx)
	} else {
		stopPods(ctx)
		Expect(kube.DeleteAllOf(ctx, &v1alpha1.GPUSharingPolicy{})).To(Succeed())
		Eventually(nodeLabels).WithContext(ctx).ShouldNot(HaveKey(configLabel))
		Eventually(restoredFromUs).WithContext(ctx).Should(Succeed())
	}
	if !slices.Equal(models, fitted) {
		fit(ctx, models...)
		restartClients(ctx)
	}
	expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": int64(len(models))})
}

// resume gives a container of specs the node as the ones before left it, with whatever policy "shared" is in force, if
// it has these GPUs and nothing failed: what these specs prove does not depend on it.
func resume(ctx context.Context, models ...sim.Model) {
	GinkgoHelper()
	if broken || onDRA || !slices.Equal(models, fitted) {
		begin(ctx, models...)
		return
	}
	stopPods(ctx)
}

// crash takes the machine's power. The controllers, which in a real cluster are on other nodes than the one that
// crashes, have ended too: their lease is given up for them, so that no time passes until it ends by itself.
func crash(ctx context.Context) {
	GinkgoHelper()
	Expect(machine.Crash()).To(Succeed())
	stopDriver()
	releaseLease(ctx)
}

// boot boots the machine after a crash. The driver container starts as all other pods do, and not before them.
func boot(ctx context.Context) {
	GinkgoHelper()
	Expect(machine.Boot(ctx)).To(Succeed())
	startDriver(ctx, driver.Container)
}

// releaseLease gives up the lease of controllers that have ended and could not do so themselves.
func releaseLease(ctx context.Context) {
	GinkgoHelper()
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = operatorNamespace, "gpu-sharing-controller"
	err := kube.Patch(ctx, lease, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"holderIdentity":""}}`)))
	Expect(client.IgnoreNotFound(err)).To(Succeed())
}

// restartClients deletes the pods that have the driver open and waits until others run instead.
func restartClients(ctx context.Context) {
	GinkgoHelper()
	var old []string
	for _, namespace := range []string{gpuoperator.Namespace, operatorNamespace} {
		pods := &corev1.PodList{}
		Expect(kube.List(ctx, pods, client.InNamespace(namespace))).To(Succeed())
		for i := range pods.Items {
			p := &pods.Items[i]
			if name := p.Labels["app.kubernetes.io/name"]; name == "gpu-sharing-controller" || name == nfdName {
				continue
			}
			old = append(old, p.Name)
			Expect(client.IgnoreNotFound(kube.Delete(ctx, p, &client.DeleteOptions{GracePeriodSeconds: ptr.To[int64](1)}))).To(Succeed())
		}
	}
	for _, namespace := range []string{gpuoperator.Namespace, operatorNamespace} {
		Eventually(func() ([]string, error) { return notReady(ctx, namespace, old...) }).WithContext(ctx).Should(BeEmpty())
	}
}

// notReady says which pods of a namespace are not Ready, or are among those that must go, and which DaemonSets and
// deployments have fewer than they want.
func notReady(ctx context.Context, namespace string, mustGo ...string) ([]string, error) {
	pods, sets, deployments := &corev1.PodList{}, &appsv1.DaemonSetList{}, &appsv1.DeploymentList{}
	for _, list := range []client.ObjectList{pods, sets, deployments} {
		if err := kube.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return nil, err
		}
	}
	found := notRunning(pods.Items, mustGo)
	for i := range sets.Items {
		s := &sets.Items[i]
		if s.Status.ObservedGeneration != s.Generation || s.Status.NumberReady != s.Status.DesiredNumberScheduled ||
			s.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType && s.Status.UpdatedNumberScheduled != s.Status.DesiredNumberScheduled {
			found = append(found, fmt.Sprintf("DaemonSet %s has %d of %d", s.Name, s.Status.NumberReady, s.Status.DesiredNumberScheduled))
		}
	}
	for i := range deployments.Items {
		d := &deployments.Items[i]
		if d.Status.ObservedGeneration != d.Generation || d.Status.ReadyReplicas != *d.Spec.Replicas {
			found = append(found, fmt.Sprintf("deployment %s has %d of %d", d.Name, d.Status.ReadyReplicas, *d.Spec.Replicas))
		}
	}
	return found, nil
}

// notRunning says which pods neither run nor have done what they had to, or are among those that must go.
func notRunning(pods []corev1.Pod, mustGo []string) []string {
	var found []string
	for i := range pods {
		p := &pods[i]
		runs := gpuoperator.PodReady(p) && p.DeletionTimestamp == nil || p.Status.Phase == corev1.PodSucceeded
		if !runs || slices.Contains(mustGo, p.Name) {
			found = append(found, p.Name+": "+state(p))
		}
	}
	return found
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
