// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
)

// Of is what a policy lets be made on demand, until it is deleted; nil: nothing.
func Of(p *v1alpha1.GPUSharingPolicy) *v1alpha1.MIGOnDemand {
	if !p.DeletionTimestamp.IsZero() {
		return nil
	}
	return p.OnDemand()
}

// overQuota begins what KAI says of a pod that its queue lets have no more. Volcano says the same of it as of one that fits nowhere.
var overQuota = regexp.MustCompile(`^(Node-Pool '[^']*': )?(OverLimit|NonPreemptibleOverQuota|QueueDoesNotExist): `)

// Waits reports whether a pod waits for MIG instances that the scheduler finds nowhere. One that the scheduler has not
// seen yet does not, nor one that a gate or its queue holds back or for which it evicts others, nor one of a DaemonSet,
// which has one node only.
func Waits(pod *corev1.Pod) bool {
	if !cluster.Waits(pod) || pod.DeletionTimestamp != nil || pod.Status.NominatedNodeName != "" {
		return false
	}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil && owner.Kind == "DaemonSet" {
		return false
	}
	is := cluster.Scheduled(pod)
	return is.Status == corev1.ConditionFalse && is.Reason == corev1.PodReasonUnschedulable && !overQuota.MatchString(is.Message) && len(instancesOf(pod)) > 0
}

// instancesOf are the resources of MIG instances that a pod asks for.
func instancesOf(pod *corev1.Pod) map[string]int64 {
	requests := cluster.GPURequests(&pod.Spec)
	maps.DeleteFunc(requests, func(name string, _ int64) bool { return !strings.HasPrefix(name, plan.ResourcePrefix) })
	return requests
}

// review is what pods wait for of the GPUs that a policy has on demand, and what would be changed for them.
type review struct {
	memory     *demand.Memory
	pool       demand.Pool
	nodes      []*cluster.Node    // of the pool
	profiles   map[string]string  // of the models, by resource
	sizes      map[string]int     // of the profiles
	most       []map[string]int64 // instances that nodes can have, by resource; each once
	noted      []demand.GPU       // of the last of these
	resting    map[layout]map[string]int
	index      map[[2]string]int
	overbooked map[[2]string]string // a pod that has none, by node with fewer instances of a resource than its pods ask for, and resource
	classes    []demand.Class
	pods       [][]*corev1.Pod // of each class, the one that has waited longest first
	kinds      []kind          // of each class
	decision   demand.Decision
	unmet      *v1alpha1.DemandStatus // the first with pods for which nothing can be done
	booked     bool                   // its holders are pods that have none of what they ask for (overbooked)
	beyond     int                    // pods of kinds that were not looked at
	applies    bool
	making     bool                            // a change is under way
	paused     bool                            // the rollout
	decided    map[string][]v1alpha1.GPUDemand // by node; only where it applies
	now        time.Time
	next       time.Time // when to look again at changes that are under way
}

// Reviewed is what is decided for a policy that has GPUs on demand.
type Reviewed struct {
	Decided   map[string][]v1alpha1.GPUDemand // in mode Apply: status.demand of the nodes that it governs
	Status    *v1alpha1.OnDemandStatus
	Condition metav1.Condition
	Next      time.Time // when to review it again; zero: when something changes
	Attempts  Attempts
}

// Asked is a policy with GPUs on demand, the pods that wait and whose namespaces it selects, and what is remembered of attempts for such pods.
type Asked struct {
	Policy   *v1alpha1.GPUSharingPolicy
	Pods     []*corev1.Pod
	Attempts Attempts // nil: the controller has just started
}

