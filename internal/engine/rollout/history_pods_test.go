// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// PodKinds are the kinds of pods of users that use a GPU.
func (c *run) PodKinds() []string {
	return []string{"replica", "replica", "tolerant", "bare", "static", "daemon", "init", "process", "outside", "protected", "hanging", "claim"}
}

// start lets a pod come to a node, if there is room and it tolerates what is there.
func (c *run) Start(h *host, kind string, random *rand.Rand) {
	tainted := slices.ContainsFunc(h.Taints, func(t corev1.Taint) bool { return t.Effect == corev1.TaintEffectNoSchedule })
	ignores := kind == "tolerant" || kind == "static" || kind == "outside" || kind == "daemon" || kind == "process"
	requests := kind != "outside" && kind != "process" && kind != "claim"
	if h.off || h.upgrade.goesOn() || !h.down.IsZero() || tainted && !ignores || requests && len(advertised(h)) == 0 {
		return
	}
	if h.driver.serves {
		c.startByClaim(h, kind, random)
		return
	}
	claims := slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA })
	if claims != (kind == "claim") && kind != "outside" {
		return // where NVIDIA's DRA driver offers the GPUs, they are got by claims alone
	}
	devices := h.devices()
	if len(devices) == 0 {
		return
	}
	index, of := random.IntN(len(devices)), gpu.Instance{ID: gpu.WholeGPU}
	d := devices[index]
	if h.sick[d.UUID] && requests {
		return
	}
	if d.State.MIG {
		if len(d.State.Instances) == 0 {
			return
		}
		of = d.State.Instances[random.IntN(len(d.State.Instances))]
	}
	instance, uuid := of.ID, of.UUID
	c.serial++
	name := fmt.Sprintf("%s-%d", kind, c.serial)
	pod := cluster.Pod{Namespace: "user", Name: name, UID: "uid-" + name, Controller: "ReplicaSet", Scheduled: c.Now}
	switch kind {
	case "bare":
		pod.Controller = ""
	case "static":
		pod.Controller, pod.Mirror = "Node", true
	case "daemon":
		pod.Controller = "DaemonSet"
	case "tolerant":
		pod.Tolerates = true
	case "init":
		pod.InitHolds = true
	case "claim":
		pod.Claim = "user/" + name
		h.reserve(name, nvidia.DeviceName(d, of))
	}
	if requests {
		pod.GPU, pod.Requests, pod.Workload = true, gpusOnly(1), kind
	}
	process := gpu.Process{PID: 10000 + c.serial, Name: "python", PodUID: pod.UID, Instance: instance}
	switch kind {
	case "outside":
		process.PodUID = ""
		c.addProcess(h, d.UUID, process)
	case "process":
		h.Pods = append(h.Pods, pod)
		c.addProcess(h, d.UUID, process)
	case "init", "claim":
		h.Pods = append(h.Pods, pod) // the kubelet's list names no device of these
	default:
		c.hold(h, name, index, instance)
		h.Pods[len(h.Pods)-1] = pod
	}
	if kind != "outside" {
		c.heldGPUs[name] = heldGPU{node: h.Name, uuid: d.UUID, instance: uuid, mig: d.State.MIG, boot: h.bootID(), unseen: h.lags}
	}
	c.kinds[name] = kind
	c.protected[name], c.hangs[name] = kind == "protected", kind == "hanging"
	c.tell("pod %s comes to GPU %d of %s", name, index, h.Name)
}

// startBeside lets a pod come to a node that uses no GPU: of kind cpu, or cpu-tolerant.
func (c *run) startBeside(h *host, kind string) {
	name := fmt.Sprintf("%s-of-%s-%d", kind, h.Name, len(c.kinds))
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: name, UID: "uid-" + name, Controller: "ReplicaSet", Scheduled: c.Now, Tolerates: kind == "cpu-tolerant",
	})
	c.kinds[name] = kind
	c.tell("pod %s comes to %s", name, h.Name)
}

func (c *run) addProcess(h *host, uuid string, p gpu.Process) {
	if err := h.hardware.AddProcess(uuid, p); err != nil {
		panic(err)
	}
	h.report()
}

func (c *run) UserPods(h *host) (names []string) {
	for _, p := range h.userPods() {
		names = append(names, p.Name)
	}
	return names
}

func (c *run) EndPod(h *host, name string) {
	for _, p := range h.userPods() {
		if p.Name == name {
			c.leaves(h, p)
		}
	}
}

// leaves ends a pod, with its processes.
func (c *run) leaves(h *host, p cluster.Pod) {
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			n.GPUs[i].Processes = slices.DeleteFunc(n.GPUs[i].Processes, func(o gpu.Process) bool { return o.PodUID == p.UID })
		}
	})
	c.end(h, p.Name)
	delete(c.heldGPUs, p.Name)
}

