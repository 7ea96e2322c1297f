// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// tenant is a namespace in which a user with the role edit creates what they like.
const tenant = "tenant"

const ourConfigMap = "gpu-sharing-device-plugin"

// programs are the namespaces in which this cluster plays the programs of NVIDIA and of NFD.
func (c *site) programs() *cluster.Programs {
	p := &cluster.Programs{
		ConfigMap:    types.NamespacedName{Namespace: "gpu-operator", Name: ourConfigMap},
		GPUOperators: []string{"gpu-operator"}, DRADrivers: []string{"nvidia-dra"}, Own: []string{"gpu-sharing-operator"},
		Discovery: []string{"nfd", tenant}, // where OLM installed NFD, a user may write NodeFeatures in their own namespace
	}
	if !c.Plugin.ClusterPolicy {
		p.ConfigMap.Namespace, p.GPUOperators = "nvidia", nil
	}
	return p
}

// tenantPod is a pod of a tenant that asks for no GPU and does not start.
func tenantPod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: name, UID: types.UID(name), Labels: map[string]string{}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}, NodeSelector: map[string]string{}},
		Status:     corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

// disguises are what makes a pod look like one of NVIDIA's or NFD's, by name: all of it the author of a pod chooses.
func disguises() map[string]func(*corev1.Pod) {
	labelled := func(label, value string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Labels[label] = value } }
	selects := func(label string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.NodeSelector[label] = "true" }
	}
	all := map[string]func(*corev1.Pod){
		"label of the validator's workload": labelled(cluster.LabelApp, "nvidia-cuda-validator"),
		"label of NFD":                      labelled("app.kubernetes.io/name", "node-feature-discovery"),
		"label of the operator's agent":     labelled("app.kubernetes.io/name", "gpu-sharing-agent"),
		"nodeSelector of the MPS DaemonSet": selects(mpsLabel),
		"nodeSelector of mig-manager":       selects(v1alpha1.LabelMIGManager),
		"nodeSelector of the driver":        selects("nvidia.com/gpu.deploy.driver"),
		"volume of our ConfigMap": func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{
				ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: ourConfigMap}},
			}}}
		},
	}
	for _, label := range cluster.DeployLabels() {
		all["nodeSelector "+label] = selects(label)
	}
	for name, label := range map[string]func(*corev1.Pod){
		"DRA driver's chart":         labelled(cluster.DRALabels()[0], "kubelet-plugin"),
		"DRA driver of a GPUCluster": labelled(cluster.LabelApp, "nvidia-dra-driver-kubelet-plugin"),
	} {
		all["labels and container of the "+name] = func(p *corev1.Pod) {
			label(p)
			p.Spec.Containers[0].Name = "gpus"
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "FEATURE_GATES", Value: "DynamicMIG=true"}}
		}
	}
	return all
}

// owners are the controllers that a pod of a tenant may name, by name: the tenant's own, or another's.
func owners() map[string]func(*corev1.Pod) {
	owned := func(version, kind, name string, uid types.UID) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{
				APIVersion: version, Kind: kind, Name: name, UID: uid, Controller: new(true),
			}}
		}
	}
	apps := appsv1.SchemeGroupVersion.String()
	return map[string]func(*corev1.Pod){
		"none":                      func(*corev1.Pod) {},
		"a DaemonSet of the tenant": owned(apps, "DaemonSet", "mine", "mine"),
		"NVIDIA's DaemonSet":        owned(apps, "DaemonSet", "nvidia-device-plugin-daemonset", "theirs"),
		"the ClusterPolicy":         owned("nvidia.com/v1", "ClusterPolicy", "cluster-policy", "theirs"),
	}
}

// keep lets a pod of a tenant come to a node and stay, whatever deletes it.
func (c *site) keep(h *host, pod *corev1.Pod) {
	p := cluster.PodOf(pod, c.programs())
	if !slices.ContainsFunc(h.Pods, func(o cluster.Pod) bool { return o.UID == p.UID }) {
		h.Pods = append(h.Pods, p)
	}
}