// Review decides for policies that have GPUs on demand, by name. A pod is served once: where instances are idle or being made for it, else by the first
// policy, in the order given, that can make some. It changes the memory and the attempts alone.
func Review(m *demand.Memory, s *cluster.Snapshot, policies ...Asked) map[string]Reviewed {
	reviews, reviewed, served := make([]*review, len(policies)), map[string]Reviewed{}, map[*corev1.Pod]string{}
	note := func(by string, pods []*corev1.Pod) {
		for _, pod := range pods {
			served[pod] = cmp.Or(served[pod], by)
		}
	}
	policies = slices.Clone(policies)
	for n, of := range policies {
		if reviews[n] = reviewOf(m, of.Policy, s); of.Attempts == nil {
			of.Attempts = reviews[n].former(of, s.Now)
			policies[n] = of
		}
		if len(policies) > 1 {
			note(of.Policy.Name, reviews[n].has(of, s.Now))
		}
	}
	for n, of := range policies {
		of.Pods = slices.DeleteFunc(slices.Clone(of.Pods), func(pod *corev1.Pod) bool { return cmp.Or(served[pod], of.Policy.Name) != of.Policy.Name })
		is, serves := reviews[n].decides(of, s.Now)
		reviewed[of.Policy.Name] = is
		note(of.Policy.Name, serves)
	}
	return reviewed
}

// decides is what is decided of a policy, and for which pods it has or makes instances.
func (r *review) decides(of Asked, now time.Time) (is Reviewed, serves []*corev1.Pod) {
	r.decide(of.Pods, of.Attempts, now)
	r.look(r.decision.Next)
	begins := r.record(of.Policy, now)
	for _, entries := range r.decided {
		slices.SortFunc(entries, func(a, b v1alpha1.GPUDemand) int { return strings.Compare(a.UUID, b.UUID) })
	}
	status := r.status()
	return Reviewed{Decided: r.decided, Status: status, Condition: r.condition(status), Next: r.next, Attempts: of.Attempts}, r.serves(begins)
}

// has are the pods for which instances are idle or being made.
func (r *review) has(of Asked, now time.Time) []*corev1.Pod {
	frozen := *r
	frozen.pool.GPUs = slices.Clone(r.pool.GPUs)
	for g := range frozen.pool.GPUs {
		frozen.pool.GPUs[g].Frozen = true
	}
	frozen.decide(of.Pods, maps.Clone(of.Attempts), now)
	return frozen.serves(false)
}

// serves are the pods for which instances are there, and those for which some are planned.
func (r *review) serves(planned bool) (pods []*corev1.Pod) {
	for n, o := range r.decision.Outcomes {
		served := o.Ready
		if planned {
			served += o.Planned
		}
		pods = append(pods, r.pods[n][:served]...)
	}
	return pods
}

func reviewOf(m *demand.Memory, p *v1alpha1.GPUSharingPolicy, s *cluster.Snapshot) *review {
	r := &review{
		memory: m, now: s.Now, profiles: map[string]string{}, sizes: map[string]int{}, index: map[[2]string]int{}, overbooked: map[[2]string]string{}, applies: policy.Applies(p), paused: p.Spec.Rollout.Paused,
		decided: map[string][]v1alpha1.GPUDemand{}, resting: map[layout]map[string]int{},
	}
	of := Of(p)
	r.pool = demand.Pool{Idle: time.Duration(of.IdleSeconds) * time.Second, Rest: of.Rest(), Budget: -1, Reserve: map[string]int{}}
	if r.applies {
		r.pool.Budget = 1 // one node after the other is tainted for pods that wait
	}
	for _, name := range of.Profiles {
		r.pool.Profiles = append(r.pool.Profiles, string(name))
	}
	for _, kept := range of.Reserve {
		r.pool.Reserve[string(kept.Profile)] = int(kept.Count)
	}
	for i := range s.Nodes {
		if s.Nodes[i].GPU.Spec.PolicyName == p.Name {
			r.addNode(p, &s.Nodes[i], s.Now)
		}
	}
	return r
}

// look has the policy looked at again at a time, unless that is past.
func (r *review) look(at time.Time) {
	if at.After(r.now) && (r.next.IsZero() || at.Before(r.next)) {
		r.next = at
	}
}

