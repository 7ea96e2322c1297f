// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// whyCluster is an API server with what the tests of why put there.
type whyCluster struct {
	*env.Cluster

	t *testing.T
}

func startWhy(t *testing.T) whyCluster {
	t.Helper()
	w := whyCluster{env.Start(t), t}
	for _, namespace := range []string{"team", "others"} {
		w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	}
	return w
}

func (w whyCluster) create(o client.Object) {
	w.t.Helper()
	NewWithT(w.t).Expect(w.Client.Create(w.t.Context(), o)).To(Succeed())
}

// node creates a node with a GPU that offers some resources, and its GPUNode, as edited.
func (w whyCluster) node(name string, offers map[string]int64, edit func(*corev1.Node, *v1alpha1.GPUNode), models ...sim.Model) {
	w.t.Helper()
	g := NewWithT(w.t)
	seen := newNode(w.t, name, models...)
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pool": name}}}
	object.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("8"), "pods": resource.MustParse("100")}
	for name, n := range offers {
		object.Status.Allocatable[corev1.ResourceName(name)] = *quantityOf(n)
	}
	object.Status.Capacity = object.Status.Allocatable.DeepCopy()
	reported := seen.GPU
	if edit != nil {
		edit(object, &reported)
	}
	status, taints := object.Status, object.Spec.Taints
	w.create(object)
	object.Spec.Taints = taints // the API server adds that a new node is not ready
	g.Expect(w.Client.Update(w.t.Context(), object)).To(Succeed())
	object.Status = status
	g.Expect(w.Client.Status().Update(w.t.Context(), object)).To(Succeed())
	gpuNode := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: reported.Spec}
	w.create(gpuNode)
	gpuNode.Status = reported.Status
	g.Expect(w.Client.Status().Update(w.t.Context(), gpuNode)).To(Succeed())
}

func requesting(namespace, name, resourceName string, n int64) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "example.invalid/x",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(resourceName): *quantityOf(n)}},
		}}},
	}
}

// pod creates a pod. Without a node it is pending, and the scheduler says why as the real one does.
func (w whyCluster) pod(pod *corev1.Pod, says string) {
	w.t.Helper()
	w.create(pod)
	pod.Status.Phase = corev1.PodPending
	if pod.Spec.NodeName != "" {
		pod.Status.Phase = corev1.PodRunning
	} else if says != "" {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: says}}
	}
	NewWithT(w.t).Expect(w.Client.Status().Update(w.t.Context(), pod)).To(Succeed())
}

// as is what why prints for a user; empty: for an administrator.
func (w whyCluster) as(user string, args ...string) (string, error) {
	w.t.Helper()
	var out strings.Builder
	p := &Program{Out: &out, Clock: clocktesting.NewFakeClock(now)}
	err := p.Run(w.t.Context(), append(append([]string{"why"}, args...), "-n", "team", "--kubeconfig", kubeconfigOf(w.t, w.Config, user)))
	return out.String(), err
}

func (w whyCluster) says(args ...string) (said answer, printed string) {
	w.t.Helper()
	g := NewWithT(w.t)
	printed, err := w.as("", args...)
	g.Expect(err).NotTo(HaveOccurred())
	inJSON, err := w.as("", append(args, "-o", "json")...)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(json.Unmarshal([]byte(inJSON), &said)).To(Succeed())
	first, _, _ := strings.Cut(printed, "\n")
	g.Expect(first).To(HaveSuffix(said.Answer), "the answer comes first")
	return said, printed
}

const (
	plainGPU  = "nvidia.com/gpu"
	sharedGPU = "nvidia.com/gpu.shared"
)

