// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// Snapshot is everything that a decision depends on, as one reconcile read it from the cache. rollout.Decide changes
// none of it but what Repeats and OtherControllers point to, which it keeps for later reconciles. What it finds itself
// it sets in its own copy of the snapshot.
type Snapshot struct {
	// Now is the time of the reconcile.
	Now time.Time
	// LeadsSince is when the controller began to lead; zero in a preview.
	LeadsSince time.Time
	// Plugin is how NVIDIA's device plugin is installed and whether it reads our ConfigMap.
	Plugin DevicePlugin
	// Configs is the content of our ConfigMap: those keys that our field manager owns. Nil when there is none yet.
	Configs map[string]string
	// ConfigsCopy is the content of the copy of our ConfigMap in the operator's namespace.
	ConfigsCopy map[string]string
	// Policies are all policies, with their last status.
	Policies []v1alpha1.GPUSharingPolicy
	// Nodes are all nodes that have a GPUNode, and those that the operator has changed and whose GPUNode is gone
	// (NoGPUNode).
	Nodes []Node
	// Unscheduled are the pods that ask for GPUs or instances and are on no node.
	Unscheduled []Pod
	// NodePools are the NodePools of Karpenter, by name; nil: none, or not known.
	NodePools map[string]NodePool
	// DRA is what of the cluster matters where NVIDIA's DRA driver serves GPUs.
	DRA DRA
	// ReadinessTaint says that nodes that Karpenter made get the startup taint v1alpha1.TaintStartupReadiness, since
	// every Karpenter of the cluster is v1.13 or newer. False: Karpenter's nodes get none from the operator.
	ReadinessTaint bool
	// UnscheduledVersion tells one value of Unscheduled from another, for rollout.Memory. 0: not known, so nothing is
	// kept of them.
	UnscheduledVersion int64
	// Repeats counts what was written in the last hour; nil: nothing is held back for that.
	Repeats *action.Repeats
	// OtherControllers remembers other controllers that were seen a moment ago; nil: only the annotation on the Node
	// does.
	OtherControllers *OtherControllers
	// FullConfigs are the keys for which our ConfigMap has no room. rollout.Decide finds them.
	FullConfigs map[string]bool
	// ConfigsRefused is why the API server refuses what our ConfigMap must hold; empty: it does not. rollout.Decide finds
	// it.
	ConfigsRefused string
	// MpsUsers are the pods that ask for GPUs, or have some, on nodes where NVIDIA's MPS DaemonSet runs. rollout.Decide
	// finds them.
	MpsUsers []string
}

