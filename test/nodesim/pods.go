// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// podState is what the kubelet remembers of a pod.
type podState struct {
	pod      *corev1.Pod // as last seen
	volumes  map[string]*projection
	restarts int32
	restart  time.Time // not before
	admitted bool
	refused  string // why it was not admitted
	waiting  string // why its containers do not run

	program   Program
	plugin    *plugin           // of a device-plugin pod
	mps       bool              // of NVIDIA's MPS DaemonSet: it has started
	closeNVML func() error      // of a pod that has NVML open
	devices   []allocatedDevice // of its containers
}

// syncPods is one turn of the kubelet's loop over its pods.
func (n *Node) syncPods(ctx context.Context, node *corev1.Node, pods []corev1.Pod) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.forgetGone(pods)
	var errs []error
	for i := range pods {
		if err := n.syncPod(ctx, node, &pods[i]); err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", pods[i].Namespace, pods[i].Name, err))
		}
	}
	return errors.Join(errs...)
}

func (n *Node) forgetGone(pods []corev1.Pod) {
	here := map[types.UID]bool{}
	for i := range pods {
		here[pods[i].UID] = true
	}
	for uid, state := range n.pods {
		if !here[uid] {
			n.stop(state)
			delete(n.pods, uid)
		}
	}
}

func (n *Node) syncPod(ctx context.Context, node *corev1.Node, pod *corev1.Pod) error {
	state, ok := n.pods[pod.UID]
	if !ok {
		state = &podState{volumes: map[string]*projection{}}
		n.pods[pod.UID] = state
	}
	touched := state.pod == nil || !equality.Semantic.DeepEqual(state.pod.Annotations, pod.Annotations)
	state.pod = pod
	if pod.DeletionTimestamp != nil {
		return n.finish(ctx, state)
	}
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		n.stop(state)
		return nil
	}
	if n.admit(state); state.refused != "" {
		return n.report(ctx, state, false)
	}
	if err := n.project(ctx, state, touched); err != nil {
		return err
	}
	ready := n.runContainers(ctx, node, state)
	return n.report(ctx, state, ready)
}

// finish ends a pod that is being deleted, and lets its object go.
func (n *Node) finish(ctx context.Context, state *podState) error {
	n.stop(state)
	err := n.Client.Delete(ctx, state.pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &state.pod.UID})
	return client.IgnoreNotFound(err)
}

func (n *Node) stop(state *podState) {
	if state.program != nil {
		state.program.Stop()
		state.program = nil
	}
	if state.closeNVML != nil {
		_ = state.closeNVML()
		state.closeNVML = nil
	}
	if state.plugin != nil {
		n.unregister(state.plugin)
		state.plugin = nil
	}
	state.devices = nil
}

func (n *Node) stopPrograms() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, state := range n.pods {
		n.stop(state)
	}
}

// runContainers lets the containers of a pod do what they do, and says whether the pod is ready.
func (n *Node) runContainers(ctx context.Context, node *corev1.Node, state *podState) bool {
	if missing := state.missingVolume(); missing != "" {
		state.waiting = missing
		return false
	}
	n.openNVML(state)
	if state.pod.Labels["app"] == appDevicePlugin {
		return n.runPlugin(ctx, node, state)
	}
	if state.pod.Labels["app"] == appMPS {
		return n.runMPS(ctx, state)
	}
	return n.runProgram(ctx, state)
}

// runProgram keeps the process of a pod running.
func (n *Node) runProgram(ctx context.Context, state *podState) bool {
	if n.Start == nil {
		state.waiting = ""
		return true
	}
	if state.program != nil && !state.program.Alive() {
		n.Tell("kubelet: the program of pod %s ended; it is started again", state.pod.Name)
		state.program.Stop()
		state.program = nil
		n.crashed(state, "CrashLoopBackOff: the program ended")
	}
	if state.program == nil {
		if n.Clock.Now().Before(state.restart) {
			return false
		}
		program, err := n.Start(ctx, state.pod)
		if err != nil {
			n.crashed(state, err.Error())
			return false
		}
		state.waiting = ""
		if program == nil {
			return true
		}
		state.program = program
	}
	return state.program.Ready(ctx)
}

// crashed counts a restart and says when the next start is due.
func (n *Node) crashed(state *podState, why string) {
	state.restarts++
	state.waiting = why
	state.restart = n.Clock.Now().Add(n.RestartDelay)
}

// openNVML: these of NVIDIA's programs keep the driver open for as long as they run.
func (n *Node) openNVML(state *podState) {
	if n.OpenNVML == nil || state.closeNVML != nil {
		return
	}
	switch state.pod.Labels["app"] {
	case appDevicePlugin, "nvidia-dcgm", "nvidia-dcgm-exporter":
		if closeNVML, err := n.OpenNVML(); err == nil {
			state.closeNVML = closeNVML
		}
	}
}

// report writes the status of a pod, if it changed.
func (n *Node) report(ctx context.Context, state *podState, ready bool) error {
	pod := state.pod
	want := pod.Status.DeepCopy()
	now := metav1.NewTime(n.Clock.Now())
	if want.StartTime == nil {
		want.StartTime = &now
	}
	want.Phase, want.Reason, want.Message = corev1.PodRunning, "", ""
	switch {
	case state.refused != "":
		want.Phase, want.Reason, want.Message = corev1.PodFailed, "UnexpectedAdmissionError", state.refused
	case !ready && len(state.volumes) > 0 && state.missingVolume() != "":
		want.Phase = corev1.PodPending
	}
	setCondition(want, corev1.PodScheduled, true, now)
	setCondition(want, corev1.PodReady, ready, now)
	setCondition(want, corev1.ContainersReady, ready, now)
	want.ContainerStatuses = containerStatuses(state, ready)
	if equality.Semantic.DeepEqual(&pod.Status, want) {
		return nil
	}
	base := pod.DeepCopy()
	pod.Status = *want
	return client.IgnoreNotFound(n.Client.Status().Patch(ctx, pod, client.MergeFrom(base)))
}

func setCondition(status *corev1.PodStatus, kind corev1.PodConditionType, is bool, now metav1.Time) {
	want := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, LastTransitionTime: now}
	if is {
		want.Status = corev1.ConditionTrue
	}
	for i, c := range status.Conditions {
		if c.Type != kind {
			continue
		}
		if c.Status != want.Status {
			status.Conditions[i] = want
		}
		return
	}
	status.Conditions = append(status.Conditions, want)
}

func containerStatuses(state *podState, ready bool) []corev1.ContainerStatus {
	statuses := make([]corev1.ContainerStatus, 0, len(state.pod.Spec.Containers))
	for _, c := range state.pod.Spec.Containers {
		s := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: ready, RestartCount: state.restarts}
		if ready {
			s.State.Running = &corev1.ContainerStateRunning{}
		} else if state.waiting != "" {
			s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: state.waiting}
		}
		statuses = append(statuses, s)
	}
	return statuses
}
