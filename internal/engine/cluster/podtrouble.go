// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// Trouble is a container that does not run as it should.
type Trouble struct {
	Container string
	// Why is what is the matter, in words that stay while the kubelet tries again and again.
	Why string
	// Ended is the end of its last run; zero if it has not run at all.
	Ended time.Time
}

// Counts reports whether the trouble still counts, and for how long if that ends.
func (t Trouble) Counts(now time.Time) (remaining time.Duration, is bool) {
	if t.Ended.IsZero() {
		return 0, true
	}
	remaining = t.Ended.Add(troubleLasts).Sub(now)
	return remaining, remaining > 0
}

// troublesOf are the containers of a pod that do not run as they should.
func troublesOf(pod *corev1.Pod) []Trouble {
	var troubles []Trouble
	for _, s := range TroubledContainers(pod) {
		t := Trouble{Container: s.Name}
		if ended := s.LastTerminationState.Terminated; ended != nil {
			t.Why, t.Ended = fmt.Sprintf("keeps ending with exit code %d", ended.ExitCode), ended.FinishedAt.Time
		} else {
			t.Why = "does not start: " + strings.TrimSuffix(s.State.Waiting.Reason+": "+s.State.Waiting.Message, ": ")
		}
		troubles = append(troubles, t)
	}
	return troubles
}

// TroubledContainers are the containers of a pod that end again and again or do not start, with what tells so and
// nothing else.
func TroubledContainers(pod *corev1.Pod) []corev1.ContainerStatus {
	var troubled []corev1.ContainerStatus
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		slim := corev1.ContainerStatus{Name: s.Name, RestartCount: s.RestartCount}
		switch ended, waits := s.LastTerminationState.Terminated, s.State.Waiting; {
		case ended != nil && ended.ExitCode != 0 && s.RestartCount >= keepsEnding:
			slim.LastTerminationState.Terminated = &corev1.ContainerStateTerminated{
				ExitCode: ended.ExitCode, FinishedAt: ended.FinishedAt,
			}
		case waits != nil && ended == nil && !slices.Contains(usualWaits(), waits.Reason):
			slim.State.Waiting = &corev1.ContainerStateWaiting{Reason: steady(waits.Reason), Message: format.Cut(waits.Message, maxWhy)}
		default:
			continue
		}
		troubled = append(troubled, slim)
	}
	return troubled
}

// maxWhy is how much of what the kubelet says is kept.
const maxWhy = 256

// usualWaits are why a container waits that will start.
func usualWaits() []string { return []string{"", "ContainerCreating", "PodInitializing"} }

// steady is one word for what the kubelet calls by turns by two.
func steady(reason string) string {
	if reason == "ErrImagePull" {
		return "ImagePullBackOff"
	}
	return reason
}

// SelectsDeploy reports whether one of NVIDIA's deploy labels starts and stops a pod of NVIDIA's. The label for clients
// is for others, such as our agent.
func SelectsDeploy(nodeSelector map[string]string) bool {
	for name := range nodeSelector {
		if strings.HasPrefix(name, DeployPrefix) && name != v1alpha1.LabelRunsAgent {
			return true
		}
	}
	return false
}

// WorkMarkAuthors are the authors of the labels which say that a controller works on a node, also the operator itself,
// each with the time of its last write and nothing else. There are none where no label says so.
func WorkMarkAuthors(node *corev1.Node) []metav1.ManagedFieldsEntry {
	var fields []string
	for name, value := range node.Labels {
		if saysAtWork(name, value) {
			fields = append(fields, `"f:`+name+`"`)
		}
	}
	if len(fields) == 0 {
		return nil
	}
	var authors []metav1.ManagedFieldsEntry
	for _, e := range node.ManagedFields {
		owns := func(field string) bool {
			return e.FieldsV1 == nil || strings.Contains(e.FieldsV1.GetRawString(), field)
		}
		if e.Time != nil && e.Subresource == "" && slices.ContainsFunc(fields, owns) {
			authors = append(authors, metav1.ManagedFieldsEntry{Manager: e.Manager, Time: e.Time})
		}
	}
	return authors
}

func saysAtWork(label, value string) bool {
	if label == v1alpha1.LabelMIGConfigState {
		return ManagerAtWork(value)
	}
	if label == LabelUpgrade {
		return value != "" && value != UpgradeDone
	}
	return strings.HasPrefix(label, DeployPrefix) && value != "" && value != "true" && value != "false"
}

// markedAtWorkSince is when the last of those wrote anything who say that they are at work, of the operator by its own
// record, if that has the time.
func markedAtWorkSince(node *corev1.Node) (since time.Time) {
	_, stopped := Stopped(node.Annotations)
	for _, e := range WorkMarkAuthors(node) {
		at := e.Time.Time
		if e.Manager == ownManager && !stopped.IsZero() {
			at = stopped
		}
		since = timing.Latest(since, at)
	}
	return since
}

// stoppedSince is the key of the time in v1alpha1.AnnotationStopped.
const stoppedSince = "since"

// Stopped is what v1alpha1.AnnotationStopped records: the deploy labels of NVIDIA's operands that the operator stopped,
// and since when; zero if an earlier version recorded it.
func Stopped(annotations map[string]string) (labels []string, since time.Time) {
	for entry := range strings.SplitSeq(annotations[v1alpha1.AnnotationStopped], ",") {
		if at, is := timing.Stamped(entry, stoppedSince); is {
			since = at
		} else if slices.Contains(DeployLabels(), entry) {
			labels = append(labels, entry)
		}
	}
	return labels, since
}

// StoppedRecord is a value of v1alpha1.AnnotationStopped.
func StoppedRecord(labels []string, since time.Time) *string {
	entries := slices.Sorted(slices.Values(labels))
	if !since.IsZero() {
		entries = append(entries, timing.Stamp(stoppedSince, since))
	}
	return new(strings.Join(entries, ","))
}

// ownManager is the operator's field manager.
const ownManager = "gpusharing-controller"

// ConfigWriters are the other field managers that own the label nvidia.com/device-plugin.config, each with that field
// only.
func ConfigWriters(node *corev1.Node) []metav1.ManagedFieldsEntry {
	field := `"f:` + v1alpha1.LabelConfig + `"`
	var writers []metav1.ManagedFieldsEntry
	for _, e := range node.ManagedFields {
		if e.Manager != ownManager && e.Time != nil && e.FieldsV1 != nil && strings.Contains(e.FieldsV1.GetRawString(), field) {
			fields := &metav1.FieldsV1{}
			fields.SetRawString(`{"f:metadata":{"f:labels":{` + field + `:{}}}}`)
			writers = append(writers, metav1.ManagedFieldsEntry{Manager: e.Manager, Time: e.Time, FieldsV1: fields})
		}
	}
	return writers
}

// configWriter is the last of those.
func configWriter(node *corev1.Node) (manager string) {
	var since time.Time
	for _, e := range ConfigWriters(node) {
		if e.Time.After(since) {
			manager, since = e.Manager, e.Time.Time
		}
	}
	return manager
}
