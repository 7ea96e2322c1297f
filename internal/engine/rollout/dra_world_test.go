// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

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

	pulls    time.Duration     // how long a new pod of it takes to start, while its image is pulled
	dynamic  bool              // the gate DynamicMIG of its DaemonSet is on
	tainted  map[string]string // by device: the taint that it has set since it started
	barred   map[string]bool   // devices that a DeviceTaintRule of an administrator's taints
	edited   bool              // another controller narrowed the operator's DeviceTaintRule
	prepared map[string]bool   // pods whose claims are prepared
	waits    map[string]bool   // pods that wait for a device of another driver
	unready  map[string]bool   // pods that run and are never Ready
}

// driverRuns reports whether its pod on the node has started and answers the kubelet.
func (h *host) driverRuns() bool {
	return h.driver.serves && slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA && p.UID == h.driver.uid && !p.Terminating })
}

// restartDriver ends the pod of the driver on a node. Its DaemonSet makes another.
func (h *host) restartDriver() {
	h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA })
}

// pod is a pod of the host, which must have it.
func (h *host) pod(name string) *cluster.Pod {
	return &h.Pods[slices.IndexFunc(h.Pods, func(p cluster.Pod) bool { return p.Name == name })]
}

// withKey is a copy of a map with one more entry.
func withKey[V any](m map[string]V, key string, value V) map[string]V {
	more := map[string]V{}
	maps.Copy(more, m)
	more[key] = value
	return more
}

// addDRA adds a node that NVIDIA's DRA driver alone serves, and what its chart and Kubernetes 1.37 bring.
func (c *site) addDRA(name string, models ...sim.Model) *host {
	h := c.add(name, models...)
	if !c.Plugin.ClusterPolicy {
		h.Labels[gfdLabel] = "false" // it comes with the device plugin
	}
	c.serveByDRA(h)
	c.tick(2 * time.Second)
	return h
}

// switchOver lets NVIDIA's DRA driver, or its device plugin, serve a node that the other one served.
func (c *site) switchOver(h *host, toDRA bool) {
	h.driver = driver{serves: toDRA, shares: 1}
	h.Labels[pluginLabel], h.DRA = "true", ""
	if toDRA {
		c.offersClaims()
		h.Labels[pluginLabel], h.DRA = "false", "DaemonSet nvidia-dra/kubelet-plugin"
		return
	}
	h.restartDriver()
	h.Published = nil
}

// publish is the driver's DaemonSet, its pod, and the kubelet that cleans up behind it.
func (c *site) publish(h *host) {
	h.collectClaims()
	if boot := h.bootID(); h.driver.boot != boot {
		if h.driver.boot != "" {
			h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA && h.driver.serves })
		}
		h.driver.boot = boot
	}
	at := slices.IndexFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA })
	switch {
	case !h.driver.serves && (h.driver.gone.IsZero() || h.Published == nil):
		return // the driver of another test, or none
	case at >= 0 && h.driver.serves && h.Pods[at].UID != h.driver.uid && c.Now.After(h.Pods[at].Scheduled.Add(h.driver.pulls)):
		c.driverStarts(h, &h.Pods[at])
	case at < 0 || !h.driver.serves || h.Pods[at].UID != h.driver.uid:
		c.driverIsAway(h, at < 0)
	}
	c.prepare(h)
}

// collectClaims is Kubernetes, which deletes the claims of pods that are gone.
func (h *host) collectClaims() {
	h.Claims = slices.DeleteFunc(slices.Clone(h.Claims), func(claim dra.Claim) bool {
		return len(claim.Pods) > 0 && len(claim.Others) == 0 && !slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return slices.Contains(claim.Pods, p.UID) })
	})
}

// driverStarts lets the driver look at the GPUs, and publish them.
func (c *site) driverStarts(h *host, p *cluster.Pod) {
	h.driver.uid, h.driver.gone, h.driver.tainted, p.ReadySince = p.UID, time.Time{}, nil, c.Now.Add(h.skew)
	if p.DynamicMIG {
		h.destroyUnprepared()
	}
	if !h.driver.broken {
		h.Published = h.shown()
	}
}

