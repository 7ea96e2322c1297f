// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

var errNoTimeSlice = errors.New("no way to read or set a time slice is configured")

// NVML has no call for time slices, so nvidia-smi reads and sets them, as NVIDIA's DRA driver does
// (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/nvlib.go: setTimeSlice). It is asked for one GPU at a
// time, because NVIDIA documents no format of the list.

// TimeSlices implements gpu.Hardware.
func (h *Hardware) TimeSlices(ctx context.Context, uuids ...string) (map[string]gpu.TimeSlice, error) {
	found := map[string]gpu.TimeSlice{}
	for _, uuid := range uuids {
		said, err := h.computePolicy(ctx, uuid, "reading the time slice of GPU "+uuid, "--list")
		switch {
		case errors.Is(err, gpu.ErrNotSupported):
			found[uuid] = gpu.TimeSliceNone
		case err != nil:
			return nil, err
		default:
			found[uuid] = timeSliceIn(said)
		}
	}
	return found, nil
}

// SetTimeSlice implements gpu.Hardware.
func (h *Hardware) SetTimeSlice(ctx context.Context, uuid string, slice gpu.TimeSlice) error {
	number := slices.Index(gpu.TimeSlices(), slice)
	if number < 0 {
		return fmt.Errorf("setting the time slice of GPU %s: %w: %q is none", uuid, gpu.ErrNotSupported, slice)
	}
	_, err := h.computePolicy(ctx, uuid, fmt.Sprintf("setting time slice %s on GPU %s", slice, uuid), "--set-timeslice="+strconv.Itoa(number))
	return err
}

// computePolicy runs nvidia-smi compute-policy for a GPU, never beside a reset: it has the GPU open. ErrGone: the
// driver does not know it.
func (h *Hardware) computePolicy(ctx context.Context, uuid, what, option string) (said string, err error) {
	var answer string
	err = h.do(ctx, uuid, what, func() error {
		if h.options.SMI == nil {
			return fmt.Errorf("%w: %w", gpu.ErrNotSupported, errNoTimeSlice)
		}
		if _, err := h.device(uuid); err != nil {
			return err
		}
		var err error
		answer, err = h.options.SMI(ctx, "compute-policy", "-i", uuid, option)
		if err != nil && strings.Contains(strings.ToLower(answer+err.Error()), "not supported") {
			return fmt.Errorf("%w: %w", gpu.ErrNotSupported, err)
		}
		return err
	})
	if err != nil { // answer is not read: an abandoned operation may still write it
		return "", err
	}
	return answer, nil
}

var timeSliceName = regexp.MustCompile(`(?i)\b(?:default|short|medium|long)\b`)

// timeSliceIn finds the one time slice that nvidia-smi names; TimeSliceNone if it names none, or several.
func timeSliceIn(said string) gpu.TimeSlice {
	found := gpu.TimeSliceNone
	for _, name := range timeSliceName.FindAllString(said, -1) {
		slice := gpu.TimeSlice(strings.ToUpper(name[:1]) + strings.ToLower(name[1:]))
		if found != gpu.TimeSliceNone && found != slice {
			return gpu.TimeSliceNone
		}
		found = slice
	}
	return found
}
