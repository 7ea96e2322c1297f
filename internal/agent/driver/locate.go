// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"path"
	"strings"
)

// Auto is the driver root that is found on each node.
const Auto = "auto"

const (
	containerRoot = "/run/nvidia/driver"      // where NVIDIA's driver container shows its root file system
	validations   = "/run/nvidia/validations" // where NVIDIA's validator keeps its marks
	readyMark     = validations + "/driver-ready"
	// containerReadyMark is the driver container's own, by which the validator knows that it may look for the driver.
	containerReadyMark = validations + "/.driver-ctr-ready"
)

// Roots are where the driver is, as paths on the node.
type Roots struct {
	Driver string // holds the driver's libraries and programs: /run/nvidia/driver, or / for a driver on the host
	Dev    string // holds dev with the driver's device nodes
}

// State says why there is no driver to work with.
type State int

// The states of a driver that cannot be used.
const (
	NotFound    State = iota // there is none on the node
	NotReady                 // it is being installed or replaced
	Unsupported              // the platform has no driver that can be shared
)

// Missing is the error that there is no driver to work with, and what to do about it.
type Missing struct {
	State   State
	Message string
}

func (m *Missing) Error() string { return m.Message }

// marks are what a node says about its driver.
type marks struct {
	operator bool    // the GPU Operator's validator keeps its marks on this node
	ready    *string // content of its mark that the driver is ready; nil: there is no such mark
	tegra    bool
}

// tree is what a folder holds of a driver.
type tree struct {
	library bool // NVML
	wsl     bool // NVML of the Windows Subsystem for Linux
	dev     bool // a folder dev
}

// locate decides where the driver is: where asked says, else where NVIDIA's validator says, else, on a node that has no
// validator, in the driver container's folder or on the host.
func locate(requested string, m marks, look func(root string) tree) (Roots, error) {
	if m.tegra {
		return Roots{}, missing(Unsupported, "Tegra (/etc/nv_tegra_release) is not supported: its driver has no NVML device list")
	}
	if requested != Auto {
		return complete(Roots{Driver: requested}, NotFound, "--driver-root", look)
	}
	if m.ready == nil && m.operator {
		return Roots{}, missing(NotReady, "Waiting for NVIDIA's driver: %s is absent, so the GPU Operator installs or replaces the driver. "+
			"If no GPU Operator runs, delete %s or set the driver root (chart: driver.root)", readyMark, validations)
	}
	if m.ready != nil {
		roots, said, err := parseReady(*m.ready)
		if err != nil || said {
			return completeUnlessFailed(roots, err, look)
		}
	}
	return search(look)
}

// completeUnlessFailed is complete for what NVIDIA's mark says.
func completeUnlessFailed(r Roots, err error, look func(root string) tree) (Roots, error) {
	if err != nil {
		return Roots{}, err
	}
	return complete(r, NotReady, readyMark, look)
}

// parseReady reads NVIDIA's mark. Versions of the GPU Operator before v24 left it empty: then said is false.
func parseReady(content string) (r Roots, said bool, err error) {
	for line := range strings.Lines(content) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.Trim(value, `"'`)
		switch name {
		case "NVIDIA_DRIVER_ROOT":
			r.Driver = value
		case "NVIDIA_DEV_ROOT":
			r.Dev = value
		}
	}
	if r.Driver == "" && r.Dev == "" {
		return Roots{}, false, nil
	}
	for _, root := range []string{r.Driver, r.Dev} {
		if root != "" && !path.IsAbs(root) {
			return Roots{}, true, missing(NotReady, "%s names %q, which is no absolute path: delete the pod of NVIDIA's "+
				"operator-validator on this node, which writes the file again", readyMark, root)
		}
	}
	if r.Driver == "" {
		return Roots{}, true, missing(NotReady, "%s names no NVIDIA_DRIVER_ROOT: delete the pod of NVIDIA's operator-validator "+
			"on this node, which writes the file again", readyMark)
	}
	return r, true, nil
}

// complete checks roots that source names, and finds the device root as NVIDIA's validator does: the driver root if it
// has a folder dev, else the host.
func complete(r Roots, state State, source string, look func(root string) tree) (Roots, error) {
	r.Driver = path.Clean(r.Driver)
	found := look(r.Driver)
	switch {
	case !found.library && found.wsl:
		return Roots{}, unsupportedWSL()
	case !found.library:
		return Roots{}, missing(state, "No %s below %s, which %s names as the driver root: wait for the driver, or install it there",
			libraryName, r.Driver, source)
	case r.Dev == "" && found.dev:
		r.Dev = r.Driver
	case r.Dev == "":
		r.Dev = "/"
	}
	r.Dev = path.Clean(r.Dev)
	if !look(r.Dev).dev {
		return Roots{}, missing(state, "No folder dev below %s, which %s names as the root of the device nodes: "+
			"wait for the driver, or install it again", r.Dev, source)
	}
	return r, nil
}

// search looks where drivers are when nobody says it.
func search(look func(root string) tree) (Roots, error) {
	for _, root := range []string{containerRoot, "/"} {
		if found := look(root); found.library {
			return complete(Roots{Driver: root}, NotReady, "the search for it", look)
		} else if found.wsl {
			return Roots{}, unsupportedWSL()
		}
	}
	return Roots{}, missing(NotFound, "No NVIDIA driver on this node: no %s below %s (driver container) or / (driver on the host). "+
		"Install the driver, or set the driver root (chart: driver.root)", libraryName, containerRoot)
}

func unsupportedWSL() error {
	return missing(Unsupported, "The Windows Subsystem for Linux is not supported: its driver has neither device nodes nor MIG")
}

func missing(state State, format string, args ...any) error {
	return &Missing{State: state, Message: fmt.Sprintf(format, args...)}
}
