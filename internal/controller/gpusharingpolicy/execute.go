// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

// reconciliation carries out one decision: it takes the actions in their order, the writer writes what each of them
// says, and the eventRecorder reports it in Events. The status of each policy comes last.
type reconciliation struct {
	*Controller
	*seen

	writer     *writer
	recorder   *eventRecorder
	unfinished bool // the time was up before all was done
	// current are the policies as the API server had them when the reconcile began to write.
	current map[action.PolicyRef]bool
}

func newReconciliation(c *Controller, s *seen) *reconciliation {
	a := &eventRecorder{seen: s, recorder: c.Events, done: map[likewise][]action.Action{}}
	return &reconciliation{
		Controller: c, seen: s, writer: &writer{Controller: c, seen: s, recorder: a}, recorder: a, current: map[action.PolicyRef]bool{},
	}
}

// askAgain is when an eviction is asked for again that a PodDisruptionBudget refused: nothing tells when it allows it.
const askAgain = 10 * time.Second

// again is when to look again: at the deadline of the decision, or at one of the carrying out.
func (r *reconciliation) again(after time.Duration) time.Duration {
	if r.writer.blocked {
		after = timing.Sooner(after, askAgain)
	}
	after = timing.Sooner(after, r.refusals.remaining(r.snapshot.Now)) // the status names them until then
	if r.unfinished || r.writer.outdated {
		after = lookAgain
	}
	if o := r.plugin.Operands; o != nil {
		after = timing.Sooner(after, o.NotBefore.Sub(r.snapshot.Now))
	}
	if o := r.plugin.Overridden; o != nil {
		after = timing.Sooner(after, max(o.Until.Sub(r.snapshot.Now), time.Second))
	}
	return after
}

// execute carries out the actions: first the keys, then what makes the device plugin read them, then the nodes. The
// failure of one does not hold up another.
func (r *reconciliation) execute(ctx context.Context, d rollout.Decision) error {
	var errs []error
	for _, a := range d.Actions {
		if _, isKeys := a.(action.WriteConfigs); isKeys && d.ConfigurePlugin {
			errs = append(errs, r.carryOut(ctx, a))
		}
	}
	if len(errs) == 0 || errs[0] == nil {
		errs = append(errs, r.configurePlugin(ctx, d), r.configureMIG(ctx, d))
	}
	return errors.Join(append(errs, r.executeOnNodes(ctx, d.Actions))...)
}

// carryOut does one thing, unless the policy that asked for it has changed meanwhile.
func (r *reconciliation) carryOut(ctx context.Context, a action.Action) error {
	if !r.policyUnchanged(a.For()) {
		return nil
	}
	wrote, err := r.writer.do(ctx, a)
	if err != nil {
		if refuses(err) {
			r.repeats.Refuse(a, err.Error(), r.snapshot.Now)
		}
		return fmt.Errorf("%s: %w", a, err)
	}
	if wrote {
		r.repeats.Note(a, r.snapshot.Now)
		line, verbosity := r.recorder.logged(a)
		log.FromContext(ctx).V(verbosity).Info(line, about(a)...)
		r.recorder.announce(a)
		r.metrics.did(a, r.failedOf(a.NodeName()))
	}
	return nil
}

// refuses reports whether the API server, or a webhook that it asks, refused a write for what it is: the same write is
// refused again. Whatever passes by itself, such as a conflict or a lack of time, is none. What is not found is the
// namespace of an object that is to be made.
func refuses(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) ||
		apierrors.IsRequestEntityTooLargeError(err) || apierrors.IsInternalError(err) && strings.Contains(err.Error(), "webhook")
}

// about are the keys and values of an action's log line.
func about(a action.Action) []any {
	var pairs []any
	if node := a.NodeName(); node != "" {
		pairs = append(pairs, "node", node)
	}
	if policy := a.For().Name; policy != "" {
		pairs = append(pairs, "policy", policy)
	}
	return pairs
}

// policyUnchanged reports whether a policy is still as it was decided upon.
func (r *reconciliation) policyUnchanged(ref action.PolicyRef) bool {
	return ref.Name == "" || r.current[ref]
}

// changes reports whether a decision asks for more than reports.
func (r *reconciliation) changes(d rollout.Decision) bool {
	acts := func(a action.Action) bool {
		_, reports := a.(action.Report)
		return !reports
	}
	return slices.ContainsFunc(d.Actions, acts) || r.plugin.Restores(d.ConfigurePlugin, d.ConfigureMIGManager, d.Tolerations)
}

