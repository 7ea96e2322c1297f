// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// partitioned is a cluster of one node that a policy has partitioned, with NVIDIA's mig-manager kept off it.
func partitioned() (*site, *host) {
	c, h := toMIG()
	h.Labels[v1alpha1.LabelMIGManager] = "true"
	h.Labels["nvidia.com/mig.config"] = "all-disabled"
	c.run(60)
	return c, h
}

func TestAMIGManagerThatAUserLetsBackIsOverruledOnceInAnHour(t *testing.T) {
	g := NewWithT(t)
	c, h := partitioned()
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"))
	lets := func() rollout.NodeState {
		h.Labels[v1alpha1.LabelMIGManager] = "true"
		c.steps(3)
		return rollout.Decide(c.world()).Nodes[0]
	}
	g.Expect(lets().Reason).To(Equal(v1alpha1.ReasonReady))
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"), "everybody is overruled once")

	n := lets()
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("true"), "it is not fought over")
	g.Expect(n.Reason).To(Equal(v1alpha1.ReasonMIGManagerReenabled))
	g.Expect(n.State).To(Equal(node.UpToDate), "what is advertised matches the desired state")
	g.Expect(n.Message).To(ContainSubstring("it is set back to false at 09:"))
	d := rollout.Decide(c.world())
	g.Expect(d.After).To(BeNumerically("~", time.Hour, time.Minute))
	g.Expect(d.Policies["research"].Pending[0].Reason).To(Equal(v1alpha1.ReasonMIGManagerReenabled))

	c.tick(d.After)
	c.steps(2)
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("false"), "after an hour again")

	c.Policies = nil
	c.run(60)
	g.Expect(h.Annotations).To(BeEmpty())
	g.Expect(h.Labels[v1alpha1.LabelMIGManager]).To(Equal("true"))
}

func TestALayoutForAMIGManagerThatIsNotThereIsTold(t *testing.T) {
	g := NewWithT(t)
	c, h := partitioned()
	h.Labels["nvidia.com/mig.config"] = "all-1g.5gb"
	d := rollout.Decide(c.world())
	g.Expect(changes(d.Actions)).To(BeEmpty())
	hasReason(g, d, v1alpha1.ReasonMIGConfigIgnored)
	hasMessage(g, d, `a user or another controller set nvidia.com/mig.config=all-1g.5gb (it was "all-disabled" before the operator)`)
	h.Labels["nvidia.com/mig.config"] = "all-disabled"
	g.Expect(rollout.Decide(c.world()).Nodes[0].Reason).To(Equal(v1alpha1.ReasonReady))
}

func TestNodesOfOthersAreLeftAlone(t *testing.T) {
	for name, test := range map[string]struct {
		taken  func(*host)
		reason string
		says   string
	}{
		"the Dynamic Accelerator Slicer": {
			func(h *host) { h.OtherPartitioner = "mig.das.com/1g.5gb" }, v1alpha1.ReasonSlicerActive, "the node lists the resource mig.das.com/1g.5gb",
		},
		"NVIDIA's DRA driver": {
			func(h *host) { h.Pods = append(h.Pods, cluster.Pod{Namespace: "dra", Name: "plugin", DRA: true}) },
			v1alpha1.ReasonDRADriverActive, "pod dra/plugin of NVIDIA's DRA driver",
		},
		"NVIDIA's DRA driver, whose pod ends": {
			func(h *host) {
				h.Pods = append(h.Pods, cluster.Pod{Namespace: "dra", Name: "plugin", DRA: true, Terminating: true})
			},
			v1alpha1.ReasonDRADriverActive, "pod dra/plugin of NVIDIA's DRA driver",
		},
		"the DaemonSet of NVIDIA's DRA driver": {
			func(h *host) { h.DRA = "DaemonSet dra/plugin" }, v1alpha1.ReasonDRADriverActive, "DaemonSet dra/plugin of NVIDIA's DRA driver",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			test.taken(h)
			d := c.reconcile()
			hasState(g, d, node.Unsupported)
			g.Expect(one(d).Reason).To(Equal(test.reason))
			hasMessage(g, d, test.says)
			c.run(10)
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
			g.Expect(h.Annotations).To(Equal(map[string]string{v1alpha1.AnnotationOtherController: test.reason}))
			c.Policies = nil
			c.run(10)
			g.Expect(h.Annotations).To(BeEmpty())
		})
	}
}

