// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	pure "github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const (
	own  = "gpu-sharing-operator"
	wait = 20 * time.Second
	poll = 50 * time.Millisecond
)

// TestMain silences what controller-runtime would say of not being told where to log to.
func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// site is a cluster with the kinds of autoscalers, and the controller with the rights and the admission policy that it
// ships with.
type site struct {
	*WithT
	t       *testing.T
	cluster *env.Cluster
	client  client.WithWatch
	denied  float64
	reads   atomic.Int32 // of what agents report
}

// counting counts reads of what agents report.
type counting struct {
	client.Client
	reads *atomic.Int32
}

func (c counting) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if _, is := list.(*v1alpha1.GPUNodeList); is {
		c.reads.Add(1)
	}
	return c.Client.List(ctx, list, opts...)
}

func newSite(t *testing.T, rights ...string) *site {
	t.Helper()
	s := &site{WithT: NewWithT(t), t: t, cluster: env.Start(t, env.WithNVIDIA(), env.WithAutoscalers())}
	s.client = s.cluster.Client
	rights = append(rights, "config/default/namespace.yaml", "config/rbac/role.yaml", "config/manager/rbac.yaml", "config/manager/admission.yaml")
	s.Expect(s.cluster.Apply(t.Context(), rights...)).To(Succeed())
	return s
}

const manage = "config/autoscaling/rbac.yaml"

// start starts the controller. It ends with the test, and then nothing must have been denied by the admission policy.
func (s *site) start() {
	s.t.Helper()
	as, err := s.cluster.ConfigAs(s.t.Context(), env.Identity{Namespace: own, ServiceAccount: "gpu-sharing-controller"})
	s.Expect(err).NotTo(HaveOccurred())
	skip := true
	mgr, err := ctrl.NewManager(as, ctrl.Options{
		Scheme: s.cluster.Scheme, Cache: gpusharingpolicy.CacheOptions(pluginconfig.StandAlone{}), Client: client.Options{Cache: &client.CacheOptions{Unstructured: true}},
		Metrics: server.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: &skip},
	})
	s.Expect(err).NotTo(HaveOccurred())
	options := autoscaling.CacheOptions()
	options.Scheme, options.Mapper = mgr.GetScheme(), mgr.GetRESTMapper()
	groups, err := cache.New(mgr.GetConfig(), options)
	s.Expect(err).NotTo(HaveOccurred())
	clk := clock.RealClock{}
	s.Expect(autoscaling.New(counting{mgr.GetClient(), &s.reads}, autoscaling.Options{
		Cache: groups, Reader: mgr.GetAPIReader(), PluginConfig: pluginconfig.New(mgr.GetClient(), mgr.GetAPIReader(), clk, pluginconfig.StandAlone{}), Clock: clk, Events: events.NewFakeRecorder(1000),
	}).Register(mgr)).To(Succeed())
	ctx, stop := context.WithCancel(s.t.Context())
	done := make(chan error)
	go func() { done <- mgr.Start(ctx) }()
	s.t.Cleanup(func() {
		stop()
		s.Expect(<-done).To(Succeed())
		denied, err := s.cluster.Denied(context.Background(), env.ControllerWrites)
		s.Expect(err).NotTo(HaveOccurred())
		s.Expect(denied).To(BeEquivalentTo(s.denied), "writes that the admission policy denied")
	})
}

// apply applies an object as a user does.
func (s *site) apply(object string) *unstructured.Unstructured {
	s.t.Helper()
	o := &unstructured.Unstructured{}
	s.Expect(yaml.Unmarshal([]byte(object), &o.Object)).To(Succeed())
	s.Expect(s.cluster.ApplyObject(s.t.Context(), o)).To(Succeed())
	return o
}

// node creates a node with GPUs of a product as its agent reports them.
func (s *site) node(name, product string, count int, labels, annotations map[string]string) {
	s.t.Helper()
	s.Expect(s.client.Create(s.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: annotations}})).To(Succeed())
	gpuNode := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
	s.Expect(s.client.Create(s.t.Context(), gpuNode)).To(Succeed())
	for i := range count {
		gpuNode.Status.Devices = append(gpuNode.Status.Devices, v1alpha1.DeviceStatus{
			UUID: "GPU-" + name + "-" + string(rune('0'+i)), Index: int32(i), Product: product, ComputeCapability: "8.0",
			Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
		})
	}
	s.Expect(s.client.Status().Update(s.t.Context(), gpuNode)).To(Succeed())
}

func (s *site) policy() *v1alpha1.GPUSharingPolicy {
	s.t.Helper()
	p := &v1alpha1.GPUSharingPolicy{}
	s.Expect(s.client.Get(s.t.Context(), client.ObjectKey{Name: "research"}, p)).To(Succeed())
	return p
}

// groups are the node groups that policy research reports.
func (s *site) groups() []v1alpha1.NodeGroupStatus { return s.policy().Status.NodeGroups }

// reports waits until the only node group and the condition of policy research report a reason, and returns the
// message.
func (s *site) reports(reason string) string {
	s.t.Helper()
	var message string
	s.Eventually(func(g Gomega) {
		p := s.policy()
		g.Expect(p.Status.NodeGroups).To(HaveLen(1))
		g.Expect(p.Status.NodeGroups[0].Reason).To(Equal(reason), p.Status.NodeGroups[0].Message)
		c, found := condition.Find(p.Status.Conditions, v1alpha1.ConditionAutoscalingConfigured)
		g.Expect(found).To(BeTrue())
		g.Expect(c.Reason).To(Equal(reason))
		g.Expect(c.ObservedGeneration).To(Equal(p.Generation))
		message = p.Status.NodeGroups[0].Message
	}, wait, poll).Should(Succeed())
	return message
}

// machineSet is MachineSet gpu of OpenShift.
func (s *site) machineSet() *unstructured.Unstructured {
	s.t.Helper()
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: pure.GroupOpenShift, Version: "v1beta1", Kind: "MachineSet"})
	s.Expect(s.client.Get(s.t.Context(), client.ObjectKey{Namespace: "openshift-machine-api", Name: "gpu"}, o)).To(Succeed())
	return o
}

// overlays are the NodeOverlays.
func (s *site) overlays() []unstructured.Unstructured {
	s.t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: pure.GroupKarpenter, Version: "v1alpha1", Kind: "NodeOverlayList"})
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	return list.Items
}
