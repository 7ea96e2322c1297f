// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// licenseMissing is true when a vGPU has no license. It names the vGPUs and where NVIDIA's GPU Operator takes their
// license from.
func licenseMissing(devices []v1alpha1.DeviceStatus) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionLicenseMissing, Status: metav1.ConditionFalse}
	var without []string
	for _, d := range devices {
		if d.License == v1alpha1.LicenseStateUnlicensed {
			without = append(without, fmt.Sprintf("GPU %d (%s)", d.Index, d.Product))
		}
	}
	if len(without) == 0 {
		return c
	}
	c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonVGPUUnlicensed
	c.Message = fmt.Sprintf("%s: no vGPU license, so NVIDIA's driver slows the GPU down; look at driver.licensingConfig of the ClusterPolicy "+
		"and at the license server", strings.Join(without, ", "))
	return c
}