// TestWhyAPodIsPending: each cause on a real API server, in the words of who asks for a GPU.
func TestWhyAPodIsPending(t *testing.T) {
	for cause, tc := range map[cause]struct {
		make   func(whyCluster)
		answer types.GomegaMatcher
		below  []string
	}{
		causeRenamed: {
			func(w whyCluster) {
				w.node("a", map[string]int64{sharedGPU: 8}, nil, sim.T4)
				w.pod(requesting("team", "train", plainGPU, 1), "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
			}, Equal("No node offers nvidia.com/gpu: the shares are called nvidia.com/gpu.shared, on 1 node. Ask for nvidia.com/gpu.shared: 1 instead."),
			[]string{"asks for     nvidia.com/gpu: 1", "offered      nvidia.com/gpu.shared: 8 on 1 node, 8 free", "scheduler    0/1 nodes are available"},
		},
		causeNoProfile: {func(w whyCluster) {
			w.node("a", map[string]int64{"nvidia.com/mig-1g.5gb": 7}, nil, sim.A100)
			w.pod(requesting("team", "train", "nvidia.com/mig-3g.20gb", 1), "")
		}, Equal("No GPU has an instance of profile 3g.20gb, because no MIG layout asks for one. Ask for nvidia.com/mig-1g.5gb, or ask an administrator for another policy."), nil},
		causeInUse: {
			func(w whyCluster) {
				w.node("a", map[string]int64{plainGPU: 4}, nil, sim.T4)
				w.node("b", map[string]int64{"nvidia.com/mig-1g.5gb": 7}, nil, sim.A100)
				for name, namespace := range map[string]string{"one": "others", "two": "others", "three": "team"} {
					held := requesting(namespace, name, plainGPU, 1)
					if held.Spec.NodeName = "a"; name == "one" {
						held.Spec.Containers[0].Resources.Limits[plainGPU] = *quantityOf(2)
					}
					w.pod(held, "")
				}
				w.pod(requesting("team", "train", plainGPU, 1), "")
			}, Equal("Node a would take it, but has 0 of 4 nvidia.com/gpu free: others 3, team 1. It starts by itself once that is free."),
			[]string{"nodes        a: 0 of 4 nvidia.com/gpu free\n", "b: offers nvidia.com/mig-1g.5gb: 7\n", "held by      others 3: one, two\n               team 1: three\n"},
		},
		causeChange: {func(w whyCluster) {
			w.create(changing(w.t))
			w.node("a", map[string]int64{plainGPU: 4}, func(object *corev1.Node, n *v1alpha1.GPUNode) {
				since := metav1.NewTime(now.Add(-4 * time.Minute))
				object.Spec.Taints = []corev1.Taint{{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &since}}
				n.Status.Rollout.PolicyName, n.Status.Rollout.State = "research", string(node.Draining)
				n.Status.Conditions[0].Status, n.Status.Conditions[0].Reason = metav1.ConditionFalse, v1alpha1.ReasonGPUInUse
				n.Status.Conditions[0].Message = "waiting for pod others/one"
			}, sim.T4)
			w.pod(requesting("team", "train", plainGPU, 1), "")
		}, And(HavePrefix("Node a would take it, but is changed by policy research, and is drained until 08:06:00 UTC at the latest (GPUInUse: waiting for pod others/one)."),
			HaveSuffix("The pod starts by itself after that, if a share is free.")), nil},
		causeTaint: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 4}, func(object *corev1.Node, _ *v1alpha1.GPUNode) {
				object.Spec.Taints = []corev1.Taint{{Key: "example.com/team", Value: "ml", Effect: corev1.TaintEffectNoSchedule}}
			}, sim.T4)
			w.pod(requesting("team", "train", plainGPU, 1), "")
		}, Equal("Nodes that offer nvidia.com/gpu: 1 keep it off: a has the taint example.com/team=ml:NoSchedule, which the pod does not tolerate. Add the toleration to the pod."), nil},
		causeSelector: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 4}, nil, sim.T4)
			pod := requesting("team", "train", plainGPU, 1)
			pod.Spec.NodeSelector = map[string]string{"pool": "big"}
			w.pod(pod, "")
		}, ContainSubstring("a does not have the label pool=big of the pod's node selector."), nil},
		causeTooMany: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 2}, nil, sim.T4)
			w.pod(requesting("team", "train", plainGPU, 4), "")
		}, Equal("It asks for 4 of nvidia.com/gpu, and no node offers more than 2. Ask for no more than that."), nil},
		causeUnschedulable: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 2}, func(object *corev1.Node, _ *v1alpha1.GPUNode) { object.Spec.Unschedulable = true }, sim.T4)
			w.pod(requesting("team", "train", plainGPU, 1), "")
		}, Equal("1 node would take it, but a is cordoned. Ask an administrator."), nil},
		causeOther: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 2}, nil, sim.T4)
			pod := requesting("team", "train", plainGPU, 1)
			pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("64")}
			w.pod(pod, "")
		}, Equal("1 node would take it and has the GPUs free, but not the rest: a: cpu: asks for 64, 8 free."), nil},
		causeGated: {func(w whyCluster) {
			pod := requesting("team", "train", plainGPU, 1)
			pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
			w.pod(pod, "")
		}, ContainSubstring("until scheduling gate kueue.x-k8s.io/admission is removed"), nil},
		causeUnhealthy: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 2}, func(object *corev1.Node, _ *v1alpha1.GPUNode) { object.Status.Allocatable[plainGPU] = *quantityOf(0) }, sim.T4)
			w.pod(requesting("team", "train", plainGPU, 1), "")
		}, ContainSubstring("NVIDIA's device plugin on a restarts, has stopped, or reports all as unhealthy"), nil},
		causeNotYet: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 1}, func(_ *corev1.Node, n *v1alpha1.GPUNode) {
				n.Status.Rollout.PolicyName, n.Status.Conditions[0].Status = "research", metav1.ConditionFalse
				n.Status.Rollout.Resources = []v1alpha1.ResourceCount{{Name: "nvidia.com/mig-3g.20gb", Expected: 2}}
			}, sim.A100)
			w.pod(requesting("team", "train", "nvidia.com/mig-3g.20gb", 1), "")
		}, Equal("No node offers nvidia.com/mig-3g.20gb yet: a change that is under way brings it to 1 node (a). The pod starts by itself then."), nil},
		causeNoGPU: {func(w whyCluster) { w.pod(requesting("team", "train", "cpu", 1), "") }, HavePrefix("It asks for no GPU"), nil},
		causeNotOffered: {
			func(w whyCluster) { w.pod(requesting("team", "train", plainGPU, 1), "") },
			Equal("No node offers nvidia.com/gpu. No node offers any GPU: ask an administrator to run `kubectl gpusharing doctor`."), nil,
		},
		causeNone: {func(w whyCluster) {
			w.node("a", map[string]int64{plainGPU: 2}, nil, sim.T4)
			w.pod(requesting("team", "train", plainGPU, 1), "")
		}, Equal("Node a would take it, as far as GPUs go. The scheduler says: nothing yet"), nil},
	} {
		t.Run(string(cause), func(t *testing.T) {
			g := NewWithT(t)
			w := startWhy(t)
			tc.make(w)
			said, printed := w.says("train")
			g.Expect(said).To(And(HaveField("Cause", cause), HaveField("Phase", "Pending"), HaveField("NotKnown", BeEmpty())))
			g.Expect(said.Answer).To(tc.answer)
			for _, line := range tc.below {
				g.Expect(printed).To(ContainSubstring(line))
			}
		})
	}
}

