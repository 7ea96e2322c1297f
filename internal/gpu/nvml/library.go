// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const libraryName = "libnvidia-ml.so.1"

// libraryFolders is where drivers put the library, below the driver root.
func libraryFolders() []string {
	return []string{
		"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current",
		"usr/lib/aarch64-linux-gnu/nvidia/current", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib",
		"usr/local/nvidia/lib64", "usr/lib/wsl/lib",
	}
}

// FindLibrary finds NVML below a driver root, such as / or /run/nvidia/driver. Symbolic links that lead out of the root
// do not count.
func FindLibrary(driverRoot string) (string, error) {
	files, err := openRoot(driverRoot)
	if err != nil {
		return "", fmt.Errorf("looking for %s: %w", libraryName, err)
	}
	for _, folder := range libraryFolders() {
		path := folder + "/" + libraryName
		if info, err := fs.Stat(files, path); err == nil && info.Mode().IsRegular() {
			return filepath.Join(driverRoot, path), nil
		}
	}
	return "", fmt.Errorf("no %s below %s (looked in %s): is the NVIDIA driver installed there?",
		libraryName, driverRoot, strings.Join(libraryFolders(), ", "))
}

// openRoot keeps look-ups inside the root. Of / nothing leads out, not even the absolute links that Debian uses.
func openRoot(path string) (fs.FS, error) {
	if filepath.Clean(path) == "/" {
		return os.DirFS("/"), nil
	}
	root, err := os.OpenRoot(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no driver root %s: %w", path, err)
	}
	if err != nil {
		return nil, err
	}
	return root.FS(), nil
}
