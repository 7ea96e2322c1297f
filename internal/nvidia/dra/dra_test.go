// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"encoding/json"
	"testing"

	. "github.com/onsi/gomega"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

func TestTheStackOfANode(t *testing.T) {
	for name, c := range map[string]struct {
		facts dra.Facts
		want  dra.Stack
	}{
		"nothing yet":                             {dra.Facts{}, dra.DevicePlugin},
		"the device plugin":                       {dra.Facts{Plugin: true, Allocatable: true}, dra.DevicePlugin},
		"the driver alone":                        {dra.Facts{Driver: true}, dra.DRADriver},
		"the driver beside a plugin that starts":  {dra.Facts{Driver: true, Plugin: true}, dra.Both},
		"the driver beside what the kubelet kept": {dra.Facts{Driver: true, Allocatable: true}, dra.Both},
	} {
		t.Run(name, func(t *testing.T) { NewWithT(t).Expect(dra.StackOf(c.facts)).To(Equal(c.want)) })
	}
}

const (
	wholeUUID = "GPU-aaaa"
	migGPU    = "GPU-bbbb"
)

func device(name, kind, uuid string, more map[string]string) resourcev1.Device {
	d := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"type": {StringValue: &kind}, "uuid": {StringValue: &uuid}}}
	for name, value := range more {
		d.Attributes[resourcev1.QualifiedName(name)] = resourcev1.DeviceAttribute{StringValue: &value}
	}
	return d
}

func instance(name, uuid string) resourcev1.Device {
	return device(name, "mig", uuid, map[string]string{"profile": "1g.5gb", "parentUUID": migGPU})
}

// published is what the controller reads of slices: as the API server encodes them, slimmed or not.
func published(t *testing.T, slim bool, slices ...resourcev1.ResourceSlice) dra.Pool {
	t.Helper()
	var read []dra.Slice
	for i := range slices {
		object := asObject(t, &slices[i])
		if slim {
			object = dra.Slim(object)
		}
		read = append(read, dra.SliceOf(object))
	}
	return dra.PoolOf(read)
}

func asObject(t *testing.T, of any) map[string]any {
	t.Helper()
	text, err := json.Marshal(of)
	if err != nil {
		t.Fatal(err)
	}
	object := map[string]any{}
	if err := json.Unmarshal(text, &object); err != nil {
		t.Fatal(err)
	}
	return object
}

func slice(generation, count int64, devices ...resourcev1.Device) resourcev1.ResourceSlice {
	return resourcev1.ResourceSlice{Spec: resourcev1.ResourceSliceSpec{
		Driver: dra.DriverName, Pool: resourcev1.ResourcePool{Name: "n1", Generation: generation, ResourceSliceCount: count}, Devices: devices,
	}}
}

func gpus() []v1alpha1.DeviceStatus {
	return []v1alpha1.DeviceStatus{
		{UUID: wholeUUID, Index: 0, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}},
		{
			UUID: migGPU, Index: 1, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled},
			Instances: []v1alpha1.InstanceStatus{
				{ID: 7, Profile: "1g.5gb", Start: 0, Size: 1, UUID: "MIG-0"},
				{ID: 8, Profile: "1g.5gb", Start: 1, Size: 1, UUID: "MIG-1"},
				{ID: 9, Profile: "1g.5gb", Start: 2, Size: 1}, // without its compute instance
			},
		},
	}
}

func all() []resourcev1.Device {
	return []resourcev1.Device{device("gpu-0", "gpu", wholeUUID, nil), instance("gpu-1-mig-1g5gb-19-0", "MIG-0"), instance("gpu-1-mig-1g5gb-19-1", "MIG-1")}
}

