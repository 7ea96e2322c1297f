// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// happenings are all events that a history may have, by name.
func happenings() map[string]func(*run, *rand.Rand) {
	return map[string]func(*run, *rand.Rand){
		"die": (*run).dieEvent, "return": (*run).returnEvent, "reboot": (*run).rebootEvent, "lost": (*run).lostEvent,
		"join": (*run).joinEvent, "replace-node": (*run).replaceNodeEvent,
		"pod": (*run).podEvent, "pods": (*run).podEvent, "leave": (*run).leaveEvent,
		"rewrite": (*run).rewriteEvent, "rewrites": (*run).rewriteEvent, "fight": (*run).fightEvent,
		"back-up": (*run).backUpEvent, "restore": (*run).restoreEvent, "delete": (*run).deleteEvent,
		"edit": (*run).editEvent, "edits": (*run).editEvent, "split": (*run).splitEvent, "drop": (*run).dropEvent,
		"create": (*run).createEvent, "relabel": (*run).relabelEvent,
		"agent": (*run).agentEvent, "crash": (*run).crashEvent, "lie": (*run).lieEvent, "destroy": (*run).destroyEvent,
		"lead": (*run).leadEvent, "wait": (*run).waitEvent, "plugin": (*run).pluginEvent, "breaks": (*run).breaksEvent,
		"dra": (*run).draEvent,
	}
}

// lateHappenings are events of seeds from history.Late up alone. A new kind of event is added here.
func lateHappenings() map[string]func(*run, *rand.Rand) {
	return map[string]func(*run, *rand.Rand){
		"late-chart":    (*run).chartEvent,
		"late-forgets":  (*run).forgetsEvent,
		"late-recreate": (*run).recreateEvent,
		"tenant":        (*run).tenantEvent,
	}
}

func (s *run) dieEvent(random *rand.Rand) {
	p := s.some(random)
	if p.off {
		return
	}
	s.dies(p)
	p.lost = random.IntN(3) == 0
	s.tell("machine %s dies, for good: %v", p.name, p.lost)
}

// forgetsEvent ends the last program that kept the GPUs of a machine initialized, such as nvidia-persistenced: from now
// on a GPU that nobody has open forgets its compute mode.
func (s *run) forgetsEvent(random *rand.Rand) {
	p := s.some(random)
	p.hardware.Update(func(n *sim.Node) { n.Forgets = true })
	s.tell("nothing keeps the GPUs of %s initialized any more", p.name)
}

const unreachable = "node.kubernetes.io/unreachable"

// dies switches a machine off, with what the control plane reports of it.
func (s *run) dies(p *place) {
	s.halts(p)
	s.changeNode(p.name, func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: unreachable, Effect: corev1.TaintEffectNoSchedule})
	})
	for _, pod := range s.podsOn(p.name) {
		for i := range pod.Status.Conditions {
			if pod.Status.Conditions[i].Type == corev1.PodReady {
				pod.Status.Conditions[i].Status = corev1.ConditionFalse
			}
		}
		s.Expect(client.IgnoreNotFound(s.client.Status().Update(s.t.Context(), &pod))).To(Or(Succeed(), Satisfy(apierrors.IsConflict)))
	}
}

// changeNode changes a Node, if it is there.
func (s *run) changeNode(name string, change func(*corev1.Node)) {
	s.change(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, func(o client.Object) { change(o.(*corev1.Node)) })
}

// change reads an object and writes it changed. One that is not there stays so.
func (s *run) change(o client.Object, change func(client.Object)) (changed bool) {
	s.t.Helper()
	s.Eventually(func() error {
		if err := s.client.Get(s.t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			return client.IgnoreNotFound(err)
		}
		was := o.DeepCopyObject()
		change(o)
		if changed = !equal(was, o); !changed {
			return nil
		}
		return client.IgnoreNotFound(s.client.Update(s.t.Context(), o))
	}, patience, pollEvery).Should(Succeed())
	return changed
}

