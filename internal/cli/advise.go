// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/api"
	prometheus "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// commentWidth is how long the comments beside a policy are.
const commentWidth = 110

// adviseSharing prints which ways to share GPUs fit what containers used, and a policy for the best. All but the policy
// is comments.
func (p *Program) adviseSharing(ctx context.Context, f *flags, args []string) error {
	scope, err := scopeOf(args)
	if err != nil {
		return err
	}
	if f.minAge <= 0 || f.prometheus != "" && f.window < f.minAge {
		return hint(fmt.Errorf("--min-age must be longer than 0, and --window as long at the least, not %s and %s", f.minAge, f.window))
	}
	agents, err := dial(f)
	if err != nil {
		return err
	}
	s, _, err := p.read(ctx, agents.client, f.namespace)
	if err != nil {
		return advise(err)
	}
	if err := scopeExists(s, scope); err != nil {
		return err
	}
	cluster := advice.Cluster{Nodes: s.Nodes, Policies: s.Policies, Plugin: s.Plugin, MinAge: f.minAge, Scope: scope}
	if cluster.Seen, err = p.seen(ctx, f, agents, scope.Namespace); err != nil {
		return advise(err)
	}
	all, err := advice.Of(cluster)
	if err != nil {
		return fmt.Errorf("%w; wait, or lower --min-age", err)
	}
	var out strings.Builder
	for i, a := range all {
		if i > 0 {
			out.WriteString("\n")
		}
		comment(&out, a.Lines()...)
		if err := printPolicy(ctx, &out, agents.client, s, a); err != nil {
			return advise(err)
		}
	}
	return p.write(out.String())
}

// scopeOf reads the arguments of advise.
func scopeOf(args []string) (advice.Scope, error) {
	const both = 2
	switch {
	case len(args) == 0:
		return advice.Scope{}, nil
	case len(args) == both && args[0] == "policy":
		return advice.Scope{Policy: args[1]}, nil
	case len(args) == both && args[0] == "node":
		return advice.Scope{Node: args[1]}, nil
	case len(args) == both && args[0] == "namespace":
		return advice.Scope{Namespace: args[1]}, nil
	}
	return advice.Scope{}, hint(fmt.Errorf("advise takes nothing, or policy, node or namespace and a name, not %q", strings.Join(args, " ")))
}

func scopeExists(snapshot cluster.Snapshot, s advice.Scope) error {
	q := query{policy: s.Policy}
	if s.Node != "" {
		q.names = []string{s.Node}
	}
	return q.check(snapshot)
}

// seen is what Prometheus or the agents have observed.
func (p *Program) seen(ctx context.Context, f *flags, agents *agents, namespace string) (advice.Seen, error) {
	if f.prometheus != "" {
		return askPrometheus(ctx, f.prometheus, advice.Queries(f.window, namespace), p.Clock.Now())
	}
	histories, lacks, err := agents.histories(ctx, p.Clock.Now())
	if err != nil {
		return advice.Seen{}, err
	}
	seen := advice.FromAgents(histories, namespace)
	seen.Lacks = append(seen.Lacks, lacks...)
	return seen, nil
}

// printPolicy prints the policy and what it would change, or that it would change nothing.
func printPolicy(ctx context.Context, out *strings.Builder, c client.Client, s cluster.Snapshot, a advice.Advice) error {
	if a.Policy == nil {
		return nil
	}
	document, err := a.YAML()
	if err != nil {
		return err
	}
	submitted, err := parse([]byte(document))
	if err != nil {
		return err
	}
	admitted, err := admit(ctx, c, submitted[0])
	switch {
	case apierrors.IsForbidden(err):
		out.WriteString("---\n" + document)
		comment(out, "What it changes is not shown, because you may not create policies, not even in a dry run: "+advise(err).Error())
		return nil
	case err != nil:
		return fmt.Errorf("policy %s: %w", a.Policy.Name, err)
	}
	same := func(p v1alpha1.GPUSharingPolicy) bool {
		return p.Name == admitted.Name && equality.Semantic.DeepEqual(p.Spec, admitted.Spec)
	}
	if slices.ContainsFunc(s.Policies, same) {
		comment(out, fmt.Sprintf("Policy %s shares these GPUs so already.", admitted.Name))
		return nil
	}
	if at := slices.IndexFunc(s.Policies, named(admitted.Name)); at >= 0 {
		if left := unremovable(&s.Policies[at], admitted); len(left) > 0 {
			comment(out, fmt.Sprintf("kubectl apply would leave %s in policy %s, because it did not set it. Change the policy where it is managed, or pipe "+
				"this output to `kubectl replace -f -`, which also removes the labels and annotations of the policy.", format.List(left), admitted.Name))
		}
	}
	out.WriteString("---\n" + document)
	preview := text{width: commentWidth}
	preview.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{*admitted}})
	comment(out, "What it would change, as kubectl gpusharing plan prints it:")
	for line := range strings.Lines(preview.String()) {
		out.WriteString(strings.TrimRight("#   "+inline(strings.TrimRight(line, "\n")), " ") + "\n")
	}
	return nil
}

