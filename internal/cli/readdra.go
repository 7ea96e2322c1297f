// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/rollout/world"
)

// readDRA reads what is served of NVIDIA's DRA driver and around it. To users who may not read that, nodes of the driver show by its pods
// alone, and the plan says what it would need.
func readDRA(ctx context.Context, c client.Client, w *world.World) error {
	var o world.DRAObjects
	for kind, into := range map[string]*[]unstructured.Unstructured{
		"ResourceSlice": &o.Slices, "ResourceClaim": &o.Claims, "DeviceClass": &o.Classes, "DeviceTaintRule": &o.Rules,
	} {
		served, err := listAll(ctx, c, schema.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: kind}, into)
		if err != nil {
			return fmt.Errorf("reading %ss: %w", kind, err)
		}
		o.ServesClasses = o.ServesClasses || kind == "DeviceClass" && served.Version == "v1"
		o.ServesRules = o.ServesRules || kind == "DeviceTaintRule" && !served.Empty()
	}
	o.AddTo(w)
	return nil
}

// listAll reads all objects of a kind, a page at a time, in the version that is served; empty if none is. What the user may not read is not
// there.
func listAll(ctx context.Context, c client.Client, kind schema.GroupVersionKind, into *[]unstructured.Unstructured) (schema.GroupVersionKind, error) {
	served, err := listOf(c, kind)
	if meta.IsNoMatchError(err) {
		return schema.GroupVersionKind{}, nil
	}
	if err != nil {
		return served, err
	}
	for more, next := true, ""; more; more = next != "" {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(served)
		err := c.List(ctx, list, client.Limit(page), client.Continue(next))
		if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
			return served, nil
		}
		if err != nil {
			return served, err
		}
		*into, next = append(*into, list.Items...), list.GetContinue()
	}
	return served, nil
}
