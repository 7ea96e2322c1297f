// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/drain"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// writer writes what actions say. What is gone, or was replaced, is no error: the next reconcile looks at what is there.
type writer struct {
	*Controller
	*seen

	recorder *eventRecorder

	mu       sync.Mutex // guards what follows, and Controller.deleted
	blocked  bool       // an eviction was refused for now
	outdated bool       // a Node has changed since it was read: the next reconcile waits until the cache shows it, and decides anew
}

// do writes, and reports whether it did.
func (w *writer) do(ctx context.Context, next action.Action) (bool, error) {
	switch a := next.(type) {
	case action.WriteConfigs:
		return w.PluginConfig.WriteKeys(ctx, w.plugin, a.Data)
	case action.TriggerSync:
		return w.sync(ctx, a)
	case action.PatchNode:
		return w.patchNode(ctx, a)
	case action.Taint:
		return w.taint(ctx, a)
	case action.Untaint:
		return w.untaint(ctx, a)
	case action.KeepTaints:
		return w.keepTaints(ctx, a)
	case action.Evict:
		return w.evict(ctx, a)
	case action.DeletePod:
		return w.deletePod(ctx, a)
	case action.KeepMPSOff:
		return w.keepMPSOff(ctx, a)
	case action.AllowMPS:
		return w.allowMPS(ctx, a)
	case action.SetSpec:
		return w.setSpec(ctx, a)
	case action.Report:
		return w.reportNode(ctx, a)
	default:
		return w.doDRA(ctx, next)
	}
}

func (w *writer) sync(ctx context.Context, a action.TriggerSync) (bool, error) {
	patch, err := mergePatch(map[string]any{"metadata": map[string]any{
		"uid": a.UID, "annotations": map[string]any{v1alpha1.AnnotationSync: a.Value},
	}})
	if err != nil {
		return false, err
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: a.Namespace, Name: a.Pod}}
	return ignoreReplaced(w.client.Patch(ctx, pod, patch, client.FieldOwner(fieldManager)))
}

func (w *writer) evict(ctx context.Context, a action.Evict) (bool, error) {
	key := types.NamespacedName{Namespace: a.Namespace, Name: a.Pod}
	result, err := drain.Evict(ctx, w.client, key, types.UID(a.UID))
	if err != nil {
		return false, err
	}
	if result.Outcome == drain.Blocked {
		w.refused()
		if w.refusals.note(a.UID, a.Node, result.Message, w.Clock.Now()) {
			w.changes.node(a.Node, true)
		}
		w.recorder.announceRefusal(a, result.Message)
		w.metrics.refusal(a)
	}
	return result.Outcome == drain.Evicting, nil
}

func (w *writer) refused() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.blocked = true
}

func (w *writer) meetsOthers() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.outdated = true
}

func (w *writer) deletePod(ctx context.Context, a action.DeletePod) (bool, error) {
	pod, uid := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: a.Namespace, Name: a.Pod}}, types.UID(a.UID)
	return ignoreReplaced(w.client.Delete(ctx, pod, client.Preconditions{UID: &uid}))
}

// note notes a write to a Node or GPUNode: the resource version after it, or the error.
func (w *writer) note(kind schema.GroupVersionKind, name, version string, err error) {
	w.changes.node(name, true)
	w.barrier.wrote(kind, name, version, err, w.snapshot.Now)
}

func mergePatch(body map[string]any) (client.Patch, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encoding a patch: %w", err)
	}
	return client.RawPatch(types.MergePatchType, data), nil
}

