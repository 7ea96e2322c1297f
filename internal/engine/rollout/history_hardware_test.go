// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

// hardwareEvents is what happens to a machine that nobody asked for.
type hardwareEvents struct {
	off        bool            // the machine does not run
	lost       bool            // and never will
	forsaken   bool            // no agent will ever run there again
	lags       bool            // the agent runs, and neither acts nor reports
	unlimited  bool            // memory limits that the agent sets do not read back
	sick       map[string]bool // UUIDs of the GPUs that NVIDIA's device plugin has marked unhealthy since it started
	slots      map[string]int  // by UUID: where in the machine the GPU is, which never changes. The index does, when others die.
	born       map[string]born // by UUID: how the GPU was when it came
	returned   map[string]int  // by UUID: how many writes to the hardware there were when it was given back
	stuck      map[string]bool // UIDs of pods of NVIDIA's that do not end, or whose deletion is refused
	taken      onego           // in which the node is kept from its users
	asks       int             // reconciles in which the agent is asked for what users have
	asksSince  time.Time       // and since when
	pool       string
	backedUp   bool            // its Node or GPUNode was, from a backup
	booted     bool            // since NVIDIA's device plugin was started on purpose
	lastPolicy string          // that governed the node
	seenAlone  bool            // the controller saw last that NVIDIA's DRA driver alone serves it
	sharedAt   time.Time       // when the controller last saw that another one offers the GPUs
	recorded   bool            // the Node has named that controller
	looked     int             // so many writes to the hardware were looked at
	manual     map[int]bool    // which of them a person made
	wrote      map[string]bool // UUIDs of the GPUs that the agent has written to
}

const unreachable = "node.kubernetes.io/unreachable"

// dies switches a machine off, as far as the API server shows it: the agent and the node are not Ready, everything else
// is as it was last reported.
func (c *site) dies(h *host) {
	h.off, h.AgentReady = true, false
	h.Taints = append(slices.Clone(h.Taints), corev1.Taint{Key: unreachable, Effect: corev1.TaintEffectNoSchedule})
	c.version[h.Name]++
}

// returns boots a machine. Its pods are gone, except those that a controller of the node brings back.
func (c *site) returns(h *host) {
	h.off, h.AgentReady, h.lags = false, true, false
	h.down, h.hardware.Fail = c.Now.Add(-bootTime), nil
	h.Taints = slices.DeleteFunc(slices.Clone(h.Taints), func(t corev1.Taint) bool { return t.Key == unreachable })
	for _, p := range slices.Clone(h.Pods) {
		if p.Namespace == "user" {
			c.end(h, p.Name)
		}
	}
	h.theirs = nil
	clear(h.daemons)
	h.booted = true
	back := h.back()
	h.boot()
	h.reborn(back...)
	for uid := range h.dcgm {
		h.dcgm[uid] = append([]string{}, h.instances()...)
	}
	if slices.ContainsFunc(h.Pods, playedBy(mpsLabel)) {
		c.startMPS(h)
	}
	c.version[h.Name]++
}

// forgetHealth is NVIDIA's device plugin when it starts: it takes every GPU for healthy until it hears of an error.
func (h *host) forgetHealth() { h.sick = nil }

// isSick reports whether NVIDIA's device plugin has marked what it advertises unhealthy, with all else of its GPU.
func (h *host) isSick(a nvidia.Advertised) bool {
	return len(h.sick) > 0 && slices.ContainsFunc(h.devices(), func(d gpu.Device) bool {
		return h.sick[d.UUID] && (d.UUID == a.UUID || slices.ContainsFunc(d.State.Instances, func(i gpu.Instance) bool { return i.UUID == a.UUID }))
	})
}

// fallsIll lets NVIDIA's device plugin mark a GPU unhealthy, after an error that the driver has reported (XID). It
// offers the others as before.
func (c *site) fallsIll(h *host, uuid string) {
	if !h.plugin.running {
		return
	}
	sick := maps.Clone(h.sick)
	if sick == nil {
		sick = map[string]bool{}
	}
	sick[uuid] = true
	h.sick = sick
	c.offer(h, h.plugin.loaded)
}

// swap replaces the GPU at an index by a new one of a model; an empty model takes it out.
func (h *host) swap(index int, model sim.Model, serial int) {
	history.Swap(h, index, model, serial, h.slots)
	h.remember()
}

// remember notes where each GPU is, and how it was when it came.
func (h *host) remember() {
	if h.slots == nil {
		h.slots, h.born, h.returned = map[string]int{}, map[string]born{}, map[string]int{}
	}
	for _, d := range h.devices() {
		if _, known := h.slots[d.UUID]; !known {
			h.slots[d.UUID] = d.Index
		}
		if _, known := h.born[d.UUID]; !known {
			h.born[d.UUID] = bornAs(d)
		}
	}
}

