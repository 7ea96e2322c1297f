// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"context"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

// capacity is what an infrastructure template says of a machine.
type capacity struct {
	of map[string]int64 // nil: it cannot be read
	at time.Time
}

// capacityFor is how long a template counts that was read. Its spec never changes, and its provider fills the status once.
const capacityFor = 5 * time.Minute

// gatherCapacities reads the infrastructure templates of the groups of Cluster API. Each provider has a kind of its own, which the operator may
// read with the rights of config/autoscaling if it knows it; what cannot be read is not known.
func (c *Controller) gatherCapacities(ctx context.Context, s *autoscaling.Snapshot) {
	if len(s.Policies) == 0 {
		return
	}
	read := map[string]capacity{}
	for i := range s.Scalables {
		of := &s.Scalables[i]
		if of.Template.Kind == "" || of.Owner != nil {
			continue
		}
		key := strings.Join([]string{of.Template.Group, of.Template.Kind, of.Namespace, of.Template.Name}, "/")
		known, is := read[key]
		if !is {
			if known, is = c.capacities[key]; !is || s.Now.Sub(known.at) >= capacityFor {
				known = capacity{c.readCapacity(ctx, of), s.Now}
			}
			read[key] = known
		}
		of.Capacity = known.of
	}
	c.capacities = read
}

func (c *Controller) readCapacity(ctx context.Context, of *autoscaling.Scalable) map[string]int64 {
	mapping, err := c.client.RESTMapper().RESTMapping(schema.GroupKind{Group: of.Template.Group, Kind: of.Template.Kind})
	if err != nil {
		return nil
	}
	template := &unstructured.Unstructured{}
	template.SetGroupVersionKind(mapping.GroupVersionKind)
	if err := c.reader.Get(ctx, client.ObjectKey{Namespace: of.Namespace, Name: of.Template.Name}, template); err != nil {
		return nil
	}
	return autoscaling.CapacityOf(template)
}
