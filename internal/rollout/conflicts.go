// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// patience is how long somebody is left alone who sets back again what we had set back: the same as with the fields of
// the ClusterPolicy.
const patience = time.Hour

// OfSlicer says whether an extended resource is one of Red Hat's Dynamic Accelerator Slicer, which offers instances as
// mig.das.com/<profile>, or of its predecessor InstaSlice (openshift/instaslice-operator).
func OfSlicer(resource string) bool {
	return strings.HasPrefix(resource, "mig.das.com/") || strings.HasPrefix(resource, "instaslice.redhat.com/")
}

// draContainer is the container of the kubelet plugin of NVIDIA's DRA driver that offers GPUs. Where it is left out, the
// driver serves compute domains only, which are no business of ours.
const draContainer = "gpus"

// DRALabels are the labels by which the chart of NVIDIA's DRA driver tells its programs apart, since and before the driver
// was renamed.
func DRALabels() []string {
	return []string{"dra-driver-nvidia-gpu-component", "nvidia-dra-driver-gpu-component"}
}

// OffersGPUs says whether a pod offers GPUs through ResourceClaims: the kubelet plugin of NVIDIA's DRA driver.
func OffersGPUs(pod *corev1.Pod) bool { return offersGPUs(pod.Labels, &pod.Spec) }

// MakesGPUOffers reports whether the pods of a DaemonSet offer GPUs through ResourceClaims.
func MakesGPUOffers(set *appsv1.DaemonSet) bool {
	return offersGPUs(set.Spec.Template.Labels, &set.Spec.Template.Spec)
}

func offersGPUs(labels map[string]string, spec *corev1.PodSpec) bool {
	isPlugin := func(label string) bool { return labels[label] == "kubelet-plugin" }
	return slices.ContainsFunc(DRALabels(), isPlugin) && slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == draContainer })
}

// DRADriver is the driver of NVIDIA's that offers GPUs in ResourceSlices.
const DRADriver = "gpu.nvidia.com"

// leftToOthers says whether the agent leaves the instances to somebody else, who changes them again and again.
func (v *view) leftToOthers() bool {
	reason, _, stalled := v.stalled()
	return stalled && reason == v1alpha1.ReasonChangedByOthers && wishes(v.node.GPU.Spec, v.to)
}

// isUnfenced says whether somebody lets NVIDIA's mig-manager back onto a node that was verified without it.
func (v *view) isUnfenced() bool {
	return !v.to.final && v.fences() && v.reached() && v.node.Labels[v1alpha1.LabelMIGManager] == "true"
}

// overruledLeft is how long another controller is still left alone that sets a label again.
func (v *view) overruledLeft(label string) time.Duration {
	for part := range strings.SplitSeq(v.node.Annotations[v1alpha1.AnnotationOverruled], ",") {
		if at, did := stamped(part, label); did {
			return at.Add(patience).Sub(v.world.Now)
		}
	}
	return 0
}

// overrule notes in a patch that the operator sets a label again which another controller had set.
func (v *view) overrule(patch PatchNode, label string) {
	noted := v.node.Annotations[v1alpha1.AnnotationOverruled]
	if in, has := patch.Annotations[v1alpha1.AnnotationOverruled]; has && in != nil {
		noted = *in
	}
	parts := []string{stamp(label, v.world.Now)}
	for part := range strings.SplitSeq(noted, ",") {
		if part != "" && !strings.HasPrefix(part, label+"@") {
			parts = append(parts, part)
		}
	}
	slices.Sort(parts)
	patch.Annotations[v1alpha1.AnnotationOverruled] = new(strings.Join(parts, ","))
}

// configReset reports whether another controller set the label that selects a configuration after the operator had.
func (v *view) configReset() bool {
	_, selected := stamped(v.node.Annotations[v1alpha1.AnnotationSelected], v.to.key)
	return selected && v.to.key != "" && !v.to.final && v.node.Labels[v1alpha1.LabelConfig] != v.to.key
}

