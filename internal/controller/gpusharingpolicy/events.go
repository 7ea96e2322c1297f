// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// announcement is the kind of a thing that is announced: always the same reason, for the same action.
type announcement struct {
	Type   string // of a Kubernetes Event
	Reason string
	Action string
}

// What is announced: changes made, and refusals. What is new about a policy is announced with its condition's reason.
var (
	eventGPUsClosed    = announcement{corev1.EventTypeNormal, v1alpha1.EventGPUSchedulingDisabled, "Taint"}
	eventGPUsOpened    = announcement{corev1.EventTypeNormal, v1alpha1.EventGPUSchedulingEnabled, "Untaint"}
	eventPolicyTaints  = announcement{corev1.EventTypeNormal, v1alpha1.EventPolicyTaintsChanged, "KeepTaints"}
	eventEvicting      = announcement{corev1.EventTypeNormal, v1alpha1.EventEvicting, "Evict"}
	eventEvictBlocked  = announcement{corev1.EventTypeWarning, v1alpha1.EventEvictionBlocked, "Evict"}
	eventDesiredState  = announcement{corev1.EventTypeNormal, v1alpha1.EventDesiredStateChanged, "SetSpec"}
	eventForgotten     = announcement{corev1.EventTypeWarning, v1alpha1.EventBaselineForgotten, "SetSpec"}
	eventNodeLabels    = announcement{corev1.EventTypeNormal, v1alpha1.EventNodeLabelsChanged, "PatchNode"}
	eventPodRestarted  = announcement{corev1.EventTypeNormal, v1alpha1.EventNVIDIAPodRestarted, "DeletePod"}
	eventMPSDisabled   = announcement{corev1.EventTypeNormal, v1alpha1.EventNVIDIAMPSDisabled, "KeepMPSOff"}
	eventMPSEnabled    = announcement{corev1.EventTypeNormal, v1alpha1.EventNVIDIAMPSEnabled, "AllowMPS"}
	eventConfigured    = announcement{corev1.EventTypeNormal, v1alpha1.EventClusterPolicyConfigured, "ConfigureClusterPolicy"}
	eventRestored      = announcement{corev1.EventTypeNormal, v1alpha1.EventClusterPolicyRestored, "RestoreClusterPolicy"}
	eventRestoreWaits  = announcement{corev1.EventTypeWarning, v1alpha1.EventClusterPolicyRestoreWaiting, "RestoreClusterPolicy"}
	eventReverted      = announcement{corev1.EventTypeWarning, v1alpha1.EventClusterPolicyReverted, "ConfigureClusterPolicy"}
	eventKindsGone     = announcement{corev1.EventTypeWarning, v1alpha1.EventKindsGone, "Wait"}
	eventReasonReached = announcement{Type: corev1.EventTypeNormal, Action: "Rollout"}
	eventReasonWaits   = announcement{Type: corev1.EventTypeWarning, Action: "Rollout"}
)

// eventRecorder reports what a reconcile does, as Events on policies and nodes.
type eventRecorder struct {
	*seen

	recorder events.EventRecorder

	mu   sync.Mutex // guards what follows
	done map[likewise][]action.Action
}

func (an *eventRecorder) emit(e announcement, regarding, related runtime.Object, note string) {
	an.recorder.Eventf(regarding, related, e.Type, e.Reason, e.Action, "%s", format.Message(note))
}

// announce tells about an action, on the policy that asked for it if one did and on the node.
func (an *eventRecorder) announce(a action.Action) {
	if report, is := a.(action.Report); is {
		an.announceReport(report)
		return
	}
	if set, is := a.(action.SetSpec); is {
		an.announceForgotten(set)
	}
	e, announced := eventOf(a)
	if !announced || an.records(a) {
		return
	}
	node := an.nodeNamed(a.NodeName())
	policy, found := an.policies[a.For().Name]
	switch why := whyOf(a); {
	case !found:
		an.emit(e, node, nil, a.String())
	case why != "":
		an.together(e, policy.Name, why, a)
	default:
		an.emit(e, policy, node, a.String())
	}
}