func (s *run) podsOn(node string) []corev1.Pod {
	list := &corev1.PodList{}
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.Spec.NodeName != node })
}

// returns boots a machine that is off. The pods of users are gone.
func (s *run) returns(p *place) {
	p.hardware.Reboot()
	s.facts.Lock()
	p.remember()
	s.facts.Unlock()
	s.partitionsAgain(p)
	for _, pod := range s.podsOn(p.name) {
		if pod.Namespace == users {
			s.ended(pod.Name)
		}
	}
	s.changeNode(p.name, func(n *corev1.Node) {
		n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == unreachable })
	})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: p.name}}
	s.Expect(client.IgnoreNotFound(s.client.Get(s.t.Context(), client.ObjectKeyFromObject(node), node))).To(Succeed())
	base := node.DeepCopy()
	for _, amounts := range []corev1.ResourceList{node.Status.Capacity, node.Status.Allocatable} {
		for name := range amounts { // a kubelet that starts has not heard of any device plugin
			if strings.HasPrefix(string(name), "nvidia.com/") {
				delete(amounts, name)
			}
		}
	}
	s.Expect(client.IgnoreNotFound(s.client.Status().Patch(s.t.Context(), node, client.MergeFrom(base)))).To(Succeed())
	s.boots(p)
}

// rebooted boots a machine whose agent has asked for it.
func (s *run) rebooted(p *place) {
	s.tell("the agent of %s reboots it", p.name)
	s.dies(p)
	s.returns(p)
}

func (s *run) returnEvent(random *rand.Rand) {
	for _, p := range s.all() {
		if p.off {
			s.bootsWith(p, random)
		}
	}
}

func (s *run) rebootEvent(random *rand.Rand) {
	if p := s.some(random); !p.off {
		s.dies(p)
		s.bootsWith(p, random)
	}
}

// bootsWith boots a machine with the GPUs that it had, fewer, or others.
func (s *run) bootsWith(p *place, random *rand.Rand) {
	s.serial++
	what, count := "as it was", len(p.devices())
	switch index := random.IntN(count); random.IntN(4) {
	case 0:
		if count > 1 {
			what = fmt.Sprintf("without GPU %d", index)
			s.swap(p, index, "", s.serial)
		}
	case 1:
		what = fmt.Sprintf("with another GPU %d", index)
		var model sim.Model
		p.hardware.Update(func(n *sim.Node) { model = n.GPUs[index].Model })
		s.swap(p, index, model, s.serial)
	}
	s.returns(p)
	s.tell("machine %s boots %s", p.name, what)
}

// swap replaces the GPU at an index by a new one of a model; an empty model takes it out.
func (s *run) swap(p *place, index int, model sim.Model, serial int) {
	s.facts.Lock()
	defer s.facts.Unlock()
	p.hardware.Update(func(n *sim.Node) {
		old := n.GPUs[index]
		if model == "" {
			n.GPUs = slices.Delete(n.GPUs, index, index+1)
			return
		}
		spare, err := sim.NewNode(fmt.Sprintf("spare-%s-%d", p.name, serial), model)
		if err != nil {
			panic(err) // a mistake in this test
		}
		fresh := spare.GPUs[0]
		fresh.PCIBusID, fresh.NoReset = old.PCIBusID, old.NoReset
		n.GPUs[index] = fresh
		p.slots[fresh.UUID] = p.slots[old.UUID]
	})
	for _, d := range p.devices() {
		if _, known := p.born[d.UUID]; !known {
			p.born[d.UUID] = bornAs(d)
		}
	}
}

