// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package advice

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

const percent = 100

// Lines are the advice in words: a paragraph each.
func (a Advice) Lines() []string {
	f := a.Fleet
	lines := []string{fmt.Sprintf("%s, %d × %s on %s: %s, at most %d at the same time, observed for %s by %s.", governed(f.Policy), f.GPUs,
		f.Device.Product, nodes(f.Nodes), counted(len(f.Containers), "container"), f.Concurrent, long(f.Time), a.Source)}
	if len(f.Containers) > 0 {
		lines = append(lines, f.peaks())
	}
	for i := range a.Options {
		lines = append(lines, a.Options[i].line())
	}
	if a.OnDemand != "" {
		lines = append(lines, a.OnDemand)
	}
	if len(a.Lacks) > 0 {
		lines = append(lines, "Not known: "+strings.Join(a.Lacks, "; ")+".")
	}
	switch {
	case a.Best == nil:
		lines = append(lines, fmt.Sprintf("No advice: %s.", a.NoPolicy))
	case a.NoPolicy != "":
		lines = append(lines, fmt.Sprintf("Advised: %s. No policy is printed: %s.", a.Best.Name, a.NoPolicy))
	default:
		lines = append(lines, fmt.Sprintf("Advised: %s.", a.Best.Name))
	}
	return lines
}

func (o Option) line() string {
	if len(o.Against) > 0 {
		return fmt.Sprintf("%s does not fit: %s.", o.Name, strings.Join(o.Against, "; "))
	}
	if len(o.Notes) > 0 {
		return fmt.Sprintf("%s fits: %s.", o.Name, strings.Join(o.Notes, "; "))
	}
	return o.Name + " fits."
}

// peaks are the largest values and the containers that had them.
func (f Fleet) peaks() string {
	var memory, compute *Container
	unknown := 0
	for i := range f.Containers {
		c := &f.Containers[i]
		if c.MemoryBytes != nil && (memory == nil || *c.MemoryBytes > *memory.MemoryBytes) {
			memory = c
		}
		if c.Compute != nil && (compute == nil || *c.Compute > *compute.Compute) {
			compute = c
		}
		if c.Compute == nil {
			unknown++
		}
	}
	text := "They peaked at "
	if memory == nil {
		text += "a memory that the driver did not report"
	} else {
		text += fmt.Sprintf("%s (%s)", gibibytes(*memory.MemoryBytes), nameOf(*memory))
	}
	if compute == nil {
		return text + ". The driver reported no utilization of the multiprocessors."
	}
	text += fmt.Sprintf(" and %s of the multiprocessors (%s)", percentage(*compute.Compute), nameOf(*compute))
	if unknown > 0 {
		text += fmt.Sprintf(". The driver reported no utilization of %s", counted(unknown, "container"))
	}
	return text + "."
}

// YAML is the policy as a document for kubectl apply, without what has its default anyway.
func (a Advice) YAML() (string, error) {
	fields := map[string]any{}
	spec, err := json.Marshal(a.Policy.Spec)
	if err == nil {
		err = json.Unmarshal(spec, &fields)
	}
	if err != nil {
		return "", fmt.Errorf("writing policy %s: %w", a.Policy.Name, err)
	}
	data, err := yaml.Marshal(map[string]any{
		"apiVersion": v1alpha1.SchemeGroupVersion.String(), "kind": "GPUSharingPolicy",
		"metadata": map[string]any{"name": a.Policy.Name}, "spec": fields,
	})
	return string(data), err
}

func governed(policy string) string {
	if policy == "" {
		return "No policy"
	}
	return "Policy " + policy
}

func nodes(all []*cluster.Node) string {
	names := make([]string, 0, len(all))
	for _, n := range all {
		names = append(names, n.Name)
	}
	if len(names) == 1 {
		return "node " + names[0]
	}
	return "nodes " + format.List(names)
}

func nameOf(c Container) string { return c.Namespace + "/" + c.Pod + " " + c.Container }

func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func gibibytes(n int64) string {
	const gib = 1 << 30
	return fmt.Sprintf("%.1f GiB", float64(n)/gib)
}

func percentage(part float64) string { return fmt.Sprintf("%.0f %%", part*percent) }

// long is a time in the unit that suits it.
func long(d time.Duration) string {
	const day = 24 * time.Hour
	in := func(unit time.Duration, noun string) string {
		n := strings.TrimSuffix(fmt.Sprintf("%.1f", float64(d)/float64(unit)), ".0")
		if n == "1" {
			return "1 " + noun
		}
		return n + " " + noun + "s"
	}
	switch {
	case d >= 2*day:
		return in(day, "day")
	case d >= time.Hour:
		return in(time.Hour, "hour")
	}
	return in(time.Minute, "minute")
}
