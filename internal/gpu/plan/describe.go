// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// describe says in a message which instances a GPU would get.
func describe(s v1alpha1.DeviceSharing) string {
	if len(s.Instances) == 0 {
		return "none"
	}
	parts := make([]string, 0, len(s.Instances))
	for _, i := range s.Instances {
		parts = append(parts, fmt.Sprintf("%d × %s", i.Count, i.Profile))
	}
	return strings.Join(parts, " + ")
}

// devices lists GPUs in a message.
func devices(list []gpu.Device) string {
	parts := make([]string, 0, len(list))
	for _, d := range list {
		parts = append(parts, d.String())
	}
	return format.Join(parts)
}