// lostEvent takes a GPU off the bus of a machine that runs, and what used it ends.
func (s *run) lostEvent(random *rand.Rand) {
	p := s.some(random)
	if devices := p.devices(); p.off || len(devices) < 2 {
		return
	}
	for _, pod := range s.podsOn(p.name) {
		if pod.Namespace == users {
			s.ended(pod.Name)
		}
	}
	s.round()
	s.swap(p, random.IntN(len(p.devices())), "", 0)
	s.restartPlugin(p)
	s.tell("a GPU of %s falls off the bus", p.name)
}

func (s *run) joinEvent(random *rand.Rand) {
	if len(s.machines) < 3 {
		s.serial++
		s.join(fmt.Sprintf("j%d", s.serial), random)
		s.noteBefore(s.machines[len(s.machines)-1].name)
	}
}

// noteBefore notes how a node is before the operator has changed it.
func (s *run) noteBefore(name string) {
	s.before.Nodes = slices.DeleteFunc(s.before.Nodes, func(n cluster.Node) bool { return n.Name == name })
	s.until("node "+name, func() bool {
		s.round()
		for _, n := range s.world().Nodes {
			if n.Name == name {
				s.before.Nodes = append(s.before.Nodes, cluster.Node{Name: name, Labels: s.places[name].labels, Allocatable: map[string]int64{}})
				return true
			}
		}
		return false
	})
}

// replaceNodeEvent deletes a Node with all that is on it, and registers another machine of that name.
func (s *run) replaceNodeEvent(random *rand.Rand) {
	p := s.some(random)
	if !p.off {
		s.halts(p)
	}
	for _, pod := range s.podsOn(p.name) {
		s.ended(pod.Namespace + "/" + pod.Name)
	}
	s.Expect(client.IgnoreNotFound(s.client.Delete(s.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: p.name}}))).To(Succeed())
	s.facts.Lock()
	s.machines = slices.DeleteFunc(slices.Clone(s.machines), func(m *machine) bool { return m == p.machine })
	s.facts.Unlock()
	maps.DeleteFunc(s.theirs, func(what string, _ bool) bool { return strings.HasPrefix(what, p.name+" ") })
	s.join(p.name, random)
	s.noteBefore(p.name)
	s.tell("node %s is replaced", p.name)
}

// podKinds are the kinds of pods of users.
func podKinds() []string {
	return []string{"replica", "replica", "tolerant", "bare", "static", "daemon", "process", "protected", "hanging", "bystander"}
}

func (s *run) podEvent(random *rand.Rand) {
	s.start(s.some(random), podKinds()[random.IntN(len(podKinds()))], random)
}

// start lets a pod come to a node, if there is room and it tolerates what is there.
func (s *run) start(p *place, kind string, random *rand.Rand) {
	node := &corev1.Node{}
	s.Expect(s.client.Get(s.t.Context(), types.NamespacedName{Name: p.name}, node)).To(Succeed())
	tainted := slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Effect == corev1.TaintEffectNoSchedule })
	ignores := slices.Contains([]string{"tolerant", "static", "daemon", "process"}, kind)
	offers := offered(node)
	requests := kind != "process" && kind != "bystander"
	if p.off || tainted && !ignores || requests && len(offers) == 0 {
		return
	}
	s.serial++
	name := fmt.Sprintf("%s-%d", kind, s.serial)
	pod := podOf(kind, name, p.name)
	if kind == "protected" {
		s.Expect(s.client.Create(s.t.Context(), &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name},
			Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: pod.Labels}},
		})).To(Succeed())
	}
	if requests {
		resource := slices.Sorted(maps.Keys(offers))[random.IntN(len(offers))]
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(resource): one}
	}
	s.facts.Lock()
	s.kinds[name], s.homes[name] = kind, p.name
	s.facts.Unlock()
	s.Expect(s.client.Create(s.t.Context(), pod)).To(Succeed())
	if kind == "process" && !s.opens(p.devices()[random.IntN(len(p.devices()))], p, pod) {
		return
	}
	s.tell("pod %s comes to %s", name, p.name)
}

