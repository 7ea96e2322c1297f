// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

const (
	// OverlayPrefix begins the names of the operator's NodeOverlays.
	OverlayPrefix = "gpu-sharing-"
	// LabelPolicy names, on a NodeOverlay, the policy that it is for.
	LabelPolicy = v1alpha1.Group + "/policy"
	// overlayWeight is unusual, so that users are unlikely to choose it. Two NodeOverlays of one weight that set the
	// same resource conflict; the higher weight wins otherwise (sigs.k8s.io/karpenter
	// pkg/controllers/nodeoverlay/store.go).
	overlayWeight = 4711
	// gateDeadline is how long Karpenter may take to write the status of a NodeOverlay. It takes seconds, unless its
	// feature gate NodeOverlay is off: then it writes none.
	gateDeadline = 30 * time.Second
)

// KnownOverlayVersion is the apiVersion of NodeOverlays that the operator knows.
const KnownOverlayVersion = GroupKarpenter + "/v1alpha1"

// karpenter decides on the NodeOverlay of a NodePool and a shape of its nodes.
func (e *entry) karpenter(wanted *wants) {
	e.limits()
	if e.resources[plan.ResourceGPU] > int64(e.shape.count) && e.by.Spec.Autoscaling.UnrenamedReplicas != v1alpha1.UnrenamedReplicasAnnounce {
		e.find(v1alpha1.ReasonGPUCountRises, "A new node advertises nvidia.com/gpu %d before it advertises %d, and Karpenter starts further nodes meanwhile. "+
			"Set renameByDefault: true, or rollout.startupTaint and autoscaling.unrenamedReplicas",
			e.shape.count, e.resources[plan.ResourceGPU])
		return
	}
	requirements := e.requirements()
	if len(requirements) == 0 {
		e.find(v1alpha1.ReasonUnknownShape, "The instance types with %d × %s in NodePool %s are not known. Name them in spec.autoscaling.nodeShapes[].instanceTypes",
			e.shape.count, e.shape.product, e.g.Name)
		return
	}
	want := e.overlay(requirements)
	if e.s.OverlayVersion == "" {
		e.find(v1alpha1.ReasonOverlayNotServed, "The cluster has no kind NodeOverlay, so nodes for shared GPUs start only by hand. "+
			"Install the CRDs of Karpenter v1.7 or newer, and start it with --feature-gates=NodeOverlay=true")
		return
	}
	e.paste = append(e.paste, string(want.yaml(e.s.OverlayVersion)))
	have := e.s.overlay(want.Name)
	if e.managed() && have == nil && e.wrote(want.Name) {
		e.written = []string{overlayKind + want.Name}
		e.find(v1alpha1.ReasonRemovedByOther, "Another controller deleted NodeOverlay %s. Exclude it there, or add what `kubectl gpusharing plan` prints to its source; "+
			"then set spec.autoscaling.mode to Advise and back", want.Name)
		return
	}
	if e.managed() {
		wanted.overlays = append(wanted.overlays, overlayWant{want, e.by})
	}
	if writes := e.managed() || have != nil && have.Policy != ""; !writes || !e.refused(overlayKind+want.Name) {
		e.compare(have, want)
	}
}

// overlayKind begins the entries of status.nodeGroups[].written for NodeOverlays.
const overlayKind = "NodeOverlay/"

// wrote reports whether the policy last reported that the NodeOverlay is there. The operator reports none that it
// deletes, or that the garbage collector deletes with an earlier policy of that name.
func (e *entry) wrote(overlay string) bool {
	return slices.ContainsFunc(e.by.Status.NodeGroups, func(s v1alpha1.NodeGroupStatus) bool {
		return e.g.is(s.Kind, s.Namespace, s.Name) && slices.Contains(s.Written, overlayKind+overlay)
	})
}

// compare reports how far the NodeOverlay is as it is wanted; have is nil if there is none.
func (e *entry) compare(have *Overlay, want Overlay) {
	switch {
	case have == nil && !e.managed(), have != nil && have.Policy == "" && !e.managed() && !have.same(want):
		e.find(v1alpha1.ReasonAdviceOnly, "Karpenter does not know what new nodes of NodePool %s advertise. Create the NodeOverlay that `kubectl gpusharing plan` "+
			"prints, or set spec.autoscaling.mode: Manage", e.g.Name)
	case have == nil:
		e.find(v1alpha1.ReasonConfiguring, "NodeOverlay %s is being created", want.Name)
	case e.managed() && have.Policy == "" && !have.same(want):
		e.find(v1alpha1.ReasonOwnedByOther, "NodeOverlay %s is not the operator's. Delete it", want.Name)
	case e.managed() && have.Policy != "" && !have.of(e.by):
		e.find(v1alpha1.ReasonConfiguring, "NodeOverlay %s is of a policy of that name that was deleted, and is being given to this one", want.Name)
	default:
		if have.Policy != "" && e.managed() {
			e.written = append(e.written, overlayKind+have.Name)
		}
		e.reportState(have)
	}
}

