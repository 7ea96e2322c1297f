// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

// configPrefix begins the names of what nodes of the DRA driver are asked for. No ConfigMap may have such a key, and no
// label such a value.
const configPrefix = "dra:"

// IsConfig reports whether a config name is one of Render.
func IsConfig(name string) bool { return strings.HasPrefix(name, configPrefix) }

// Render is what a policy's sharing means on a node whose GPUs NVIDIA's DRA driver offers, in the form of the device
// plugin's configuration: a name that differs whenever what is asked for does, and the resources that pods can request
// then. It has no document: nothing on the node reads one. A sharing that asks for no number of shares takes the
// published one, which is no part of the name: it is the administrator's, and changes nothing on the node. published is
// 0 if it is not known. Errors: a *plan.Problem for what the driver lacks.
func Render(s v1alpha1.Sharing, n deviceplugin.Node, published int64) (deviceplugin.Config, error) {
	if err := lacking(s, n.Replicas); err != nil {
		return deviceplugin.Config{}, err
	}
	c := deviceplugin.Config{Resources: map[string]int64{}, Replicas: map[string]int32{}}
	whole := int64(0)
	desired := map[string]v1alpha1.DeviceSharing{}
	for _, d := range n.Desired {
		desired[d.UUID] = d.Sharing
	}
	for i := range n.Devices {
		sharing, selected := desired[n.Devices[i].UUID]
		if !selected {
			sharing = n.Devices[i].Sharing
		}
		if sharing.MIGMode != v1alpha1.MIGModeEnabled {
			whole++
			continue
		}
		for _, instance := range sharing.Instances {
			c.Resources[plan.ResourceOf(instance.Profile)] += int64(instance.Count)
		}
	}
	requested := max(Shares(s), 1)
	if whole > 0 {
		c.Resources[plan.ResourceGPU] = whole * requested
	}
	c.Key = nameOf(s.Strategy, c.Resources, requested)
	if shares := cmp.Or(Shares(s), published); whole > 0 && shares > 1 {
		c.Resources[plan.ResourceGPU], c.Replicas[plan.ResourceGPU] = whole*shares, int32(min(shares, math.MaxInt32))
	}
	return c, nil
}

// nameOf names what a node is asked for.
func nameOf(strategy v1alpha1.Strategy, resources map[string]int64, shares int64) string {
	const hashed = 5
	content, err := json.Marshal(struct {
		Strategy  v1alpha1.Strategy
		Resources map[string]int64
		Shares    int64
	}{strategy, resources, shares})
	if err != nil { // cannot be: strings and numbers only
		return configPrefix
	}
	sum := sha256.Sum256(content)
	return configPrefix + hex.EncodeToString(sum[:hashed])
}

// Twins are two names of what a node is asked for whose instances follow demand, by that of what it has at rest.
func Twins(rests string) (name, twin string) { return rests + "-a", rests + "-b" }

// Shares is how many claims must be able to share a GPU under a policy's sharing; 0: any number, as under MIG, which
// leaves it to the administrator what GPUs without instances offer.
func Shares(s v1alpha1.Sharing) int64 {
	switch s.Strategy {
	case v1alpha1.StrategyTimeSlicing:
		if s.TimeSlicing != nil {
			return int64(s.TimeSlicing.Replicas)
		}
	case v1alpha1.StrategyExclusive:
		return 1
	case v1alpha1.StrategyMIG, v1alpha1.StrategyMPS:
	}
	return 0
}

// lacking says what in a policy's sharing NVIDIA's DRA driver cannot do. replicas are those of MIG instances, by
// profile.
func lacking(s v1alpha1.Sharing, replicas map[string]int32) error {
	switch s.Strategy {
	case v1alpha1.StrategyMPS:
		return notOffered("MPS", "its MPS control daemon serves one ResourceClaim, and each pod that requests nvidia.com/gpu has a claim of its own, so no two such pods "+
			"would share a GPU", "Use TimeSlicing or MIG")
	case v1alpha1.StrategyTimeSlicing:
		if plan.Renamed(s) {
			return notOffered("renameByDefault", "its DeviceClass gpu.nvidia.com offers shares as nvidia.com/gpu", "Remove renameByDefault from sharing.advertise")
		}
	case v1alpha1.StrategyMIG:
		return lackingForMIG(s.MIG, replicas)
	case v1alpha1.StrategyExclusive:
	}
	return nil
}

func lackingForMIG(m *v1alpha1.MIG, replicas map[string]int32) error {
	switch {
	case m.ResourceNames == v1alpha1.MIGResourceNamesUniform:
		return notOffered("resourceNames Uniform", "nvidia.com/gpu is the resource of its DeviceClass for whole GPUs, and a resource must have one class", "Set sharing.mig.resourceNames to PerProfile")
	case m.Actuator == v1alpha1.MIGActuatorMIGManager:
		return notOffered("actuator MIGManager", "NVIDIA's mig-manager neither drains ResourceClaims nor restarts the driver", "Set sharing.mig.actuator to Agent")
	case m.WholeGPUs != nil:
		return notOffered("wholeGPUs", "it has one number of shares for all GPUs of the cluster", "Remove sharing.mig.wholeGPUs")
	}
	for profile, n := range replicas {
		if n > 1 {
			return notOffered("replicas of "+profile, "a pod takes all multiprocessors of an instance, so the driver shares whole GPUs only", "Remove replicas from sharing.mig.layouts")
		}
	}
	return nil
}

// notOffered is what the driver lacks, why, and what to do.
func notOffered(what, why, remedy string) error {
	return &plan.Problem{
		Reason:  v1alpha1.ReasonNotOnDRA,
		Message: fmt.Sprintf("NVIDIA's DRA driver offers no %s: %s. %s, or leave its nodes out of nodeSelector", what, why, remedy),
	}
}
