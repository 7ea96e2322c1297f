// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"unique"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// CacheOptions keep the cache small: of each object what decisions depend on, of ConfigMaps ours only. Nothing is
// cached that is not watched, so that a read never starts a watch. NVIDIA's ClusterPolicy is kept whole: who owns its
// fields is read from it, and there is one.
func CacheOptions(standAlone pluginconfig.StandAlone) cache.Options {
	return cache.Options{
		ReaderFailOnMissingInformer: true,
		ByObject: map[client.Object]cache.ByObject{
			&v1alpha1.GPUSharingPolicy{}: {Transform: keepOwnManagedFields},
			&v1alpha1.GPUNode{}:          {Transform: slimGPUNode},
			&corev1.Node{}:               {Transform: slimNode},
			&corev1.Pod{}:                {Transform: slimPod},
			&appsv1.DaemonSet{}:          {Transform: slimDaemonSet},
			&corev1.ConfigMap{}:          configMaps(standAlone),
			pluginconfig.Definitions():   {Transform: nameOnly},
		},
		// Of kinds that the cluster may not have, which cannot be named above.
		DefaultTransform: slimOthers,
	}
}

// configMaps are those of our name, in whatever namespace, and all in the namespace of a stand-alone plugin whose
// ConfigMap has another name.
func configMaps(standAlone pluginconfig.StandAlone) cache.ByObject {
	ours := fields.OneTermEqualSelector(metav1.ObjectNameField, pluginconfig.ConfigMapName)
	if standAlone.ConfigMap == "" || standAlone.ConfigMap == pluginconfig.ConfigMapName {
		return cache.ByObject{Field: ours, Transform: keepOwnManagedFields}
	}
	return cache.ByObject{Transform: keepOwnManagedFields, Namespaces: map[string]cache.Config{
		cache.AllNamespaces:  {FieldSelector: ours},
		standAlone.Namespace: {FieldSelector: fields.Everything()},
	}}
}

// keepOwnManagedFields keeps what server-side apply needs to know what we applied before.
func keepOwnManagedFields(object any) (any, error) {
	o, isObject := object.(client.Object)
	if !isObject {
		return object, nil
	}
	var own []metav1.ManagedFieldsEntry
	for _, entry := range o.GetManagedFields() {
		if strings.HasPrefix(entry.Manager, fieldManager) {
			own = append(own, entry)
		}
	}
	o.SetManagedFields(own)
	return o, nil
}

// slimGPUNode keeps once what a GPUNode says several times, or as others do: a node in its desired state lists its GPUs
// four times.
func slimGPUNode(object any) (any, error) {
	node, isGPUNode := object.(*v1alpha1.GPUNode)
	if !isGPUNode {
		return object, nil
	}
	for i := range node.ManagedFields {
		node.ManagedFields[i].Manager = once(node.ManagedFields[i].Manager)
	}
	listed := node.Spec.Devices
	for i := range listed {
		listed[i].Sharing.MIGMode = once(listed[i].Sharing.MIGMode)
	}
	if b := node.Spec.Baseline; b != nil && equality.Semantic.DeepEqual(b.Devices, listed) {
		b.Devices = listed
	}
	if good := node.Status.Rollout.LastGood; good != nil && equality.Semantic.DeepEqual(good.Devices, listed) {
		good.Devices = listed
	}
	for i := range node.Status.Devices {
		d := &node.Status.Devices[i]
		d.Product, d.ComputeCapability, d.ComputeMode, d.Sharing.MIGMode = once(d.Product), once(d.ComputeCapability), once(d.ComputeMode), once(d.Sharing.MIGMode)
		if at := slices.IndexFunc(listed, func(same v1alpha1.DeviceSpec) bool { return same.UUID == d.UUID }); at >= 0 {
			d.UUID = listed[at].UUID
		}
	}
	for i := range node.Status.Conditions {
		c := &node.Status.Conditions[i]
		c.Type, c.Status, c.Reason, c.Message = once(c.Type), once(c.Status), once(c.Reason), once(c.Message)
	}
	return keepOwnManagedFields(node)
}