// Node is a node that has GPUs, with what is on it.
type Node struct {
	DRANode

	Name string
	// Version tells one value of the node from another, for rollout.Memory: with another version anything else may
	// differ. 0: not known, so nothing is kept of the node.
	Version     int64
	Labels      map[string]string
	Annotations map[string]string
	Taints      []corev1.Taint
	// Created is when the node joined.
	Created time.Time
	// Allocatable is Node.status.allocatable of the extended resources nvidia.com/*.
	Allocatable map[string]int64
	// Unallocatable is, by resource of GPUs and instances, Node.status.capacity less allocatable: the devices that
	// NVIDIA's device plugin reports as unhealthy and, for 5 minutes, all that a plugin which has stopped had
	// registered. Nil if there are none.
	Unallocatable map[string]int64
	// GPU is the GPUNode of the node: its spec and status.rollout as last written by the controller, the rest of its
	// status as last written by its agent.
	GPU v1alpha1.GPUNode
	// NoGPUNode reports that the node, which the operator has changed, has no GPUNode, and that its controller could not
	// make it again in time. GPU then has its name and, from the copy, its baseline.
	NoGPUNode bool
	// BaselineLost is true if the GPUNode lacks what the copy of its baseline on the Node has. GPU.Spec has it.
	BaselineLost bool
	// Untouched is true if that copy was written for this version of the GPUNode (SavedBaseline.Untouched).
	Untouched bool
	// ChangedFor is the policy on whose behalf the node was changed last, by the copy of its baseline; empty: not
	// recorded.
	ChangedFor string
	// CopyNumbers says that it has indexes of GPUs.
	CopyNumbers bool
	// AgentReady says that a pod of the agent on the node is Ready.
	AgentReady bool
	// AgentSince is since when that pod is Ready; zero if it is not known. The report of the agent may be older.
	AgentSince time.Time
	// MarkedAtWorkSince is since when, at the latest, a label on the node says that a controller works there, also the
	// operator itself: a deploy label of NVIDIA's that is neither true nor false, or mig-manager's state. Zero if none
	// does, or it is not known. What the operator writes beside its record of what it stopped does not begin it anew.
	MarkedAtWorkSince time.Time
	// ConfigWriter is the field manager that set the label nvidia.com/device-plugin.config last, if that is another
	// than the operator; empty: not known.
	ConfigWriter string
	// OtherPartitioner is an extended resource by which another operator that partitions GPUs shows on the node; empty:
	// none does.
	OtherPartitioner string
	// OtherPartitionerLeft is such a resource with quantity 0. The kubelet lists a resource for ever, so it tells a plugin
	// that restarts from one that is uninstalled only by how long this lasts. Empty: none is listed.
	OtherPartitionerLeft string
	// MemoryOwner is a program beside the operator that limits GPU memory on the node; empty: none is known.
	MemoryOwner string
	// Features is what the NodeFeature objects of the node say about the label nvidia.com/mps.capable.
	Features NodeFeatures
	// Pods are the pods bound to the node that have not finished (phase neither Succeeded nor Failed).
	Pods []Pod
}

// Pod is what of a pod matters here.
type Pod struct {
	Namespace, Name, UID string
	// Controller is the kind of its controlling owner, such as DaemonSet; empty if it has none.
	Controller string
	// Mirror marks the mirror of a static pod: it has the annotation kubernetes.io/config.mirror.
	Mirror bool
	// Terminating says that its deletion timestamp is set.
	Terminating bool
	// EndsBy is its deletion timestamp: when it must have ended.
	EndsBy time.Time
	// GPU reports that one of its containers requests GPUs or MIG instances.
	GPU bool
	// Requests are the resources of GPUs and instances that it requests; nil for none.
	Requests map[string]int64
	// Running reports that the kubelet has admitted it and started a container; set for pods that ask for GPUs.
	Running bool
	// RunsAs is the user ID as which all its containers run; nil: they differ, or the pod does not tell.
	RunsAs *int64
	// Workload names what has made it, such as "Deployment team/web"; set for pods that ask for GPUs.
	Workload string
	// SharingLabels are the labels by which it selects its node, and which NVIDIA's GPU Feature Discovery writes anew when the
	// GPUs are shared another way, such as nvidia.com/gpu.product; set for pods that ask for GPUs.
	SharingLabels []string
	// InitHolds reports that an init container holds, or is about to hold, a GPU. The kubelet reports to no agent which
	// GPUs init containers hold, other than sidecars.
	InitHolds bool
	// Claim is the ResourceClaim, as namespace/name, by which it has GPUs of NVIDIA's DRA driver; empty: it has none,
	// or nobody reports that.
	Claim string
	// PodGroup to which it belongs, in its namespace; set for pods that have devices by ResourceClaims.
	PodGroup string
	// Starting reports that it has devices by ResourceClaims, is bound to the node and is not Ready: its containers
	// have not started yet, or not again after a reboot.
	Starting bool
	// Refused is why the API server refused to evict it when the controller last asked, and what to do about it; empty:
	// it did not, or has not been asked for a minute.
	Refused string
	// Tolerates reports that it tolerates v1alpha1.TaintChanging; not set for pods of DaemonSets that ask for no GPU.
	Tolerates bool
	// Own reports that it is one of the operator's own: its controller, an agent or an MPS pod.
	Own bool
	// Scheduled is when it was bound to the node: the last transition of its condition PodScheduled. Zero if not known.
	Scheduled time.Time
	// NVIDIA reports that it belongs to a DaemonSet, or to an object of NVIDIA's, in a namespace in which the GPU
	// Operator or a stand-alone device plugin runs.
	NVIDIA bool
	// NodeSelector is spec.nodeSelector. NVIDIA's programs select the deploy label that starts and stops them (KeptBy).
	NodeSelector map[string]string
	// DRA says that it offers GPUs through ResourceClaims: the kubelet plugin of NVIDIA's DRA driver.
	DRA bool
	// DynamicMIG says that the feature gate DynamicMIG of that driver is on.
	DynamicMIG bool
	// SetsTimeSlices says that the feature gate TimeSlicingSettings of that driver is on.
	SetsTimeSlices bool
	// MountsConfig says that one of its volumes is our ConfigMap.
	MountsConfig bool
	// SyncTriggered is the value of its annotation v1alpha1.AnnotationSync.
	SyncTriggered string
	// Validator says that it is a test workload of the GPU Operator's validator, which holds a GPU or an instance.
	Validator bool
	// ReadySince is when it became Ready; zero if it is not.
	ReadySince time.Time
	// Troubles are the containers that do not run as they should; of NVIDIA's programs only.
	Troubles []Trouble
	// Discovers says that it is one of Node Feature Discovery's.
	Discovers bool
	// Serves says that it is one of the pods without which the GPUs of the node are not offered: NVIDIA's programs, and
	// the worker of Node Feature Discovery, whose labels start them.
	Serves bool
	// Tolerations are its tolerations, but for those that every pod of a DaemonSet has.
	Tolerations []corev1.Toleration
}