// addNode adds the GPUs of a node that the policy has on demand.
func (r *review) addNode(p *v1alpha1.GPUSharingPolicy, n *cluster.Node, now time.Time) {
	ready := condition.IsTrue(n.GPU.Status.Conditions, v1alpha1.ConditionReady)
	devices, idle := plan.Devices(n.GPU.Status.Devices), n.IdleSince()
	frozen := !ready || cluster.IsUninitialized(n) // no taint would keep pods off (node.MustStayUntainted)
	from, isOn := len(r.pool.GPUs), map[[2]string]bool{}
	var others []demand.GPU
	for i := range n.Pods {
		isOn[[2]string{n.Pods[i].Namespace, n.Pods[i].Name}] = true
	}
	for i := range devices {
		d := &devices[i]
		// What a pod had that has ended is the scheduler's to give, while the agent has not seen that yet. Nothing destroys it, since it is not known to be idle.
		d.Holders = slices.DeleteFunc(d.Holders, func(h gpu.Holder) bool { return !isOn[[2]string{h.Namespace, h.Pod}] })
		since := addClaimants(d, n, idle)
		of := plan.LayoutOf(*p.Spec.Sharing.MIG, *d)
		if !plan.Matches(p.Spec.GPUSelector, *d) || of == nil || of.OnDemand == nil || len(d.Profiles) == 0 {
			others = append(others, demand.GPU{Instances: instances(d, idle)})
			continue
		}
		g := demand.GPU{
			Node: n.Name, UUID: d.UUID, Model: r.model(d), Frozen: frozen || !d.State.MIG || d.PendingMIG != d.State.MIG || d.ProcessesUnknown,
			Withheld: !ready || n.TakesNoNewPods(), Instances: instances(d, since),
		}
		if r.applies {
			g.Resting = r.restingOf(p, d, layout{of, g.Model})
			r.follow(p, n, d, &g, now)
		}
		r.pool.GPUs = append(r.pool.GPUs, g)
		r.index[[2]string{n.Name, d.UUID}] = d.Index
	}
	if len(r.pool.GPUs) == from {
		return
	}
	r.nodes = append(r.nodes, n)
	r.noteMost(r.pool.GPUs[from:])
	r.promise(n, devices, slices.Concat(r.pool.GPUs[from:], others), now)
	holdUnusable(n, r.pool.GPUs[from:])
}

// addClaimants adds to the holders of a GPU who is allocated instances by ResourceClaims before a container has them. If anybody is, none of the GPU counts as
// idle since then: the agent, which chooses what it destroys, does not know of those.
func addClaimants(d *gpu.Device, n *cluster.Node, idle map[string]time.Time) map[string]time.Time {
	reported := len(d.Holders)
	for _, claim := range n.Claims {
		namespace, name, _ := strings.Cut(claim.Name, "/")
		if at := slices.IndexFunc(n.Pods, func(p cluster.Pod) bool { return p.Has(claim) }); at >= 0 {
			name = n.Pods[at].Name
		}
		for _, device := range claim.Of(n.Name) {
			uuid, instance, known := n.Published.Locate(device, n.GPU.Status.Devices)
			has := func(h gpu.Holder) bool { return h.Namespace == namespace && h.Pod == name && h.Instance == instance }
			if known && uuid == d.UUID && !slices.ContainsFunc(d.Holders[:reported], has) {
				d.Holders = append(d.Holders, gpu.Holder{Namespace: namespace, Pod: name, Instance: instance})
			}
		}
	}
	if len(d.Holders) > reported {
		return nil
	}
	return idle
}

// instances are those of a GPU, with who has each, or since when none has.
func instances(d *gpu.Device, idle map[string]time.Time) (list []demand.Instance) {
	for _, i := range d.State.Instances {
		list = append(list, demand.Instance{Instance: i, Holder: holderOf(d, i.ID), IdleSince: idle[i.UUID]})
	}
	return list
}