// podOf is a pod of a kind on a node.
func podOf(kind, name, node string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	}
	owner := func(group, kind string) {
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: group, Kind: kind, Name: "owner", UID: "owner", Controller: new(true)}}
	}
	owner("apps/v1", "ReplicaSet")
	switch kind {
	case "bare":
		pod.OwnerReferences = nil
	case "static":
		pod.OwnerReferences = nil
		pod.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "static"}
	case "daemon":
		owner("apps/v1", "DaemonSet")
	case "tolerant":
		pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	case "hanging":
		pod.Finalizers = []string{"test.example/hangs"}
	}
	return pod
}

// opens lets a process of a pod open a GPU, or an instance of it; false if the GPU has none.
func (s *run) opens(d gpu.Device, p *place, pod *corev1.Pod) bool {
	process := gpu.Process{PID: 10000 + s.serial, Name: "python", PodUID: string(pod.UID), Instance: gpu.WholeGPU}
	if d.State.MIG {
		if len(d.State.Instances) == 0 {
			return false
		}
		process.Instance = d.State.Instances[0].ID
	}
	s.Expect(p.hardware.AddProcess(d.UUID, process)).To(Succeed())
	return true
}

func offered(n *corev1.Node) map[string]int64 {
	offers := map[string]int64{}
	for name, quantity := range n.Status.Allocatable {
		if strings.HasPrefix(string(name), "nvidia.com/") && !quantity.IsZero() {
			offers[string(name)] = quantity.Value()
		}
	}
	return offers
}

// comeBack ends what a pod that the controller evicted has left, and lets those come back that nothing keeps off.
func (s *run) comeBack() {
	s.mu.Lock()
	gone := maps.Clone(s.gone)
	clear(s.gone)
	s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(gone)) {
		p, kind := s.places[gone[name]], s.kinds[name]
		if kind == "hanging" && s.serial%2 == 0 {
			s.mu.Lock()
			s.gone[name] = gone[name] // a round later, perhaps
			s.mu.Unlock()
			s.serial++
			continue
		}
		s.ended(name)
		if p != nil && slices.Contains([]string{"tolerant", "daemon", "static"}, kind) {
			s.start(p, kind, rand.New(rand.NewPCG(uint64(s.serial), 4)))
		}
	}
}

// ended removes a pod, with its processes.
func (s *run) ended(name string) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name}}
	if namespace, of, qualified := strings.Cut(name, "/"); qualified {
		pod.Namespace, pod.Name = namespace, of
	}
	s.change(pod, func(o client.Object) { o.SetFinalizers(nil) })
	s.Expect(client.IgnoreNotFound(s.client.Delete(s.t.Context(), pod, client.GracePeriodSeconds(0)))).To(Succeed())
	s.mu.Lock()
	s.ends[name] = true
	s.mu.Unlock()
	for _, p := range s.all() {
		p.hardware.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].Processes = slices.DeleteFunc(n.GPUs[i].Processes, func(o gpu.Process) bool { return o.PodUID == string(pod.UID) })
			}
		})
	}
}

func (s *run) leaveEvent(random *rand.Rand) {
	var names []string
	for _, pod := range s.podsOn(s.some(random).name) {
		if pod.Namespace == users {
			names = append(names, pod.Name)
		}
	}
	if len(names) > 0 {
		s.ended(names[random.IntN(len(names))])
	}
}