// ReturnsAtOnce reports whether eviction would not help: a DaemonSet, or the kubelet itself, brings the pod back at
// once.
func (p *Pod) ReturnsAtOnce() bool { return p.Mirror || p.Controller == daemonSet }

// DevicePlugin is how NVIDIA's device plugin is installed and whether it reads our ConfigMap.
type DevicePlugin struct {
	// Reason is why no policy can be honoured in this cluster: DRAStackActive or NoDevicePlugin. Empty: one can.
	Reason string
	// Message says what, where and what to do next; set with Reason, and when something keeps Ready from becoming true.
	Message string
	// Ready says that the device plugin is configured to read our ConfigMap. Until then no key is selected on a node.
	Ready bool
	// Overruled is when the operator last set again what another controller had changed in the ClusterPolicy, in the
	// last hour; zero: nobody did. NVIDIA's programs start anew then.
	Overruled time.Time
	// ClusterPolicy says that the GPU Operator runs the device plugin, so that its deploy labels start and stop
	// NVIDIA's programs on a node. False: a stand-alone device plugin.
	ClusterPolicy bool
	// NodeFeatures reports whether the API server has the kind NodeFeature of Node Feature Discovery (NFD).
	NodeFeatures bool
	// Operands is what the ClusterPolicy says of NVIDIA's DaemonSets; nil with a stand-alone device plugin.
	Operands *clusterpolicy.Operands
	// NoMIGManager is why NVIDIA's mig-manager cannot be asked for anything in this cluster; empty: it can.
	NoMIGManager string
	// MIGReady says that NVIDIA's mig-manager is configured to read our ConfigMap, and that the file for it is there.
	MIGReady bool
	// Configs are the keys that the device plugin itself needs in our ConfigMap, each with its content: the default key
	// (deviceplugin.Default) and those copied from the ConfigMap that was there before us (deviceplugin.Adopt).
	Configs map[string]string
}

// Workload is what nodes are for whose label nvidia.com/gpu.workload.config does not tell it; empty: the label counts for
// nothing (clusterpolicy.Operands).
func (p *DevicePlugin) Workload() string {
	if p.Operands == nil {
		return ""
	}
	return p.Operands.Workload
}