// unremovable are the fields of a policy that kubectl apply would leave, though the policy is to have them no more:
// those that it has not set.
func unremovable(present, wanted *v1alpha1.GPUSharingPolicy) []string {
	var applied struct {
		Spec map[string]any `json:"spec"`
	}
	_ = json.Unmarshal([]byte(present.Annotations[corev1.LastAppliedConfigAnnotation]), &applied) // one that is damaged sets nothing
	return beyond("spec", fieldsOf(present.Spec), fieldsOf(wanted.Spec), applied.Spec)
}

// fieldsOf is a spec as JSON has it.
func fieldsOf(spec v1alpha1.GPUSharingPolicySpec) map[string]any {
	fields := map[string]any{}
	if raw, err := json.Marshal(spec); err == nil { // one that came as JSON
		_ = json.Unmarshal(raw, &fields)
	}
	return fields
}

// beyond are the fields that one has, that are not wanted, and that were not applied.
func beyond(path string, has, wanted, applied map[string]any) (left []string) {
	for _, name := range slices.Sorted(maps.Keys(has)) {
		inner, _ := has[name].(map[string]any)
		want, wants := wanted[name]
		was, set := applied[name]
		switch {
		case !wants && !set:
			left = append(left, path+"."+name)
		case wants && inner != nil:
			deeper, _ := want.(map[string]any)
			before, _ := was.(map[string]any)
			left = append(left, beyond(path+"."+name, inner, deeper, before)...)
		}
	}
	return left
}

// comment writes paragraphs as comments of YAML.
func comment(out *strings.Builder, paragraphs ...string) {
	for _, paragraph := range paragraphs {
		for i, line := range wrap(inline(paragraph), commentWidth) {
			lead := "# "
			if i > 0 {
				lead = "#   "
			}
			out.WriteString(lead + line + "\n")
		}
	}
}

// inline is a text without what ends a line of YAML. Names come from agents and from Prometheus, and what follows is
// applied.
func inline(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Zl, unicode.Zp) {
			return utf8.RuneError
		}
		return r
	}, printable(s))
}

// queryTimeout bounds one question to Prometheus, which may have to look through days of samples.
const queryTimeout = time.Minute

// askPrometheus asks a Prometheus of that URL.
func askPrometheus(ctx context.Context, url string, queries map[advice.Query]string, now time.Time) (advice.Seen, error) {
	c, err := api.NewClient(api.Config{Address: url})
	if err != nil {
		return advice.Seen{}, hint(fmt.Errorf("--prometheus %q is no URL: %w", url, err))
	}
	answers, warned := map[advice.Query][]advice.Sample{}, []string{}
	for name, query := range queries {
		samples, warnings, err := ask(ctx, prometheus.NewAPI(c), query, now)
		if err != nil {
			return advice.Seen{}, fmt.Errorf("asking Prometheus for %s (%s): %w", name, query, err)
		}
		answers[name] = samples
		warned = append(warned, warnings...)
	}
	seen := advice.FromPrometheus(answers, now)
	if len(warned) > 0 {
		seen.Lacks = append(seen.Lacks, "Prometheus warned: "+strings.Join(warned, ", "))
	}
	return seen, nil
}

func ask(ctx context.Context, from prometheus.API, query string, now time.Time) ([]advice.Sample, []string, error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	answer, warnings, err := from.Query(ctx, query, now)
	if err != nil {
		return nil, nil, err
	}
	vector, is := answer.(model.Vector)
	if !is {
		return nil, nil, fmt.Errorf("it answered with a %s", answer.Type())
	}
	samples := make([]advice.Sample, 0, len(vector))
	for _, s := range vector {
		labels := make(map[string]string, len(s.Metric))
		for name, value := range s.Metric {
			labels[string(name)] = string(value)
		}
		samples = append(samples, advice.Sample{Labels: labels, Value: float64(s.Value)})
	}
	return samples, warnings, nil
}
