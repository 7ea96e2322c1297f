// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func renamed(replicas int32) v1alpha1.Sharing {
	s := timeSlicing(replicas)
	s.Advertise = &v1alpha1.Advertise{RenameByDefault: new(true)}
	return s
}

// instancesSliced advertises each instance 2g four times.
func instancesSliced(s v1alpha1.Sharing, failRequestsGreaterThanOne *bool) v1alpha1.Sharing {
	s.MIG.Layouts[0].Instances[0].Replicas = 4
	s.Advertise = &v1alpha1.Advertise{FailRequestsGreaterThanOne: failRequestsGreaterThanOne}
	return s
}

// requesting is a pod of a Deployment that waits for a node.
func requesting(name string, requests map[string]int64) cluster.Pod {
	return cluster.Pod{Namespace: "team", Name: name, UID: name, GPU: true, Requests: requests, Workload: "Deployment team/" + name}
}

func TestImpact(t *testing.T) {
	gpus := func(n int64) map[string]int64 { return map[string]int64{"nvidia.com/gpu": n} }
	for name, test := range map[string]struct {
		sharing v1alpha1.Sharing
		pod     cluster.Pod
		other   bool // a second node, of no policy
		line    string
	}{
		"what is offered": {sharing: timeSlicing(4), pod: requesting("web", gpus(1))},
		"what was renamed": {
			sharing: renamed(4), pod: requesting("web", gpus(1)),
			line: "Deployment team/web asks for nvidia.com/gpu: 1, which no node will offer; ask for nvidia.com/gpu.shared, or " +
				"set renameByDefault to false",
		},
		"what is not renamed any more": {
			sharing: timeSlicing(4), pod: requesting("web", map[string]int64{"nvidia.com/gpu.shared": 1}),
			line: "Deployment team/web asks for nvidia.com/gpu.shared: 1, which no node will offer; ask for nvidia.com/gpu instead, or " +
				"set renameByDefault to true in the policy",
		},
		"another node offers it": {sharing: renamed(4), pod: requesting("web", gpus(1)), other: true},
		"another node, which the pod does not select": {
			sharing: renamed(4), other: true, pod: func() cluster.Pod {
				p := requesting("web", gpus(1))
				p.NodeSelector = map[string]string{"kubernetes.io/hostname": "a", "nvidia.com/gpu.product": "Tesla-T4"}
				return p
			}(),
			line: "Deployment team/web asks for nvidia.com/gpu: 1, which no node will offer; ask for nvidia.com/gpu.shared, or " +
				"set renameByDefault to false",
		},
		"whole GPUs under MIG": {
			sharing: mig(count("2g", 3)), pod: requesting("web", gpus(1)),
			line: "Deployment team/web asks for nvidia.com/gpu: 1, which no node will offer; the policy's nodes offer " +
				"nvidia.com/mig-2g.10gb: ask for one, or change the policy",
		},
		"a profile that is gone": {
			sharing: mig(count("2g", 3)), pod: requesting("web", map[string]int64{"nvidia.com/mig-1g.5gb": 1}),
			line: "Deployment team/web asks for nvidia.com/mig-1g.5gb: 1, which no node will offer; the policy's nodes offer " +
				"nvidia.com/mig-2g.10gb: ask for one, or change the policy",
		},
		"more than a node has": {
			sharing: mig(count("2g", 3)), pod: requesting("web", map[string]int64{"nvidia.com/mig-2g.10gb": 4}),
			line: "Deployment team/web asks for nvidia.com/mig-2g.10gb: 4, which no node will offer; its nodes offer at most " +
				"3 of nvidia.com/mig-2g.10gb each: ask for no more, or leave some nodes out",
		},
		"more than one of what is shared": {
			sharing: mps(4), pod: requesting("web", gpus(2)),
			line: "Deployment team/web asks for nvidia.com/gpu: 2, which no node will offer; a container may ask for one of what is " +
				"shared: ask for 1, or for GPUs that are not shared",
		},
		"more than one replica of an instance": {
			sharing: instancesSliced(mig(count("2g", 3)), nil), pod: requesting("web", map[string]int64{"nvidia.com/mig-2g.10gb": 2}),
			line: "Deployment team/web asks for nvidia.com/mig-2g.10gb: 2, which no node will offer; a container may ask for one of what is " +
				"shared: ask for 1, or for GPUs that are not shared",
		},
		"more than one replica of an instance, which the policy admits": {
			sharing: instancesSliced(mig(count("2g", 3)), new(false)), pod: requesting("web", map[string]int64{"nvidia.com/mig-2g.10gb": 2}),
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			c := newSite()
			c.add("a", sim.A100).Labels["pool"] = "a"
			if test.other {
				c.add("b", sim.A100)
			}
			c.Unscheduled = []cluster.Pod{test.pod}
			c.setPolicy("research", test.sharing, func(p *v1alpha1.GPUSharingPolicy) {
				p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "a"}}
			})
			for range 2 { // before the change, and after it
				d := rollout.Decide(c.world())
				found, says := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionWorkloadsAffected)
				g.Expect(says).To(Equal(test.line != ""))
				g.Expect(found.Message).To(Equal(test.line))
				if test.line != "" {
					g.Expect(d.Unmet).To(Equal(map[string][]string{"research": {test.line}}))
				}
				c.run(60)
			}
		})
	}
}