// changing is a policy under which nodes are drained for ten minutes.
func changing(t *testing.T) *v1alpha1.GPUSharingPolicy {
	t.Helper()
	p := policy(t, "research", slicing)
	p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "none"}}
	return &p
}

// TestWhyAWorkloadHasNoPods: its pods are refused, so there is none to ask about.
func TestWhyAWorkloadHasNoPods(t *testing.T) {
	g := NewWithT(t)
	w := startWhy(t)
	q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "gpus"}}
	const limited = "requests." + plainGPU
	q.Spec.Hard = corev1.ResourceList{limited: *quantityOf(4)}
	w.create(q)
	q.Status = corev1.ResourceQuotaStatus{Hard: q.Spec.Hard, Used: corev1.ResourceList{limited: *quantityOf(4)}}
	g.Expect(w.Client.Status().Update(t.Context(), q)).To(Succeed())
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}}, Spec: requesting("", "", plainGPU, 1).Spec}
	web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "web"}}
	web.Spec.Selector, web.Spec.Template = &metav1.LabelSelector{MatchLabels: template.Labels}, template
	w.create(web)
	web.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentReplicaFailure, Status: corev1.ConditionTrue, Reason: "FailedCreate", Message: "exceeded quota: gpus"}}
	g.Expect(w.Client.Status().Update(t.Context(), web)).To(Succeed())
	const says = "ResourceQuota gpus lets namespace team have 4 of nvidia.com/gpu, and 4 are taken: a pod that asks for 1 cannot be created. Delete pods that have some, or " +
		"ask an administrator for more."

	said, printed := w.says("deployment/web")
	g.Expect(said).To(And(HaveField("Cause", causeQuota), HaveField("Answer", says), HaveField("Phase", "NotCreated"), HaveField("Quotas", HaveLen(1))))
	g.Expect(printed).To(And(HavePrefix("Deployment team/web has no pod. ResourceQuota gpus"), ContainSubstring("quota        4 of 4 nvidia.com/gpu are taken, by ResourceQuota gpus")))
	said, _ = w.says("web")
	g.Expect(said.Cause).To(Equal(causeQuota), "no pod has that name")

	train := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train"}, Spec: batchv1.JobSpec{Template: template}}
	train.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	w.create(train)
	q.Status.Used = corev1.ResourceList{limited: *quantityOf(1)}
	g.Expect(w.Client.Status().Update(t.Context(), q)).To(Succeed())
	said, _ = w.says("job", "train")
	g.Expect(said).To(And(HaveField("Cause", causeNotCreated), HaveField("Answer", "Job team/train has not created the pod yet.")))
	w.create(&corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train.1"}, Reason: "FailedCreate", Message: "pods are forbidden by policy x", LastTimestamp: metav1.NewTime(now),
		InvolvedObject: corev1.ObjectReference{Kind: "Job", Namespace: "team", Name: "train", UID: train.UID},
	})
	said, _ = w.says("job/train")
	g.Expect(said.Answer).To(Equal("Job team/train cannot create the pod: pods are forbidden by policy x"))

	_, err := w.as("", "nobody")
	g.Expect(err).To(MatchError(ContainSubstring(`namespace team has no Pod or Deployment or Job or StatefulSet "nobody"`)))
	_, err = w.as("", "node/a")
	g.Expect(err).To(MatchError(ContainSubstring("why takes pods, Deployments, Jobs and StatefulSets")))
}