func TestWhatThePoolMustShow(t *testing.T) {
	for name, c := range map[string]struct {
		slices []resourcev1.ResourceSlice
		shares int64
		want   []string
	}{
		"everything":         {slices: []resourcev1.ResourceSlice{slice(1, 1, all()...)}, shares: 1},
		"in two slices":      {slices: []resourcev1.ResourceSlice{slice(1, 2, all()[0]), slice(1, 2, all()[1:]...)}},
		"an old slice is no": {slices: []resourcev1.ResourceSlice{slice(1, 1, device("gpu-9", "gpu", "GPU-zzzz", nil)), slice(2, 1, all()...)}},
		"a slice is missing": {
			slices: []resourcev1.ResourceSlice{slice(1, 2, all()...)}, want: []string{"the ResourceSlices of the newest generation are not all there"},
		},
		"no slice": {want: []string{"no device is published"}},
		"an instance is missing": {
			slices: []resourcev1.ResourceSlice{slice(1, 1, all()[:2]...)}, want: []string{"instance 1g.5gb at 1 of GPU 1 (MIG-1) is missing"},
		},
		"an instance that was made anew under its name": {
			slices: []resourcev1.ResourceSlice{slice(1, 1, all()[0], all()[1], instance("gpu-1-mig-1g5gb-19-1", "MIG-old"))},
			want:   []string{"gpu-1-mig-1g5gb-19-1 (MIG-old) is published and gone", "instance 1g.5gb at 1 of GPU 1 (MIG-1) is missing"},
		},
		"a GPU that is in MIG mode now": {
			slices: []resourcev1.ResourceSlice{slice(1, 1, append(all(), device("gpu-1", "gpu", migGPU, nil))...)},
			want:   []string{"gpu-1 (GPU-bbbb) is published and gone"},
		},
		"another number of shares": {
			slices: []resourcev1.ResourceSlice{slice(1, 1, all()...)}, shares: 4, want: []string{"GPU 0 (GPU-aaaa) has 1 shares instead of 4"},
		},
	} {
		for _, slim := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				p := published(t, slim, c.slices...)
				NewWithT(t).Expect(p.Differs(gpus(), c.shares)).To(Equal(c.want))
			})
		}
	}
}

func TestSharesOfAGPU(t *testing.T) {
	plain := all()[0]
	four, memory := all()[0], all()[0]
	four.AllowMultipleAllocations = new(true)
	four.Capacity = map[resourcev1.QualifiedName]resourcev1.DeviceCapacity{"shares": {Value: resource.MustParse("4")}}
	memory.AllowMultipleAllocations = new(true)
	for name, c := range map[string]struct {
		device resourcev1.Device
		want   int64
	}{"off": {plain, 1}, "four": {four, 4}, "by memory alone": {memory, 0}} {
		for _, slim := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				p := published(t, slim, slice(1, 1, c.device))
				shares, known := p.Shares()
				NewWithT(t).Expect(known).To(BeTrue())
				NewWithT(t).Expect(shares).To(Equal(c.want))
			})
		}
	}
	t.Run("four count four times", func(t *testing.T) {
		p := published(t, false, slice(1, 1, four, all()[1]))
		NewWithT(t).Expect(p.Published()).To(Equal(map[string]int64{"nvidia.com/gpu": 4, "nvidia.com/mig-1g.5gb": 1}))
	})
}

func TestAVersionBeforeV1IsRead(t *testing.T) {
	object := map[string]any{"spec": map[string]any{
		"pool": map[string]any{"generation": int64(3), "resourceSliceCount": int64(1)},
		"devices": []any{map[string]any{"name": "gpu-0", "basic": map[string]any{"attributes": map[string]any{
			"type": map[string]any{"string": "gpu"}, "uuid": map[string]any{"string": wholeUUID},
		}}}},
	}}
	for _, o := range []map[string]any{object, dra.Slim(object)} {
		p := dra.PoolOf([]dra.Slice{dra.SliceOf(o)})
		NewWithT(t).Expect(p.Complete).To(BeTrue())
		NewWithT(t).Expect(p.Devices).To(ConsistOf(dra.Device{Name: "gpu-0", Type: "gpu", UUID: wholeUUID, Shares: 1}))
	}
}

func TestAPoolThatTellsNothing(t *testing.T) {
	dynamic := instance("gpu-0-mig-1g5gb-19-0", "")
	delete(dynamic.Attributes, "uuid")
	old := device("gpu-0", "gpu", wholeUUID, nil)
	delete(old.Attributes, "type")
	for name, c := range map[string]struct {
		device resourcev1.Device
		reason string
	}{
		"DynamicMIG is on":               {dynamic, v1alpha1.ReasonDynamicMIGActive},
		"a driver of an unknown version": {old, v1alpha1.ReasonDRADriverUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			p := published(t, true, slice(1, 1, c.device))
			NewWithT(t).Expect(p.Unusable()).To(HaveField("Reason", c.reason))
		})
	}
	p := published(t, true, slice(1, 1, all()...))
	NewWithT(t).Expect(p.Unusable()).To(BeZero())
}

