// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// OnDemandMode decides what is done for pods that wait for MIG instances.
// +kubebuilder:validation:Enum=Advise;Apply
type OnDemandMode string

// The modes.
const (
	OnDemandModeAdvise OnDemandMode = "Advise" // changes nothing
	OnDemandModeApply  OnDemandMode = "Apply"  // makes the instances, of what is free or idle
)

// MIGOnDemand says which MIG instances may be made for pods that wait.
//
// +kubebuilder:validation:XValidation:rule="!has(self.reserve) || self.reserve.all(r, r.profile in self.profiles)",message="a profile of reserve must be one of profiles, in the same words",fieldPath=".reserve"
type MIGOnDemand struct {
	// mode is what is done for pods that wait. Advise: status.onDemand and the condition DemandMet say who waits, and what would be changed; nothing is changed. Apply:
	// the changes are made, of free room and idle instances alone; a GPU that is unused for three times idleSeconds returns to the instances of its layout. Default: Advise.
	// +optional
	// +kubebuilder:default=Advise
	Mode OnDemandMode `json:"mode,omitempty"`

	// profiles of the instances that may be made, such as 1g or 1g.5gb.
	// +required
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Profiles []MIGProfile `json:"profiles,omitempty"`

	// reserve are instances that stay idle, on whichever GPUs of the layout, when others are made.
	// +optional
	// +listType=map
	// +listMapKey=profile
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	Reserve []MIGReserve `json:"reserve,omitempty"`

	// idleSeconds is how long no pod or process must have had an instance before it may be destroyed, from 30 to 86400, by lastHeldTime of
	// the GPUNode. Default: 300.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=30
	// +kubebuilder:validation:Maximum=86400
	IdleSeconds int32 `json:"idleSeconds,omitempty"`

	// namespaceSelector selects, by their labels, the namespaces whose pods count. Absent: all.
	// +optional
	NamespaceSelector *NamespaceSelector `json:"namespaceSelector,omitempty"`
}

// Rest is how long a GPU must be unused before it returns to the instances of its layout.
func (o *MIGOnDemand) Rest() time.Duration { return 3 * time.Duration(o.IdleSeconds) * time.Second }

// GPUDemand is the MIG instances that a GPU is to have for pods that wait, or waited, instead of those of its layout.
type GPUDemand struct {
	// uuid of the GPU.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	UUID string `json:"uuid,omitempty"`

	// instances of the GPU, by profile, by their exact names.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Instances []InstanceCount `json:"instances,omitempty"`

	// sinceTime is when that was decided. For 5 minutes after it no instance of the GPU is destroyed for another pod.
	// +required
	SinceTime metav1.Time `json:"sinceTime,omitzero"`

	// firstPod is the pod for which it was decided that had waited longest, as namespace/name. Absent: the GPU returns to its layout, or to what it
	// had before a change that failed.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	FirstPod string `json:"firstPod,omitempty"`

	// failures is how many changes of the GPU for pods that wait have failed, or not begun, in succession. Until 1 minute after sinceTime, twice as long each time
	// up to 64, there is no other.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Failures int32 `json:"failures,omitempty"`
}

// OnDemand is what the policy lets be made on demand: one layout at most has it. Nil: nothing.
func (p *GPUSharingPolicy) OnDemand() *MIGOnDemand {
	if p.Spec.Sharing.MIG == nil {
		return nil
	}
	for i := range p.Spec.Sharing.MIG.Layouts {
		if of := p.Spec.Sharing.MIG.Layouts[i].OnDemand; of != nil {
			return of
		}
	}
	return nil
}

// NamespaceSelector selects namespaces by their labels. All requirements must match. What no label can be matches nothing.
type NamespaceSelector struct {
	// matchLabels are labels that a namespace must have, with these values.
	// +optional
	// +kubebuilder:validation:MaxProperties=12
	MatchLabels map[string]string `json:"matchLabels,omitempty"`

	// matchExpressions are requirements on the labels of a namespace.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=4
	MatchExpressions []NodeSelectorRequirement `json:"matchExpressions,omitempty"`
}