// TestWhyNamesTheShareOfAPodThatRuns: which share of which GPU, and its limits.
func TestWhyNamesTheShareOfAPodThatRuns(t *testing.T) {
	g := NewWithT(t)
	w := startWhy(t)
	holds := func(n *v1alpha1.GPUNode, pod string, instance *int32) {
		n.Status.Devices[0].Holders = []v1alpha1.HolderStatus{{Namespace: "team", PodName: pod, ContainerName: "main", Instance: instance}}
	}
	w.node("t", map[string]int64{plainGPU: 4}, func(_ *corev1.Node, n *v1alpha1.GPUNode) { holds(n, "slice", nil) }, sim.T4)
	w.node("m", map[string]int64{sharedGPU: 8}, func(_ *corev1.Node, n *v1alpha1.GPUNode) {
		holds(n, "mps", nil)
		n.Status.Devices[0].Sharing.MPS = &v1alpha1.MPSDaemon{
			ResourceName: sharedGPU, Owner: v1alpha1.MPSDaemonOwnerGPUSharing, ActiveThreadPercentage: 12, PinnedMemoryLimit: new(resource.MustParse("9Gi")),
		}
		n.Status.Rollout.PolicyName = "inference"
		n.Status.Rollout.Blockers = []v1alpha1.BlockerStatus{{Kind: v1alpha1.BlockerKindPod, Namespace: "team", Name: "mps", Handling: "is evicted"}}
	}, sim.H100)
	w.node("w", map[string]int64{plainGPU: 1}, func(_ *corev1.Node, n *v1alpha1.GPUNode) { holds(n, "alone", nil) }, sim.T4)
	for name, on := range map[string]string{"slice": "t", "mps": "m", "alone": "w"} {
		pod := requesting("team", name, plainGPU, 1)
		if pod.Spec.NodeName = on; name == "mps" {
			pod = requesting("team", name, sharedGPU, 1)
			pod.Spec.NodeName = on
		}
		w.pod(pod, "")
	}
	said, _ := w.says("slice")
	g.Expect(said).To(And(HaveField("Cause", causeRunning), HaveField("Answer", "It runs on node t with one of 4 shares of GPU 0 (Tesla-T4) by time-slicing: all take turns, and "+
		"nothing limits what one takes of the 15.0 GiB.")))
	said, printed := w.says("mps")
	g.Expect(said.Answer).To(Equal("It runs on node m with one of 8 shares of GPU 0 (NVIDIA-H100-80GB-HBM3) by MPS: each of its processes gets up to 12% of the threads, and 9.0 GiB of memory."))
	g.Expect(printed).To(ContainSubstring("This pod blocks that: it is evicted"))
	said, _ = w.says("alone")
	g.Expect(said.Answer).To(Equal("It runs on node w with GPU 0 (Tesla-T4) alone: 15.0 GiB."))
}

