// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	apiversion "k8s.io/apimachinery/pkg/version"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// ErrNotSynced says that one of NVIDIA's kinds has a definition, and its objects cannot be read from the cache. Taking
// that for an absence would undo everything. It passes within seconds, unless the API server cannot serve the kind; the
// text says what to look at.
var ErrNotSynced = errors.New("not read yet")

// readTimeout is how long a reconcile waits for the cache to hold the objects of a kind. The cache follows within
// milliseconds.
const readTimeout = 5 * time.Second

// version is the version of a kind that a definition serves. The zero value stands for a kind without a definition.
type version struct {
	schema.GroupVersionKind
	definition types.UID
}

// versions are the versions that definitions serve. A definition is read once for each of its resource versions,
// because the cache holds only its metadata.
type versions struct {
	mu sync.Mutex
	of map[string]servedAt // by name of the definition
}

type servedAt struct {
	resourceVersion string
	version         string // empty: none is served
}

// served returns the version in which the API server serves a kind: the one that we know if it is among them, otherwise
// the one that is stored, otherwise the highest. It returns the zero value if the kind has no definition, and
// ErrNotSynced with the zero value if its definition serves no version.
func (c *Configurer) served(ctx context.Context, k kind) (version, error) {
	definition := Definitions()
	if err := c.client.Get(ctx, client.ObjectKey{Name: k.crd}, definition); err != nil {
		return version{}, client.IgnoreNotFound(err)
	}
	c.versions.mu.Lock()
	defer c.versions.mu.Unlock()
	known, found := c.versions.of[k.crd]
	if !found || known.resourceVersion != definition.ResourceVersion {
		whole := object(customResourceDefinition)
		if err := c.reader.Get(ctx, client.ObjectKey{Name: k.crd}, whole); err != nil {
			return version{}, client.IgnoreNotFound(err)
		}
		known = servedAt{resourceVersion: definition.ResourceVersion, version: choose(k.Version, whole)}
		if c.versions.of == nil {
			c.versions.of = map[string]servedAt{}
		}
		c.versions.of[k.crd] = known
	}
	if known.version == "" {
		return version{}, fmt.Errorf("CustomResourceDefinition %s serves no version, so %s is %w; "+
			"serve one of its versions, or delete it", k.crd, k.Kind, ErrNotSynced)
	}
	return version{k.GroupKind().WithVersion(known.version), definition.UID}, nil
}

// choose returns the version of a definition to read and write; empty if it serves none.
func choose(preferred string, definition *unstructured.Unstructured) string {
	all, _, _ := unstructured.NestedSlice(definition.Object, "spec", "versions") // the API server validates it
	stored, served := "", []string{}
	for _, v := range all {
		fields, _ := v.(map[string]any)
		name, _ := fields["name"].(string)
		if fields["served"] != true {
			continue
		}
		served = append(served, name)
		if fields["storage"] == true {
			stored = name
		}
	}
	switch {
	case len(served) == 0:
		return ""
	case slices.Contains(served, preferred):
		return preferred
	case stored != "":
		return stored
	}
	return slices.MaxFunc(served, apiversion.CompareKubeAwareVersionStrings)
}

// list reads all objects of a kind that may not be served in this cluster.
func (c *Configurer) list(ctx context.Context, k kind) ([]unstructured.Unstructured, error) {
	all, _, err := c.listServed(ctx, k)
	return all, err
}

// listServed reads all objects of a kind in the version that is served; the version is empty if the kind has no
// definition.
func (c *Configurer) listServed(
	ctx context.Context, k kind, opts ...client.ListOption,
) ([]unstructured.Unstructured, schema.GroupVersionKind, error) {
	v, err := c.served(ctx, k)
	if err != nil || v == (version{}) {
		return nil, schema.GroupVersionKind{}, err
	}
	all := &unstructured.UnstructuredList{}
	all.SetGroupVersionKind(v.GroupVersion().WithKind(v.Kind + "List"))
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	err = c.client.List(ctx, all, opts...)
	if meta.IsNoMatchError(err) || isNotCached(err) || apierrors.IsTimeout(err) || apierrors.IsNotFound(err) {
		plural := strings.TrimSuffix(k.crd, "."+k.Group)
		return nil, schema.GroupVersionKind{}, fmt.Errorf("CustomResourceDefinition %s serves version %s, and the objects of kind %s are %w; "+
			"look at what `kubectl get %s.%s.%s -A` prints, and at the log of the controller", k.crd, v.Version, k.Kind, ErrNotSynced, plural, v.Version, k.Group)
	}
	if err != nil {
		return nil, schema.GroupVersionKind{}, fmt.Errorf("reading %s: %w", k.crd, err)
	}
	return all.Items, v.GroupVersionKind, nil
}

// Served returns the version in which the API server serves a kind: the preferred one if it is among them, otherwise
// the one that is stored, otherwise the highest. definition is the name of its CustomResourceDefinition. It returns the
// zero value if the kind has no definition, and ErrNotSynced if its definition serves no version.
func (c *Configurer) Served(ctx context.Context, preferred schema.GroupVersionKind, definition string) (schema.GroupVersionKind, error) {
	v, err := c.served(ctx, kind{preferred, definition})
	return v.GroupVersionKind, err
}

// kind is one of NVIDIA's or Node Feature Discovery's kinds, whose definition may be installed before us, after us or
// never. Its version is the one that we know; the definition may serve another (apiversions.go).
type kind struct {
	schema.GroupVersionKind
	crd string // name of its definition
}

