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

// happenings are the events that a history of any seed may have in this world alone, by name.
func happenings() history.Happenings[*run] {
	return history.Happenings[*run]{
		"back-up": (*run).backUpEvent, "restore": (*run).restoreEvent, "agent": (*run).agentEvent,
		"plugin": (*run).pluginEvent, "breaks": (*run).breaksEvent, "dra": (*run).draEvent,
	}
}

// lateHappenings are those of seeds from history.Late up alone. A new kind of event that only this world can play is added here.
func lateHappenings() history.Happenings[*run] {
	return history.Happenings[*run]{
		"late-forgets": (*run).forgetsEvent, "tenant": (*run).tenantEvent, "demand": (*run).onDemandEvent, "demands": (*run).onDemandEvent, "wait-for": (*run).waitEvent, "wait-fors": (*run).waitEvent,
	}
}

func (p *place) NodeName() string        { return p.name }
func (p *place) Pool() string            { return p.labels[history.PoolLabel] }
func (p *place) IsOff() bool             { return p.off }
func (p *place) Hardware() *sim.Hardware { return p.hardware }
func (p *place) EndAgent()               { p.down.Store(true) }

func (s *run) Reconcile(n int)                    { s.rounds(n/3, s.random) }
func (s *run) Pass(d time.Duration)               { s.rest(d, 40) }
func (s *run) MostMachines() int                  { return 3 }
func (s *run) HasClusterPolicy() bool             { return true }
func (s *run) DeleteConfigMap()                   { s.deleted(ourConfigMap()) }
func (s *run) DeleteNodeFeature(name string) bool { return s.deleted(ourNodeFeature(name)) }
func (s *run) EndPod(_ *place, name string)       { s.ended(name) }

func (s *run) Begin() {
	s.record.begin()
	s.waiting.were = s.waiting.calm
	s.disturbed()
}

// Repair ends the pods that still wait.
func (s *run) Repair(*place) {
	for name := range s.waiting.pods {
		s.ended(name)
	}
	clear(s.waiting.pods)
	s.waiting.late = nil
}

func (s *run) DeleteClusterPolicy(random *rand.Rand) {
	s.deleted(theClusterPolicy())
	s.rounds(random.IntN(6), random)
	s.disturbed()
}

func (s *run) Serial() int {
	s.serial++
	return s.serial
}

// forgetsEvent ends the last program that kept the GPUs of a machine initialized, such as nvidia-persistenced: from now
// on a GPU that nobody has open forgets its compute mode.
func (s *run) forgetsEvent(random *rand.Rand) {
	p := history.Some(s, random)
	p.hardware.Update(func(n *sim.Node) { n.Forgets = true })
	s.Tell("nothing keeps the GPUs of %s initialized any more", p.name)
}

const unreachable = "node.kubernetes.io/unreachable"

