// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// pods → demands (request, node selector) → offers of the nodes → unmet, a line each with what to change

// unmetFinder finds the workloads of which no node meets the request once every policy is in force, for each policy one line
// for each workload. Pods that run are not disturbed, but would not start again; those that wait never start. A pod on
// a node concerns the policy of that node; one that waits concerns each policy whose nodes its node selector admits.
type unmetFinder struct {
	offers  []*offer
	labels  labelIndex
	met     map[Demand]bool
	waiting map[uint64][]string            // by node selector: the policies some of whose nodes it admits
	found   map[string]map[unmetKey]*unmet // by policy
}

// unmetKey tells workloads with different requests from one another.
type unmetKey struct {
	workload string
	requests uint64
}

// unmet is a workload of which no node meets the request.
type unmet struct {
	pod  *cluster.Pod
	pods int
}

// unmetWorkloads lists of each policy, by its name, the workloads of which no node meets the request once all policies
// are in force.
func unmetWorkloads(s *cluster.Snapshot, groups map[string]*Group, all []*member, waiting []waitingDemand) map[string][]string {
	i := unmetFinder{
		offers: make([]*offer, len(all)), met: map[Demand]bool{}, waiting: map[uint64][]string{}, found: map[string]map[unmetKey]*unmet{},
	}
	for at, m := range all {
		i.offers[at] = &m.Summary.Offer
	}
	for name, g := range groups {
		if g.By == nil {
			continue // nodes of no policy go back to what they were
		}
		for _, m := range g.Members {
			for _, d := range m.Demand.Demands {
				i.weigh(name, &m.Node.Pods[d.Pod], d.Demand)
			}
		}
	}
	for _, same := range waiting {
		first := &s.Unscheduled[same.pods[0]]
		policies := i.policiesFor(first, same.Demand)
		if len(policies) == 0 || i.isMet(first, same.Demand) {
			continue // as is every pod with the same demand
		}
		for _, p := range same.pods {
			for _, name := range policies {
				i.weigh(name, &s.Unscheduled[p], same.Demand)
			}
		}
	}
	var lines map[string][]string
	for name, workloads := range i.found {
		if lines == nil {
			lines = map[string][]string{}
		}
		lines[name] = i.describe(groups[name], workloads)
	}
	return lines
}

// offerOf is what the node offers in the end: what it does now, where nothing changes or nothing can.
func offerOf(m *member) offer {
	o := offer{Labels: m.Node.Labels, Resources: m.Node.Offered(m.Stack)}
	if m.Policy != nil {
		o.Policy = m.Policy.Name
	}
	if m.Desired == nil || m.State == node.Failed || m.State == node.Unsupported {
		return o
	}
	o.Resources, o.Single = m.Desired.Config.Resources, m.Demand.Single
	return o
}

// singleResources returns the resources of which a container gets no more than one once the node matches its policy;
// nil: none.
func singleResources(v *node.View) map[string]bool {
	if v.Desired == nil || !v.ReadsConfigs() || !v.Policy.Spec.Sharing.RefusesMoreThanOne() {
		return nil
	}
	single := map[string]bool{}
	for name, replicas := range v.Desired.Config.Replicas {
		if replicas > 1 {
			single[name] = true
		}
	}
	return single
}

// weigh notes a pod of which no node will meet the request.
func (i *unmetFinder) weigh(policy string, p *cluster.Pod, d Demand) {
	if i.isMet(p, d) {
		return
	}
	if i.found[policy] == nil {
		i.found[policy] = map[unmetKey]*unmet{}
	}
	key := unmetKey{workload: p.Workload, requests: d.Requests}
	if i.found[policy][key] == nil {
		i.found[policy][key] = &unmet{pod: p}
	}
	i.found[policy][key].pods++
}

func (i *unmetFinder) isMet(p *cluster.Pod, d Demand) bool {
	met, known := i.met[d]
	if !known {
		met = slices.ContainsFunc(i.admitting(p), func(o *offer) bool { return offerMeets(o, p) })
		i.met[d] = met
	}
	return met
}

func offerMeets(o *offer, p *cluster.Pod) bool {
	for name, n := range p.Requests {
		if o.Resources[name] < n || n > 1 && o.Single[name] {
			return false
		}
	}
	return true
}

// selectorAdmits reports whether a pod may go to a node with these labels. NVIDIA's labels change with the sharing, and
// are taken to match.
func selectorAdmits(p *cluster.Pod, have map[string]string) bool {
	for name, value := range p.NodeSelector {
		if !strings.HasPrefix(name, cluster.NvidiaDomain) && have[name] != value {
			return false
		}
	}
	return true
}