// rewriting is a way in which another controller changes what the operator has written. It reports whether there was
// anything to do.
func (s *run) rewriting(random *rand.Rand) (what string, again func() bool) {
	name := s.some(random).name
	node := func(change func(*corev1.Node)) func() bool {
		return func() bool {
			return s.change(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, func(o client.Object) { change(o.(*corev1.Node)) })
		}
	}
	untaint := func(keys ...string) func() bool {
		return node(func(n *corev1.Node) {
			n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool { return slices.Contains(keys, t.Key) })
		})
	}
	switch random.IntN(11) {
	case 0:
		return "our taint of " + name, untaint(v1alpha1.TaintChanging)
	case 1:
		return "the policy's taint of " + name, untaint(history.Taint().Key, v1alpha1.TaintStartup)
	case 2:
		edits := random.IntN(2) == 0
		return fmt.Sprintf("keys of our ConfigMap, content: %v", edits), s.rewritesConfigMap(edits)
	case 3:
		return "our NodeFeature of " + name, func() bool { return s.deleted(ourNodeFeature(name)) }
	case 4:
		return "annotations of GPUNode " + name, func() bool {
			return s.change(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}, func(o client.Object) { o.SetAnnotations(nil) })
		}
	case 5:
		return "tolerations of the ClusterPolicy", s.rewritesClusterPolicy(func(o map[string]any) {
			unstructured.RemoveNestedField(o, "spec", "daemonsets", "tolerations")
		})
	case 6:
		return "spec.devicePlugin and spec.mig of the ClusterPolicy", s.rewritesClusterPolicy(func(o map[string]any) {
			unstructured.RemoveNestedField(o, "spec", "devicePlugin", "config")
			_ = unstructured.SetNestedField(o, "single", "spec", "mig", "strategy")
		})
	}
	label, value := history.Other(random)
	s.theirs[name+" "+label] = true
	return fmt.Sprintf("%s=%s of %s", label, value, name), node(func(n *corev1.Node) { relabel(n, label, value) })
}

// relabel gives a label or annotation of a node another value; an empty one removes it.
func relabel(n *corev1.Node, label, value string) {
	entries, ofOurs := n.Labels, strings.HasPrefix(label, v1alpha1.Group+"/")
	if ofOurs && label != v1alpha1.LabelOverridden {
		entries = n.Annotations
	}
	if _, has := entries[label]; value == "" {
		delete(entries, label)
	} else if has || !ofOurs && !strings.HasPrefix(label, "nvidia.com/gpu.deploy.") {
		entries[label] = value
	}
}

// rewritesConfigMap edits or removes all keys of the operator's ConfigMap but the default.
func (s *run) rewritesConfigMap(edits bool) func() bool {
	return func() bool {
		return s.change(ourConfigMap(), func(o client.Object) {
			data := o.(*corev1.ConfigMap).Data
			for key := range data {
				if key == "default" {
					continue
				}
				if data[key] = "version: v1\n"; !edits {
					delete(data, key)
				}
			}
		})
	}
}

func (s *run) rewritesClusterPolicy(change func(map[string]any)) func() bool {
	return func() bool {
		return s.change(theClusterPolicy(), func(o client.Object) { change(o.(*unstructured.Unstructured).Object) })
	}
}

func ourConfigMap() *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: nvidiaSpace, Name: pluginconfig.ConfigMapName}}
}

func theClusterPolicy() *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"})
	o.SetName("cluster-policy")
	return o
}

func ourNodeFeature(node string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeature"})
	o.SetNamespace(ownNamespace)
	o.SetName(action.OverrideName(node))
	return o
}

func (s *run) deleted(o client.Object) bool {
	err := s.client.Delete(s.t.Context(), o)
	s.Expect(client.IgnoreNotFound(err)).To(Succeed())
	return err == nil
}

func (s *run) rewriteEvent(random *rand.Rand) {
	what, again := s.rewriting(random)
	s.tell("another controller rewrites %s: %v", what, again())
}

// fightEvent lets another controller set something again whenever the operator has changed it, for two hours.
func (s *run) fightEvent(random *rand.Rand) {
	what, again := s.rewriting(random)
	s.tell("another controller sets again and again: %s", what)
	s.forget()
	s.fights = append(s.fights, again)
	s.fighting.Store(true)
	s.rest(2*time.Hour, 120)
	s.fighting.Store(false)
	s.fights = nil
	s.bounded("while another controller set again and again "+what, mostOfAFight)
	s.tell("and stops")
}