// driverIsAway lets the kubelet delete what the driver has published, and its DaemonSet make another pod.
func (c *site) driverIsAway(h *host, without bool) {
	if h.driver.gone.IsZero() {
		h.driver.gone = c.Now
	}
	if c.Now.Sub(h.driver.gone) >= nvidia.SlicesOutlive {
		h.Published = nil
	}
	if without && h.driver.serves {
		c.pods++
		uid := fmt.Sprintf("dra-%d", c.pods)
		h.Pods = append(h.Pods, cluster.Pod{
			Namespace: "nvidia-dra", Name: uid, UID: uid, Controller: "DaemonSet", DRA: true, DynamicMIG: h.driver.dynamic,
			SetsTimeSlices: h.driver.slices, Serves: true, Scheduled: c.Now,
		})
	}
}

// prepare is the kubelet, which asks the driver again and again to prepare what the pods of the node are allocated.
func (c *site) prepare(h *host) {
	if !h.driverRuns() {
		return
	}
	for i := range h.Pods {
		p := &h.Pods[i]
		if p.Namespace != "user" || h.driver.prepared[p.Name] || h.driver.waits[p.Name] {
			continue
		}
		for _, claim := range h.Claims {
			if p.Has(claim) && len(claim.Of(h.Name)) > 0 {
				c.prepareClaim(h, p, claim)
			}
		}
	}
}

// prepareClaim refuses what the driver refuses. A claim that is prepared for one pod is so for all.
func (c *site) prepareClaim(h *host, p *cluster.Pod, claim dra.Claim) {
	isPrepared := func(claim dra.Claim) bool {
		return slices.ContainsFunc(h.Pods, func(o cluster.Pod) bool { return h.driver.prepared[o.Name] && o.Has(claim) })
	}
	known, there := isPrepared(claim), nvidia.Devices(h.devices(), h.driver.shares)
	for _, device := range claim.Of(h.Name) {
		users := int64(0)
		for _, other := range h.Claims {
			if !known && other.Name != claim.Name && slices.Contains(other.Of(h.Name), device) && isPrepared(other) {
				users++
			}
		}
		if nvidia.Prepare(device, false, there, users) != nil {
			return
		}
	}
	for _, device := range claim.Of(h.Name) {
		uuid, instance, _ := h.located(device)
		h.holds(uuid, instance.ID, p.Name)
	}
	h.driver.prepared, p.Starting = withKey(h.driver.prepared, p.Name, true), h.driver.unready[p.Name]
	h.report()
}

// located finds the GPU or the instance that has the name of a device now. The ID of the instance is gpu.WholeGPU for a
// GPU.
func (h *host) located(device string) (uuid string, instance gpu.Instance, exists bool) {
	for _, d := range h.devices() {
		if whole := (gpu.Instance{ID: gpu.WholeGPU}); !d.State.MIG && device == nvidia.DeviceName(d, whole) {
			return d.UUID, whole, true
		}
		for _, i := range d.State.Instances {
			if device == nvidia.DeviceName(d, i) && !i.Partial {
				return d.UUID, i, true
			}
		}
	}
	return "", gpu.Instance{}, false
}

// shown is what the driver publishes of the GPUs as they are now.
func (h *host) shown() *dra.Pool {
	devices := nvidia.Devices(h.devices(), h.driver.shares)
	for _, d := range h.devices() {
		if h.runsDynamic() && len(d.Profiles) > 0 {
			could := d.Profiles[0]
			devices = append(devices, dra.Device{Name: fmt.Sprintf("gpu-%d-mig-any-%d", d.Index, could.ID), Type: "mig", Profile: could.Name, Parent: d.UUID})
		}
	}
	for i := range devices {
		devices[i].Tainted = h.driver.tainted[devices[i].Name]
	}
	pool := dra.PoolOf([]dra.Slice{{Generation: 1, Count: 1, Devices: devices}})
	return &pool
}

// runsDynamic reports whether the driver that runs has the gate DynamicMIG.
func (h *host) runsDynamic() bool {
	return slices.ContainsFunc(h.Pods, func(p cluster.Pod) bool { return p.UID == h.driver.uid && p.DynamicMIG })
}