// reportState reports what Karpenter makes of a NodeOverlay.
func (e *entry) reportState(have *Overlay) {
	age := e.s.Now.Sub(have.Created)
	above := e.s.above(have)
	switch {
	case !have.Observed && age < gateDeadline:
		e.find(v1alpha1.ReasonConfiguring, "Karpenter has not looked at NodeOverlay %s yet", have.Name)
		e.after = gateDeadline - age
	case !have.Observed:
		e.find(v1alpha1.ReasonFeatureGateOff, "Karpenter does not look at NodeOverlay %s. Start Karpenter with --feature-gates=NodeOverlay=true (Helm: "+
			"settings.featureGates.nodeOverlay=true)", have.Name)
	case have.NotReady != "":
		e.find(v1alpha1.ReasonOverlayConflict, "Karpenter does not apply NodeOverlay %s: %s. Delete the NodeOverlay with weight %d that sets the same resource, or "+
			"change its weight", have.Name, have.NotReady, have.Weight)
	case above != nil:
		e.find(v1alpha1.ReasonOverlayConflict, "NodeOverlay %s has weight %d and takes the place of %s with weight %d. Give it a lower weight, or delete it",
			above.Name, above.Weight, have.Name, have.Weight)
	default:
		e.find(v1alpha1.ReasonConfigured, "Karpenter knows by NodeOverlay %s what new nodes advertise", have.Name)
	}
}

// limits reports limits of the NodePool that count something else than its nodes advertise. Karpenter counts the
// capacity of the NodeOverlay (sigs.k8s.io/karpenter pkg/controllers/provisioning/scheduling/scheduler.go).
func (e *entry) limits() {
	limit, limited := e.g.poolLimit(plan.ResourceGPU)
	if !limited {
		return
	}
	switch expected := e.resources[plan.ResourceGPU]; {
	case expected == 0:
		e.find(v1alpha1.ReasonLimitsNotCounted, "The limit nvidia.com/gpu: %s of NodePool %s does not hold, because its nodes will advertise none. Set a limit for %s",
			limit, e.g.Name, strings.Join(slices.Sorted(maps.Keys(e.resources)), " or "))
	case expected > int64(e.shape.count):
		e.find(v1alpha1.ReasonLimitsNotCounted, "The limit nvidia.com/gpu: %s of NodePool %s counts %d for each new node, because Karpenter counts replicas. "+
			"Multiply it by %d", limit, e.g.Name, expected, expected/int64(e.shape.count))
	}
}

func (g *group) poolLimit(resource string) (string, bool) {
	if g.pool == nil {
		return "", false
	}
	limit, found := g.pool.Limits[resource]
	return limit, found
}

// requirements select the instance types of the shape; none: they are not known.
func (e *entry) requirements() []Requirement {
	in := func(key string, values ...string) Requirement {
		return Requirement{Key: key, Operator: "In", Values: values}
	}
	pool := in(labelNodePool, e.g.Name)
	if e.g.pool != nil && e.g.pool.NodeClassGroup == "karpenter.k8s.aws" {
		if name, memory := gpuOnAWS(e.shape.product); name != "" {
			counts := []string{strconv.Itoa(e.shape.count)}
			if e.shape.count == 1 {
				counts = append([]string{"0"}, counts...) // of p5.4xlarge (aws/karpenter-provider-aws issue 8368)
			}
			bound := func(operator string, mebibytes int) Requirement {
				return Requirement{Key: labelMemoryOnAWS, Operator: operator, Values: []string{strconv.Itoa(mebibytes)}}
			}
			return []Requirement{
				pool, in("karpenter.k8s.aws/instance-gpu-name", name), in("karpenter.k8s.aws/instance-gpu-count", counts...),
				bound("Gt", memory*3/4), bound("Lt", memory*5/4), //nolint:mnd // a quarter off
			}
		}
	}
	if len(e.shape.instanceTypes) == 0 {
		return nil
	}
	return []Requirement{pool, in(labelInstanceType, e.shape.instanceTypes...)}
}

// labelMemoryOnAWS is the memory of one GPU of an instance type in MiB. It tells GPUs of one name from each other: p4d has A100 with
// 40 GB and p4de with 80 GB, and g6f has fractions of an L4, which cannot be shared. Drivers and EC2 differ a little in what they count.
const labelMemoryOnAWS = "karpenter.k8s.aws/instance-gpu-memory"