// holdUnusable has nothing of a node count as idle that takes no pods, or soon is no more, and makes nothing there. Autoscalers need not cordon it.
func holdUnusable(n *cluster.Node, gpus []demand.GPU) {
	leaves := func(t corev1.Taint) bool {
		return slices.Contains([]string{corev1.TaintNodeUnschedulable, "karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"}, t.Key)
	}
	if !n.IsLost() && !slices.ContainsFunc(n.Taints, leaves) {
		return
	}
	for g := range gpus {
		gpus[g].Frozen = true
		for i := range gpus[g].Instances {
			gpus[g].Instances[i].Holder = cmp.Or(gpus[g].Instances[i].Holder, "a node that takes no pods") // nothing of it is a reserve
		}
	}
}

// layout is one of a policy, on GPUs that can hold the same.
type layout struct {
	of    *v1alpha1.MIGLayout
	model *gpu.Device
}

// restingOf are the instances that a GPU has at rest, by exact profile.
func (r *review) restingOf(p *v1alpha1.GPUSharingPolicy, d *gpu.Device, of layout) map[string]int {
	resting, known := r.resting[of]
	if !known {
		resting = plan.ByProfile(policy.Resting(p, *d))
		r.resting[of] = resting
	}
	return resting
}

// noteMost notes how many instances of each resource the GPUs of a node can have at most.
func (r *review) noteMost(gpus []demand.GPU) {
	if slices.EqualFunc(gpus, r.noted, func(a, b demand.GPU) bool { return a.Model == b.Model }) {
		return // as the node before it
	}
	r.noted = gpus
	most := map[string]int64{}
	for _, g := range gpus {
		for _, p := range g.Model.Profiles {
			most[plan.ResourceOf(p.Name)] += int64(p.Max)
		}
	}
	if !slices.ContainsFunc(r.most, func(m map[string]int64) bool { return maps.Equal(m, most) }) {
		r.most = append(r.most, most)
	}
}

// model is what GPUs share that can hold the same. It notes the resources of its profiles.
func (r *review) model(d *gpu.Device) *gpu.Device {
	m := r.memory.Model(d)
	for _, p := range m.Profiles {
		r.profiles[plan.ResourceOf(p.Name)], r.sizes[p.Name] = p.Name, p.Size
	}
	return m
}

// holderOf names the pod or process that has an instance; empty: none has.
func holderOf(d *gpu.Device, instance int) string {
	for _, h := range d.Holders {
		if h.Instance == instance {
			return h.Namespace + "/" + h.Pod
		}
	}
	for _, p := range d.Processes {
		if p.Instance == instance {
			return fmt.Sprintf("process %d", p.PID)
		}
	}
	return ""
}

