// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package drain asks for pods to be evicted, without waiting for them to go: a reconcile asks once, and the next one
// sees who is still there. Another package decides which pods block a change.
//
// Evictions go through the Eviction API and nothing else, so that PodDisruptionBudgets hold. Pods that would come
// straight back, those of DaemonSets and the mirrors of static pods, are never evicted.
package drain

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Outcome says what became of a request.
type Outcome int

// The outcomes.
const (
	Evicting  Outcome = iota // the pod was told to go
	Gone                     // it is not there any more, or on its way out
	Blocked                  // a PodDisruptionBudget does not allow it now
	Protected                // it belongs to a DaemonSet or mirrors a static pod
)

// Result is an outcome with the reason for it.
type Result struct {
	Outcome Outcome
	// Message says why, when the outcome is Blocked or Protected.
	Message string
}

// Evict asks for the eviction of one pod, which must have that UID: a pod of the same name that took its place is left
// alone.
func Evict(ctx context.Context, c client.Client, key types.NamespacedName, uid types.UID) (Result, error) {
	pod := &corev1.Pod{}
	err := c.Get(ctx, key, pod)
	switch {
	case apierrors.IsNotFound(err):
		return Result{Outcome: Gone}, nil
	case err != nil:
		return Result{}, fmt.Errorf("reading pod %s: %w", key, err)
	case pod.UID != uid || pod.DeletionTimestamp != nil:
		return Result{Outcome: Gone}, nil
	}
	if why, is := NeverEvicted(pod); is {
		return Result{Outcome: Protected, Message: fmt.Sprintf("pod %s %s", key, why)}, nil
	}
	return request(ctx, c, pod)
}

// AtOnce lets a refusal of the API server reach who asks for an eviction at once. While a PodDisruptionBudget has not been
// looked at the API server asks clients to come again in ten seconds, and client-go would do so many times. One that
// cannot be looked at, such as of pods whose controller is of no kind that there is, keeps that answer for ever, so that a
// tenant with many pods could keep the controller waiting. For the Wrap of a rest.Config.
func AtOnce(to http.RoundTripper) http.RoundTripper { return atOnce{to} }

type atOnce struct{ to http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (a atOnce) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := a.to.RoundTrip(r)
	if err == nil && strings.HasSuffix(r.URL.Path, "/eviction") {
		response.Header.Del("Retry-After")
	}
	return response, err //nolint:wrapcheck // that of the transport
}

// answerTime is how long an eviction may take.
const answerTime = 5 * time.Second

func request(ctx context.Context, c client.Client, pod *corev1.Pod) (Result, error) {
	parent, key := ctx, client.ObjectKeyFromObject(pod)
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	eviction := &policyv1.Eviction{DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}}}
	err := c.SubResource("eviction").Create(ctx, pod, eviction)
	switch {
	case err == nil:
		return Result{Outcome: Evicting}, nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return Result{Outcome: Gone}, nil
	case apierrors.IsTooManyRequests(err):
		return Result{Outcome: Blocked, Message: fmt.Sprintf("pod %s is not evicted: %s", key, refusal(err))}, nil
	case apierrors.IsInternalError(err) && strings.Contains(err.Error(), "more than one PodDisruptionBudget"):
		return Result{Outcome: Blocked, Message: fmt.Sprintf("pod %s is not evicted: it has several PodDisruptionBudgets; leave one", key)}, nil
	case ctx.Err() != nil && parent.Err() == nil:
		return Result{Outcome: Blocked, Message: fmt.Sprintf("pod %s is not evicted: no answer within %s", key, answerTime)}, nil
	default:
		return Result{}, fmt.Errorf("evicting pod %s: %w", key, err)
	}
}

// NeverEvicted returns why a pod is never evicted, and whether that is so.
func NeverEvicted(pod *corev1.Pod) (why string, is bool) {
	if _, mirrors := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirrors {
		return "mirrors a static pod, which only its node can stop", true
	}
	// Of another group a tenant can name one that is not there: only of a kind that there is does the garbage collector delete the pod then.
	if owner := metav1.GetControllerOf(pod); owner != nil && owner.Kind == "DaemonSet" && strings.HasPrefix(owner.APIVersion, "apps/") {
		return fmt.Sprintf("belongs to DaemonSet %s, which would start it again at once", owner.Name), true
	}
	return "", false
}

// refusal is which PodDisruptionBudget does not allow it or, where the API server names none, what else it said.
func refusal(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return err.Error()
	}
	for _, cause := range status.Status().Details.Causes {
		if cause.Type == policyv1.DisruptionBudgetCause {
			return cause.Message
		}
	}
	return err.Error()
}
