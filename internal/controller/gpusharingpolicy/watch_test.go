// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
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

// TestAKindIsWatchedInTheVersionThatIsServed: an upgrade of Kubernetes, or a restart with other feature gates, takes a
// version of resource.k8s.io away under a controller that runs. Karpenter's NodePools, which are watched in the same way,
// stand for it: their definition can stop to serve a version while the API server runs.
func TestAKindIsWatchedInTheVersionThatIsServed(t *testing.T) {
	t.Parallel()
	g, cluster := NewWithT(t), env.Start(t, env.WithAutoscalers())
	const definition = "nodepools.karpenter.sh"
	server, err := discovery.NewDiscoveryClientForConfig(cluster.Config)
	g.Expect(err).NotTo(HaveOccurred())
	cached, err := cache.New(cluster.Config, cache.Options{Scheme: cluster.Scheme, ReaderFailOnMissingInformer: true, DefaultTransform: slimOthers})
	g.Expect(err).NotTo(HaveOccurred())
	go func() { _ = cached.Start(t.Context()) }() // ends with the test
	reader, err := client.New(cluster.Config, client.Options{Scheme: cluster.Scheme, Cache: &client.CacheOptions{Reader: cached, Unstructured: true}})
	g.Expect(err).NotTo(HaveOccurred())

	kind := &watchedKind{GroupKind: nodePoolKind}
	kind.awaited.Store(true)
	woken := make(chan struct{}, 1000)
	follow := func() string {
		g.Expect(kind.follow(t.Context(), server, cached, func() { woken <- struct{}{} })).To(Succeed())
		if served := kind.served.Load(); served != nil {
			return served.Version
		}
		return ""
	}
	names := func() []string {
		all, err := kind.list(t.Context(), reader)
		g.Expect(err).NotTo(HaveOccurred())
		found := []string{}
		for i := range all {
			found = append(found, all[i].GetName())
		}
		return found
	}
	create := func(version, name string) error {
		o := objectOf(kind.WithVersion(version))
		o.SetName(name)
		o.Object["spec"] = map[string]any{"template": map[string]any{"spec": map[string]any{"requirements": []any{}}}}
		return client.IgnoreAlreadyExists(cluster.Client.Create(t.Context(), o))
	}

	g.Expect(follow()).To(Equal("v1"))
	g.Expect(kind.awaited.Load()).To(BeFalse())
	g.Expect(create("v1", "first")).To(Succeed())
	g.Eventually(names, "10s", "50ms").Should(ConsistOf("first"))

	g.Expect(cluster.Serve(t.Context(), definition, "v2")).To(Succeed())
	g.Eventually(follow, "20s", "100ms").Should(Equal("v2"))
	g.Eventually(woken).Should(Receive())
	g.Expect(names()).To(ConsistOf("first"))
	g.Eventually(func() error { return create("v2", "second") }, "10s", "100ms").Should(Succeed())
	g.Eventually(names, "10s", "50ms").Should(ConsistOf("first", "second"), "the cache is not that of the version which is gone")

	g.Expect(cluster.Serve(t.Context(), definition, "v2", "v1")).To(Succeed())
	g.Consistently(follow, "1s", "200ms").Should(Equal("v2"), "the one that is watched, as long as it is served")

	g.Expect(cluster.Serve(t.Context(), definition)).To(Succeed())
	g.Eventually(follow, "20s", "100ms").Should(BeEmpty())
	g.Expect(kind.awaited.Load()).To(BeFalse(), "it is known that it is not served")
	g.Expect(names()).To(BeEmpty())

	g.Expect(cluster.Serve(t.Context(), definition, "v1")).To(Succeed())
	g.Eventually(follow, "20s", "100ms").Should(Equal("v1"))
	g.Expect(names()).To(ConsistOf("first", "second"))
}

// What was written in a version that is gone no cache will ever show.
func TestAWriteInAVersionThatIsGoneIsNotWaitedFor(t *testing.T) {
	g := NewWithT(t)
	former, now := taintRuleKind.WithVersion("v1alpha3"), time.Unix(1_800_000_000, 0)
	b := &cacheBarrier{
		expected: map[object]expectation{{former, "gpusharing-a"}: {version: "5", since: now}},
		begun:    map[schema.GroupVersionKind]bool{nodeKind: true, gpuNodeKind: true, former: true},
	}
	b.reader = notCached{}
	lacking, err := b.missing(t.Context(), notCached{}, now, &former)
	g.Expect(err).To(HaveOccurred())
	g.Expect(lacking).To(BeEmpty())
	lacking, err = b.missing(t.Context(), notCached{}, now, nil)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(lacking).To(BeEmpty())
	g.Expect(b.expected).To(BeEmpty())
	g.Expect(b.begun).NotTo(HaveKey(former), "it is read anew if it comes back")
}

// notCached is a cache without a watch on what it is asked for.
type notCached struct{ client.Reader }

func (notCached) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	return &cache.ErrResourceNotCached{GVK: o.GetObjectKind().GroupVersionKind()}
}

// TestTheLogHasALineForEachDecision that changes something, and no other unless it is asked for.
func TestTheLogHasALineForEachDecision(t *testing.T) {
	have := &v1alpha1.GPUNode{}
	have.Spec.ConfigName = "a"
	an := &eventRecorder{seen: &seen{gpuNodes: map[string]*v1alpha1.GPUNode{"n": have}}}
	recorded := v1alpha1.GPUNodeSpec{ConfigName: "a", Baseline: &v1alpha1.Baseline{}}
	failed := action.Report{Node: "n", Why: "recording that the change failed"}
	failed.Status.Rollout.Failed = &v1alpha1.FailedChange{Reason: v1alpha1.ReasonApplyTimedOut, Message: "not within 15m0s"}
	for name, tc := range map[string]struct {
		action    action.Action
		line      string
		verbosity int
	}{
		"a taint":                     {action.Untaint{Node: "n"}, "Remove our taint from node n", 0},
		"a desired state":             {action.SetSpec{Node: "n", Spec: v1alpha1.GPUNodeSpec{ConfigName: "b"}, Why: "applying policy p"}, "Set spec of GPUNode n: applying policy p", 0},
		"a record in a desired state": {action.SetSpec{Node: "n", Spec: recorded, Why: "recording the baseline"}, "Set spec of GPUNode n: recording the baseline", 1},
		"a label":                     {action.PatchNode{Node: "n", Labels: map[string]*string{"a": nil}, Why: "selecting b"}, "Patch node n (selecting b): a-", 0},
		"an annotation":               {action.PatchNode{Node: "n", Annotations: map[string]*string{"a": nil}, Why: "recording"}, "Patch node n (recording): a-", 1},
		"a sync":                      {action.TriggerSync{Node: "n", Namespace: "x", Pod: "y", Value: "z"}, "Trigger a sync of pod x/y for z", 1},
		"a report":                    {action.Report{Node: "n", Why: "reporting Ready"}, "Status of GPUNode n: reporting Ready", 1},
		"that a change has failed":    {failed, "Node n: not within 15m0s", 0},
	} {
		t.Run(name, func(t *testing.T) {
			line, verbosity := an.logged(tc.action)
			g := NewWithT(t)
			g.Expect(line).To(Equal(tc.line))
			g.Expect(verbosity).To(Equal(tc.verbosity))
		})
	}
}