// TestAResourceThatAnotherPartitionerLeftBehindCountsForMinutes: the operator comes to a node from which the slicer was
// uninstalled, and whose kubelet still lists its resource. The plugin may also restart just then.
func TestAResourceThatAnotherPartitionerLeftBehindCountsForMinutes(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	h.OtherPartitionerLeft = "mig.das.com/1g.5gb"
	d := c.during(4*time.Minute, 10*time.Second)
	hasReason(g, d, v1alpha1.ReasonSlicerActive)
	hasMessage(g, d, "The operator takes the node over at")
	g.Expect(h.Taints).To(BeEmpty())
	isUpToDate(g, c.during(4*time.Minute, 10*time.Second).Nodes[0])
	h.OtherPartitioner = "mig.das.com/1g.5gb"
	g.Expect(c.reconcile().Nodes[0].State).To(Equal(node.Unsupported), "it is back")
}

// TestASignCountsThoughItsRecordFails: the write that records the other controller fails, and then its plugin restarts.
func TestASignCountsThoughItsRecordFails(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	c.OtherControllers = &cluster.OtherControllers{}
	h.OtherPartitioner = "mig.das.com/1g.5gb"
	g.Expect(said(rollout.Decide(c.world()).Actions)).To(ContainElement(ContainSubstring("recording that another controller")))
	h.OtherPartitioner = ""
	c.tick(time.Second)
	g.Expect(rollout.Decide(c.world()).Nodes[0].State).To(Equal(node.Unsupported), "neither of these writes succeeds")
	d := c.during(4*time.Minute, 10*time.Second)
	hasState(g, d, node.Unsupported)
	g.Expect(h.Annotations[v1alpha1.AnnotationOtherController]).To(HavePrefix(v1alpha1.ReasonSlicerActive + "@"))
	d = c.during(3*time.Minute, 10*time.Second)
	g.Expect(one(d).State).To(Equal(node.UpToDate), "five minutes after it was last seen")
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationOtherController))
}

// TestASignCountsThoughAnEarlierOneIsRecorded: its plugin comes back for a moment, and the write that records that
// fails.
func TestASignCountsThoughAnEarlierOneIsRecorded(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	c.OtherControllers = &cluster.OtherControllers{}
	h.OtherPartitioner = "mig.das.com/1g.5gb"
	c.run(10)
	h.OtherPartitioner = ""
	c.during(4*time.Minute, 10*time.Second)
	h.OtherPartitioner = "mig.das.com/1g.5gb"
	rollout.Decide(c.world())
	h.OtherPartitioner = ""
	d := c.during(4*time.Minute, 10*time.Second)
	hasState(g, d, node.Unsupported)
	isUpToDate(g, c.during(3*time.Minute, 10*time.Second).Nodes[0])
}

// TestASignCountsForAPolicyThatComesJustAfterIt: the record of the other controller went with the policy that was there
// before.
func TestASignCountsForAPolicyThatComesJustAfterIt(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG(evicting)
	c.OtherControllers = &cluster.OtherControllers{}
	h.OtherPartitioner = "mig.das.com/1g.5gb"
	c.run(10)
	policies := c.Policies
	c.Policies, h.OtherPartitioner = nil, ""
	c.run(10)
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationOtherController))
	c.Policies = policies
	d := c.during(4*time.Minute, 10*time.Second)
	hasState(g, d, node.Unsupported)
}

// TestAStampThatCannotBeReadIsReplaced: each reconcile added another one to it.
func TestAStampThatCannotBeReadIsReplaced(t *testing.T) {
	c, h := toMIG()
	c.run(100)
	h.Annotations[v1alpha1.AnnotationOtherController] = v1alpha1.ReasonSlicerActive + "@2026-11-30T00:00:00Z"
	c.version[h.Name]++
	c.during(time.Hour, 10*time.Second)
	NewWithT(t).Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationOtherController))
}

