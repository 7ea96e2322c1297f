// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
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

// TestFaults strikes rollouts where only a real API server, real caches and real agents show what becomes of it. What
// is decided under each fault in each state is shown by TestEveryFaultInEveryState of internal/engine/rollout.
func TestFaults(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, env.WithInterruptions())
	f.step("the leader is replaced again and again", func() {
		f.policy(sevenEach, "{maxUnavailable: 1}")
		for range 6 {
			f.tainted()
			f.leader()
			f.leader = f.lead()
		}
		f.ready()
		f.Expect(f.record.account().most).To(Equal(1))
	})
	f.step("an agent is lost in the middle of its steps", func() {
		f.policy("{strategy: MIG, mig: {layouts: [{fill: 2g.10gb}]}}", "{maxUnavailable: 1}")
		f.tainted()
		f.machines[0].down.Store(true)
		f.settled()
		f.machines[0].down.Store(false)
		f.ready()
		f.Expect(f.record.account().most).To(Equal(1))
	})
	f.step("NVIDIA's DRA driver offers the GPUs of a node, and shows by its ResourceSlice alone", func() {
		slice := draSlice("n02")
		f.Expect(f.client.Create(t.Context(), slice)).To(Succeed())
		f.Eventually(func() string { return f.waits("n02") }, patience, pollEvery).Should(And(HavePrefix(v1alpha1.ReasonDRADriverActive), ContainSubstring("ResourceSlice "+slice.Name)))
		f.policy(timeSlicing("3"), "{maxUnavailable: 1}")
		f.Eventually(f.keys, patience, pollEvery).Should(Satisfy(func(keys map[string]string) bool {
			return keys["n01"] == keys["n03"] && keys["n01"] != keys["n02"]
		}))
		f.Eventually(func() bool { return f.verified("n01") && f.verified("n03") }, patience, pollEvery).Should(BeTrue(),
			"the time that is skipped below is none of their deadlines")
		f.Expect(f.client.Delete(t.Context(), slice)).To(Succeed())
		f.Eventually(func() string { return f.waits("n02") }, patience, pollEvery).Should(ContainSubstring("takes the node over at"))
		f.later(6 * time.Minute)
		f.ready()
	})
	f.step("the API server is away for a minute", func() {
		f.policy(timeSlicing("4"), "{maxUnavailable: 1}")
		f.tainted()
		f.Expect(f.cluster.Interrupt()).To(Succeed())
		f.clock.skip(time.Minute)
		f.Expect(f.cluster.Resume()).To(Succeed())
		f.record.resume()
		f.ready()
	})
}

// draSlice is the ResourceSlice in which NVIDIA's DRA driver offers a GPU of a node.
func draSlice(node string) *resourcev1.ResourceSlice {
	return &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "dra-" + node},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: dra.DriverName, NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1}, Devices: []resourcev1.Device{{Name: "gpu-0"}},
		},
	}
}

// verified reports whether a node has advertised what it is configured for.
func (f *fleet) verified(node string) bool {
	f.t.Helper()
	for _, n := range f.world().Nodes {
		if good := n.GPU.Status.Rollout.LastGood; n.Name == node && good != nil {
			return good.ConfigName == n.Labels[v1alpha1.LabelConfig]
		}
	}
	return false
}

// waits is the reason and the message of a node that the policy lists as pending; empty: it does not.
func (f *fleet) waits(node string) string {
	f.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	f.Expect(f.client.Get(f.t.Context(), types.NamespacedName{Name: "research"}, p)).To(Succeed())
	for _, n := range p.Status.Pending {
		if n.NodeName == node {
			return n.Reason + ": " + n.Message
		}
	}
	return ""
}

// tainted waits until some node is, and is content if the rollout is over.
func (f *fleet) tainted() {
	f.t.Helper()
	f.Eventually(func() bool {
		s := f.world()
		done := true
		for _, n := range s.Nodes {
			if len(n.Taints) > 0 {
				return true
			}
			done = done && !underway(&n.GPU) && n.GPU.Status.Rollout.LastGood != nil
		}
		return done
	}, patience, pollEvery).Should(BeTrue())
}

// ApplyChart applies the ClusterPolicy of NVIDIA's chart, as Helm 4 does.
func (s *run) ApplyChart(*rand.Rand) {
	o := &unstructured.Unstructured{}
	s.Expect(yaml.Unmarshal([]byte(clusterPolicy), &o.Object)).To(Succeed())
	s.Expect(s.client.Apply(s.t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("helm"), client.ForceOwnership)).To(Succeed())
}

// The files of the operator's CRDs.
const gpuNodesCRD, policiesCRD = "gpusharing.io_gpunodes.yaml", "gpusharing.io_gpusharingpolicies.yaml"

// crdFolder has the operator's CRDs, those of the previous version for the files that are named.
func crdFolder(t *testing.T, old ...string) string {
	t.Helper()
	g := NewWithT(t)
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	folder := t.TempDir()
	for _, file := range []string{gpuNodesCRD, policiesCRD} {
		content, err := os.ReadFile(filepath.Join(root, "config", "crd", file))
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(os.WriteFile(filepath.Join(folder, file), content, 0o600)).To(Succeed())
	}
	for _, file := range old {
		content, err := previous.File(t.Context(), "config/crd/"+file)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(os.WriteFile(filepath.Join(folder, file), content, 0o600)).To(Succeed())
	}
	return folder
}

// everyStrategy are policies of every strategy.
var everyStrategy = []string{
	`{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`, `{strategy: MPS, mps: {replicas: 4}}`, `{strategy: Exclusive}`, sevenEach,
}

// TestTodaysProgramsWorkWithThePreviousCRDs: Helm with crds.install=false, or a user who applies the CRDs in another
// way, may leave them as they were.
func TestTodaysProgramsWorkWithThePreviousCRDs(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2, env.WithOwnCRDs(crdFolder(t, gpuNodesCRD, policiesCRD)))
	for _, sharing := range everyStrategy {
		f.step(sharing, func() {
			f.policy(sharing, `{maxUnavailable: "100%"}`)
			f.ready()
			f.atRest()
		})
	}
}

// versions are those of all objects of the operator.
func (f *fleet) versions() map[string]string {
	f.t.Helper()
	found := map[string]string{}
	nodes, policies := &v1alpha1.GPUNodeList{}, &v1alpha1.GPUSharingPolicyList{}
	for _, list := range []client.ObjectList{nodes, policies} {
		f.Expect(f.client.List(f.t.Context(), list)).To(Succeed())
	}
	for i := range nodes.Items {
		found["GPUNode "+nodes.Items[i].Name] = nodes.Items[i].ResourceVersion
	}
	for i := range policies.Items {
		found["GPUSharingPolicy "+policies.Items[i].Name] = policies.Items[i].ResourceVersion
	}
	return found
}

// atRest waits until nobody writes the operator's objects any more, and checks that it stays so although the agents
// look several times.
func (f *fleet) atRest() {
	f.t.Helper()
	f.Eventually(func(g Gomega) {
		before := f.versions()
		g.Consistently(f.versions, "5s", 5*pollEvery).Should(Equal(before))
	}, "1m", pollEvery).Should(Succeed())
}
