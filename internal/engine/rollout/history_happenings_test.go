// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// happenings are the events that a history of any seed may have in this world alone, by name. Not one can be added: see history.Late.
func happenings() history.Happenings[*run] {
	return history.Happenings[*run]{
		"sick": (*run).sickEvent, "back-up": (*run).backUpEvent, "restore": (*run).restoreEvent,
		"upgrade": (*run).upgradeEvent, "crd": (*run).crdEvent, "agent": (*run).agentEvent,
		"dra": (*run).draEvent, "plugin": (*run).pluginEvent, "breaks": (*run).breaksEvent,
	}
}

// lateHappenings are events of seeds from history.Late up alone. A new kind of event that only this world can play is added here.
func lateHappenings() history.Happenings[*run] {
	return history.Happenings[*run]{
		"flaps":        (*run).flapsEvent,
		"jobs":         (*run).jobsEvent,
		"late-anew":    (*run).anewEvent,
		"late-away":    (*run).awayEvent,
		"late-brief":   (*run).briefEvent,
		"late-clock":   (*run).clockEvent,
		"late-daily":   (*run).dailyEvent,
		"late-driver":  (*run).lateDriverEvent,
		"late-etcd":    (*run).etcdEvent,
		"late-garbage": (*run).garbageEvent,
		"late-guise":   (*run).guiseEvent,
		"late-hang":    (*run).hangEvent,
		"late-jump":    (*run).jumpEvent,
		"late-kinds":   (*run).kindsEvent,
		"late-many":    (*run).manyEvent,
		"late-monitor": (*run).lateMonitorEvent,
		"late-names":   (*run).namesEvent,
		"late-refuse":  (*run).refuseEvent,
		"late-unmade":  (*run).unmadeEvent,
		"late-unmet":   (*run).unmetEvent,
		"late-virtual": (*run).virtualEvent,
		"late-watcher": (*run).watcherEvent,
		"nights":       (*run).nightsEvent,
		"opt-out":      (*run).optOutEvent,
		"pools":        (*run).poolsEvent,
		"rename":       (*run).renameEvent,
		"retained":     (*run).retainedEvent,
		"scales":       (*run).scalesEvent,
		"stand-back":   (*run).standBackEvent,
		"tenant":       (*run).tenantEvent,
		"upgrades":     (*run).upgradesEvent,
		"windows":      (*run).windowsEvent,
	}
}

func (h *host) NodeName() string        { return h.Name }
func (h *host) Pool() string            { return h.pool }
func (h *host) IsOff() bool             { return h.off }
func (h *host) Hardware() *sim.Hardware { return h.hardware }
func (h *host) EndAgent()               { h.AgentReady = false }

func (c *run) Tell(format string, args ...any)              { c.tell(format, args...) }
func (c *run) Breaks(invariant, format string, args ...any) { c.breaks(invariant, format, args...) }
func (c *run) Broken() string                               { return c.broken }
func (c *run) Serial() int                                  { c.serial++; return c.serial }
func (c *run) Begin()                                       { c.begin() }
func (c *run) Reconcile(n int)                              { c.reconciles(n) }
func (c *run) Pass(d time.Duration)                         { c.rest(d, 60) }
func (c *run) Machines() []*host                            { return c.all() }
func (c *run) MostMachines() int                            { return 4 }
func (c *run) Counted() map[string]int                      { return c.count }
func (c *run) CheckBudget()                                 {} // it is looked at with every write

func (c *run) Boot(h *host) { c.returns(h) }

func (c *run) Die(h *host, forGood bool) {
	c.dies(h)
	h.lost = forGood
}

func (c *run) tell(format string, args ...any) {
	if c.tells {
		c.transcript = append(c.transcript, fmt.Sprintf("%s %s", c.Now.UTC().Format("15:04:05"), fmt.Sprintf(format, args...)))
	}
}

func (c *run) upgradeEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || h.upgrade.goesOn() || !c.Plugin.ClusterPolicy {
		return
	}
	c.upgrades(h, upgrade{restart: random.IntN(2) == 0, builds: time.Duration(random.IntN(20)) * time.Second})
}

// upgrades replaces NVIDIA's driver on a node.
func (c *run) upgrades(h *host, u upgrade) {
	if !u.restart {
		for _, p := range h.userPods() {
			c.leaves(h, p)
		}
		h.hardware.Update(func(n *sim.Node) {
			for i := range n.GPUs {
				n.GPUs[i].Processes = nil
			}
		})
	}
	h.begins(u)
	c.version[h.Name]++
	c.tell("NVIDIA's driver is upgraded on %s, the pod only: %v", h.Name, u.restart)
}

// crdEvent lets the kind NodeFeature or NVIDIA's ClusterPolicy go, or come back.
func (c *run) crdEvent(random *rand.Rand) {
	if random.IntN(2) == 0 {
		c.Plugin.NodeFeatures = !c.Plugin.NodeFeatures && c.opensCRDs
		if !c.Plugin.NodeFeatures {
			for _, h := range c.all() {
				h.features = features{merged: h.features.merged}
			}
		}
		c.tell("the kind NodeFeature is served: %v", c.Plugin.NodeFeatures)
		return
	}
	if c.Plugin.Reason == "" {
		c.Plugin.Reason, c.Plugin.Message = v1alpha1.ReasonNoDevicePlugin, "there is no ClusterPolicy"
	} else {
		c.Plugin.Reason, c.Plugin.Message = "", ""
	}
	c.Plugin.Ready = c.Plugin.Reason == ""
	c.tell("there is a device plugin that the operator can configure: %v", c.Plugin.Ready)
}