// TestANodeIsTakenOverOnlyMinutesAfterTheOtherControllerLeft: its plugin restarts, and for a moment nothing shows it.
func TestANodeIsTakenOverOnlyMinutesAfterTheOtherControllerLeft(t *testing.T) {
	for name, test := range map[string]struct{ comes, goes func(*host) }{
		"the Dynamic Accelerator Slicer": {
			func(h *host) { h.OtherPartitioner = "mig.das.com/1g.5gb" }, func(h *host) { h.OtherPartitioner = "" },
		},
		"the Dynamic Accelerator Slicer, whose resource the kubelet lists for ever": {
			func(h *host) { h.OtherPartitioner, h.OtherPartitionerLeft = "mig.das.com/1g.5gb", "" }, func(h *host) { h.OtherPartitioner, h.OtherPartitionerLeft = "", "mig.das.com/1g.5gb" },
		},
		"NVIDIA's DRA driver": {
			func(h *host) {
				h.Pods = append(h.Pods, cluster.Pod{Namespace: "dra", Name: "plugin", UID: "dra", DRA: true})
			},
			func(h *host) { h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.DRA }) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG(evicting)
			test.comes(h)
			c.during(time.Hour, time.Minute)
			clear(c.writes)
			for range 5 { // restarts
				test.goes(h)
				d := c.during(4*time.Minute, 10*time.Second)
				hasState(g, d, node.Unsupported)
				hasMessage(g, d, "The operator takes the node over at")
				test.comes(h)
				c.during(time.Minute, 10*time.Second)
			}
			g.Expect(h.Taints).To(BeEmpty())
			g.Expect(h.GPU.Spec.Devices).To(BeEmpty())
			g.Expect(c.writes).To(Equal(map[string]int{"action.PatchNode": 10, "action.Report": 10}), "two of each for each restart")
			test.goes(h)
			d := c.during(10*time.Minute, 10*time.Second)
			isUpToDate(g, one(d))
			clear(c.writes)
			c.during(time.Hour, time.Minute)
			g.Expect(c.writes).To(BeEmpty(), "it stays so")
			h.OtherPartitionerLeft = ""
			c.run(10)
			g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationOtherController))
		})
	}
}

// TestALabelThatAnotherControllerSetsAgainIsLeft for an hour, and the policy names who does it and where to end that.
func TestALabelThatAnotherControllerSetsAgainIsLeft(t *testing.T) {
	g := NewWithT(t)
	c, h := slicing()
	c.Configs = map[string]string{"theirs": "version: v1\n"}
	c.Plugin.Configs = c.Configs
	c.run(200)
	clear(c.writes)
	h.ConfigWriter = "nodelink-controller"
	var d rollout.Decision
	for range 600 {
		h.Labels[v1alpha1.LabelConfig] = "theirs"
		c.tick(time.Second)
		d = c.reconcile()
		c.tick(time.Second)
	}
	g.Expect(c.writes["action.PatchNode"]).To(BeNumerically("<=", 2))
	hasState(g, d, node.Degraded)
	hasReason(g, d, v1alpha1.ReasonConfigLabelReset)
	g.Expect(one(d).Message).To(And(
		ContainSubstring(`Field manager "nodelink-controller" sets nvidia.com/device-plugin.config=theirs on the node again`),
		ContainSubstring("remove the label from the MachineSet")))
	h.Annotations[cluster.AnnotationMachine] = "openshift-machine-api/gpu-1"
	g.Expect(c.reconcile().Nodes[0].Message).To(ContainSubstring("remove the label from the MachineSet of Machine openshift-machine-api/gpu-1"))

	h.Taints = append(h.Taints, corev1.Taint{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule, TimeAdded: new(metav1.NewTime(c.Now))})
	d = c.during(time.Minute, time.Second)
	g.Expect(h.isKept()).To(BeFalse(), "what drained it has ended, and a label keeps it from nobody")

	h.ConfigWriter = ""
	c.tick(d.After)
	d, _ = c.run(60)
	g.Expect(one(d).State).To(Equal(node.UpToDate), "set again after an hour, and nobody objects any more")
	c.Policies = nil
	c.run(200)
	delete(h.Annotations, cluster.AnnotationMachine)
	g.Expect(h.Annotations).To(BeEmpty())
}

// TestALabelThatIsSetAgainBeforeTheNodeIsVerifiedFailsTheChange: nobody waits for it, and the node returns to what it
// was.
func TestALabelThatIsSetAgainBeforeTheNodeIsVerifiedFailsTheChange(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.Configs = map[string]string{"theirs": "version: v1\n"}
	c.Plugin.Configs = c.Configs
	h.Labels[v1alpha1.LabelConfig] = "theirs"
	c.tick(time.Second)
	var d rollout.Decision
	for range 1200 {
		d = c.reconcile()
		h.Labels[v1alpha1.LabelConfig] = "theirs"
		c.tick(time.Second)
	}
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonConfigLabelReset)
	g.Expect(h.Taints).To(BeEmpty())
	g.Expect(h.devices()[0].State.MIG).To(BeFalse())
}

