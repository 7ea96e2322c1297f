// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package oci is what programs need that stand before runc: they change the configuration of a container that is
// created, and become runc or the next of them.
package oci

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Config is a container's configuration, as the OCI runtime specification has it.
type Config map[string]any

const configFile = "config.json"

// Become lets change see the configuration of the container that the arguments create, if they create one, and becomes
// the runtime of that name. It returns only with an error.
func Become(runtime string, args []string, change func(Config) error) error {
	if bundle, ok := created(args); ok {
		if err := amend(filepath.Join(bundle, configFile), change); err != nil {
			return err
		}
	}
	path, err := exec.LookPath(runtime)
	if err != nil {
		return fmt.Errorf("finding %s: %w", runtime, err)
	}
	return unix.Exec(path, append([]string{path}, args[1:]...), os.Environ())
}

// created is the bundle of the container that the arguments say is to be created.
func created(args []string) (bundle string, ok bool) {
	for i, a := range args {
		if a == "create" {
			ok = true
		}
		if (a == "--bundle" || a == "-b") && i+1 < len(args) {
			bundle = args[i+1]
		}
	}
	return bundle, ok && bundle != ""
}

func amend(path string, change func(Config) error) error {
	config, err := read(path)
	if err != nil {
		return err
	}
	if err := change(config); err != nil {
		return err
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return fmt.Errorf("writing the container's configuration: %w", err)
	}
	return os.WriteFile(path, raw, 0o600)
}

func read(path string) (Config, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the container's configuration: %w", err)
	}
	config := Config{}
	if err := json.Unmarshal(raw, &config); err != nil {
		return nil, fmt.Errorf("reading the container's configuration: %w", err)
	}
	return config, nil
}

// AddMount mounts a file or folder of the node.
func (c Config) AddMount(from, to string) {
	c["mounts"] = append(List(c["mounts"]), map[string]any{
		"source": from, "destination": to, "type": "bind", "options": []string{"rbind", "nosuid"},
	})
}

// AddHook runs this program with one argument in the container's mount namespace, before its root is entered and before
// all other hooks, which see what it has mounted.
func (c Config) AddHook(argument string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	hooks, _ := c["hooks"].(map[string]any)
	if hooks == nil {
		hooks = map[string]any{}
	}
	own := map[string]any{"path": self, "args": []string{self, argument}}
	hooks["createContainer"] = append([]any{own}, List(hooks["createContainer"])...)
	c["hooks"] = hooks
	return nil
}

// List is a list of a configuration; empty if there is none.
func List(v any) []any {
	l, _ := v.([]any)
	return l
}

// Mount is what a hook does to mount, in the container to whose state stdin belongs, what runc refuses to mount itself,
// since it lies below /proc. What it mounts where is in all, source by destination.
func Mount(stdin io.Reader, all map[string]string) error {
	root, err := rootOf(stdin)
	if err != nil {
		return err
	}
	for to, from := range all {
		if err := unix.Mount(from, filepath.Join(root, to), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting %s: %w", to, err)
		}
	}
	return nil
}

// rootOf is the root file system of the container to whose state stdin belongs.
func rootOf(stdin io.Reader) (string, error) {
	var state struct {
		Bundle string `json:"bundle"`
	}
	if err := json.NewDecoder(stdin).Decode(&state); err != nil {
		return "", fmt.Errorf("reading the container's state: %w", err)
	}
	config, err := read(filepath.Join(state.Bundle, configFile))
	if err != nil {
		return "", err
	}
	described, _ := config["root"].(map[string]any)
	root, _ := described["path"].(string)
	if !filepath.IsAbs(root) {
		root = filepath.Join(state.Bundle, root)
	}
	return root, nil
}
