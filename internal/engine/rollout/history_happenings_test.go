// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// happenings are the events that a history of any seed may have, by name. Not one can be added: see history.Late.
func happenings() map[string]func(*run, *rand.Rand) {
	return map[string]func(*run, *rand.Rand){
		"die": (*run).dieEvent, "return": (*run).returnEvent, "reboot": (*run).rebootEvent,
		"sick": (*run).sickEvent, "lost": (*run).lostEvent, "join": (*run).joinEvent,
		"replace-node": (*run).replaceNodeEvent,
		"pod":          (*run).podEvent, "pods": (*run).podEvent, "leave": (*run).leaveEvent,
		"rewrite": (*run).rewriteEvent, "rewrites": (*run).rewriteEvent, "fight": (*run).fightEvent,
		"back-up": (*run).backUpEvent, "restore": (*run).restoreEvent, "delete": (*run).deleteEvent,
		"edit": (*run).editEvent, "edits": (*run).editEvent, "split": (*run).splitEvent, "drop": (*run).dropEvent,
		"create": (*run).createEvent, "relabel": (*run).relabelEvent,
		"upgrade": (*run).upgradeEvent, "crd": (*run).crdEvent,
		"agent": (*run).agentEvent, "crash": (*run).crashEvent, "lie": (*run).lieEvent,
		"destroy": (*run).destroyEvent, "lead": (*run).leadEvent, "wait": (*run).waitEvent,
		"dra": (*run).draEvent, "plugin": (*run).pluginEvent, "breaks": (*run).breaksEvent,
	}
}

// lateHappenings are events of seeds from history.Late up alone. A new kind of event is added here.
func lateHappenings() map[string]func(*run, *rand.Rand) {
	return map[string]func(*run, *rand.Rand){
		"flaps":         (*run).flapsEvent,
		"jobs":          (*run).jobsEvent,
		"late-anew":     (*run).anewEvent,
		"late-chart":    (*run).chartEvent,
		"late-brief":    (*run).briefEvent,
		"late-clock":    (*run).clockEvent,
		"late-etcd":     (*run).etcdEvent,
		"late-garbage":  (*run).garbageEvent,
		"late-guise":    (*run).guiseEvent,
		"late-hang":     (*run).hangEvent,
		"late-jump":     (*run).jumpEvent,
		"late-kinds":    (*run).kindsEvent,
		"late-many":     (*run).manyEvent,
		"late-monitor":  (*run).lateMonitorEvent,
		"late-recreate": (*run).recreateEvent,
		"late-names":    (*run).namesEvent,
		"late-refuse":   (*run).refuseEvent,
		"late-unmade":   (*run).unmadeEvent,
		"late-unmet":    (*run).unmetEvent,
		"late-virtual":  (*run).virtualEvent,
		"nights":        (*run).nightsEvent,
		"opt-out":       (*run).optOutEvent,
		"pools":         (*run).poolsEvent,
		"rename":        (*run).renameEvent,
		"retained":      (*run).retainedEvent,
		"scales":        (*run).scalesEvent,
		"stand-back":    (*run).standBackEvent,
		"tenant":        (*run).tenantEvent,
		"upgrades":      (*run).upgradesEvent,
		"windows":       (*run).windowsEvent,
	}
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

// crashEvent lets the agent of a node end in the middle of its steps.
func (c *run) crashEvent(random *rand.Rand) {
	h := c.some(random)
	after := random.IntN(4)
	h.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpObserve {
			return nil
		}
		if after--; after < 0 {
			h.AgentReady = false
			return sim.ErrCrash
		}
		return nil
	}
	c.tell("the agent of %s will end after %d operations", h.Name, after)
}

// lieEvent lets the agent of a node report that all is as desired, and then lag.
func (c *run) lieEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off {
		return
	}
	agents := h.agents()
	for i := range agents {
		agents[i].ObservedGeneration = h.GPU.Generation
		if agents[i].Type == v1alpha1.ConditionApplied {
			agents[i].Status = metav1.ConditionTrue
		}
	}
	h.GPU.Status.Conditions = slices.Concat(rollout.ReportedStatus(h.GPU.Status).Conditions, agents)
	h.lags = true
	c.tell("the agent of %s reports that all is well, and then nothing any more", h.Name)
}

// destroyEvent takes an idle instance away.
func (c *run) destroyEvent(random *rand.Rand) {
	h := c.some(random)
	if h.off || h.hardware.Fail != nil {
		return
	}
	for i, d := range h.devices() {
		uses := func(s heldGPU) bool { return s.uuid == d.UUID }
		if d.State.MIG && len(d.State.Instances) > 0 && len(d.Holders) == 0 && len(d.Processes) == 0 && !c.holdsGPU(uses) && d.State.Instances[0].UUID != "" {
			h.nextByHand()
			h.destroy(i)
			h.reborn()
			c.tell("an instance of GPU %d of %s is destroyed by hand", i, h.Name)
			return
		}
	}
}

func (c *run) holdsGPU(which func(heldGPU) bool) bool {
	for _, s := range c.heldGPUs {
		if which(s) {
			return true
		}
	}
	return false
}

func (c *run) leadEvent(*rand.Rand) {
	c.lead()
	c.memory, c.Repeats, c.OtherControllers = remembering{}, &action.Repeats{}, &cluster.OtherControllers{}
	for _, h := range c.all() {
		if h.Annotations[v1alpha1.AnnotationOtherController] == "" {
			h.sharedAt = time.Time{} // of that a new leader can know nothing
		}
	}
	c.tell("another controller leads")
}

// waitEvent lets time pass, as if nobody looked.
func (c *run) waitEvent(random *rand.Rand) {
	d := []time.Duration{time.Minute, 6 * time.Minute, 20 * time.Minute, 2 * time.Hour}[random.IntN(4)]
	c.tell("%s pass", d)
	c.rest(d, 60)
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
