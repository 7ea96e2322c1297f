// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// writeFor is after how long a reconcile begins with no further node. What it leaves the next reconcile decides anew,
// from what has become of the nodes and policies meanwhile. It is short so that of many nodes the first, by name, end before the last begin.
const writeFor = 2 * time.Second

// executeOnNodes carries out the actions on nodes: those of one node in their order, and some nodes at the same time.
// It takes the nodes in the order of the actions.
func (r *reconciliation) executeOnNodes(ctx context.Context, actions []action.Action) error {
	nodes := byNode(actions)
	next := make(chan []action.Action)
	errs := make([]error, max(r.Writers, 1))
	var writers sync.WaitGroup
	for i := range errs {
		writers.Go(func() {
			for todo := range next {
				for _, a := range todo {
					errs[i] = errors.Join(errs[i], r.carryOut(ctx, a))
				}
			}
		})
	}
	begun := r.Clock.Now()
	for _, todo := range nodes {
		if r.Clock.Since(begun) > writeFor {
			r.unfinished = true
			break
		}
		next <- todo
	}
	close(next)
	writers.Wait()
	r.recorder.announceTogether()
	return errors.Join(errs...)
}

// byNode are the actions of each node, nodes in the order in which they come. Keys come before all nodes, and are not
// among them.
func byNode(actions []action.Action) [][]action.Action {
	var nodes [][]action.Action
	at := map[string]int{}
	for _, a := range actions {
		if _, isKeys := a.(action.WriteConfigs); isKeys {
			continue
		}
		i, found := at[a.NodeName()]
		if !found {
			i, at[a.NodeName()] = len(nodes), len(nodes)
			nodes = append(nodes, nil)
		}
		nodes[i] = append(nodes[i], a)
	}
	return nodes
}

// +kubebuilder:rbac:groups=karpenter.sh,resources=nodepools,verbs=list;watch

// nodePoolKind is Karpenter's kind for a group of nodes.
var nodePoolKind = schema.GroupKind{Group: "karpenter.sh", Kind: "NodePool"}

// gatherNodePools reads which startup taints the NodePools of Karpenter list, by the name of the NodePool.
func (c *Controller) gatherNodePools(ctx context.Context) (map[string]cluster.NodePool, error) {
	all, err := c.nodePools.list(ctx, c.client)
	if err != nil {
		return nil, err
	}
	pools := make(map[string]cluster.NodePool, len(all))
	for i := range all {
		var pool cluster.NodePool
		for _, taint := range listIn(&all[i], "spec", "template", "spec", "startupTaints") {
			if key, is := asMap(taint)["key"].(string); is {
				pool.StartupTaints = append(pool.StartupTaints, key)
			}
		}
		pools[all[i].GetName()] = pool
	}
	return pools, nil
}

// startupTaints is what the cache keeps of the spec of a NodePool.
func startupTaints(pool *unstructured.Unstructured) map[string]any {
	var keys []any
	for _, taint := range listIn(pool, "spec", "template", "spec", "startupTaints") {
		keys = append(keys, map[string]any{"key": asMap(taint)["key"]})
	}
	return map[string]any{"template": map[string]any{"spec": map[string]any{"startupTaints": keys}}}
}

// announceNodes tells, on the policy and on the node, of nodes that a person should look at since the last status, and
// of those that need it no more. A node that the status no longer lists may only have made room for others: then its
// state decides.
func (an *eventRecorder) announceNodes(policy *v1alpha1.GPUSharingPolicy, pending []v1alpha1.PendingNode, states []rollout.NodeState) {
	was, is := worrying(policy.Status.Pending), worrying(pending)
	for _, n := range pending {
		if _, worries := is[n.NodeName]; worries && was[n.NodeName].Reason != n.Reason {
			e := eventReasonWaits
			e.Reason = n.Reason
			an.emitBoth(e, policy, n.NodeName, fmt.Sprintf("node %s: %s", n.NodeName, n.Message))
		}
	}
	for _, n := range policy.Status.Pending {
		if _, did := was[n.NodeName]; !did {
			continue
		}
		_, worries := is[n.NodeName]
		if !worries && !slices.ContainsFunc(states, func(s rollout.NodeState) bool {
			return s.Node == n.NodeName && s.Policy == policy.Name && node.Worrying(string(s.State), s.Reason)
		}) {
			e := eventReasonReached
			e.Reason = v1alpha1.EventRecovered
			an.emitBoth(e, policy, n.NodeName, fmt.Sprintf("node %s: no longer %s", n.NodeName, n.Reason))
		}
	}
}

func worrying(pending []v1alpha1.PendingNode) map[string]v1alpha1.PendingNode {
	found := map[string]v1alpha1.PendingNode{}
	for _, n := range pending {
		if node.Worrying(n.State, n.Reason) {
			found[n.NodeName] = n
		}
	}
	return found
}

// emitBoth tells the policy and the node, where those who work on it look.
func (an *eventRecorder) emitBoth(e announcement, policy *v1alpha1.GPUSharingPolicy, name, note string) {
	node := an.nodeNamed(name)
	an.emit(e, policy, node, note)
	an.emit(e, node, policy, note)
}

// kindsAgain is how soon a controller looks again whose own kinds are gone, or whose cache lacks an object of theirs.
// A watch on a kind that came back begins again within a minute.
const kindsAgain = 2 * time.Second

// kindsGone is why the controller of a cluster without the operator's own kinds changes nothing; nil: they are there.
type kindsGone struct {
	mu  sync.Mutex
	why error
}

// set reports whether that is news.
func (k *kindsGone) set(why error) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	news := (k.why == nil) != (why == nil)
	k.why = why
	return news
}

// Ready is the readiness check of the controller: an error while the operator's own kinds are gone.
func (c *Controller) Ready(*http.Request) error {
	c.gone.mu.Lock()
	defer c.gone.mu.Unlock()
	return c.gone.why
}

// vanished ends a reconcile that changes nothing, because the operator's own kinds are gone, the cache lacks one of
// their objects, or neither can be told.
func (c *Controller) vanished(ctx context.Context, why error) (reconcile.Result, error) {
	switch {
	case errors.Is(why, pluginconfig.ErrNotSynced):
		return c.wait(ctx, why, kindsAgain)
	case !errors.Is(why, pluginconfig.ErrKindsGone):
		return c.wait(ctx, why, 0)
	}
	if c.gone.set(why) {
		log.FromContext(ctx).Info("Waiting for the definitions of the operator", "reason", why.Error())
		definition := pluginconfig.Definitions()
		definition.SetName(pluginconfig.PolicyDefinition)
		newReconciliation(c, &seen{}).recorder.emit(eventKindsGone, definition, nil, why.Error())
	}
	return c.wait(ctx, why, kindsAgain)
}
