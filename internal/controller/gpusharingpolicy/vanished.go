// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
)

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
