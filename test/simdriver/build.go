// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The programs, as Build names them.
const (
	library    = "libnvidia-ml.so.1"
	library615 = "libnvidia-ml.so.615" // of drivers that have memory limits
	smi        = "nvidia-smi"
	mpsControl = "nvidia-cuda-mps-control"
)

// CacheDir is where Build keeps programs by default: outside the repository, so that they outlive a clone.
func CacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding a folder for built programs: %w", err)
	}
	return filepath.Join(cache, "gpu-sharing-operator"), nil
}

// Build builds the programs of the driver, which takes Go and a C compiler, and returns the folder they are in. What
// was built of the same sources before is taken from cacheDir. It must run inside this module.
func Build(ctx context.Context, cacheDir string) (string, error) {
	module, err := moduleRoot(ctx)
	if err != nil {
		return "", fmt.Errorf("building the simulated driver: %w", err)
	}
	key, err := contentKey(ctx, module)
	if err != nil {
		return "", fmt.Errorf("building the simulated driver: %w", err)
	}
	built := filepath.Join(cacheDir, "simdriver-"+key)
	if err := buildOnce(ctx, module, built); err != nil {
		return "", fmt.Errorf("building the simulated driver: %w", err)
	}
	return built, used(built)
}

// BuildMIGParted builds NVIDIA's mig-parted of its Go module unless it is in cacheDir, and returns where it is. It must
// run inside this module.
func BuildMIGParted(ctx context.Context, cacheDir string) (string, error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return "", fmt.Errorf("building mig-parted: %w", err)
	}
	ask := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir, cmd.Env = filepath.Join(root, "hack", "nvidia"), append(os.Environ(), "CGO_ENABLED=1")
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("building mig-parted: %w", err)
		}
		return strings.TrimSpace(string(out)), nil
	}
	version, err := ask("list", "-m", "-f", "{{.Version}}", "github.com/NVIDIA/mig-parted")
	if err != nil {
		return "", err
	}
	program := filepath.Join(cacheDir, "mig-parted-"+version, "nvidia-mig-parted")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	if _, err := ask("build", "-trimpath", "-o", program+".new", "github.com/NVIDIA/mig-parted/cmd/nvidia-mig-parted"); err != nil {
		return "", err
	}
	return program, os.Rename(program+".new", program)
}

// keepUnused is how long programs stay in the cache after they were used last.
const keepUnused = 7 * 24 * time.Hour

// used notes that programs are used and removes those that have not been for long.
func used(built string) error {
	now := time.Now()
	if err := os.Chtimes(built, now, now); err != nil {
		return fmt.Errorf("noting the use of %s: %w", built, err)
	}
	others, err := filepath.Glob(filepath.Join(filepath.Dir(built), "simdriver-*"))
	if err != nil {
		return err
	}
	for _, other := range others {
		if info, err := os.Stat(other); err == nil && now.Sub(info.ModTime()) > keepUnused {
			_ = os.RemoveAll(other) // a cache: what stays is removed another time
		}
	}
	return nil
}

// buildOnce builds unless that was done; of several processes that want the same, one builds and the others wait.
func buildOnce(ctx context.Context, module, target string) error {
	if _, err := os.Stat(target); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	unlock, err := lock(os.OpenFile(target+".lock", os.O_CREATE|os.O_RDWR, 0o644))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(target); err == nil {
		return nil
	}
	return errors.Join(buildInto(ctx, module, target), os.Remove(target+".lock"))
}

// buildInto builds beside the target and moves it there whole, so that a build that was interrupted is never used.
func buildInto(ctx context.Context, module, target string) error {
	temporary, err := os.MkdirTemp(filepath.Dir(target), ".building-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary) //nolint:errcheck // gone after the renaming
	for _, p := range []struct{ name, folder, cgo, mode, tags string }{
		{library, "libnvidia-ml", "1", "c-shared", ""},
		{library615, "libnvidia-ml", "1", "c-shared", "r615"},
		{smi, "nvidia-smi", "0", "exe", ""},
		{mpsControl, "nvidia-cuda-mps-control", "0", "exe", ""},
		{persistenced, "nvidia-persistenced", "0", "exe", ""},
		{fabricManager, "nv-fabricmanager", "0", "exe", ""},
	} {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-buildmode="+p.mode, "-tags="+p.tags,
			"-o", filepath.Join(temporary, p.name), "./test/simdriver/"+p.folder)
		cmd.Dir, cmd.Env = module, append(os.Environ(), "CGO_ENABLED="+p.cgo)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build of %s: %w\n%s", p.name, err, out)
		}
	}
	if err := os.Rename(temporary, target); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Chmod(target, 0o755)
}

func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("finding this module: %w", err)
	}
	root := filepath.Dir(strings.TrimSpace(string(out)))
	if _, err := os.Stat(filepath.Join(root, "test", "simdriver")); err != nil {
		return "", fmt.Errorf("the working directory is outside of this module: %w", err)
	}
	return root, nil
}

// contentKey is a digest of all that the programs are built from.
func contentKey(ctx context.Context, module string) (string, error) {
	version, err := exec.CommandContext(ctx, "go", "env", "GOVERSION", "GOARCH").Output()
	if err != nil {
		return "", fmt.Errorf("asking for Go's version: %w", err)
	}
	digest := sha256.New()
	digest.Write(version)
	files, err := filepath.Glob(filepath.Join(module, "internal", "gpu", "*.go"))
	if err != nil {
		return "", fmt.Errorf("listing the vocabulary of the hardware: %w", err)
	}
	for _, folder := range []string{"internal/gpu/catalogue", "test/gpu/sim", "test/simdriver"} {
		found, err := sources(filepath.Join(module, folder))
		if err != nil {
			return "", err
		}
		files = append(files, found...)
	}
	slices.Sort(files)
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		digest.Write(fmt.Appendf(nil, "%s %d\n", strings.TrimPrefix(f, module), len(raw)))
		digest.Write(raw)
	}
	return fmt.Sprintf("%x", digest.Sum(nil))[:16], nil
}

func sources(folder string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
		source := slices.Contains([]string{".go", ".c", ".h", ".json"}, filepath.Ext(path))
		if err == nil && source && !e.IsDir() && !strings.HasSuffix(path, "_test.go") {
			found = append(found, path)
		}
		return err
	})
	return found, err
}
