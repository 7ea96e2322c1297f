// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// watchPoll is how often status --watch looks whether something has changed.
const watchPoll = 5 * time.Second

// status prints policies and nodes, or some nodes only; with --watch again whenever that changes.
func (p *Program) status(ctx context.Context, f *flags, names []string) error {
	q := query{names: names, policy: f.policy, product: f.product, notReady: f.notReady, all: f.output == outputWide}
	if f.selector != "" {
		var err error
		if q.labels, err = labels.Parse(f.selector); err != nil {
			return hint(fmt.Errorf("--selector: %w", err))
		}
	}
	c, err := connect(f)
	if err != nil {
		return err
	}
	return p.statusBy(ctx, c, f, q)
}

func (p *Program) statusBy(ctx context.Context, c client.Client, f *flags, q query) error {
	for printed := ""; ; {
		render, err := p.statusNow(ctx, c, q, f)
		if f.watch && errors.Is(ctx.Err(), context.Canceled) {
			return nil // the user ends a watch so
		}
		if err != nil {
			return err
		}
		now, err := render(q.ages)
		if err != nil || !f.watch {
			return errors.Join(err, p.write(now))
		}
		if now != printed {
			q.ages = p.Clock.Now() // that a policy grows older is no change
			now, err = render(q.ages)
			if err := errors.Join(err, p.write(separator(printed, f.output)+now)); err != nil {
				return err
			}
			printed = now
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.Clock.After(watchPoll):
		}
	}
}

// separator stands between what was printed before, if something was, and what is printed next.
func separator(printed, output string) string {
	switch {
	case printed == "":
		return ""
	case output == outputYAML:
		return "---\n"
	}
	return "\n"
}

// statusNow reads the cluster and returns what status prints of it, with the ages that policies have at a time.
func (p *Program) statusNow(ctx context.Context, c client.Client, q query, f *flags) (render func(ages time.Time) (string, error), err error) {
	s, told, err := p.read(ctx, c, f.namespace)
	if err != nil {
		return nil, advise(err)
	}
	q = q.resolved(s)
	if err := q.check(s); err != nil {
		return nil, err
	}
	leader, err := leadershipOf(ctx, c, f.namespace, p.Clock.Now())
	if err != nil {
		return nil, advise(err)
	}
	if f.output == outputJSON || f.output == outputYAML {
		return func(time.Time) (string, error) {
			return encoded(s, q, doubts{NoController: leader.absent, Unread: told.lacks}, f.output)
		}, nil
	}
	return func(ages time.Time) (string, error) {
		shown := text{width: p.Width}
		if leader.absent != "" {
			shown.row(0, "", leader.absent+". Nothing changes, and what follows may be out of date.")
			shown.WriteString("\n")
		}
		shown.lacking(told.lacks)
		q.ages = ages
		shown.status(s, q)
		return shown.String(), nil
	}, nil
}

// status writes what is so: all policies and nodes, or those that are asked for. Where not all GPUs fit on a screen it
// writes equal nodes together, and why others are not ready.
func (t *text) status(s cluster.Snapshot, q query) {
	every := reports(s)
	all := q.of(every)
	if len(q.names) == 0 {
		ages := q.ages
		if ages.IsZero() {
			ages = s.Now
		}
		if len(s.Nodes) > 0 {
			t.cluster(all)
		}
		t.policies(q.policies(s.Policies), every, ages)
	}
	if len(s.Nodes) == 0 {
		t.row(0, "", "No node has a GPUNode. The controller makes one for each node that NVIDIA's GPU Feature Discovery labels "+
			"nvidia.com/gpu.present=true; look at those labels, and at the controller's log.")
		return
	}
	if len(all) == 0 {
		t.paragraph()
		t.row(0, "", "No node is as the flags ask for.")
		return
	}
	shown := all
	if len(q.names) == 0 && !q.all && gpusOf(all) > mostDrawn {
		t.overview(all)
		if shown = nil; q.policy != "" {
			shown = slices.DeleteFunc(slices.Clone(all), func(r report) bool { return r.Ready })
			shown = shown[:min(len(shown), mostInDetail)]
		}
	}
	for i := range shown {
		t.paragraph()
		t.statusOf(&shown[i])
		if len(q.names) > 0 {
			t.rows("MIG profiles", profilesOf(shown[i].node))
		}
	}
	if len(shown) < len(all) {
		t.paragraph()
		t.row(0, "", "Name nodes to see their GPUs and who has them, name a policy to see its nodes that are not ready, or print all by -o wide.")
	}
}