// once returns the text that all equal ones share, which lives as long as one of them.
func once[S ~string](text S) S { return unique.Make(text).Value() }

// repeated holds maps that many objects have alike, as labels and requests of pods are. It begins anew when it holds
// mostRepeated, since users choose what pods are.
type repeated[V any, M ~map[K]V, K ~string] struct {
	mu    sync.Mutex
	known map[string]M
}

const mostRepeated = 1024

var (
	repeatedLabels    repeated[string, map[string]string, string]
	repeatedResources repeated[resource.Quantity, corev1.ResourceList, corev1.ResourceName]
)

// of returns a map with the same content, which must not be changed.
func (r *repeated[V, M, K]) of(m M, text func(V) string) M {
	if len(m) == 0 {
		return m
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%q=%q ", name, text(m[name]))
	}
	content := b.String()
	r.mu.Lock()
	defer r.mu.Unlock()
	if same, found := r.known[content]; found {
		return same
	}
	if r.known == nil || len(r.known) >= mostRepeated {
		r.known = map[string]M{}
	}
	r.known[content] = m
	return m
}

func shareLabels(m map[string]string) map[string]string {
	return repeatedLabels.of(m, func(value string) string { return value })
}

func shareResources(m corev1.ResourceList) corev1.ResourceList {
	return repeatedResources.of(m, func(q resource.Quantity) string { return q.String() })
}

// allOnce shares the texts of labels, most of which all nodes have.
func allOnce(labels map[string]string) map[string]string {
	if len(labels) == 0 {
		return nil
	}
	shared := make(map[string]string, len(labels))
	for name, value := range labels {
		shared[once(name)] = once(value)
	}
	return shared
}

func nameOnly(object any) (any, error) {
	o, isMetadata := object.(*metav1.PartialObjectMetadata)
	if !isMetadata {
		return object, nil
	}
	o.ObjectMeta = metav1.ObjectMeta{
		Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion, DeletionTimestamp: o.DeletionTimestamp,
	}
	return o, nil
}

func slimNode(object any) (any, error) {
	node, isNode := object.(*corev1.Node)
	if !isNode {
		return object, nil
	}
	node.ManagedFields = append(cluster.WorkMarkAuthors(node), cluster.ConfigWriters(node)...)
	node.Labels, node.Annotations = allOnce(node.Labels), ownAnnotations(node.Annotations)
	node.Spec = corev1.NodeSpec{Taints: node.Spec.Taints}
	var signs []corev1.NodeCondition
	for _, c := range node.Status.Conditions {
		if cluster.OfMemoryOwner(string(c.Type)) {
			signs = append(signs, corev1.NodeCondition{Type: c.Type, Status: c.Status})
		}
	}
	node.Status = corev1.NodeStatus{
		Allocatable: ofNVIDIA(node.Status.Allocatable), Capacity: ofNVIDIA(node.Status.Capacity),
		Conditions: signs,
		NodeInfo:   corev1.NodeSystemInfo{SystemUUID: node.Status.NodeInfo.SystemUUID},
	}
	return node, nil
}

func ofNVIDIA(all corev1.ResourceList) corev1.ResourceList {
	own := corev1.ResourceList{}
	for name, quantity := range all {
		if strings.HasPrefix(string(name), cluster.NvidiaDomain) || cluster.IsOtherPartitionerResource(string(name)) {
			own[name] = quantity
		}
	}
	return shareResources(own)
}

