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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	apiversion "k8s.io/apimachinery/pkg/version"
	"sigs.k8s.io/controller-runtime/pkg/client"
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
