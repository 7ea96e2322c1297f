// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ssa applies objects server-side, and only if that changes something.
//
// An apply that changes nothing is not free: it is a request, and for some kinds it raises the resource version and so
// wakes every watcher (kubernetes#124605, #131175). What a field manager applied before can be read back from the
// object in the cache, so it is compared first.
//
// What an apply leaves out, it deletes: a configuration must always list everything that its manager owns. Leave a
// member out instead of setting it to an empty struct or list, which the API server does not store and which would
// therefore be applied again and again.
package ssa

import (
	"context"
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Owner is a field manager and the client that it writes with.
type Owner struct {
	Client client.Client
	Name   string // of the field manager
}

// Extract reads from an object what a field manager applied to it: one of the generated functions, such as
// ExtractGPUNode for the main resource and ExtractGPUNodeStatus for the status.
type Extract[O client.Object, C runtime.ApplyConfiguration] func(object O, manager string) (C, error)

// Apply applies want to the main resource, taking fields over from other managers, unless have shows that it is applied
// already. have is the object as read, unmodified; an object that does not exist yet is one without resource version.
// It reports whether it wrote; the answer of the API server is then decoded into want.
func Apply[O client.Object, C runtime.ApplyConfiguration](
	ctx context.Context, owner Owner, have O, want C, extract Extract[O, C],
) (bool, error) {
	if unchanged, err := applied(owner, have, want, extract); unchanged || err != nil {
		return false, err
	}
	if err := owner.Client.Apply(ctx, want, client.FieldOwner(owner.Name), client.ForceOwnership); err != nil {
		return false, fmt.Errorf("applying as %s: %w", owner.Name, err)
	}
	return true, nil
}

// ApplyStatus is Apply for the status subresource. The object must exist.
func ApplyStatus[O client.Object, C runtime.ApplyConfiguration](
	ctx context.Context, owner Owner, have O, want C, extract Extract[O, C],
) (bool, error) {
	if unchanged, err := applied(owner, have, want, extract); unchanged || err != nil {
		return false, err
	}
	if err := owner.Client.Status().Apply(ctx, want, client.FieldOwner(owner.Name), client.ForceOwnership); err != nil {
		return false, fmt.Errorf("applying the status as %s: %w", owner.Name, err)
	}
	return true, nil
}

func applied[O client.Object, C runtime.ApplyConfiguration](owner Owner, have O, want C, extract Extract[O, C]) (bool, error) {
	if have.GetResourceVersion() == "" {
		return false, nil
	}
	was, err := extract(have, owner.Name)
	if err != nil {
		return false, fmt.Errorf("extracting what %s applied: %w", owner.Name, err)
	}
	return equality.Semantic.DeepEqual(was, want), nil
}

// Configuration turns a value of the API, such as a status, into the apply configuration of the same shape. It holds
// what the value would show as JSON, so that members left out by omitempty and omitzero are not applied.
func Configuration[C any](value any) (*C, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encoding %T: %w", value, err)
	}
	configuration := new(C)
	if err := json.Unmarshal(data, configuration); err != nil {
		return nil, fmt.Errorf("decoding %T: %w", configuration, err)
	}
	return configuration, nil
}
