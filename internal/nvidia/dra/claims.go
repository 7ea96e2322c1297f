// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Claim is a ResourceClaim that is allocated from NVIDIA's DRA driver, or names a DeviceClass.
type Claim struct {
	// Name is namespace/name.
	Name string
	// Classes are the DeviceClasses that its requests name.
	Classes []string
	// Devices are allocated to it. Those for administrators (adminAccess) are Admin: they hold nothing.
	Devices, Admin []Allocated
	// Pods are the UIDs of the pods for which it is reserved.
	Pods []string
	// Others are further objects for which it is reserved. A PodGroup stands for all pods that belong to it (feature
	// gate DRAWorkloadResourceClaims of Kubernetes 1.37).
	Others []Consumer
	// Shared reports that no pod owns it, so that any number of pods can name it. Kubernetes makes the others for one
	// pod each, of a template or of extended resources, and deletes them with the pod.
	Shared bool
}

// Allocated is a device that is allocated to a claim.
type Allocated struct{ Pool, Device string }

// Consumer is an object for which a claim is reserved, in the namespace of the claim.
type Consumer struct{ APIGroup, Resource, Name string }

// IsPodGroup reports whether it is a PodGroup (k8s.io/dynamic-resource-allocation/resourceclaim, IsReservedForPod).
func (c Consumer) IsPodGroup() bool {
	return c.APIGroup == "scheduling.k8s.io" && c.Resource == "podgroups"
}

// String names it for a message.
func (c Consumer) String() string {
	if c.IsPodGroup() {
		return "PodGroup " + c.Name
	}
	return strings.Trim(c.Resource+"."+c.APIGroup, ".") + " " + c.Name
}

// ReservedFor reports whether the claim is reserved for a pod: for itself, or for the PodGroup of that name to which it
// belongs.
func (c Claim) ReservedFor(namespace, uid, podGroup string) bool {
	return slices.Contains(c.Pods, uid) || podGroup != "" && strings.HasPrefix(c.Name, namespace+"/") &&
		slices.ContainsFunc(c.Others, func(o Consumer) bool { return o.IsPodGroup() && o.Name == podGroup })
}

// ClaimOf reads what matters of a ResourceClaim, of any version since v1beta1; ok is false if nothing of it does.
func ClaimOf(namespace, name string, object map[string]any) (c Claim, ok bool) {
	c = Claim{Name: namespace + "/" + name, Shared: !slices.ContainsFunc(asList(asMap(object["metadata"])["ownerReferences"]), isPod)}
	for _, listed := range asList(asMap(asMap(object["spec"])["devices"])["requests"]) {
		c.Classes = append(c.Classes, classesOf(asMap(listed))...)
	}
	slices.Sort(c.Classes)
	c.Classes = slices.Compact(c.Classes)
	status := asMap(object["status"])
	for _, listed := range asList(asMap(asMap(status["allocation"])["devices"])["results"]) {
		result := asMap(listed)
		if asString(result["driver"]) != DriverName {
			continue
		}
		d := Allocated{Pool: asString(result["pool"]), Device: asString(result["device"])}
		if admin, _ := result["adminAccess"].(bool); admin {
			c.Admin = append(c.Admin, d)
		} else {
			c.Devices = append(c.Devices, d)
		}
	}
	byName := func(a, b Allocated) int { return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Device, b.Device)) }
	slices.SortFunc(c.Devices, byName)
	slices.SortFunc(c.Admin, byName)
	for _, listed := range asList(status["reservedFor"]) {
		consumer := asMap(listed)
		if slices.Contains([]string{"pods", ""}, asString(consumer["resource"])) {
			c.Pods = append(c.Pods, asString(consumer["uid"]))
		} else {
			c.Others = append(c.Others, Consumer{asString(consumer["apiGroup"]), asString(consumer["resource"]), asString(consumer["name"])})
		}
	}
	return c, len(c.Devices)+len(c.Admin) > 0 || slices.ContainsFunc(c.Classes, Ours)
}

// isPod reports whether an owner reference names a pod.
func isPod(owner any) bool { return asString(asMap(owner)["kind"]) == "Pod" }