// destroyUnprepared is the driver with the gate DynamicMIG when it starts: it destroys every instance that no prepared
// claim uses, and leaves the MIG mode of a GPU without one.
func (h *host) destroyUnprepared() {
	fail := h.hardware.Fail // of the agent
	h.hardware.Fail = nil
	defer func() { h.hardware.Fail = fail }()
	for _, d := range h.devices() {
		if len(d.Holders) > 0 || len(d.Processes) > 0 || !d.State.MIG {
			continue
		}
		for _, i := range d.State.Instances {
			h.nextByHand()
			if err := h.hardware.DestroyInstance(context.Background(), d.UUID, i.ID); err != nil {
				panic(err)
			}
		}
		h.change(d.UUID, func(g *sim.GPU) { g.MIG, g.PendingMIG = false, false })
	}
	h.report()
}

// allocate is the scheduler: it gives a pod that requests a resource the first device of the node that is free, not
// tainted and of a class that serves the resource, as the slices show it. The kubelet then prepares it by its name, or
// the pod hangs for ever.
func (c *site) allocate(h *host, name, resource string) (device string) {
	free := c.allocatable(h, resource, nil)
	if len(free) == 0 {
		return ""
	}
	c.claim(h, name, free[0], c.scheduler[resource].Name, resource)
	return free[0]
}

// allocatable are the devices of a node that the scheduler may give to a pod that asks for a resource, beside those that it has chosen already.
func (c *site) allocatable(h *host, resource string, chosen map[string]bool) (names []string) {
	if h.Published == nil || !h.DevicesTaintedAt.IsZero() || !c.selects(c.scheduler[resource].Name, resource) {
		return nil
	}
	for _, d := range h.Published.Devices {
		used := int64(0)
		if chosen[d.Name] {
			used++
		}
		for _, claim := range h.Claims {
			if slices.Contains(claim.Of(h.Name), d.Name) {
				used++
			}
		}
		if nvidia.Serves(d, resource, used) && d.Tainted == "" && !h.driver.barred[d.Name] && d.UUID != "" {
			names = append(names, d.Name)
		}
	}
	return names
}

// reserve makes the claim of a pod, which was allocated a device.
func (h *host) reserve(name, device string, classes ...string) {
	h.Claims = append(h.Claims, dra.Claim{
		Name: "user/" + name, Classes: classes, Devices: []dra.Allocated{{Pool: h.Name, Device: device}}, Pods: []string{"uid-" + name},
	})
	slices.SortFunc(h.Claims, func(a, b dra.Claim) int { return strings.Compare(a.Name, b.Name) })
}

// claim allocates a device to a pod, which the kubelet prepares.
func (c *site) claim(h *host, name, device, class, resource string) {
	h.reserve(name, device, class)
	h.Pods = append(h.Pods, cluster.Pod{
		Namespace: "user", Name: name, UID: "uid-" + name, Controller: "ReplicaSet", GPU: true, Requests: map[string]int64{resource: 1}, Workload: "Deployment user/" + name,
		Claim: "user/" + name, Scheduled: c.Now, Starting: true,
	})
	c.prepare(h)
	h.report()
}

// holds lets a container hold a GPU or an instance.
func (h *host) holds(uuid string, instance int, pod string) {
	h.change(uuid, func(g *sim.GPU) {
		g.Holders = append(g.Holders, gpu.Holder{Namespace: "user", Pod: pod, Container: "main", Instance: instance})
	})
}

// frees lets no container of a pod hold anything any more.
func (h *host) frees(pod string) {
	h.hardware.Update(func(n *sim.Node) {
		for i := range n.GPUs {
			n.GPUs[i].Holders = slices.DeleteFunc(n.GPUs[i].Holders, func(o gpu.Holder) bool { return o.Pod == pod })
		}
	})
}

// change changes a GPU, which the agent does not see before it looks.
func (h *host) change(uuid string, change func(*sim.GPU)) {
	h.hardware.Update(func(n *sim.Node) {
		g, err := n.GPU(uuid)
		if err != nil {
			panic(err)
		}
		change(g)
	})
}

