// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// Return is what an NVML call returns; the numbers are NVML's.
type Return int

// The returns that the rules give.
const (
	Success               Return = 0
	InvalidArgument       Return = 2
	NotSupported          Return = 3
	NoPermission          Return = 4
	NotFound              Return = 6
	InsufficientSize      Return = 7
	DriverNotLoaded       Return = 9
	Timeout               Return = 10
	GPUIsLost             Return = 15
	ResetRequired         Return = 16
	OperatingSystem       Return = 17
	InUse                 Return = 19
	InsufficientResources Return = 23
	Unknown               Return = 999
)

// String is NVML's name of the return.
func (r Return) String() string {
	switch r {
	case Success:
		return "SUCCESS"
	case InvalidArgument:
		return "ERROR_INVALID_ARGUMENT"
	case NotSupported:
		return "ERROR_NOT_SUPPORTED"
	case NoPermission:
		return "ERROR_NO_PERMISSION"
	case NotFound:
		return "ERROR_NOT_FOUND"
	case InsufficientSize:
		return "ERROR_INSUFFICIENT_SIZE"
	case DriverNotLoaded:
		return "ERROR_DRIVER_NOT_LOADED"
	case Timeout:
		return "ERROR_TIMEOUT"
	case GPUIsLost:
		return "ERROR_GPU_IS_LOST"
	case ResetRequired:
		return "ERROR_RESET_REQUIRED"
	case OperatingSystem:
		return "ERROR_OPERATING_SYSTEM"
	case InUse:
		return "ERROR_IN_USE"
	case InsufficientResources:
		return "ERROR_INSUFFICIENT_RESOURCES"
	case Unknown:
		return "ERROR_UNKNOWN"
	}
	return fmt.Sprintf("ERROR_%d", int(r))
}

// Error is a refusal by the rules. It wraps the sentinel error of package gpu that belongs to its return, if any.
type Error struct {
	Return Return
	Why    string
	Peers  []string // PCI addresses of GPUs without which others cannot be reset
}

// Error names the return and why the rules gave it.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Return, e.Why) }

// Unwrap is the error of package gpu.
func (e *Error) Unwrap() error {
	if len(e.Peers) > 0 {
		return &gpu.PeersError{PCIBusIDs: e.Peers}
	}
	switch e.Return {
	case InUse:
		return gpu.ErrBusy
	case NotSupported:
		return gpu.ErrNotSupported
	case InsufficientResources:
		return gpu.ErrInsufficient
	case NotFound, GPUIsLost:
		return gpu.ErrGone
	case ResetRequired:
		return gpu.ErrResetRequired
	case NoPermission:
		return gpu.ErrPermission
	case Success, InvalidArgument, InsufficientSize, DriverNotLoaded, Timeout, OperatingSystem, Unknown:
	}
	return nil
}

func refuse(r Return, format string, args ...any) error {
	return &Error{Return: r, Why: fmt.Sprintf(format, args...)}
}
