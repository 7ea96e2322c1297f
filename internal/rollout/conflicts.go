// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/plan"
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
func OffersGPUs(pod *corev1.Pod) bool {
	isPlugin := func(label string) bool { return pod.Labels[label] == "kubelet-plugin" }
	return slices.ContainsFunc(DRALabels(), isPlugin) && slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == draContainer })
}

// takenByOthers says who else shares the GPUs of the node, so that a policy cannot be honoured there.
func (v *view) takenByOthers() *plan.Problem {
	if v.node.Slicer != "" {
		return &plan.Problem{
			Reason: v1alpha1.ReasonSlicerActive,
			Message: fmt.Sprintf("the node offers %s, so Red Hat's Dynamic Accelerator Slicer (InstaSlice) partitions its GPUs, and two "+
				"must not; leave the node out of nodeSelector, or take the slicer off the node", v.node.Slicer),
		}
	}
	for _, p := range v.node.Pods {
		if p.DRA && !p.Terminating {
			return &plan.Problem{
				Reason: v1alpha1.ReasonDRADriverActive,
				Message: fmt.Sprintf("pod %s/%s of NVIDIA's DRA driver offers the GPUs of the node through ResourceClaims, and pods of both "+
					"sides would get the same ones; leave the node out of nodeSelector, or turn the driver's GPUs off "+
					"(resources.gpus.enabled=false of its chart)", p.Namespace, p.Name),
			}
		}
	}
	return nil
}

// leftToOthers says whether the agent leaves the instances to somebody else, who changes them again and again.
func (v *view) leftToOthers() bool {
	reason, _, stalled := v.stalled()
	return stalled && reason == v1alpha1.ReasonChangedByOthers && wishes(v.node.GPU.Spec, v.to)
}

// isUnfenced says whether somebody lets NVIDIA's mig-manager back onto a node that was verified without it.
func (v *view) isUnfenced() bool {
	return !v.to.final && v.fences() && reached(v.node.GPU.Spec, v.to) && v.node.Labels[v1alpha1.LabelMIGManager] == "true"
}

// overruledLeft is how long somebody is still left alone who lets NVIDIA's mig-manager back.
func (v *view) overruledLeft() time.Duration {
	at, did := stamped(v.node.Annotations[v1alpha1.AnnotationOverruled], v1alpha1.LabelMIGManager)
	if !did {
		return 0
	}
	return at.Add(patience).Sub(v.world.Now)
}

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
	if v.overruledLeft() > 0 {
		return false
	}
	patch.Annotations[v1alpha1.AnnotationOverruled] = new(stamp(v1alpha1.LabelMIGManager, v.world.Now))
	return true
}

// unfenced finds that somebody let NVIDIA's mig-manager back onto the node, again.
func (v *view) unfenced(State) finding {
	left := v.overruledLeft()
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
