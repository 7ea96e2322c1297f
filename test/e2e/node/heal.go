// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// What a kubelet says, of v1.37 at least, when a device plugin's connection has ended, and when it has drawn the
// consequence. A plugin that starts anew, as NVIDIA's does for another configuration, may register before the kubelet
// has noticed the end of its old connection. Then the end of one of them has no consequence: the kubelet offers for
// ever what the plugin offered last, and refuses it with "device plugin already connected". To restart the kubelet is
// the only way out.
const (
	connectionEnded  = `"ListAndWatch ended unexpectedly for device plugin"`
	pluginTakenAway  = `"Device plugin disconnected"`
	consequenceAfter = 3 * time.Second
)

// healEvery is how often one looks whether the kubelet has lost a plugin.
const healEvery = 500 * time.Millisecond

// Heal restarts a kubelet that has lost a device plugin, as an administrator must, until the context ends. Lost says
// how often that was.
func (n *Node) Heal(ctx context.Context) {
	var open ended
	began, read := int64(-1), int64(0)
	for tick := time.NewTicker(healEvery); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := n.kubeletBegan.Load(); now != began { // what the one before has said is of no consequence
			open, began, read = ended{}, now, now
		}
		said := readFrom(kubeletLog(), read)
		read += int64(len(said))
		open.hear(said, time.Now())
		if !open.before(time.Now().Add(-consequenceAfter)) {
			continue
		}
		n.lost.Add(1)
		if err := n.RestartKubelet(ctx); err != nil {
			n.say("restarting the kubelet that has lost a device plugin: %v", err)
			open = ended{}
		}
	}
}

// ended has, for each resource, when the connections of its plugin ended that had no consequence so far.
type ended map[string][]time.Time

// hear takes in whole lines of a kubelet's log.
func (e ended) hear(said []byte, now time.Time) {
	for line := range bytes.Lines(said) {
		_, resource, _ := strings.Cut(string(line), ` resource="`)
		resource, _, _ = strings.Cut(resource, `"`)
		switch {
		case bytes.Contains(line, []byte(connectionEnded)):
			e[resource] = append(e[resource], now)
		case bytes.Contains(line, []byte(pluginTakenAway)) && len(e[resource]) > 0:
			e[resource] = e[resource][1:]
		}
	}
}

// before reports whether a connection ended before a moment and had no consequence.
func (e ended) before(t time.Time) bool {
	for _, times := range e {
		if len(times) > 0 && times[0].Before(t) {
			return true
		}
	}
	return false
}

// Lost is how often the kubelet has lost a device plugin.
func (n *Node) Lost() int { return int(n.lost.Load()) }

// DevicePlugins is what the kubelet said of device plugins last, so many lines.
func (n *Node) DevicePlugins(lines int) string {
	var said []string
	for line := range bytes.Lines(readFrom(kubeletLog(), 0)) {
		if bytes.Contains(bytes.ToLower(line), []byte("device plugin")) || bytes.Contains(line, []byte("Starting to listen")) {
			said = append(said, string(line))
		}
	}
	return strings.Join(said[max(0, len(said)-lines):], "")
}

func kubeletLog() string { return filepath.Join(logs, "kubelet.log") }

// readFrom is what a file holds from an offset on, as far as its lines are whole.
func readFrom(path string, offset int64) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()                                              //nolint:errcheck // only read
	said, _ := io.ReadAll(io.NewSectionReader(f, offset, 1<<62)) // what could not be read is read next time
	return said[:bytes.LastIndexByte(said, '\n')+1]
}
