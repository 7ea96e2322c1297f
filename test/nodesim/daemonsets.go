// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// labelTemplate tells pods of one template of a DaemonSet from those of another.
const labelTemplate = appsv1.DefaultDaemonSetUniqueLabelKey

// daemonSets runs the DaemonSets on the node.
type daemonSets struct{ *machine }

// runDaemonSets is the DaemonSet controller, as far as this node is concerned: one pod of each DaemonSet whose node
// selector matches, none of the others, and a new pod for a new template unless the DaemonSet waits for the old one to
// be deleted. No pod comes to a node with a taint that it does not tolerate; one that is there stays, unless the taint
// is NoExecute (kubernetes pkg/controller/daemon: NodeShouldRunDaemonPod).
func (d daemonSets) runDaemonSets(ctx context.Context, node *corev1.Node, pods []corev1.Pod) error {
	sets := &appsv1.DaemonSetList{}
	if err := d.Client.List(ctx, sets); err != nil {
		return fmt.Errorf("listing the DaemonSets for node %s: %w", d.Name, err)
	}
	var errs []error
	for _, set := range sets.Items {
		errs = append(errs, d.runDaemonSet(ctx, node, &set, podsOf(&set, pods)))
	}
	return errors.Join(append(errs, d.collectGarbage(ctx, sets.Items, pods))...)
}

// collectGarbage deletes the pods of the simulated DaemonSets that are gone, as Kubernetes' garbage collector does.
func (d daemonSets) collectGarbage(ctx context.Context, sets []appsv1.DaemonSet, pods []corev1.Pod) error {
	for i := range pods {
		owner := metav1.GetControllerOf(&pods[i])
		if owner == nil || owner.Kind != "DaemonSet" || pods[i].Labels[labelTemplate] == "" || pods[i].DeletionTimestamp != nil ||
			slices.ContainsFunc(sets, func(set appsv1.DaemonSet) bool { return set.UID == owner.UID }) {
			continue
		}
		if err := client.IgnoreNotFound(d.Client.Delete(ctx, &pods[i])); err != nil {
			return fmt.Errorf("deleting pod %s, whose DaemonSet is gone: %w", pods[i].Name, err)
		}
	}
	return nil
}

func podsOf(set *appsv1.DaemonSet, pods []corev1.Pod) []corev1.Pod {
	return slices.DeleteFunc(slices.Clone(pods), func(p corev1.Pod) bool {
		owner := metav1.GetControllerOf(&p)
		return owner == nil || owner.UID != set.UID
	})
}

func (d daemonSets) runDaemonSet(ctx context.Context, node *corev1.Node, set *appsv1.DaemonSet, pods []corev1.Pod) error {
	wanted := set.DeletionTimestamp == nil &&
		labels.SelectorFromSet(set.Spec.Template.Spec.NodeSelector).Matches(labels.Set(node.Labels))
	template := templateHash(set)
	if wanted && len(pods) == 0 && tolerates(set.Spec.Template.Spec.Tolerations, node.Spec.Taints) {
		return d.createPod(ctx, set, template)
	}
	for _, p := range pods {
		outdated := p.Labels[labelTemplate] != template && set.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType
		if wanted && !outdated || p.DeletionTimestamp != nil {
			continue
		}
		if err := client.IgnoreNotFound(d.Client.Delete(ctx, &p)); err != nil {
			return fmt.Errorf("deleting pod %s of DaemonSet %s: %w", p.Name, set.Name, err)
		}
	}
	return nil
}

func tolerates(tolerations []corev1.Toleration, taints []corev1.Taint) bool {
	return !slices.ContainsFunc(taints, func(t corev1.Taint) bool {
		ofState := strings.HasPrefix(t.Key, "node.kubernetes.io/") // tolerated by every DaemonSet
		return !ofState && t.Effect != corev1.TaintEffectPreferNoSchedule && !clusterpolicy.Tolerates(tolerations, t)
	})
}

func templateHash(set *appsv1.DaemonSet) string {
	hash := fnv.New32a()
	encoded, err := set.Spec.Template.Marshal()
	if err != nil {
		return "" // templates are plain data
	}
	_, _ = hash.Write(encoded)
	return strconv.FormatUint(uint64(hash.Sum32()), 16)
}

func (d daemonSets) createPod(ctx context.Context, set *appsv1.DaemonSet, template string) error {
	pod := &corev1.Pod{
		ObjectMeta: *set.Spec.Template.ObjectMeta.DeepCopy(),
		Spec:       *set.Spec.Template.Spec.DeepCopy(),
	}
	pod.Namespace, pod.GenerateName = set.Namespace, set.Name+"-"
	pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))}
	pod.Labels[labelTemplate] = template
	pod.Spec.NodeName = d.Name
	if err := d.Client.Create(ctx, pod); err != nil {
		return fmt.Errorf("creating a pod of DaemonSet %s on node %s: %w", set.Name, d.Name, err)
	}
	return nil
}

// ReportDaemonSets writes the status of each DaemonSet, as the DaemonSet controller does for all nodes together.
func ReportDaemonSets(ctx context.Context, c client.Client) error {
	sets, nodes, pods := &appsv1.DaemonSetList{}, &corev1.NodeList{}, &corev1.PodList{}
	for _, list := range []client.ObjectList{sets, nodes, pods} {
		if err := c.List(ctx, list); err != nil {
			return fmt.Errorf("reading what DaemonSets run: %w", err)
		}
	}
	for i := range sets.Items {
		set := &sets.Items[i]
		status := appsv1.DaemonSetStatus{ObservedGeneration: set.Generation}
		for n := range nodes.Items {
			spec := &set.Spec.Template.Spec
			if labels.SelectorFromSet(spec.NodeSelector).Matches(labels.Set(nodes.Items[n].Labels)) && tolerates(spec.Tolerations, nodes.Items[n].Spec.Taints) {
				status.DesiredNumberScheduled++
			}
		}
		for _, p := range podsOf(set, pods.Items) {
			status.CurrentNumberScheduled++
			if p.Labels[labelTemplate] == templateHash(set) {
				status.UpdatedNumberScheduled++
			}
			if slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue }) {
				status.NumberReady++
				status.NumberAvailable++
			}
		}
		if equality.Semantic.DeepEqual(set.Status, status) {
			continue
		}
		set.Status = status
		if err := c.Status().Update(ctx, set); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			return fmt.Errorf("reporting the status of DaemonSet %s: %w", set.Name, err)
		}
	}
	return nil
}