// ignoreGone takes it for no error that an object is gone.
func ignoreGone(err error) (bool, error) {
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// ignoreReplaced takes it for no error either that another pod has taken the place of the one that was meant: the next
// reconcile looks at that one.
func ignoreReplaced(err error) (bool, error) {
	if refusedForUID(err) {
		return false, nil
	}
	return ignoreGone(err)
}

// refusedForUID reports whether a write was refused since it names another UID: the API server lets none be changed
// (422), and a precondition of a deletion does not hold (409).
func refusedForUID(err error) bool {
	if apierrors.IsConflict(err) {
		return true
	}
	var said apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &said) || said.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(said.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}

// setSpec applies the spec of a GPUNode. Its UID keeps the apply from creating a GPUNode that was removed with its
// node.
func (w *writer) setSpec(ctx context.Context, a action.SetSpec) (bool, error) {
	have, found := w.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	empty := equality.Semantic.DeepEqual(a.Spec, v1alpha1.GPUNodeSpec{})
	if equality.Semantic.DeepEqual(a.Spec, have.Spec) && (empty || ownsSpec(have)) {
		return false, nil
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID)
	if !empty {
		spec, err := ssa.Configuration[applyv1alpha1.GPUNodeSpecApplyConfiguration](a.Spec)
		if err != nil {
			return false, err
		}
		want.WithSpec(spec)
	}
	err := w.client.Apply(ctx, want, client.FieldOwner(fieldManager), client.ForceOwnership)
	w.note(gpuNodeKind, a.Node, versionOf(want), err)
	if apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return written("", err)
}

// reportNode applies the controller's part of the status of a GPUNode. Its UID keeps it from another GPUNode of that
// name.
func (w *writer) reportNode(ctx context.Context, a action.Report) (bool, error) {
	have, found := w.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	if equality.Semantic.DeepEqual(a.Status, rollout.ReportedStatus(have.Status)) {
		return false, nil
	}
	status, err := ssa.Configuration[applyv1alpha1.GPUNodeStatusApplyConfiguration](a.Status)
	if err != nil {
		return false, err
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID).WithStatus(status)
	err = w.client.Status().Apply(ctx, want, client.FieldOwner(fieldManager), client.ForceOwnership)
	w.note(gpuNodeKind, a.Node, versionOf(want), err)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return written("the status ", err)
}

// versionOf is the resource version in the answer to an apply.
func versionOf(applied *applyv1alpha1.GPUNodeApplyConfiguration) string {
	if applied.ResourceVersion == nil {
		return ""
	}
	return *applied.ResourceVersion
}

// written reports a write, or why an apply failed.
func written(what string, err error) (bool, error) {
	if err != nil {
		return false, fmt.Errorf("applying %sas %s: %w", what, fieldManager, err)
	}
	return true, nil
}

// ownsSpec reports whether the last write of the spec of a GPUNode was ours: what another one has written an apply of
// ours that leaves it out would not remove.
func ownsSpec(node *v1alpha1.GPUNode) bool {
	return slices.ContainsFunc(node.ManagedFields, func(e metav1.ManagedFieldsEntry) bool {
		return e.Manager == fieldManager && e.Operation == metav1.ManagedFieldsOperationApply && e.Subresource == "" && e.FieldsV1 != nil &&
			bytes.Contains(e.FieldsV1.GetRawBytes(), []byte(`"f:spec":`))
	})
}

func (w *writer) patchNode(ctx context.Context, a action.PatchNode) (bool, error) {
	metadata := map[string]any{}
	if len(a.Labels) > 0 {
		metadata["labels"] = a.Labels
	}
	if len(a.Annotations) > 0 {
		metadata["annotations"] = a.Annotations
	}
	if len(metadata) == 0 {
		return false, nil
	}
	node, found := w.node(a.Node)
	if !found {
		return false, nil
	}
	if a.Locked {
		metadata["resourceVersion"] = node.ResourceVersion
	}
	return w.writeNode(ctx, node, metadata, nil)
}

// taint writes the taints of a node as it was read. They are one list with several authors, so each such write is
// refused if anything about the node changed since.
func (w *writer) taint(ctx context.Context, a action.Taint) (bool, error) {
	node, found := w.node(a.Node)
	if !found || slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&a.Taint) }) {
		return false, nil
	}
	metadata := map[string]any{"resourceVersion": node.ResourceVersion}
	if a.Baseline != "" {
		metadata["annotations"] = map[string]string{v1alpha1.AnnotationBaseline: a.Baseline}
	}
	return w.writeNode(ctx, node, metadata, map[string]any{"taints": append(slices.Clone(node.Spec.Taints), a.Taint)})
}

