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
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	applyv1alpha1 "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/drain"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/taints"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
	"github.com/gpusharing/gpu-sharing-operator/internal/ssa"
)

// pass carries out one decision.
type pass struct {
	*Controller
	*seen

	mu      sync.Mutex                // guards what follows, and seen.nodes once actions are carried out
	current map[action.PolicyRef]bool // whether a policy still is at that generation, as far as it was asked
	blocked bool                      // an eviction was refused for now
	left    bool                      // the time was up before all was done
	done    map[likewise][]action.Action
}

// askAgain is when an eviction is asked for again that a PodDisruptionBudget refused: nothing tells when it allows it.
const askAgain = 10 * time.Second

// again is when to look again: at the deadline of the decision, or at one of the carrying out.
func (p *pass) again(after time.Duration) time.Duration {
	if p.blocked {
		after = timing.Sooner(after, askAgain)
	}
	after = timing.Sooner(after, p.refusals.left(p.world.Now)) // the status names them until then
	if p.left {
		after = lookAgain
	}
	if o := p.plugin.Overridden; o != nil {
		after = timing.Sooner(after, max(o.Until.Sub(p.world.Now), time.Second))
	}
	return after
}

// execute carries out the actions: first the keys, then what makes the device plugin read them, then the nodes. The
// failure of one does not hold up another.
func (p *pass) execute(ctx context.Context, d rollout.Decision) error {
	var errs []error
	for _, a := range d.Actions {
		if _, isKeys := a.(action.WriteConfigs); isKeys && d.ConfigurePlugin {
			errs = append(errs, p.carryOut(ctx, a))
		}
	}
	if len(errs) == 0 || errs[0] == nil {
		errs = append(errs, p.wire(ctx, d), p.wireMIG(ctx, d))
	}
	return errors.Join(append(errs, p.executeOnNodes(ctx, d.Actions))...)
}

// carryOut does one thing, unless the policy that asked for it has changed meanwhile.
func (p *pass) carryOut(ctx context.Context, a action.Action) error {
	holds, err := p.holds(ctx, a.For())
	if err != nil || !holds {
		return err
	}
	wrote, err := p.do(ctx, a)
	if err != nil {
		return fmt.Errorf("%s: %w", a, err)
	}
	if wrote {
		p.repeats.Note(a, p.world.Now)
		logger := log.FromContext(ctx)
		if _, reports := a.(action.Report); reports {
			logger = logger.V(1) // there may be one for each of thousands of nodes that wait
		}
		logger.Info(a.String(), about(a)...)
		p.announce(a)
		p.metrics.did(a, p.failedOf(a.Target()))
	}
	return nil
}

// specOf is the spec of a GPUNode before this pass.
func (p *pass) specOf(node string) v1alpha1.GPUNodeSpec {
	if have, found := p.gpuNodes[node]; found {
		return have.Spec
	}
	return v1alpha1.GPUNodeSpec{}
}

// failedOf is the desired state that failed on a node, as recorded before this pass; nil if none is.
func (p *pass) failedOf(node string) *v1alpha1.FailedChange {
	if have, found := p.gpuNodes[node]; found {
		return have.Status.Rollout.Failed
	}
	return nil
}

// about are the keys and values of an action's log line.
func about(a action.Action) []any {
	var pairs []any
	if node := a.Target(); node != "" {
		pairs = append(pairs, "node", node)
	}
	if policy := a.For().Name; policy != "" {
		pairs = append(pairs, "policy", policy)
	}
	return pairs
}

// holds asks the API server, once in a pass for each policy, whether a policy is still as it was decided upon.
func (p *pass) holds(ctx context.Context, ref action.PolicyRef) (bool, error) {
	if ref.Name == "" {
		return true, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if holds, known := p.current[ref]; known {
		return holds, nil
	}
	policy := &v1alpha1.GPUSharingPolicy{}
	err := p.Reader.Get(ctx, types.NamespacedName{Name: ref.Name}, policy)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("reading policy %s again: %w", ref.Name, err)
	}
	holds := err == nil && policy.Generation == ref.Generation && policy.DeletionTimestamp == nil
	p.current[ref] = holds
	return holds, nil
}

