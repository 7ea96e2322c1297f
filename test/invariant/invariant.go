// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package invariant says what holds once a change, and whatever went wrong meanwhile, is over. The same check serves
// the cluster in miniature of internal/engine/rollout and the one on a real API server of test/cluster.
package invariant

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

const deployPrefix = "nvidia.com/gpu.deploy."

// Disturbed reports whether a node is taken from its users for a change: it keeps pods off, or NVIDIA's programs.
func Disturbed(n cluster.Node) bool {
	if _, stopped := n.Annotations[v1alpha1.AnnotationStopped]; stopped {
		return true
	}
	return slices.ContainsFunc(n.Taints, ours)
}

func ours(t corev1.Taint) bool { return t.Key == v1alpha1.TaintChanging }

// Broken lists what is wrong with a cluster in which nothing goes on any more, compared with what it was before the
// operator came: no node is left tainted, paused, without its label or without its GPUs, and nothing of the user's is
// lost. Evicted names the pods (<namespace>/<name>) that had to go.
func Broken(before, now cluster.Snapshot, evicted ...string) []string {
	var broken []string
	was := map[string]cluster.Node{}
	for _, n := range before.Nodes {
		was[n.Name] = n
	}
	state := map[string]rollout.NodeState{}
	for _, s := range rollout.Decide(now).Nodes {
		state[s.Node] = s
	}
	for _, n := range now.Nodes {
		old, known := was[n.Name]
		if !known {
			continue
		}
		problems := slices.Concat(left(n), label(old, n, now.Configs), gpus(old, n, state[n.Name]), users(old, n, evicted))
		for _, p := range problems {
			broken = append(broken, n.Name+": "+p)
		}
	}
	return broken
}

// left is what was taken from a node and not restored.
func left(n cluster.Node) []string {
	var broken []string
	if slices.ContainsFunc(n.Taints, ours) {
		broken = append(broken, "our taint is left")
	}
	if stopped, has := n.Annotations[v1alpha1.AnnotationStopped]; has {
		broken = append(broken, "these are left stopped: "+stopped)
	}
	if serves := sharedByMPS(n); !n.Features.OverriddenSince.IsZero() && !serves {
		broken = append(broken, "NodeFeature "+action.OverrideName(n.Name)+" is left")
	}
	for name, value := range n.Labels {
		if strings.HasPrefix(name, deployPrefix) && strings.HasPrefix(value, "paused") {
			broken = append(broken, fmt.Sprintf("%s is left %s", name, value))
		}
	}
	return broken
}

// sharedByMPS reports whether the operator's MPS daemons serve a node.
func sharedByMPS(n cluster.Node) bool {
	return slices.ContainsFunc(n.GPU.Spec.Devices, func(d v1alpha1.DeviceSpec) bool {
		return d.Sharing.MPS != nil && d.Sharing.MPS.Owner == v1alpha1.MPSDaemonOwnerGPUSharing
	})
}

// label compares the selected configuration with what the node was last brought to, or with what it was.
func label(old, n cluster.Node, keys map[string]string) []string {
	key := n.Labels[v1alpha1.LabelConfig]
	want := old.Labels[v1alpha1.LabelConfig]
	if spec := n.GPU.Spec; spec.ConfigName != "" {
		want = spec.ConfigName
	}
	if key != want {
		return []string{fmt.Sprintf("the label selects %q and not %q", key, want)}
	}
	if _, written := keys[key]; key != "" && key != old.Labels[v1alpha1.LabelConfig] && !written {
		return []string{fmt.Sprintf("the key %q that the label selects is not in the ConfigMap", key)}
	}
	return nil
}

// gpus compares what a node advertises with what its policy promises or, if no policy governs it, with what it did.
func gpus(old, n cluster.Node, s rollout.NodeState) []string {
	offers := offered(n)
	switch {
	case len(offers) == 0 && len(offered(old)) > 0:
		return []string{"no GPU is advertised"}
	case s.State == node.UpToDate && s.Policy != "" && !maps.Equal(offers, s.Expected):
		return []string{fmt.Sprintf("advertised is %v and not %v", offers, s.Expected)}
	case n.GPU.Spec.Baseline == nil && !maps.Equal(offers, offered(old)):
		return []string{fmt.Sprintf("advertised is %v and was %v", offers, offered(old))}
	}
	return nil
}

func offered(n cluster.Node) map[string]int64 {
	offers := maps.Clone(n.Allocatable)
	maps.DeleteFunc(offers, func(_ string, count int64) bool { return count == 0 })
	return offers
}

// users looks for what others put on the node.
func users(old, n cluster.Node, evicted []string) []string {
	var lost []string
	for _, t := range old.Taints {
		if !ours(t) && !slices.ContainsFunc(n.Taints, func(o corev1.Taint) bool { return o.MatchTaint(&t) }) {
			lost = append(lost, fmt.Sprintf("the taint %s is lost", t.Key))
		}
	}
	for _, of := range []struct{ was, is map[string]string }{{old.Labels, n.Labels}, {old.Annotations, n.Annotations}} {
		for name, value := range of.was {
			if theirs(name) && of.is[name] != value {
				lost = append(lost, fmt.Sprintf("%s was %q and is %q", name, value, of.is[name]))
			}
		}
	}
	for _, p := range old.Pods {
		name := p.Namespace + "/" + p.Name
		here := func(o cluster.Pod) bool { return o.UID == p.UID }
		if p.Controller != "DaemonSet" && !slices.Contains(evicted, name) && !slices.ContainsFunc(n.Pods, here) {
			lost = append(lost, fmt.Sprintf("pod %s is lost", name))
		}
	}
	return lost
}

// theirs reports whether a label or annotation is none of NVIDIA's, of Node Feature Discovery's or ours.
func theirs(name string) bool {
	return !slices.ContainsFunc([]string{"nvidia.com/", "nfd.node.kubernetes.io/", v1alpha1.Group + "/"}, func(domain string) bool {
		return strings.HasPrefix(name, domain)
	})
}