// reborn notes how GPUs are that another controller, or a boot, has changed while the operator had no part in them: it
// has recorded no baseline of the node, or none of the GPU, which its policy does not select. back are GPUs that it has
// given back.
func (h *host) reborn(back ...string) {
	baseline := h.GPU.Spec.Baseline
	for _, d := range h.devices() {
		recorded := baseline != nil && (h.changedByUs(d.UUID) ||
			slices.ContainsFunc(baseline.Devices, func(b v1alpha1.DeviceSpec) bool { return b.UUID == d.UUID }))
		if is := bornAs(d); (!recorded || slices.Contains(back, d.UUID)) && !is.equal(h.born[d.UUID]) {
			is.before = new(h.born[d.UUID])
			h.born[d.UUID] = is
		}
	}
	if baseline == nil && h.copied().GPU.Spec.Numbering == nil {
		h.countsAnew()
	}
}

// back are the GPUs that are as they came, on a node without a policy: the controller forgets it next, by what the agent
// has reported, and learns of a boot later. An upgrade of the driver takes what a person had made without the operator too.
func (h *host) back() (uuids []string) {
	for _, d := range h.devices() {
		if h.GPU.Spec.PolicyName == "" && bornAs(d).equal(h.born[d.UUID]) {
			uuids = append(uuids, d.UUID)
		}
	}
	return uuids
}

// isManagersAgain reports whether NVIDIA's mig-manager has its former label back: the GPUs are not the operator's any more.
func (h *host) isManagersAgain() bool {
	name, _, is := timing.Parse(h.Annotations[v1alpha1.AnnotationMIGConfig])
	return is && name != "" && !migmanager.Ours(name) && h.GPU.Spec.PolicyName == ""
}

// countsAnew takes the present indexes of the GPUs for their places, as who writes indexes into a policy does.
func (h *host) countsAnew() {
	for _, d := range h.devices() {
		h.slots[d.UUID] = d.Index
	}
}

// returns notes which GPUs a spec is the first not to list in the baseline, and that are as they came: they are given back,
// also where the whole node is (2^40+805213).
func (h *host) returns(spec v1alpha1.GPUNodeSpec) {
	if h.GPU.Spec.Baseline == nil {
		return
	}
	if spec.Baseline == nil {
		spec.Baseline = &v1alpha1.Baseline{}
	}
	for _, d := range h.devices() {
		listed := cluster.Lists(h.GPU.Spec.Baseline.Devices, d.UUID) && !cluster.Lists(spec.Baseline.Devices, d.UUID)
		if listed && bornAs(d).equal(h.born[d.UUID]) {
			h.returned[d.UUID] = len(h.hardware.Writes())
		}
	}
}

// changedByUs reports whether the agent has changed the mode or the instances of a GPU since that came or was given back.
func (h *host) changedByUs(uuid string) bool {
	writes := h.hardware.Writes()
	for i := h.returned[uuid]; i < len(writes); i++ {
		write := writes[i]
		ofMIG := !strings.HasPrefix(write, string(sim.OpSetComputeMode)) && !strings.HasPrefix(write, string(sim.OpSetTimeSlice))
		if !h.manual[i] && strings.Contains(write, uuid) && ofMIG {
			return true
		}
	}
	return false
}

// nextByHand notes that a person makes the next write to the hardware.
func (h *host) nextByHand() {
	if h.manual == nil {
		h.manual = map[int]bool{}
	}
	h.manual[len(h.hardware.Writes())] = true
}

// born is how a GPU was when it came into the machine.
type born struct {
	mig       bool
	instances []string // profiles, sorted
	before    *born    // as the controller may still have it in its cache
	sliced    bool     // its time slice is another's
}

func bornAs(d gpu.Device) born {
	b := born{mig: d.State.MIG}
	for _, i := range d.State.Instances {
		b.instances = append(b.instances, i.Profile)
	}
	slices.Sort(b.instances)
	return b
}

// equal reports whether a GPU is as it came.
func (b born) equal(o born) bool {
	return b.mig == o.mig && slices.Equal(b.instances, o.instances) || o.before != nil && b.equal(*o.before)
}

// userPods are the pods of users on a host.
func (h *host) userPods() []cluster.Pod {
	var pods []cluster.Pod
	for _, p := range h.Pods {
		if p.Namespace == "user" {
			pods = append(pods, p)
		}
	}
	return pods
}
