// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

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
