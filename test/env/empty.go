// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// registry is the prefix of all keys of a kube-apiserver in etcd.
const registry = "/registry/"

// record is what a key holds in etcd.
type record struct {
	Key, Value []byte
	Revision   string `json:"mod_revision"` //nolint:tagliatelle // of etcd's API
}

// empty takes a server back to what it was when its tests began: what they made is deleted, and what they changed or
// deleted is as it was. That is done in etcd, where neither finalizers nor admission policies hold it up. It returns
// once the API server acts accordingly.
func (s *server) empty(ctx context.Context) error {
	e := &emptied{server: s, revisions: map[string]string{}}
	if err := untilDone(ctx, e.round); err != nil {
		return fmt.Errorf("emptying the API server: %w", err)
	}
	if err := e.settle(ctx); err != nil {
		return fmt.Errorf("waiting until the API server knows that it is empty: %w", err)
	}
	return nil
}

// emptied is a server whose records in etcd are those of its beginning.
type emptied struct {
	*server

	revisions map[string]string // of etcd, in which a key was deleted or restored
}

// round is done when it found nothing to do: a request of the test may have been under way.
func (e *emptied) round(ctx context.Context) (done bool, err error) {
	now, err := e.records(ctx, false)
	if err != nil {
		return false, err
	}
	var changes []map[string]any
	var keys []string
	for key := range now {
		if _, own := e.own[key]; !own && !keptByServer(key) {
			keys = append(keys, key)
			changes = append(changes, map[string]any{"request_delete_range": map[string]any{"key": []byte(key)}})
		}
	}
	for key, was := range e.own {
		if is, there := now[key]; !keptByServer(key) && (!there || is.Revision != was.Revision) {
			keys = append(keys, key)
			changes = append(changes, map[string]any{"request_put": map[string]any{"key": []byte(key), "value": was.Value}})
		}
	}
	done = len(keys) == 0
	for len(keys) > 0 {
		n := min(len(keys), 128) // as many as etcd takes at once
		var answer struct{ Header struct{ Revision string } }
		if err := e.etcd(ctx, "txn", map[string]any{"success": changes[:n]}, &answer); err != nil {
			return false, err
		}
		for _, key := range keys[:n] {
			e.revisions[key] = answer.Header.Revision
			if was, own := e.own[key]; own {
				was.Revision = answer.Header.Revision
				e.own[key] = was
			}
		}
		keys, changes = keys[n:], changes[n:]
	}
	return done, nil
}

// keptByServer reports whether the API server itself keeps a record, and writes it again and again.
func keptByServer(key string) bool {
	return slices.ContainsFunc([]string{
		"leases/kube-system/", "masterleases/", "apiregistration.k8s.io/", "flowschemas/", "prioritylevelconfigurations/",
		"services/endpoints/default/kubernetes", "endpointslices/default/kubernetes", "servicecidrs/kubernetes",
	}, func(prefix string) bool { return strings.HasPrefix(key, registry+prefix) })
}

// records reads all that the API server keeps in etcd, by key.
func (s *server) records(ctx context.Context, values bool) (map[string]record, error) {
	var answer struct{ Kvs []record }
	err := s.etcd(ctx, "range", map[string]any{
		"key": []byte(registry), "range_end": []byte(strings.TrimSuffix(registry, "/") + "0"), "keys_only": !values,
	}, &answer)
	if err != nil {
		return nil, err
	}
	records := map[string]record{}
	for _, r := range answer.Kvs {
		records[string(r.Key)] = r
	}
	return records, nil
}

// etcd asks etcd, by the JSON form of its API.
func (s *server) etcd(ctx context.Context, method string, request, answer any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	url := s.environment.ControlPlane.Etcd.URL.JoinPath("v3", "kv", method).String()
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(post)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd answers %s to %s: %s", response.Status, method, data)
	}
	return json.Unmarshal(data, answer)
}

// untilDone tries until it is done or the context ends.
func untilDone(ctx context.Context, try func(context.Context) (bool, error)) error {
	for {
		done, err := try(ctx)
		if done {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// changed reports whether a record below one of these prefixes was deleted or restored.
func (e *emptied) changed(prefixes ...string) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(e.revisions)), func(key string) bool {
		return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(key, registry+prefix) })
	})
}

// revision is the last one in which a record below a prefix was deleted or restored; empty: none was.
func (e *emptied) revision(prefix string) string {
	last := 0
	for key, revision := range e.revisions {
		if n, err := strconv.Atoi(revision); err == nil && strings.HasPrefix(key, registry+prefix) {
			last = max(last, n)
		}
	}
	if last == 0 {
		return ""
	}
	return strconv.Itoa(last)
}
