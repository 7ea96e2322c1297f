// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
)

const (
	// drawEvery is how often the page changes at most.
	drawEvery = 200 * time.Millisecond
	// previewWidth is how wide the text of a preview is, in characters.
	previewWidth = 110
	// heartbeat is how often the API server is asked whether it still answers, and how long it may take: a watch hears
	// nothing, neither of objects that do not change nor of a network that is gone.
	heartbeat = 5 * time.Second
)

// dashboard serves a page of the cluster on this machine, until it is interrupted.
func (p *Program) dashboard(ctx context.Context, f *flags, _ []string) error {
	config, err := configOf(f)
	if err != nil {
		return err
	}
	asked, err := agentsOf(config)
	if err != nil {
		return err
	}
	for _, list := range []client.ObjectList{&v1alpha1.GPUSharingPolicyList{}, &v1alpha1.GPUNodeList{}} {
		if err := asked.client.List(ctx, list, client.Limit(1)); err != nil {
			return advise(fmt.Errorf("reading the cluster: %w", err))
		}
	}
	seen, err := newWatches(config)
	if err != nil {
		return err
	}
	b := &board{program: p, agents: asked, seen: seen, hub: dashboard.NewHub(), cluster: clusterOf(f, config.Host), namespace: f.namespace}
	server := &dashboard.Server{Hub: b.hub, Clock: p.Clock, Preview: b.preview}
	listener, address, err := server.Listen(ctx, f.port)
	if err != nil {
		return err
	}
	err = p.write(fmt.Sprintf("Open %s\nThe address has a secret: with it any user of this machine sees what you may see. Interrupt this command to end the page.\n", address))
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	ctx, stop := context.WithCancel(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer stop()
	parts.Go(func() { seen.run(ctx) })
	parts.Go(func() { b.draw(ctx) })
	parts.Go(func() { b.listen(ctx) })
	parts.Go(func() { b.measure(ctx) })
	return server.Serve(ctx, listener)
}

// clusterOf names a cluster by the context of the kubeconfig, if it has one, and its API server.
func clusterOf(f *flags, host string) string {
	name := *f.config.Context
	if raw, err := f.config.ToRawKubeConfigLoader().RawConfig(); err == nil && name == "" {
		name = raw.CurrentContext
	}
	if name == "" {
		return host
	}
	return name + " (" + host + ")"
}

// board draws the page again whenever something has changed.
type board struct {
	program *Program
	agents  *agents
	seen    *watches
	hub     *dashboard.Hub
	cluster string
	// namespace is that of the controller, as leadershipOf takes it.
	namespace string

	mu       sync.Mutex
	measured map[string]measuredNode
	// driver is what NVIDIA's DRA driver publishes, and what is around it.
	driver driverObjects
	// stale is since when the API server does not answer; nil: it does.
	stale *dashboard.Stale
	// unmeasured is why nothing is measured, and stopped why no controller acts; empty: something is, one does.
	unmeasured, stopped string
}

// draw shows the page, and shows it again after each change.
func (b *board) draw(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.seen.changed:
		}
		if b.seen.settled() {
			if err := b.hub.Show(b.sight().page()); err != nil {
				b.note(func() { b.stopped = err.Error() })
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-b.program.Clock.After(drawEvery):
		}
	}
}

// measure asks the agents who uses the GPUs, as long as a browser shows the page: agents measure only while they are
// asked.
func (b *board) measure(ctx context.Context) {
	for b.hub.Read(ctx) == nil {
		// Of an error the note about what else cannot be read tells.
		leader, _ := leadershipOf(ctx, b.agents.client, b.namespace, b.program.Clock.Now())
		driver, driverErr := readDRA(ctx, b.agents.client)
		if programs, err := readPrograms(ctx, b.agents.client, b.namespace, &driver); driverErr == nil && err == nil {
			b.seen.know(programs)
		}
		b.note(func() { // many agents that do not answer take minutes
			if b.stopped = leader.absent; driverErr == nil {
				b.driver = driver
			}
		})
		nodes, err := b.agents.measure(ctx, b.program.Clock.Now())
		if ctx.Err() != nil {
			return
		}
		byNode := measuredByNode(nodes)
		b.note(func() {
			b.measured, b.unmeasured = byNode, ""
			if err != nil {
				b.unmeasured = advise(err).Error()
			}
		})
		select {
		case <-ctx.Done():
			return
		case <-b.program.Clock.After(topInterval):
		}
		if !b.hub.IsRead() {
			b.note(func() { b.measured, b.unmeasured, b.stopped = nil, "", "" }) // the next reader is not shown what was so long ago
		}
	}
}