// do writes, and says whether it did.
func (p *pass) do(ctx context.Context, next action.Action) (bool, error) {
	switch a := next.(type) {
	case action.WriteConfigs:
		return p.Wiring.WriteKeys(ctx, p.plugin, a.Data)
	case action.TriggerSync:
		return p.sync(ctx, a)
	case action.PatchNode:
		return p.patchNode(ctx, a)
	case action.Taint:
		return p.taint(ctx, a)
	case action.Untaint:
		return p.untaint(ctx, a)
	case action.KeepTaints:
		return p.keepTaints(ctx, a)
	case action.Evict:
		return p.evict(ctx, a)
	case action.DeletePod:
		return p.deletePod(ctx, a)
	case action.KeepMPSOff:
		return p.keepMPSOff(ctx, a)
	case action.AllowMPS:
		return p.allowMPS(ctx, a)
	case action.SetSpec:
		return p.setSpec(ctx, a)
	case action.Report:
		return p.reportNode(ctx, a)
	default:
		return false, fmt.Errorf("no way to carry out %T", next)
	}
}

// wire points the device plugin at our ConfigMap, or back to where it was, with what NVIDIA's programs have to tolerate.
func (p *pass) wire(ctx context.Context, d rollout.Decision) error {
	p.plugin.Held, p.plugin.KeepStrategy = d.Held, d.KeepStrategy
	if !d.ConfigurePlugin {
		changed, err := p.Wiring.Unwire(ctx, p.plugin, p.mounted(), d.Tolerations)
		p.announceWiring(ctx, changed, eventRestored)
		return err
	}
	changed, err := p.Wiring.Wire(ctx, p.plugin, d.Tolerations)
	p.announceWiring(ctx, changed, eventConfigured)
	return errors.Join(err, p.Wiring.KeepCopy(ctx, p.plugin))
}

// wireMIG points NVIDIA's mig-manager at our ConfigMap, or back to where it was.
func (p *pass) wireMIG(ctx context.Context, d rollout.Decision) error {
	if !d.ConfigurePlugin {
		return nil // everything was restored
	}
	change := p.Wiring.UnwireMIG
	if d.ConfigureMIGManager {
		change = p.Wiring.WireMIG
	}
	changed, err := change(ctx, p.plugin)
	if changed {
		log.FromContext(ctx).Info("Changed which configurations NVIDIA's mig-manager reads", "ours", d.ConfigureMIGManager)
	}
	return err
}

// mounted says whether a pod mounts our ConfigMap.
func (p *pass) mounted() bool {
	return slices.ContainsFunc(p.world.Nodes, func(n world.Node) bool {
		return slices.ContainsFunc(n.Pods, func(pod world.Pod) bool { return pod.MountsConfig })
	})
}

func (p *pass) sync(ctx context.Context, a action.TriggerSync) (bool, error) {
	patch, err := mergePatch(map[string]any{"metadata": map[string]any{
		"uid": a.UID, "annotations": map[string]any{v1alpha1.AnnotationSync: a.Value},
	}})
	if err != nil {
		return false, err
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: a.Namespace, Name: a.Pod}}
	return ignoreReplaced(p.client.Patch(ctx, pod, patch, client.FieldOwner(fieldManager)))
}

func (p *pass) patchNode(ctx context.Context, a action.PatchNode) (bool, error) {
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
	node, found := p.node(a.Node)
	if !found {
		return false, nil
	}
	if a.Locked {
		metadata["resourceVersion"] = node.ResourceVersion
	}
	return p.writeNode(ctx, node, metadata, nil)
}

// taint writes the taints of a node as it was read. They are one list with several authors, so each such write is refused if
// anything about the node changed since.
func (p *pass) taint(ctx context.Context, a action.Taint) (bool, error) {
	node, found := p.node(a.Node)
	if !found || slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&a.Taint) }) {
		return false, nil
	}
	metadata := map[string]any{"resourceVersion": node.ResourceVersion}
	if a.Baseline != "" {
		metadata["annotations"] = map[string]string{v1alpha1.AnnotationBaseline: a.Baseline}
	}
	return p.writeNode(ctx, node, metadata, map[string]any{"taints": append(slices.Clone(node.Spec.Taints), a.Taint)})
}

func (p *pass) untaint(ctx context.Context, a action.Untaint) (bool, error) {
	node, found := p.node(a.Node)
	if !found {
		return false, nil
	}
	ours := func(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }
	if !slices.ContainsFunc(node.Spec.Taints, ours) {
		return false, nil
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), ours)
	return p.writeNode(ctx, node, map[string]any{"resourceVersion": node.ResourceVersion}, map[string]any{"taints": taints})
}

// keepTaints writes the taints that are there for a policy's sake, and in the same patch which of them are ours.
func (p *pass) keepTaints(ctx context.Context, a action.KeepTaints) (bool, error) {
	node, found := p.node(a.Node)
	if !found {
		return false, nil
	}
	record := node.Annotations[v1alpha1.AnnotationTaints]
	taints, ours := taints.Retaint(node.Spec.Taints, record, a.Want)
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
	return p.writeNode(ctx, node, metadata, map[string]any{"taints": taints})
}