// policies writes a table of the policies, of which these are all nodes, and why one is not ready.
func (t *text) policies(policies []v1alpha1.GPUSharingPolicy, nodes []report, now time.Time) {
	if len(policies) == 0 {
		t.row(0, "", noPolicy(nodes))
		return
	}
	table := tabwriter.NewWriter(t, 0, 0, 3, ' ', 0)
	rows := []string{"POLICY\tSTRATEGY\tNODES\tREADY\tUPDATED\tBLOCKED\tIN USE\tSTATUS\tAGE"}
	var why text
	why.width = t.width
	var notes alike[string]
	for i := range policies {
		p, n := &policies[i], policies[i].Status.Nodes
		state, because := policyState(p)
		rows = append(rows, fmt.Sprintf("%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\t%s", p.Name, p.Spec.Sharing.Strategy, n.Matched, n.Ready, n.Updated,
			n.Blocked, sumOf(nodes, p.Name), state, age(p.CreationTimestamp.Time, now)))
		if because != "" {
			why.row(0, "", fmt.Sprintf("why %s: %s", p.Name, because))
		}
		for _, note := range append(notesOf(p), madeOnDemand(p, nodes)...) {
			same := note
			if requests := rollout.UnmetRequests(note); requests != nil {
				same = strings.Join(requests, ", ") + "; kubectl gpusharing why says what to ask for"
			}
			notes.add(same, p.Name+": "+note)
		}
	}
	for _, note := range notes.order {
		same := notes.names[note]
		if len(same) == 1 {
			why.row(0, "", same[0])
			continue
		}
		for i := range same {
			same[i], _, _ = strings.Cut(same[i], ": ")
		}
		why.row(0, "", fmt.Sprintf("%d policies (%s): %s", len(same), format.List(same), note))
	}
	_, _ = fmt.Fprintln(table, strings.Join(rows, "\n")) // a strings.Builder takes everything
	_ = table.Flush()
	t.WriteString(why.String())
}

// noPolicy says that there is no policy, and whether nodes are still what a deleted one made of them.
func noPolicy(nodes []report) string {
	left := 0
	for i := range nodes {
		if nodes[i].Policy != "" {
			left++
		}
	}
	if left > 0 {
		return fmt.Sprintf("There is no GPUSharingPolicy any more; not restored yet: %s.", count(left, "node"))
	}
	return "There is no GPUSharingPolicy: all GPUs are in their former state."
}

// notesOf are what is to be known of a policy beside its state.
func notesOf(p *v1alpha1.GPUSharingPolicy) (notes []string) {
	if more := unlisted(p); more > 0 {
		notes = append(notes, count(more, "node")+" not ready besides the worst, which status.pending lists; their state is decided from their own objects")
	}
	for _, c := range p.Status.Conditions {
		untainted := c.Type == v1alpha1.ConditionTainted && c.Status == metav1.ConditionFalse
		if untainted || c.Type == v1alpha1.ConditionWorkloadsAffected {
			notes = append(notes, c.Type+": "+c.Message)
		}
	}
	for _, line := range onDemandOf(p) {
		notes = append(notes, "on demand: "+line)
	}
	return notes
}

// policyState is Ready, or the reason and the message why a policy is not.
func policyState(p *v1alpha1.GPUSharingPolicy) (state, why string) {
	state, why = stateOf(p.Status.Conditions)
	if !observed(p) && p.Status.ObservedGeneration > 0 {
		return notObserved, fmt.Sprintf("the controller has not observed generation %d of the policy; its last report is on generation %d: %s",
			p.Generation, p.Status.ObservedGeneration, state)
	}
	return state, why
}

// age is how long ago a time was, as kubectl prints it.
func age(since, now time.Time) string {
	if since.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(now.Sub(since))
}