func (w *writer) untaint(ctx context.Context, a action.Untaint) (bool, error) {
	node, found := w.node(a.Node)
	if !found {
		return false, nil
	}
	ours := func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }
	if !slices.ContainsFunc(node.Spec.Taints, ours) {
		return false, nil
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), ours)
	return w.writeNode(ctx, node, map[string]any{"resourceVersion": node.ResourceVersion}, map[string]any{"taints": taints})
}

// keepTaints writes the taints that are there for a policy's sake, and in the same patch which of them are ours.
func (w *writer) keepTaints(ctx context.Context, a action.KeepTaints) (bool, error) {
	node, found := w.node(a.Node)
	if !found {
		return false, nil
	}
	record := node.Annotations[v1alpha1.AnnotationTaints]
	taints, ours := rollout.Retaint(node.Spec.Taints, record, a.Want)
	if ours == record && slices.Equal(taints, node.Spec.Taints) {
		return false, nil
	}
	metadata := map[string]any{"resourceVersion": node.ResourceVersion}
	switch {
	case ours != "":
		metadata["annotations"] = map[string]*string{v1alpha1.AnnotationTaints: &ours}
	case record != "":
		metadata["annotations"] = map[string]*string{v1alpha1.AnnotationTaints: nil}
	}
	return w.writeNode(ctx, node, metadata, map[string]any{"taints": taints})
}

// writeNode patches a node as it was read, and none that took its place under the same name. It keeps what the node is
// then, for a further write in this reconcile.
func (w *writer) writeNode(ctx context.Context, have *corev1.Node, metadata, spec map[string]any) (bool, error) {
	metadata["uid"] = have.UID
	body := map[string]any{"metadata": metadata}
	if spec != nil {
		body["spec"] = spec
	}
	patch, err := mergePatch(body)
	if err != nil {
		return false, err
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: have.Name}}
	err = w.client.Patch(ctx, node, patch, client.FieldOwner(fieldManager))
	w.note(nodeKind, have.Name, node.ResourceVersion, err)
	if apierrors.IsConflict(err) { // kubelets and others write it all the time
		w.meetsOthers()
		return false, nil
	}
	wrote, err := ignoreGone(err)
	if wrote {
		w.wrote(node)
	}
	return wrote, err
}

// doDRA writes objects of resource.k8s.io.
func (w *writer) doDRA(ctx context.Context, next action.Action) (bool, error) {
	switch a := next.(type) {
	case action.TaintDevices:
		return w.taintDevices(ctx, a)
	case action.UntaintDevices:
		return w.untaintDevices(ctx, a)
	case action.WriteClass:
		return w.writeClass(ctx, a)
	case action.DeleteClass:
		return w.deleteClass(ctx, a)
	default:
		return false, fmt.Errorf("no way to carry out %T", next)
	}
}

// taintDevices applies the operator's DeviceTaintRule for a node. The next reconcile waits until the cache shows it: a
// node that has one counts in the budget.
func (w *writer) taintDevices(ctx context.Context, a action.TaintDevices) (bool, error) {
	if w.dra.Nodes[a.Node].TaintRuleTaken {
		return false, fmt.Errorf("DeviceTaintRule %s exists and is not the operator's; delete it", dra.TaintRuleName(a.Node))
	}
	kind := w.rules.served.Load()
	if kind == nil {
		return false, nil
	}
	rule := dra.NewTaintRule(a.Node, a.Since)
	rule.SetGroupVersionKind(*kind)
	wrote, err := w.applyServed(ctx, rule)
	w.changes.node(a.Node, true)
	w.barrier.wrote(*kind, rule.GetName(), rule.GetResourceVersion(), err, w.snapshot.Now)
	return wrote, err
}

