// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// Events are those of every world that a history of any seed may have. Not one can be added: see Late.
func Events[M Machine]() Happenings[World[M]] {
	return Happenings[World[M]]{
		"die": die[M], "return": boot[M], "reboot": reboot[M], "lost": lost[M], "join": join[M], "replace-node": replaceNode[M],
		"pod": pod[M], "pods": pod[M], "leave": leave[M],
		"rewrite": rewrite[M], "rewrites": rewrite[M], "fight": fight[M], "delete": deletes[M],
		"edit": Edit[M], "edits": Edit[M], "split": split[M], "drop": drop[M], "create": create[M], "relabel": relabel[M],
		"crash": crash[M], "lie": lie[M], "destroy": destroy[M], "lead": LeadAnew[M], "wait": wait[M],
	}
}

// LateEvents are those of seeds from Late up alone. A new kind of event is added here.
func LateEvents[M Machine]() Happenings[World[M]] {
	return Happenings[World[M]]{"late-chart": chart[M], "late-recreate": recreate[M]}
}

// Some is one of the machines.
func Some[M Machine](w World[M], random *rand.Rand) M {
	all := w.Machines()
	return all[random.IntN(len(all))]
}

func devicesOf(m Machine) (devices []gpu.Device) {
	m.Hardware().Update(func(n *sim.Node) { devices = n.Observe().Devices })
	return devices
}

func die[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	if m.IsOff() {
		return
	}
	forGood := random.IntN(3) == 0
	w.Die(m, forGood)
	w.Tell("machine %s dies, for good: %v", m.NodeName(), forGood)
}

// boot boots the machines that are off.
func boot[M Machine](w World[M], random *rand.Rand) {
	for _, m := range w.Machines() {
		if m.IsOff() {
			bootWith(w, m, random)
		}
	}
}

func reboot[M Machine](w World[M], random *rand.Rand) {
	if m := Some(w, random); !m.IsOff() {
		w.Die(m, false)
		bootWith(w, m, random)
	}
}

// bootWith boots a machine with the GPUs that it had, fewer, or others.
func bootWith[M Machine](w World[M], m M, random *rand.Rand) {
	var models []sim.Model
	m.Hardware().Update(func(n *sim.Node) {
		for i := range n.GPUs {
			models = append(models, n.GPUs[i].Model)
		}
	})
	what, serial := "as it was", w.Serial()
	switch index := random.IntN(len(models)); random.IntN(4) {
	case 0:
		if len(models) > 1 {
			what = fmt.Sprintf("without GPU %d", index)
			w.SwapGPU(m, index, "", serial)
		}
	case 1:
		what = fmt.Sprintf("with another GPU %d", index)
		w.SwapGPU(m, index, models[index], serial)
	}
	w.Boot(m)
	w.Tell("machine %s boots %s", m.NodeName(), what)
}

// Swap replaces the GPU at an index by a new one of a model in its slot of the machine; an empty model takes it out. Slots are by UUID.
func Swap(m Machine, index int, model sim.Model, serial int, slots map[string]int) {
	m.Hardware().Update(func(n *sim.Node) {
		old := n.GPUs[index]
		if model == "" {
			n.GPUs = slices.Delete(n.GPUs, index, index+1)
			return
		}
		spare, err := sim.NewNode(fmt.Sprintf("spare-%s-%d", m.NodeName(), serial), model)
		if err != nil {
			panic(err) // a mistake in a test
		}
		fresh := spare.GPUs[0]
		fresh.PCIBusID, fresh.NoReset = old.PCIBusID, old.NoReset
		n.GPUs[index] = fresh
		slots[fresh.UUID] = slots[old.UUID]
	})
}

// Partition makes an instance on a GPU in MIG mode, as a user has who does without the operator.
func Partition(m Machine, d gpu.Device) {
	at := d.Profiles[0]
	for _, o := range d.Profiles {
		if strings.HasPrefix(o.Name, "2g.") && !strings.Contains(o.Name, "+") {
			at = o
		}
	}
	if err := m.Hardware().CreateInstance(context.Background(), d.UUID, at.Name, gpu.Placement{Start: at.Starts[0], Size: at.Size}); err != nil {
		panic(err)
	}
}

// Models are those of the GPUs of a machine.
func Models(random *rand.Rand) []sim.Model {
	models := []sim.Model{Pick(random, sim.A100, sim.A100, sim.H100, sim.T4)}
	for random.IntN(2) > 0 && len(models) < 3 {
		models = append(models, models[0])
	}
	return models
}

