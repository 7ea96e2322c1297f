// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// DriverName is the driver of NVIDIA's that offers GPUs in ResourceSlices.
const DriverName = "gpu.nvidia.com"

// The types of devices that the driver publishes (cmd/gpu-kubelet-plugin/types.go of the driver).
const (
	typeGPU = "gpu"
	typeMIG = "mig"
)

// Device is a GPU or a MIG instance as a ResourceSlice shows it.
type Device struct {
	// Name tells it within the pool of its node: gpu-<minor>, or gpu-<minor>-mig-<profile>-<profile id>-<start>. Names
	// are used again.
	Name string
	// Type is gpu, mig or vfio; empty if the driver does not publish it.
	Type string
	// UUID is that of NVML; empty for an instance that the driver would make on demand.
	UUID string
	// Profile of a MIG instance, such as 1g.5gb, and the UUID of its GPU.
	Profile, Parent string
	// Shares is how many claims can share it; 1 if the driver shares no GPUs, 0 if it limits them by memory or not at
	// all.
	Shares int64
	// Tainted is the taint by which the driver itself keeps new pods off it, as key=value, such as one for a GPU that
	// is unhealthy (its feature gate NVMLDeviceHealthCheck); empty if there is none.
	Tainted string
}

// Slice is what of a ResourceSlice matters here.
type Slice struct {
	// Generation of the pool that it belongs to, and the number of slices that the pool has in that generation.
	Generation, Count int64
	Devices           []Device
}

// Pool is what NVIDIA's DRA driver publishes for a node.
type Pool struct {
	// Complete says that every slice of the newest generation is there.
	Complete bool
	// Devices are those of the newest generation, by name.
	Devices []Device
}

// PoolOf joins the slices of a node. Slices of older generations do not count (k8s.io/api/resource/v1 ResourcePool).
func PoolOf(published []Slice) Pool {
	var newest, found, count int64
	var p Pool
	for i, s := range published {
		if i == 0 || s.Generation > newest {
			newest, found, count, p.Devices = s.Generation, 0, s.Count, nil
		}
		if s.Generation == newest {
			found++
			p.Devices = append(p.Devices, s.Devices...)
		}
	}
	p.Complete = found > 0 && found == count
	slices.SortFunc(p.Devices, func(a, b Device) int { return cmp.Compare(a.Name, b.Name) })
	return p
}

// Published returns the extended resources that the pool offers, each with its number, named as NVIDIA's device plugin
// names them: a GPU with shares counts once for each share.
func (p *Pool) Published() map[string]int64 {
	counts := map[string]int64{}
	if p == nil {
		return counts
	}
	for _, d := range p.Devices {
		if d.Tainted != "" {
			continue
		}
		switch d.Type {
		case typeGPU:
			counts[plan.ResourceGPU] += max(d.Shares, 1)
		case typeMIG:
			counts[plan.ResourceOf(d.Profile)]++
		}
	}
	return counts
}

// Shares is how many claims can share a GPU, as any of the devices shows it; ok is false while the pool shows none.
func (p *Pool) Shares() (shares int64, ok bool) {
	if p == nil || len(p.Devices) == 0 {
		return 0, false
	}
	return p.Devices[0].Shares, true
}

// Named returns the device of that name.
func (p *Pool) Named(name string) (Device, bool) {
	if p == nil {
		return Device{}, false
	}
	at, found := slices.BinarySearchFunc(p.Devices, name, func(d Device, name string) int { return cmp.Compare(d.Name, name) })
	if !found {
		return Device{}, false
	}
	return p.Devices[at], true
}

// Unusable says why the pool tells nothing of static instances: the driver makes instances on demand, or publishes in a
// form that is not known. Nil: it tells.
func (p *Pool) Unusable() *plan.Problem {
	if p == nil {
		return nil
	}
	for _, d := range p.Devices {
		switch {
		case d.Type == typeMIG && d.UUID == "":
			return DynamicMIG("the ResourceSlices of the node list instances that it would make on demand, such as " + d.Name)
		case d.Type == "" || d.Type == typeGPU && d.UUID == "" || d.Type == typeMIG && d.Profile == "":
			return &plan.Problem{
				Reason: v1alpha1.ReasonDRADriverUnknown,
				Message: fmt.Sprintf("Device %s in the ResourceSlices of the node has no type, UUID or profile: this version of NVIDIA's DRA driver is "+
					"not known. Install v0.5.0, with which the operator was tried", d.Name),
			}
		}
	}
	return nil
}

// DynamicMIG is the problem of a driver that makes MIG instances on demand, which a sign tells.
func DynamicMIG(sign string) *plan.Problem {
	return &plan.Problem{
		Reason: v1alpha1.ReasonDynamicMIGActive,
		Message: fmt.Sprintf("The feature gate DynamicMIG of NVIDIA's DRA driver is on (%s), so it makes MIG instances itself. Turn "+
			"it off (featureGates.DynamicMIG=false in its chart or a GPUCluster), or leave the node out", sign),
	}
}