// Die switches a machine off, with what the control plane reports of it.
func (s *run) Die(p *place, forGood bool) {
	p.lost = forGood
	s.halts(p)
	s.ChangeNode(p.name, func(n *corev1.Node) {
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

// ChangeNode changes a Node, if it is there.
func (s *run) ChangeNode(name string, change func(*corev1.Node)) bool {
	return s.change(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, func(o client.Object) { change(o.(*corev1.Node)) })
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

func (s *run) UserPods(p *place) (names []string) {
	for _, pod := range s.podsOn(p.name) {
		if pod.Namespace == users {
			names = append(names, pod.Name)
		}
	}
	return names
}

// Boot boots a machine that is off. The pods of users are gone.
func (s *run) Boot(p *place) {
	p.hardware.Reboot()
	s.facts.Lock()
	p.remember()
	s.facts.Unlock()
	s.partitionsAgain(p)
	for _, name := range s.UserPods(p) {
		s.ended(name)
	}
	s.ChangeNode(p.name, func(n *corev1.Node) {
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
	s.Tell("the agent of %s reboots it", p.name)
	s.Die(p, false)
	s.Boot(p)
}

func (s *run) SwapGPU(p *place, index int, model sim.Model, serial int) {
	s.facts.Lock()
	defer s.facts.Unlock()
	history.Swap(p, index, model, serial, p.slots)
	for _, d := range p.devices() {
		if _, known := p.born[d.UUID]; !known {
			p.born[d.UUID] = bornAs(d)
		}
	}
}

func (s *run) LoseGPU(p *place, index int) {
	for _, name := range s.UserPods(p) {
		s.ended(name)
	}
	s.round()
	s.SwapGPU(p, index, "", 0)
	s.restartPlugin(p)
}

func (s *run) Join(name string, random *rand.Rand) {
	s.join(name, random)
	s.noteBefore(name)
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

func (s *run) ReplaceNode(p *place, random *rand.Rand) {
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
	s.Join(p.name, random)
}

// PodKinds are the kinds of pods of users.
func (s *run) PodKinds() []string {
	return []string{"replica", "replica", "tolerant", "bare", "static", "daemon", "process", "protected", "hanging", "bystander"}
}

// Start lets a pod come to a node, if there is room and it tolerates what is there.
func (s *run) Start(p *place, kind string, random *rand.Rand) {
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
	s.Tell("pod %s comes to %s", name, p.name)
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
			s.Start(p, kind, rand.New(rand.NewPCG(uint64(s.serial), 4)))
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
	for _, p := range s.Machines() {
		p.hardware.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].Processes = slices.DeleteFunc(n.GPUs[i].Processes, func(o gpu.Process) bool { return o.PodUID == string(pod.UID) })
			}
		})
	}
}

func (s *run) Theirs(name, label, _ string) { s.theirs[name+" "+label] = true }

func (s *run) SetByOthers(name, label, value string) bool {
	return s.ChangeNode(name, func(n *corev1.Node) { history.SetByOthers(n, label, value) })
}

func (s *run) ChangeConfigMap(change func(map[string]string)) bool {
	return s.change(ourConfigMap(), func(o client.Object) {
		data := o.(*corev1.ConfigMap).Data
		usual, has := data["default"]
		delete(data, "default")
		if change(data); has {
			data["default"] = usual
		}
	})
}

func (s *run) ChangeGPUNode(name string, change func(*v1alpha1.GPUNode)) bool {
	return s.change(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}, func(o client.Object) { change(o.(*v1alpha1.GPUNode)) })
}

func (s *run) DeleteGPUNode(name string) {
	s.deleted(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}})
}

func (s *run) ClusterPolicyRewrites() []history.Rewrite {
	return []history.Rewrite{
		{What: "tolerations of the ClusterPolicy", Again: s.rewritesClusterPolicy(func(o map[string]any) {
			unstructured.RemoveNestedField(o, "spec", "daemonsets", "tolerations")
		})},
		{What: "spec.devicePlugin and spec.mig of the ClusterPolicy", Again: s.rewritesClusterPolicy(func(o map[string]any) {
			unstructured.RemoveNestedField(o, "spec", "devicePlugin", "config")
			_ = unstructured.SetNestedField(o, "single", "spec", "mig", "strategy")
		})},
	}
}

func (s *run) Fight(again func() bool, d time.Duration) {
	s.forget()
	s.fights = append(s.fights, again)
	s.fighting.Store(true)
	s.rest(d, 120)
	s.fighting.Store(false)
	s.fights = nil
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
	s.Tell("a backup is made of %d objects", len(s.backup))
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
	s.Tell("all of %s are restored from the backup", kind)
}

func (s *run) ReplacePolicies(by []v1alpha1.GPUSharingPolicy) {
	old := s.ListPolicies()
	named := func(name string) func(v1alpha1.GPUSharingPolicy) bool {
		return func(p v1alpha1.GPUSharingPolicy) bool { return p.Name == name }
	}
	for i := range by {
		p := by[i].DeepCopy()
		if slices.ContainsFunc(old, named(p.Name)) {
			s.UpdatePolicy(p)
			continue
		}
		p.Generation = 0
		inPairs(p)
		s.Expect(s.client.Create(s.t.Context(), p)).To(Succeed())
		s.noteDesired(p)
	}
	for i := range old {
		if !slices.ContainsFunc(by, named(old[i].Name)) {
			s.deleted(&old[i])
		}
	}
}