// notObserved is the state of a policy whose last report is on an earlier generation.
const notObserved = "NotObserved"

// stateOf is Ready, or the reason and the message why not. A policy that governs some of its nodes only says so too.
func stateOf(conditions []metav1.Condition) (state, why string) {
	ready, found := condition.Find(conditions, v1alpha1.ConditionReady)
	accepted, _ := condition.Find(conditions, v1alpha1.ConditionAccepted)
	switch {
	case !found:
		return v1alpha1.ReasonAwaitingReport, "nobody has reported yet; look at the pods with " +
			"app.kubernetes.io/name=gpu-sharing-controller and gpu-sharing-agent"
	case ready.Status != metav1.ConditionTrue:
		return ready.Reason, ready.Message
	case accepted.Status == metav1.ConditionFalse:
		return accepted.Reason, accepted.Message
	}
	return v1alpha1.ReasonReady, ""
}

// statusOf writes a node with its GPUs.
func (t *text) statusOf(r *report) {
	by := "no policy"
	if r.Policy != "" {
		by = "policy " + r.Policy
	}
	t.row(0, "", fmt.Sprintf("NODE %s   %s   %s", r.Name, by, r.stands()))
	if r.Message != "" {
		t.row(2, "why", format.Sentence(r.Message))
	}
	if r.Stack != dra.DevicePlugin {
		t.row(2, "stack", programOf(r.Stack))
	}
	inUse := ""
	if r.Shares != (shares{}) {
		inUse = "; " + r.Shares.sentence()
	}
	t.row(2, "advertises", resources(r.Advertised)+inUse)
	if limit := limitOf(&r.node.GPU); limit != "" {
		t.row(2, "limit", limit)
	}
	t.rows("plan", brief(r.Plan))
	t.rows("blocked by", r.BlockedBy)
	t.picture(r.node, r.Stack)
	if more := unlistedHolders(r); more != "" {
		t.row(2, "not shown", more)
	}
}

// profilesOf are the MIG profiles that GPUs of a node can have, and how many of each, a line for each product.
func profilesOf(n *cluster.Node) []string {
	var lines []string
	said := map[string]bool{}
	for _, d := range devicesOf(n) {
		if said[d.Product] || len(d.Profiles) == 0 {
			continue
		}
		said[d.Product] = true
		var profiles []string
		for _, p := range d.SmallestFirst() {
			profiles = append(profiles, fmt.Sprintf("%d × %s", p.Max, p.Name))
		}
		lines = append(lines, d.Product+": "+strings.Join(profiles, ", "))
	}
	return lines
}

// blockers are the pods and processes that block the change of a node, a line for each.
func blockers(n *v1alpha1.GPUNode) []string {
	lines := make([]string, 0, len(n.Status.Rollout.Blockers))
	for _, b := range n.Status.Rollout.Blockers {
		name := fmt.Sprintf("pod %s/%s", b.Namespace, b.Name)
		switch b.Kind {
		case v1alpha1.BlockerKindProcess:
			name = fmt.Sprintf("process %d (%s)", b.PID, b.Name)
		case v1alpha1.BlockerKindResourceClaim:
			name = fmt.Sprintf("ResourceClaim %s/%s", b.Namespace, b.Name)
		case v1alpha1.BlockerKindPod:
		}
		uses := ""
		for _, d := range n.Status.Devices {
			if d.UUID != b.DeviceUUID {
				continue
			}
			uses = fmt.Sprintf(" uses GPU %d", d.Index)
			for _, i := range d.Instances {
				if b.Instance != nil && i.ID == *b.Instance {
					uses += fmt.Sprintf(", instance %s at %d:%d", i.Profile, i.Start, i.Size)
				}
			}
		}
		lines = append(lines, fmt.Sprintf("%s%s: %s", name, uses, b.Handling))
	}
	return slices.Compact(lines)
}

// offers are the resources that a node advertises, or that NVIDIA's DRA driver publishes for it.
func offers(n *cluster.Node, stack dra.Stack) map[string]int64 {
	offers := map[string]int64{}
	for name, count := range n.Offered(stack) {
		put(offers, name, count)
	}
	return offers
}