// backUpEvent copies what a backup tool copies.
func (s *run) backUpEvent(*rand.Rand) {
	s.backup = nil
	for _, list := range []client.ObjectList{&v1alpha1.GPUSharingPolicyList{}, &v1alpha1.GPUNodeList{}} {
		s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
		s.backup = append(s.backup, objects(list)...)
	}
	for _, o := range []client.Object{ourConfigMap(), theClusterPolicy()} {
		if err := s.client.Get(s.t.Context(), client.ObjectKeyFromObject(o), o); err == nil {
			s.backup = append(s.backup, o)
		}
	}
	s.tell("a backup is made of %d objects", len(s.backup))
}

// objects are those of a list.
func objects(list client.ObjectList) []client.Object {
	var all []client.Object
	_ = meta.EachListItem(list, func(o runtime.Object) error {
		all = append(all, o.(client.Object))
		return nil
	})
	return all
}

// restoreEvent replaces the objects of a kind by the copies of the backup.
func (s *run) restoreEvent(random *rand.Rand) {
	if len(s.backup) == 0 {
		return
	}
	kind := fmt.Sprintf("%T", s.backup[random.IntN(len(s.backup))])
	for _, old := range s.backup {
		if fmt.Sprintf("%T", old) != kind {
			continue
		}
		o := old.DeepCopyObject().(client.Object)
		o.SetResourceVersion("")
		o.SetUID("")
		o.SetManagedFields(nil)
		err := s.client.Create(s.t.Context(), o)
		if apierrors.IsAlreadyExists(err) {
			now := old.DeepCopyObject().(client.Object)
			s.Expect(s.client.Get(s.t.Context(), client.ObjectKeyFromObject(old), now)).To(Succeed())
			o.SetResourceVersion(now.GetResourceVersion())
			err = s.client.Update(s.t.Context(), o)
		}
		s.Expect(err).To(Or(Succeed(), Satisfy(apierrors.IsConflict)))
		if p, is := o.(*v1alpha1.GPUSharingPolicy); is {
			s.noteDesired(p)
		}
	}
	s.tell("all of %s are restored from the backup", kind)
}

// deleteEvent deletes an object that the operator made.
func (s *run) deleteEvent(random *rand.Rand) {
	name := s.some(random).name
	o := []client.Object{ourConfigMap(), ourNodeFeature(name), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}}[random.IntN(3)]
	s.tell("%T %s is deleted: %v", o, o.GetName(), s.deleted(o))
}

// create creates policies.
func (s *run) create(policies []v1alpha1.GPUSharingPolicy) {
	for i := range policies {
		p := policies[i].DeepCopy()
		p.Generation = 0
		inPairs(p)
		s.Expect(s.client.Create(s.t.Context(), p)).To(Succeed())
		s.noteDesired(p)
		s.tell("policy %s: %s", p.Name, history.Says(p))
	}
}

func (s *run) current() []v1alpha1.GPUSharingPolicy {
	s.t.Helper()
	list := &v1alpha1.GPUSharingPolicyList{}
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	return list.Items
}

// edits changes a policy.
func (s *run) edits(p *v1alpha1.GPUSharingPolicy, change func(*v1alpha1.GPUSharingPolicy)) {
	s.change(p, func(o client.Object) {
		change(o.(*v1alpha1.GPUSharingPolicy))
		inPairs(o.(*v1alpha1.GPUSharingPolicy))
	})
	s.noteDesired(p)
}

// inPairs removes what the API server refuses without its partner. The generator draws each field by itself.
func inPairs(p *v1alpha1.GPUSharingPolicy) {
	if p.Spec.Rollout.Reboot != v1alpha1.RebootModeIfRequired {
		p.Spec.Rollout.Drain.BeforeReboot = ""
	}
}

