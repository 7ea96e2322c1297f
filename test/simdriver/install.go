// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// Layout is where the driver's packages put its files.
type Layout int

// The layouts that occur.
const (
	// RPM puts libraries into usr/lib64, as Red Hat's packages do.
	RPM Layout = iota
	// Multiarch puts libraries into usr/lib/<triplet>, as Ubuntu's packages do.
	Multiarch
	// Alternatives puts libraries and programs into folders nvidia/current. Absolute links lead there through
	// /etc/alternatives, as Debian's packages do.
	Alternatives
)

// triplet is the folder of libraries on Debian and its descendants.
func triplet() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}

// libraries is the folder of the libraries, below the root.
func (l Layout) libraries() string {
	switch l {
	case Multiarch:
		return "usr/lib/" + triplet()
	case Alternatives:
		return "usr/lib/" + triplet() + "/nvidia/current"
	case RPM:
	}
	return "usr/lib64"
}

// programs is the folder of the programs, below the root.
func (l Layout) programs() string {
	if l == Alternatives {
		return "usr/lib/nvidia/current"
	}
	return "usr/bin"
}

// Install puts the driver's files of a version into a root, as a driver container does at its start. programs is what
// Build returned. The folder of the state is not touched: it belongs to the kernel, and is mounted into a new root.
func Install(root, programs, version string, layout Layout) error {
	for _, program := range []string{smi, mpsControl, persistenced, fabricManager} {
		if err := install(filepath.Join(programs, program), filepath.Join(root, layout.programs(), program), version); err != nil {
			return err
		}
	}
	lib := filepath.Join(root, layout.libraries())
	if err := install(filepath.Join(programs, libraryOf(version)), filepath.Join(lib, "libnvidia-ml.so."+version), version); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(lib, "libcuda.so."+version), ""); err != nil {
		return err
	}
	for _, name := range []string{"libnvidia-ml.so", "libcuda.so"} {
		if err := errors.Join(link(name+"."+version, filepath.Join(lib, name+".1")), link(name+".1", filepath.Join(lib, name))); err != nil {
			return err
		}
	}
	if layout == Alternatives {
		if err := linkAlternatives(root, layout); err != nil {
			return err
		}
	}
	return errors.Join(linkKernel(root), linkRun(root))
}

// libraryOf is the program that is NVML in a driver version.
func libraryOf(version string) string {
	const limits = 615
	branch, _, _ := strings.Cut(version, ".")
	if number, err := strconv.Atoi(branch); err == nil && number >= limits {
		return library615
	}
	return library
}

// linkRun makes var/run what it is on a Linux system, unless it is there.
func linkRun(root string) error {
	if _, err := os.Lstat(filepath.Join(root, "var/run")); err == nil {
		return nil
	}
	return errors.Join(os.MkdirAll(filepath.Join(root, "run"), 0o755), link("../run", filepath.Join(root, "var/run")))
}

// linkAlternatives makes the links of Debian's update-alternatives, which are absolute.
func linkAlternatives(root string, layout Layout) error {
	chain := func(name, from, to string) error {
		through := "/etc/alternatives/nvidia--" + name
		return errors.Join(link(through, filepath.Join(root, from)), link(to, filepath.Join(root, through)))
	}
	var errs []error
	for _, program := range []string{smi, mpsControl, persistenced, fabricManager} {
		errs = append(errs, chain(program, "usr/bin/"+program, "/"+layout.programs()+"/"+program))
	}
	for _, lib := range []string{library, "libcuda.so.1"} {
		errs = append(errs, chain(lib+"-"+triplet(), "usr/lib/"+triplet()+"/"+lib, "/"+layout.libraries()+"/"+lib))
	}
	return errors.Join(errs...)
}

// linkKernel shows in <root>/proc what the kernel module shows. Where a proc file system is mounted, the one who
// mounted it puts that in place.
func linkKernel(root string) error {
	if _, err := os.Lstat(filepath.Join(root, "proc/self")); err == nil {
		return nil
	}
	for _, name := range []string{"devices", "modules", "driver"} {
		if err := link(filepath.Join("..", stateFolder, kernelFolder, name), filepath.Join(root, "proc", name)); err != nil {
			return err
		}
	}
	return nil
}

func link(to, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Symlink(to, path)
}

// install copies rather than links, since two roots with one file would be one library to the dynamic linker. A file
// that a process has open is replaced, not written to. The version goes to the end of the file, where it follows the
// file wherever that is mounted.
func install(from, to, version string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close() //nolint:errcheck // only read
	out, err := os.CreateTemp(filepath.Dir(to), ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name()) //nolint:errcheck // gone after the renaming
	_, err = io.Copy(out, io.MultiReader(in, bytes.NewReader([]byte(versionMark+version+"\n"))))
	if err == nil {
		err = out.Chmod(0o755)
	}
	if closed := out.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	return os.Rename(out.Name(), to)
}

// versionMark is before the version at the end of an installed file.
const versionMark = "\nsimdriver version "

// VersionOf is the driver version to which an installed file belongs.
func VersionOf(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close() //nolint:errcheck // only read
	const enough = 64
	end := make([]byte, enough)
	if _, err := f.Seek(-enough, io.SeekEnd); err != nil {
		return "", err
	}
	if _, err := io.ReadFull(f, end); err != nil {
		return "", err
	}
	_, version, ok := bytes.Cut(end, []byte(versionMark))
	if !ok {
		return "", fmt.Errorf("%s was not installed by package simdriver", file)
	}
	return string(bytes.TrimSpace(version)), nil
}