// gpuOnAWS is the value of the label karpenter.k8s.aws/instance-gpu-name for a product, empty if it is not known, and about how much
// memory in MiB the GPU has. Source: aws/karpenter-provider-aws pkg/providers/instancetype/types.go, which takes the name that EC2 gives
// the GPU, in lower case.
func gpuOnAWS(product string) (name string, memory int) {
	name = strings.ToLower(strings.TrimPrefix(strings.TrimPrefix(product, "NVIDIA-"), "Tesla-"))
	name, _, _ = strings.Cut(name, "-")
	gigabytes, known := map[string]int{
		"t4": 16, "t4g": 16, "a10g": 24, "l4": 24, "l40s": 48, "v100": 16, "a100": 40, "h100": 80, "h200": 141, "b200": 180, "b300": 269,
	}[name]
	if !known {
		return "", 0
	}
	for part := range strings.SplitSeq(product, "-") {
		if number, is := strings.CutSuffix(part, "GB"); is {
			if n, err := strconv.Atoi(number); err == nil {
				gigabytes = n
			}
		}
	}
	return name, gigabytes << 10
}

// overlay is the NodeOverlay that tells Karpenter what a node of the shape advertises. Whole GPUs that the node will
// not offer are hidden: for a pod that asks for one Karpenter would otherwise start a node that never has it.
func (e *entry) overlay(requirements []Requirement) Overlay {
	o := Overlay{Policy: e.by.Name, Weight: overlayWeight, Requirements: requirements, Capacity: map[string]string{plan.ResourceGPU: "0"}}
	for name, count := range e.resources {
		o.Capacity[name] = strconv.FormatInt(count, 10)
	}
	sum := sha256.Sum256(fmt.Append(nil, e.by.Name, "/", e.g.Name, requirements))
	const most, hashed = 63, 4
	name := OverlayPrefix + e.by.Name + "-" + e.g.Name
	if most := most - 2*hashed - 1; len(name) > most {
		name = strings.TrimRight(name[:most], "-.")
	}
	o.Name = name + "-" + hex.EncodeToString(sum[:hashed])
	return o
}

// Object is the NodeOverlay as it is applied. uid is that of the policy; empty: without owner.
func (o *Overlay) Object(apiVersion, uid string) map[string]any {
	requirements := make([]any, 0, len(o.Requirements))
	for _, r := range o.Requirements {
		values := make([]any, 0, len(r.Values))
		for _, v := range r.Values {
			values = append(values, v)
		}
		requirements = append(requirements, map[string]any{"key": r.Key, "operator": r.Operator, "values": values})
	}
	capacity := map[string]any{}
	for name, count := range o.Capacity {
		capacity[name] = count
	}
	metadata := map[string]any{"name": o.Name}
	if uid != "" {
		metadata["labels"] = map[string]any{LabelPolicy: o.Policy, "app.kubernetes.io/managed-by": "gpu-sharing-operator"}
		metadata["ownerReferences"] = []any{map[string]any{
			"apiVersion": v1alpha1.SchemeGroupVersion.String(), "kind": "GPUSharingPolicy", "name": o.Policy, "uid": uid,
		}}
	}
	return map[string]any{
		"apiVersion": apiVersion, "kind": "NodeOverlay", "metadata": metadata,
		"spec": map[string]any{"weight": o.Weight, "requirements": requirements, "capacity": capacity},
	}
}

func (o *Overlay) yaml(apiVersion string) []byte {
	text, err := yaml.Marshal(o.Object(apiVersion, ""))
	if err != nil { // cannot be: it holds strings and numbers only
		return nil
	}
	return text
}

// same reports whether two NodeOverlays ask Karpenter for the same.
func (o *Overlay) same(want Overlay) bool {
	return o.Weight == want.Weight && maps.Equal(o.Capacity, want.Capacity) && slices.EqualFunc(o.Requirements, want.Requirements, func(a, b Requirement) bool {
		return a.Key == b.Key && a.Operator == b.Operator && slices.Equal(a.Values, b.Values)
	})
}

// of reports whether the NodeOverlay lives as long as a policy. The policy may have been deleted and created again
// under its name.
func (o *Overlay) of(p *v1alpha1.GPUSharingPolicy) bool { return o.Owner == string(p.UID) }

func (s *Snapshot) overlay(name string) *Overlay {
	for i := range s.Overlays {
		if s.Overlays[i].Name == name {
			return &s.Overlays[i]
		}
	}
	return nil
}

// above is a NodeOverlay of a higher weight that sets one of the same resources for the same nodes, as far as the
// requirements tell; nil: there is none.
func (s *Snapshot) above(o *Overlay) *Overlay {
	for i := range s.Overlays {
		other := &s.Overlays[i]
		if other.Weight <= o.Weight || other.NotReady != "" || !overlap(o.Requirements, other.Requirements) {
			continue
		}
		for name := range o.Capacity {
			if _, sets := other.Capacity[name]; sets {
				return other
			}
		}
	}
	return nil
}

// overlap reports whether an instance type may meet both lists of requirements: no label is required to have different
// values.
func overlap(a, b []Requirement) bool {
	for _, r := range a {
		for _, s := range b {
			if r.Key == s.Key && r.Operator == "In" && s.Operator == "In" &&
				!slices.ContainsFunc(r.Values, func(v string) bool { return slices.Contains(s.Values, v) }) {
				return false
			}
		}
	}
	return true
}