func claim(results ...resourcev1.DeviceRequestAllocationResult) *resourcev1.ResourceClaim {
	return &resourcev1.ResourceClaim{
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
			{Name: "a", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpusharing-mig-1g.5gb"}},
			{Name: "b", FirstAvailable: []resourcev1.DeviceSubRequest{{Name: "c", DeviceClassName: "gpu.nvidia.com"}}},
		}}},
		Status: resourcev1.ResourceClaimStatus{
			Allocation:  &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: types.UID("uid-p")}},
		},
	}
}

func TestWhatAClaimHolds(t *testing.T) {
	g := NewWithT(t)
	result := func(driver, pool, device string) resourcev1.DeviceRequestAllocationResult {
		return resourcev1.DeviceRequestAllocationResult{Driver: driver, Pool: pool, Device: device}
	}
	admin := result(dra.DriverName, "n1", "gpu-5")
	admin.AdminAccess = new(true)
	object := asObject(t, claim(result(dra.DriverName, "n1", "gpu-1-mig-1g5gb-19-0"), result("example.com", "n1", "card-0"), admin, result(dra.DriverName, "n2", "gpu-0")))
	c, counts := dra.ClaimOf("team", "train", object)
	g.Expect(counts).To(BeTrue())
	g.Expect(c).To(Equal(dra.Claim{
		Name: "team/train", Shared: true, Classes: []string{"gpu.nvidia.com", "gpusharing-mig-1g.5gb"}, Pods: []string{"uid-p"},
		Devices: []dra.Allocated{{Pool: "n1", Device: "gpu-1-mig-1g5gb-19-0"}, {Pool: "n2", Device: "gpu-0"}},
		Admin:   []dra.Allocated{{Pool: "n1", Device: "gpu-5"}},
	}))
	again, _ := dra.ClaimOf("team", "train", c.Object())
	g.Expect(again).To(Equal(c), "as the cache keeps it")
	forOne := claim(result(dra.DriverName, "n1", "gpu-0"))
	forOne.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "uid-p"}}
	forOne.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{
		{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "uid-gang"}, {APIGroup: "example.com", Resource: "runs", Name: "r", UID: "uid-r"},
	}
	own, _ := dra.ClaimOf("team", "train", asObject(t, forOne))
	g.Expect(own.Others).To(HaveExactElements(HaveField("String()", "PodGroup gang"), HaveField("String()", "runs.example.com r")))
	g.Expect(own.ReservedFor("team", "uid-worker", "gang")).To(BeTrue())
	g.Expect(own.ReservedFor("team", "uid-worker", "")).To(BeFalse())
	g.Expect(own.ReservedFor("another", "uid-worker", "gang")).To(BeFalse())
	g.Expect(own.ReservedFor("team", "uid-worker", "r")).To(BeFalse())
	g.Expect(c.ReservedFor("team", "uid-p", "")).To(BeTrue())
	g.Expect(own.Shared).To(BeFalse(), "it was made for one pod")
	kept, _ := dra.ClaimOf("team", "train", own.Object())
	g.Expect(kept).To(Equal(own))
	g.Expect(c.Pools()).To(Equal([]string{"n1", "n2"}))
	g.Expect(c.Of("n1")).To(Equal([]string{"gpu-1-mig-1g5gb-19-0"}))

	pool := published(t, true, slice(1, 1, all()...))
	g.Expect(c.Gone("n1", &pool)).To(Equal([]string{"gpu-5"}), "a monitor is prepared by its devices too")
	without := published(t, true, slice(2, 1, all()[0]))
	g.Expect(c.Gone("n1", &without)).To(Equal([]string{"gpu-1-mig-1g5gb-19-0", "gpu-5"}))
	incomplete := published(t, true, slice(2, 2, all()[0]))
	g.Expect(c.Gone("n1", &incomplete)).To(BeEmpty(), "what is missing may be in the slice that is not there")

	_, counts = dra.ClaimOf("team", "other", asObject(t, &resourcev1.ResourceClaim{}))
	g.Expect(counts).To(BeFalse())
}

