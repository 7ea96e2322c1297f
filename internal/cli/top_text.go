// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

const (
	// barWidth is how wide the memory of a GPU is drawn.
	barWidth = 40
	// unknown is what stands for a value that the driver does not report.
	unknown = "-"
	// overMark marks a container that uses more than its share.
	overMark = "!"
	percent  = 100
)

// top writes who uses the GPUs.
func (t *text) top(of string, nodes []measuredNode) {
	switch of {
	case "policy":
		t.topPolicies(nodes)
	case "pod":
		t.topPods(nodes)
	default:
		t.topNodes(nodes)
	}
	if strings.Contains(t.String(), " "+overMark+" ") {
		t.row(0, "", overMark+" uses more memory than its share")
	}
	if of != "node" {
		for _, n := range nodes {
			t.notMeasured(n)
		}
	}
}

// has reports whether something of that name is on a node.
func (n measuredNode) has(of, name string) bool {
	switch of {
	case "policy":
		return n.report.Policy == name
	case "pod":
		return slices.ContainsFunc(n.report.Units, func(u usage.Unit) bool {
			return slices.ContainsFunc(u.Containers, func(c usage.Container) bool { return c.Pod == name })
		})
	}
	return n.name == name
}

// notMeasured writes why a node, or a part of it, was not measured.
func (t *text) notMeasured(n measuredNode) {
	if n.failed != "" {
		t.row(0, "", fmt.Sprintf("NODE %s not measured: %s", n.name, n.failed))
	}
	if n.report.Incomplete != "" {
		t.row(0, "", fmt.Sprintf("NODE %s measured in part: %s", n.name, n.report.Incomplete))
	}
}

func (t *text) topNodes(nodes []measuredNode) {
	for _, n := range nodes {
		if n.failed == "" {
			t.row(0, "", fmt.Sprintf("NODE %s   %s", n.name, cmp.Or(n.report.Policy, "no policy")))
		}
		t.notMeasured(n)
		for i := range n.report.Units {
			t.unit(&n.report.Units[i])
		}
		for _, d := range n.report.Daemons {
			if d.OutdatedClients > 0 {
				t.row(2, "", fmt.Sprintf("%s: %d of %s keep the former limits until they end", d.Resource, d.OutdatedClients, count(int(d.Clients), "MPS client")))
			}
		}
		t.WriteString("\n")
	}
}

// unit draws a GPU or a MIG instance.
func (t *text) unit(u *usage.Unit) {
	indent := 2
	heading := []string{fmt.Sprintf("GPU %d", u.Index), u.Product, sharing(u)}
	if u.Instance != nil {
		indent = 4
		heading = []string{fmt.Sprintf("instance %d", *u.Instance), u.Profile}
		if u.Replicas > 1 {
			heading = append(heading, fmt.Sprintf("%d replicas", u.Replicas))
		}
	}
	if u.Utilization != nil {
		heading = append(heading, "utilization "+ratio(&u.Utilization.Compute))
	}
	t.row(indent, "", strings.Join(slices.DeleteFunc(heading, func(s string) bool { return s == "" }), "   "))
	t.row(indent, "", bar(u.Memory, barWidth-indent))
	t.containers(u, indent+2)
}

// sharing says how a GPU is shared.
func sharing(u *usage.Unit) string {
	switch {
	case u.Limits != nil && u.Limits.MemoryBytes != nil:
		return fmt.Sprintf("%s, %d replicas, each client at most %s and %s of the threads", u.Strategy, u.Replicas, size(u.Limits.MemoryBytes), ratio(&u.Limits.ActiveThreads))
	case u.Strategy == v1alpha1.StrategyTimeSlicing || u.Strategy == v1alpha1.StrategyMPS:
		return fmt.Sprintf("%s, %d replicas", u.Strategy, u.Replicas)
	}
	return string(u.Strategy)
}

// containers writes who uses a GPU or an instance, the largest first.
func (t *text) containers(u *usage.Unit, indent int) {
	if len(u.Containers) == 0 && u.OtherBytes == 0 {
		return
	}
	table, limited := newTable(), limitColumn(u.Containers)
	table.line(limited("LIMIT", "MEMORY", "SHARE", "SM", "", "CONTAINER")...)
	for _, c := range u.Containers {
		table.line(limited(limitText(c), size(c.MemoryBytes), size(c.ShareBytes), compute(c.Utilization), mark(c), c.Namespace+"/"+c.Pod+" "+c.Container)...)
	}
	if u.OtherBytes > 0 {
		table.line(limited(unknown, size(&u.OtherBytes), unknown, unknown, "", "(no container)")...)
	}
	t.table(table, indent)
}

// limitColumn inserts a column for the driver's limits after the share, if one of the containers has any.
func limitColumn(all []usage.Container) func(limit string, cells ...string) []string {
	has := slices.ContainsFunc(all, func(c usage.Container) bool { return c.LimitBytes != nil })
	return func(limit string, cells ...string) []string {
		if has {
			return slices.Insert(cells, 2, limit)
		}
		return cells
	}
}

