// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/cli-runtime/pkg/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// plan prints what policies would do, and what the deletion of others would. The API server checks and completes the
// former in a dry run; then the same decision is made as the controller will make, before and after.
func (p *Program) plan(ctx context.Context, f *flags, rest []string) error {
	if len(rest) > 0 || len(f.files)+len(f.deleted) == 0 {
		return hint(errNoFile)
	}
	submitted, err := p.policies(f.files, f.recursive)
	if err != nil {
		return err
	}
	c, err := connect(f)
	if err != nil {
		return err
	}
	asked, s, err := p.ask(ctx, c, f.namespace, submitted, f.deleted)
	if err != nil {
		return err
	}
	asked.otherStack = f.stacks
	var preview string
	if f.output != "" {
		preview, err = marshal(planOf(s, asked), f.output)
	} else {
		preview, err = planText(ctx, c, s, asked, p.Width)
	}
	if err != nil {
		return err
	}
	if err := p.write(preview); err != nil {
		return err
	}
	if o := outcomeOf(s, asked); o != NoChange {
		return o
	}
	return nil
}

// ask lets the API server check policies in a dry run, and reads the cluster that they and the deletion of others would
// change. The namespace is that of ownNamespaces.
func (p *Program) ask(
	ctx context.Context, c client.Client, namespace string, submitted []*unstructured.Unstructured, deleted []string,
) (change, cluster.Snapshot, error) {
	asked := change{deleted: deleted}
	var unchecked []string
	for _, u := range submitted {
		policy, err := admit(ctx, c, u)
		if apierrors.IsForbidden(err) {
			unchecked = append(unchecked, u.GetName())
			policy, err = uncheckedPolicy(u)
		}
		if err != nil {
			return asked, cluster.Snapshot{}, advise(fmt.Errorf("policy %s: %w", u.GetName(), err))
		}
		asked.applied = append(asked.applied, *policy)
	}
	s, told, err := p.read(ctx, c, namespace)
	if err != nil {
		return asked, s, advise(err)
	}
	if asked.lacks = told.lacks; len(unchecked) > 0 {
		asked.lacks = append(asked.lacks, fmt.Sprintf("You may not write policies, so the API server has not checked %s: only unknown fields are refused here. With the "+
			"ClusterRole gpu-sharing-edit it does, in a dry run", strings.Join(unchecked, ", ")))
	}
	if err := knows(s, asked); err != nil {
		return asked, s, err
	}
	asked.found, err = configBefore(ctx, c)
	return asked, s, advise(err)
}

// policies reads the policies of files, folders and URLs; "-" is stdin.
func (p *Program) policies(files []string, recursive bool) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	named := slices.DeleteFunc(slices.Clone(files), func(file string) bool { return file == "-" })
	if len(named) < len(files) {
		data, err := io.ReadAll(p.In)
		if err != nil {
			return nil, fmt.Errorf("reading stdin: %w", err)
		}
		if all, err = parse(data); err != nil {
			return nil, fmt.Errorf("reading stdin: %w", err)
		}
	}
	if len(named) == 0 {
		return all, nil
	}
	builder := resource.NewLocalBuilder().Unstructured().FilenameParam(false, &resource.FilenameOptions{Filenames: named, Recursive: recursive})
	found, err := builder.Flatten().Do().Infos()
	if err != nil {
		return nil, fmt.Errorf("reading policies: %w", err)
	}
	if len(found) == 0 { // a pipeline would take it for no change
		return nil, fmt.Errorf("reading %s: %w", strings.Join(named, ", "), errNoPolicy)
	}
	for _, info := range found {
		u, is := info.Object.(*unstructured.Unstructured)
		if !is {
			return nil, fmt.Errorf("reading %s: it holds a %T", info.Source, info.Object)
		}
		if err := isPolicy(u); err != nil {
			return nil, fmt.Errorf("reading %s: %w", info.Source, err)
		}
		all = append(all, u)
	}
	return all, nil
}

