// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

const (
	// ours begins the labels, annotations and taints of the operator.
	ours = v1alpha1.Group + "/"
)

// managedByUs selects what the controller itself has made.
var managedByUs = client.MatchingLabels{"app.kubernetes.io/managed-by": "gpu-sharing-operator"}

// Left lists what of the cluster is not as it was before the operator, a line for each, with the reason where one is
// known. Empty: everything is restored. An error means that it is not known.
func Left(ctx context.Context, c client.Client) ([]string, error) {
	var left []string
	for _, find := range []func(context.Context, client.Client) ([]string, error){
		leftPolicies, leftGPUNodes, leftNodes, leftNodeFeatures, leftClusterPolicies, leftConfigMaps, leftForAutoscalers, leftOfDRA,
	} {
		found, err := find(ctx, c)
		if err != nil {
			return nil, err
		}
		left = append(left, found...)
	}
	return left, nil
}

// leftPolicies, and the GPUNodes that record how nodes were, must be readable: without their kinds nothing can be
// restored.
func leftPolicies(ctx context.Context, c client.Client) (left []string, err error) {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.List(ctx, policies); err != nil {
		return nil, fmt.Errorf("reading policies: %w", err)
	}
	for i := range policies.Items {
		left = append(left, fmt.Sprintf("gpusharingpolicy/%s exists", policies.Items[i].Name))
	}
	return left, nil
}

func leftGPUNodes(ctx context.Context, c client.Client) (left []string, err error) {
	gpuNodes := &v1alpha1.GPUNodeList{}
	if err := c.List(ctx, gpuNodes); err != nil {
		return nil, fmt.Errorf("reading GPUNodes: %w", err)
	}
	for i := range gpuNodes.Items {
		if says := leftOfNode(&gpuNodes.Items[i]); says != "" {
			left = append(left, says)
		}
	}
	return left, nil
}

// leftOfNode says what of a node is not as it was, and why if that is known; empty: nothing.
func leftOfNode(n *v1alpha1.GPUNode) string {
	limited, reported := condition.Find(n.Status.Conditions, v1alpha1.ConditionMemoryLimited)
	switch {
	case n.Spec.PolicyName != "":
		why := ""
		if ready, found := condition.Find(n.Status.Conditions, v1alpha1.ConditionReady); found && ready.Status == metav1.ConditionFalse {
			why = fmt.Sprintf(": %s: %s", ready.Reason, ready.Message)
		}
		return fmt.Sprintf("node/%s is shared by policy %s%s", n.Name, n.Spec.PolicyName, why)
	case n.Spec.Baseline != nil:
		return fmt.Sprintf("node/%s is not restored yet: %s", n.Name, whyNotRestored(n))
	case reported: // the agent takes it off with the last limit
		return fmt.Sprintf("node/%s may have the driver's memory limits yet: %s: %s", n.Name, limited.Reason, limited.Message)
	}
	return ""
}

// whyNotRestored is why a node that no policy governs is not as it was.
func whyNotRestored(n *v1alpha1.GPUNode) string {
	if n.Spec.Release != nil && n.Spec.Release.ReleasePolicy == v1alpha1.ReleasePolicyRetain {
		return "its last policy had releasePolicy Retain; select it by a policy with releasePolicy Restore"
	}
	if ready, found := condition.Find(n.Status.Conditions, v1alpha1.ConditionReady); found && ready.Status != metav1.ConditionTrue {
		return fmt.Sprintf("%s: %s", ready.Reason, ready.Message)
	}
	return "the controller is at work"
}

