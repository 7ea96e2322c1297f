// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
)

// Hub keeps the latest page, and hands each reader what has changed since it last read. A reader that is slow misses
// values between two reads, and never the latest one.
type Hub struct {
	mu      sync.Mutex
	version int64
	head    part
	nodes   map[string]part
	changed chan struct{} // closed with each new version
	readers int
	read    chan struct{} // closed while there is a reader
}

// part is a part of the page as JSON, and the version with which it last changed.
type part struct {
	json    json.RawMessage
	version int64
}

// NewHub returns a Hub that has no page yet.
func NewHub() *Hub {
	return &Hub{nodes: map[string]part{}, changed: make(chan struct{}), read: make(chan struct{})}
}

// Show makes a page the latest. Errors: a value that JSON cannot express.
func (h *Hub) Show(p Page) error {
	head, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encoding the page: %w", err)
	}
	cards := make(map[string]json.RawMessage, len(p.Nodes))
	for i := range p.Nodes {
		if cards[p.Nodes[i].Name], err = json.Marshal(&p.Nodes[i]); err != nil {
			return fmt.Errorf("encoding node %s: %w", p.Nodes[i].Name, err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	next := h.version + 1
	differs := h.version == 0
	replace := func(old part, now json.RawMessage) part {
		if bytes.Equal(old.json, now) {
			return old
		}
		differs = true
		return part{now, next}
	}
	h.head = replace(h.head, head)
	for name, card := range cards {
		h.nodes[name] = replace(h.nodes[name], card)
	}
	for name := range h.nodes {
		if _, is := cards[name]; !is {
			delete(h.nodes, name)
			differs = true
		}
	}
	if differs {
		h.version = next
		close(h.changed)
		h.changed = make(chan struct{})
	}
	return nil
}

// Read waits until there is a reader. Errors: that of the context.
func (h *Hub) Read(ctx context.Context) error {
	h.mu.Lock()
	read := h.read
	h.mu.Unlock()
	select {
	case <-read:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// IsRead reports whether there is a reader.
func (h *Hub) IsRead() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.readers > 0
}

// enter counts a reader, until it leaves.
func (h *Hub) enter() (leave func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.readers++; h.readers == 1 {
		close(h.read)
	}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.readers--; h.readers == 0 {
			h.read = make(chan struct{})
		}
	}
}

// update is what has changed since the last update of a reader.
type update struct {
	Page  json.RawMessage   `json:"page,omitempty"`
	Names []string          `json:"names,omitempty"` // of all nodes, in the first update
	Gone  []string          `json:"gone,omitempty"`
	Nodes []json.RawMessage `json:"nodes,omitempty"` // by name
}

// lines are the lines of JSON by which an update is sent, short ones, so that a browser does not stop while it reads
// one.
func (u *update) lines() ([]byte, error) {
	const most = 20 // nodes
	var lines bytes.Buffer
	encoder := json.NewEncoder(&lines)
	nodes := u.Nodes
	first := *u
	first.Nodes = nodes[:min(most, len(nodes))]
	err := encoder.Encode(first)
	for nodes = nodes[len(first.Nodes):]; len(nodes) > 0 && err == nil; nodes = nodes[min(most, len(nodes)):] {
		err = encoder.Encode(update{Nodes: nodes[:min(most, len(nodes))]})
	}
	return lines.Bytes(), err
}

// cursor is how far a reader has read.
type cursor struct {
	version int64
	names   map[string]bool
}

// next returns what has changed since a cursor, and moves it. It returns nil if nothing has, with a channel that is
// closed once something does.
func (h *Hub) next(at *cursor) (*update, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if at.version == h.version {
		return nil, h.changed
	}
	u := &update{}
	if at.version == 0 {
		u.Names = slices.Sorted(maps.Keys(h.nodes))
	}
	if h.head.version > at.version {
		u.Page = h.head.json
	}
	for _, name := range slices.Sorted(maps.Keys(h.nodes)) {
		if h.nodes[name].version > at.version {
			u.Nodes = append(u.Nodes, h.nodes[name].json)
		}
	}
	names := make(map[string]bool, len(h.nodes))
	for name := range h.nodes {
		names[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(at.names)) {
		if !names[name] {
			u.Gone = append(u.Gone, name)
		}
	}
	at.version, at.names = h.version, names
	return u, h.changed
}
