// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// toMIG is a cluster of one node with two GPUs, under a policy that wants three instances on each.
func toMIG(with ...func(*v1alpha1.GPUSharingPolicy)) (*site, *host) {
	c, h := withGPUs(sim.A100, sim.A100)
	c.setPolicy("research", mig(count("2g", 3)), with...)
	return c, h
}

func evicting(p *v1alpha1.GPUSharingPolicy) {
	p.Spec.Rollout.Drain.Mode = v1alpha1.DrainModeEvict
}

func neverEvicting(p *v1alpha1.GPUSharingPolicy) {
	p.Spec.Rollout.Drain.Mode = v1alpha1.DrainModeNever
}

func paused(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.Paused = true }

func failures(n int32) func(*v1alpha1.GPUSharingPolicy) {
	return func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Rollout.FailureThreshold = n }
}

// TestStates brings a node into each state and asks what is said and done.
func TestStates(t *testing.T) {
	const noActions = ""
	for name, c := range map[string]struct {
		situation func() *site
		state     node.State
		reason    string
		message   string // a part of it
		actions   []string
		after     time.Duration
	}{
		"the agent does not run": {
			situation: func() *site { c, h := toMIG(); h.AgentReady = false; return c },
			state:     node.Unknown, reason: v1alpha1.ReasonAgentNotReporting, message: "the agent on the node is not Ready",
			actions: []string{"write keys research-…"},
		},
		"the agent has reported nothing": {
			situation: func() *site { c, h := toMIG(); h.GPU.Status.Devices = nil; return c },
			state:     node.Unknown, reason: v1alpha1.ReasonAgentNotReporting, message: "has not reported any GPU yet",
		},
		"the agent cannot read the GPUs any more": {
			situation: func() *site {
				c, h := toMIG()
				h.GPU.Status.Conditions = []metav1.Condition{{
					Type: v1alpha1.ConditionDiscovered, Status: metav1.ConditionUnknown, Message: "driver not loaded",
				}}
				return c
			},
			state: node.Unknown, reason: v1alpha1.ReasonAgentNotReporting, message: "driver not loaded",
			actions: []string{"write keys research-…"},
		},
		"the GPU has no such profile": {
			situation: func() *site {
				c, _ := toMIG(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = mig(count("1g.99gb", 1)) })
				return c
			},
			state: node.Unsupported, reason: v1alpha1.ReasonProfileNotAvailable, message: "1g.99gb",
		},
		"the node has opted out": {
			situation: func() *site { c, h := toMIG(); h.Labels["nvidia.com/gpu.deploy.operands"] = "false"; return c },
			state:     node.Unsupported, reason: v1alpha1.ReasonNodeOptedOut, message: "nvidia.com/gpu.deploy.operands=false",
		},
		"nothing runs and the change is gentle": {
			situation: func() *site {
				c, _ := toMIG(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(4) })
				return c
			},
			state: node.PendingNonDisruptive, reason: v1alpha1.ReasonProgressing, message: "disturbs nothing",
			actions: []string{"write keys research-680dc74bf8", "set spec of GPUNode a: applying policy research"},
		},
		"the change needs the GPUs idle": {
			situation: func() *site { c, _ := toMIG(); return c },
			state:     node.PendingDisruptive, reason: v1alpha1.ReasonProgressing, message: "needs GPUs or instances idle",
			actions: []string{"write keys research-…", "taint node a with gpusharing.io/changing:NoSchedule"},
		},
		"the policy never evicts and the node is in use": {
			situation: func() *site { c, h := toMIG(neverEvicting); c.hold(h, "train", 1, gpu.WholeGPU); return c },
			state:     node.PendingDisruptive, reason: v1alpha1.ReasonGPUInUse, message: "pod user/train (GPU 1)",
			actions: []string{"write keys research-…"},
		},
		"tainted, and a pod is waited for": {
			situation: func() *site {
				c, h := toMIG()
				c.hold(h, "train", 1, gpu.WholeGPU)
				c.reconcile()
				c.tick(time.Minute)
				return c
			},
			state: node.Draining, reason: v1alpha1.ReasonGPUInUse,
			message: "for what must be freed: pod user/train (GPU 1)", actions: []string{noActions}, after: 9 * time.Minute,
		},
		"tainted, and a pod is evicted": {
			situation: func() *site {
				c, h := toMIG(evicting)
				c.hold(h, "train", 1, gpu.WholeGPU)
				c.reconcile()
				c.tick(time.Minute)
				return c
			},
			state: node.Draining, reason: v1alpha1.ReasonGPUInUse, message: "pod user/train (GPU 1)",
			actions: []string{"evict pod user/train: it holds GPU 1"}, after: 9 * time.Minute,
		},
		"a process outside pods is named, for nobody can evict it": {
			situation: func() *site {
				c, h := toMIG(evicting)
				c.reconcile()
				process := gpu.Process{PID: 4711, Name: "Xorg", Instance: gpu.WholeGPU}
				if err := h.hardware.AddProcess(h.devices()[0].UUID, process); err != nil {
					panic(err)
				}
				c.tick(time.Second)
				return c
			},
			state: node.Draining, reason: v1alpha1.ReasonGPUInUse,
			message: "process 4711 (Xorg), which runs outside pods and has to be ended there (GPU 0)",
			actions: []string{noActions}, after: 599 * time.Second,
		},
		"tainted, and a pod has just come": {
			situation: func() *site {
				c, h := toMIG()
				c.reconcile()
				c.tick(time.Second)
				h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "late", UID: "late", GPU: true, Scheduled: c.Now})
				return c
			},
			state: node.Draining, reason: v1alpha1.ReasonGPUInUse, message: "pod user/late was placed on the node just now",
			actions: []string{noActions}, after: 20 * time.Second,
		},
		"tainted, and a pod has just come that has the name of a former one": {
			situation: func() *site {
				c, h := toMIG(onGPUs(0))
				c.hold(h, "late", 1, gpu.WholeGPU)
				c.tick(time.Minute)
				c.reconcile()
				c.tick(time.Second)
				h.succeeded(c, gpusOnly(1))
				return c
			},
			state: node.Draining, reason: v1alpha1.ReasonGPUInUse, message: "pod user/late was placed on the node just now",
			actions: []string{noActions}, after: 20 * time.Second,
		},
		"drained: NVIDIA's mig-manager is disabled": {
			situation: func() *site {
				c, h := toMIG()
				h.Labels[v1alpha1.LabelMIGManager] = "true"
				c.steps(1)
				return c
			},
			state: node.StoppingOperands, reason: v1alpha1.ReasonStoppingOperands, message: "only one may drive MIG",
			actions: []string{"patch node a (keeping NVIDIA's mig-manager off the node): nvidia.com/gpu.deploy.mig-manager=false " +
				"nvidia.com/mig.config=gpu-sharing-operator"},
		},
		"drained: NVIDIA's operands are stopped": {
			situation: func() *site { c, _ := toMIG(); c.steps(1); return c },
			state:     node.StoppingOperands, reason: v1alpha1.ReasonStoppingOperands, message: "stopping NVIDIA's operands",
			actions: []string{"patch node a (stopping NVIDIA's operands): " + pluginLabel + "=paused-for-mig-change " +
				gfdLabel + "=paused-for-mig-change gpusharing.io/stopped=" + pluginLabel + "," + gfdLabel + ",since@…"},
		},
		"drained: another controller has stopped an operand": {
			situation: func() *site {
				c, h := toMIG()
				c.steps(1)
				h.Labels[gfdLabel] = "stopped-by-hand"
				return c
			},
			state: node.StoppingOperands, reason: v1alpha1.ReasonStoppingOperands,
			message: "another controller has set " + gfdLabel + "=stopped-by-hand", actions: []string{noActions},
			after: 899 * time.Second,
		},
		"stopped: NVIDIA's operands are still there": {
			situation: func() *site { c, _ := toMIG(); c.steps(1); c.reconcile(); return c },
			state:     node.StoppingOperands, reason: v1alpha1.ReasonStoppingOperands,
			message: "waiting until NVIDIA's operands are gone: gpu-operator/nvidia-1, gpu-operator/nvidia-2", actions: []string{noActions},
			after: timing.StopTimeout,
		},
		"nothing blocks the change": {
			situation: func() *site { c, _ := toMIG(); c.steps(2); return c },
			state:     node.Idle, reason: v1alpha1.ReasonProgressing, message: "nothing blocks the change",
			actions: []string{"set spec of GPUNode a: applying policy research"},
		},
		"the agent is at work": {
			situation: func() *site { c, _ := toMIG(); c.steps(2); c.reconcile(); return c },
			state:     node.Applying, reason: v1alpha1.ReasonApplying, message: "the agent is changing the GPUs",
			actions: []string{noActions}, after: 15 * time.Minute,
		},
		"the agent took too long": {
			situation: func() *site {
				c, h := toMIG()
				c.steps(2)
				c.reconcile()
				h.GPU.Status.Conditions = []metav1.Condition{{
					Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonRebootRequired,
					Message: "reboot the node", ObservedGeneration: h.GPU.Generation,
				}}
				c.Now = c.Now.Add(15 * time.Minute)
				return c
			},
			state: node.Failed, reason: v1alpha1.ReasonApplyTimedOut,
			message: "did not match the desired state within 15m0s; the agent says RebootRequired: reboot the node",
			actions: []string{"status of GPUNode a: recording that the change failed"},
		},
		"the agent reports that only another desired state helps": {
			situation: func() *site {
				c, h := toMIG()
				c.steps(2)
				c.reconcile()
				h.GPU.Status.Conditions = []metav1.Condition{{
					Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonLayoutDoesNotFit,
					Message: "no room", ObservedGeneration: h.GPU.Generation,
				}}
				return c
			},
			state: node.Failed, reason: v1alpha1.ReasonLayoutDoesNotFit, message: "no room",
			actions: []string{"status of GPUNode a: recording that the change failed"},
		},
		"applied: the plugin is made to see the key": {
			situation: func() *site { c, _ := slicing(); c.steps(1); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "making the configuration research-680dc74bf8 visible",
			actions: []string{
				"trigger a sync of pod gpu-operator/nvidia-1 for research-680dc74bf8@1800000001",
				"trigger a sync of pod gpu-operator/nvidia-2 for research-680dc74bf8@1800000001",
			},
			after: 2 * time.Second,
		},
		"applied: the plugin sees the key soon": {
			situation: func() *site { c, _ := slicing(); c.steps(2); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "making the configuration research-680dc74bf8 visible",
			actions: []string{noActions}, after: time.Second,
		},
		"applied: the agent has seen that the plugin sees the key": {
			situation: func() *site { c, h := slicing(); h.watches = true; c.steps(2); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "selecting the configuration",
			actions: []string{"patch node a (selecting the configuration research-680dc74bf8): " +
				"nvidia.com/device-plugin.config=research-680dc74bf8 gpusharing.io/baseline gpusharing.io/selected=research-680dc74bf8@1800000002"},
		},
		"applied: the agent has seen that a process of another pod sees the key": {
			situation: func() *site {
				c, h := slicing()
				c.steps(2)
				spec := h.GPU.Spec
				h.GPU.Status.Config = v1alpha1.ConfigStatus{Name: spec.ConfigName, ChangeTime: spec.ChangeTime, PodUIDs: []string{"tenant"}}
				return c
			},
			state: node.Selecting, reason: v1alpha1.ReasonSelecting, message: "making the configuration research-680dc74bf8 visible",
			actions: []string{noActions}, after: time.Second,
		},
		"applied: the agent watches, and the plugin does not see the key": {
			situation: func() *site { c, h := slicing(); h.neverSees(); c.steps(6); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "waiting for gpu-operator/nvidia-1, gpu-operator/nvidia-2",
			actions: []string{noActions}, after: time.Second,
		},
		"applied: a sync may have come too early, so it is repeated": {
			situation: func() *site { c, h := slicing(); h.neverSees(); c.steps(7); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "waiting for gpu-operator/nvidia-1, gpu-operator/nvidia-2",
			actions: []string{
				"trigger a sync of pod gpu-operator/nvidia-1 for research-680dc74bf8@1800000007",
				"trigger a sync of pod gpu-operator/nvidia-2 for research-680dc74bf8@1800000007",
			},
			after: 2 * time.Second,
		},
		"applied: an agent that is silent for too long is not waited for": {
			situation: func() *site { c, h := slicing(); h.neverSees(); c.steps(2); c.tick(3 * time.Minute); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "selecting the configuration",
			actions: []string{"patch node a (selecting the configuration research-680dc74bf8): " +
				"nvidia.com/device-plugin.config=research-680dc74bf8 gpusharing.io/baseline gpusharing.io/selected=research-680dc74bf8@1800000182"},
		},
		"the agent is at work: the plugin is made to see the key meanwhile": {
			situation: func() *site { c, h := slicing(); c.reconcile(); h.GPU.Status.Conditions = nil; return c },
			state:     node.Applying, reason: v1alpha1.ReasonApplying, message: "the agent is changing the GPUs",
			actions: []string{
				"trigger a sync of pod gpu-operator/nvidia-1 for research-680dc74bf8@1800000000",
				"trigger a sync of pod gpu-operator/nvidia-2 for research-680dc74bf8@1800000000",
			},
			after: 15 * time.Minute,
		},
		"applied: the key is selected": {
			situation: func() *site { c, _ := slicing(); c.steps(3); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "selecting the configuration",
			actions: []string{"patch node a (selecting the configuration research-680dc74bf8): " +
				"nvidia.com/device-plugin.config=research-680dc74bf8 gpusharing.io/baseline gpusharing.io/selected=research-680dc74bf8@1800000003"},
		},
		"applied: the plugin still reads the user's ConfigMap": {
			situation: func() *site {
				c, h := slicing()
				c.steps(1)
				for i := range h.Pods {
					h.Pods[i].MountsConfig = false
				}
				return c
			},
			state: node.Selecting, reason: v1alpha1.ReasonSelecting,
			message: "waiting until these pods have restarted with the operator's ConfigMap: gpu-operator/nvidia-1, gpu-operator/nvidia-2",
			actions: []string{noActions}, after: 599 * time.Second,
		},
		"applied: key and operands in one patch": {
			situation: func() *site { c, _ := toMIG(); c.steps(3); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "selecting the configuration",
			actions: []string{"patch node a (selecting the configuration research-…): nvidia.com/device-plugin.config=research-… " +
				pluginLabel + "=true " + gfdLabel + "=true gpusharing.io/baseline gpusharing.io/instances=e060f809b7b17966 gpusharing.io/selected=research-… gpusharing.io/stopped-"},
		},
		"selected: not advertised yet": {
			situation: func() *site { c, _ := slicing(); c.steps(3); c.reconcile(); return c },
			state:     node.Verifying, reason: v1alpha1.ReasonVerifying, message: "nvidia.com/gpu is 2 instead of 8",
			actions: []string{noActions}, after: 150 * time.Second, // when the plugin is started anew
		},
		"selected: our taint keeps the plugin off, and the kubelet has not noticed that it ended": {
			situation: func() *site { c, h := toMIG(); h.losesPlugin(c); return c },
			state:     node.Verifying, reason: v1alpha1.ReasonVerifying, message: "nvidia.com/gpu is 2 instead of 0",
			actions: []string{noActions}, after: 30 * time.Second,
		},
		"selected: our taint has kept the plugin off for a while": {
			situation: func() *site { c, h := toMIG(); h.losesPlugin(c); c.Now = c.Now.Add(30 * time.Second); return c },
			state:     node.Verifying, reason: v1alpha1.ReasonVerifying, message: "nvidia.com/gpu is 2 instead of 0",
			actions: []string{"remove our taint from node a"}, after: 30 * time.Second, // when the plugin should be there
		},
		"selected: something is advertised that must not be": {
			situation: func() *site {
				c, h := slicing()
				c.steps(4)
				h.Allocatable["nvidia.com/mig-1g.5gb"] = 7
				return c
			},
			state: node.Verifying, reason: v1alpha1.ReasonVerifying, message: "nvidia.com/mig-1g.5gb is 7 instead of 0",
			actions: []string{noActions}, after: 149 * time.Second,
		},
		"selected: not advertised in time": {
			situation: func() *site {
				c, _ := slicing()
				c.steps(3)
				c.reconcile()
				c.Now = c.Now.Add(5 * time.Minute)
				return c
			},
			state: node.Failed, reason: v1alpha1.ReasonNotAdvertised,
			message: "not advertised within 5m0s: nvidia.com/gpu is 2 instead of 8",
			actions: []string{"status of GPUNode a: recording that the change failed"},
		},
		"advertised: the taint goes and the state is recorded": {
			situation: func() *site { c, _ := toMIG(); c.steps(4); return c },
			state:     node.Finishing, reason: v1alpha1.ReasonProgressing, message: "taint",
			actions: []string{"remove our taint from node a"},
		},
		"advertised: the state is recorded": {
			situation: func() *site { c, _ := toMIG(); c.steps(5); return c },
			state:     node.UpToDate, reason: v1alpha1.ReasonReady,
			actions: []string{"status of GPUNode a: recording the last good state"},
		},
		"the instances were made anew under the same key": {
			situation: func() *site { c, h := toMIG(); c.steps(5); h.destroy(0); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "starting NVIDIA's device plugin anew",
			actions: []string{"patch node a (starting NVIDIA's device plugin anew, since the MIG instances are not those that it has seen): " +
				"gpusharing.io/instances=68f0f8cbac7e1efb@nvidia-3"},
		},
		"the instances were made anew, and no plugin is known of: one that comes may have seen others": {
			situation: func() *site {
				c, h := toMIG()
				c.run(60)
				h.destroy(1)
				h.Pods = nil
				return c
			},
			state: node.UpToDate, reason: v1alpha1.ReasonReady, actions: []string{noActions},
		},
		"the instances were made anew, and that the plugin goes is written down": {
			situation: func() *site { c, h := toMIG(); c.steps(5); h.destroy(0); c.reconcile(); return c },
			state:     node.Selecting, reason: v1alpha1.ReasonSelecting, message: "starting NVIDIA's device plugin anew",
			actions: []string{"delete pod gpu-operator/nvidia-3: it has not seen the MIG instances that are there"},
		},
		"the instances were made anew, and the plugin reads another ConfigMap, which is no reason to keep it": {
			situation: func() *site {
				c, h := toMIG()
				c.steps(5)
				h.destroy(0)
				h.of(pluginLabel).MountsConfig = false
				return c
			},
			state: node.Selecting, reason: v1alpha1.ReasonSelecting, message: "starting NVIDIA's device plugin anew",
			actions: []string{"patch node a (starting NVIDIA's device plugin anew, since the MIG instances are not those that it has seen): " +
				"gpusharing.io/instances=68f0f8cbac7e1efb@nvidia-3"}, after: 10*time.Minute - 3*time.Second,
		},
		"up to date: no pod leaves, not even one without a UID": {
			situation: func() *site {
				c, h := toMIG()
				c.steps(6)
				h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: "web"})
				return c
			},
			state: node.UpToDate, reason: v1alpha1.ReasonReady,
			actions: []string{noActions},
		},
		"up to date": {
			situation: func() *site { c, _ := toMIG(); c.steps(6); return c },
			state:     node.UpToDate, reason: v1alpha1.ReasonReady,
			actions: []string{noActions},
		},
		"NVIDIA's driver is being upgraded": {
			situation: func() *site {
				c, h := toMIG()
				h.Labels["nvidia.com/gpu-driver-upgrade-state"] = "drain-required"
				return c
			},
			state: node.PendingDisruptive, reason: v1alpha1.ReasonDriverUpgrade, message: "drain-required",
			actions: []string{"write keys research-…"},
		},
		"the device plugin does not read our ConfigMap yet": {
			situation: func() *site { c, _ := toMIG(); c.Plugin.Ready = false; return c },
			state:     node.PendingDisruptive, reason: v1alpha1.ReasonConfiguringDevicePlugin, message: "being configured to use the operator's ConfigMap",
			actions: []string{"write keys research-…"},
		},
		"the rollout is paused": {
			situation: func() *site { c, _ := toMIG(paused); return c },
			state:     node.PendingDisruptive, reason: v1alpha1.ReasonPaused, message: "rollout.paused",
			actions: []string{noActions},
		},
		"the rollout is paused while the node drains": {
			situation: func() *site {
				c, h := toMIG()
				c.hold(h, "train", 1, gpu.WholeGPU)
				c.steps(1)
				paused(&c.Policies[0])
				return c
			},
			state: node.Draining, reason: v1alpha1.ReasonPaused, message: "pod user/train",
			actions: []string{"remove our taint from node a"}, after: 599 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			cl := c.situation()
			d := rollout.Decide(cl.world())
			g.Expect(d.Nodes).To(HaveLen(1))
			g.Expect(one(d).State).To(Equal(c.state), one(d).Message)
			g.Expect(one(d).Reason).To(Equal(c.reason), one(d).Message)
			hasMessage(g, d, c.message)
			if c.state == node.UpToDate {
				g.Expect(one(d).Message).To(BeEmpty())
			}
			var wanted []any
			for _, a := range c.actions {
				if a != noActions {
					wanted = append(wanted, matching(a))
				}
			}
			g.Expect(said(d.Actions)).To(HaveExactElements(wanted...))
			if d.After != c.after {
				g.Expect(cl.wakes()).To(Equal(c.after))
			}
		})
	}
}

// wakes is when something other than a report may happen though nothing changes: a step is reported after a while.
func (c *site) wakes() time.Duration {
	begin := c.Now
	d := rollout.Decide(c.world())
	c.Now = c.Now.Add(d.After)
	report := rollout.Decide(c.world())
	for _, a := range report.Actions {
		c.do(a)
	}
	return c.Now.Sub(begin) + rollout.Decide(c.world()).After
}

// slicing is a cluster of one node under a policy that time-slices.
func slicing() (*site, *host) {
	return toMIG(func(p *v1alpha1.GPUSharingPolicy) { p.Spec.Sharing = timeSlicing(4) })
}

// losesPlugin takes the node through its change, to where the plugin should come back and does not, while the kubelet
// goes on offering what it offered.
func (h *host) losesPlugin(c *site) {
	c.steps(3)
	c.reconcile()
	h.Pods = nil
	h.Allocatable = gpusOnly(2)
}

// neverSees makes an agent that watches pods in which no new key ever becomes visible.
func (h *host) neverSees() {
	h.GPU.Status.Config = v1alpha1.ConfigStatus{Name: "before", PodUIDs: h.readers()}
	h.watches, h.plugin.slow = true, time.Hour
}

// steps reconciles so many times, a second apart.
func (c *site) steps(n int) {
	for range n {
		c.reconcile()
		c.tick(time.Second)
	}
}

// said is what the actions do, without reports that record nothing.
func said(actions []action.Action) []string {
	words := []string{}
	for _, a := range changes(actions) {
		words = append(words, fmt.Sprint(a))
	}
	return words
}

// changes are the actions without reports that record nothing.
func changes(actions []action.Action) []action.Action {
	return slices.DeleteFunc(slices.Clone(actions), func(a action.Action) bool {
		r, is := a.(action.Report)
		return is && strings.HasPrefix(r.Why, "reporting ")
	})
}
