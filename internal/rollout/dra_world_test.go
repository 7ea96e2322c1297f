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

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/dra"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// slicesOutlive is how long the kubelet keeps the ResourceSlices of a driver that is gone.
const slicesOutlive = 30 * time.Second

// driver is NVIDIA's DRA driver on a host, as it was measured: it enumerates the GPUs once, when its pod starts.
type driver struct {
	serves  bool // its DaemonSet selects the node
	broken  bool // it starts, and publishes nothing new
	refused bool // an admission webhook refuses the DeviceTaintRule of the node
	shares  int64
	slices  bool      // its feature gate TimeSlicingSettings is on
	uid     string    // of the pod that has published
	boot    string    // in which it runs
	gone    time.Time // since when there is none
}

// addDRA adds a node that NVIDIA's DRA driver alone serves, and what its chart and Kubernetes 1.37 bring.
func (c *cluster) addDRA(name string, models ...sim.Model) *host {
	c.DRA.ServesClasses, c.DRA.ServesRules = true, true
	if len(c.DRA.Classes) == 0 {
		c.DRA.Classes = []dra.Class{{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"}}
	}
	h := c.add(name, models...)
	h.Labels[pluginLabel] = "false"
	if !c.Plugin.ClusterPolicy {
		h.Labels[gfdLabel] = "false" // it comes with the device plugin
	}
	h.driver = driver{serves: true, shares: 1}
	h.DRA = "DaemonSet nvidia-dra/kubelet-plugin"
	c.settle(h)
	c.tick(2 * time.Second)
	return h
}

// switchOver lets NVIDIA's DRA driver, or its device plugin, serve a node that the other one served.
func (c *cluster) switchOver(h *host, toDRA bool) {
	h.driver = driver{serves: toDRA, shares: 1}
	h.Labels[pluginLabel], h.DRA = "true", ""
	if toDRA {
		h.Labels[pluginLabel], h.DRA = "false", "DaemonSet nvidia-dra/kubelet-plugin"
		return
	}
	h.Pods = slices.DeleteFunc(h.Pods, func(p world.Pod) bool { return p.DRA })
	h.Published = nil
}

// publish is the driver's DaemonSet, its pod, and the kubelet that cleans up behind it.
func (c *cluster) publish(h *host) {
	if !h.driver.serves {
		return
	}
	h.Claims = slices.DeleteFunc(slices.Clone(h.Claims), func(claim dra.Claim) bool { // Kubernetes collects those of pods that are gone
		return len(claim.Pods) > 0 && len(claim.Others) == 0 && !slices.ContainsFunc(h.Pods, func(p world.Pod) bool { return slices.Contains(claim.Pods, p.UID) })
	})
	if boot := h.bootID(); h.driver.boot != boot {
		if h.driver.boot != "" {
			h.Pods = slices.DeleteFunc(h.Pods, func(p world.Pod) bool { return p.DRA })
		}
		h.driver.boot = boot
	}
	at := slices.IndexFunc(h.Pods, func(p world.Pod) bool { return p.DRA })
	if at < 0 {
		if h.driver.gone.IsZero() {
			h.driver.gone = c.Now
		}
		if c.Now.Sub(h.driver.gone) >= slicesOutlive {
			h.Published = nil
		}
		c.pods++
		uid := fmt.Sprintf("dra-%d", c.pods)
		h.Pods = append(h.Pods, world.Pod{Namespace: "nvidia-dra", Name: uid, UID: uid, Controller: "DaemonSet", DRA: true, SetsTimeSlices: h.driver.slices, Serves: true, Scheduled: c.Now})
		return // it starts after that
	}
	if p := &h.Pods[at]; p.UID != h.driver.uid && c.Now.After(p.Scheduled) {
		h.driver.uid, h.driver.gone, p.ReadySince = p.UID, time.Time{}, c.Now
		if !h.driver.broken {
			h.Published = h.shown()
		}
	}
}

// shown is what the driver publishes of the GPUs as they are now.
func (h *host) shown() *dra.Pool {
	var devices []dra.Device
	for _, d := range h.devices() {
		if !d.State.MIG {
			devices = append(devices, dra.Device{Name: fmt.Sprintf("gpu-%d", d.Index), Type: "gpu", UUID: d.UUID, Shares: h.driver.shares})
			continue
		}
		for _, i := range d.State.Instances {
			if !i.Partial {
				devices = append(devices, dra.Device{Name: deviceName(d, i), Type: "mig", UUID: i.UUID, Profile: i.Profile, Parent: d.UUID, Shares: h.driver.shares})
			}
		}
	}
	pool := dra.PoolOf([]dra.Slice{{Generation: 1, Count: 1, Devices: devices}})
	return &pool
}

func deviceName(d gpu.Device, i gpu.Instance) string {
	return fmt.Sprintf("gpu-%d-mig-%s-19-%d", d.Index, strings.ReplaceAll(i.Profile, ".", ""), i.Placement.Start)
}

// allocate is the scheduler: it gives a pod that requests a resource the first device of the node that is free, not tainted and of a class
// that serves the resource, as the slices show it. The kubelet then prepares it by its name, or the pod hangs for ever.
func (c *cluster) allocate(h *host, name, resource string) (device string) {
	class, served := dra.Offering(c.DRA.Classes, resource)
	if !served || h.Published == nil || !h.Ruled.IsZero() {
		return ""
	}
	for _, d := range h.Published.Devices {
		matches := d.Type == "gpu" && resource == "nvidia.com/gpu" || d.Type == "mig" && dra.ResourceOf(d.Profile) == resource
		used := int64(0)
		for _, claim := range h.Claims {
			if slices.Contains(claim.Of(h.Name), d.Name) {
				used++
			}
		}
		if matches && used < max(d.Shares, 1) && (used == 0 || d.Type == "gpu") {
			c.claim(h, name, d.Name, class.Name, resource)
			return d.Name
		}
	}
	return ""
}

// claim allocates a device to a pod, which the kubelet prepares.
func (c *cluster) claim(h *host, name, device, class, resource string) {
	h.Claims = append(h.Claims, dra.Claim{
		Name: "user/" + name, Classes: []string{class}, Devices: []dra.Allocated{{Pool: h.Name, Device: device}}, Pods: []string{"uid-" + name},
	})
	slices.SortFunc(h.Claims, func(a, b dra.Claim) int { return strings.Compare(a.Name, b.Name) })
	pod := world.Pod{
		Namespace: "user", Name: name, UID: "uid-" + name, Controller: "ReplicaSet", GPU: true, Asks: map[string]int64{resource: 1}, Workload: "Deployment user/" + name,
		Claim: "user/" + name, Scheduled: c.Now, Starting: true,
	}
	for _, d := range h.devices() {
		if !d.State.MIG && device == fmt.Sprintf("gpu-%d", d.Index) {
			pod.Starting = false
			h.holds(d.UUID, gpu.WholeGPU, name)
		}
		for _, i := range d.State.Instances {
			if device == deviceName(d, i) {
				pod.Starting = false
				h.holds(d.UUID, i.ID, name)
			}
		}
	}
	h.Pods = append(h.Pods, pod)
	h.report()
}

// holds lets a container hold a GPU or an instance.
func (h *host) holds(uuid string, instance int, pod string) {
	h.hardware.Update(func(n *sim.Node) {
		g, err := n.GPU(uuid)
		if err != nil {
			panic(err)
		}
		g.Holders = append(g.Holders, gpu.Holder{Namespace: "user", Pod: pod, Container: "main", Instance: instance})
	})
}

// hanging are the pods that wait for a device which is gone.
func (h *host) hanging() []string {
	var names []string
	for _, p := range h.Pods {
		if p.Starting {
			names = append(names, p.Name)
		}
	}
	return names
}

// classes are the DeviceClasses, with their resources.
func (c *cluster) classes() map[string]string {
	classes := map[string]string{}
	for _, class := range c.DRA.Classes {
		classes[class.Name] = class.Resource
	}
	return classes
}

// writeClass is the API server, which drops the resource where its feature gate is off.
func (c *cluster) writeClass(w dra.Write) {
	class := dra.Class{Name: w.Name, Resource: w.Resource, Own: true, Selector: w.Selector, Age: c.Now.Unix()}
	c.DRA.Classes = append(slices.DeleteFunc(slices.Clone(c.DRA.Classes), func(other dra.Class) bool { return other.Name == w.Name }), class)
	if c.dropsNames {
		c.DRA.Classes[len(c.DRA.Classes)-1].Resource = ""
	}
}

// ruled are the nodes that have a DeviceTaintRule.
func (c *cluster) ruled() []string {
	ruled := slices.Clone(c.orphans)
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		if !c.hosts[name].Ruled.IsZero() {
			ruled = append(ruled, name)
		}
	}
	return ruled
}

// named are the classes that claims name.
func (c *cluster) named() []string {
	var named []string
	for _, h := range c.hosts {
		for _, claim := range h.Claims {
			named = append(named, claim.Classes...)
		}
	}
	slices.Sort(named)
	return slices.Compact(named)
}

// untouched reports what of a node belongs to the device plugin and was changed.
func (h *host) untouched() (changed []string) {
	if _, has := h.Labels[v1alpha1.LabelConfig]; has {
		changed = append(changed, v1alpha1.LabelConfig)
	}
	if h.Labels[pluginLabel] != "false" {
		changed = append(changed, pluginLabel)
	}
	for _, t := range h.Taints {
		changed = append(changed, t.Key)
	}
	return changed
}

// serveByDRA lets NVIDIA's DRA driver alone serve a node of a history.
func (c *chronicle) serveByDRA(h *host) {
	c.DRA.ServesClasses, c.DRA.ServesRules = true, true
	if len(c.DRA.Classes) == 0 {
		c.DRA.Classes = []dra.Class{{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"}}
	}
	h.Labels[pluginLabel] = "false"
	delete(h.Labels, v1alpha1.LabelConfig)
	h.driver, h.DRA = driver{serves: true, shares: 1}, "DaemonSet nvidia-dra/kubelet-plugin"
	c.settle(h)
}

// startByClaim lets a pod come to a node of the driver: to what the slices show, or past all that.
func (c *chronicle) startByClaim(h *host, kind string, random *rand.Rand) {
	if kind == "outside" || kind == "process" || h.Published == nil || len(h.Published.Devices) == 0 {
		return
	}
	resources := slices.Sorted(maps.Keys(h.Published.Published()))
	c.serial++
	name := fmt.Sprintf("claim-%d", c.serial)
	device := c.allocate(h, name, resources[random.IntN(len(resources))])
	if device == "" {
		return
	}
	c.kinds[name] = "allocated"
	if c.serial%6 == 0 {
		at := slices.IndexFunc(h.Claims, func(claim dra.Claim) bool { return claim.Name == "user/"+name })
		h.Claims[at].Shared = true
		c.tell("pod %s has its device by a claim that other pods may share", name)
	}
	c.tell("pod %s is allocated %s of %s", name, device, h.Name)
	for _, d := range h.devices() {
		for _, o := range d.Holders {
			if o.Pod != name {
				continue
			}
			s := stake{node: h.Name, uuid: d.UUID, mig: d.State.MIG, boot: h.bootID()}
			for _, i := range d.State.Instances {
				if i.ID == o.Instance {
					s.instance = i.UUID
				}
			}
			c.stakes[name] = s
		}
	}
	if slices.Contains(h.hanging(), name) {
		c.tell("pod %s hangs: %s does not exist", name, device)
	}
}

// waitsToStart lets a pod wait for its claim to be prepared: no container has started, so the kubelet reports no device of it.
func (h *host) waitsToStart(name string) {
	for i := range h.Pods {
		h.Pods[i].Starting = h.Pods[i].Starting || h.Pods[i].Name == name
	}
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			n.GPUs[i].Holders = slices.DeleteFunc(n.GPUs[i].Holders, func(o gpu.Holder) bool { return o.Pod == name })
		}
	})
	h.report()
}

