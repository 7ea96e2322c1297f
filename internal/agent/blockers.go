// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// maxNamed is how many users of a GPU a message names.
const maxNamed = 5

// describeWait says which step waits for whom.
func describeWait(s plan.Step, blockers []plan.Blocker) string {
	names := make([]string, 0, maxNamed)
	for i, b := range blockers {
		if i == maxNamed {
			names = append(names, fmt.Sprintf("%d more", len(blockers)-maxNamed))
			break
		}
		names = append(names, nameOf(b))
	}
	return fmt.Sprintf("%s: waiting for %s to leave it", s, format.Join(names))
}

// nameOf names who blocks a step, as a user would look for it.
func nameOf(b plan.Blocker) string {
	switch {
	case b.Holder != nil:
		return fmt.Sprintf("container %s of pod %s/%s", b.Holder.Container, b.Holder.Namespace, b.Holder.Pod)
	case b.Process != nil && b.Process.PodUID != "":
		return fmt.Sprintf("process %d (%s) of the pod with uid %s", b.Process.PID, b.Process.Name, b.Process.PodUID)
	case b.Process != nil:
		return fmt.Sprintf("process %d (%s)", b.Process.PID, b.Process.Name)
	}
	return "a program"
}

func gpus(n int) string {
	if n == 1 {
		return "1 GPU"
	}
	return fmt.Sprintf("%d GPUs", n)
}

// blockers are what blocks a step now: the last check right before the step, because pods and processes may have come
// since the controller let it.
func (l lane) blockers(ctx context.Context, s plan.Step) ([]plan.Blocker, error) {
	if s.Needs() == plan.NeedsNothing {
		return nil, nil
	}
	now, err := l.seen.fresh(ctx, l.observer)
	if err != nil {
		return nil, err
	}
	found := plan.Blockers(s, now.devices)
	if len(found) == 0 {
		found = plan.Blockers(s, l.withInitContainers(ctx, now.devices))
	}
	return found, nil
}

// withInitContainers are GPUs with those too as holders that the kubelet has on record: the last look before what needs a GPU idle.
func (t tools) withInitContainers(ctx context.Context, devices []gpu.Device) []gpu.Device {
	if t.initContainers == nil {
		return devices
	}
	held, err := t.initContainers()
	if err != nil { // of another kubelet than those that are known: what it lists has to do
		log(ctx).Info("What init containers hold is not known", "reason", err.Error())
	}
	devices = slices.Clone(devices)
	for i, d := range devices {
		for _, h := range held {
			one := []Allocation{{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container, Device: h.Device}}
			devices[i].Holders = append(slices.Clip(devices[i].Holders), holdersOf(d, one)...)
		}
	}
	return devices
}
