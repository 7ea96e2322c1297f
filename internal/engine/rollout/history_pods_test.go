// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// podKinds are the kinds of pods of users that use a GPU.
func podKinds() []string {
	return []string{"replica", "replica", "tolerant", "bare", "static", "daemon", "init", "process", "outside", "protected", "hanging", "claim"}
}

func (c *run) podEvent(random *rand.Rand) {
	c.start(c.some(random), podKinds()[random.IntN(len(podKinds()))], random)
}

// start lets a pod come to a node, if there is room and it tolerates what is there.
func (c *run) start(h *host, kind string, random *rand.Rand) {
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
	index, instance, uuid := random.IntN(len(devices)), gpu.WholeGPU, ""
	d := devices[index]
	if h.sick[d.UUID] && requests {
		return
	}
	if d.State.MIG {
		if len(d.State.Instances) == 0 {
			return
		}
		i := d.State.Instances[random.IntN(len(d.State.Instances))]
		instance, uuid = i.ID, i.UUID
	}
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
	}
	if requests {
		pod.GPU, pod.Requests, pod.Workload = true, map[string]int64{"nvidia.com/gpu": 1}, kind
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

// leaveEvent ends a pod.
func (c *run) leaveEvent(random *rand.Rand) {
	h := c.some(random)
	if pods := h.userPods(); len(pods) > 0 {
		c.leaves(h, pods[random.IntN(len(pods))])
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
