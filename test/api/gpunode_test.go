// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	acmeta "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const (
	controllerManager = client.FieldOwner("gpusharing-controller")
	agentManager      = client.FieldOwner("gpusharing-agent")
)

func device(uuid string) *ac.DeviceSpecApplyConfiguration {
	return ac.DeviceSpec().WithUUID(uuid).WithSharing(ac.DeviceSharing().WithMIGMode(v1alpha1.MIGModeDisabled))
}

func statusOf(uuid string) *ac.GPUNodeStatusApplyConfiguration {
	return ac.GPUNodeStatus().WithDevices(ac.DeviceStatus().WithUUID(uuid).WithIndex(0).WithMemoryMiB(40960).
		WithSharing(ac.DeviceSharing().WithMIGMode(v1alpha1.MIGModeDisabled)))
}

func TestGPUNode(t *testing.T) {
	cluster := env.Start(t)
	g := NewWithT(t)
	g.Expect(cluster.Apply(t.Context(), "config/default/namespace.yaml", "config/rbac/role.yaml", "config/manager/rbac.yaml", "config/agent/rbac.yaml",
		"config/agent/admission.yaml")).To(Succeed())
	controller, err := cluster.ClientAs(t.Context(), env.Identity{Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-controller"})
	g.Expect(err).NotTo(HaveOccurred())
	for _, name := range []string{"node-1", "node-2"} {
		g.Eventually(func() error {
			return controller.Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}).WithTimeout(20*time.Second).Should(Succeed(), "a right takes effect a moment after it was given")
	}
	agent, err := cluster.ClientAs(t.Context(), env.Identity{
		Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-agent", Pod: "gpu-sharing-agent-x", Node: "node-1",
	})
	g.Expect(err).NotTo(HaveOccurred())

	t.Run("is written by two without conflict", func(t *testing.T) { ownership(t, controller, agent) })
	t.Run("belongs to one agent", func(t *testing.T) { ownNodeOnly(t, cluster, agent) })
	t.Run("has a last good state that no agent forges", func(t *testing.T) { forging(t, cluster, agent, controller) })
	t.Run("refuses what no GPU can be", func(t *testing.T) { impossible(t, controller) })
}

// ownership: the spec is the controller's, the status the agent's, and neither write disturbs the other's.
func ownership(t *testing.T, controller, agent client.Client) {
	t.Helper()
	g := NewWithT(t)
	ctx := t.Context()
	get := func() *v1alpha1.GPUNode {
		n := &v1alpha1.GPUNode{}
		g.Expect(controller.Get(ctx, client.ObjectKey{Name: "node-1"}, n)).To(Succeed())
		return n
	}
	applySpec := func(devices ...*ac.DeviceSpecApplyConfiguration) {
		spec := ac.GPUNodeSpec().WithPolicyName("p").WithDevices(devices...)
		g.Expect(controller.Apply(ctx, ac.GPUNode("node-1").WithSpec(spec), controllerManager, client.ForceOwnership)).To(Succeed())
	}
	applyStatus := func() {
		status := ac.GPUNode("node-1").WithStatus(statusOf("GPU-1"))
		g.Expect(agent.Status().Apply(ctx, status, agentManager, client.ForceOwnership)).To(Succeed())
	}

	applySpec(device("GPU-1"), device("GPU-2"))
	applyStatus()
	n := get()
	g.Expect(n.Spec.Devices).To(HaveLen(2))
	g.Expect(n.Status.Devices).To(HaveLen(1))
	extracted, err := ac.ExtractGPUNodeStatus(n, string(agentManager))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(extracted.Status).To(Equal(statusOf("GPU-1")), "what the agent owns is what it applied")

	version := n.ResourceVersion
	applySpec(device("GPU-1"), device("GPU-2"))
	applyStatus()
	g.Expect(get().ResourceVersion).To(Equal(version), "applying the same again is no write")

	applySpec(device("GPU-2"))
	n2 := get()
	g.Expect(n2.Spec.Devices).To(HaveExactElements(HaveField("UUID", "GPU-2")), "what an apply leaves out goes")
	g.Expect(n2.Generation).To(Equal(n.Generation+1), "a changed spec is a new generation")
	g.Expect(n2.Status).To(Equal(n.Status))

	g.Expect(controller.Apply(ctx, ac.GPUNode("node-1").WithStatus(statusOf("GPU-9")), controllerManager)).To(Succeed())
	g.Expect(get().Status).To(Equal(n.Status), "a status sent with the object is ignored")
}

// ownNodeOnly: an agent writes the status of its own GPUNode, and nothing else of ours.
func ownNodeOnly(t *testing.T, cluster *env.Cluster, agent client.Client) {
	t.Helper()
	ctx := t.Context()
	status := func(c client.Client, node string) error {
		return c.Status().Apply(ctx, ac.GPUNode(node).WithStatus(statusOf("GPU-1")), agentManager, client.ForceOwnership)
	}
	stranger, err := cluster.ClientAs(ctx, env.Identity{Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-agent"})
	g := NewWithT(t)
	g.Expect(err).NotTo(HaveOccurred())
	g.Eventually(func() error { return status(agent, "node-2") }).WithTimeout(20*time.Second).
		Should(HaveOccurred(), "an admission policy takes effect a moment after it was applied")

	cases := map[string]struct {
		do   func() error
		says string // empty: it may
	}{
		"reads every GPUNode": {do: func() error { return agent.List(ctx, &v1alpha1.GPUNodeList{}) }},
		"writes the status of its own": {
			do: func() error { return status(agent, "node-1") },
		},
		"does not write the status of another's": {
			do:   func() error { return status(agent, "node-2") },
			says: "only the agent on node node-2 may write the status of its GPUNode; this request is from system:serviceaccount:gpu-sharing-operator:gpu-sharing-agent on node node-1",
		},
		"does not write a status with a token of no node": {
			do:   func() error { return status(stranger, "node-1") },
			says: "only the agent on node node-1 may write the status of its GPUNode; this request is from system:serviceaccount:gpu-sharing-operator:gpu-sharing-agent, on no node",
		},
		"does not write its own spec": {
			do: func() error {
				return agent.Apply(ctx, ac.GPUNode("node-1").WithSpec(ac.GPUNodeSpec().WithPolicyName("mine")), agentManager)
			},
			says: `cannot patch resource "gpunodes"`,
		},
		"does not create a GPUNode": {
			do: func() error {
				return agent.Create(ctx, &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node-3"}})
			},
			says: `cannot create resource "gpunodes"`,
		},
		"does not delete its own": {
			do: func() error {
				return agent.Delete(ctx, &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
			},
			says: `cannot delete resource "gpunodes"`,
		},
		"does not see policies": {
			do:   func() error { return agent.List(ctx, &v1alpha1.GPUSharingPolicyList{}) },
			says: `cannot list resource "gpusharingpolicies"`,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			err := tc.do()
			if tc.says == "" {
				g.Expect(err).NotTo(HaveOccurred())
				return
			}
			g.Expect(apierrors.IsForbidden(err)).To(BeTrue(), "not forbidden: %v", err)
			g.Expect(err).To(MatchError(ContainSubstring(tc.says)))
		})
	}
}

// forging: with the token of an agent nobody writes what the controller decides by and reports, and the controller
// writes nothing that the agent observed.
func forging(t *testing.T, cluster *env.Cluster, agent, controller client.Client) {
	t.Helper()
	g, ctx := NewWithT(t), t.Context()
	condition := func(kind string, status metav1.ConditionStatus) *acmeta.ConditionApplyConfiguration {
		return acmeta.Condition().WithType(kind).WithStatus(status).WithReason("Test").WithMessage("test").WithObservedGeneration(1).
			WithLastTransitionTime(metav1.Now())
	}
	good := ac.RolloutStatus().WithLastGood(ac.NodeSharing().WithConfigName("research-1").WithDevices(device("GPU-1")))
	apply := func(c client.Client, manager client.FieldOwner, status *ac.GPUNodeStatusApplyConfiguration) error {
		return c.Status().Apply(ctx, ac.GPUNode("node-1").WithStatus(status), manager, client.ForceOwnership)
	}
	observed := statusOf("GPU-1").WithConditions(condition(v1alpha1.ConditionApplied, metav1.ConditionTrue))
	eviction := ac.MemoryEviction().WithTime(metav1.Now()).WithDeviceUUID("GPU-1").WithNamespace("ml").WithPodName("greedy")
	reported := ac.GPUNodeStatus().WithRollout(good).WithObservedGeneration(1).WithMemoryEvictions(eviction).WithConditions(condition(v1alpha1.ConditionReady, metav1.ConditionFalse),
		condition(v1alpha1.ConditionReconciling, metav1.ConditionTrue), condition(v1alpha1.ConditionStalled, metav1.ConditionFalse))
	g.Expect(apply(agent, agentManager, observed)).To(Succeed())
	g.Expect(apply(controller, controllerManager, reported)).To(Succeed())
	n := &v1alpha1.GPUNode{}
	g.Expect(cluster.Client.Get(ctx, client.ObjectKey{Name: "node-1"}, n)).To(Succeed())
	g.Expect(n.Status.Rollout.LastGood.ConfigName).To(Equal("research-1"))
	g.Expect(n.Status.Devices).To(HaveLen(1))
	g.Expect(n.Status.Conditions).To(HaveLen(4))

	update := func(change func(*v1alpha1.GPUNodeStatus)) error {
		stolen := n.DeepCopy()
		change(&stolen.Status)
		return agent.Status().Patch(ctx, stolen, client.MergeFrom(n))
	}
	for name, do := range map[string]func() error{
		"applies another last good state": func() error {
			return apply(agent, agentManager, statusOf("GPU-1").WithRollout(ac.RolloutStatus().WithLastGood(ac.NodeSharing().WithConfigName("mine"))))
		},
		"patches the last good state": func() error {
			return update(func(s *v1alpha1.GPUNodeStatus) { s.Rollout.LastGood.ConfigName = "mine" })
		},
		"removes the record of the rollout": func() error {
			return update(func(s *v1alpha1.GPUNodeStatus) { s.Rollout = v1alpha1.RolloutStatus{} })
		},
		"reports that the node is ready": func() error {
			return apply(agent, agentManager, statusOf("GPU-1").WithConditions(condition(v1alpha1.ConditionReady, metav1.ConditionTrue)))
		},
		"removes a condition of the controller": func() error {
			return update(func(s *v1alpha1.GPUNodeStatus) {
				s.Conditions = slices.DeleteFunc(s.Conditions, func(c metav1.Condition) bool { return c.Type == v1alpha1.ConditionStalled })
			})
		},
		"removes the record of evictions": func() error {
			return update(func(s *v1alpha1.GPUNodeStatus) { s.MemoryEvictions = nil })
		},
		"says what GPUs are to have on demand": func() error {
			return update(func(s *v1alpha1.GPUNodeStatus) {
				s.Demand = []v1alpha1.GPUDemand{{UUID: "GPU-1", SinceTime: metav1.Now(), Instances: []v1alpha1.InstanceCount{{Profile: "1g.5gb", Count: 1}}}}
			})
		},
		"reports a generation as observed": func() error {
			return update(func(s *v1alpha1.GPUNodeStatus) { s.ObservedGeneration = 7 })
		},
	} {
		err := do()
		g.Expect(apierrors.IsForbidden(err)).To(BeTrue(), "an agent %s: %v", name, err)
		g.Expect(err).To(MatchError(ContainSubstring("the agent may not change these fields and conditions of the status of GPUNode node-1")), name)
	}
	for name, status := range map[string]*ac.GPUNodeStatusApplyConfiguration{
		"devices": statusOf("GPU-9").WithRollout(good), "Applied": ac.GPUNodeStatus().WithConditions(condition(v1alpha1.ConditionApplied, metav1.ConditionFalse)),
	} {
		err := apply(controller, controllerManager, status)
		g.Expect(err).To(MatchError(ContainSubstring("the controller may not change these fields and conditions of the status of GPUNode node-1")), name)
	}
	g.Expect(apply(agent, agentManager, statusOf("GPU-2").WithConditions(condition(v1alpha1.ConditionApplied, metav1.ConditionFalse)))).
		To(Succeed(), "what it observed, beside what the controller reported")
}

func impossible(t *testing.T, c client.Client) {
	t.Helper()
	enabled, disabled := v1alpha1.MIGModeEnabled, v1alpha1.MIGModeDisabled
	daemon := ac.MPSDaemon().WithResourceName("nvidia.com/gpu").WithOwner(v1alpha1.MPSDaemonOwnerGPUSharing).
		WithActiveThreadPercentage(50).WithPinnedMemoryLimit(resource.MustParse("1Mi"))
	instance := func(count int32) *ac.InstanceCountApplyConfiguration {
		return ac.InstanceCount().WithProfile("1g.5gb").WithCount(count)
	}
	cases := map[string]struct {
		sharing *ac.DeviceSharingApplyConfiguration
		says    string
	}{
		"instances without MIG mode": {
			sharing: ac.DeviceSharing().WithMIGMode(disabled).WithInstances(instance(1)), says: "instances need MIG mode",
		},
		"MPS in MIG mode": {
			sharing: ac.DeviceSharing().WithMIGMode(enabled).WithMPS(daemon), says: "MPS is not supported on GPUs in MIG mode",
		},
		"no instance of a profile": {
			sharing: ac.DeviceSharing().WithMIGMode(enabled).WithInstances(instance(0)), says: "should be greater than or equal to 1",
		},
		"no MIG mode": {sharing: ac.DeviceSharing(), says: "migMode: Required value"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			spec := ac.GPUNodeSpec().WithDevices(ac.DeviceSpec().WithUUID("GPU-1").WithSharing(tc.sharing))
			err := c.Apply(t.Context(), ac.GPUNode("node-2").WithSpec(spec), controllerManager)
			NewWithT(t).Expect(err).To(MatchError(ContainSubstring(tc.says)))
		})
	}
}