// runWith reconciles once a second while a pod stays on a node.
func (c *site) runWith(h *host, pod *corev1.Pod, reconciles int) (d rollout.Decision) {
	for range reconciles {
		c.keep(h, pod)
		d = c.reconcile()
		c.tick(time.Second)
	}
	return d
}

// TestAPodOfATenantStopsNoChange: neither a change nor what restores a node waits for it, and it is not deleted as
// one of NVIDIA's.
func TestAPodOfATenantStopsNoChange(t *testing.T) {
	names := slices.Sorted(maps.Keys(owners()))
	for i, disguise := range slices.Sorted(maps.Keys(disguises())) {
		owner := names[i%len(names)]
		t.Run(disguise+", controller: "+owner, func(t *testing.T) {
			g := NewWithT(t)
			c, h := toMIG()
			h.monitored()
			c.run(90)
			pod := tenantPod("x", disguises()[disguise], owners()[owner])
			c.Policies[0].Spec.Sharing, c.Policies[0].Generation = mig(count("3g", 2)), 2
			d := c.runWith(h, pod, 300)
			isUpToDate(g, one(d))

			c.Policies = nil
			d = c.runWith(h, pod, 300)
			g.Expect(d.Nodes).To(BeEmpty())
			g.Expect(h.GPU.Spec).To(BeZero(), "restored")
			g.Expect(h.devices()[0].State.MIG).To(BeFalse(), "restored")
			g.Expect(h.Labels).To(HaveKeyWithValue(pluginLabel, "true"))
			g.Expect(c.wronged).To(BeEmpty())
		})
	}
}

// TestAPodOfATenantStopsNoConfig: to select another config of the device plugin needs no stop of NVIDIA's programs.
func TestAPodOfATenantStopsNoConfig(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.T4)
	c.add("b", sim.T4)
	c.add("c", sim.T4)
	c.setPolicy("research", timeSlicing(4))
	d := c.runWith(h, tenantPod("x", disguises()["nodeSelector "+pluginLabel]), 600)
	g.Expect(d.Nodes).To(HaveLen(3))
	g.Expect(d.Nodes).To(HaveEach(HaveField("State", node.UpToDate)))
}

// TestADaemonSetOfATenantKeepsNoTaintOff: its pods have NFD's label and tolerate nothing.
func TestADaemonSetOfATenantKeepsNoTaintOff(t *testing.T) {
	g := NewWithT(t)
	c, h := tainted(native)
	c.runWith(h, tenantPod("x", disguises()["label of NFD"], owners()["a DaemonSet of the tenant"]), 60)
	g.Expect(h.Taints).To(ContainElement(native), c.condition("research").Message)
}

