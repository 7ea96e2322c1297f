// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

const (
	// managementSpec gives NVIDIA's own pods all GPUs. The container toolkit writes it when it starts.
	managementSpec = "management.nvidia.com-gpu.yaml"
	capsPrefix     = "/dev/" + capsFolder + "/nvidia-cap"
)

// refreshSpec makes the CDI specification for NVIDIA's own pods list the capability nodes that exist: a missing one
// hides an instance from DCGM, and one too many keeps the pods from starting. All else in it is the container
// toolkit's, and stays as the installed version of the toolkit wrote it.
func (d Driver) refreshSpec(folder string) error {
	if folder == "" {
		return nil
	}
	file := filepath.Join(folder, managementSpec)
	content, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) { // CDI is off, or the toolkit has not started
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading NVIDIA's CDI specification: %w", err)
	}
	nodes, err := deviceNodes(d.here("/dev"))
	if err != nil {
		return err
	}
	changed, err := withCapabilities(content, nodes)
	if err != nil {
		return fmt.Errorf("%s: %w: delete the pod of NVIDIA's container toolkit on this node, which writes the file again", file, err)
	}
	if changed == nil {
		return nil
	}
	return replace(file, changed)
}

// withCapabilities is a CDI specification in which each list of the driver's device nodes lists the capability nodes
// that there are; nil if it does so already.
func withCapabilities(content []byte, nodes map[string]host.Device) ([]byte, error) {
	spec := map[string]any{}
	if err := yaml.Unmarshal(content, &spec); err != nil {
		return nil, fmt.Errorf("not YAML: %w", err)
	}
	edits := []any{spec["containerEdits"]}
	devices, _ := spec["devices"].([]any)
	for _, device := range devices {
		described, _ := device.(map[string]any)
		edits = append(edits, described["containerEdits"])
	}
	found, changed := false, false
	for _, edit := range edits {
		edit, _ := edit.(map[string]any)
		list, _ := edit["deviceNodes"].([]any)
		model := modelNode(list)
		if model == nil {
			continue
		}
		found = true
		if now := listing(list, model, nodes); !reflect.DeepEqual(now, list) {
			edit["deviceNodes"], changed = now, true
		}
	}
	if !found {
		return nil, errors.New("it lists no device node of the driver")
	}
	if !changed {
		return nil, nil
	}
	return yaml.Marshal(spec)
}

// modelNode is a device node of the driver in a list, which shows how the toolkit describes one; nil if there is none.
func modelNode(list []any) map[string]any {
	for _, entry := range list {
		node, _ := entry.(map[string]any)
		if path, _ := node["path"].(string); strings.HasPrefix(path, "/dev/nvidia") && !strings.HasPrefix(path, capsPrefix) {
			return node
		}
	}
	return nil
}

// listing is a list of device nodes with the capability nodes that there are: entries that are right stay as they are.
func listing(list []any, model map[string]any, nodes map[string]host.Device) []any {
	missing := maps.Clone(nodes)
	now := make([]any, 0, len(list))
	for _, entry := range list {
		node, _ := entry.(map[string]any)
		path, _ := node["path"].(string)
		name := strings.TrimPrefix(path, "/dev/")
		if device, there := missing[name]; strings.HasPrefix(path, capsPrefix) {
			if !there || !describes(node, device) {
				continue
			}
		}
		delete(missing, name)
		now = append(now, entry)
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		if path := "/dev/" + name; strings.HasPrefix(path, capsPrefix) {
			now = append(now, described(path, missing[name], model))
		}
	}
	return now
}

// describes reports whether an entry has the numbers of a device, as far as it has any.
func describes(entry map[string]any, d host.Device) bool {
	major, has := entry["major"].(float64)
	if has && uint32(major) != d.Major {
		return false
	}
	minor, has := entry["minor"].(float64)
	return !has || uint32(minor) == d.Minor
}

// described is the entry of a device node, with those fields that the model has.
func described(path string, d host.Device, model map[string]any) map[string]any {
	entry := maps.Clone(model)
	if hostPath, ok := model["hostPath"].(string); ok {
		modelPath, _ := model["path"].(string)
		entry["hostPath"] = strings.TrimSuffix(hostPath, modelPath) + path
	}
	entry["path"] = path
	if _, has := model["major"]; has {
		entry["major"], entry["minor"] = float64(d.Major), float64(d.Minor)
	}
	if _, has := model["fileMode"]; has {
		entry["fileMode"] = float64(d.Mode.Perm())
	}
	return entry
}

// replace writes a file beside the one that it replaces and moves it there whole: containers are created at any time.
func replace(file string, content []byte) error {
	temporary, err := os.CreateTemp(filepath.Dir(file), ".gpusharing-*.tmp") // an ending that no reader of the folder takes for CDI
	if err != nil {
		return fmt.Errorf("replacing NVIDIA's CDI specification: %w", err)
	}
	defer os.Remove(temporary.Name()) //nolint:errcheck // gone after the renaming
	_, err = temporary.Write(content)
	err = errors.Join(err, temporary.Chmod(0o644), temporary.Sync(), temporary.Close())
	if err == nil {
		err = os.Rename(temporary.Name(), file)
	}
	if err != nil {
		return fmt.Errorf("replacing NVIDIA's CDI specification: %w", err)
	}
	return nil
}