// lost takes a GPU off the bus of a machine that runs, and what used it ends.
func lost[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	count := len(devicesOf(m))
	if m.IsOff() || count < 2 {
		return
	}
	index := random.IntN(count)
	w.LoseGPU(m, index)
	w.Tell("GPU %d of %s falls off the bus", index, m.NodeName())
}

func join[M Machine](w World[M], random *rand.Rand) {
	if len(w.Machines()) < w.MostMachines() {
		w.Join(fmt.Sprintf("j%d", w.Serial()), random)
	}
}

// replaceNode deletes a Node with all that is on it, and registers another machine of that name.
func replaceNode[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	w.Tell("node %s is replaced", m.NodeName())
	w.ReplaceNode(m, random)
}

func pod[M Machine](w World[M], random *rand.Rand) {
	m, kinds := Some(w, random), w.PodKinds()
	w.Start(m, kinds[random.IntN(len(kinds))], random)
}

func leave[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	if pods := w.UserPods(m); len(pods) > 0 {
		w.EndPod(m, pods[random.IntN(len(pods))])
	}
}

// Rewrite is a way in which another controller changes what the operator has written. Again reports whether there was anything to do.
type Rewrite struct {
	What  string
	Again func() bool
}

// ARewrite is one of them.
func ARewrite[M Machine](w World[M], random *rand.Rand) Rewrite {
	name, ofClusterPolicy := Some(w, random).NodeName(), w.ClusterPolicyRewrites()
	untaint := func(keys ...string) func() bool {
		return func() bool {
			return w.ChangeNode(name, func(n *corev1.Node) {
				n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool { return slices.Contains(keys, t.Key) })
			})
		}
	}
	const before = 5
	switch which := random.IntN(before + len(ofClusterPolicy) + 4); {
	case which == 0:
		return Rewrite{"our taint of " + name, untaint(v1alpha1.TaintChanging)}
	case which == 1:
		return Rewrite{"the policy's taint of " + name, untaint(Taint().Key, v1alpha1.TaintStartup)}
	case which == 2:
		edits := Maybe(random)
		return Rewrite{fmt.Sprintf("keys of our ConfigMap, content: %v", edits), func() bool {
			return w.ChangeConfigMap(func(data map[string]string) {
				for key := range data {
					if data[key] = "version: v1\n"; !edits {
						delete(data, key)
					}
				}
			})
		}}
	case which == 3:
		return Rewrite{"our NodeFeature of " + name, func() bool { return w.DeleteNodeFeature(name) }}
	case which == 4:
		return Rewrite{"annotations of GPUNode " + name, func() bool {
			return w.ChangeGPUNode(name, func(n *v1alpha1.GPUNode) { n.Annotations = nil })
		}}
	case which < before+len(ofClusterPolicy):
		return ofClusterPolicy[which-before]
	}
	label, value := Other(random)
	w.Theirs(name, label, value)
	return Rewrite{fmt.Sprintf("%s=%s of %s", label, value, name), func() bool { return w.SetByOthers(name, label, value) }}
}

