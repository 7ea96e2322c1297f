// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/deviceplugin"
)

// offer is what a node offers to pods once it is as its policy asks.
type offer struct {
	policy    string // that governs the node; empty if none does
	labels    map[string]string
	resources map[string]int64
	// single are the resources of which NVIDIA's device plugin gives a container no more than one.
	single map[string]bool
}

// impact finds the workloads of which no node meets the request once every policy is in force, for each policy one line
// for each workload. Pods that run are not disturbed, but would not start again; those that wait never start. A pod on a
// node concerns the policy of that node; one that waits concerns each policy whose nodes its node selector admits.
type impact struct {
	offers  []*offer
	labels  labelIndex
	met     map[demand]bool
	waiting map[uint64][]string            // by node selector: the policies some of whose nodes it admits
	found   map[string]map[unmetKey]*unmet // by policy
}

// unmetKey tells workloads with different requests from one another.
type unmetKey struct {
	workload string
	asks     uint64
}

// unmet is a workload of which no node meets the request.
type unmet struct {
	pod  *Pod
	pods int
}

func impactOf(w *World, groups map[string]*group, all []*member, waiting []waiting) map[string][]string {
	i := impact{
		offers: make([]*offer, len(all)), met: map[demand]bool{}, waiting: map[uint64][]string{}, found: map[string]map[unmetKey]*unmet{},
	}
	for at, m := range all {
		i.offers[at] = &m.brief.offer
	}
	for name, g := range groups {
		if g.by == nil {
			continue // nodes of no policy go back to what they were
		}
		for _, m := range g.members {
			for _, d := range m.tally.demands {
				i.weigh(name, &m.node.Pods[d.pod], d.demand)
			}
		}
	}
	for _, same := range waiting {
		first := &w.Unscheduled[same.pods[0]]
		policies := i.policiesFor(first, same.demand)
		if len(policies) == 0 || i.isMet(first, same.demand) {
			continue // as is every pod with the same demand
		}
		for _, p := range same.pods {
			for _, name := range policies {
				i.weigh(name, &w.Unscheduled[p], same.demand)
			}
		}
	}
	var lines map[string][]string
	for name, workloads := range i.found {
		if lines == nil {
			lines = map[string][]string{}
		}
		lines[name] = i.says(groups[name], workloads)
	}
	return lines
}

// offers is what the node offers in the end: what it does now, where nothing changes or nothing can.
func (m *member) offers() offer {
	o := offer{labels: m.node.Labels, resources: m.node.Allocatable}
	if m.by != nil {
		o.policy = m.by.Name
	}
	if m.wish == nil || m.State == StateFailed || m.State == StateImpossible {
		return o
	}
	o.resources, o.single = m.wish.Config.Resources, m.tally.single
	return o
}

// singleOf returns the resources of which a container gets no more than one once the node matches its policy; nil: none.
func singleOf(v *view) map[string]bool {
	if v.wish == nil || !deviceplugin.RefusesMoreThanOne(v.by.Spec.Sharing) {
		return nil
	}
	single := map[string]bool{}
	for name, replicas := range v.wish.Config.Replicas {
		if replicas > 1 {
			single[name] = true
		}
	}
	return single
}

// weigh notes a pod of which no node will meet the request.
func (i *impact) weigh(policy string, p *Pod, d demand) {
	if i.isMet(p, d) {
		return
	}
	if i.found[policy] == nil {
		i.found[policy] = map[unmetKey]*unmet{}
	}
	key := unmetKey{workload: p.Workload, asks: d.asks}
	if i.found[policy][key] == nil {
		i.found[policy][key] = &unmet{pod: p}
	}
	i.found[policy][key].pods++
}

func (i *impact) isMet(p *Pod, d demand) bool {
	met, known := i.met[d]
	if !known {
		met = slices.ContainsFunc(i.admitting(p), func(o *offer) bool { return o.meets(p) })
		i.met[d] = met
	}
	return met
}

func (o *offer) meets(p *Pod) bool {
	for name, n := range p.Asks {
		if o.resources[name] < n || n > 1 && o.single[name] {
			return false
		}
	}
	return true
}

// admits says whether a pod may go to a node with these labels. NVIDIA's labels change with the sharing, and are taken to
// match.
func admits(p *Pod, have map[string]string) bool {
	for name, value := range p.NodeSelector {
		if !strings.HasPrefix(name, nvidiaDomain) && have[name] != value {
			return false
		}
	}
	return true
}