// TestWhyWorksWithTheRightsOfAUserOfANamespace, and says what it may not read.
func TestWhyWorksWithTheRightsOfAUserOfANamespace(t *testing.T) {
	g := NewWithT(t)
	w := startWhy(t)
	w.node("a", map[string]int64{sharedGPU: 8}, func(_ *corev1.Node, n *v1alpha1.GPUNode) {
		n.Status.Rollout.PolicyName = "cheap"
		n.Status.Rollout.Resources = []v1alpha1.ResourceCount{{Name: sharedGPU, Expected: 8, Advertised: 8}}
	}, sim.T4)
	w.pod(requesting("team", "train", plainGPU, 1), "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
	w.create(&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "view"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods", "events", "resourcequotas"}, Verbs: []string{"get", "list"}},
		{APIGroups: []string{"apps", "batch"}, Resources: []string{"*"}, Verbs: []string{"get", "list"}},
	}})
	for _, user := range []string{"tenant", "viewer"} {
		w.create(&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "view"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		})
	}
	bindRoles(t, w.Client, map[string][]string{"viewer": {"gpu-sharing-view"}})
	asked := func(user string) string {
		out, err := w.as(user, "train")
		if err != nil {
			return err.Error()
		}
		return out
	}
	g.Eventually(asked).WithArguments("tenant").WithTimeout(time.Minute).Should(And(
		HavePrefix("Pod team/train is Pending. No node has nvidia.com/gpu: 1 free: all are in use, or no node offers that. You may not read which."),
		ContainSubstring("You may not list GPUNodes"), ContainSubstring("You may not list Nodes"), ContainSubstring("gpu-sharing-view"),
	))
	g.Eventually(asked).WithArguments("viewer").WithTimeout(time.Minute).Should(And(
		HavePrefix("Pod team/train is Pending. No node offers nvidia.com/gpu: the shares are called nvidia.com/gpu.shared, on 1 node."),
		Not(ContainSubstring("You may not list GPUNodes")), ContainSubstring("You may not list Nodes"),
	))
}

// inquiryFor is what is known of a pod that asks for one of a resource, on nodes that offer the plain GPU.
func inquiryFor(name string, nodes ...candidate) inquiry {
	for i := range nodes {
		nodes[i].object = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodes[i].Name}}
	}
	return inquiry{now: now, namespace: "team", pod: requesting("team", "train", name, 1), nodes: nodes}
}

// reporting is a node that offers some resources and waits to offer others.
func reporting(t *testing.T, state node.State, reason string, offers, expected map[string]int64) candidate {
	t.Helper()
	n := newNode(t, "a", sim.A100)
	n.GPU.Status.Rollout.PolicyName, n.GPU.Status.Rollout.State = "research", string(state)
	n.GPU.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: reason, Message: "see there"}}
	for name, count := range expected {
		n.GPU.Status.Rollout.Resources = append(n.GPU.Status.Rollout.Resources, v1alpha1.ResourceCount{Name: name, Expected: count})
	}
	return candidate{Node: &n, offers: offers}
}

const instance = "nvidia.com/mig-3g.20gb"

// TestWhyPromisesNothingThatDoesNotComeByItself: a change that failed, or that is halted or paused, brings nothing, and after one a node may
// not offer any more what it offers now.
func TestWhyPromisesNothingThatDoesNotComeByItself(t *testing.T) {
	g := NewWithT(t)
	plain, instances := map[string]int64{plainGPU: 1}, map[string]int64{instance: 2}
	for state, reason := range map[node.State]string{
		node.Failed: v1alpha1.ReasonDrainTimedOut, node.PendingDisruptive: v1alpha1.ReasonRolloutHalted, node.PendingNonDisruptive: v1alpha1.ReasonPaused,
	} {
		said := whyOf(inquiryFor(instance, reporting(t, state, reason, plain, instances)))
		g.Expect(said).To(And(HaveField("Cause", causeNotYet), HaveField("Answer", And(
			ContainSubstring("does not go on by itself: a is changed by policy research (%s: see there). Ask an administrator.", reason), Not(ContainSubstring("starts by itself")),
		))))
	}
	said := whyOf(inquiryFor(instance, reporting(t, node.Draining, v1alpha1.ReasonGPUInUse, plain, instances)))
	g.Expect(said.Answer).To(HaveSuffix("The pod starts by itself then."))

	drained := inquiryFor(plainGPU, reporting(t, node.Draining, v1alpha1.ReasonGPUInUse, plain, instances))
	drained.nodes[0].object.Spec.Taints = []corev1.Taint{{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule}}
	said = whyOf(drained)
	g.Expect(said).To(And(HaveField("Cause", causeChange), HaveField("Answer", HaveSuffix("After that it does not: it will offer nvidia.com/mig-3g.20gb: 2 instead."))))
}