// SetByOthers gives a label or annotation of a node another value, as another controller does; empty: removes it. What only the operator or
// NVIDIA's makes is not made.
func SetByOthers(n *corev1.Node, label, value string) {
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

func rewrite[M Machine](w World[M], random *rand.Rand) {
	r := ARewrite(w, random)
	w.Tell("another controller rewrites %s: %v", r.What, r.Again())
}

// fight lets another controller set something again whenever the operator has changed it.
func fight[M Machine](w World[M], random *rand.Rand) {
	r := ARewrite(w, random)
	w.Tell("another controller sets again and again: %s", r.What)
	w.Fight(r.Again, 2*time.Hour)
	Bounded(w, "while another controller set again and again "+r.What, mostOfAFight)
	w.Tell("and stops")
}

// The event "delete" removes one of the objects that the operator makes.
func deletes[M Machine](w World[M], random *rand.Rand) {
	name, kind := Some(w, random).NodeName(), random.IntN(3)
	switch kind {
	case 0:
		w.DeleteConfigMap()
	case 1:
		w.DeleteNodeFeature(name)
	default:
		w.DeleteGPUNode(name)
	}
	w.Tell("our %s (of %s) is deleted", []string{"ConfigMap", "NodeFeature", "GPUNode"}[kind], name)
}

// Edit edits one of the policies.
func Edit[M Machine](w World[M], random *rand.Rand) {
	all := w.ListPolicies()
	if len(all) == 0 {
		return
	}
	p := &all[random.IntN(len(all))]
	field := EditPolicy(p, random)
	if w.UpdatePolicy(p); field == "gpuSelector" {
		w.CountAnew()
	}
	w.Tell("policy %s is edited: %s, now %s", p.Name, field, Says(p))
}

// split makes two policies of one, for a pool each.
func split[M Machine](w World[M], random *rand.Rand) {
	if len(w.ListPolicies()) == 1 {
		Replace(w, Split(random))
	}
}

func create[M Machine](w World[M], random *rand.Rand) {
	if len(w.ListPolicies()) == 0 {
		Replace(w, Policies(random))
	}
}

// Replace replaces all policies.
func Replace[M Machine](w World[M], policies []v1alpha1.GPUSharingPolicy) {
	w.ReplacePolicies(policies)
	w.CountAnew()
	for i := range policies {
		w.Tell("policy %s: %s", policies[i].Name, Says(&policies[i]))
	}
}

func drop[M Machine](w World[M], random *rand.Rand) {
	if all := w.ListPolicies(); len(all) > 0 {
		name := all[random.IntN(len(all))].Name
		w.DeletePolicy(name)
		w.Tell("policy %s is deleted", name)
	}
}

// relabel moves a node to the other pool.
func relabel[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	w.MoveToPool(m, map[string]string{"a": "b", "b": "a"}[m.Pool()])
	w.Tell("node %s moves to pool %s", m.NodeName(), m.Pool())
}

// crash lets the agent of a node end in the middle of its steps.
func crash[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	after := random.IntN(4)
	w.Tell("the agent of %s will end after %d operations", m.NodeName(), after)
	m.Hardware().Fail = func(op sim.Op, _ string) error {
		if op == sim.OpObserve {
			return nil
		}
		if after--; after < 0 {
			m.EndAgent()
			return sim.ErrCrash
		}
		return nil
	}
}

// lie lets the agent of a node report that all is as desired, and then nothing any more.
func lie[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	if !m.IsOff() && w.Lie(m, reportAllWell) {
		w.Tell("the agent of %s reports that all is well, and then nothing any more", m.NodeName())
	}
}

func reportAllWell(n *v1alpha1.GPUNode) {
	ours := rollout.ReportedStatus(n.Status).Conditions
	for i := range n.Status.Conditions {
		c := &n.Status.Conditions[i]
		if slices.Contains(ours, *c) {
			continue
		}
		if c.ObservedGeneration = n.Generation; c.Type == v1alpha1.ConditionApplied {
			c.Status = metav1.ConditionTrue
		}
	}
}

// destroy takes an idle instance away.
func destroy[M Machine](w World[M], random *rand.Rand) {
	m := Some(w, random)
	if m.IsOff() || m.Hardware().Fail != nil {
		return
	}
	for i, d := range devicesOf(m) {
		if d.State.MIG && len(d.State.Instances) > 0 && len(d.Processes) == 0 && !w.InUse(m, i) {
			w.Tell("an instance of GPU %d of %s is destroyed by hand: %v", i, m.NodeName(), w.DestroyInstance(m, i))
			return
		}
	}
}

// LeadAnew lets another controller lead.
func LeadAnew[M Machine](w World[M], _ *rand.Rand) {
	w.Lead()
	w.Tell("another controller leads")
}

func wait[M Machine](w World[M], random *rand.Rand) {
	d := Pick(random, time.Minute, 6*time.Minute, 20*time.Minute, 2*time.Hour)
	w.Tell("%s pass", d)
	w.Pass(d)
}

// recreate deletes NVIDIA's ClusterPolicy and creates it again, as a user does who installs the GPU Operator anew.
func recreate[M Machine](w World[M], random *rand.Rand) {
	if !w.HasClusterPolicy() {
		return
	}
	w.Tell("the ClusterPolicy is deleted")
	w.DeleteClusterPolicy(random)
	w.Tell("the ClusterPolicy is created again")
	w.ApplyChart(random)
}

// chart upgrades the chart of the GPU Operator, which writes mig.strategy: single.
func chart[M Machine](w World[M], random *rand.Rand) {
	if w.HasClusterPolicy() {
		w.Tell("the chart of the GPU Operator is upgraded")
		w.ApplyChart(random)
	}
}
