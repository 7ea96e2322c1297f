// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package importer describes by policies how the GPUs of a cluster are shared already: by keys of NVIDIA's
// device-plugin ConfigMap, labels on nodes, MIG instances, or by NVIDIA's DRA driver. It is pure.
//
// A policy that it writes changes nothing on the nodes that it selects: what it would change is compared with what is
// there, as far as the agents report it. What no policy can say is told in words, never left out in silence.
package importer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Cluster is how GPUs are shared in a cluster.
type Cluster struct {
	// ConfigMap is the name of the ConfigMap that the device plugin reads; empty if it reads none.
	ConfigMap string
	// Configs is its content: the configurations of the device plugin by key.
	Configs map[string]string
	// Default is the key for nodes without a label. DefaultUnread is why it is not known; empty: it is.
	Default, DefaultUnread string
	// MIGStrategy is ClusterPolicy.spec.mig.strategy, which overrules flags.migStrategy of every key; empty: it does
	// not.
	MIGStrategy string
	// MIGConfigs is the content of the key config.yaml of mig-manager's ConfigMap; empty: it has the built-in layouts.
	MIGConfigs string
	// Unread is why it is not known which configurations the device plugin reads, and what to do about it; empty: it is
	// known.
	Unread string
	// Nodes are the nodes that have GPUs; those without a GPUNode have no agent yet.
	Nodes []cluster.Node
	// GPUOperator says that NVIDIA's GPU Operator runs the device plugin.
	GPUOperator bool
	// Workload is what nodes are for whose label does not tell it, see policy.OptedOut.
	Workload string
	// Policies are those that exist already.
	Policies []v1alpha1.GPUSharingPolicy
	// Classes are the DeviceClasses, where NVIDIA's DRA driver serves a node.
	Classes []dra.Class
	// Lacks is what is not known of that, because the user may not read it.
	Lacks []string
	// Waits is why a policy that is applied now has to wait before it changes anything; empty: it need not.
	Waits string
}

// labelHostname names one node, and so do the names of those that an autoscaler adds.
const labelHostname = "kubernetes.io/hostname"

// Description is what is there, in policies and in words.
type Description struct {
	// Policies describe nodes; each with what it cannot say of them.
	Policies []Policy
	// Rest is what no policy describes, and why.
	Rest []string
	// Unknown says that GPUs may be shared though no policy describes it.
	Unknown bool
	// Waits is why the policies have to wait once they are applied; empty: they need not.
	Waits string
}

// Policy is a policy with what it cannot say.
type Policy struct {
	Name  string
	Spec  v1alpha1.GPUSharingPolicySpec
	Notes []string
}

// found is how one node is shared.
type found struct {
	node      *cluster.Node
	name      string // of the policy, as it may be called
	sharing   v1alpha1.Sharing
	notes     []string
	byDefault bool // no label of the node chose it
	whole     bool // its GPUs are not shared, so it needs no policy
}

// Describe describes a cluster. The same cluster gives the same description.
func Describe(c Cluster) Description {
	byPlugin := func(n cluster.Node) bool { return c.stackOf(&n) == dra.DevicePlugin }
	d := Description{Unknown: c.Unread != "" && slices.ContainsFunc(c.Nodes, byPlugin), Waits: c.Waits}
	var groups []*group
	nodes := slices.SortedFunc(slices.Values(c.Nodes), func(a, b cluster.Node) int { return strings.Compare(a.Name, b.Name) })
	rest, ranking := notes{}, policy.Rank(c.Policies)
	for i := range nodes {
		n := &nodes[i]
		if by := n.GPU.Spec.PolicyName; by != "" {
			rest.add(fmt.Sprintf("policy %s governs already", by), n.Name)
			continue
		}
		if by := ranking.Govern(policy.Node{Name: n.Name, Labels: n.Labels, Devices: n.GPU.Status.Devices}).By; by != nil && by.Spec.Priority >= 0 {
			rest.add(fmt.Sprintf("policy %s selects already, and another would conflict with it. `kubectl gpusharing status` says why it is not honoured there", by.Name), n.Name)
			d.Unknown = true
			continue
		}
		f, why := c.describe(n)
		if why != "" {
			rest.add(why, n.Name)
			d.Unknown = d.Unknown || !f.whole
			continue
		}
		groups = join(groups, f)
	}
	d.Policies = policiesOf(groups, nodes, c.Policies)
	d.Rest = slices.Concat(c.unused(nodes), c.Lacks, rest.list())
	return d
}

