// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"encoding/json"
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// Overridden names another controller that keeps reverting what we set in the ClusterPolicy.
type Overridden struct {
	Manager string // field manager
	Until   time.Time
	Message string
}

// overruling is that our fields were set again after a field manager had reverted them.
type overruling struct {
	At time.Time `json:"at"`
	// Times is how often in a row, each within longestWait after the one before.
	Times int `json:"times"`
}

// While another controller and we revert each other, NVIDIA's programs restart on every node in each round. While we
// wait, nodes may offer nothing: spec.mig.strategy single does not fit a node with a mixed MIG layout. So what is kept
// apart is the times at which we overrule: by a minute at first, then by twice as long each time. A controller that
// reverts within seconds meets the whole of that, and a person who installs a Helm release a few times none of it. A
// revert that comes later than the longest wait begins anew.
const (
	firstWait   = time.Minute
	longestWait = time.Hour
)

// reverted returns the field manager that reverted what we had set in the ClusterPolicy, and when; !ok: none has.
func (o *Observed) reverted() (manager string, at time.Time, ok bool) {
	if configured(o.clusterPolicy, o.defaultKey) || outdated(o.clusterPolicy, o.Configs) {
		return "", time.Time{}, false
	}
	manager, at = lastWriter(o.clusterPolicy)
	return manager, at, o.configuredBefore(at)
}

// removals are how often in a row others took our tolerations from a ClusterPolicy. Who removes a field leaves no trace.
type removals struct {
	of         types.UID
	generation int64 // that had them last; 0: the removal is counted
	at         time.Time
	times      int
}

// operandsOf holds off tolerations that were removed again.
func (c *Configurer) operandsOf(policy *unstructured.Unstructured) *clusterpolicy.Operands {
	o, r, now := clusterpolicy.OperandsOf(policy), &c.removals, c.clock.Now()
	if r.of != policy.GetUID() {
		*r = removals{of: policy.GetUID()}
	}
	if r.generation > 0 && policy.GetGeneration() >= r.generation && len(o.Ours) == 0 {
		if now.Sub(r.at) >= 2*longestWait {
			r.times = 0
		}
		r.generation, r.at, r.times = 0, now, r.times+1
	}
	if r.times > 1 {
		o.NotBefore = r.at.Add(timing.Doubled(firstWait, longestWait, r.times-1))
	}
	return &o
}

// configuredBefore reports whether we had configured the ClusterPolicy: its copy of the baseline is written in the same
// patch. A controller that replaces the whole ClusterPolicy removes that copy too. Then our ConfigMap has the record of
// this very ClusterPolicy, and the last write is later than both: who created it has reverted nothing.
func (o *Observed) configuredBefore(lastWrite time.Time) bool {
	if o.clusterPolicy.GetAnnotations()[v1alpha1.AnnotationBaseline] != "" {
		return true
	}
	var ours baseline
	known := exists(o.configMap) && json.Unmarshal([]byte(o.record), &ours) == nil && ours.UID == o.clusterPolicy.GetUID()
	return known && lastWrite.After(o.configMap.CreationTimestamp.Time) && lastWrite.After(o.clusterPolicy.GetCreationTimestamp().Time)
}

// again returns how the manager was overruled before, if its revert at a time follows that quickly enough to be another
// round.
func (b baseline) again(manager string, at time.Time) (overruling, bool) {
	before, was := b.Overruled[manager]
	return before, was && at.Sub(before.At) < longestWait
}

// overridden returns who reverted what we had set, and that it is not to be set again now; nil if it may be.
func (o *Observed) overridden(now time.Time) *Overridden {
	manager, at, reverted := o.reverted()
	if !reverted {
		return nil
	}
	before, again := o.baseline.again(manager, at)
	since := before.At
	if at.Before(since) { // the API server's clock is behind
		since = at
	}
	until := since.Add(timing.Doubled(firstWait, longestWait, before.Times))
	if !again || !now.Before(until) {
		return nil
	}
	return &Overridden{Manager: manager, Until: until, Message: fmt.Sprintf("ClusterPolicy: field manager %q set %s again; reverted at %s. "+
		"Make it leave that alone", manager, format.List(differs(o.clusterPolicy, o.defaultKey)), format.Clock(until))}
}

// overruled returns the baseline once our fields are set again: with the manager that had reverted them, if one had,
// and without those whose reverts are long ago.
func (o *Observed) overruled(now time.Time) baseline {
	b := o.baseline
	manager, at, reverted := o.reverted()
	if !reverted {
		return b
	}
	before, again := b.again(manager, at)
	if !again {
		before.Times = 0
	}
	b.Overruled = maps.Clone(b.Overruled)
	maps.DeleteFunc(b.Overruled, func(_ string, r overruling) bool { return now.Sub(r.At) >= longestWait })
	if b.Overruled == nil {
		b.Overruled = map[string]overruling{}
	}
	b.Overruled[manager] = overruling{At: now.UTC().Truncate(time.Second), Times: before.Times + 1}
	b.Revision++
	return b
}

// last is when any manager was overruled last; zero: none was of late.
func (b baseline) last(now time.Time) (at time.Time) {
	for _, r := range b.Overruled {
		if r.At.After(at) && now.Sub(r.At) < longestWait {
			at = r.At
		}
	}
	return at
}

// lastWriter is the field manager that owns our fields of a ClusterPolicy instead of us or, if nobody does since they
// were removed, the last that wrote anything, and when it wrote.
func lastWriter(policy *unstructured.Unstructured) (manager string, at time.Time) {
	owned := false
	for _, entry := range policy.GetManagedFields() {
		if entry.Manager == fieldManager || entry.Subresource != "" || entry.Time == nil {
			continue
		}
		owns := clusterpolicy.Owns(entry, configNamePath(), defaultKeyPath(), strategyPath())
		if owns && !owned || owns == owned && entry.Time.After(at) {
			manager, at, owned = entry.Manager, entry.Time.Time, owns
		}
	}
	return manager, at
}