// logged is the log's line of an action, and from which verbosity on it is logged. By default the log has what an
// administrator on call reads: a line for each decision that changes something. What only records or syncs is for
// debugging.
func (an *eventRecorder) logged(of action.Action) (line string, verbosity int) {
	line = format.Sentence(of.String())
	switch a := of.(type) {
	case action.Report: // there may be one for each of thousands of nodes that wait
		if _, note, announced := an.newsOf(a); announced {
			return note, 0
		}
		return line, 1
	case action.TriggerSync:
		return line, 1
	case action.SetSpec:
		if an.records(a) {
			return line, 1
		}
	case action.PatchNode:
		if len(a.Labels) == 0 {
			return line, 1
		}
	}
	return line, 0
}

func (an *eventRecorder) announceReport(a action.Report) {
	e, note, announced := an.newsOf(a)
	if !announced {
		return
	}
	if policy, found := an.policies[a.Policy.Name]; found {
		an.emit(e, policy, an.nodeNamed(a.Node), note)
		return
	}
	an.emit(e, an.nodeNamed(a.Node), nil, note)
}

// announceForgotten tells which GPUs lost their entry in the baseline of a node to newer ones (cluster.Bounded).
func (an *eventRecorder) announceForgotten(a action.SetSpec) {
	was, is := an.specOf(a.Node).Baseline, a.Spec.Baseline
	if was == nil || is == nil || len(is.Devices) < cluster.MostGPUs {
		return
	}
	var forgotten []string
	for _, d := range was.Devices {
		if !cluster.Lists(is.Devices, d.UUID) {
			forgotten = append(forgotten, d.UUID)
		}
	}
	if len(forgotten) > 0 {
		an.emit(eventForgotten, an.nodeNamed(a.Node), nil, fmt.Sprintf("Node %s: GPUNode.spec.baseline lists %d GPUs at most, so the baseline of GPUs that are gone "+
			"is forgotten: %s. One that comes back counts as a new GPU", a.Node, cluster.MostGPUs, format.List(forgotten)))
	}
}

// likewise is what a reconcile does to nodes of a policy for the same reason. It is announced once for all of them: an
// Event for each of thousands of nodes would cost as many writes as the change itself.
type likewise struct {
	announcement
	policy, why string
}

// whyOf is the reason of an action that disturbs nobody by itself; empty for others.
func whyOf(of action.Action) string {
	switch a := of.(type) {
	case action.SetSpec:
		return a.Why
	case action.PatchNode:
		return a.Why
	}
	return ""
}

func (an *eventRecorder) together(e announcement, policy, why string, a action.Action) {
	an.mu.Lock()
	defer an.mu.Unlock()
	what := likewise{announcement: e, policy: policy, why: why}
	an.done[what] = append(an.done[what], a)
}

// announceTogether announces what was done to several nodes. The first of them is the related object: Events that
// differ in their notes only are taken for one that repeats, and the notes of the later ones are lost (client-go's
// tools/events).
func (an *eventRecorder) announceTogether() {
	for what, actions := range an.done {
		slices.SortFunc(actions, func(a, b action.Action) int { return cmp.Compare(a.NodeName(), b.NodeName()) })
		note := actions[0].String()
		if len(actions) > 1 {
			names := make([]string, 0, len(actions))
			for _, a := range actions {
				names = append(names, a.NodeName())
			}
			note = fmt.Sprintf("%s on %d nodes: %s", what.why, len(actions), format.List(names))
		}
		an.emit(what.announcement, an.policies[what.policy], an.nodeNamed(actions[0].NodeName()), note)
	}
}

// records reports whether an action only notes in a spec what is observed. It is no news.
func (an *eventRecorder) records(a action.Action) bool {
	set, is := a.(action.SetSpec)
	if !is {
		return false
	}
	before, after := an.specOf(set.Node), set.Spec
	before.Baseline, after.Baseline = nil, nil
	return equality.Semantic.DeepEqual(before, after)
}

