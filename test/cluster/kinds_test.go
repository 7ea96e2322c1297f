// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// TestNothingIsReleasedWhenTheKindsVanish deletes the operator's definitions with a live policy, as an uninstallation
// by OLM v1 does, in both orders in which garbage collection may take them. The API server deletes their objects, one
// after the other. The controllers live on, and take up everything again when definitions and policy are back.
func TestNothingIsReleasedWhenTheKindsVanish(t *testing.T) {
	t.Parallel()
	const (
		policies, gpuNodes = "gpusharingpolicies.gpusharing.io", "gpunodes.gpusharing.io"
		shares             = "{strategy: MPS, mps: {replicas: 4}}"
		rollout            = "{maxUnavailable: 2}"
		while              = "5s" // what is released without the rule is so within one
	)
	f := newFleet(t, 2)
	f.policy(shares, rollout)
	f.ready()
	f.settled()
	clusterPolicy, configs, daemons := f.clusterPolicy(), f.configs(), f.daemons()
	f.Expect(daemons).NotTo(ContainElement(BeNil()))
	disturbed := f.watchNodes()
	undisturbed := func(g Gomega) {
		g.Expect(f.clusterPolicy()).To(Equal(clusterPolicy))
		g.Expect(f.configs()).To(Equal(configs))
		for i, asked := range f.daemons() {
			g.Expect(len(asked)).To(BeNumerically(">=", len(daemons[i])), "the MPS daemon lives on")
			daemons[i] = asked
		}
		g.Expect(disturbed()).To(BeEmpty(), "nodes that were released, or changed")
	}

	for _, order := range [][]string{{policies, gpuNodes}, {gpuNodes, policies}} {
		f.step("without "+order[0]+" first", func() {
			for _, definition := range order {
				f.removeDefinition(definition)
				f.Consistently(undisturbed, while, pollEvery).Should(Succeed())
			}
			f.Eventually(f.announcesGone, patience, pollEvery).Should(BeTrue())
			f.restoreDefinitions()
			f.policy(shares, rollout)
			f.ready()
			f.settled()
			undisturbed(f.WithT)
		})
	}

	f.step("the definitions are back without policies, so each node goes back to its baseline, minutes later", func() {
		f.removeDefinition(policies)
		f.removeDefinition(gpuNodes)
		f.restoreDefinitions()
		f.Consistently(undisturbed, while, pollEvery).Should(Succeed())
		f.later(timing.PoliciesReturn)
		f.Eventually(func(g Gomega) {
			for _, m := range f.machines {
				node := f.nodeNamed(m.name)
				g.Expect(node.Labels).NotTo(HaveKey(v1alpha1.LabelConfig))
				g.Expect(node.Annotations).NotTo(HaveKey(v1alpha1.AnnotationBaseline))
			}
			g.Expect(f.configs()).To(BeEmpty())
			g.Expect(f.daemons()).To(HaveEach(BeNil()))
		}, patience, 5*pollEvery).Should(Succeed())
	})
}

// restoreDefinitions creates the operator's definitions, and waits until they are served.
func (f *fleet) restoreDefinitions() {
	f.t.Helper()
	ctx := f.t.Context()
	f.Expect(f.cluster.Apply(ctx, "config/crd/gpusharing.io_gpunodes.yaml", "config/crd/gpusharing.io_gpusharingpolicies.yaml")).To(Succeed())
	f.Eventually(func() error {
		return errors.Join(f.client.List(ctx, &v1alpha1.GPUSharingPolicyList{}), f.client.List(ctx, &v1alpha1.GPUNodeList{}))
	}, patience, pollEvery).Should(Succeed())
	f.record.resume()
}

// removeDefinition deletes a definition, and waits until it is gone with its objects.
func (f *fleet) removeDefinition(name string) {
	f.t.Helper()
	definition := &unstructured.Unstructured{}
	definition.SetGroupVersionKind(pluginconfig.Definitions().GroupVersionKind())
	definition.SetName(name)
	f.Expect(f.cluster.DeleteKind(f.t.Context(), name)).To(Succeed())
	f.Eventually(func() bool {
		return apierrors.IsNotFound(f.client.Get(f.t.Context(), client.ObjectKeyFromObject(definition), definition))
	}, patience, pollEvery).Should(BeTrue())
}

// announcesGone reports whether an Event tells that the kinds are gone.
func (f *fleet) announcesGone() bool {
	f.t.Helper()
	events := &corev1.EventList{}
	f.Expect(f.client.List(f.t.Context(), events)).To(Succeed())
	return slices.ContainsFunc(events.Items, func(e corev1.Event) bool { return e.Reason == v1alpha1.EventKindsGone })
}

// clusterPolicy is the spec of the ClusterPolicy, with how often it was changed.
func (f *fleet) clusterPolicy() map[string]any {
	f.t.Helper()
	o := &unstructured.Unstructured{}
	o.SetAPIVersion("nvidia.com/v1")
	o.SetKind("ClusterPolicy")
	f.Expect(f.client.Get(f.t.Context(), types.NamespacedName{Name: "cluster-policy"}, o)).To(Succeed())
	return map[string]any{"spec": o.Object["spec"], "generation": o.GetGeneration()}
}

// configs is the content of the operator's ConfigMap.
func (f *fleet) configs() map[string]string {
	f.t.Helper()
	found := &corev1.ConfigMap{}
	key := types.NamespacedName{Namespace: nvidiaSpace, Name: pluginconfig.ConfigMapName}
	f.Expect(client.IgnoreNotFound(f.client.Get(f.t.Context(), key, found))).To(Succeed())
	return found.Data
}

func (f *fleet) nodeNamed(name string) *corev1.Node {
	f.t.Helper()
	node := &corev1.Node{}
	f.Expect(f.client.Get(f.t.Context(), types.NamespacedName{Name: name}, node)).To(Succeed())
	return node
}

// daemons are what the MPS daemon of each node has been asked since it started; nil for a node without one.
func (f *fleet) daemons() [][]string {
	all := make([][]string, len(f.machines))
	for i, m := range f.machines {
		if daemon := m.daemons.Get(filepath.Join(m.dir, "nvidia.com/gpu", "pipe")); daemon != nil {
			all[i] = daemon.Commands
		}
	}
	return all
}

// watchNodes watches from now on which nodes are tainted, select another config than now or get another MPS label.
func (f *fleet) watchNodes() (disturbed func() []string) {
	f.t.Helper()
	of := func(n *corev1.Node) [2]string {
		return [2]string{n.Labels[v1alpha1.LabelConfig], n.Labels["nvidia.com/mps.capable"]}
	}
	list := &corev1.NodeList{}
	f.Expect(f.client.List(f.t.Context(), list)).To(Succeed())
	before := map[string][2]string{}
	for i := range list.Items {
		before[list.Items[i].Name] = of(&list.Items[i])
	}
	from := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}}
	w, err := f.client.Watch(context.Background(), &corev1.NodeList{}, from)
	f.Expect(err).NotTo(HaveOccurred())
	f.t.Cleanup(w.Stop)
	return func() []string {
		var found []string
		for {
			select {
			case e := <-w.ResultChan():
				node, is := e.Object.(*corev1.Node)
				if is && e.Type == watch.Modified && (of(node) != before[node.Name] || len(node.Spec.Taints) > 0) {
					found = append(found, node.Name)
				}
			default:
				return found
			}
		}
	}
}
