// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// byNode is the index of pods by the node that they are bound to.
const byNode = "node"

// watches keep what the page is made of up to date, with the rights of the user.
type watches struct {
	policies, gpuNodes, nodes, pods *kind
	changed                         chan struct{} // has a value once something has changed

	mu       sync.Mutex
	stale    map[string]bool // nodes of which something has changed
	programs cluster.Programs
	known    map[string]cluster.Node
}

// kind is a kind of objects that the page is made of.
type kind struct {
	toolscache.SharedIndexInformer
	// without is what the page lacks without it.
	without string

	mu     sync.Mutex
	failed error     // of the last list or watch
	since  time.Time // of failed: the first of several in a row
}

func newWatches(config *rest.Config) (*watches, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	c, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	w := &watches{
		changed: make(chan struct{}, 1), stale: map[string]bool{}, known: map[string]cluster.Node{},
		programs: cluster.Programs{Unverified: true}, // until they are read
	}
	w.policies = w.kindOf(c, "policies are not shown as they are now", &v1alpha1.GPUSharingPolicy{}, &v1alpha1.GPUSharingPolicyList{}, nil)
	w.gpuNodes = w.kindOf(c, "GPUs are not shown as they are now", &v1alpha1.GPUNode{}, &v1alpha1.GPUNodeList{}, nil)
	w.nodes = w.kindOf(c, "what the nodes advertise is not shown as it is now", &corev1.Node{}, &corev1.NodeList{}, nil)
	w.pods = w.kindOf(c, "processes are not shown with their pods, and agents that are not Ready are not reported", &corev1.Pod{}, &corev1.PodList{},
		toolscache.Indexers{byNode: func(o any) ([]string, error) {
			if pod, is := o.(*corev1.Pod); is && pod.Spec.NodeName != "" {
				return []string{pod.Spec.NodeName}, nil
			}
			return nil, nil
		}})
	return w, nil
}

// kindOf watches a kind; indexers may be nil.
func (w *watches) kindOf(c client.WithWatch, without string, object client.Object, list client.ObjectList, indexers toolscache.Indexers) *kind {
	k := &kind{without: without}
	options := func(o metav1.ListOptions) *client.ListOptions {
		return &client.ListOptions{Limit: o.Limit, Continue: o.Continue, Raw: &o}
	}
	source := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			into, _ := list.DeepCopyObject().(client.ObjectList)
			answered := w.ask(ctx, k)
			err := c.List(ctx, into, options(o))
			answered(err)
			return into, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			into, _ := list.DeepCopyObject().(client.ObjectList)
			answered := w.ask(ctx, k)
			events, err := c.Watch(ctx, into, options(o))
			if err == nil && isEmpty(events) {
				answered(errUnanswered)
			} else {
				answered(err)
			}
			return events, err
		},
	}
	k.SharedIndexInformer = toolscache.NewSharedIndexInformerWithOptions(source, object, toolscache.SharedIndexInformerOptions{Indexers: indexers})
	// The informer has not started, so neither returns an error.
	_ = k.SetTransform(func(o any) (any, error) {
		if object, is := o.(client.Object); is {
			object.SetManagedFields(nil)
		}
		return o, nil
	})
	_ = k.SetWatchErrorHandlerWithContext(func(context.Context, *toolscache.Reflector, error) {}) // the page says it, not the terminal
	_, _ = k.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: w.touch, DeleteFunc: w.touch, UpdateFunc: func(before, after any) { w.touch(before); w.touch(after) },
	})
	return k
}

// errUnanswered is why a kind cannot be read while the network is gone.
var errUnanswered = errors.New("the API server does not answer, and is asked again")

// answerTimeout is how long the API server may take to begin an answer before the page says so. client-go itself finds
// after 45 seconds that a connection is dead, and tries for minutes before it returns an error.
const answerTimeout = 10 * time.Second

// ask notes that a kind is asked for: if no answer comes for a while, the page says so. What was answered is nil, or
// why the kind cannot be read.
func (w *watches) ask(ctx context.Context, k *kind) (answered func(error)) {
	over := false
	note := func(err error) {
		if ctx.Err() == nil {
			if err != nil && k.failed == nil {
				k.since = time.Now() //nolint:forbidigo // the page counts from the real time at which answers stopped
			}
			k.failed = err
			w.mark()
		}
	}
	late := time.AfterFunc(answerTimeout, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if !over {
			note(errUnanswered)
		}
	})
	return func(err error) {
		k.mu.Lock()
		defer k.mu.Unlock()
		over = true
		late.Stop()
		note(err)
	}
}

// isEmpty reports whether a watch is the empty one that client-go returns, without an error, if a connection took too
// long or broke off (rest.Request.Watch). With it what is known would pass for what is so now.
func isEmpty(events watch.Interface) bool {
	return reflect.TypeOf(events) == reflect.TypeOf(watch.NewEmptyWatch())
}