// describe tells of each workload what it asks for, what is there instead, and what to change. Namespaces take turns, so
// that nobody's workloads, however many, keep those of others from being named.
func (i *unmetFinder) describe(g *Group, workloads map[unmetKey]*unmet) []string {
	most := map[string]int64{}
	single := false
	for _, m := range g.Members {
		o := &m.Summary.Offer
		for name, n := range o.Resources {
			if n > 0 && cluster.IsGPUResource(name) {
				most[name] = max(most[name], n)
			}
			single = single || o.Single[name]
		}
	}
	lines := map[string][]string{} // by namespace
	for _, u := range workloads {
		who := u.pod.Workload
		if u.pods > 1 {
			who = fmt.Sprintf("%s (%d pods)", who, u.pods)
		}
		lines[u.pod.Namespace] = append(lines[u.pod.Namespace],
			fmt.Sprintf("%s"+asksFor+"%s, which no node will offer; %s", who, requestsText(u.pod.Requests), requestAdvice(u.pod.Requests, most, single)))
	}
	return inTurns(lines)
}

// inTurns is the first line of each group, then the second of each, and so on, each time sorted.
func inTurns(groups map[string][]string) (all []string) {
	longest := 0
	for _, lines := range groups {
		slices.Sort(lines)
		longest = max(longest, len(lines))
	}
	for i := range longest {
		var turn []string
		for _, lines := range groups {
			if i < len(lines) {
				turn = append(turn, lines[i])
			}
		}
		slices.Sort(turn)
		all = append(all, turn...)
	}
	return all
}

// requestAdvice says what to change so that a request is met.
func requestAdvice(requests, most map[string]int64, single bool) string {
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		plain, shared := strings.TrimSuffix(name, ".shared"), name+".shared"
		switch n := most[name]; {
		case n >= requests[name] && requests[name] > 1 && single:
			return "a container may ask for one of what is shared: ask for 1, or for GPUs that are not shared"
		case n >= requests[name]:
		case n > 0:
			return fmt.Sprintf("its nodes offer at most %d of %s each: ask for no more, or leave some nodes out", n, name)
		case most[shared] > 0:
			return fmt.Sprintf("ask for %s, or set renameByDefault to false", shared)
		case plain != name && most[plain] > 0:
			return fmt.Sprintf("ask for %s instead, or set renameByDefault to true in the policy", plain)
		}
	}
	if len(most) == 0 {
		return "the nodes of the policy offer nothing; look at their reasons in status.pending"
	}
	return fmt.Sprintf("the policy's nodes offer %s: ask for one, or change the policy",
		strings.Join(slices.Sorted(maps.Keys(most)), ", "))
}

// requestsText lists what is asked for, such as nvidia.com/gpu: 2.
func requestsText(requests map[string]int64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		parts = append(parts, fmt.Sprintf("%s: %d", name, requests[name]))
	}
	return strings.Join(parts, ", ")
}

// asksFor stands between a workload and what it asks for.
const asksFor = " asks for "

// unmetRequest is who asks for what in a clause of WorkloadsAffected, of which the middle may be cut, and how many clauses are left out.
var unmetRequest = regexp.MustCompile(`(?:^|; )([^;]+ asks? for [a-z][a-z0-9.-]*/[a-z0-9.-]*[a-z0-9])|; (and \d+ more)$`)

// UnmetRequests are who asks for what in a message of WorkloadsAffected or a line of Decision.Unmet, without the advice, which differs from
// policy to policy. Empty: the text is none of these.
func UnmetRequests(message string) (all []string) {
	for _, m := range unmetRequest.FindAllStringSubmatch(message, -1) {
		all = append(all, m[1]+m[2])
	}
	return all
}

// affectedCondition says which workloads the policy leaves without what they ask for.
func affectedCondition(lines []string) metav1.Condition {
	const most = 3 // workloads that a clause names
	c := metav1.Condition{Type: v1alpha1.ConditionWorkloadsAffected, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonRequestNotOffered}
	if len(lines) == 0 {
		return c
	}
	c.Status = metav1.ConditionTrue
	var clauses []string
	names := map[string][]string{} // of workloads that ask for the same
	for _, line := range lines {
		who, what, _ := strings.Cut(line, asksFor)
		if names[what] == nil {
			clauses = append(clauses, what)
		}
		names[what] = append(names[what], who)
	}
	for i, what := range clauses {
		all := names[what]
		clauses[i] = all[0] + asksFor + what
		if len(all) > 1 {
			clauses[i] = format.Few(all, most) + " ask for " + what
		}
	}
	c.Message = format.Fit(clauses, format.MostMessage, func(i int) string { return fmt.Sprintf("and %d more", len(clauses)-i) })
	return c
}