// slimPod keeps what cluster.PodOf, podView, drain.Evict and, of pods that wait, controller/demand read.
func slimPod(object any) (any, error) {
	pod, isPod := object.(*corev1.Pod)
	if !isPod {
		return object, nil
	}
	claims, group := cluster.HasClaims(pod), pod.Spec.SchedulingGroup
	affinity, priority := requiredAffinity(pod), pod.Spec.Priority
	pod.Namespace, pod.ManagedFields = once(pod.Namespace), nil
	pod.Annotations = podAnnotations(pod.Annotations)
	pod.Labels = shareLabels(podLabels(pod))
	pod.OwnerReferences = controllerOf(pod)
	pod.Spec = corev1.PodSpec{
		Containers:     draContainers(pod),
		InitContainers: initHolder(pod),
		NodeName:       once(pod.Spec.NodeName),
		NodeSelector:   shareLabels(pod.Spec.NodeSelector),
		Volumes:        keptVolumes(pod),
		Tolerations:    serverTolerations(pod),
		Resources:      gpuRequest(&pod.Spec),
	}
	if cluster.Waits(pod) {
		pod.Spec.Affinity, pod.Spec.Priority = affinity, priority
	}
	if claims {
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{}} // stands for all of them
		pod.Spec.SchedulingGroup = group
	}
	pod.Status = corev1.PodStatus{
		Phase: pod.Status.Phase, Conditions: slimConditions(pod.Status.Conditions), ContainerStatuses: troubled(pod),
		NominatedNodeName: pod.Status.NominatedNodeName,
	}
	for i := range pod.OwnerReferences {
		o := &pod.OwnerReferences[i]
		o.APIVersion, o.Kind, o.Name, o.UID = once(o.APIVersion), once(o.Kind), once(o.Name), once(o.UID)
	}
	return pod, nil
}

// requiredAffinity is what a pod says of the nodes that would take it, beside the node selector.
func requiredAffinity(pod *corev1.Pod) *corev1.Affinity {
	a := pod.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution,
	}}
}

func podAnnotations(all map[string]string) map[string]string {
	var kept map[string]string // most pods have none, and there are many pods
	for _, name := range []string{corev1.MirrorPodAnnotationKey, v1alpha1.AnnotationSync} {
		if value, found := all[name]; found {
			if kept == nil {
				kept = map[string]string{}
			}
			kept[name] = value
		}
	}
	return kept
}

func controllerOf(pod *corev1.Pod) []metav1.OwnerReference {
	if owner := metav1.GetControllerOf(pod); owner != nil {
		return []metav1.OwnerReference{*owner}
	}
	return nil
}

// serverTolerations are those of the pods without which the GPUs of a node are not offered: whether they could come
// back to a node with a taint. Of pods that may be drained it stands for all tolerations whether they tolerate the
// operator's taint. Of those that wait for GPUs all are kept.
func serverTolerations(pod *corev1.Pod) []corev1.Toleration {
	switch {
	case cluster.Waits(pod):
		return pod.Spec.Tolerations
	case cluster.MayServe(pod) || len(configVolumes(pod.Spec.Volumes)) > 0:
		return cluster.OwnTolerations(pod.Spec.Tolerations)
	case cluster.Drains(pod) && cluster.ToleratesChange(pod.Spec.Tolerations):
		return []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}
	return nil
}

// keptVolumes are those that show ConfigMaps and, of a pod that looks like one of NVIDIA's or of Node Feature Discovery,
// one folder of the host for all of them.
func keptVolumes(pod *corev1.Pod) []corev1.Volume {
	kept := configVolumes(pod.Spec.Volumes)
	if cluster.MayServe(pod) && cluster.MountsHost(pod.Spec.Volumes) {
		kept = append(kept, corev1.Volume{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}})
	}
	return kept
}

// configVolumes keeps of the volumes which ConfigMaps they show, in the plainest form. Every pod projects the
// certificate of the API server.
func configVolumes(all []corev1.Volume) []corev1.Volume {
	var kept []corev1.Volume
	keep := func(of corev1.LocalObjectReference) {
		if of.Name != everywhere {
			kept = append(kept, corev1.Volume{VolumeSource: corev1.VolumeSource{
				ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: of},
			}})
		}
	}
	for i := range all {
		if all[i].ConfigMap != nil {
			keep(all[i].ConfigMap.LocalObjectReference)
		}
		if all[i].Projected == nil {
			continue
		}
		for _, source := range all[i].Projected.Sources {
			if source.ConfigMap != nil {
				keep(source.ConfigMap.LocalObjectReference)
			}
		}
	}
	return kept
}