// Differs lists how what the pool offers differs from the GPUs and instances that the agent reports, by UUID; empty if
// it does not. Shares is how many claims must be able to share a GPU; 0: any number.
func (p *Pool) Differs(have []v1alpha1.DeviceStatus, shares int64) []string {
	return append(p.Stale(have, shares), p.away(have)...)
}

// Stale is what of Differs another look of the driver at the GPUs can change.
func (p *Pool) Stale(have []v1alpha1.DeviceStatus, shares int64) []string {
	if p == nil || len(p.Devices) == 0 {
		if len(expected(have)) > 0 {
			return []string{"no device is published"}
		}
		return nil
	}
	if !p.Complete {
		return []string{"the ResourceSlices of the newest generation are not all there"}
	}
	shown := map[string]Device{}
	for _, d := range p.Devices {
		if d.Type == typeGPU || d.Type == typeMIG {
			shown[d.UUID] = d
		}
	}
	var differs []string
	for _, want := range expected(have) {
		is, found := shown[want.UUID]
		if delete(shown, want.UUID); !found {
			differs = append(differs, want.Name+" is missing")
		} else if how := want.differs(is, shares); how != "" {
			differs = append(differs, want.Name+how)
		}
	}
	for _, d := range shown {
		if !lost(d, have) {
			differs = append(differs, fmt.Sprintf("%s (%s) is published and gone", d.Name, d.UUID))
		}
	}
	slices.Sort(differs)
	return differs
}

// away lists the devices that the driver taints, and those whose GPU the agent does not see any more. A driver that
// starts anew would offer the former again, and does not start if a GPU answers with an error
// (cmd/gpu-kubelet-plugin/nvlib.go of the driver).
func (p *Pool) away(have []v1alpha1.DeviceStatus) []string {
	if p == nil || !p.Complete {
		return nil
	}
	var away []string
	for _, d := range p.Devices {
		switch {
		case lost(d, have):
			away = append(away, fmt.Sprintf("%s (%s) is published, and its GPU is lost", d.Name, d.UUID))
		case d.Tainted != "":
			away = append(away, fmt.Sprintf("%s (%s) has the taint %s of the driver", d.Name, d.UUID, d.Tainted))
		}
	}
	return away
}

// lost reports whether the GPU that a device is, or is part of, is not among those that the agent reports.
func lost(d Device, have []v1alpha1.DeviceStatus) bool {
	uuid := d.UUID
	if d.Type == typeMIG {
		uuid = d.Parent
	}
	return (d.Type == typeGPU || d.Type == typeMIG) && uuid != "" &&
		!slices.ContainsFunc(have, func(h v1alpha1.DeviceStatus) bool { return h.UUID == uuid })
}

// differs says how a device that is published under its UUID is another than wanted; empty if it is not.
func (want Device) differs(is Device, shares int64) string {
	switch {
	case is.Type != want.Type || is.Profile != want.Profile || is.Parent != "" && is.Parent != want.Parent:
		return fmt.Sprintf(" is published as %s %s", is.Type, is.Profile)
	case is.Type == typeGPU && shares != 0 && is.Shares != shares:
		return fmt.Sprintf(" has %d shares instead of %d", is.Shares, shares)
	}
	return ""
}

// expected are the devices that the driver publishes for these GPUs, named for a message. It publishes no GPU in MIG
// mode, and no instance without its compute instance.
func expected(have []v1alpha1.DeviceStatus) []Device {
	var devices []Device
	for i := range have {
		d := &have[i]
		if d.Sharing.MIGMode != v1alpha1.MIGModeEnabled {
			devices = append(devices, Device{Name: fmt.Sprintf("GPU %d (%s)", d.Index, d.UUID), Type: typeGPU, UUID: d.UUID})
			continue
		}
		for _, instance := range d.Instances {
			if instance.UUID == "" {
				continue
			}
			devices = append(devices, Device{
				Name: fmt.Sprintf("instance %s at %d of GPU %d (%s)", instance.Profile, instance.Start, d.Index, instance.UUID),
				Type: typeMIG, UUID: instance.UUID, Profile: instance.Profile, Parent: d.UUID,
			})
		}
	}
	return devices
}

// UUIDs are the UUIDs of all devices that the driver must publish for these GPUs, sorted.
func UUIDs(have []v1alpha1.DeviceStatus) []string {
	var uuids []string
	for _, d := range expected(have) {
		uuids = append(uuids, d.UUID)
	}
	slices.Sort(uuids)
	return uuids
}