// says tells of each workload what it asks for, what is there instead, and what to change.
func (i *impact) says(g *group, workloads map[unmetKey]*unmet) []string {
	most := map[string]int64{}
	single := false
	for _, m := range g.members {
		o := &m.brief.offer
		for name, n := range o.resources {
			if n > 0 && ofGPU(name) {
				most[name] = max(most[name], n)
			}
			single = single || o.single[name]
		}
	}
	var lines []string
	for _, u := range workloads {
		who := u.pod.Workload
		if u.pods > 1 {
			who = fmt.Sprintf("%s (%d pods)", who, u.pods)
		}
		lines = append(lines, fmt.Sprintf("%s asks for %s, which no node offers then; %s", who, requests(u.pod.Asks), advice(u.pod.Asks, most, single)))
	}
	slices.Sort(lines)
	return lines
}

// advice says what to change so that a request is met.
func advice(asks, most map[string]int64, single bool) string {
	for _, name := range slices.Sorted(maps.Keys(asks)) {
		plain, shared := strings.TrimSuffix(name, ".shared"), name+".shared"
		switch n := most[name]; {
		case n >= asks[name] && asks[name] > 1 && single:
			return "a container may ask for one of what is shared: ask for 1, or for GPUs that are not shared"
		case n >= asks[name]:
		case n > 0:
			return fmt.Sprintf("the nodes of the policy offer at most %d of %s each: ask for no more, or leave some nodes out of the policy", n, name)
		case most[shared] > 0:
			return fmt.Sprintf("ask for %s instead, or set renameByDefault to false in the policy", shared)
		case plain != name && most[plain] > 0:
			return fmt.Sprintf("ask for %s instead, or set renameByDefault to true in the policy", plain)
		}
	}
	if len(most) == 0 {
		return "the nodes of the policy offer nothing; look at their reasons in status.pending"
	}
	return fmt.Sprintf("the nodes of the policy offer %s: ask for one of these, or change the policy",
		strings.Join(slices.Sorted(maps.Keys(most)), ", "))
}

// requests lists what is asked for, such as nvidia.com/gpu: 2.
func requests(asks map[string]int64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(asks)) {
		parts = append(parts, fmt.Sprintf("%s: %d", name, asks[name]))
	}
	return strings.Join(parts, ", ")
}

// affected says which workloads the policy leaves without what they ask for.
func affected(lines []string) metav1.Condition {
	const most, length = 8, 4096
	c := metav1.Condition{Type: v1alpha1.ConditionWorkloadsAffected, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonRequestNotOffered}
	if len(lines) == 0 {
		return c
	}
	c.Status = metav1.ConditionTrue
	c.Message = cut(strings.Join(lines[:min(len(lines), most)], "; "), length)
	if more := len(lines) - most; more > 0 {
		c.Message += fmt.Sprintf("; and %d more", more)
	}
	return c
}

// asksOf sums what a pod asks for of GPUs and instances, as the scheduler does: its containers and sidecars together, or an
// init container with the sidecars that start before it, where that is more (k8s.io/component-helpers/resource PodRequests).
func asksOf(spec *corev1.PodSpec) map[string]int64 {
	together, sidecars, most := map[string]int64{}, map[string]int64{}, map[string]int64{}
	each := func(r *corev1.ResourceRequirements, do func(name string, n int64)) {
		for name, quantity := range r.Limits {
			if n := quantity.Value(); n != 0 && ofGPU(string(name)) {
				do(string(name), n)
			}
		}
	}
	for i := range spec.Containers {
		each(&spec.Containers[i].Resources, func(name string, n int64) { together[name] += n })
	}
	for i := range spec.InitContainers {
		sidecar := spec.InitContainers[i].RestartPolicy != nil
		each(&spec.InitContainers[i].Resources, func(name string, n int64) {
			most[name] = max(most[name], sidecars[name]+n)
			if sidecar {
				sidecars[name] += n
				together[name] += n
			}
		})
	}
	if spec.Resources != nil {
		each(spec.Resources, func(name string, n int64) { most[name] = max(most[name], n) })
	}
	for name, n := range most {
		together[name] = max(together[name], n)
	}
	if len(together) == 0 {
		return nil
	}
	return together
}

// workloadOf names what has made a pod: its controller, or a Deployment by the ReplicaSet that belongs to it, whose name
// ends with the hash that the pod carries too.
func workloadOf(pod *corev1.Pod) string {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return fmt.Sprintf("pod %s/%s", pod.Namespace, pod.Name)
	}
	kind, name := owner.Kind, owner.Name
	if hash := pod.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; kind == "ReplicaSet" && hash != "" {
		if deployment, is := strings.CutSuffix(name, "-"+hash); is {
			kind, name = "Deployment", deployment
		}
	}
	return fmt.Sprintf("%s %s/%s", kind, pod.Namespace, name)
}
