// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
)

const (
	// nodeNameField is the index of pods by the node that they are bound to. The API server knows it too.
	nodeNameField = "spec.nodeName"
)

// seen is the cluster as one reconcile read it: the snapshot to decide on, and the objects to write to.
type seen struct {
	snapshot cluster.Snapshot
	plugin   *pluginconfig.Observed
	policies map[string]*v1alpha1.GPUSharingPolicy
	gpuNodes map[string]*v1alpha1.GPUNode
	features features
	dra      *cluster.DRARead

	mu    sync.Mutex // guards what follows once actions are carried out
	nodes map[string]*corev1.Node
}

// gather reads the cluster, from the cache. What it returns is shared with the cache and must not be changed.
func (c *Controller) gather(ctx context.Context) (*seen, error) {
	plugin, err := c.PluginConfig.Observe(ctx)
	if err != nil {
		return nil, err
	}
	s, err := c.gatherPolicies(ctx)
	if err != nil {
		return nil, err
	}
	s.plugin = plugin
	s.snapshot.Now, s.snapshot.LeadsSince = c.times()
	s.snapshot.Plugin, s.snapshot.Configs, s.snapshot.ConfigsCopy = plugin.DevicePlugin, plugin.Applied, plugin.Copied
	if s.snapshot.NodePools, err = c.gatherNodePools(ctx); err != nil {
		return nil, err
	}
	s.snapshot.ReadinessTaint = c.ReadinessTaint
	if err := c.gatherFeatures(ctx, s); err != nil {
		return nil, err
	}
	return s, c.gatherNodes(ctx, s)
}

// times are the time of a reconcile, and that of the first one: only who leads reconciles. Who could not decide for long begins anew.
func (c *Controller) times() (now, leadsSince time.Time) {
	now = c.Clock.Now()
	if c.leadsSince.IsZero() || !c.undecided.IsZero() && now.Sub(c.undecided) > timing.Grace {
		c.leadsSince = now
	}
	return now, c.leadsSince
}

// gatherPolicies reads the policies, with which every decision begins.
func (c *Controller) gatherPolicies(ctx context.Context) (*seen, error) {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := c.client.List(ctx, policies); err != nil {
		return nil, fmt.Errorf("reading policies: %w", err)
	}
	s := &seen{snapshot: cluster.Snapshot{Policies: policies.Items}, policies: make(map[string]*v1alpha1.GPUSharingPolicy, len(policies.Items))}
	for i := range policies.Items {
		s.policies[policies.Items[i].Name] = &policies.Items[i]
	}
	return s, nil
}

func (c *Controller) gatherNodes(ctx context.Context, s *seen) error {
	k := &c.store
	for _, node := range c.refusals.prune(s.snapshot.Now) {
		c.changes.node(node, true)
	}
	changed, watched := c.changes.take()
	was, complete := k.programs, watched && k.complete
	k.complete = false // an error below loses what was taken
	programs, drivers, err := c.gatherPrograms(ctx, s)
	if err != nil {
		return err
	}
	k.programs = programs
	dra, awaited, err := c.gatherDRA(ctx)
	if err != nil {
		return err
	}
	k.claim(dra.Claimed, changed)
	if complete && reflect.DeepEqual(was, programs) {
		err = c.readAgain(ctx, changed, s.snapshot.Now)
	} else {
		err = c.readAll(ctx, s.snapshot.Now)
	}
	if err != nil {
		return err
	}
	if err := c.readLost(ctx, s.snapshot.Now); err != nil {
		return err
	}
	deploy(dra.Nodes, drivers, k.nodes)
	k.mergeFeatures(s.features.Of, dra.Nodes)
	if awaited && showDRA(k.listed) {
		return fmt.Errorf("the kinds of resource.k8s.io: %w", pluginconfig.ErrNotSynced)
	}
	k.complete = true
	s.dra, s.snapshot.DRA = dra, dra.Cluster
	s.nodes, s.gpuNodes = k.nodes, k.gpuNodes
	s.snapshot.Nodes, s.snapshot.Unscheduled, s.snapshot.UnscheduledVersion = k.listed, k.unscheduled, k.unscheduledVersion
	return k.missing(s.snapshot.Now)
}

func (c *Controller) isReadyAgent(pod *corev1.Pod) bool {
	return (&cluster.Programs{Own: []string{c.Namespace}}).IsReadyAgent(pod)
}

// specOf is the spec of a GPUNode before this reconcile.
func (s *seen) specOf(node string) v1alpha1.GPUNodeSpec {
	if have, found := s.gpuNodes[node]; found {
		return have.Spec
	}
	return v1alpha1.GPUNodeSpec{}
}

// failedOf is the desired state that failed on a node, as recorded before this reconcile; nil if none is.
func (s *seen) failedOf(node string) *v1alpha1.FailedChange {
	if have, found := s.gpuNodes[node]; found {
		return have.Status.Rollout.Failed
	}
	return nil
}

// mounted reports whether a pod mounts our ConfigMap.
func (s *seen) mounted() bool {
	return slices.ContainsFunc(s.snapshot.Nodes, func(n cluster.Node) bool {
		return slices.ContainsFunc(n.Pods, func(pod cluster.Pod) bool { return pod.MountsConfig })
	})
}

// node is a node as it was read, or as it was after the last write.
func (s *seen) node(name string) (*corev1.Node, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	node, found := s.nodes[name]
	return node, found
}

// wrote keeps a node as it is after a write.
func (s *seen) wrote(node *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes[node.Name] = node
}

// nodeNamed is a node as the subject of an event.
func (s *seen) nodeNamed(name string) *corev1.Node {
	node := &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	if found, is := s.node(name); is {
		node.UID = found.UID
	}
	return node
}