func (s *run) UpdatePolicy(p *v1alpha1.GPUSharingPolicy) {
	inPairs(p)
	s.change(p.DeepCopy(), func(o client.Object) {
		is := o.(*v1alpha1.GPUSharingPolicy)
		if equal(is.Spec, p.Spec) {
			p.Spec.Rollout.Drain.TimeoutSeconds++
		}
		is.Spec = p.Spec
	})
	s.noteDesired(p)
}

func (s *run) DeletePolicy(name string) {
	s.deleted(&v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}})
}

func (s *run) ListPolicies() []v1alpha1.GPUSharingPolicy {
	s.t.Helper()
	list := &v1alpha1.GPUSharingPolicyList{}
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	return list.Items
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

// CountAnew takes the present indexes of the GPUs for their places, as a user does who writes indexes into a policy.
func (s *run) CountAnew() {
	all := s.Machines()
	s.facts.Lock()
	defer s.facts.Unlock()
	for _, p := range all {
		for _, d := range p.devices() {
			p.slots[d.UUID] = d.Index
		}
	}
}

func (s *run) MoveToPool(p *place, pool string) {
	p.labels[history.PoolLabel] = pool
	s.ChangeNode(p.name, func(n *corev1.Node) { n.Labels[history.PoolLabel] = pool })
	for i := range s.before.Nodes {
		if s.before.Nodes[i].Name == p.name {
			s.before.Nodes[i].Labels = maps.Clone(s.before.Nodes[i].Labels)
			s.before.Nodes[i].Labels[history.PoolLabel] = pool
		}
	}
}

// agentEvent takes the agent of a node away, or brings it back.
func (s *run) agentEvent(random *rand.Rand) {
	p := history.Some(s, random)
	if p.off {
		return
	}
	p.down.Store(!p.down.Load())
	s.Tell("the agent of %s is lost: %v", p.name, p.down.Load())
}

func (s *run) Lie(p *place, report func(*v1alpha1.GPUNode)) bool {
	n := &v1alpha1.GPUNode{}
	if err := s.client.Get(s.t.Context(), types.NamespacedName{Name: p.name}, n); err != nil {
		return false
	}
	p.EndAgent()
	report(n)
	s.Expect(client.IgnoreNotFound(s.client.Status().Update(s.t.Context(), n))).To(Or(Succeed(), Satisfy(apierrors.IsConflict)))
	return true
}

func (s *run) InUse(p *place, _ int) bool { return len(p.node.Allocations()) > 0 }

func (s *run) DestroyInstance(p *place, index int) error {
	d := p.devices()[index]
	err := p.hardware.DestroyInstance(s.t.Context(), d.UUID, d.State.Instances[0].ID)
	s.rebornUnmanaged(p)
	return err
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

func (s *run) Lead() {
	s.leader()
	s.leader = s.lead()
}

func (s *run) pluginEvent(random *rand.Rand) {
	p := history.Some(s, random)
	s.restartPlugin(p)
	s.Tell("the device plugin of %s restarts", p.name)
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
	p := history.Some(s, random)
	p.deaf.Store(!p.deaf.Load())
	s.Tell("the device plugin of %s cannot read the GPUs: %v", p.name, p.deaf.Load())
}

// draEvent lets NVIDIA's DRA driver come to a node, or restart: for a moment neither a pod nor a ResourceSlice shows
// it.
func (s *run) draEvent(random *rand.Rand) {
	p := history.Some(s, random)
	var sign client.Object = draSlice(p.name)
	if random.IntN(2) == 0 {
		sign = draPod(p.name)
	}
	had := s.deleted(draSlice(p.name))
	if had = s.deleted(draPod(p.name)) || had; had {
		s.Tell("NVIDIA's DRA driver of %s ends", p.name)
		s.rounds(1+random.IntN(3), random)
		s.disturbed()
	}
	if random.IntN(3) > 0 && !p.off {
		s.Eventually(func() error { return s.client.Create(s.t.Context(), sign.DeepCopyObject().(client.Object)) }, patience, pollEvery).
			Should(Or(Succeed(), Satisfy(apierrors.IsAlreadyExists)))
		s.Tell("NVIDIA's DRA driver of %s runs, which shows by a %T", p.name, sign)
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
