// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// The name of a config is the key of a ConfigMap and the value of a label: a prefix, and a hash of what the config
// says.

// Rendered reports whether a key has the form of those that Render and Default make.
func Rendered(key string) bool {
	at := strings.LastIndexByte(key, '-')
	if at <= 0 || len(key)-at-1 != 2*hashed {
		return false
	}
	sum, err := hex.DecodeString(key[at+1:])
	return err == nil && len(sum) == hashed
}

// IsDefault reports whether a key is that of a Default.
func IsDefault(key string) bool {
	return slices.ContainsFunc([]string{migNone, migSingle, migMixed}, func(s string) bool { return Default(s).Key == key })
}

// hashed is how many bytes of the hash a key has.
const hashed = 5

// maxKey is the longest value of a label.
const maxKey = 63

// key names content: a prefix, cut where it is too long, and a hash of the content.
func key(prefix, content string) string {
	sum := sha256.Sum256([]byte(content))
	hash := hex.EncodeToString(sum[:hashed])
	if most := maxKey - len(hash) - 1; len(prefix) > most {
		prefix = strings.TrimRight(prefix[:most], "-.")
	}
	return prefix + "-" + hash
}

// geometry tells the MIG instances of a node by the index of the GPU, not by UUIDs, so that nodes that are alike share
// one key. A node without MIG has none.
func geometry(gpus []gpuShape) string {
	var b strings.Builder
	for _, g := range gpus {
		if !g.mig {
			continue
		}
		fmt.Fprintf(&b, "\n# %d:", g.index)
		for _, i := range g.instances {
			fmt.Fprintf(&b, " %s=%d", i.Profile, i.Count)
		}
	}
	return b.String()
}
