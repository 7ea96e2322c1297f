// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// GPURequests sums what a pod asks for of GPUs and instances, as the scheduler does: its containers and sidecars
// together, or an init container with the sidecars that start before it, where that is more
// (k8s.io/component-helpers/resource PodRequests).
func GPURequests(spec *corev1.PodSpec) map[string]int64 {
	together, sidecars, most := map[string]int64{}, map[string]int64{}, map[string]int64{}
	each := func(r *corev1.ResourceRequirements, do func(name string, n int64)) {
		for name, quantity := range r.Limits {
			if resource := dra.ResourceRequestedBy(string(name)); quantity.Value() != 0 && IsGPUResource(resource) {
				do(resource, quantity.Value())
			}
		}
	}
	for i := range spec.Containers {
		each(&spec.Containers[i].Resources, func(name string, n int64) { together[name] = sum(together[name], n) })
	}
	for i := range spec.InitContainers {
		sidecar := spec.InitContainers[i].RestartPolicy != nil
		each(&spec.InitContainers[i].Resources, func(name string, n int64) {
			most[name] = max(most[name], sum(sidecars[name], n))
			if sidecar {
				sidecars[name] = sum(sidecars[name], n)
				together[name] = sum(together[name], n)
			}
		})
	}
	if spec.Resources != nil {
		each(spec.Resources, func(name string, n int64) { most[name] = max(most[name], n) })
	}
	for name, n := range most {
		together[name] = max(together[name], n)
	}
	if len(together) == 0 {
		return nil
	}
	return together
}