func TestWhereADeviceIs(t *testing.T) {
	pool := published(t, true, slice(1, 1, append(all(), instance("gpu-1-mig-1g5gb-19-2", "MIG-old"))...))
	for name, c := range map[string]struct {
		device, uuid string
		instance     int
		known        bool
	}{
		"a GPU":                           {"gpu-0", wholeUUID, gpu.WholeGPU, true},
		"an instance":                     {"gpu-1-mig-1g5gb-19-1", migGPU, 8, true},
		"an instance that was destroyed":  {"gpu-1-mig-1g5gb-19-2", migGPU, gpu.WholeGPU, true},
		"a name that the pool has not":    {"gpu-7", "", gpu.WholeGPU, false},
		"a claim that names no device":    {"", "", gpu.WholeGPU, false},
		"a name between those of devices": {"gpu-1", "", gpu.WholeGPU, false},
	} {
		t.Run(name, func(t *testing.T) {
			uuid, instance, known := pool.Locate(c.device, gpus())
			NewWithT(t).Expect([]any{uuid, instance, known}).To(Equal([]any{c.uuid, c.instance, c.known}))
		})
	}
}

// TestADeviceThatTheDriverTaintsIsNotOffered: with its feature gate NVMLDeviceHealthCheck the driver taints devices
// that are unhealthy (cmd/gpu-kubelet-plugin/driver.go, deviceHealthEvents). Beside the device plugin such a GPU is
// reported and counts as not advertised.
func TestADeviceThatTheDriverTaintsIsNotOffered(t *testing.T) {
	g := NewWithT(t)
	device := func(name, uuid string) map[string]any {
		return map[string]any{"name": name, "attributes": map[string]any{"type": map[string]any{"string": "gpu"}, "uuid": map[string]any{"string": uuid}}}
	}
	sick := device("gpu-1", "GPU-b")
	sick["taints"] = []any{map[string]any{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}}
	pool := dra.PoolOf([]dra.Slice{dra.SliceOf(dra.Slim(map[string]any{"spec": map[string]any{
		"driver": dra.DriverName, "nodeName": "a", "pool": map[string]any{"name": "a", "generation": int64(1), "resourceSliceCount": int64(1)},
		"devices": []any{device("gpu-0", "GPU-a"), sick},
	}}))})
	g.Expect(pool.Published()).To(Equal(map[string]int64{"nvidia.com/gpu": 1}))
	have := []v1alpha1.DeviceStatus{{UUID: "GPU-a", Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}, {UUID: "GPU-b", Index: 1, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}}
	g.Expect(pool.Differs(have, 0)).NotTo(BeEmpty())
	g.Expect(pool.Stale(have, 0)).To(BeEmpty(), "a driver that starts anew would offer it again")
}

// TestAGPUThatIsLostIsNoReasonToRestartTheDriver: neither are its instances. One that is in MIG mode now is.
func TestAGPUThatIsLostIsNoReasonToRestartTheDriver(t *testing.T) {
	g := NewWithT(t)
	pool := dra.Pool{Complete: true, Devices: []dra.Device{
		{Name: "gpu-0", Type: "gpu", UUID: "GPU-a", Shares: 1},
		{Name: "gpu-1", Type: "gpu", UUID: "GPU-b", Shares: 1},
		{Name: "gpu-2-mig", Type: "mig", UUID: "MIG-c", Parent: "GPU-c", Profile: "1g.5gb", Shares: 1},
	}}
	have := []v1alpha1.DeviceStatus{{UUID: "GPU-a", Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}}}
	g.Expect(pool.Differs(have, 1)).To(HaveLen(2))
	g.Expect(pool.Stale(have, 1)).To(BeEmpty())
	have = append(have, v1alpha1.DeviceStatus{UUID: "GPU-b", Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled}})
	g.Expect(pool.Stale(have, 1)).To(ConsistOf("gpu-1 (GPU-b) is published and gone"))
}