// run watches until the context ends.
func (w *watches) run(ctx context.Context) {
	var kinds sync.WaitGroup
	for _, k := range w.kinds() {
		kinds.Go(func() { k.RunWithContext(ctx) })
		kinds.Go(func() {
			toolscache.WaitForCacheSync(ctx.Done(), k.HasSynced)
			w.mark()
		})
	}
	kinds.Wait()
}

func (w *watches) kinds() []*kind { return []*kind{w.policies, w.gpuNodes, w.nodes, w.pods} }

// missing is why a kind cannot be read; nil: it can.
func (k *kind) missing() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.failed
}

// failing is since when, and why, kinds that the user may read are not read; nil: all are.
func (w *watches) failing() (stale *dashboard.Stale) {
	for _, k := range w.kinds() {
		k.mu.Lock()
		if k.failed != nil && !apierrors.IsForbidden(k.failed) && (stale == nil || k.since.Before(stale.Since)) {
			stale = &dashboard.Stale{Since: k.since, Why: unanswered(k.failed)}
		}
		k.mu.Unlock()
	}
	return stale
}

// settled reports whether each kind was read, or cannot be.
func (w *watches) settled() bool {
	return !slices.ContainsFunc(w.kinds(), func(k *kind) bool { return !k.HasSynced() && k.missing() == nil })
}

// mark reports that something has changed.
func (w *watches) mark() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// touch reports that an object has changed.
func (w *watches) touch(o any) {
	if gone, is := o.(toolscache.DeletedFinalStateUnknown); is {
		o = gone.Obj
	}
	w.mu.Lock()
	switch o := o.(type) {
	case *corev1.Pod:
		w.stale[o.Spec.NodeName] = true
	case *corev1.Node:
		w.stale[o.Name] = true
	case *v1alpha1.GPUNode:
		w.stale[o.Name] = true
	}
	w.mu.Unlock()
	w.mark()
}

// know takes over where programs run. If that has changed, what the pods of each node are is decided again.
func (w *watches) know(programs cluster.Programs) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if reflect.DeepEqual(w.programs, programs) {
		return
	}
	w.programs = programs
	for _, name := range w.gpuNodes.GetStore().ListKeys() {
		w.stale[name] = true
	}
	w.mark()
}

// snapshot is the cluster as it is known now, as read returns it, with what is missing. blind reports that the Nodes
// are missing.
func (w *watches) snapshot(now time.Time) (known cluster.Snapshot, blind bool, missing []string) {
	for _, k := range w.kinds() {
		if err := k.missing(); err != nil {
			missing = append(missing, strings.ToUpper(k.without[:1])+k.without[1:]+": "+advise(err).Error())
		}
	}
	blind = !w.nodes.HasSynced()
	w.mu.Lock()
	stale := w.stale
	programs := w.programs
	w.stale = map[string]bool{}
	w.mu.Unlock()
	for name := range stale {
		if n, found := w.node(name, blind, &programs); found {
			w.known[name] = n
		} else {
			delete(w.known, name)
		}
	}
	known.Now = now
	for _, o := range w.policies.GetStore().List() {
		if policy, is := o.(*v1alpha1.GPUSharingPolicy); is {
			known.Policies = append(known.Policies, *policy)
		}
	}
	for _, n := range w.known {
		n.AgentReady = n.AgentReady || !w.pods.HasSynced()
		known.Nodes = append(known.Nodes, n)
	}
	slices.SortFunc(known.Nodes, func(a, b cluster.Node) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(known.Policies, func(a, b v1alpha1.GPUSharingPolicy) int { return strings.Compare(a.Name, b.Name) })
	known.Plugin = devicePluginOf(&known)
	known.Plugin.NodeFeatures = true // as read has it for a user who may not know: nothing is forbidden for what was not read
	return known, blind, missing
}

// node is a node with its GPUs and pods, if it has GPUs.
func (w *watches) node(name string, blind bool, programs *cluster.Programs) (cluster.Node, bool) {
	o, found, _ := w.gpuNodes.GetStore().GetByKey(name) // a store in memory has no errors
	gpuNode, is := o.(*v1alpha1.GPUNode)
	if !found || !is {
		return cluster.Node{}, false
	}
	n := cluster.Node{Name: name, GPU: *gpuNode}
	o, found, _ = w.nodes.GetStore().GetByKey(name)
	if node, is := o.(*corev1.Node); found && is {
		n = cluster.NodeOf(node, gpuNode)
	} else if !blind {
		return cluster.Node{}, false
	}
	pods, _ := w.pods.GetIndexer().ByIndex(byNode, name) // the index exists
	for _, o := range pods {
		if pod, is := o.(*corev1.Pod); is {
			n.AddPod(pod, programs)
		}
	}
	return n, true
}