// hanging are the pods that wait for a device which is gone.
func (h *host) hanging() []string {
	var names []string
	for _, p := range h.Pods {
		for _, claim := range h.Claims {
			gone := func(device string) bool {
				_, _, exists := h.located(device)
				return !exists
			}
			if p.Starting && p.Has(claim) && slices.ContainsFunc(claim.Of(h.Name), gone) && !slices.Contains(names, p.Name) {
				names = append(names, p.Name)
			}
		}
	}
	return names
}

// classes are the DeviceClasses, with their resources.
func (c *site) classes() map[string]string {
	classes := map[string]string{}
	for _, class := range c.DRA.Classes {
		classes[class.Name] = class.Resource
	}
	return classes
}

// writeClass is the API server, which drops the resource where its feature gate is off. What is applied and does not
// change is no event for anybody.
func (c *site) writeClass(w dra.Write) {
	class := dra.Class{Name: w.Name, Resource: w.Resource, Own: true, Selector: w.Selector, Beside: w.Beside, Age: c.Now.Unix()}
	if c.dropsNames {
		class.Resource = ""
	}
	if was := c.class(w.Name); was != nil {
		class.Age, class.Configured = was.Age, was.Configured
		if *was == class {
			return
		}
	}
	c.setClass(class)
}

func (c *site) class(name string) *dra.Class {
	at := slices.IndexFunc(c.DRA.Classes, func(class dra.Class) bool { return class.Name == name })
	if at < 0 {
		return nil
	}
	return new(c.DRA.Classes[at])
}

// setClass stores a class, and lets the scheduler hear of it.
func (c *site) setClass(class dra.Class) {
	was := c.class(class.Name)
	c.DRA.Classes = append(slices.DeleteFunc(slices.Clone(c.DRA.Classes), func(other dra.Class) bool { return other.Name == class.Name }), class)
	slices.SortFunc(c.DRA.Classes, func(a, b dra.Class) int { return strings.Compare(a.Name, b.Name) })
	c.scheduler.Set(was, class)
}

// dropClass deletes a class.
func (c *site) dropClass(name string) {
	if was := c.class(name); was != nil {
		c.DRA.Classes = slices.DeleteFunc(slices.Clone(c.DRA.Classes), func(class dra.Class) bool { return class.Name == name })
		c.scheduler.Drop(*was)
	}
}

// selects reports whether a class selects the devices of its resource: another controller may have edited it.
func (c *site) selects(name, resource string) bool {
	class, kind := c.class(name), strings.TrimPrefix(resource, "nvidia.com/mig-")
	if resource == dra.ForGPUs().Resource {
		kind = "gpu"
	}
	return class != nil && (!class.Own || !dra.Ours(name) || strings.Contains(class.Selector, "'"+kind+"'"))
}

// devicesTaintedOn are the nodes that have a DeviceTaintRule.
func (c *site) devicesTaintedOn() []string {
	withTaintRule := slices.Clone(c.orphans)
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		if !c.hosts[name].DevicesTaintedAt.IsZero() {
			withTaintRule = append(withTaintRule, name)
		}
	}
	return withTaintRule
}

// edited are the nodes whose DeviceTaintRule another controller edited.
func (c *site) edited() []string {
	var edited []string
	for _, name := range slices.Sorted(maps.Keys(c.hosts)) {
		if c.hosts[name].driver.edited {
			edited = append(edited, name)
		}
	}
	return edited
}

// unclaim gives back what a pod that is gone has by claims: one of its own goes with it, and one of several pods with
// the last of them.
func (h *host) unclaim(name string) {
	delete(h.driver.prepared, name)
	delete(h.driver.waits, name)
	delete(h.driver.unready, name)
	h.Claims = slices.Clone(h.Claims)
	for i := range h.Claims {
		h.Claims[i].Pods = slices.DeleteFunc(slices.Clone(h.Claims[i].Pods), func(uid string) bool { return uid == "uid-"+name })
	}
	h.Claims = slices.DeleteFunc(h.Claims, func(claim dra.Claim) bool {
		return len(claim.Pods)+len(claim.Others) == 0
	})
}