// writeNode patches a node as it was read, and none that took its place under the same name. It keeps what the node is
// then, for a further write in this pass.
func (p *pass) writeNode(ctx context.Context, have *corev1.Node, metadata, spec map[string]any) (bool, error) {
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
	err = p.client.Patch(ctx, node, patch, client.FieldOwner(fieldManager))
	p.wrote(nodeKind, have.Name, node.ResourceVersion, err)
	wrote, err := ignoreGone(err)
	if wrote {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.nodes[have.Name] = node
	}
	return wrote, err
}

// wrote notes a write to a Node or GPUNode: the resource version after it, or the error.
func (p *pass) wrote(kind schema.GroupVersionKind, name, version string, err error) {
	p.changes.node(name, true)
	p.catchUp.wrote(kind, name, version, err, p.world.Now)
}

func (p *pass) evict(ctx context.Context, a action.Evict) (bool, error) {
	key := types.NamespacedName{Namespace: a.Namespace, Name: a.Pod}
	result, err := drain.Evict(ctx, p.client, key, types.UID(a.UID))
	if err != nil {
		return false, err
	}
	if result.Outcome == drain.Blocked {
		p.refused()
		if p.refusals.note(a.UID, a.Node, result.Message, p.Clock.Now()) {
			p.changes.node(a.Node, true)
		}
		p.announceRefusal(a, result.Message)
		p.metrics.refusal(a)
	}
	return result.Outcome == drain.Evicting, nil
}

func (p *pass) deletePod(ctx context.Context, a action.DeletePod) (bool, error) {
	pod, uid := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: a.Namespace, Name: a.Pod}}, types.UID(a.UID)
	return ignoreReplaced(p.client.Delete(ctx, pod, client.Preconditions{UID: &uid}))
}

// setSpec applies the spec of a GPUNode. Its UID keeps the apply from creating a GPUNode that was removed with its node.
func (p *pass) setSpec(ctx context.Context, a action.SetSpec) (bool, error) {
	have, found := p.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID)
	if !equality.Semantic.DeepEqual(a.Spec, v1alpha1.GPUNodeSpec{}) {
		spec, err := ssa.Configuration[applyv1alpha1.GPUNodeSpecApplyConfiguration](a.Spec)
		if err != nil {
			return false, err
		}
		want.WithSpec(spec)
	}
	wrote, err := ssa.Apply(ctx, ssa.Owner{Client: p.client, Name: fieldManager}, have, want, extractWithUID)
	if wrote || err != nil {
		p.wrote(gpuNodeKind, a.Node, versionOf(want), err)
	}
	if apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return wrote, err
}

// reportNode applies the controller's part of the status of a GPUNode. Its UID keeps it from another GPUNode of that name.
func (p *pass) reportNode(ctx context.Context, a action.Report) (bool, error) {
	have, found := p.gpuNodes[a.Node]
	if !found {
		return false, nil
	}
	status, err := ssa.Configuration[applyv1alpha1.GPUNodeStatusApplyConfiguration](a.Status)
	if err != nil {
		return false, err
	}
	want := applyv1alpha1.GPUNode(a.Node).WithUID(have.UID).WithStatus(status)
	wrote, err := ssa.ApplyStatus(ctx, ssa.Owner{Client: p.client, Name: fieldManager}, have, want, extractStatusWithUID)
	if wrote || err != nil {
		p.wrote(gpuNodeKind, a.Node, versionOf(want), err)
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil // it is gone, or another took its place
	}
	return wrote, err
}

// versionOf is the resource version in the answer to an apply.
func versionOf(applied *applyv1alpha1.GPUNodeApplyConfiguration) string {
	if applied.ResourceVersion == nil {
		return ""
	}
	return *applied.ResourceVersion
}

func extractWithUID(have *v1alpha1.GPUNode, manager string) (*applyv1alpha1.GPUNodeApplyConfiguration, error) {
	was, err := applyv1alpha1.ExtractGPUNode(have, manager)
	if err != nil {
		return nil, err
	}
	return was.WithUID(have.UID), nil
}

func extractStatusWithUID(have *v1alpha1.GPUNode, manager string) (*applyv1alpha1.GPUNodeApplyConfiguration, error) {
	was, err := applyv1alpha1.ExtractGPUNodeStatus(have, manager)
	if err != nil {
		return nil, err
	}
	return was.WithUID(have.UID), nil
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
// pass looks at that one.
func ignoreReplaced(err error) (bool, error) {
	if refusedForUID(err) {
		return false, nil
	}
	return ignoreGone(err)
}

// refusedForUID says whether a write was refused since it names another UID: the API server lets none be changed (422),
// and a precondition of a deletion does not hold (409).
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
