// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// digests are the digests of all that was decided in each history, by seed. A change that moves code and changes no
// behaviour leaves them as they are.
type digests struct {
	mu   sync.Mutex
	seed map[uint64]string
}

// newDigests returns nil unless HISTORIES_DIGEST is set.
func newDigests() *digests {
	if os.Getenv("HISTORIES_DIGEST") == "" {
		return nil
	}
	return &digests{seed: map[uint64]string{}}
}

// play is play, and notes the digest of what is decided.
func (d *digests) play(h history.History, tells bool) (broken string, told []string) {
	if d == nil {
		return play(h, tells)
	}
	sum := sha256.New()
	broken, told = playing(h, tells, watching{sum: sum})
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, noted := d.seed[h.Seed]; !noted { // shorter ones follow one that fails
		d.seed[h.Seed] = hex.EncodeToString(sum.Sum(nil))
	}
	return broken, told
}

// report logs one digest of all histories, which does not depend on the order in which they were played.
func (d *digests) report(t *testing.T) {
	t.Helper()
	if d == nil {
		return
	}
	var all []byte
	for _, seed := range slices.Sorted(maps.Keys(d.seed)) {
		all = fmt.Appendf(all, "%d %s\n", seed, d.seed[seed])
		if os.Getenv("HISTORIES_DIGEST") == "each" {
			t.Logf("seed %d: %s", seed, d.seed[seed][:16])
		}
	}
	t.Logf("digest of the decisions of %d histories: %x", len(d.seed), sha256.Sum256(all))
}

// digest writes all that was decided, without the names of types and fields, so that a new name is no other decision.
func digest(to hash.Hash, d rollout.Decision) {
	if to != nil {
		to.Write(values(nil, reflect.ValueOf(d)))
	}
}

// values appends a value with all that it refers to.
func values(to []byte, v reflect.Value) []byte {
	switch v.Kind() { //nolint:exhaustive // the others are written as they are
	case reflect.Invalid:
		return append(to, "nil;"...)
	case reflect.Pointer, reflect.Interface:
		return values(to, v.Elem())
	case reflect.Slice, reflect.Array:
		to = append(to, '[')
		for i := range v.Len() {
			to = values(to, v.Index(i))
		}
		return append(to, ']')
	case reflect.Map:
		if v.Len() == 0 {
			return append(to, "{}"...)
		}
		names := map[string]reflect.Value{}
		for _, key := range v.MapKeys() {
			names[fmt.Sprint(key.Interface())] = v.MapIndex(key)
		}
		to = append(to, '{')
		for _, name := range slices.Sorted(maps.Keys(names)) {
			to = values(fmt.Appendf(to, "%q:", name), names[name])
		}
		return append(to, '}')
	case reflect.Struct:
		return fields(to, v)
	case reflect.String:
		return append(append(to, v.String()...), ';')
	case reflect.Bool:
		return append(strconv.AppendBool(to, v.Bool()), ';')
	}
	return fmt.Appendf(to, "%v;", v.Interface())
}

func fields(to []byte, v reflect.Value) []byte {
	if at, is := reflect.TypeAssert[interface{ Unix() int64 }](v); is {
		return fmt.Appendf(to, "%d;", at.Unix())
	}
	if text, is := reflect.TypeAssert[fmt.Stringer](v); is { // an action, or a quantity
		to = fmt.Appendf(to, "%q;", text.String())
	}
	to = append(to, '(')
	for _, field := range v.Fields() {
		if field.CanInterface() {
			to = values(to, field)
		}
	}
	return append(to, ')')
}

// TestTheDigestTellsDecisionsApart: a difference anywhere in a decision is another digest.
func TestTheDigestTellsDecisionsApart(t *testing.T) {
	of := func(d rollout.Decision) string {
		sum := sha256.New()
		digest(sum, d)
		return hex.EncodeToString(sum.Sum(nil))
	}
	seen := map[string]string{}
	for name, d := range map[string]rollout.Decision{
		"none":    {},
		"action":  {Actions: []action.Action{action.Untaint{Node: "a"}}},
		"another": {Actions: []action.Action{action.Untaint{Node: "b"}}},
		"kind":    {Actions: []action.Action{action.AllowMPS{Node: "a"}}},
		"state":   {Nodes: []rollout.NodeState{{Node: "a", State: node.Draining}}},
		"later":   {After: time.Second},
		"map":     {Unmet: map[string][]string{"a": {"x"}}},
	} {
		sum := of(d)
		if other, is := seen[sum]; is {
			t.Errorf("%s and %s have the same digest", name, other)
		}
		seen[sum] = name
		if of(d) != sum {
			t.Errorf("%s has two digests", name)
		}
	}
}