// named are the classes that claims name.
func (c *site) named() []string {
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

// offersClaims brings what the DRA driver needs of Kubernetes, and the class of its chart.
func (c *site) offersClaims() {
	c.DRA.ServesClasses, c.DRA.ServesTaintRules = true, true
	if c.class("gpu.nvidia.com") == nil {
		c.setClass(dra.Class{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"})
	}
}

// serveByDRA lets NVIDIA's DRA driver alone serve a node.
func (c *site) serveByDRA(h *host) {
	c.offersClaims()
	h.Labels[pluginLabel] = "false"
	delete(h.Labels, v1alpha1.LabelConfig)
	h.driver, h.DRA = driver{serves: true, shares: 1}, "DaemonSet nvidia-dra/kubelet-plugin"
	c.settle(h)
}

// startByClaim lets a pod come to a node of the driver: to what the slices show, or past all that.
func (c *run) startByClaim(h *host, kind string, random *rand.Rand) {
	if kind == "outside" || kind == "process" || h.Published == nil || len(h.Published.Published()) == 0 {
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
	c.heldGPUsOf(h)
	if slices.Contains(h.hanging(), name) {
		c.tell("pod %s hangs: %s does not exist", name, device)
	}
}

// heldGPUsOf notes what the pods of a node of the driver have, also before it is prepared for them: nothing allocates
// another device to a pod that is allocated one.
func (c *run) heldGPUsOf(h *host) {
	for _, p := range h.Pods {
		if _, has := c.heldGPUs[p.Name]; has || c.kinds[p.Name] != "allocated" {
			continue
		}
		for _, claim := range h.Claims {
			if !p.Has(claim) {
				continue
			}
			for _, device := range claim.Of(h.Name) {
				if uuid, instance, exists := h.located(device); exists {
					c.heldGPUs[p.Name] = heldGPU{node: h.Name, uuid: uuid, instance: instance.UUID, mig: instance.ID != gpu.WholeGPU, boot: h.bootID()}
				}
			}
		}
	}
}

// hasAllocated reports whether the devices that a pod was allocated exist.
func (h *host) hasAllocated(name string) bool {
	p := h.pod(name)
	return !slices.ContainsFunc(h.Claims, func(claim dra.Claim) bool {
		return p.Has(claim) && slices.ContainsFunc(claim.Of(h.Name), func(device string) bool { _, _, exists := h.located(device); return !exists })
	})
}

// waitsToStart lets a pod wait for its claim to be prepared: no container has started, so the kubelet reports no device
// of it.
func (h *host) waitsToStart(name string) {
	h.pod(name).Starting = true
	h.driver.waits = map[string]bool{name: true}
	delete(h.driver.prepared, name)
	h.frees(name)
	h.report()
}

// isAdmins reports whether a container has its device by a claim that the spec names as one of administrators, so that
// the agent leaves it out.
func (h *host) isAdmins(o gpu.Holder) bool {
	return slices.ContainsFunc(h.Claims, func(c dra.Claim) bool {
		return slices.Contains(h.GPU.Spec.AdminClaims, c.Name) && slices.Contains(c.Pods, "uid-"+o.Pod)
	})
}

// monitor lets a pod of a controller, empty for none, have all GPUs that the driver publishes, by a claim with adminAccess,
// in spite of any taint. It reports whether there is one: the claim's class selects no instance, and the driver refuses
// that.
func (c *site) monitor(h *host, name, controller string, shareable bool) bool {
	claim := dra.Claim{Name: "user/" + name, Classes: []string{"gpu.nvidia.com"}, Pods: []string{"uid-" + name}, Shared: shareable}
	for _, d := range h.Published.Devices {
		if uuid, _, exists := h.located(d.Name); exists && d.Type == "gpu" {
			claim.Admin = append(claim.Admin, dra.Allocated{Pool: h.Name, Device: d.Name})
			h.holds(uuid, gpu.WholeGPU, name)
		}
	}
	if len(claim.Admin) == 0 {
		return false
	}
	h.Claims = append(slices.Clone(h.Claims), claim)
	h.Pods = append(h.Pods, cluster.Pod{Namespace: "user", Name: name, UID: "uid-" + name, Controller: controller, Scheduled: c.Now})
	h.report()
	return true
}