// notes are things to say, each of the nodes of which it is so.
type notes struct {
	order []string
	nodes map[string][]string
}

func (n *notes) add(what, node string) {
	if n.nodes == nil {
		n.nodes = map[string][]string{}
	}
	if n.nodes[what] == nil {
		n.order = append(n.order, what)
	}
	n.nodes[what] = append(n.nodes[what], node)
}

func (n *notes) list() []string {
	said := make([]string, 0, len(n.order))
	for _, what := range n.order {
		said = append(said, fmt.Sprintf("%s: %s", named(n.nodes[what]), what))
	}
	return said
}

// named names nodes, the first few of many.
func named(nodes []string) string {
	const most = 6
	noun := "nodes "
	if len(nodes) == 1 {
		noun = "node "
	}
	if len(nodes) > most {
		return fmt.Sprintf("%s%s and %d more", noun, strings.Join(nodes[:most], ", "), len(nodes)-most)
	}
	return noun + strings.Join(nodes, ", ")
}

// stackOf returns which of NVIDIA's programs offers the GPUs of a node.
func (c Cluster) stackOf(n *cluster.Node) dra.Stack {
	plugin := cluster.DevicePlugin{ClusterPolicy: c.GPUOperator}
	return plugin.StackOf(n)
}

// describe finds how a node is shared; why says that no policy is to describe it.
func (c Cluster) describe(n *cluster.Node) (f found, why string) {
	if c.stackOf(n) != dra.DevicePlugin {
		return c.driven(n)
	}
	f.node = n
	if problem := policy.OptedOut(n.Labels, c.Workload); problem != nil {
		return f, problem.Message
	}
	if c.Unread != "" {
		return f, c.Unread
	}
	key, config, why := c.configOf(n, &f)
	if why != "" {
		return f, why
	}
	if c.MIGStrategy != "" {
		config.Flags[flagMIGStrategy] = c.MIGStrategy
	}
	f.notes = append(f.notes, config.lost()...)
	gpus, err := c.gpusOf(n, &f)
	if err != nil {
		return f, err.Error()
	}
	left := f.notes
	f.sharing, err = config.sharing(gpus, &f)
	if errors.Is(err, errNothing) {
		if why := c.changes(n, v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}); why != "" {
			return f, strings.Join(append([]string{why}, left...), "; ")
		}
	}
	if err != nil {
		f.whole = errors.Is(err, errNothing)
		return f, strings.Join(append([]string{err.Error()}, left...), "; ")
	}
	if why := cmp.Or(config.given(), c.changes(n, f.sharing)); why != "" {
		return f, strings.Join(append([]string{why}, left...), "; ")
	}
	f.name = cmp.Or(key, n.Labels[v1alpha1.LabelMIGConfig], "shared")
	if f.sharing.Strategy == v1alpha1.StrategyMIG && n.Labels[v1alpha1.LabelMIGConfig] != "" {
		f.name = n.Labels[v1alpha1.LabelMIGConfig]
	}
	return f, ""
}

// configOf is the configuration of the device plugin that a node has, with its key; why says that no policy can describe it.
func (c Cluster) configOf(n *cluster.Node, f *found) (key string, config configuration, why string) {
	config = configuration{Flags: map[string]any{}}
	key, chosen := n.Labels[v1alpha1.LabelConfig], true
	if key != "" {
		f.notes = append(f.notes, c.selecting(n)...)
	}
	if key == "" {
		key, chosen = c.Default, false
	}
	if c.ConfigMap == "" { // then neither has an effect
		key, chosen = "", false
	}
	f.byDefault = !chosen && key != ""
	data, there := c.Configs[key]
	switch {
	case !chosen && c.DefaultUnread != "":
		return key, config, c.DefaultUnread
	case key == "":
		return key, config, ""
	case !there && !chosen:
		return key, config, fmt.Sprintf("the device plugin has the key %q for nodes without the label %s, and %s does not hold it; NVIDIA's config-manager fails "+
			"there, so correct config.default of NVIDIA's chart, or label the node", key, v1alpha1.LabelConfig, c.ConfigMap)
	case !there:
		return key, config, fmt.Sprintf("the label selects the key %q, which %s does not hold; NVIDIA's config-manager fails there, so "+
			"remove or correct the label %s", key, c.ConfigMap, v1alpha1.LabelConfig)
	}
	config, err := parse(data)
	if err != nil {
		return key, config, fmt.Sprintf("no policy can describe the key %q: %v", key, err)
	}
	return key, config, ""
}