// newsOf is the event of a report: that a change has failed, or why a node that no policy governs is not in its
// baseline yet.
func (an *eventRecorder) newsOf(a action.Report) (e announcement, note string, announced bool) {
	failed := a.Status.Rollout.Failed
	if failed != nil && !equality.Semantic.DeepEqual(failed, an.failedOf(a.Node)) {
		return announcement{corev1.EventTypeWarning, failed.Reason, "Rollout"}, fmt.Sprintf("Node %s: %s", a.Node, failed.Message), true
	}
	have, found := an.gpuNodes[a.Node]
	if !a.Stuck || !found {
		return e, "", false
	}
	was, _ := condition.Find(have.Status.Conditions, v1alpha1.ConditionReady)
	is, _ := condition.Find(a.Status.Conditions, v1alpha1.ConditionReady)
	return announcement{corev1.EventTypeWarning, is.Reason, "Restore"},
		fmt.Sprintf("Node %s is not in its baseline yet: %s", a.Node, is.Message), was.Reason != is.Reason
}

// eventOf is the event of an action that changes something which a person may wonder about.
func eventOf(of action.Action) (e announcement, announced bool) {
	switch of.(type) {
	case action.Taint, action.TaintDevices:
		return eventGPUsClosed, true
	case action.Untaint, action.UntaintDevices:
		return eventGPUsOpened, true
	case action.KeepTaints:
		return eventPolicyTaints, true
	case action.Evict:
		return eventEvicting, true
	case action.SetSpec:
		return eventDesiredState, true
	case action.PatchNode:
		return eventNodeLabels, true
	case action.DeletePod:
		return eventPodRestarted, true
	case action.KeepMPSOff:
		return eventMPSDisabled, true
	case action.AllowMPS:
		return eventMPSEnabled, true
	default: // configs and syncs change nothing that is visible
		return announcement{}, false
	}
}

func (an *eventRecorder) announceRefusal(a action.Evict, message string) {
	if policy, found := an.policies[a.Policy.Name]; found {
		an.emit(eventEvictBlocked, policy, nil, message)
	}
}

// announceConfiguration tells about the ClusterPolicy: that it was changed, or that another controller keeps changing it back.
func (an *eventRecorder) announceConfiguration(ctx context.Context, changed bool, e announcement) {
	if changed {
		note := an.plugin.Describe()
		log.FromContext(ctx).Info("Changed the ClusterPolicy: " + note)
		an.emit(e, an.plugin.Subject(), nil, note)
	}
	if why := an.plugin.Waits(); why != "" && e == eventRestored {
		an.emit(eventRestoreWaits, an.plugin.Subject(), nil, "The ClusterPolicy is not restored yet: "+why)
	}
	if o := an.plugin.Overridden; o != nil && e == eventConfigured {
		an.emit(eventReverted, an.plugin.Subject(), nil, o.Message)
	}
}

// announceReasons tells of the conditions of a policy that have a new reason. Reconciling and Stalled have the reason
// of Ready.
func (an *eventRecorder) announceReasons(policy *v1alpha1.GPUSharingPolicy, conditions []metav1.Condition) {
	for _, c := range conditions {
		follows := c.Type == v1alpha1.ConditionReconciling || c.Type == v1alpha1.ConditionStalled
		old, had := condition.Find(policy.Status.Conditions, c.Type)
		had = had && old.Reason != v1alpha1.ReasonAwaitingReport // which is no report
		if follows || had && old.Reason == c.Reason && old.Status == c.Status || !had && c.Status == metav1.ConditionTrue {
			continue
		}
		e := eventReasonReached
		if c.Status == metav1.ConditionUnknown || c.Type == v1alpha1.ConditionAccepted && c.Status == metav1.ConditionFalse {
			e = eventReasonWaits
		}
		e.Reason = c.Reason
		an.emit(e, policy, nil, c.Message)
	}
}