var errNoPolicy = errors.New("it holds no GPUSharingPolicy")

// parse finds the policies in YAML or JSON.
func parse(data []byte) ([]*unstructured.Unstructured, error) {
	const lookAhead = 4096 // characters that tell YAML from JSON
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), lookAhead)
	var found []*unstructured.Unstructured
	for {
		u := &unstructured.Unstructured{}
		err := decoder.Decode(&u.Object)
		switch {
		case errors.Is(err, io.EOF) && len(found) == 0:
			return nil, errNoPolicy
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil:
			return nil, err
		case len(u.Object) == 0:
			continue
		}
		if err := isPolicy(u); err != nil {
			return nil, err
		}
		found = append(found, u)
	}
}

func isPolicy(u *unstructured.Unstructured) error {
	want := v1alpha1.SchemeGroupVersion.WithKind("GPUSharingPolicy")
	if got := u.GroupVersionKind(); got != want {
		return fmt.Errorf("it holds a %q of %q, but plan takes policies only: kind %s, apiVersion %s",
			got.Kind, got.GroupVersion(), want.Kind, want.GroupVersion())
	}
	if u.GetName() == "" {
		return errors.New("a policy has no metadata.name")
	}
	return nil
}

// admit lets the API server check a policy and fill in defaults, in a dry run: created if there is none of that name,
// and otherwise with its spec in place of the present one.
func admit(ctx context.Context, c client.Client, u *unstructured.Unstructured) (*v1alpha1.GPUSharingPolicy, error) {
	present := &v1alpha1.GPUSharingPolicy{}
	err := c.Get(ctx, types.NamespacedName{Name: u.GetName()}, present)
	switch {
	case apierrors.IsNotFound(err):
		answer := u.DeepCopy()
		if err := c.Create(ctx, answer, client.DryRunAll); err != nil {
			return nil, err
		}
		return typed(answer)
	case err != nil:
		return nil, err
	}
	patch, err := json.Marshal([]map[string]any{{"op": "replace", "path": "/spec", "value": u.Object["spec"]}})
	if err != nil {
		return nil, fmt.Errorf("encoding its spec: %w", err)
	}
	if err := c.Patch(ctx, present, client.RawPatch(types.JSONPatchType, patch), client.DryRunAll); err != nil {
		return nil, err
	}
	return present, nil
}

// uncheckedPolicy is a policy as it was submitted, for a user who may not ask the API server to check it. Unknown fields
// are an error. What the schema would fill in, the engine takes for granted.
func uncheckedPolicy(u *unstructured.Unstructured) (*v1alpha1.GPUSharingPolicy, error) {
	data, err := u.MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("encoding it: %w", err)
	}
	policy := &v1alpha1.GPUSharingPolicy{}
	if err := sigsyaml.UnmarshalStrict(data, policy); err != nil {
		return nil, fmt.Errorf("reading it: %w", err)
	}
	return policy, nil
}

func typed(u *unstructured.Unstructured) (*v1alpha1.GPUSharingPolicy, error) {
	policy := &v1alpha1.GPUSharingPolicy{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, policy); err != nil {
		return nil, fmt.Errorf("reading the answer of the API server: %w", err)
	}
	return policy, nil
}

// planReport is what plan prints for programs.
type planReport struct {
	// Unread is what is not known, because the user may not read it.
	Unread []string `json:"unread,omitempty"`
	// Outcome is NoChange, NonDisruptive, Disruptive or Unsatisfiable: by it plan exits with 0, 2, 3 or 4.
	Outcome  string          `json:"outcome"`
	Policies []plannedPolicy `json:"policies"`
	// Nodes are those that one of the policies governs before the change or after it.
	Nodes []plannedNode `json:"nodes"`
}

// The values of plannedPolicy.Change.
const (
	changeCreate = "Create"
	changeUpdate = "Update"
	changeDelete = "Delete"
	changeNone   = "None" // the policy is in the cluster as it is
)