func TestTheWriterOfTheConfigLabelIsKnownByTheManagedFields(t *testing.T) {
	g := NewWithT(t)
	fields := func(label string) *metav1.FieldsV1 {
		f := &metav1.FieldsV1{}
		f.SetRawString(`{"f:metadata":{"f:labels":{"f:` + label + `":{}}}}`)
		return f
	}
	at := func(seconds int64) *metav1.Time { return new(metav1.Unix(seconds, 0)) }
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{ManagedFields: []metav1.ManagedFieldsEntry{
		{Manager: "kubelet", Time: at(9), FieldsV1: fields("kubernetes.io/hostname")},
		{Manager: "kubectl-label", Time: at(1), FieldsV1: fields(v1alpha1.LabelConfig)},
		{Manager: "nodelink-controller", Time: at(2), FieldsV1: fields(v1alpha1.LabelConfig)},
		{Manager: "gpusharing-controller", Time: at(3), FieldsV1: fields(v1alpha1.LabelConfig)},
	}}}
	g.Expect(cluster.NodeOf(node, &v1alpha1.GPUNode{}).ConfigWriter).To(Equal("nodelink-controller"))
	node.ManagedFields = append(cluster.WorkMarkAuthors(node), cluster.ConfigWriters(node)...)
	g.Expect(cluster.NodeOf(node, &v1alpha1.GPUNode{}).ConfigWriter).To(Equal("nodelink-controller"), "as the cache keeps it")
}

func TestInstancesThatOthersKeepChangingAreLeft(t *testing.T) {
	g := NewWithT(t)
	c, h := partitioned()
	evicting(&c.Policies[0])
	c.run(10) // the node records how it is released, as the policy says now
	uuid := h.devices()[0].UUID
	id := h.devices()[0].State.Instances[0].ID
	g.Expect(h.hardware.DestroyInstance(t.Context(), uuid, id)).To(Succeed())
	g.Expect(h.hardware.CreateInstance(t.Context(), uuid, "1g.5gb", gpu.Placement{Start: 0, Size: 1})).To(Succeed())
	c.hold(h, "theirs", 0, h.devices()[0].State.Instances[0].ID)
	h.GPU.Status.Conditions = []metav1.Condition{
		{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, ObservedGeneration: h.GPU.Generation, Reason: v1alpha1.ReasonChangedByOthers},
		{
			Type: v1alpha1.ConditionApplyStalled, Status: metav1.ConditionTrue, ObservedGeneration: h.GPU.Generation,
			Reason: v1alpha1.ReasonChangedByOthers, Message: "another program keeps changing MIG on GPU 0",
		},
	}
	d := rollout.Decide(c.world())
	g.Expect(changes(d.Actions)).To(BeEmpty(), "nobody is kept off or evicted for that")
	isFailed(g, d)
	hasReason(g, d, v1alpha1.ReasonChangedByOthers)
	hasMessage(g, d, "another program keeps changing MIG on GPU 0")
}

func TestOthersAreKnownByWhatTheyPutOnANode(t *testing.T) {
	g := NewWithT(t)
	node := &corev1.Node{Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
		"mig.das.com/2g.10gb": resource.MustParse("3"), "mig.das.com/1g.5gb": resource.MustParse("7"),
		"instaslice.redhat.com/mig-1g.5gb": resource.MustParse("0"), "nvidia.com/gpu": resource.MustParse("1"),
	}}}
	n := cluster.NodeOf(node, &v1alpha1.GPUNode{})
	g.Expect(n.OtherPartitioner).To(Equal("mig.das.com/1g.5gb"))
	g.Expect(n.OtherPartitionerLeft).To(Equal("instaslice.redhat.com/mig-1g.5gb"), "it offers nothing")
	node.Status.Capacity = corev1.ResourceList{"instaslice.redhat.com/mig-1g.5gb": resource.MustParse("2")}
	g.Expect(cluster.NodeOf(node, &v1alpha1.GPUNode{}).OtherPartitioner).To(Equal("instaslice.redhat.com/mig-1g.5gb"), "its devices are unhealthy, and there")
	g.Expect(n.Allocatable).To(Equal(gpusOnly(1)))

	pod := func(label string, containers ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{label: "kubelet-plugin"}}}
		for _, name := range containers {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: name})
		}
		return p
	}
	g.Expect(cluster.OffersGPUs(pod("nvidia-dra-driver-gpu-component", "compute-domains", "gpus"))).To(BeTrue())
	g.Expect(cluster.OffersGPUs(pod("dra-driver-nvidia-gpu-component", "gpus"))).To(BeTrue())
	g.Expect(cluster.OffersGPUs(pod("nvidia-dra-driver-gpu-component", "compute-domains"))).To(BeFalse(), "compute domains only")
	g.Expect(cluster.OffersGPUs(pod("app", "gpus"))).To(BeFalse())
	managed := pod("app", "compute-domains", "gpus")
	managed.Labels["app"] = "nvidia-dra-driver-kubelet-plugin"
	g.Expect(cluster.OffersGPUs(managed)).To(BeTrue(), "the GPU Operator runs it for a GPUCluster")
}
