// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"testing"

	"golang.org/x/sys/unix"
	ctrl "sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// TestNoInotifyEndsNoAgent: the kernel counts instances by user ID, and root of a container has the agent's. Without one the pods are looked for
// as often as without an event.
func TestNoInotifyEndsNoAgent(t *testing.T) {
	m := &MemoryLimiter{again: make(chan struct{}, 1), LimitSources: LimitSources{Cgroups: host.Cgroups{Folder: t.TempDir()}}}
	ctx, cancel := context.WithCancel(t.Context())
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	none := files
	none.Cur = 3
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil { // as if all instances were taken
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &files) //nolint:errcheck // the limit of before
	done := make(chan error, 1)
	go func() { done <- m.watch(ctx, make(chan ctrl.GenericEvent)) }()
	for range 3 { // a look after which it watches, and two that let it try again
		select {
		case m.again <- struct{}{}:
		case err := <-done:
			t.Fatalf("the watch, and with it the agent, ended: %v", err)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