// noteDesired notes what a policy asks for.
func (s *run) noteDesired(p *v1alpha1.GPUSharingPolicy) {
	s.facts.Lock()
	defer s.facts.Unlock()
	s.policies[p.Name] = append(s.policies[p.Name], *p)
}

func (s *run) editEvent(random *rand.Rand) {
	all := s.current()
	if len(all) == 0 {
		return
	}
	p, field := &all[random.IntN(len(all))], ""
	seed := random.Uint64()
	s.edits(p, func(p *v1alpha1.GPUSharingPolicy) { field = history.EditPolicy(p, rand.New(rand.NewPCG(seed, 5))) })
	if field == "gpuSelector" {
		s.countsAnew()
	}
	s.tell("policy %s is edited: %s, now %s", p.Name, field, history.Says(p))
}

// countsAnew takes the present indexes of the GPUs for their places, as a user does who writes indexes into a policy.
func (s *run) countsAnew() {
	all := s.all()
	s.facts.Lock()
	defer s.facts.Unlock()
	for _, p := range all {
		for _, d := range p.devices() {
			p.slots[d.UUID] = d.Index
		}
	}
}

func (s *run) splitEvent(random *rand.Rand) {
	if all := s.current(); len(all) == 1 && all[0].Name == "all" {
		s.create(history.Split(random))
		s.deleted(&all[0])
		s.countsAnew()
	}
}

func (s *run) dropEvent(random *rand.Rand) {
	if all := s.current(); len(all) > 0 {
		p := &all[random.IntN(len(all))]
		s.tell("policy %s is deleted: %v", p.Name, s.deleted(p))
	}
}

func (s *run) createEvent(random *rand.Rand) {
	if len(s.current()) == 0 {
		s.create(history.Policies(random))
		s.countsAnew()
	}
}

func (s *run) relabelEvent(random *rand.Rand) {
	p := s.some(random)
	p.labels[history.PoolLabel] = map[string]string{"a": "b", "b": "a"}[p.labels[history.PoolLabel]]
	s.changeNode(p.name, func(n *corev1.Node) { n.Labels[history.PoolLabel] = p.labels[history.PoolLabel] })
	for i := range s.before.Nodes {
		if s.before.Nodes[i].Name == p.name {
			s.before.Nodes[i].Labels = maps.Clone(s.before.Nodes[i].Labels)
			s.before.Nodes[i].Labels[history.PoolLabel] = p.labels[history.PoolLabel]
		}
	}
	s.tell("node %s moves to pool %s", p.name, p.labels[history.PoolLabel])
}

// agentEvent takes the agent of a node away, or brings it back.
func (s *run) agentEvent(random *rand.Rand) {
	p := s.some(random)
	if p.off {
		return
	}
	p.down.Store(!p.down.Load())
	s.tell("the agent of %s is lost: %v", p.name, p.down.Load())
}

// crashEvent ends the agent of a node in the middle of its steps, and starts it again later.
func (s *run) crashEvent(random *rand.Rand) {
	p := s.some(random)
	after := random.IntN(4)
	p.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpObserve {
			return nil
		}
		if after--; after < 0 {
			p.down.Store(true)
			return sim.ErrCrash
		}
		return nil
	}
	s.tell("the agent of %s will end after %d operations", p.name, after)
}

// lieEvent lets the agent of a node report that all is as desired, and then nothing any more.
func (s *run) lieEvent(random *rand.Rand) {
	p := s.some(random)
	n := &v1alpha1.GPUNode{}
	if err := s.client.Get(s.t.Context(), types.NamespacedName{Name: p.name}, n); err != nil || p.off {
		return
	}
	p.down.Store(true)
	for i := range n.Status.Conditions {
		switch c := &n.Status.Conditions[i]; c.Type {
		case v1alpha1.ConditionApplied:
			c.ObservedGeneration, c.Status = n.Generation, metav1.ConditionTrue
		case v1alpha1.ConditionDiscovered, v1alpha1.ConditionApplyStalled, v1alpha1.ConditionRebootRequired:
			c.ObservedGeneration = n.Generation
		}
	}
	s.Expect(client.IgnoreNotFound(s.client.Status().Update(s.t.Context(), n))).To(Or(Succeed(), Satisfy(apierrors.IsConflict)))
	s.tell("the agent of %s reports that all is well, and ends", p.name)
}

