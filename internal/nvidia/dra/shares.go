// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// The driver has one number of shares for all GPUs of all nodes, since its chart has one DaemonSet. To change it
// restarts the driver on every node at once, so that is the administrator's: the operator says what to set, and
// compares.

// RequestedShares is how many claims must be able to share a GPU, by the policies that ask for whole GPUs on nodes of
// the driver.
type RequestedShares map[int64][]string

// Add notes that a policy asks for so many shares.
func (a RequestedShares) Add(shares int64, policy string) {
	if !slices.Contains(a[shares], policy) {
		a[shares] = append(a[shares], policy)
		slices.Sort(a[shares])
	}
}

// String names what is asked for, so that two values can be compared.
func (a RequestedShares) String() string {
	var parts []string
	for _, shares := range slices.Sorted(maps.Keys(a)) {
		parts = append(parts, fmt.Sprintf("%d: %s", shares, strings.Join(a[shares], ", ")))
	}
	return strings.Join(parts, "; ")
}

// SharesProblem says what to set so that a GPU of a node has the shares that the policy wants, and which other policies
// on nodes of the driver want another number; nil if the pool shows that number, or nothing yet.
func SharesProblem(p *Pool, want int64, policy string, requested RequestedShares) *plan.Problem {
	have, known := p.Shares()
	if !known || have == want {
		return nil
	}
	is := fmt.Sprintf("%d shares", have)
	switch have {
	case 0:
		is = "no number of shares (consumableShares is unlimited or memory)"
	case 1:
		is = "no shares"
	}
	message := fmt.Sprintf("NVIDIA's DRA driver publishes %s for each GPU, and policy %s needs %s. ", is, policy, wanted(want))
	if others := against(requested, want); len(others) > 0 {
		return &plan.Problem{
			Reason: v1alpha1.ReasonDRASharesDiffer,
			Message: message + fmt.Sprintf("The driver has one number for all nodes, and %s. Give all of them the same replicas, or leave the nodes of "+
				"the driver out of all but one", format.List(others)),
		}
	}
	return &plan.Problem{Reason: v1alpha1.ReasonDRASharesDiffer, Message: message + remedy(have, want)}
}

func wanted(shares int64) string {
	if shares == 1 {
		return "whole GPUs"
	}
	return fmt.Sprintf("%d shares", shares)
}

// against are the policies that ask for another number.
func against(requested RequestedShares, want int64) []string {
	var others []string
	for _, shares := range slices.Sorted(maps.Keys(requested)) {
		if shares == want {
			continue
		}
		for _, policy := range requested[shares] {
			others = append(others, fmt.Sprintf("policy %s needs %s", policy, wanted(shares)))
		}
	}
	return others
}

// Values names the values of the driver's chart that give each GPU so many shares, more than one.
func Values(shares int64) string {
	return fmt.Sprintf("featureGates.ConsumableShares=true and consumableShares=%d in its chart", shares)
}

// remedy is the value to set, and in which order. A pod that holds a whole GPU keeps it, and one more that gets a GPU
// of which shares are in use hangs, so switching off needs idle GPUs (device_state.go of the driver).
func remedy(have, want int64) string {
	if want == 1 {
		return "First drain the pods that use its GPUs, or others hang. Then set consumableShares=disabled (docs/dra.md)"
	}
	values := "Set " + Values(want) + " (a GPUCluster: docs/dra.md)"
	if have > want {
		return values + ". Running pods keep their shares"
	}
	return values + ". No running pod is restarted"
}

// NVIDIA's DRA driver sets the time slice of a GPU when it prepares a claim, as the config of the claim's DeviceClass
// says, and sets the default one when the claim ends. The class of whole GPUs is the administrator's, so the operator
// compares.

// TimeSlicingSettings is the feature gate of the driver without which it prepares no claim whose config names a time
// slice. It is off by default (pkg/featuregates of the driver).
const TimeSlicingSettings = "TimeSlicingSettings"

// The config by which a class sets the time slice (api/nvidia.com/resource/v1beta1 of the driver).
const (
	configGroup     = "resource.nvidia.com/"
	configKind      = "GpuConfig"
	timeSlicing     = "TimeSlicing"
	defaultInterval = string(v1alpha1.TimeSliceIntervalDefault)
)

// sharingOf is the strategy that a DeviceClass gives whole GPUs by its config, and the time slice; empty if it gives
// none. Of several configs the last one counts (device_state.go of the driver, GetOpaqueDeviceConfigs).
func sharingOf(class map[string]any) (strategy, interval string) {
	for _, listed := range asList(asMap(class["spec"])["config"]) {
		opaque := asMap(asMap(listed)["opaque"])
		parameters := asMap(opaque["parameters"])
		if asString(opaque["driver"]) != DriverName || asString(parameters["kind"]) != configKind || !strings.HasPrefix(asString(parameters["apiVersion"]), configGroup) {
			continue
		}
		sharing := asMap(parameters["sharing"])
		strategy, interval = asString(sharing["strategy"]), ""
		if strategy != timeSlicing {
			continue
		}
		interval = defaultInterval
		if settings, has := sharing["timeSlicingConfig"]; has {
			interval = asString(asMap(settings)["interval"])
		}
	}
	return strategy, interval
}

// Interval is the time slice that a policy's sharing asks for; empty: any.
func Interval(s v1alpha1.Sharing) v1alpha1.TimeSliceInterval {
	if s.Strategy == v1alpha1.StrategyTimeSlicing && s.TimeSlicing != nil {
		return s.TimeSlicing.Interval
	}
	return ""
}

// IntervalProblem says what to set so that GPUs have the time slice that a policy wants; nil if the class that offers
// whole GPUs has it, or is not known. off names a pod of the driver whose feature gate TimeSlicingSettings is off;
// empty if there is none.
func IntervalProblem(classes []Class, want v1alpha1.TimeSliceInterval, policy, off string) *plan.Problem {
	class, offered := Offering(classes, plan.ResourceGPU)
	if want == "" || !offered || class.Unread {
		return nil
	}
	if off != "" {
		return intervalDiffers("The feature gate %s of NVIDIA's DRA driver is off (pod %s), and policy %s needs time slice %s. "+
			"Set featureGates.%s=true in its chart, or remove timeSlicing.interval", TimeSlicingSettings, off, policy, want,
			TimeSlicingSettings)
	}
	has := "no time slice"
	switch {
	case class.Interval == string(want):
		return nil
	case class.Interval != "":
		has = "time slice " + class.Interval
	case class.Strategy != "":
		has = "sharing strategy " + class.Strategy
	}
	set := "set it there"
	if class.Own {
		set = "make a class of your own with it"
	}
	return intervalDiffers("DeviceClass %s gives GPUs %s by its config, and policy %s needs %s. First drain the pods that use GPUs, or others hang. Then %s "+
		"(docs/dra.md), or remove timeSlicing.interval", class.Name, has, policy, want, set)
}

func intervalDiffers(format string, of ...any) *plan.Problem {
	return &plan.Problem{Reason: v1alpha1.ReasonDRAIntervalDiffers, Message: fmt.Sprintf(format, of...)}
}
