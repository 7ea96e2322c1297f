// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// callError is the error of an NVML call, nil on success. It names the call and the return as NVML does and wraps the
// sentinel that belongs to the return.
func callError(call string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	name, sentinel := describe(ret)
	if sentinel == nil {
		return fmt.Errorf("%s: %s", call, name)
	}
	return fmt.Errorf("%s: %s: %w", call, name, sentinel)
}

// returnNames is how NVML calls the returns that we have met.
func returnNames() map[nvml.Return]string {
	return map[nvml.Return]string{
		nvml.ERROR_UNINITIALIZED:           "ERROR_UNINITIALIZED",
		nvml.ERROR_INVALID_ARGUMENT:        "ERROR_INVALID_ARGUMENT",
		nvml.ERROR_NOT_SUPPORTED:           "ERROR_NOT_SUPPORTED",
		nvml.ERROR_NO_PERMISSION:           "ERROR_NO_PERMISSION",
		nvml.ERROR_NOT_FOUND:               "ERROR_NOT_FOUND",
		nvml.ERROR_INSUFFICIENT_SIZE:       "ERROR_INSUFFICIENT_SIZE",
		nvml.ERROR_DRIVER_NOT_LOADED:       "ERROR_DRIVER_NOT_LOADED",
		nvml.ERROR_TIMEOUT:                 "ERROR_TIMEOUT",
		nvml.ERROR_LIBRARY_NOT_FOUND:       "ERROR_LIBRARY_NOT_FOUND",
		nvml.ERROR_FUNCTION_NOT_FOUND:      "ERROR_FUNCTION_NOT_FOUND",
		nvml.ERROR_GPU_IS_LOST:             "ERROR_GPU_IS_LOST",
		nvml.ERROR_RESET_REQUIRED:          "ERROR_RESET_REQUIRED",
		nvml.ERROR_LIB_RM_VERSION_MISMATCH: "ERROR_LIB_RM_VERSION_MISMATCH",
		nvml.ERROR_IN_USE:                  "ERROR_IN_USE",
		nvml.ERROR_INSUFFICIENT_RESOURCES:  "ERROR_INSUFFICIENT_RESOURCES",
		nvml.ERROR_INVALID_STATE:           "ERROR_INVALID_STATE",
		nvml.ERROR_UNKNOWN:                 "ERROR_UNKNOWN",
	}
}

func describe(ret nvml.Return) (name string, sentinel error) {
	name, ok := returnNames()[ret]
	if !ok {
		name = fmt.Sprintf("NVML return %d", int(ret))
	}
	switch ret { //nolint:exhaustive // no sentinel belongs to the others
	case nvml.ERROR_IN_USE:
		sentinel = gpu.ErrBusy
	case nvml.ERROR_NOT_SUPPORTED:
		sentinel = gpu.ErrNotSupported
	case nvml.ERROR_INSUFFICIENT_RESOURCES:
		sentinel = gpu.ErrInsufficient
	case nvml.ERROR_NOT_FOUND, nvml.ERROR_GPU_IS_LOST:
		sentinel = gpu.ErrGone
	case nvml.ERROR_RESET_REQUIRED:
		sentinel = gpu.ErrResetRequired
	case nvml.ERROR_NO_PERMISSION:
		sentinel = gpu.ErrPermission
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		sentinel = gpu.ErrDriverMismatch
	}
	return name, sentinel
}

// pciAddress is a PCI address as nvidia-smi prints it.
var pciAddress = regexp.MustCompile(`\b([0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])\b`)

// resetFailure finds what is wrong in what nvidia-smi said of a reset of GPUs, since it has one exit status for nearly
// all failures. GPUs that were not asked for are those without which it does not work.
func resetFailure(said string, err error, asked []string) error {
	if err == nil || errors.Is(err, gpu.ErrBusy) || errors.Is(err, gpu.ErrNotSupported) {
		return err
	}
	said = strings.ToLower(said + "\n" + err.Error())
	if peers := peersIn(said, asked); len(peers) > 0 {
		return fmt.Errorf("%w: %w", &gpu.PeersError{PCIBusIDs: peers}, err)
	}
	switch {
	case used(said):
		return fmt.Errorf("%w: %w", gpu.ErrBusy, err)
	case strings.Contains(said, "not supported"):
		return fmt.Errorf("%w: %w", gpu.ErrNotSupported, err)
	}
	return err
}

// peersIn finds the GPUs that were not asked for. A line that says that a GPU is used asks for none.
func peersIn(said string, asked []string) []string {
	var peers []string
	for line := range strings.Lines(said) {
		if used(line) {
			continue
		}
		for _, found := range pciAddress.FindAllStringSubmatch(line, -1) {
			if id := found[2]; !slices.Contains(asked, id) && !slices.Contains(peers, id) {
				peers = append(peers, id)
			}
		}
	}
	return peers
}

func used(said string) bool {
	return strings.Contains(said, "in use by") || strings.Contains(said, "being used by")
}

// firstLine is the start of an error that says the rest in further lines.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