var (
	clusterPolicy = kind{
		schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"}, "clusterpolicies.nvidia.com",
	}
	gpuCluster = kind{
		schema.GroupVersionKind{Group: "nvidia.com", Version: "v1alpha1", Kind: "GPUCluster"}, "gpuclusters.nvidia.com",
	}
	customResourceDefinition = schema.GroupVersionKind{
		Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition",
	}
)

// Definitions are custom resource definitions, as they are read and watched: their metadata.
func Definitions() *metav1.PartialObjectMetadata {
	definitions := &metav1.PartialObjectMetadata{}
	definitions.SetGroupVersionKind(customResourceDefinition)
	return definitions
}

func isNotCached(err error) bool {
	var notCached *cache.ErrResourceNotCached
	return errors.As(err, &notCached)
}

// tryAgain is how often a kind that has a definition is asked for until it is served.
const tryAgain = time.Second

// Source puts a request into the queue when an object of NVIDIA's changes. A kind is watched in the version that is
// served, as long as one is: a watch on a kind that does not exist would keep the controller from starting.
func Source[R comparable](configurer *Configurer, c cache.Cache, request R) source.TypedSource[R] {
	return source.TypedFunc[R](func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[R]) error {
		informer, err := c.GetInformer(ctx, Definitions())
		if err != nil {
			return fmt.Errorf("watching custom resource definitions: %w", err)
		}
		watch := &watcher{configurer: configurer, cache: c, wake: func() { queue.Add(request) }, changed: map[string]chan struct{}{}}
		for _, k := range []kind{clusterPolicy, gpuCluster, nodeFeature} {
			watch.changed[k.crd] = make(chan struct{}, 1)
			go watch.follow(ctx, k)
		}
		_, err = informer.AddEventHandlerWithOptions(watch.definitions(), toolscache.HandlerOptions{})
		return err
	})
}

// watcher watches NVIDIA's kinds while they are served.
type watcher struct {
	configurer *Configurer
	cache      cache.Cache
	wake       func()
	changed    map[string]chan struct{} // by name of the definition: it was added, changed or deleted
}

// definitions handles what happens to custom resource definitions.
func (w *watcher) definitions() toolscache.ResourceEventHandler {
	tell := func(definition any) {
		name := nameOf(definition)
		if slices.Contains(ownDefinitions(), name) {
			w.wake()
		}
		select {
		case w.changed[name] <- struct{}{}:
		default: // another one's, or told already
		}
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: tell, UpdateFunc: func(_, updated any) { tell(updated) }, DeleteFunc: tell,
	}
}

// follow watches a kind in the version that is served, whatever that is at the time.
func (w *watcher) follow(ctx context.Context, k kind) {
	again := clock.RealClock{}.NewTicker(tryAgain) // of the API server, whatever the time of the policies is
	defer again.Stop()
	var watched version
	for {
		err := w.adjust(ctx, k, &watched)
		var retry <-chan time.Time
		if err != nil {
			log.FromContext(ctx).V(1).Info("Kind not served yet", "definition", k.crd, "error", err.Error())
			retry = again.C()
		}
		select {
		case <-ctx.Done():
			return
		case <-w.changed[k.crd]:
		case <-retry:
		}
	}
}

// adjust ends the watch on a version that is no longer served, and begins that on the one which is.
func (w *watcher) adjust(ctx context.Context, k kind, watched *version) error {
	served, err := w.configurer.served(ctx, k)
	if err != nil && !errors.Is(err, ErrNotSynced) {
		return err
	}
	if *watched != served && *watched != (version{}) {
		if err := w.cache.RemoveInformer(ctx, object(watched.GroupVersionKind)); err != nil {
			return fmt.Errorf("ending the watch on %s: %w", watched, err)
		}
		*watched = version{}
		w.wake()
	}
	if *watched == served {
		return err
	}
	if err := w.watch(ctx, served); err != nil {
		return err
	}
	*watched = served
	return nil
}

func (w *watcher) watch(ctx context.Context, v version) error {
	informer, err := w.cache.GetInformer(ctx, object(v.GroupVersionKind), cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { w.wake() },
		UpdateFunc: func(old, updated any) {
			if matters(old, updated) {
				w.wake()
			}
		},
		DeleteFunc: func(any) { w.wake() },
	}, toolscache.HandlerOptions{})
	w.wake()
	return err
}

// matters reports whether an update changes what Observe reads. The GPU Operator updates its status all the time.
func matters(old, updated any) bool {
	a, isObject := old.(*unstructured.Unstructured)
	b, areObjects := updated.(*unstructured.Unstructured)
	if !isObject || !areObjects {
		return true
	}
	if b.GroupVersionKind().GroupKind() == nodeFeature.GroupKind() {
		return requestChanged(a, b)
	}
	ignored := func(o *unstructured.Unstructured) bool { return stringAt(o, "status", "state") == "ignored" }
	return a.GetGeneration() != b.GetGeneration() || namespaceOf(a) != namespaceOf(b) || ignored(a) != ignored(b)
}

func object(k schema.GroupVersionKind) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(k)
	return o
}

// nameOf is the name of a definition; empty if it is none.
func nameOf(definition any) string {
	if gone, isGone := definition.(toolscache.DeletedFinalStateUnknown); isGone {
		definition = gone.Obj
	}
	if o, isObject := definition.(metav1.Object); isObject {
		return o.GetName()
	}
	return ""
}
