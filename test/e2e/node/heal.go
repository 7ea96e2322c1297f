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

// lostPlugin is what a kubelet says, of v1.37 at least, that has lost a device plugin for good: one that starts anew, as
// NVIDIA's does for another configuration, may register before the kubelet has noticed that its old connection has ended,
// and is then refused for ever. To restart the kubelet is the only way out.
const lostPlugin = "device plugin already connected"

// healEvery is how often one looks whether the kubelet has lost a plugin.
const healEvery = time.Second

// Heal restarts a kubelet that has lost a device plugin, as an administrator must, until the context ends. Lost says how
// often that was.
func (n *Node) Heal(ctx context.Context) {
	log := filepath.Join(logs, "kubelet.log")
	_, read := readFrom(log, 0) // what a node that is gone has said
	for tick := time.NewTicker(healEvery); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var said []byte
		if said, read = readFrom(log, read); !bytes.Contains(said, []byte(lostPlugin)) {
			continue
		}
		n.lost.Add(1)
		if err := n.RestartKubelet(ctx); err != nil {
			n.say("restarting the kubelet that has lost a device plugin: %v", err)
		}
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