// confirm asks the API server, once before a reconcile writes, which policies there are, so that none is taken for
// released that the cache lacks for another reason.
func (r *reconciliation) confirm(ctx context.Context) error {
	policies, err := r.PluginConfig.OwnPolicies(ctx, r.snapshot.Policies)
	for name, policy := range policies {
		r.current[action.PolicyRef{Name: name, Generation: policy.Generation}] = policy.DeletionTimestamp == nil
	}
	return err
}

// configurePlugin configures the device plugin to read our ConfigMap, or restores it, with what NVIDIA's programs have
// to tolerate.
func (r *reconciliation) configurePlugin(ctx context.Context, d rollout.Decision) error {
	r.plugin.Held, r.plugin.KeepStrategy = d.PluginConfigHeld, d.KeepStrategy
	if !d.ConfigurePlugin {
		changed, err := r.PluginConfig.Restore(ctx, r.plugin, r.mounted(), d.Tolerations)
		r.recorder.announceConfiguration(ctx, changed, eventRestored)
		return err
	}
	changed, err := r.PluginConfig.Configure(ctx, r.plugin, d.Tolerations)
	r.recorder.announceConfiguration(ctx, changed, eventConfigured)
	return errors.Join(err, r.PluginConfig.KeepCopy(ctx, r.plugin))
}

// configureMIG points NVIDIA's mig-manager at our ConfigMap, or back to where it was.
func (r *reconciliation) configureMIG(ctx context.Context, d rollout.Decision) error {
	if !d.ConfigurePlugin {
		return nil // everything was restored
	}
	change := r.PluginConfig.RestoreMIG
	if d.ConfigureMIGManager {
		change = r.PluginConfig.ConfigureMIG
	}
	changed, err := change(ctx, r.plugin)
	if changed {
		log.FromContext(ctx).Info("Changed which configurations NVIDIA's mig-manager reads", "ours", d.ConfigureMIGManager)
	}
	return err
}

// refusals are why the API server refused to evict pods. They stand in the status as long as the controller asks again.
type refusals struct {
	mu    sync.Mutex
	byUID map[string]refusal
}

type refusal struct {
	node, message string
	at            time.Time // when it was refused last
}

// refusalLasts is how long a refusal counts. The controller asks again every askAgain.
const refusalLasts = time.Minute

// note remembers a refusal of a pod on a node, and reports whether it is another one than before.
func (r *refusals) note(uid, node, message string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byUID == nil {
		r.byUID = map[string]refusal{}
	}
	known := r.byUID[uid]
	r.byUID[uid] = refusal{node: node, message: message, at: now}
	return known.message != message
}

// prune forgets those that no longer count, and returns the nodes of their pods.
func (r *refusals) prune(now time.Time) (nodes []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, known := range r.byUID {
		if now.Sub(known.at) >= refusalLasts {
			delete(r.byUID, uid)
			nodes = append(nodes, known.node)
		}
	}
	return nodes
}

// remaining is when the next of them no longer counts; 0: there is none.
func (r *refusals) remaining(now time.Time) (after time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, known := range r.byUID {
		after = timing.Sooner(after, max(known.at.Add(refusalLasts).Sub(now), time.Second))
	}
	return after
}

func (r *refusals) of(uid string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byUID[uid].message
}

// undecidedDeadline is how long the controller may go without a decision before every policy reports what it waits for.
// What it waits for usually comes within seconds.
const undecidedDeadline = time.Minute

// wait ends a reconcile that cannot decide, because of an error or because it waits for something that comes by itself:
// the cache to show the last write, or the objects of a kind that was installed just now. Either is reported once it
// takes too long.
func (c *Controller) wait(ctx context.Context, reason error, again time.Duration) (reconcile.Result, error) {
	now := c.Clock.Now()
	if c.undecided.IsZero() {
		c.undecided = now
	}
	err := c.reportUndecided(ctx, reason, now)
	if again == 0 {
		return reconcile.Result{}, errors.Join(reason, err)
	}
	log.FromContext(ctx).V(1).Info("Waiting before the next decision", "reason", reason.Error())
	return reconcile.Result{RequeueAfter: again}, err
}

func (c *Controller) reportUndecided(ctx context.Context, reason error, now time.Time) error {
	if now.Sub(c.undecided) < undecidedDeadline {
		return nil
	}
	s, err := c.gatherPolicies(ctx)
	if err != nil {
		return err
	}
	message := fmt.Sprintf("The controller decides nothing since %s: %s", c.undecided.UTC().Format(time.RFC3339), reason)
	return newReconciliation(c, s).report(ctx, rollout.Decision{Policies: rollout.Undecided(s.snapshot.Policies, message, now)})
}
