// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// BenchmarkHeartbeat decides that a heartbeat of a kubelet, on a changed node of 8 GPUs, wakes nobody.
func BenchmarkHeartbeat(b *testing.B) {
	baseline := v1alpha1.Baseline{}
	for i := range 8 {
		baseline.Devices = append(baseline.Devices, v1alpha1.DeviceSpec{
			UUID: fmt.Sprintf("GPU-%032d", i), Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
		})
	}
	text, err := json.Marshal(baseline)
	if err != nil {
		b.Fatal(err)
	}
	before := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{v1alpha1.AnnotationBaseline: string(text)}},
		Status:     corev1.NodeStatus{Allocatable: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("32")}},
	}
	after := before.DeepCopy()
	after.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.NewTime(time.Now())}}
	wakes := differs(nodeView)
	for b.Loop() {
		if wakes.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}) {
			b.Fatal("it wakes the controller")
		}
	}
}