// TestProgramsAreKnownByNamespaceAndController tells NVIDIA's programs, and NFD's, from pods that look like them.
func TestProgramsAreKnownByNamespaceAndController(t *testing.T) {
	looks, by := disguises(), owners()
	const daemonSet, driver = "a DaemonSet of the tenant", "labels and container of the DRA driver"
	serves := func(p cluster.Pod) bool { return p.Serves }
	for name, test := range map[string]struct {
		namespace   string
		look, owner string
		is          func(cluster.Pod) bool
	}{
		"the device plugin": {
			"gpu-operator", "nodeSelector " + pluginLabel, daemonSet,
			func(p cluster.Pod) bool { return p.KeptBy(pluginLabel) && p.Serves },
		},
		"one that reads our ConfigMap": {
			"gpu-operator", "volume of our ConfigMap", daemonSet, func(p cluster.Pod) bool { return p.MountsConfig && p.Serves },
		},
		"the workload of the validator": {
			"gpu-operator", "label of the validator's workload", "the ClusterPolicy",
			func(p cluster.Pod) bool { return p.Validator && !p.Serves },
		},
		"NFD with the GPU Operator": {"gpu-operator", "label of NFD", daemonSet, serves},
		"NFD by itself":             {"nfd", "label of NFD", daemonSet, serves},
		"the operator's agent": {
			"gpu-sharing-operator", "label of the operator's agent", "none", func(p cluster.Pod) bool { return p.Own },
		},
		"the DRA driver by itself": {
			"nvidia-dra", driver + "'s chart", daemonSet, func(p cluster.Pod) bool { return p.DRA && p.Serves },
		},
		"the DRA driver of the GPU Operator": {
			"gpu-operator", driver + " of a GPUCluster", daemonSet, func(p cluster.Pod) bool { return p.DRA },
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			pod := tenantPod("x", looks[test.look], by[test.owner])
			g.Expect(test.is(cluster.PodOf(pod, newSite().programs()))).To(BeFalse(), "in the namespace of a tenant")
			may := test.is(cluster.PodOf(pod, &cluster.Programs{Unverified: true}))
			g.Expect(may).To(Equal(test.look != "volume of our ConfigMap"), "it may be one")
			pod.Namespace = test.namespace
			pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}})
			g.Expect(test.is(cluster.PodOf(pod, newSite().programs()))).To(BeTrue())
			if test.look != "volume of our ConfigMap" && test.owner != "none" {
				pod.OwnerReferences = nil
				g.Expect(test.is(cluster.PodOf(pod, newSite().programs()))).To(BeFalse(), "without a controller")
			}
			g.Expect(test.is(cluster.PodOf(pod, &cluster.Programs{Own: []string{"elsewhere"}}))).To(BeFalse(), "where its namespace is not known")
		})
	}
}

// TestAPodOfATenantIsNotNamedAsNVIDIAsThatDoesNotEnd: a tenant's pod with NVIDIA's deploy label as nodeSelector, which
// a finalizer of his keeps from ending.
func TestAPodOfATenantIsNotNamedAsNVIDIAsThatDoesNotEnd(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	c.run(90)
	c.Policies = nil
	pod := tenantPod("x", func(p *corev1.Pod) {
		p.Spec.NodeSelector[pluginLabel] = "true"
		p.DeletionTimestamp = &metav1.Time{Time: c.Now}
	})
	c.keep(h, pod)
	c.keeps(h, 1, func() {
		if h.Labels[pluginLabel] != "true" {
			h.lags = true
		}
	})
	g.Expect(h.waits()).To(HavePrefix("ApplyTimedOut:"), "the agent never answers")
	g.Expect(h.waits()).NotTo(ContainSubstring("tenant/x"))
}

// arriving lets a pod of a tenant come to a node with each step, in spite of the operator's taint, which asks for so many
// GPUs and has ended before the agent could report it. The pods of the steps before are gone.
func (c *site) arriving(h *host, gpus string) func() {
	serial := 0
	return func() {
		h.Pods = slices.DeleteFunc(h.Pods, func(p cluster.Pod) bool { return p.Namespace == tenant })
		serial++
		h.Pods = append(h.Pods, cluster.PodOf(tenantPod(fmt.Sprint("arrives-", serial), func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(gpus)}
			p.Status.Conditions = []corev1.PodCondition{{
				Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(c.Now),
			}}
		}), c.programs()))
	}
}

// TestPodsThatAskForNoGPUHoldUpNoChange: nobody reports what they hold, and each is another one.
func TestPodsThatAskForNoGPUHoldUpNoChange(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	k := c.keeps(h, 1, c.arriving(h, "0"))
	g.Expect(h.devices()[0].State.MIG).To(BeTrue(), h.waits())
	g.Expect(k.longest).To(BeNumerically("<", 5*time.Minute))
}

// TestPodsThatComeWithoutEndKeepNoNodeFromItsUsers: each asks for a GPU, and none is there when the agent looks.
func TestPodsThatComeWithoutEndKeepNoNodeFromItsUsers(t *testing.T) {
	g := NewWithT(t)
	c, h := toMIG()
	k := c.keeps(h, 12, c.arriving(h, "1"))
	g.Expect(k.longest).To(BeNumerically("<=", 17*time.Minute), "the time for draining, and that for the stop of NVIDIA's programs")
	g.Expect(k.soonest).To(BeNumerically(">=", time.Hour))
}