// leftNodes are labels, annotations and taints of the operator on nodes. The record of LabelRunsAgent stays as long as
// agents run.
func leftNodes(ctx context.Context, c client.Client) (left []string, err error) {
	err = eachPage(ctx, c, func(nodes *corev1.NodeList) {
		for i := range nodes.Items {
			n := &nodes.Items[i]
			add := func(kind, name string) {
				if strings.HasPrefix(name, ours) && name != v1alpha1.AnnotationRunsAgent {
					left = append(left, fmt.Sprintf("node/%s has the %s %s", n.Name, kind, name))
				}
			}
			for _, t := range n.Spec.Taints {
				if add("taint", t.Key); autoscaling.AwaitsLabel(t) {
					left = append(left, fmt.Sprintf("node/%s has the taint %s", n.Name, t.Key))
				}
			}
			for _, name := range slices.Sorted(maps.Keys(n.Labels)) {
				add("label", name)
			}
			for _, name := range slices.Sorted(maps.Keys(n.Annotations)) {
				add("annotation", name)
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("reading nodes: %w", err)
	}
	return left, nil
}

func leftNodeFeatures(ctx context.Context, c client.Client) (left []string, err error) {
	features, err := anyOf(ctx, c, cluster.NodeFeatureKind())
	for i := range features {
		if f := &features[i]; f.GetName() == action.OverrideName(f.GetLabels()[cluster.LabelNodeName]) {
			left = append(left, fmt.Sprintf("nodefeature/%s of the operator exists in namespace %s", f.GetName(), f.GetNamespace()))
		}
	}
	return left, err
}

func leftClusterPolicies(ctx context.Context, c client.Client) (left []string, err error) {
	policies, err := anyOf(ctx, c, clusterPolicyKind())
	if err != nil {
		return nil, err
	}
	for i := range policies {
		p := &policies[i]
		for _, name := range slices.Sorted(maps.Keys(p.GetAnnotations())) {
			if !strings.HasPrefix(name, ours) {
				continue
			}
			why := ""
			if name == v1alpha1.AnnotationTolerations {
				if why, err = stillTainted(ctx, c, clusterpolicy.OperandsOf(p).Ours); err != nil {
					return nil, err
				}
			}
			left = append(left, fmt.Sprintf("clusterpolicy/%s has the annotation %s%s", p.GetName(), name, why))
		}
		for _, reader := range []string{"devicePlugin", "migManager"} {
			if at(p, "spec", reader, "config", "name") == cluster.ConfigMapName {
				left = append(left, fmt.Sprintf("clusterpolicy/%s names the operator's ConfigMap in spec.%s.config", p.GetName(), reader))
			}
		}
	}
	return left, nil
}

// stillTainted names a node with a taint that NVIDIA's programs tolerate only by the operator. They keep the toleration
// as long as it has the taint, because the operator does not remove a taint of which it has no record.
func stillTainted(ctx context.Context, c client.Client, tolerations []corev1.Toleration) (why string, err error) {
	err = eachPage(ctx, c, func(nodes *corev1.NodeList) {
		for i := range nodes.Items {
			for _, t := range nodes.Items[i].Spec.Taints {
				if why == "" && clusterpolicy.Tolerates(tolerations, t) {
					why = fmt.Sprintf(": node/%s has the taint %s:%s, which the operator has no record of; remove the taint, or the toleration "+
						"and the annotation", nodes.Items[i].Name, t.Key, t.Effect)
				}
			}
		}
	})
	if err != nil {
		return "", fmt.Errorf("reading nodes: %w", err)
	}
	return why, nil
}

// leftConfigMaps are those that the controller removes. Who may create ConfigMaps may give one its label, its name, and a finalizer.
func leftConfigMaps(ctx context.Context, c client.Client) (left []string, err error) {
	all := &metav1.PartialObjectMetadataList{}
	all.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMapList"))
	if err := c.List(ctx, all, managedByUs); err != nil {
		return nil, fmt.Errorf("reading ConfigMaps: %w", err)
	}
	for i := range all.Items {
		if all.Items[i].Name != cluster.ConfigMapName || all.Items[i].DeletionTimestamp != nil {
			continue
		}
		left = append(left, fmt.Sprintf("configmap/%s of the operator exists in namespace %s; a pod of NVIDIA's device plugin may still mount it",
			all.Items[i].Name, all.Items[i].Namespace))
	}
	return left, nil
}

// leftForAutoscalers are NodeOverlays and annotations that the operator has written under autoscaling.mode Manage.
func leftForAutoscalers(ctx context.Context, c client.Client) (left []string, err error) {
	for _, of := range []schema.GroupVersionKind{
		kindOf(autoscaling.GroupKarpenter, "v1alpha1", "NodeOverlay"), kindOf(autoscaling.GroupOpenShift, "v1beta1", "MachineSet"),
		kindOf(autoscaling.GroupClusterAPI, "v1beta2", "MachineSet"), kindOf(autoscaling.GroupClusterAPI, "v1beta2", "MachineDeployment"),
	} {
		all, err := anyOf(ctx, c, of)
		if err != nil {
			return nil, err
		}
		for i := range all {
			if what := leftOn(&all[i]); what != "" {
				left = append(left, what)
			}
		}
	}
	return left, nil
}

// leftOn is what the operator has left on an object of an autoscaler; empty: nothing.
func leftOn(o *unstructured.Unstructured) string {
	const byHand = "the operator removes it if it has the rights of autoscaling.manage=true; otherwise remove it by hand"
	if o.GetKind() == "NodeOverlay" {
		if overlay := autoscaling.OverlayOf(o); overlay.Policy != "" {
			return fmt.Sprintf("nodeoverlay/%s of policy %s exists; %s", overlay.Name, overlay.Policy, byHand)
		}
		return ""
	}
	if s := autoscaling.ScalableOf(o); s.Announces() {
		return fmt.Sprintf("%s has annotations of the operator for the autoscaler, recorded in %s; %s", s.Ref, v1alpha1.AnnotationAutoscaling, byHand)
	}
	return ""
}

// leftOfDRA are the operator's DeviceClasses and DeviceTaintRules.
func leftOfDRA(ctx context.Context, c client.Client) (left []string, err error) {
	for _, of := range []struct{ kind, why string }{
		{kindClass, "a pod or ResourceClaim may still have a device by it"}, {kindTaintRule, "it keeps new pods off the devices of its node"},
	} {
		all, err := anyOf(ctx, c, kindOf(draGroup, "v1", of.kind))
		if err != nil {
			return nil, err
		}
		for i := range all {
			o := &all[i]
			if o.GetLabels()[v1alpha1.LabelManagedBy] != v1alpha1.ManagedByOperator {
				continue
			}
			why := of.why
			if others := classesBeside(all, o); of.kind == kindClass && len(others) > 0 {
				why = staysBeside(o.GetName(), others)
			}
			left = append(left, fmt.Sprintf("%s/%s of the operator exists; %s", strings.ToLower(of.kind), o.GetName(), why))
		}
	}
	return left, nil
}

// classesBeside are the other DeviceClasses of the resource of one.
func classesBeside(all []unstructured.Unstructured, class *unstructured.Unstructured) (others []string) {
	resource := dra.ClassOf(class).Resource
	for i := range all {
		if resource != "" && dra.ClassOf(&all[i]).Resource == resource && all[i].GetName() != class.GetName() {
			others = append(others, all[i].GetName())
		}
	}
	return others
}

// staysBeside says what to do about a class of the operator's that it does not delete, since the scheduler would forget
// the resource.
func staysBeside(name string, others []string) string {
	return fmt.Sprintf("it stays beside %s, which serves the same resource, because the scheduler would forget that. Delete it, then have the scheduler "+
		"read the other one again: kubectl delete deviceclass %s && kubectl annotate deviceclass %s --overwrite read-again=$(date +%%s)",
		format.List(others), name, others[0])
}

// anyOf are all objects of a kind; none where the API server has no such kind.
func anyOf(ctx context.Context, c client.Client, of schema.GroupVersionKind) (all []unstructured.Unstructured, err error) {
	_, err = everyOf(ctx, c, of, func(items []unstructured.Unstructured) { all = append(all, items...) })
	return all, unlessNotServed(err, "reading each "+of.Kind)
}

// unlessNotServed is no error where the API server has no such kind.
func unlessNotServed(err error, doing string) error {
	if err == nil || meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}