// isAdmins reports whether a container has its device by a claim that the spec names as one of administrators, so that the agent leaves it out.
func (h *host) isAdmins(o gpu.Holder) bool {
	return slices.ContainsFunc(h.Claims, func(c dra.Claim) bool {
		return slices.Contains(h.GPU.Spec.AdminClaims, c.Name) && slices.Contains(c.Pods, "uid-"+o.Pod)
	})
}

// monitor lets a pod of a DaemonSet have all GPUs and instances that the driver publishes, by a claim with adminAccess, in spite of any taint.
func (c *cluster) monitor(h *host, name string) {
	claim := dra.Claim{Name: "monitoring/" + name, Classes: []string{"gpu.nvidia.com"}, Pods: []string{"uid-" + name}}
	for _, d := range h.Published.Devices {
		claim.Admin = append(claim.Admin, dra.Allocated{Pool: h.Name, Device: d.Name})
	}
	h.Claims = append(h.Claims, claim)
	h.Pods = append(h.Pods, world.Pod{Namespace: "user", Name: name, UID: "uid-" + name, Controller: "DaemonSet", Scheduled: c.Now})
	for _, d := range h.devices() {
		if !d.State.MIG {
			h.holds(d.UUID, gpu.WholeGPU, name)
		}
		for _, i := range d.State.Instances {
			h.holds(d.UUID, i.ID, name)
		}
	}
	h.report()
}