// untaintDevices deletes it.
func (w *writer) untaintDevices(ctx context.Context, a action.UntaintDevices) (bool, error) {
	kind, uid := w.rules.served.Load(), w.dra.Rules[a.Node]
	if kind == nil || uid == "" {
		return false, nil
	}
	rule := &unstructured.Unstructured{}
	rule.SetGroupVersionKind(*kind)
	rule.SetName(dra.TaintRuleName(a.Node))
	wrote, err := w.deleteServed(ctx, rule, uid)
	if err == nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.deletedTaintRules[uid] = true
	}
	return wrote, err
}

// writeClass applies a DeviceClass of the operator's.
func (w *writer) writeClass(ctx context.Context, a action.WriteClass) (bool, error) {
	kind := w.classes.served.Load()
	if kind == nil {
		return false, nil
	}
	class := dra.NewClass(a.Class)
	class.SetGroupVersionKind(*kind)
	return w.applyServed(ctx, class)
}

// deleteClass deletes it.
func (w *writer) deleteClass(ctx context.Context, a action.DeleteClass) (bool, error) {
	kind, uid := w.classes.served.Load(), w.dra.Classes[a.Name]
	if kind == nil || uid == "" {
		return false, nil
	}
	class := &unstructured.Unstructured{}
	class.SetGroupVersionKind(*kind)
	class.SetName(a.Name)
	return w.deleteServed(ctx, class, uid)
}

func (w *writer) applyServed(ctx context.Context, want *unstructured.Unstructured) (bool, error) {
	err := w.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(fieldManager), client.ForceOwnership)
	if meta.IsNoMatchError(err) {
		return false, nil // the kind has gone since, and the next reconcile sees that
	}
	return ignoreGone(err)
}

func (w *writer) deleteServed(ctx context.Context, object *unstructured.Unstructured, uid types.UID) (bool, error) {
	wrote, err := ignoreReplaced(w.client.Delete(ctx, object, client.Preconditions{UID: &uid}))
	if meta.IsNoMatchError(err) {
		return false, nil
	}
	return wrote, err
}

// report applies the status of each policy, also when actions failed, and announces what is new about it.
func (r *reconciliation) report(ctx context.Context, d rollout.Decision) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(d.Policies)) {
		if policy, found := r.policies[name]; found {
			errs = append(errs, r.reportPolicy(ctx, policy, d.Policies[name], d.Nodes))
		}
	}
	return errors.Join(errs...)
}

// reportPolicy applies the status of a policy. The nodes are the states of all nodes.
func (r *reconciliation) reportPolicy(
	ctx context.Context, policy *v1alpha1.GPUSharingPolicy, status v1alpha1.GPUSharingPolicyStatus, nodes []rollout.NodeState,
) error {
	if equality.Semantic.DeepEqual(ownStatus(policy), status) {
		return nil // what an apply compares costs much more, for each policy in each reconcile
	}
	configuration, err := ssa.Configuration[applyv1alpha1.GPUSharingPolicyStatusApplyConfiguration](status)
	if err != nil {
		return err
	}
	want := applyv1alpha1.GPUSharingPolicy(policy.Name).WithStatus(configuration)
	owner := ssa.Owner{Client: r.client, Name: fieldManager}
	wrote, err := ssa.ApplyStatus(ctx, owner, policy, want, applyv1alpha1.ExtractGPUSharingPolicyStatus)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reporting on policy %s: %w", policy.Name, err)
	}
	if wrote {
		r.recorder.announceReasons(policy, status.Conditions)
		r.recorder.announceNodes(policy, status.Pending, nodes)
	}
	return nil
}

// ownStatus is the status of a policy without what other controllers report.
func ownStatus(policy *v1alpha1.GPUSharingPolicy) v1alpha1.GPUSharingPolicyStatus {
	own := policy.Status
	own.NodeGroups, own.OnDemand = nil, nil
	for _, another := range v1alpha1.ConditionsOfOthers() {
		if _, reported := condition.Find(own.Conditions, another); reported {
			own.Conditions = condition.Remove(own.Conditions, another)
		}
	}
	return own
}