// destroyEvent takes an idle instance away.
func (s *run) destroyEvent(random *rand.Rand) {
	p := s.some(random)
	if p.off || len(p.node.Allocations()) > 0 || p.hardware.Fail != nil {
		return
	}
	for _, d := range p.devices() {
		if len(d.State.Instances) > 0 && len(d.Processes) == 0 {
			err := p.hardware.DestroyInstance(s.t.Context(), d.UUID, d.State.Instances[0].ID)
			s.rebornUnmanaged(p)
			s.tell("an instance of a GPU of %s is destroyed by hand: %v", p.name, err)
			return
		}
	}
}

// rebornUnmanaged notes how GPUs are that another user has changed while the operator had no part in the node.
func (s *run) rebornUnmanaged(p *place) {
	if s.spec(p.name).Baseline == nil {
		s.facts.Lock()
		defer s.facts.Unlock()
		for _, d := range p.devices() {
			p.born[d.UUID] = bornAs(d)
		}
	}
}

func (s *run) leadEvent(*rand.Rand) {
	s.leader()
	s.leader = s.lead()
	s.tell("another controller leads")
}

func (s *run) waitEvent(random *rand.Rand) {
	d := []time.Duration{time.Minute, 6 * time.Minute, 20 * time.Minute, 2 * time.Hour}[random.IntN(4)]
	s.tell("%s pass", d)
	s.rest(d, 40)
}

func (s *run) pluginEvent(random *rand.Rand) {
	p := s.some(random)
	s.restartPlugin(p)
	s.tell("the device plugin of %s restarts", p.name)
}

// restartPlugin deletes the pod of NVIDIA's device plugin.
func (s *run) restartPlugin(p *place) {
	for _, pod := range s.podsOn(p.name) {
		if pod.Labels["app"] == "nvidia-device-plugin-daemonset" {
			s.deleted(&pod)
		}
	}
}

func (s *run) breaksEvent(random *rand.Rand) {
	p := s.some(random)
	p.deaf.Store(!p.deaf.Load())
	s.tell("the device plugin of %s cannot read the GPUs: %v", p.name, p.deaf.Load())
}

// draEvent lets NVIDIA's DRA driver come to a node, or restart: for a moment neither a pod nor a ResourceSlice shows
// it.
func (s *run) draEvent(random *rand.Rand) {
	p := s.some(random)
	var sign client.Object = draSlice(p.name)
	if random.IntN(2) == 0 {
		sign = draPod(p.name)
	}
	had := s.deleted(draSlice(p.name))
	if had = s.deleted(draPod(p.name)) || had; had {
		s.tell("NVIDIA's DRA driver of %s ends", p.name)
		s.rounds(1+random.IntN(3), random)
	}
	if random.IntN(3) > 0 && !p.off {
		s.Eventually(func() error { return s.client.Create(s.t.Context(), sign.DeepCopyObject().(client.Object)) }, patience, pollEvery).
			Should(Or(Succeed(), Satisfy(apierrors.IsAlreadyExists)))
		s.tell("NVIDIA's DRA driver of %s runs, which shows by a %T", p.name, sign)
	}
}

func draPod(node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: nvidiaSpace, Name: "dra-" + node, Labels: map[string]string{cluster.DRALabels()[0]: "kubelet-plugin"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "apps/v1", Kind: "DaemonSet", Name: "dra", UID: "dra", Controller: new(true),
			}},
		},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "gpus", Image: "example.invalid/dra"}}},
	}
}