type plannedPolicy struct {
	Name   string `json:"name"`
	Change string `json:"change"`
	// Status is the first that the controller would write; nil: the policy is deleted.
	Status *v1alpha1.GPUSharingPolicyStatus `json:"status,omitempty"`
}

type plannedNode struct {
	Name string `json:"name"`
	// FormerPolicy governs the node before the change, Policy after it; empty: none does.
	FormerPolicy string `json:"formerPolicy,omitempty"`
	Policy       string `json:"policy,omitempty"`
	// State, Reason and Message are those with which the rollout begins on the node.
	State   string `json:"state"`
	Reason  string `json:"reason"`
	Message string `json:"message,omitempty"`
	// Advertised are the resources that the node offers now. Expected are those that it offers once it is in the
	// desired state or, where it cannot be, goes on to offer; it is absent where no policy governs the node.
	Advertised map[string]int64 `json:"advertised"`
	Expected   map[string]int64 `json:"expected,omitempty"`
	Steps      []string         `json:"steps"`
	BlockedBy  []string         `json:"blockedBy,omitempty"`
}

// planOf is what would happen after a change of the policies.
func planOf(s cluster.Snapshot, c change) planReport {
	before, after := rollout.Decide(s), rollout.Decide(c.of(s))
	report := planReport{Unread: c.lacks, Outcome: outcomeOf(s, c).name(), Policies: []plannedPolicy{}, Nodes: []plannedNode{}}
	names := slices.Clone(c.deleted)
	for _, policy := range c.applied {
		names = append(names, policy.Name)
		status := after.Policies[policy.Name]
		report.Policies = append(report.Policies, plannedPolicy{policy.Name, changeOf(s, &policy), &status})
	}
	for _, name := range c.deleted {
		report.Policies = append(report.Policies, plannedPolicy{Name: name, Change: changeDelete})
	}
	was, selected := map[string]string{}, map[string]string{}
	for _, n := range before.Nodes {
		was[n.Node] = n.Policy
	}
	for i := range s.Nodes {
		selected[s.Nodes[i].Name] = s.Nodes[i].Labels[v1alpha1.LabelConfig]
	}
	for _, n := range after.Nodes {
		if slices.Contains(names, n.Policy) || slices.Contains(names, was[n.Node]) {
			report.Nodes = append(report.Nodes, plannedNodeOf(n, was[n.Node], selected[n.Node]))
		}
	}
	return report
}

// plannedNodeOf is a node after a change, with the policy that governed it before and the configuration that it selects
// now.
func plannedNodeOf(n rollout.NodeState, was, selected string) plannedNode {
	planned := plannedNode{
		Name: n.Node, FormerPolicy: was, Policy: n.Policy, State: string(n.State), Reason: n.Reason, Message: n.Message,
		Advertised: map[string]int64{}, Steps: append([]string{}, steps(n, selected)...),
	}
	maps.Copy(planned.Advertised, n.Advertised)
	if n.Policy != "" {
		planned.Expected = thenOffered(&n)
	}
	for _, b := range n.Blockers {
		planned.BlockedBy = append(planned.BlockedBy, b.String())
	}
	return planned
}

// OutcomeError is what a plan comes to, by which a pipeline decides whether to go on. It is the exit code of plan, and no
// failure of the command.
type OutcomeError int

// The outcomes. 1 is left to commands that fail.
const (
	// NoChange: the policies are in the cluster as they are.
	NoChange OutcomeError = 0
	// NonDisruptive: no GPU and no instance must be idle for it.
	NonDisruptive OutcomeError = 2
	// Disruptive: some must, so that pods wait or are evicted; or workloads would find nothing to run on; or a node does
	// not report, so that it is not known.
	Disruptive OutcomeError = 3
	// Unsatisfiable: a policy is not accepted, for another reason than that one of higher priority governs some of its
	// nodes; or a node that it selects cannot satisfy it.
	Unsatisfiable OutcomeError = 4
)