// agentEvent takes the agent of a node away, lets it lag, or brings it back.
func (c *run) agentEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || !h.down.IsZero() || h.upgrade.leaves {
		return
	}
	if random.IntN(2) == 0 {
		h.lags = !h.lags
		c.tell("the agent of %s lags: %v", h.Name, h.lags)
		return
	}
	h.AgentReady = !h.AgentReady
	h.forsaken = !h.AgentReady && random.IntN(4) == 0
	c.tell("the agent of %s is Ready: %v, and will never be: %v", h.Name, h.AgentReady, h.forsaken)
}

func (c *run) Lie(h *host, report func(*v1alpha1.GPUNode)) bool {
	report(&h.GPU)
	h.lags = true
	return true
}

func (c *run) InUse(h *host, index int) bool {
	d := h.devices()[index]
	uses := func(s heldGPU) bool { return s.uuid == d.UUID }
	return len(d.Holders) > 0 || c.holdsGPU(uses) || d.State.Instances[0].UUID == ""
}

func (c *run) DestroyInstance(h *host, index int) error {
	h.nextByHand()
	h.destroy(index)
	h.reborn()
	return nil
}

func (c *run) holdsGPU(which func(heldGPU) bool) bool {
	for _, s := range c.heldGPUs {
		if which(s) {
			return true
		}
	}
	return false
}

func (c *run) Lead() {
	c.lead()
	c.memory, c.Repeats, c.OtherControllers = mostlyRemembering(), &action.Repeats{}, &cluster.OtherControllers{}
	for _, h := range c.all() {
		if h.Annotations[v1alpha1.AnnotationOtherController] == "" {
			h.sharedAt = time.Time{} // of that a new leader can know nothing
		}
	}
}

// draEvent restarts what offers GPUs beside the operator: the pod of NVIDIA's DRA driver, or the slicer's.
func (c *run) draEvent(random *rand.Rand) {
	for _, h := range c.all() {
		if h.OtherPartitioner != "" {
			was := h.OtherPartitioner
			h.OtherPartitioner = ""
			if random.IntN(2) == 0 {
				h.OtherPartitionerLeft = was
			}
			c.tell("the slicer's plugin of %s restarts; it is listed with quantity 0: %v", h.Name, h.OtherPartitionerLeft != "")
			c.reconciles(3 + random.IntN(8))
			h.OtherPartitioner, h.OtherPartitionerLeft = was, ""
		}
		at := slices.IndexFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA })
		if at < 0 {
			continue
		}
		c.tell("the pod of NVIDIA's DRA driver of %s restarts", h.Name)
		if h.driver.serves {
			h.Pods[at].Terminating, h.Pods[at].EndsBy = true, c.Now.Add(30*time.Second)
			c.reconciles(3 + random.IntN(8))
			h.restartDriver()
			continue
		}
		h.Pods[at].Terminating, h.Pods[at].EndsBy = true, c.Now.Add(30*time.Second)
		c.reconciles(3 + random.IntN(8))
		pod := cluster.Pod{}
		h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool {
			if p.DRA {
				pod = p
			}
			return p.DRA
		})
		c.reconciles(random.IntN(3))
		c.serial++
		pod.UID, pod.Name, pod.Terminating, pod.EndsBy, pod.Scheduled = fmt.Sprint("dra-", c.serial), fmt.Sprint("dra-", c.serial), false, time.Time{}, c.Now
		h.Pods = append(h.Pods, pod)
	}
}

// breaksEvent lets the device plugin of a node advertise nothing under the keys that come, until it is repaired.
func (c *run) breaksEvent(random *rand.Rand) {
	h := c.some(random)
	if h.broken != nil {
		h.broken, h.plugin.running = nil, false
		c.tell("the device plugin of %s is repaired", h.Name)
		return
	}
	h.breaks(h.Labels[v1alpha1.LabelConfig])
	c.tell("the device plugin of %s advertises nothing under any other config", h.Name)
}

// pluginEvent restarts the pod of NVIDIA's device plugin, as a person does. For a moment there is none that is not
// ending.
func (c *run) pluginEvent(random *rand.Rand) {
	h := c.some(random)
	isPlugin := func(p cluster.Pod) bool {
		return playedBy(pluginLabel)(p) || !c.Plugin.ClusterPolicy && p.MountsConfig
	}
	at := slices.IndexFunc(h.Pods, isPlugin)
	if h.off || at < 0 {
		return
	}
	c.tell("the device plugin of %s restarts", h.Name)
	uid := h.Pods[at].UID
	h.Pods[at].Terminating, h.Pods[at].EndsBy = true, c.Now
	c.reconciles(1 + random.IntN(2))
	c.deletePod(h, uid)
}