// classesOf are the classes that a request names: itself, in one of its alternatives or, since v1, in its exact
// request.
func classesOf(request map[string]any) []string {
	var classes []string
	add := func(of map[string]any) {
		if name := asString(of["deviceClassName"]); name != "" {
			classes = append(classes, name)
		}
	}
	add(request)
	add(asMap(request["exactly"]))
	for _, alternative := range asList(request["firstAvailable"]) {
		add(asMap(alternative))
	}
	return classes
}

// Object is the claim as ClaimOf reads it, for a cache that keeps nothing else.
func (c Claim) Object() map[string]any {
	requests, results, consumers := make([]any, 0, len(c.Classes)), make([]any, 0, len(c.Devices)), make([]any, 0, len(c.Pods))
	for _, class := range c.Classes {
		requests = append(requests, map[string]any{"deviceClassName": class})
	}
	for _, d := range c.Devices {
		results = append(results, map[string]any{"driver": DriverName, "pool": d.Pool, "device": d.Device})
	}
	for _, d := range c.Admin {
		results = append(results, map[string]any{"driver": DriverName, "pool": d.Pool, "device": d.Device, "adminAccess": true})
	}
	for _, uid := range c.Pods {
		consumers = append(consumers, map[string]any{"uid": uid})
	}
	for _, o := range c.Others {
		consumers = append(consumers, map[string]any{"apiGroup": o.APIGroup, "resource": o.Resource, "name": o.Name})
	}
	object := map[string]any{
		"spec":   map[string]any{"devices": map[string]any{"requests": requests}},
		"status": map[string]any{"allocation": map[string]any{"devices": map[string]any{"results": results}}, "reservedFor": consumers},
	}
	if !c.Shared {
		object["metadata"] = map[string]any{"ownerReferences": []any{map[string]any{"kind": "Pod"}}}
	}
	return object
}

// Pools are the pools of its devices, each once.
func (c Claim) Pools() []string {
	var pools []string
	for _, d := range slices.Concat(c.Devices, c.Admin) {
		pools = append(pools, d.Pool)
	}
	slices.Sort(pools)
	return slices.Compact(pools)
}

// Of are the names of the devices of a pool that are allocated to the claim, without those for administrators.
func (c Claim) Of(pool string) []string { return named(c.Devices, pool) }

func named(devices []Allocated, pool string) []string {
	var names []string
	for _, d := range devices {
		if d.Pool == pool {
			names = append(names, d.Device)
		}
	}
	return names
}

// Locate finds the GPU and the instance that a device is, by the UUID that the pool shows. The instance is gpu.WholeGPU
// where the device is a GPU, or where only its GPU is known; ok is false if not even that is.
func (p *Pool) Locate(name string, have []v1alpha1.DeviceStatus) (uuid string, instance int, ok bool) {
	if d, is := p.Named(name); is && d.UUID != "" {
		for i := range have {
			if have[i].UUID == d.UUID {
				return d.UUID, gpu.WholeGPU, true
			}
			for _, instance := range have[i].Instances {
				if instance.UUID == d.UUID {
					return have[i].UUID, int(instance.ID), true
				}
			}
		}
		if d.Parent != "" { // an instance that was destroyed: what has its place now is not known
			return d.Parent, gpu.WholeGPU, slices.ContainsFunc(have, func(h v1alpha1.DeviceStatus) bool { return h.UUID == d.Parent })
		}
	}
	return "", gpu.WholeGPU, false
}

// Gone lists the devices of a pool that are allocated to the claim and that a complete pool does not show: what is to
// be prepared with one of them hangs.
func (c Claim) Gone(name string, p *Pool) []string {
	if p == nil || !p.Complete {
		return nil
	}
	var gone []string
	for _, device := range append(c.Of(name), named(c.Admin, name)...) {
		if _, is := p.Named(device); !is {
			gone = append(gone, device)
		}
	}
	return gone
}

// String names the claim for a message.
func (c Claim) String() string { return fmt.Sprintf("ResourceClaim %s", c.Name) }