// listen asks the API server again and again whether it still answers.
func (b *board) listen(ctx context.Context) {
	for last, why := b.program.Clock.Now(), ""; ; { // the command has just read from it
		began, was := b.program.Clock.Now(), why
		limited, cancel := context.WithTimeout(ctx, heartbeat)
		err := b.agents.client.List(limited, &v1alpha1.GPUSharingPolicyList{}, client.Limit(1))
		cancel()
		var stale *dashboard.Stale
		if why = unanswered(err); why == "" {
			last = began
		} else {
			stale = &dashboard.Stale{Since: last, Why: why}
		}
		if why != was {
			b.note(func() { b.stale = stale })
		}
		select {
		case <-ctx.Done():
			return
		case <-b.program.Clock.After(heartbeat):
		}
	}
}

// unanswered is why the API server has not answered what it was asked, by the error; empty: it has.
func unanswered(err error) string {
	if err == nil {
		return ""
	}
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return fmt.Sprintf("the API server answers %q", reason)
	}
	return "the API server does not answer"
}

// measuredByNode are the nodes by their names. Who may create a pod may give it the label of the agents: one that was
// not measured must not hide the agent of its node.
func measuredByNode(nodes []measuredNode) map[string]measuredNode {
	of := map[string]measuredNode{}
	for _, n := range nodes {
		if had, is := of[n.name]; !is || had.failed != "" {
			of[n.name] = n
		}
	}
	return of
}

// note changes what is known beside the objects.
func (b *board) note(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
	b.seen.mark()
}

// sight is all that is known now.
func (b *board) sight() sight {
	snapshot, blind, missing := b.seen.snapshot(b.program.Clock.Now())
	b.mu.Lock()
	defer b.mu.Unlock()
	lacks := b.driver.tell(&snapshot)
	s := sight{cluster: b.cluster, snapshot: snapshot, measured: b.measured, blind: blind, stale: b.stale}
	if failing := b.seen.failing(); failing != nil && (s.stale == nil || failing.Since.Before(s.stale.Since)) {
		s.stale = failing
	}
	if b.stopped != "" {
		s.notes = append(s.notes, b.stopped+". Nothing changes, and what is shown may be out of date.")
	}
	s.notes = slices.Concat(s.notes, missing, lacks)
	if b.unmeasured != "" {
		s.notes = append(s.notes, "Memory and utilization: "+b.unmeasured)
	}
	return s
}

// preview answers what plan prints, with the GPUs before and after.
func (b *board) preview(ctx context.Context, q dashboard.Question) (dashboard.Answer, error) {
	var submitted []*unstructured.Unstructured
	if strings.TrimSpace(q.Policies) != "" {
		var err error
		if submitted, err = parse([]byte(q.Policies)); err != nil {
			return dashboard.Answer{}, err
		}
	}
	if len(submitted)+len(q.Delete) == 0 {
		return dashboard.Answer{}, errors.New("a preview needs a policy to apply, or one to delete")
	}
	asked, s, err := b.program.ask(ctx, b.agents.client, b.namespace, submitted, q.Delete)
	if err != nil {
		return dashboard.Answer{}, err
	}
	shown, err := planText(ctx, b.agents.client, s, asked, previewWidth)
	if err != nil {
		return dashboard.Answer{}, err
	}
	return dashboard.Answer{Text: shown, Nodes: previewsOf(s, asked)}, nil
}