// sum is that of two counts, or the largest there is: the API server takes any count of each container.
func sum(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// workloadOf names what has made a pod: its controller, or a Deployment by the ReplicaSet that belongs to it, whose
// name ends with the hash that the pod carries too.
func workloadOf(pod *corev1.Pod) string {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || !isName(strings.ToLower(owner.Kind)) || !isName(owner.Name) {
		return fmt.Sprintf("pod %s/%s", pod.Namespace, pod.Name)
	}
	kind, name := owner.Kind, owner.Name
	if hash := pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; kind == "ReplicaSet" && hash != "" {
		if deployment, is := strings.CutSuffix(name, "-"+hash); is {
			kind, name = "Deployment", deployment
		}
	}
	return fmt.Sprintf("%s %s/%s", kind, pod.Namespace, name)
}

// isName reports whether a text can be the name of an object. In a reference to its owner the author of a pod writes any.
func isName(text string) bool { return len(validation.IsDNS1123Subdomain(text)) == 0 }

const (
	// ConfigMapName is the name of the operator's ConfigMap, which NVIDIA's device plugin reads. The GPU Operator makes it
	// the name of a volume, so it has to be a DNS label and differ from the volumes of NVIDIA's DaemonSets.
	ConfigMapName = "gpu-sharing-device-plugin"
	// LabelName tells programs from one another.
	LabelName = "app.kubernetes.io/name"
	// AgentName is its value of the agents' pods.
	AgentName = "gpu-sharing-agent"
	daemonSet = "DaemonSet"
	// NvidiaDomain is the domain of NVIDIA's resources, labels and annotations.
	NvidiaDomain = "nvidia.com/"
)

// NodeOf is what of a node and its GPUNode matters to a decision, without its pods. It shares maps with both.
func NodeOf(node *corev1.Node, gpuNode *v1alpha1.GPUNode) Node {
	return NodeAlone(node).WithCopy(gpuNode)
}

// NodeAlone is what of a node matters to a decision, without its GPUNode and its pods. The copy of its baseline is an
// annotation as any other. It shares maps with the node.
func NodeAlone(node *corev1.Node) Node {
	n := Node{
		Name: node.Name, Labels: node.Labels, Annotations: node.Annotations, Taints: node.Spec.Taints,
		Created: node.CreationTimestamp.Time, Allocatable: map[string]int64{}, MarkedAtWorkSince: markedAtWorkSince(node), ConfigWriter: configWriter(node),
		MemoryOwner: memoryOwner(node),
	}
	for name, quantity := range node.Status.Capacity {
		healthy := node.Status.Allocatable[name]
		if sick := quantity.Value() - healthy.Value(); sick > 0 && IsGPUResource(string(name)) {
			if n.Unallocatable == nil {
				n.Unallocatable = map[string]int64{}
			}
			n.Unallocatable[string(name)] = sick
		}
	}
	for name, quantity := range node.Status.Allocatable {
		if strings.HasPrefix(string(name), NvidiaDomain) {
			n.Allocatable[string(name)] = quantity.Value()
		}
		if IsOtherPartitionerResource(string(name)) {
			kind, capacity := &n.OtherPartitionerLeft, node.Status.Capacity[name]
			if quantity.Sign() > 0 || capacity.Sign() > 0 { // unhealthy devices count: its plugin is there
				kind = &n.OtherPartitioner
			}
			if *kind == "" || string(name) < *kind {
				*kind = string(name)
			}
		}
	}
	return n
}

// Expected is how many of each resource the node is to advertise, by the status of its GPUNode.
func (n *Node) Expected() map[string]int64 {
	expected := map[string]int64{}
	for _, c := range n.GPU.Status.Rollout.Resources {
		expected[c.Name] = c.Expected
	}
	return expected
}

// Unhealthy returns, by resource, how many devices NVIDIA's device plugin reports as unhealthy on a node that is
// expected to advertise some resources. If nothing of a resource is allocatable, its plugin may have stopped as well.
// If the resource is not expected either, it has: the kubelet keeps the capacity of a plugin that is gone for 5
// minutes, see endpointStopGracePeriod in
// https://github.com/kubernetes/kubernetes/blob/v1.37.1/pkg/kubelet/cm/devicemanager/types.go
func (n *Node) Unhealthy(expected map[string]int64) map[string]int64 {
	sick := map[string]int64{}
	for name, count := range n.Unallocatable {
		if n.Allocatable[name] > 0 || expected[name] > 0 {
			sick[name] = count
		}
	}
	return sick
}

// PodOf is what of a pod matters to a decision.
func PodOf(pod *corev1.Pod, programs *Programs) Pod {
	p := Pod{
		Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID),
		Terminating:   pod.DeletionTimestamp != nil,
		GPU:           RequestsGPU(&pod.Spec),
		Scheduled:     Scheduled(pod).LastTransitionTime.Time,
		NodeSelector:  pod.Spec.NodeSelector,
		SyncTriggered: pod.Annotations[v1alpha1.AnnotationSync],
	}
	programs.tell(&p, pod)
	if pod.DeletionTimestamp != nil {
		p.EndsBy = pod.DeletionTimestamp.Time
	}
	if p.MountsConfig || p.DRA || p.NVIDIA && SelectsDeploy(p.NodeSelector) {
		p.Troubles = troublesOf(pod)
	}
	if p.Serves {
		p.ReadySince = ReadyAt(pod)
	}
	p.Serves = p.Serves || p.MountsConfig
	addDRA(&p, pod)
	if p.GPU {
		p.Running = pod.Status.Phase == corev1.PodRunning
		p.Requests, p.Workload, p.RunsAs = GPURequests(&pod.Spec), workloadOf(pod), runsAs(&pod.Spec)
		p.InitHolds, p.SharingLabels = HoldsByInit(pod), sharingLabels(&pod.Spec)
	}
	p.Tolerates = Drains(pod) && ToleratesChange(pod.Spec.Tolerations)
	if p.Serves {
		p.Tolerations = OwnTolerations(pod.Spec.Tolerations)
	}
	_, p.Mirror = pod.Annotations[corev1.MirrorPodAnnotationKey]
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		p.Controller = owner.Kind
	}
	return p
}

// sharingLabels are the labels of sharing by which a pod selects its node, sorted.
func sharingLabels(spec *corev1.PodSpec) []string {
	keys := slices.Collect(maps.Keys(spec.NodeSelector))
	if a := spec.Affinity; a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			for _, r := range term.MatchExpressions {
				keys = append(keys, r.Key)
			}
		}
	}
	keys = slices.DeleteFunc(keys, func(key string) bool { return !ofSharing(key) })
	slices.Sort(keys)
	return slices.Compact(keys)
}