// TestWhySaysNothingOfNodesThatItCannotRead: what a node offers that no policy governs no GPUNode reports.
func TestWhySaysNothingOfNodesThatItCannotRead(t *testing.T) {
	g := NewWithT(t)
	free := newNode(t, "free", sim.T4)
	q := inquiryFor(plainGPU, reporting(t, node.UpToDate, v1alpha1.ReasonReady, map[string]int64{sharedGPU: 8}, nil), candidate{Node: &free})
	q.pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}}
	g.Expect(whyOf(q).Cause).To(Equal(causeRenamed), "who reads the nodes knows that")
	q.blindNodes, q.lacks = true, []string{"You may not list Nodes"}
	g.Expect(whyOf(q)).To(And(HaveField("Cause", causeUnknown), HaveField("Answer", HavePrefix("No node has nvidia.com/gpu: 1 free: all are in use, or no node offers that."))))
	q.nodes = q.nodes[:1]
	g.Expect(whyOf(q).Cause).To(Equal(causeRenamed), "a policy governs all nodes")
}

func TestWhySaysThatAJobHasFailed(t *testing.T) {
	q := inquiry{now: now, namespace: "team", workload: "Job team/train", wanted: 1, missing: true, pod: requesting("team", "", plainGPU, 1), failed: "Job has reached the specified backoff limit"}
	NewWithT(t).Expect(whyOf(q)).To(And(HaveField("Cause", causeEnded), HaveField("Answer", "The Job has failed, and makes no more pods: Job has reached the specified backoff limit")))
}

// TestWhyACordonedNodeTakesAPodThatTolerates: as the scheduler's NodeUnschedulable lets it.
func TestWhyACordonedNodeTakesAPodThatTolerates(t *testing.T) {
	g := NewWithT(t)
	seen := newNode(t, "a", sim.T4)
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	object.Spec.Unschedulable = true
	object.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}
	q := inquiry{now: now, namespace: "team", pod: requesting("team", "train", plainGPU, 1)}
	q.nodes = []candidate{{Node: &seen, object: object, offers: map[string]int64{plainGPU: 1}}}
	g.Expect(whyOf(q)).To(HaveField("Cause", causeUnschedulable))
	q.pod.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists}}
	g.Expect(whyOf(q)).To(HaveField("Cause", causeNone))
}

// TestWhyAStageOfAChangeEnds: a reboot may take longer than a change without one.
func TestWhyAStageOfAChangeEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		state  node.State
		reason string
		reboot bool
		says   string
	}{
		"the agent at work":             {node.Applying, v1alpha1.ReasonApplying, false, "is at work until 08:15:00 UTC at the latest"},
		"the agent, which may reboot":   {node.Applying, v1alpha1.ReasonApplying, true, "is at work, or rebooted, until 08:30:00 UTC at the latest"},
		"a node that is being rebooted": {node.Unknown, v1alpha1.ReasonRebooting, true, "is rebooted until 08:30:00 UTC at the latest"},
		"a node that is verified":       {node.Verifying, v1alpha1.ReasonVerifying, false, "is changed by policy p (Verifying"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, "a", sim.T4)
			n.GPU.Spec.ChangeTime, n.GPU.Spec.PolicyName, n.GPU.Status.Rollout.State = metav1.NewTime(now), "p", string(tc.state)
			if tc.reboot {
				n.GPU.Spec.Reboot = &v1alpha1.RebootPermission{}
			}
			n.GPU.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: tc.reason, Message: "waiting"}}
			q := inquiry{now: now, namespace: "team", pod: requesting("team", "train", plainGPU, 1)}
			message, _ := q.changeOn(&candidate{Node: &n, object: &corev1.Node{}})
			NewWithT(t).Expect(message).To(ContainSubstring(tc.says))
		})
	}
}