// words are the name of the outcome, and what it means.
func (o OutcomeError) words() (name, means string) {
	switch o {
	case NoChange:
		return "NoChange", "the policies are in the cluster as they are"
	case NonDisruptive:
		return "NonDisruptive", "no GPU has to be idle for it"
	case Disruptive:
		return "Disruptive", "GPUs have to be idle for it, or workloads find nothing to run on"
	case Unsatisfiable:
	}
	return "Unsatisfiable", "a policy is not accepted, or nodes that it selects cannot satisfy it"
}

func (o OutcomeError) name() string {
	name, _ := o.words()
	return name
}

// Error is the outcome as the last line of a plan says it.
func (o OutcomeError) Error() string {
	name, means := o.words()
	return fmt.Sprintf("%s: %s (exit code %d)", name, means, int(o))
}

// changeOf is what applying a policy is for it.
func changeOf(s cluster.Snapshot, p *v1alpha1.GPUSharingPolicy) string {
	at := slices.IndexFunc(s.Policies, named(p.Name))
	switch {
	case at < 0:
		return changeCreate
	case equality.Semantic.DeepEqual(s.Policies[at].Spec, p.Spec):
		return changeNone
	}
	return changeUpdate
}

// outcomeOf is the worst that a change of policies comes to. A policy that is unchanged counts for nothing.
func outcomeOf(s cluster.Snapshot, c change) OutcomeError {
	then := c.of(s)
	before, after := rollout.Decide(s), rollout.Decide(then)
	worst, names := NoChange, slices.Clone(c.deleted)
	for _, name := range c.deleted {
		if worst = max(worst, NonDisruptive); len(lost(name, c, s, before.Nodes, after.Nodes)) > 0 {
			worst = Disruptive
		}
	}
	for i := range c.applied {
		p := &c.applied[i]
		if changeOf(s, p) == changeNone {
			continue
		}
		names, worst = append(names, p.Name), max(worst, NonDisruptive)
		if takes(&s, after.Unmet[p.Name]) {
			worst = max(worst, Disruptive)
		}
		accepted, _ := condition.Find(after.Policies[p.Name].Conditions, v1alpha1.ConditionAccepted)
		intended := accepted.Reason == v1alpha1.ReasonConflicted && rollout.YieldsByPriority(&then, p.Name)
		if accepted.Status == metav1.ConditionFalse && !intended {
			worst = Unsatisfiable
		}
	}
	was := map[string]rollout.NodeState{}
	for _, n := range before.Nodes {
		was[n.Node] = n
	}
	for _, n := range after.Nodes {
		if b := was[n.Node]; slices.Contains(names, n.Policy) || slices.Contains(names, b.Policy) {
			worst = max(worst, outcomeOn(&b, &n))
		}
	}
	return worst
}

// takes reports whether one of the unmet requests is for what a node offers now.
func takes(s *cluster.Snapshot, unmet []string) bool {
	return slices.ContainsFunc(unmet, func(line string) bool {
		request := strings.Join(rollout.UnmetRequests(line), "")
		return slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool {
			return n.Offered(s.Plugin.StackOf(&n))[request[strings.LastIndex(request, " ")+1:]] > 0
		})
	})
}

// outcomeOn is what a change comes to on a node.
func outcomeOn(before, after *rollout.NodeState) OutcomeError {
	switch after.State {
	case node.Unsupported:
		return Unsatisfiable
	case node.UpToDate:
		return NoChange
	case node.PendingNonDisruptive, node.Selecting, node.Verifying, node.Finishing, node.Degraded:
		return NonDisruptive
	case node.Unknown, node.PendingDisruptive, node.Draining, node.StoppingOperands, node.Idle, node.Applying, node.Failed:
	}
	if before.Policy == after.Policy && before.ConfigName == after.ConfigName && reflect.DeepEqual(before.Devices, after.Devices) {
		return NonDisruptive // it was on its way there before
	}
	return Disruptive
}
