// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// failed is the error of an NVML call, nil on success. It names the call and the return as NVML does and wraps the
// sentinel that belongs to the return.
func failed(call string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	name, sentinel := describe(ret)
	if sentinel == nil {
		return fmt.Errorf("%s: %s", call, name)
	}
	return fmt.Errorf("%s: %s: %w", call, name, sentinel)
}

func describe(ret nvml.Return) (name string, sentinel error) {
	switch ret { //nolint:exhaustive // the others mean nothing to us beyond their number
	case nvml.ERROR_IN_USE:
		return "ERROR_IN_USE", gpu.ErrBusy
	case nvml.ERROR_NOT_SUPPORTED:
		return "ERROR_NOT_SUPPORTED", gpu.ErrNotSupported
	case nvml.ERROR_INSUFFICIENT_RESOURCES:
		return "ERROR_INSUFFICIENT_RESOURCES", gpu.ErrInsufficient
	case nvml.ERROR_NOT_FOUND:
		return "ERROR_NOT_FOUND", gpu.ErrGone
	case nvml.ERROR_GPU_IS_LOST:
		return "ERROR_GPU_IS_LOST", gpu.ErrGone
	case nvml.ERROR_RESET_REQUIRED:
		return "ERROR_RESET_REQUIRED", gpu.ErrResetRequired
	case nvml.ERROR_NO_PERMISSION:
		return "ERROR_NO_PERMISSION", gpu.ErrPermission
	case nvml.ERROR_UNINITIALIZED:
		return "ERROR_UNINITIALIZED", nil
	case nvml.ERROR_INVALID_ARGUMENT:
		return "ERROR_INVALID_ARGUMENT", nil
	case nvml.ERROR_INSUFFICIENT_SIZE:
		return "ERROR_INSUFFICIENT_SIZE", nil
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return "ERROR_DRIVER_NOT_LOADED", nil
	case nvml.ERROR_TIMEOUT:
		return "ERROR_TIMEOUT", nil
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return "ERROR_LIBRARY_NOT_FOUND", nil
	case nvml.ERROR_FUNCTION_NOT_FOUND:
		return "ERROR_FUNCTION_NOT_FOUND", nil
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return "ERROR_LIB_RM_VERSION_MISMATCH", nil
	case nvml.ERROR_INVALID_STATE:
		return "ERROR_INVALID_STATE", nil
	case nvml.ERROR_UNKNOWN:
		return "ERROR_UNKNOWN", nil
	}
	return fmt.Sprintf("NVML return %d", int(ret)), nil
}

// resetFailure finds the sentinel in what nvidia-smi said of a reset, which has one exit status for all failures.
func resetFailure(err error) error {
	if errors.Is(err, gpu.ErrBusy) || errors.Is(err, gpu.ErrNotSupported) {
		return err
	}
	said := strings.ToLower(err.Error())
	switch {
	case strings.Contains(said, "in use by") || strings.Contains(said, "being used by"):
		return fmt.Errorf("%w: %w", gpu.ErrBusy, err)
	case strings.Contains(said, "not supported"):
		return fmt.Errorf("%w: %w", gpu.ErrNotSupported, err)
	}
	return err
}
