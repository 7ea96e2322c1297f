// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
)

// tenantEvent lets a pod of a tenant come to a node that uses no GPU, and looks like one of NVIDIA's or NFD's. It
// stays, whatever ends others.
func (c *run) tenantEvent(random *rand.Rand) {
	h := c.some(random)
	c.serial++
	name := fmt.Sprint("tenant-", c.serial)
	looks := slices.Sorted(maps.Keys(disguises()))
	look, owner := looks[random.IntN(len(looks))], slices.Sorted(maps.Keys(owners()))[random.IntN(len(owners()))]
	plain := tenantPod(name, owners()[owner])
	if strings.Contains(owner, "DaemonSet") && random.IntN(4) == 0 { // a finalizer keeps it, and no drain waits for it
		plain.DeletionTimestamp = &metav1.Time{Time: c.Now.Add(-time.Hour)}
	}
	if random.IntN(2) == 0 {
		plain.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}},
		}}
	}
	pod := plain.DeepCopy()
	disguises()[look](pod)
	h.Pods = append(h.Pods, cluster.PodOf(pod, c.programs()))
	c.tenants[string(pod.UID)] = plain
	c.kinds[name] = "cpu-tenant"
	c.tell("pod %s of a tenant comes to %s: %s, controller: %s", name, h.Name, look, owner)
}

// guiseEvent lets pods of users come that have a GPU and select their node by a label of NVIDIA's, while a policy is
// edited.
func (c *run) guiseEvent(random *rand.Rand) {
	labels := append(cluster.DeployLabels(), mpsLabel, v1alpha1.LabelMIGManager)
	for range 1 + random.IntN(3) {
		h, known := c.some(random), c.serial
		c.start(h, []string{"replica", "bare", "hanging"}[random.IntN(3)], random)
		if c.serial == known || len(h.Pods) == 0 {
			continue
		}
		p := &h.Pods[len(h.Pods)-1]
		p.NodeSelector = map[string]string{labels[random.IntN(len(labels))]: "true"}
		c.guises[p.UID] = true
		c.tell("pod %s selects its node by %v", p.Name, p.NodeSelector)
	}
	c.editEvent(random)
	for range 12 {
		c.step(true)
		c.lapse(time.Second)
		c.impartial()
	}
}

// impartial looks whether the pods of tenants are treated as they would be if they looked like any other pod.
func (c *run) impartial() {
	if len(c.wronged) > 0 {
		c.breaks("harmless", "%s are deleted as pods of NVIDIA's", strings.Join(c.wronged, ", "))
	}
	if len(c.tenants)+len(c.guises) == 0 || c.broken != "" {
		return
	}
	decide := func(look func(cluster.Pod) cluster.Pod) (says []string) {
		s := c.known()
		seen := *c.OtherControllers
		s.OtherControllers = &seen
		for i := range s.Nodes {
			s.Nodes[i].Pods = slices.Clone(s.Nodes[i].Pods)
			for p := range s.Nodes[i].Pods {
				s.Nodes[i].Pods[p] = look(s.Nodes[i].Pods[p])
			}
		}
		d := rollout.Decide(s)
		says = said(d.Actions)
		for _, n := range d.Nodes {
			says = append(says, fmt.Sprintf("%s is %s (%s): %s", n.Node, n.State, n.Reason, n.Message))
		}
		for _, policy := range slices.Sorted(maps.Keys(d.Policies)) {
			for _, o := range d.Policies[policy].Conditions {
				says = append(says, fmt.Sprintf("%s of %s is %s (%s): %s", o.Type, policy, o.Status, o.Reason, o.Message))
			}
		}
		return append(says, "look again after "+d.After.String())
	}
	is := decide(func(p cluster.Pod) cluster.Pod { return p })
	would := decide(func(p cluster.Pod) cluster.Pod {
		if plain, ofTenant := c.tenants[p.UID]; ofTenant {
			return cluster.PodOf(plain, c.programs())
		}
		if c.guises[p.UID] {
			p.NodeSelector = nil
		}
		return p
	})
	for i := range is {
		if i >= len(would) || is[i] != would[i] {
			c.breaks("harmless", "by the looks of a tenant's pod: %s", is[i])
			return
		}
	}
}