// ofSharing reports whether NVIDIA's GPU Feature Discovery writes a label by how the GPUs are shared.
func ofSharing(label string) bool {
	return strings.HasPrefix(label, "nvidia.com/mig-") || slices.Contains([]string{
		"nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gpu.memory", "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy",
		"nvidia.com/gpu.multiprocessors", "nvidia.com/mig.strategy",
	}, label)
}

// runsAs is the user ID as which all containers of a pod run; nil: they differ, or it is that of an image.
func runsAs(spec *corev1.PodSpec) *int64 {
	var all *int64
	for i := range spec.Containers {
		var user *int64
		if spec.SecurityContext != nil {
			user = spec.SecurityContext.RunAsUser
		}
		if own := spec.Containers[i].SecurityContext; own != nil && own.RunAsUser != nil {
			user = own.RunAsUser
		}
		if user == nil || all != nil && *user != *all {
			return nil
		}
		all = user
	}
	return all
}

// addDRA adds what matters of a pod of NVIDIA's DRA driver, or of one that has devices by ResourceClaims.
func addDRA(p *Pod, pod *corev1.Pod) {
	if p.DRA {
		p.DynamicMIG, p.SetsTimeSlices = MakesInstances(&pod.Spec), SetsTimeSlices(&pod.Spec)
	}
	if !HasClaims(pod) {
		return
	}
	p.Starting = pod.Spec.NodeName != "" && !IsReady(pod)
	if group := pod.Spec.SchedulingGroup; group != nil && group.PodGroupName != nil {
		p.PodGroup = *group.PodGroupName
	}
}

// HasClaims reports whether a pod has devices by ResourceClaims, its own or those that serve its extended resources.
func HasClaims(pod *corev1.Pod) bool {
	return len(pod.Spec.ResourceClaims) > 0 || pod.Status.ExtendedResourceClaimStatus != nil
}

// IsReady reports whether a pod is ready.
func IsReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// Finished reports whether a pod has ended and holds nothing any more.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// LabelApp tells the GPU Operator's programs from one another.
const LabelApp = "app"

// IsValidator reports whether a pod has the label of a test workload of the GPU Operator's validator, which creates
// it again with the next validation (NVIDIA/gpu-operator cmd/nvidia-validator/main.go). Programs tell whether it is
// one.
func IsValidator(pod *corev1.Pod) bool {
	return slices.Contains([]string{"nvidia-cuda-validator", "nvidia-device-plugin-validator"}, pod.Labels[LabelApp])
}

// ReadyAt is when a pod became Ready; zero if it is not.
func ReadyAt(pod *corev1.Pod) time.Time {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// IsAgent reports whether a pod is one of the agents'.
func IsAgent(pod *corev1.Pod) bool { return pod.Labels[LabelName] == AgentName }

// isOwn reports whether a pod has the label app.kubernetes.io/name of one of the operator's. Programs tell whether it is
// one.
func isOwn(pod *corev1.Pod) bool {
	return slices.Contains([]string{AgentName, "gpu-sharing-controller", "gpu-sharing-mps", "gpu-sharing-operands"}, pod.Labels[LabelName])
}

// Drains reports whether a change may have to wait for a pod: it asks for GPUs, or it belongs to no DaemonSet, so that
// it may have to leave the node before a reboot.
func Drains(pod *corev1.Pod) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner == nil || owner.Kind != daemonSet || RequestsGPU(&pod.Spec)
}

// OwnTolerations are the tolerations that a pod was given by its author. The others are about the state of a node, and
// the daemon-set controller gives them to every pod.
func OwnTolerations(all []corev1.Toleration) []corev1.Toleration {
	var own []corev1.Toleration
	for _, t := range all {
		if !strings.HasPrefix(t.Key, "node.kubernetes.io/") {
			own = append(own, t)
		}
	}
	return own
}

// ToleratesChange reports whether a pod with these tolerations may come to a node that the operator drains.
func ToleratesChange(all []corev1.Toleration) bool {
	return Tolerates(all, v1alpha1.TaintChanging)
}