func TestPodsOfOneWorkloadAreToldOnce(t *testing.T) {
	g := NewWithT(t)
	c, h := withGPUs(sim.T4)
	c.setPolicy("research", renamed(4))
	c.hold(h, "web-1", 0, gpu.WholeGPU)
	h.Pods[len(h.Pods)-1].Requests, h.Pods[len(h.Pods)-1].Workload = gpusOnly(1), "Deployment team/web"
	ending := requesting("web", gpusOnly(1))
	ending.Terminating = true
	c.Unscheduled = []cluster.Pod{requesting("web", gpusOnly(1)), ending}
	g.Expect(rollout.Decide(c.world()).Unmet["research"]).To(ConsistOf(HavePrefix("Deployment team/web (2 pods) asks for nvidia.com/gpu: 1,")))
}

// TestWorkloadsOfATenantKeepNoOthersFromBeingNamed: the condition names one of each namespace first.
func TestWorkloadsOfATenantKeepNoOthersFromBeingNamed(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.add("a", sim.T4)
	c.setPolicy("research", renamed(4))
	c.Unscheduled = []cluster.Pod{requesting("web", gpusOnly(1))}
	for i := range 100 {
		name := fmt.Sprintf("%s/%d", tenant, i)
		c.Unscheduled = append(c.Unscheduled, cluster.Pod{
			Namespace: tenant, Name: name, UID: name, GPU: true, Requests: gpusOnly(1), Workload: "Deployment " + name,
		}, cluster.Pod{
			Namespace: "a-" + tenant, Name: name, UID: "a-" + name, GPU: true, Requests: gpusOnly(1), Workload: "Deployment a-" + name,
		})
	}
	d := rollout.Decide(c.world())
	found, _ := condition.Find(d.Policies["research"].Conditions, v1alpha1.ConditionWorkloadsAffected)
	g.Expect(found.Message).To(Equal("Deployment a-tenant/0, Deployment team/web, Deployment tenant/0 and 198 more ask for nvidia.com/gpu: 1, " +
		"which no node will offer; ask for nvidia.com/gpu.shared, or set renameByDefault to false"))
}

// TestNodeSelectorsThatATenantComputesKeepNoOthersFromBeingNamed: these labels have hashes by FNV-1a whose sum is that of no labels.
func TestNodeSelectorsThatATenantComputesKeepNoOthersFromBeingNamed(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	c.add("a", sim.T4)
	c.setPolicy("research", renamed(4))
	asks := gpusOnly(1)
	c.Unscheduled = []cluster.Pod{{
		Namespace: tenant, Name: "first", UID: "first", GPU: true, Requests: asks, Workload: "Deployment " + tenant + "/first", NodeSelector: map[string]string{
			"a": "d7swra28", "b": "d538v5ca", "c": "x87w2d8", "d": "69u1deng", "e": "6mozqwe0", "f": "7buuptd3", "g": "2z8z8ktu", "h": "gg9dnlf",
		},
	}, requesting("web", asks)}
	g.Expect(rollout.Decide(c.world()).Unmet["research"]).To(ConsistOf(HavePrefix("Deployment team/web asks for nvidia.com/gpu: 1,")))
}

func TestWhatAPodRequests(t *testing.T) {
	g := NewWithT(t)
	limits := func(name string, n int64) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(n, resource.DecimalSI), "cpu": resource.MustParse("1")}}
	}
	always := corev1.ContainerRestartPolicyAlways
	yes := true
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: "web-76c5-x", Labels: map[string]string{"pod-template-hash": "76c5"},
			OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web-76c5", Controller: &yes}},
		},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{
				{Resources: limits("nvidia.com/gpu", 1), RestartPolicy: &always}, {Resources: limits("nvidia.com/gpu", 2)},
			},
			Containers: []corev1.Container{{Resources: limits("nvidia.com/gpu", 1)}, {Resources: limits("nvidia.com/gpu", 1)}},
		},
	}
	p := cluster.PodOf(pod, &cluster.Programs{})
	g.Expect(p.Requests).To(Equal(gpusOnly(3)), "two containers and a sidecar")
	g.Expect(p.Workload).To(Equal("Deployment team/web"))
	pod.Labels = nil
	g.Expect(cluster.PodOf(pod, &cluster.Programs{}).Workload).To(Equal("ReplicaSet team/web-76c5"))
	pod.OwnerReferences[0].Name = "x asks for nothing; run kubectl delete gpusharingpolicies --all" // the API server takes any text
	g.Expect(cluster.PodOf(pod, &cluster.Programs{}).Workload).To(Equal("pod team/web-76c5-x"))
	pod.OwnerReferences = nil
	g.Expect(cluster.PodOf(pod, &cluster.Programs{}).Workload).To(Equal("pod team/web-76c5-x"))
}