// promise gives idle instances to pods that are bound to their node, as many as each is not reported to hold: it was bound just now, or an init container has
// them. What is reported of one that was bound just now can be of a former pod of that name: it has that or others in its place, which so are not destroyed.
// It goes by name: which instance each has does not follow the order in which the cache lists them. Where a node has fewer, its kubelet has let a pod pass that
// has none (removeMissingExtendedResources of kubernetes pkg/kubelet/lifecycle/predicate.go), and the scheduler counts what is made as that pod's.
func (r *review) promise(n *cluster.Node, devices []gpu.Device, gpus []demand.GPU, now time.Time) {
	if n.FoundOnDRA() {
		return // a pod has what its claims have
	}
	var pods []*cluster.Pod
	for i := range n.Pods {
		if len(n.Pods[i].Requests) > 0 {
			pods = append(pods, &n.Pods[i])
		}
	}
	slices.SortFunc(pods, func(a, b *cluster.Pod) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	reported := map[[2]string]int64{} // instances, by pod and resource
	for d := range devices {
		for _, i := range devices[d].State.Instances {
			reported[[2]string{holderOf(&devices[d], i.ID), plan.ResourceOf(i.Profile)}]++
		}
	}
	for _, pod := range pods {
		r.look(pod.Scheduled.Add(timing.ReportAfter))
		name, has, lacks := pod.Namespace+"/"+pod.Name, map[string]int64{}, map[string]int64{}
		for of, count := range pod.Requests {
			has[of] = min(count, reported[[2]string{name, of}])
			lacks[of] = count - has[of]
		}
		for _, of := range giveIdle(gpus, lacks, name) {
			r.overbooked[[2]string{n.Name, of}] = name
		}
		if now.Sub(pod.Scheduled) < timing.ReportAfter {
			giveIdle(gpus, has, "")
		}
	}
	giveIdle(gpus, n.Unhealthy(nil), "an unhealthy device") // which instances these are, no node tells
}

// giveIdle gives idle instances of some resources to a holder, or has them not destroyed if that is empty. Those that are not destroyed as it is, such as what
// a pod had that has ended, or what others have been promised so, come last. lacking are those of which there are too few.
func giveIdle(gpus []demand.GPU, counts map[string]int64, holder string) (lacking []string) {
	for name, count := range counts {
		for _, stays := range []bool{false, true} {
			for g := range gpus {
				for at := range gpus[g].Instances {
					of := &gpus[g].Instances[at]
					if count > 0 && of.Holder == "" && of.IdleSince.IsZero() == stays && plan.ResourceOf(of.Profile) == name {
						of.Holder, of.IdleSince, count = holder, time.Time{}, count-1
					}
				}
			}
		}
		if count > 0 {
			lacking = append(lacking, name)
		}
	}
	return lacking
}

// most is what one decision looks at, and mostOfOne of one namespace: a tenant can make any number of kinds.
var most, mostOfOne = bounds{kinds: 128, placements: 512}, bounds{kinds: 16, placements: 64}

type bounds struct{ kinds, placements int }

// classify joins the pods of a namespace that ask for the same, that the same nodes would take, and that are as old. Left out are pods that ask for what
// no GPU of the pool can have, or that no node of it would take, and those of kinds beyond the bounds.
func (r *review) classify(pods []*corev1.Pod, attempts Attempts, now time.Time) {
	r.classes, r.pods, r.kinds, r.beyond = nil, nil, nil, 0
	where, at, of := map[string]placement{}, map[kind]int{}, map[string]*bounds{}
	for _, pod := range slices.SortedFunc(slices.Values(pods), byTurn) {
		asks := r.asks(pod)
		if len(asks) == 0 {
			continue
		}
		if of[pod.Namespace] == nil {
			of[pod.Namespace] = new(mostOfOne)
		}
		on, known := r.placement(pod, where, of[pod.Namespace])
		if !known {
			r.beyond++
			continue
		}
		if on.nodes != nil && len(on.nodes) == 0 {
			continue
		}
		class := demand.Class{Asks: asks, Nodes: r.bookable(on.nodes, asks), Oldest: waitsSince(pod), Priority: priority(pod)}
		key := kind{
			asker: attempts.of(pod, r.largest(asks)), priority: class.Priority, asks: spelled(asks), nodes: on.key, aged: now.Sub(class.Oldest) >= demand.Aged,
		}
		n, known := at[key]
		if !known && (len(r.classes) == most.kinds || of[pod.Namespace].kinds == 0) {
			r.beyond++
			continue
		}
		if !known {
			n = len(r.classes)
			of[pod.Namespace].kinds--
			at[key], r.classes, r.pods = n, append(r.classes, class), append(r.pods, nil)
			r.kinds = append(r.kinds, key)
		}
		r.classes[n].Pods++
		r.pods[n] = append(r.pods[n], pod)
	}
}

// bookable are the nodes, nil being all, without those that are overbooked.
func (r *review) bookable(nodes map[string]bool, asks map[string]int) map[string]bool {
	booked := func(n *cluster.Node) bool {
		for profile := range asks {
			if r.overbooked[[2]string{n.Name, plan.ResourceOf(profile)}] != "" {
				return true
			}
		}
		return false
	}
	if !slices.ContainsFunc(r.nodes, booked) {
		return nodes
	}
	is := map[string]bool{}
	for _, n := range r.nodes {
		is[n.Name] = (nodes == nil || nodes[n.Name]) && !booked(n)
	}
	return is
}

// overbookedBy are pods that have none of what they ask for, on nodes where those that ask for something wait behind them.
func (r *review) overbookedBy(asks map[string]int) []string {
	by := map[string]bool{}
	for _, n := range r.nodes {
		for profile := range asks {
			by[r.overbooked[[2]string{n.Name, plan.ResourceOf(profile)}]] = true
		}
	}
	delete(by, "")
	names := slices.Sorted(maps.Keys(by))
	return names[:min(len(names), demand.MostBlockers)]
}

// kind is what the pods of a class have in common.
type kind struct {
	asker

	priority    int32
	asks, nodes string
	aged        bool
}

func spelled(asks map[string]int) string {
	text := make([]byte, 0, 32)
	for _, name := range slices.Sorted(maps.Keys(asks)) {
		text = strconv.AppendInt(append(append(text, name...), ':'), int64(asks[name]), 10)
		text = append(text, ' ')
	}
	return string(text)
}

// byTurn orders pods by priority, and then by how long they have waited.
func byTurn(a, b *corev1.Pod) int {
	return cmp.Or(cmp.Compare(priority(b), priority(a)), waitsSince(a).Compare(waitsSince(b)), strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Name, b.Name))
}

