// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/drain"
)

// writer writes what actions say: of Nodes in writenode.go, of GPUNodes in writegpunode.go, of NodeFeatures in
// nodefeatures.go, of resource.k8s.io in writedra.go, the rest here. What is gone, or was replaced, is no error: the
// next reconcile looks at what is there.
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
