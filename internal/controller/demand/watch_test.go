// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
)

// TestAPodIsTheSame only if the nodes that would take it are: the API server lets pods that wait tolerate more.
func TestAPodIsTheSame(t *testing.T) {
	pod := &corev1.Pod{}
	pod.Spec.Containers = []corev1.Container{{}}
	more := pod.DeepCopy()
	more.Spec.Tolerations = []corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}
	NewWithT(t).Expect(samePod(pod, pod.DeepCopy())).To(BeTrue())
	NewWithT(t).Expect(samePod(pod, more)).To(BeFalse())
}

// refusing is a manager whose API server refuses the first requests.
type refusing struct {
	manager.Manager
	client.Reader

	refused, asked int
	added          manager.Runnable
}

func (m *refusing) Add(r manager.Runnable) error {
	m.added = r
	return nil
}

func (m *refusing) GetAPIReader() client.Reader { return m }

func (m *refusing) List(context.Context, client.ObjectList, ...client.ListOption) error {
	if m.asked++; m.asked <= m.refused {
		return errors.New("the API server is not there")
	}
	return nil
}

// TestWhatWasReportedGoesOnceTheAPIServerAnswers: with the feature gate off, nothing else would ever remove it.
func TestWhatWasReportedGoesOnceTheAPIServerAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &refusing{refused: 3}
		NewWithT(t).Expect(m.startOff(t.Context())).To(Succeed())
		NewWithT(t).Expect(m.asked).To(Equal(3+2), "policies and GPUNodes")
		ctx, end := context.WithCancel(t.Context())
		end()
		NewWithT(t).Expect((&refusing{refused: 1 << 30}).startOff(ctx)).To(Succeed(), "the end of the manager ends it")
	})
}

func (m *refusing) startOff(ctx context.Context) error {
	if err := New(nil, nil, nil, nil).RegisterOff(m); err != nil {
		return err
	}
	return m.added.Start(ctx)
}

// TestANodeIsTheSame only if as many of its instances are healthy.
func TestANodeIsTheSame(t *testing.T) {
	const name = "nvidia.com/mig-3g.20gb"
	node := &corev1.Node{}
	node.Status.Capacity = corev1.ResourceList{name: resource.MustParse("2")}
	node.Status.Allocatable = node.Status.Capacity.DeepCopy()
	sick := node.DeepCopy()
	sick.Status.Allocatable[name] = resource.MustParse("1")
	NewWithT(t).Expect(sameNode(node, node.DeepCopy())).To(BeTrue())
	NewWithT(t).Expect(sameNode(node, sick)).To(BeFalse())
}