func priority(pod *corev1.Pod) int32 {
	if pod.Spec.Priority == nil {
		return 0
	}
	return *pod.Spec.Priority
}

func waitsSince(pod *corev1.Pod) time.Time {
	if at := cluster.Scheduled(pod).LastTransitionTime; !at.IsZero() {
		return at.Time
	}
	return pod.CreationTimestamp.Time
}

// mostProfiles is how many profiles of one pod are listed. No GPU has as many.
const mostProfiles = 16

// asks are the instances that a pod asks for, by exact profile; nil if no node of the pool can have them.
func (r *review) asks(pod *corev1.Pod) map[string]int {
	asks, requests := map[string]int{}, instancesOf(pod)
	enough := func(most map[string]int64) bool {
		for name, count := range requests {
			if count > most[name] {
				return false
			}
		}
		return true
	}
	if len(requests) > mostProfiles || !slices.ContainsFunc(r.most, enough) {
		return nil
	}
	for name, count := range requests {
		asks[r.profiles[name]] = int(count)
	}
	return asks
}

// placement is the nodes of the pool that would take some pods, but for their instances, CPU and memory.
type placement struct {
	key   string          // of the nodes
	nodes map[string]bool // nil: all
}

// largest is the largest profile of some.
func (r *review) largest(asks map[string]int) string {
	return slices.MaxFunc(slices.Sorted(maps.Keys(asks)), func(a, b string) int { return cmp.Compare(r.sizes[a], r.sizes[b]) })
}

// placement is that of a pod; known are those by what pods say of it. False: there are too many others.
func (r *review) placement(pod *corev1.Pod, known map[string]placement, left *bounds) (placement, bool) {
	said, _ := json.Marshal([]any{pod.Spec.NodeSelector, pod.Spec.Affinity, pod.Spec.Tolerations}) //nolint:errchkjson // of strings and numbers
	if p, found := known[string(said)]; found || len(known) == most.placements || left.placements == 0 {
		return p, found
	}
	left.placements--
	p, key, affinity := placement{nodes: map[string]bool{}}, make([]byte, len(r.nodes)), nodeaffinity.GetRequiredNodeAffinity(pod)
	for at, n := range r.nodes {
		if takes(n, pod, affinity) {
			p.nodes[n.Name], key[at] = true, 1
		}
	}
	if len(p.nodes) == len(r.nodes) && len(p.nodes) > 0 {
		p.nodes = nil
	}
	p.key = string(key)
	known[string(said)] = p
	return p, true
}

// takes reports whether a node has the labels that a pod selects, and no taint that keeps it off, but for those of a
// change.
func takes(n *cluster.Node, pod *corev1.Pod, affinity nodeaffinity.RequiredNodeAffinity) bool {
	matches, err := affinity.Match(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: n.Labels}})
	return err == nil && matches && !slices.ContainsFunc(n.Taints, func(t corev1.Taint) bool {
		return t.Effect != corev1.TaintEffectPreferNoSchedule && t.Key != v1alpha1.TaintChanging && !clusterpolicy.Tolerates(pod.Spec.Tolerations, t)
	})
}
