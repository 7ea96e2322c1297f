// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"

	"sigs.k8s.io/yaml"
)

// plugin is the program that kubectl runs as `kubectl gpusharing`.
const plugin = "kubectl-gpusharing"

const license = "LICENSE"

// completion is what kubectl runs to complete the arguments of the plugin: a script, and on Windows a program.
const completion = "kubectl_complete-gpusharing"

const windows = "windows"

// pluginArchive is the file that users download, with its name: a zip for Windows, otherwise a tar.gz.
func pluginArchive(s source, p program, content map[string][]byte) (string, []byte, error) {
	name := fmt.Sprintf("%s_%s_%s", plugin, s.Version, p.platform())
	var files []file
	for _, path := range inArchive(p) {
		files = append(files, file{Path: path, Content: content[path], Executable: path != license})
	}
	if p.OS == windows {
		data, err := zipped(s, files)
		return name + ".zip", data, err
	}
	plain, err := archive(s, files)
	if err != nil {
		return "", nil, err
	}
	data, err := gzipped(plain)
	return name + ".tar.gz", data, err
}

// inArchive are the names of the files in the archive of a program.
func inArchive(p program) []string { return []string{license, p.named(plugin), p.named(completion)} }

// named is how a program is called where p runs.
func (p program) named(name string) string {
	if p.OS == windows {
		return name + ".exe"
	}
	return name
}

func gzipped(content []byte) ([]byte, error) {
	var buffer bytes.Buffer
	w := gzip.NewWriter(&buffer) // without a name and a time
	if _, err := w.Write(content); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	return buffer.Bytes(), nil
}

func zipped(s source, files []file) ([]byte, error) {
	var buffer bytes.Buffer
	w := zip.NewWriter(&buffer)
	for _, f := range files {
		header := &zip.FileHeader{Name: f.Path, Method: zip.Deflate, Modified: s.Time}
		mode := fs.FileMode(0o644)
		if f.Executable {
			mode = 0o755
		}
		header.SetMode(mode)
		to, err := w.CreateHeader(header)
		if err != nil {
			return nil, fmt.Errorf("compressing %s: %w", f.Path, err)
		}
		if _, err := to.Write(f.Content); err != nil {
			return nil, fmt.Errorf("compressing %s: %w", f.Path, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	return buffer.Bytes(), nil
}

// download is the archive of a program.
type download struct {
	program program
	name    string
	content []byte
}

// krew is the manifest with which krew installs the plugin
// (https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest).
func krew(s source, downloads []download) ([]byte, error) {
	var platforms []any
	for _, d := range downloads {
		var files []any
		for _, path := range inArchive(d.program) {
			files = append(files, map[string]any{"from": path, "to": "."})
		}
		platforms = append(platforms, map[string]any{
			"selector": map[string]any{"matchLabels": map[string]any{"os": d.program.OS, "arch": d.program.Arch}},
			"uri":      fmt.Sprintf("%s/releases/download/%s/%s", repository, s.Version, d.name),
			"sha256":   sum(d.content),
			"bin":      d.program.named(plugin),
			"files":    files,
		})
	}
	return yaml.Marshal(map[string]any{
		"apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
		"kind":       "Plugin",
		"metadata":   map[string]any{"name": "gpusharing"},
		"spec": map[string]any{
			"version":          s.Version,
			"homepage":         repository,
			"shortDescription": "Plan, watch and restore how NVIDIA GPUs are shared",
			"description": "Prints what a GPUSharingPolicy would change on each node, how the GPUs of nodes are shared now and\n" +
				"by which pods, describes GPUs that are shared by hand as policies, and restores all nodes.\n",
			// krew puts only the program in the PATH (kubernetes-sigs/krew issue 812).
			"caveats": fmt.Sprintf("For completion copy a file into the PATH. On Linux and macOS:\n"+
				"  cp \"${KREW_ROOT:-$HOME/.krew}/store/gpusharing/%[1]s/%[2]s\" \"${KREW_ROOT:-$HOME/.krew}/bin/\"\n"+
				"On Windows, where kubectl completes gpusharing.exe:\n"+
				"  copy \"%%USERPROFILE%%\\.krew\\store\\gpusharing\\%[1]s\\%[2]s.exe\" \"%%USERPROFILE%%\\.krew\\bin\"\n", s.Version, completion),
			"platforms": platforms,
		},
	})
}

func sum(content []byte) string {
	hash := sha256.Sum256(content)
	return hex.EncodeToString(hash[:])
}