// MIGReserve is a number of idle instances of one profile.
type MIGReserve struct {
	// profile of the instances, one of profiles of onDemand.
	// +required
	Profile MIGProfile `json:"profile,omitempty"`

	// count is how many instances stay idle, on all nodes together.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	Count int32 `json:"count,omitempty"`
}

// MostDemands is the largest number of requests, and of changes, that status.onDemand of a policy lists.
const MostDemands = 10

// OnDemandStatus is what pods wait for of the GPUs that a policy has on demand, and what would be changed for them.
type OnDemandStatus struct {
	// pods is how many pods wait that a node of the policy would take if it had the instances. Neither CPU nor memory are looked at.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Pods int32 `json:"pods"`

	// ready is the number of pods that wait and for which instances are idle: it is the scheduler's turn.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Ready int32 `json:"ready"`

	// planned is the number of pods that wait and for which changes would make instances.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Planned int32 `json:"planned"`

	// unmet is the number of pods that wait and for which nothing can be done now.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Unmet int32 `json:"unmet"`

	// requests lists the first ten kinds of pods that wait: of the highest priority first, then those that have waited longest.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10
	Requests []DemandStatus `json:"requests,omitempty"`

	// gpus is the number of GPUs that would be changed for pods that wait.
	// +optional
	// +kubebuilder:validation:Minimum=0
	GPUs int32 `json:"gpus"`

	// changes lists the first ten GPUs that would be changed, by node and index.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10
	Changes []OnDemandChange `json:"changes,omitempty"`
}

// DemandStatus is pods that wait for the same.
type DemandStatus struct {
	// instances that each of the pods asks for, by profile.
	// +required
	// +listType=map
	// +listMapKey=profile
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Instances []InstanceRequest `json:"instances,omitempty"`

	// pods is how many pods wait for the same: ready, planned and unmet add up to it.
	// +required
	// +kubebuilder:validation:Minimum=1
	Pods int32 `json:"pods,omitempty"`

	// firstPod is the pod that has waited longest, as namespace/name.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	FirstPod string `json:"firstPod,omitempty"`

	// sinceTime is since when firstPod has waited.
	// +optional
	SinceTime metav1.Time `json:"sinceTime,omitzero"`

	// ready is for how many of the pods instances are idle.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Ready int32 `json:"ready"`

	// planned is for how many of the pods changes would make instances.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Planned int32 `json:"planned"`

	// unmet is for how many of the pods nothing can be done now.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Unmet int32 `json:"unmet"`

	// reason why they wait, one of those of the condition DemandMet.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`

	// untilTime is when instances will have been idle for long enough, or are made or kept for the pods again, if the reason is that they are not.
	// +optional
	UntilTime metav1.Time `json:"untilTime,omitzero"`

	// holders are pods that hold what would have to be destroyed, where these are fewest: the first three, as namespace/name.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=3
	// +kubebuilder:validation:items:MaxLength=317
	Holders []string `json:"holders,omitempty"`
}

// InstanceRequest is a number of MIG instances of one profile that a pod asks for.
type InstanceRequest struct {
	// profile is the exact name, such as 1g.10gb.
	// +required
	// +kubebuilder:validation:MinLength=2
	// +kubebuilder:validation:MaxLength=32
	Profile string `json:"profile,omitempty"`
	// count is the number of instances.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	Count int32 `json:"count,omitempty"`
}

// OnDemandChange is what would be changed of one GPU.
type OnDemandChange struct {
	// nodeName is the name of the node that has the GPU.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName,omitempty"`

	// index of the GPU in the node.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Index int32 `json:"index"`

	// destroy are the idle instances that would be destroyed.
	// +optional
	// +listType=map
	// +listMapKey=profile
	// +kubebuilder:validation:MaxItems=16
	Destroy []InstanceCount `json:"destroy,omitempty"`

	// create are the instances that would be created.
	// +optional
	// +listType=map
	// +listMapKey=profile
	// +kubebuilder:validation:MaxItems=16
	Create []InstanceCount `json:"create,omitempty"`
}