// Tolerates reports whether a pod with these tolerations may come to a node with the taint of a key that keeps new pods off.
func Tolerates(all []corev1.Toleration, key string) bool {
	return clusterpolicy.Tolerates(all, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
}

// RequestsGPU reports whether a container of a pod, or the pod as a whole, requests GPUs or MIG instances; none of them is
// no request. NVIDIA's Network Operator offers network cards under the same domain (nvidia.com/hostdev), which are none.
func RequestsGPU(spec *corev1.PodSpec) bool {
	if spec.Resources != nil && hasGPU(spec.Resources) {
		return true
	}
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			if hasGPU(&containers[i].Resources) {
				return true
			}
		}
	}
	return false
}

// HoldsByInit reports whether an init container of a pod that is not initialized yet requests GPUs. Sidecars do not
// count: the kubelet reports what they hold (KEP 753).
func HoldsByInit(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodInitialized && c.Status == corev1.ConditionTrue {
			return false
		}
	}
	return slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool {
		return c.RestartPolicy == nil && hasGPU(&c.Resources)
	})
}

func hasGPU(r *corev1.ResourceRequirements) bool {
	for _, list := range []corev1.ResourceList{r.Limits, r.Requests} {
		for name, quantity := range list {
			if quantity.Sign() > 0 && IsGPUResource(dra.ResourceRequestedBy(string(name))) {
				return true
			}
		}
	}
	return false
}

// Mounts reports whether a volume of a pod is the ConfigMap of that name.
func Mounts(pod *corev1.Pod, configMap string) bool {
	for i := range pod.Spec.Volumes {
		volume := &pod.Spec.Volumes[i]
		if volume.ConfigMap != nil && volume.ConfigMap.Name == configMap {
			return true
		}
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if source.ConfigMap != nil && source.ConfigMap.Name == configMap {
				return true
			}
		}
	}
	return false
}

// Scheduled is the condition PodScheduled of a pod: what the scheduler says. It is empty until then.
func Scheduled(pod *corev1.Pod) corev1.PodCondition {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			return condition
		}
	}
	return corev1.PodCondition{}
}

// IsGPUResource reports whether a resource is one that NVIDIA's device plugin makes of GPUs. HAMi's are none.
func IsGPUResource(name string) bool {
	hami := strings.HasPrefix(name, resourceHAMi) || name == "nvidia.com/gpucores"
	return strings.HasPrefix(name, "nvidia.com/gpu") && !hami || strings.HasPrefix(name, "nvidia.com/mig-")
}

const (
	// DeployPrefix begins NVIDIA's node labels that start and stop its programs.
	DeployPrefix = NvidiaDomain + "gpu.deploy."
	// keepsEnding is how often a container has ended before that is more than a start that had to wait for something.
	keepsEnding = 3
	// troubleLasts is how long the last end of a container counts: the kubelet waits five minutes at most before it
	// starts one again.
	troubleLasts = 6 * time.Minute
)

// IdleSince is since when no pod or process has had the node's MIG instances, by UUID; absent or zero: one has, or no agent said so.
func (n *Node) IdleSince() map[string]time.Time {
	idle := map[string]time.Time{}
	for d := range n.GPU.Status.Devices {
		for _, of := range n.GPU.Status.Devices[d].Instances {
			idle[of.UUID] = of.LastHeldTime.Time
		}
	}
	return idle
}

// HasChangingTaint reports whether the Node has v1alpha1.TaintChanging.
func (n *Node) HasChangingTaint() bool {
	return slices.ContainsFunc(n.Taints, func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging })
}

// TakesNoNewPods reports whether a taint of a change keeps new pods off the Node, or its devices.
func (n *Node) TakesNoNewPods() bool { return n.HasChangingTaint() || !n.DevicesTaintedAt.IsZero() }

// IsLost reports whether Kubernetes keeps pods off the Node since its kubelet says nothing, or that it is not ready.
func (n *Node) IsLost() bool {
	return slices.ContainsFunc(n.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeUnreachable || t.Key == corev1.TaintNodeNotReady
	})
}