// tenantEvent lets a pod of a tenant come to a node that uses no GPU, and looks like one of NVIDIA's or NFD's, or has the name of a user's. It
// stays, whatever ends others.
func (c *run) tenantEvent(random *rand.Rand) {
	h := c.some(random)
	c.serial++
	name := fmt.Sprint("tenant-", c.serial)
	if users := c.UserPods(h); len(users) > 0 && random.IntN(2) == 0 {
		if user := users[random.IntN(len(users))]; c.tenants[user] == nil {
			name = user
		}
	}
	if c.kinds[name] == "" {
		c.kinds[name] = "cpu-tenant"
	}
	looks := slices.Sorted(maps.Keys(disguises()))
	look, owner := looks[random.IntN(len(looks))], slices.Sorted(maps.Keys(owners()))[random.IntN(len(owners()))]
	plain := tenantPod(name, owners()[owner])
	if strings.Contains(owner, "DaemonSet") && random.IntN(4) == 0 { // a finalizer keeps it, and no drain waits for it
		plain.DeletionTimestamp = &metav1.Time{Time: c.Now.Add(-time.Hour)}
	}
	if random.IntN(2) == 0 {
		plain.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}},
		}}
	}
	pod := plain.DeepCopy()
	disguises()[look](pod)
	h.Pods = slices.Insert(h.Pods, random.IntN(len(h.Pods)+1), cluster.PodOf(pod, c.programs()))
	c.tenants[string(pod.UID)] = plain
	c.tell("pod %s of a tenant comes to %s: %s, controller: %s", name, h.Name, look, owner)
}

// watcherEvent lets a pod of a tenant's DaemonSet come to a node of NVIDIA's DRA driver that selects its node as DCGM or its exporter do, and
// changes the GPUs there, for which those are restarted with the driver.
func (c *run) watcherEvent(random *rand.Rand) {
	h := c.onDRA(random)
	if h == nil || c.seed < onDriver {
		return
	}
	c.serial++
	name, labels := fmt.Sprint("tenant-", c.serial), cluster.MonitorLabels()
	c.kinds[name] = "cpu-tenant"
	plain := tenantPod(name, owners()["a DaemonSet of the tenant"])
	pod, label := plain.DeepCopy(), labels[random.IntN(len(labels))]
	disguises()["nodeSelector "+label](pod)
	h.Pods = slices.Insert(h.Pods, random.IntN(len(h.Pods)+1), cluster.PodOf(pod, c.programs()))
	c.tenants[string(pod.UID)] = plain
	c.tell("pod %s of a tenant comes to %s, which has %s", name, h.Name, label)
	c.reshareEvent(random)
	c.rest(20*time.Minute, 150)
	c.impartial()
}

// guiseEvent lets pods of users come that have a GPU and select their node by a label of NVIDIA's, while a policy is
// edited.
func (c *run) guiseEvent(random *rand.Rand) {
	labels := append(cluster.DeployLabels(), mpsLabel, v1alpha1.LabelMIGManager)
	for range 1 + random.IntN(3) {
		h, known := c.some(random), c.serial
		c.Start(h, []string{"replica", "bare", "hanging"}[random.IntN(3)], random)
		if c.serial == known || len(h.Pods) == 0 {
			continue
		}
		p := &h.Pods[len(h.Pods)-1]
		p.NodeSelector = map[string]string{labels[random.IntN(len(labels))]: "true"}
		c.guises[p.UID] = true
		c.tell("pod %s selects its node by %v", p.Name, p.NodeSelector)
	}
	history.Edit(c, random)
	for range 12 {
		c.step(true)
		c.lapse(time.Second)
		c.impartial()
	}
}

// impartial looks whether the pods of tenants are treated as they would be if they looked like any other pod.
func (c *run) impartial() {
	if len(c.wronged) > 0 {
		c.breaks("harmless", "%s are deleted as pods of NVIDIA's", strings.Join(c.wronged, ", "))
	}
	if len(c.tenants)+len(c.guises) == 0 || c.broken != "" {
		return
	}
	decide := func(look func(cluster.Pod) cluster.Pod) (says []string) {
		s := c.known()
		seen := *c.OtherControllers
		s.OtherControllers = &seen
		for i := range s.Nodes {
			s.Nodes[i].Pods = slices.Clone(s.Nodes[i].Pods)
			for p := range s.Nodes[i].Pods {
				s.Nodes[i].Pods[p] = look(s.Nodes[i].Pods[p])
			}
		}
		d := rollout.Decide(s)
		says = said(d.Actions)
		for _, n := range d.Nodes {
			says = append(says, fmt.Sprintf("%s is %s (%s): %s", n.Node, n.State, n.Reason, n.Message))
		}
		for _, policy := range slices.Sorted(maps.Keys(d.Policies)) {
			for _, o := range d.Policies[policy].Conditions {
				says = append(says, fmt.Sprintf("%s of %s is %s (%s): %s", o.Type, policy, o.Status, o.Reason, o.Message))
			}
		}
		return append(says, "look again after "+d.After.String())
	}
	is := decide(func(p cluster.Pod) cluster.Pod { return p })
	would := decide(func(p cluster.Pod) cluster.Pod {
		if plain, ofTenant := c.tenants[p.UID]; ofTenant {
			return cluster.PodOf(plain, c.programs())
		}
		if c.guises[p.UID] {
			p.NodeSelector = nil
		}
		return p
	})
	for i := range is {
		if i >= len(would) || is[i] != would[i] {
			c.breaks("harmless", "by the looks of a tenant's pod: %s", is[i])
			return
		}
	}
}