// everywhere is the ConfigMap that every pod projects.
const everywhere = "kube-root-ca.crt"

// draContainers are what tells the kubelet plugin of NVIDIA's DRA driver from others, and whether it makes instances on
// demand: the names of its containers, and that feature gate. Of any other pod nothing is kept.
func draContainers(pod *corev1.Pod) []corev1.Container {
	var containers []corev1.Container
	if cluster.OffersGPUs(pod) {
		for i := range pod.Spec.Containers {
			containers = append(containers, corev1.Container{Name: pod.Spec.Containers[i].Name})
		}
		containers[0].Env = cluster.Gates(&pod.Spec)
	}
	return containers
}

// initHolder stands for the init containers that hold GPUs, as long as the pod is not initialized.
func initHolder(pod *corev1.Pod) []corev1.Container {
	if !cluster.HoldsByInit(pod) {
		return nil
	}
	for _, c := range pod.Spec.InitContainers {
		alone := corev1.PodSpec{Containers: []corev1.Container{{Resources: c.Resources}}}
		for name := range cluster.GPURequests(&alone) { // no more than gpuRequest has of it
			one := corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(1, resource.DecimalSI)}
			return []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: one}}}
		}
	}
	return nil
}

// troubled are the containers of one of NVIDIA's programs that do not run as they should. It is one if a deploy label
// starts it, or it may read our ConfigMap; of others nothing is kept.
func troubled(pod *corev1.Pod) []corev1.ContainerStatus {
	if !cluster.MayServe(pod) && len(configVolumes(pod.Spec.Volumes)) == 0 {
		return nil
	}
	return cluster.TroubledContainers(pod)
}

// gpuRequest stands for all requests of a pod: those of GPUs and instances, and whether it asks for anything of
// NVIDIA's.
func gpuRequest(spec *corev1.PodSpec) *corev1.ResourceRequirements {
	if !cluster.RequestsGPU(spec) {
		return nil
	}
	limits := corev1.ResourceList{}
	for name, n := range cluster.GPURequests(spec) {
		limits[corev1.ResourceName(name)] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	return &corev1.ResourceRequirements{Limits: shareResources(limits)}
}

// podLabels keeps what agents, Node Feature Discovery and DRA drivers are known by and, of a pod that asks for GPUs,
// what tells its Deployment.
func podLabels(pod *corev1.Pod) map[string]string {
	var kept map[string]string
	for _, name := range append(cluster.DRALabels(), cluster.LabelName, appsv1.DefaultDeploymentUniqueLabelKey) {
		value, found := pod.Labels[name]
		if name == cluster.LabelApp && !cluster.IsValidator(pod) && !cluster.IsDRAPlugin(pod.Labels) {
			continue
		}
		if !found || name == appsv1.DefaultDeploymentUniqueLabelKey && !cluster.RequestsGPU(&pod.Spec) {
			continue
		}
		if kept == nil {
			kept = map[string]string{}
		}
		kept[name] = value
	}
	return kept
}

func slimConditions(all []corev1.PodCondition) []corev1.PodCondition {
	var kept []corev1.PodCondition
	for _, c := range all {
		if c.Type == corev1.PodReady || c.Type == corev1.PodScheduled {
			one := corev1.PodCondition{Type: c.Type, Status: c.Status, LastTransitionTime: c.LastTransitionTime}
			if c.Reason == corev1.PodReasonUnschedulable {
				one.Reason = corev1.PodReasonUnschedulable // a text that all share
			}
			kept = append(kept, one)
		}
	}
	return kept
}