// SliceOf reads what matters of a ResourceSlice, of any version since v1beta1. Objects are maps as encoding/json makes
// them.
func SliceOf(object map[string]any) Slice {
	pool := asMap(asMap(object["spec"])["pool"])
	s := Slice{Generation: asInt(pool["generation"]), Count: asInt(pool["resourceSliceCount"])}
	for _, listed := range asList(asMap(object["spec"])["devices"]) {
		s.Devices = append(s.Devices, deviceOf(asMap(listed)))
	}
	return s
}

// deviceOf reads a device. In v1beta1 its attributes are one level deeper.
func deviceOf(listed map[string]any) Device {
	d := Device{Name: asString(listed["name"]), Shares: 1}
	if basic, is := listed["basic"]; is {
		listed = asMap(basic)
	}
	attributes, capacity := asMap(listed["attributes"]), asMap(listed["capacity"])
	text := func(name string) string {
		a, has := attributes[name]
		if !has {
			a = attributes[DriverName+"/"+name]
		}
		return asString(asMap(a)["string"])
	}
	d.Type, d.UUID, d.Profile, d.Parent = text("type"), text("uuid"), text("profile"), text("parentUUID")
	for _, listed := range asList(listed["taints"]) {
		if taint := asMap(listed); slices.Contains([]string{"NoSchedule", "NoExecute"}, asString(taint["effect"])) {
			d.Tainted = strings.TrimSuffix(asString(taint["key"])+"="+asString(taint["value"]), "=")
		}
	}
	multiple, _ := listed["allowMultipleAllocations"].(bool)
	shares, limited := capacity["shares"]
	if !limited {
		shares, limited = capacity[DriverName+"/shares"]
	}
	switch {
	case limited:
		d.Shares = 0
		if quantity, err := resource.ParseQuantity(asString(asMap(shares)["value"])); err == nil {
			d.Shares = quantity.Value()
		}
	case multiple:
		d.Shares = 0
	}
	return d
}

// Slim keeps of a ResourceSlice what SliceOf reads, and where it belongs.
func Slim(object map[string]any) map[string]any {
	spec := asMap(object["spec"])
	devices := make([]any, 0, len(asList(spec["devices"])))
	for _, listed := range asList(spec["devices"]) {
		devices = append(devices, slimDevice(asMap(listed)))
	}
	return map[string]any{"spec": map[string]any{
		"driver": spec["driver"], "nodeName": spec["nodeName"], "pool": spec["pool"], "devices": devices,
	}}
}

func slimDevice(listed map[string]any) map[string]any {
	body, slim := listed, map[string]any{"name": listed["name"]}
	if basic, is := listed["basic"]; is {
		body = asMap(basic)
	}
	attributes, capacity := map[string]any{}, map[string]any{}
	for name, value := range asMap(body["attributes"]) {
		switch strings.TrimPrefix(name, DriverName+"/") {
		case "type", "uuid", "profile", "parentUUID":
			attributes[name] = value
		}
	}
	for name, value := range asMap(body["capacity"]) {
		if strings.TrimPrefix(name, DriverName+"/") == "shares" {
			capacity[name] = value
		}
	}
	slim["attributes"], slim["capacity"] = attributes, capacity
	if multiple, has := body["allowMultipleAllocations"]; has {
		slim["allowMultipleAllocations"] = multiple
	}
	if taints, has := body["taints"]; has {
		slim["taints"] = taints
	}
	return slim
}

func asMap(value any) map[string]any {
	m, _ := value.(map[string]any)
	return m
}

func asList(value any) []any {
	list, _ := value.([]any)
	return list
}

func asString(value any) string {
	text, _ := value.(string)
	return text
}

func asInt(value any) int64 {
	switch n := value.(type) {
	case int64:
		return n
	case float64:
		return int64(n)
	}
	return 0
}

// Stack is which of NVIDIA's programs offers the GPUs of a node to pods.
type Stack string

// The stacks.
const (
	// DevicePlugin is NVIDIA's device plugin, or nothing as yet.
	DevicePlugin Stack = "DevicePlugin"
	// DRADriver is NVIDIA's DRA driver, alone.
	DRADriver Stack = "DRA"
	// Both means that each of them offers the GPUs, and gives them to pods of which the other knows nothing. The
	// operator changes nothing on such a node.
	Both Stack = "Both"
)

// Facts are what tells the stack of a node.
type Facts struct {
	// Driver says that NVIDIA's DRA driver shows on the node: by its pod, its DaemonSet or its ResourceSlices.
	Driver bool
	// Plugin says that a pod of NVIDIA's device plugin is on the node, or is to come.
	Plugin bool
	// Allocatable says that the node advertises at least one GPU or instance. A resource whose plugin is gone stays
	// listed with 0, which the scheduler takes for none.
	Allocatable bool
}

// StackOf returns the stack of a node.
func StackOf(f Facts) Stack {
	switch {
	case !f.Driver:
		return DevicePlugin
	case f.Plugin || f.Allocatable:
		return Both
	}
	return DRADriver
}
