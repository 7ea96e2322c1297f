// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Serve makes a custom resource definition serve these versions and no others, as a newer or older version of its owner
// does; the first one is stored. New versions have the schema of the first that was there. Without versions it serves
// none.
func (c *Cluster) Serve(ctx context.Context, definition string, versions ...string) error {
	crd := &unstructured.Unstructured{}
	crd.SetAPIVersion("apiextensions.k8s.io/v1")
	crd.SetKind("CustomResourceDefinition")
	if err := c.Client.Get(ctx, client.ObjectKey{Name: definition}, crd); err != nil {
		return fmt.Errorf("reading definition %s: %w", definition, err)
	}
	all, _, err := unstructured.NestedSlice(crd.Object, "spec", "versions")
	if err != nil {
		return err
	}
	fields := func(i int) map[string]any { return all[i].(map[string]any) } //nolint:forcetypeassert // of the API server
	for _, name := range versions {
		if !slices.ContainsFunc(all, func(v any) bool { return v.(map[string]any)["name"] == name }) { //nolint:forcetypeassert // likewise
			added := maps.Clone(fields(0))
			added["name"] = name
			all = append(all, added)
		}
	}
	for i := range all {
		name, _ := fields(i)["name"].(string)
		fields(i)["served"] = slices.Contains(versions, name)
		if len(versions) > 0 {
			fields(i)["storage"] = name == versions[0]
		}
	}
	if err := unstructured.SetNestedSlice(crd.Object, all, "spec", "versions"); err != nil {
		return err
	}
	return c.Client.Update(ctx, crd)
}