// Users lists the pods of all nodes that ask for GPUs, or have some by a ResourceClaim.
func (s *Snapshot) Users() []string {
	var users []string
	for i := range s.Nodes {
		users = append(users, UsersOn(&s.Nodes[i])...)
	}
	return users
}

// UsersOn lists the pods on a node that ask for GPUs, or have some by a ResourceClaim.
func UsersOn(n *Node) []string {
	var users []string
	for p := range n.Pods {
		if pod := &n.Pods[p]; pod.GPU || pod.Claim != "" {
			users = append(users, fmt.Sprintf("pod %s/%s", pod.Namespace, pod.Name))
		}
	}
	return users
}

// ServedByMPS reports whether a pod of NVIDIA's MPS DaemonSet is among the pods of a node.
func ServedByMPS(pods []Pod) bool {
	for p := range pods {
		if pods[p].KeptBy(LabelMPSCapable) {
			return true
		}
	}
	return false
}

// WithoutFuture returns the node, or a copy of it in which all recorded times that are later than a limit are long past, and
// the latest that the node has. A time in the future tells that a clock was wrong, such as the controller's after a boot;
// what waits for a deadline would wait until then. The annotation gpusharing.io/other-controller stays: no node is taken
// over earlier for a wrong clock.
func (n *Node) WithoutFuture(limit time.Time) (past *Node, latest time.Time) {
	n.eachTime(func(at *time.Time) { latest = timing.Latest(latest, *at) })
	if !latest.After(limit) {
		return n, latest
	}
	c := *n
	c.Annotations, c.Taints, c.Pods, c.GPU = maps.Clone(n.Annotations), slices.Clone(n.Taints), slices.Clone(n.Pods), *n.GPU.DeepCopy()
	for i := range c.Taints {
		c.Taints[i].TimeAdded = c.Taints[i].TimeAdded.DeepCopy()
	}
	c.eachTime(func(at *time.Time) {
		if at.After(limit) {
			*at = time.Unix(0, 0)
		}
	})
	return &c, latest
}

// eachTime visits all recorded times, which may be set.
func (n *Node) eachTime(visit func(*time.Time)) {
	for name, value := range n.Annotations {
		if strings.HasPrefix(name, v1alpha1.Group+"/") && name != v1alpha1.AnnotationOtherController {
			visitStamps(value, visit, func(is string) { n.Annotations[name] = is })
		}
	}
	for i := range n.Pods {
		visitStamps(n.Pods[i].SyncTriggered, visit, func(is string) { n.Pods[i].SyncTriggered = is })
		visit(&n.Pods[i].ReadySince)
	}
	for i := range n.Taints {
		if t := &n.Taints[i]; t.Key == v1alpha1.TaintChanging && t.TimeAdded != nil {
			visit(&t.TimeAdded.Time)
		}
	}
	for _, at := range []*time.Time{&n.DevicesTaintedAt, &n.MarkedAtWorkSince, &n.Features.OverriddenSince, &n.GPU.Spec.ChangeTime.Time, &n.GPU.Status.Config.ChangeTime.Time} {
		visit(at)
	}
	if f := n.GPU.Status.Rollout.Failed; f != nil {
		visit(&f.Time.Time)
	}
}

// visitStamps visits the times of the stamps in a list; set gets the list if one of them was set.
func visitStamps(list string, visit func(*time.Time), set func(is string)) {
	if list == "" {
		return
	}
	parts, sets := strings.Split(list, ","), false
	for i, part := range parts {
		key, at, is := timing.Parse(part)
		if !is {
			continue
		}
		was := at
		if visit(&at); !at.Equal(was) {
			parts[i], sets = timing.Stamp(key, at), true
		}
	}
	if sets {
		set(strings.Join(parts, ","))
	}
}