// limitText is the limit of a container's pod, and whether the container alone comes near it.
func limitText(c usage.Container) string {
	const near = 90
	if c.LimitBytes != nil && c.MemoryBytes != nil && *c.MemoryBytes >= *c.LimitBytes/percent*near {
		return size(c.LimitBytes) + ", near"
	}
	return size(c.LimitBytes)
}

// topPods writes all containers, the largest first.
func (t *text) topPods(nodes []measuredNode) {
	type row struct {
		usage.Container

		where string
	}
	var rows []row
	for _, n := range nodes {
		for i := range n.report.Units {
			for _, c := range n.report.Units[i].Containers {
				rows = append(rows, row{c, n.name + " " + place(&n.report.Units[i])})
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int { return usage.ByUse(a.Container, b.Container) })
	containers := make([]usage.Container, len(rows))
	for i := range rows {
		containers[i] = rows[i].Container
	}
	table, limited := newTable(), limitColumn(containers)
	table.line(limited("LIMIT", "MEMORY", "SHARE", "SM", "", "NAMESPACE", "POD", "CONTAINER", "NODE, GPU")...)
	for _, r := range rows {
		table.line(limited(limitText(r.Container), size(r.MemoryBytes), size(r.ShareBytes), compute(r.Utilization), mark(r.Container),
			r.Namespace, r.Pod, r.Name.Container, r.where)...)
	}
	t.table(table, 0)
}

// place names a GPU or an instance.
func place(u *usage.Unit) string {
	if u.Instance == nil {
		return fmt.Sprintf("GPU %d", u.Index)
	}
	return fmt.Sprintf("GPU %d, instance %d %s", u.Index, *u.Instance, u.Profile)
}

// topPolicies sums up the nodes of each policy, the one that uses the most memory first.
func (t *text) topPolicies(nodes []measuredNode) {
	type sum struct {
		name                          string
		nodes, gpus, containers, over int
		used, total                   int64
	}
	sums := map[string]*sum{}
	for _, n := range nodes {
		if n.failed != "" {
			continue
		}
		s := sums[n.report.Policy]
		if s == nil {
			s = &sum{name: n.report.Policy}
			sums[n.report.Policy] = s
		}
		s.nodes++
		for _, u := range n.report.Units {
			if u.Instance == nil {
				s.gpus++
				if u.Memory != nil {
					s.used, s.total = s.used+u.Memory.Used, s.total+u.Memory.Total
				}
			}
			s.containers += len(u.Containers)
			for _, c := range u.Containers {
				if c.Over() {
					s.over++
				}
			}
		}
	}
	sorted := make([]*sum, 0, len(sums))
	for _, s := range sums {
		sorted = append(sorted, s)
	}
	slices.SortFunc(sorted, func(a, b *sum) int { return cmp.Or(cmp.Compare(b.used, a.used), cmp.Compare(a.name, b.name)) })
	table := newTable()
	table.line("POLICY", "NODES", "GPUS", "CONTAINERS", "OVER SHARE", "MEMORY")
	for _, s := range sorted {
		table.line(cmp.Or(s.name, "(none)"), fmt.Sprint(s.nodes), fmt.Sprint(s.gpus), fmt.Sprint(s.containers), fmt.Sprint(s.over),
			bar(&gpu.Memory{Total: s.total, Used: s.used}, barWidth/2))
	}
	t.table(table, 0)
}

// bar draws how much of a memory is used.
func bar(m *gpu.Memory, width int) string {
	if m == nil || m.Total <= 0 {
		return "memory is not reported by the driver"
	}
	used := int((m.Used*int64(width) + m.Total/2) / m.Total)
	if m.Used > 0 {
		used = max(used, 1)
	}
	used = min(used, width)
	part := float64(m.Used) / float64(m.Total)
	return fmt.Sprintf("[%s%s] %s of %s, %s", strings.Repeat("#", used), strings.Repeat(".", width-used), size(&m.Used), size(&m.Total), ratio(&part))
}

func mark(c usage.Container) string {
	if c.Over() {
		return overMark
	}
	return ""
}

// size is a number of bytes in GiB.
func size(n *int64) string {
	const gib = 1 << 30
	if n == nil {
		return unknown
	}
	return fmt.Sprintf("%.1f GiB", float64(*n)/gib)
}

func compute(u *gpu.Utilization) string {
	if u == nil {
		return unknown
	}
	return ratio(&u.Compute)
}

func ratio(r *float64) string {
	if r == nil {
		return unknown
	}
	return fmt.Sprintf("%.0f %%", *r*percent)
}

// table lines up columns.
type table struct {
	out    *strings.Builder
	writer *tabwriter.Writer
}

func newTable() table {
	out := &strings.Builder{}
	return table{out, tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)}
}

func (t table) line(cells ...string) {
	for i := range cells {
		cells[i] = printable(cells[i])
	}
	_, _ = fmt.Fprintln(t.writer, strings.Join(cells, "\t")) // a strings.Builder takes everything
}

// table writes a table. Its columns stay side by side where the terminal is narrow, as kubectl prints them.
func (t *text) table(from table, indent int) {
	_ = from.writer.Flush()
	for line := range strings.Lines(from.out.String()) {
		t.WriteString(strings.Repeat(" ", indent) + strings.TrimRight(line, " \n") + "\n")
	}
}