// contested leaves a label alone for an hour that another controller sets again and again. A change that is not verified yet
// fails by it, so that the node returns to what it was; one that is makes the node degraded.
func (v *view) contested() (judgement, bool) {
	left := v.overruledLeft(v1alpha1.LabelConfig)
	if !v.configReset() || left <= 0 {
		return judgement{}, false
	}
	who := "Another controller or user"
	if v.node.ConfigWriter != "" {
		who = fmt.Sprintf("Field manager %q", v.node.ConfigWriter)
	}
	where := "Remove the label where it comes from; on OpenShift, remove the label from the MachineSet"
	if machine := v.node.Annotations[AnnotationMachine]; machine != "" {
		where = fmt.Sprintf("OpenShift copies the labels of a MachineSet to its nodes: remove the label from the MachineSet of Machine %s", machine)
	}
	message := fmt.Sprintf("%s sets %s=%s on the node again, and the operator selects %s. %s", who, v1alpha1.LabelConfig,
		v.node.Labels[v1alpha1.LabelConfig], v.to.key, where)
	j := judgement{State: StateSelecting, reason: v1alpha1.ReasonConfigLabelReset, after: left}
	if !v.reached() {
		j = v.fail(j, v1alpha1.ReasonConfigLabelReset, message)
		j.after = left
		return j, true
	}
	j.State = StateDegraded
	j.message = fmt.Sprintf("%s. The operator sets the label again at %s", message, clock(v.world.Now.Add(left)))
	return j, true
}

// AnnotationMachine names, on a node of OpenShift, the Machine that it belongs to.
const AnnotationMachine = "machine.openshift.io/machine"

// fencesAgain says whether the label that keeps NVIDIA's mig-manager off the node is to be set, and notes in the patch that
// somebody is overruled.
func (v *view) fencesAgain(patch PatchNode) bool {
	manager := v.node.Labels[v1alpha1.LabelMIGManager]
	if v.to.final || !v.fences() || manager == "" || manager == "false" {
		return false
	}
	if !v.isUnfenced() {
		return true
	}
	if v.overruledLeft(v1alpha1.LabelMIGManager) > 0 {
		return false
	}
	v.overrule(patch, v1alpha1.LabelMIGManager)
	return true
}

// unfenced finds that somebody let NVIDIA's mig-manager back onto the node, again.
func (v *view) unfenced(State) finding {
	left := v.overruledLeft(v1alpha1.LabelMIGManager)
	if !v.isUnfenced() || left <= 0 {
		return finding{}
	}
	return finding{
		reason: v1alpha1.ReasonMIGManagerUnfenced, after: left,
		message: fmt.Sprintf("somebody sets %s=true again, so NVIDIA's mig-manager runs on a node whose instances the operator makes; "+
			"it is set back to false at %s; find who does it (kubectl get node %s --show-managed-fields -o yaml), or use "+
			"sharing.mig.actuator MIGManager", v1alpha1.LabelMIGManager, clock(v.world.Now.Add(left)), v.node.Name),
	}
}

// migConfigIgnored finds that somebody tells NVIDIA's mig-manager what to do on a node where it does not run.
func (v *view) migConfigIgnored(State) finding {
	spec := v.node.GPU.Spec
	if v.by == nil || v.to.final || spec.Baseline == nil || !v.fences() || v.asksManager() {
		return finding{}
	}
	was, asked := spec.Baseline.Labels[v1alpha1.LabelMIGConfig], v.node.Labels[v1alpha1.LabelMIGConfig]
	if asked == was || asked == "" || asked == claimed || was == "" && asked == operatorsDefault {
		return finding{}
	}
	return finding{
		reason: v1alpha1.ReasonMIGConfigIgnored,
		message: fmt.Sprintf("somebody set %s=%s (it was %q before the operator); it has no effect, since policy %s partitions the "+
			"node and NVIDIA's mig-manager is kept off; say it in the policy, and set the label back",
			v1alpha1.LabelMIGConfig, asked, was, v.by.Name),
	}
}