// changes says what a policy with this sharing would change on a node; empty: nothing, or the node does not tell.
func (c Cluster) changes(n *cluster.Node, s v1alpha1.Sharing) string {
	known := func(d v1alpha1.DeviceStatus) bool { return !d.MIGCapable || len(d.Profiles) > 0 }
	devices := plan.WithProfiles(n.GPU.Status.Devices)
	if len(devices) == 0 || slices.ContainsFunc(devices, func(d v1alpha1.DeviceStatus) bool { return !known(d) }) {
		return ""
	}
	stack := c.stackOf(n)
	as := policy.Node{Name: n.Name, Labels: n.Labels, Devices: devices, Stack: stack}
	as.Shares, _ = n.Published.Shares()
	want, err := policy.DesiredState(&v1alpha1.GPUSharingPolicy{Spec: v1alpha1.GPUSharingPolicySpec{Sharing: s}}, as)
	if err != nil {
		return fmt.Sprintf("the operator refuses it there: %v", err)
	}
	for _, d := range want.Devices {
		at := slices.IndexFunc(devices, func(have v1alpha1.DeviceStatus) bool { return have.UUID == d.UUID })
		if have := devices[at].Sharing; (have.MIGMode == v1alpha1.MIGModeEnabled) != (d.Sharing.MIGMode == v1alpha1.MIGModeEnabled) ||
			!slices.Equal(have.Instances, d.Sharing.Instances) {
			return fmt.Sprintf("a policy would change the instances of GPU %d", devices[at].Index)
		}
	}
	offers := n.OfferedGPUs(stack)
	for name, sick := range n.Unhealthy(want.Config.Resources) {
		offers[name] += sick
	}
	if len(offers) > 0 && !maps.Equal(offers, want.Config.Resources) {
		return fmt.Sprintf("it offers %s, and a policy would make it %s. Look at the logs of NVIDIA's device plugin there, and import again", counted(offers), counted(want.Config.Resources))
	}
	return ""
}

// counted names resources with their numbers.
func counted(resources map[string]int64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		parts = append(parts, fmt.Sprintf("%s: %d", name, resources[name]))
	}
	return strings.Join(parts, ", ")
}

// selecting is what to know of the label by which a node selects a key.
func (c Cluster) selecting(n *cluster.Node) (notes []string) {
	if n.Annotations[cluster.AnnotationMachine] != "" {
		notes = append(notes, "OpenShift copies the labels of a MachineSet to its nodes again and again. If "+v1alpha1.LabelConfig+
			" is among these labels (spec.template.spec.metadata.labels), remove the label from the MachineSet before you apply the policy, "+
			"because the operator changes it")
	}
	if c.ConfigMap == "" {
		notes = append(notes, fmt.Sprintf("the label %s=%s has no effect, because the ClusterPolicy names no ConfigMap of the device plugin",
			v1alpha1.LabelConfig, n.Labels[v1alpha1.LabelConfig]))
	}
	return notes
}

// unused are the keys of the ConfigMap that no node selects. Those of its own the operator removes.
func (c Cluster) unused(nodes []cluster.Node) []string {
	if strings.HasSuffix(c.ConfigMap, "/"+cluster.ConfigMapName) {
		return nil
	}
	var keys []string
	for key := range c.Configs {
		uses := func(n cluster.Node) bool {
			selected := n.Labels[v1alpha1.LabelConfig]
			return selected == key || selected == "" && key == c.Default
		}
		if !slices.ContainsFunc(nodes, uses) {
			keys = append(keys, key)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	slices.Sort(keys)
	return []string{fmt.Sprintf("no node selects these keys of %s: %s; they stay", c.ConfigMap, strings.Join(keys, ", "))}
}
