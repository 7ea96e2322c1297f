// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Programs knows which pods are programs of NVIDIA's, of Node Feature Discovery (NFD), or the operator's own. It is the
// one place that says so. A user who may create
// pods in one namespace chooses their labels, node selectors, containers and owner references, also a reference to
// an object of NVIDIA's. Only the namespace is not theirs to choose. So a program counts in a namespace that
// something tells which such a user cannot write, and only with a controller. The zero value knows none.
type Programs struct {
	// ConfigMap is the operator's, which the device plugin reads; its name is empty if there is none. A stand-alone
	// device plugin runs in its namespace.
	ConfigMap types.NamespacedName
	// GPUOperators are the namespaces of NVIDIA's GPU Operator, as the status of a ClusterPolicy or GPUCluster names
	// them; sorted.
	GPUOperators []string
	// DRADrivers are the namespaces in which NVIDIA's DRA driver runs from its own chart: it has a DaemonSet there, whose
	// account may publish ResourceSlices; sorted.
	DRADrivers []string
	// PublishedOn are the nodes for which that driver publishes ResourceSlices, for who may not ask which accounts may:
	// a pod there that looks like the driver's, and mounts folders of the host, is taken for it.
	PublishedOn map[string]bool
	// Discovery are the namespaces in which NodeFeatures are written as by workers of NFD; sorted. Where the Operator
	// Lifecycle Manager installed NFD, its roles let every user of a namespace do that, so the pod must also mount
	// folders of the host, which Pod Security baseline and OpenShift's restricted forbid.
	Discovery []string
	// Own are the namespaces of the operator; none: they are not known, and the labels of its pods count.
	Own []string
	// Unverified reports that these namespaces are not known, and all pods count that look like such programs: to the
	// cache, which keeps what any of them may need, and to programs that only print.
	Unverified bool
}

// tell records which program a pod is.
func (o *Programs) tell(p *Pod, pod *corev1.Pod) {
	p.NVIDIA = o.verified(pod, slices.Contains(o.GPUOperators, pod.Namespace) || pod.Namespace == o.ConfigMap.Namespace)
	p.Validator = p.NVIDIA && IsValidator(pod)
	p.MountsConfig = pod.Namespace == o.ConfigMap.Namespace && Mounts(pod, o.ConfigMap.Name)
	p.DRA = OffersGPUs(pod) && (p.NVIDIA || o.verified(pod, slices.Contains(o.DRADrivers, pod.Namespace) || o.PublishedOn[pod.Spec.NodeName] && MountsHost(pod.Spec.Volumes)))
	p.Discovers = isDiscovery(pod) && (p.NVIDIA || MountsHost(pod.Spec.Volumes) && o.verified(pod, slices.Contains(o.Discovery, pod.Namespace)))
	p.Own = isOwn(pod) && o.inOwn(pod)
	p.Serves = p.DRA || p.Discovers || p.NVIDIA && SelectsDeploy(pod.Spec.NodeSelector)
}

// inOwn reports whether a pod is in a namespace of the operator.
func (o *Programs) inOwn(pod *corev1.Pod) bool {
	return len(o.Own) == 0 || slices.Contains(o.Own, pod.Namespace)
}

// IsReadyAgent reports whether a pod is one of the agents and answers.
func (o *Programs) IsReadyAgent(pod *corev1.Pod) bool {
	return IsAgent(pod) && o.inOwn(pod) && pod.DeletionTimestamp == nil && IsReady(pod)
}

// verified reports whether a pod in a namespace that counts, or not, has a controller that runs such programs: a
// DaemonSet, or an object of NVIDIA's, which owns the test workloads of the GPU Operator's validator.
func (o *Programs) verified(pod *corev1.Pod, counts bool) bool {
	if o.Unverified {
		return true
	}
	owner := metav1.GetControllerOfNoCopy(pod)
	return counts && owner != nil && (owner.Kind == daemonSet || strings.HasPrefix(owner.APIVersion, NvidiaDomain))
}

// KeptBy reports whether it is a program of NVIDIA's that a label of the node keeps there.
func (p *Pod) KeptBy(label string) bool { return p.NVIDIA && p.NodeSelector[label] != "" }

// MayServe reports whether a pod looks like one of NVIDIA's programs, which a deploy label keeps on the node, of
// its DRA driver, or of NFD, whose labels make NVIDIA's operator set those. Programs tell whether it is one.
func MayServe(pod *corev1.Pod) bool {
	return isDiscovery(pod) || SelectsDeploy(pod.Spec.NodeSelector) || OffersGPUs(pod)
}

// MountsHost reports whether one of the volumes is a folder of the host.
func MountsHost(volumes []corev1.Volume) bool {
	return slices.ContainsFunc(volumes, func(v corev1.Volume) bool { return v.HostPath != nil })
}

func isDiscovery(pod *corev1.Pod) bool { return pod.Labels[LabelName] == FeatureDiscovery }

// FeatureDiscovery is the label app.kubernetes.io/name of NFD's pods.
const FeatureDiscovery = "node-feature-discovery"
