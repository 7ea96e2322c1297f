// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
)

// writing is a reconcile over ten nodes with three patches each, and what was patched.
type writing struct {
	*reconciliation

	clock   *clocktesting.FakeClock
	actions []action.Action

	wrote map[string][]string // by node
	fails func(node, why string) error
}

func newWriting(writers int) *writing {
	w := &writing{clock: clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0)), wrote: map[string][]string{}}
	s := &seen{nodes: map[string]*corev1.Node{}, plugin: &pluginconfig.Observed{}}
	builder := fake.NewClientBuilder()
	for i := range 10 {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i)}}
		s.nodes[node.Name] = node
		builder.WithObjects(node.DeepCopy())
		for _, value := range []string{"1", "2", "3"} {
			w.actions = append(w.actions, action.PatchNode{Node: node.Name, Labels: map[string]*string{"step": &value}})
		}
	}
	var mu sync.Mutex
	c := interceptor.NewClient(builder.Build(), interceptor.Funcs{
		Patch: func(_ context.Context, _ client.WithWatch, o client.Object, p client.Patch, _ ...client.PatchOption) error {
			mu.Lock()
			defer mu.Unlock()
			body, _ := p.Data(o)
			_, after, _ := strings.Cut(string(body), `"step":"`)
			step := after[:1]
			w.wrote[o.GetName()] = append(w.wrote[o.GetName()], step)
			if w.fails != nil {
				return w.fails(o.GetName(), step)
			}
			return nil
		},
	})
	w.reconciliation = newReconciliation(New(c, Options{Clock: w.clock, Events: events.NewFakeRecorder(100), Writers: writers}), s)
	return w
}

// TestNodesAreWrittenSideBySide: the actions on one node keep their order, and a failure on one holds up no other.
func TestNodesAreWrittenSideBySide(t *testing.T) {
	g := NewWithT(t)
	w := newWriting(4)
	w.fails = func(node, step string) error {
		if node == "n3" && step == "1" {
			return errors.New("refused")
		}
		return nil
	}
	g.Expect(w.executeOnNodes(t.Context(), w.actions)).To(MatchError(ContainSubstring("refused")))
	g.Expect(w.wrote).To(HaveLen(10))
	for _, steps := range w.wrote {
		g.Expect(steps).To(Equal([]string{"1", "2", "3"}))
	}
	g.Expect(w.again(time.Minute)).To(Equal(time.Minute), "nothing is left")
}

// TestNodesOfAReconcileAreAnnouncedTogether where the same is done to them for the same reason. What differs has an
// Event of its own.
func TestNodesOfAReconcileAreAnnouncedTogether(t *testing.T) {
	g := NewWithT(t)
	w := newWriting(4)
	recorder := events.NewFakeRecorder(100)
	ref := action.PolicyRef{Name: "research", Generation: 1}
	w.recorder.recorder, w.policies = recorder, map[string]*v1alpha1.GPUSharingPolicy{ref.Name: {ObjectMeta: metav1.ObjectMeta{Name: ref.Name}}}
	w.current[ref] = true
	w.actions = nil
	for i := range 10 {
		patch := action.PatchNode{
			Node: fmt.Sprint("n", i), Labels: map[string]*string{"step": new("1")}, Policy: ref, Why: "selecting research-1",
		}
		if i == 3 {
			patch.Why = "selecting research-2"
		}
		w.actions = append(w.actions, patch)
	}
	g.Expect(w.executeOnNodes(t.Context(), w.actions)).To(Succeed())
	close(recorder.Events)
	var announced []string
	for e := range recorder.Events {
		announced = append(announced, e)
	}
	g.Expect(announced).To(ConsistOf(
		"Normal NodeLabelsChanged Selecting research-1 on 9 nodes: n0, n1, n2, n4, n5, n6, n7, n8 and 1 more",
		"Normal NodeLabelsChanged Patch node n3 (selecting research-2): step=1",
	))
}

// TestAReconcileEndsInTime: what could not be written within its time is decided anew, at once.
func TestAReconcileEndsInTime(t *testing.T) {
	g := NewWithT(t)
	w := newWriting(1)
	w.fails = func(string, string) error {
		w.clock.Step(writeFor / 5)
		return nil
	}
	g.Expect(w.executeOnNodes(t.Context(), w.actions)).To(Succeed())
	g.Expect(len(w.wrote)).To(And(BeNumerically(">=", 2), BeNumerically("<", 5)))
	for _, steps := range w.wrote {
		g.Expect(steps).To(HaveLen(3), "a node is not left half-way")
	}
	g.Expect(w.again(time.Minute)).To(Equal(lookAgain))
}

// TestAGPUNodeIsAppliedUnlessItIsSoByUs: also where another one has written the very spec, which the operator could not
// remove otherwise.
func TestAGPUNodeIsAppliedUnlessItIsSoByUs(t *testing.T) {
	g := NewWithT(t)
	applies, statuses := 0, 0
	c := interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			applies++
			return nil
		},
		SubResourceApply: func(context.Context, client.Client, string, runtime.ApplyConfiguration, ...client.SubResourceApplyOption) error {
			statuses++
			return nil
		},
	})
	spec := v1alpha1.GPUNodeSpec{PolicyName: "p", ConfigName: "c"}
	entry := func(manager, subresource, fields string) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{
			Manager: manager, Operation: metav1.ManagedFieldsOperationApply, Subresource: subresource, FieldsV1: metav1.NewFieldsV1(fields),
		}
	}
	for _, tc := range []struct {
		have   v1alpha1.GPUNodeSpec
		fields metav1.ManagedFieldsEntry
		want   v1alpha1.GPUNodeSpec
		writes int
	}{
		{have: spec, fields: entry(fieldManager, "", `{"f:spec":{}}`), want: spec},
		{have: spec, fields: entry(fieldManager, "", `{"f:spec":{}}`), want: v1alpha1.GPUNodeSpec{PolicyName: "q"}, writes: 1},
		{have: spec, fields: entry("kubectl", "", `{"f:spec":{}}`), want: spec, writes: 1},
		{have: spec, fields: entry(fieldManager, "", `{"f:metadata":{}}`), want: spec, writes: 1},
		{have: spec, fields: entry(fieldManager, "status", `{"f:spec":{}}`), want: spec, writes: 1},
		{fields: entry("kubectl", "", `{}`)},
	} {
		applies = 0
		node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n", ManagedFields: []metav1.ManagedFieldsEntry{tc.fields}}, Spec: tc.have}
		node.Status.Rollout.State, node.Status.BootID = "UpToDate", "the agent's"
		w := &writer{Controller: New(c, Options{}), seen: &seen{gpuNodes: map[string]*v1alpha1.GPUNode{"n": node}}}
		wrote, err := w.setSpec(t.Context(), action.SetSpec{Node: "n", Spec: tc.want})
		g.Expect(wrote, err).To(Equal(tc.writes == 1))
		g.Expect(applies).To(Equal(tc.writes))

		status := v1alpha1.GPUNodeStatus{Rollout: node.Status.Rollout}
		g.Expect(w.reportNode(t.Context(), action.Report{Node: "n", Status: status})).To(BeFalse())
		status.ObservedGeneration = 1
		g.Expect(w.reportNode(t.Context(), action.Report{Node: "n", Status: status})).To(BeTrue())
	}
	g.Expect(statuses).To(Equal(6))
}
