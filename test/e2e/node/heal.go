// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"time"
)

// What a kubelet says, of v1.37 at least, when a device plugin's connection has ended, and when it has drawn the
// consequence. A plugin that starts anew, as NVIDIA's does for another configuration, may register before the kubelet has
// noticed the end of its old connection. Then the end of one of them has no consequence: the kubelet offers for ever what the
// plugin offered last, and refuses it with "device plugin already connected". To restart the kubelet is the only way out.
const (
	connectionEnded  = `"ListAndWatch ended unexpectedly for device plugin"`
	pluginTakenAway  = `"Device plugin disconnected"`
	consequenceAfter = 3 * time.Second
)

// healEvery is how often one looks whether the kubelet has lost a plugin.
const healEvery = 500 * time.Millisecond

// Heal restarts a kubelet that has lost a device plugin, as an administrator must, until the context ends. Lost says how
// often that was.
func (n *Node) Heal(ctx context.Context) {
	log := filepath.Join(logs, "kubelet.log")
	_, read := readFrom(log, 0) // what a node that is gone has said
	open, since, kubelet := 0, time.Time{}, n.kubelets.Load()
	for tick := time.NewTicker(healEvery); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := n.kubelets.Load(); now != kubelet { // what the one before has said is of no consequence
			_, read = readFrom(log, read)
			open, kubelet = 0, now
			continue
		}
		var said []byte
		said, read = readFrom(log, read)
		was := open
		open += bytes.Count(said, []byte(connectionEnded)) - bytes.Count(said, []byte(pluginTakenAway))
		if was <= 0 && open > 0 {
			since = time.Now()
		}
		if open <= 0 || time.Since(since) < consequenceAfter {
			continue
		}
		n.lost.Add(1)
		if err := n.RestartKubelet(ctx); err != nil {
			n.say("restarting the kubelet that has lost a device plugin: %v", err)
		}
		open = 0
	}
}

// Lost is how often the kubelet has lost a device plugin.
func (n *Node) Lost() int { return int(n.lost.Load()) }

// readFrom is what a file holds from an offset on, and the offset of its end.
func readFrom(path string, offset int64) ([]byte, int64) {
	f, err := os.Open(path)
	if err != nil {
		return nil, offset
	}
	defer f.Close()                                              //nolint:errcheck // only read
	said, _ := io.ReadAll(io.NewSectionReader(f, offset, 1<<62)) // what could not be read is read next time
	return said, offset + int64(len(said))
}
