// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// sight is what the page is made of.
type sight struct {
	cluster  string
	snapshot cluster.Snapshot
	measured map[string]measuredNode // by node; nil: nothing is measured
	notes    []string
	stale    *dashboard.Stale // nil: the API server answers
	// blind reports that the Nodes cannot be read, so that what they advertise is not known.
	blind bool
}

// page is what the page shows: what status prints, and what top prints.
func (s sight) page() dashboard.Page {
	p := dashboard.Page{Cluster: s.cluster, Stale: s.stale, Policies: []dashboard.Policy{}, Notes: append([]string{}, s.notes...), Nodes: []dashboard.Node{}}
	all := reports(s.snapshot)
	for i := range s.snapshot.Policies {
		card := policyCard(&s.snapshot.Policies[i])
		card.Notes = append(card.Notes, madeOnDemand(&s.snapshot.Policies[i], all)...)
		card.Shares = dashboard.Shares(sumOf(all, card.Name))
		p.Policies = append(p.Policies, card)
	}
	if len(p.Policies) == 0 {
		p.NoPolicy = noPolicy(all)
	}
	slices.SortFunc(p.Policies, func(a, b dashboard.Policy) int { return cmp.Compare(a.Name, b.Name) })
	for i := range all {
		p.Nodes = append(p.Nodes, s.card(&all[i]))
	}
	return p
}

func policyCard(p *v1alpha1.GPUSharingPolicy) dashboard.Policy {
	n := p.Status.Nodes
	card := dashboard.Policy{
		Name: p.Name, Strategy: string(p.Spec.Sharing.Strategy), Matched: n.Matched, Ready: n.Ready, Updated: n.Updated, Blocked: n.Blocked,
	}
	card.State, card.Message = policyState(p)
	card.Notes = notesOf(p)
	stalled, _ := condition.Find(p.Status.Conditions, v1alpha1.ConditionStalled)
	switch {
	case card.State == v1alpha1.ReasonReady:
		card.Tone = dashboard.ToneReady
	case card.State == notObserved:
		card.Tone = dashboard.ToneWorking
	case stalled.Status == metav1.ConditionTrue:
		card.Tone = dashboard.ToneFailed
	case n.Blocked > 0:
		card.Tone = dashboard.ToneBlocked
	default:
		card.Tone = dashboard.ToneWorking
	}
	return card
}

func toneOf(s node.Standing) dashboard.Tone {
	switch s {
	case node.NodeReady:
		return dashboard.ToneReady
	case node.NodeWaiting:
		return dashboard.ToneWorking
	case node.NodeBlocked:
		return dashboard.ToneBlocked
	case node.NodeFailed, node.NodeUnsupported:
	}
	return dashboard.ToneFailed
}

// unhealthyNotes are what is to be known of the resources that NVIDIA's device plugin reports as unhealthy on a node.
func unhealthyNotes(n *cluster.Node) (notes []string) {
	unhealthy := n.Unhealthy(n.Expected())
	for _, name := range slices.Sorted(maps.Keys(unhealthy)) {
		says := "%d of %s are unhealthy, so no pod gets them: look at the log of NVIDIA's device plugin"
		if n.Allocatable[name] == 0 {
			says = "No pod gets any of %d %s: NVIDIA's device plugin restarts, has stopped, or reports all as unhealthy. If this lasts, look at its log"
		}
		notes = append(notes, fmt.Sprintf(says, unhealthy[name], name))
	}
	return notes
}

// card is that of a node.
func (s sight) card(r *report) dashboard.Node {
	n := r.node
	card := dashboard.Node{
		Name: r.Name, Policy: r.Policy, State: r.stands(), Tone: toneOf(r.standing), Message: r.Message, Products: r.Products,
		Resources: s.resources(r), Steps: brief(r.Plan), Blockers: r.BlockedBy, GPUs: []dashboard.GPU{}, Namespaces: []string{},
		Shares: dashboard.Shares(r.Shares),
	}
	if r.Stack != dra.DevicePlugin {
		card.Notes = append(card.Notes, "Offered by "+programOf(r.Stack))
	}
	m, measured := s.measured[r.Name]
	units := map[string][]usage.Unit{}
	for _, u := range m.report.Units {
		units[u.GPU] = append(units[u.GPU], u)
	}
	if measured && m.failed != "" {
		card.Notes = append(card.Notes, "Not measured: "+m.failed)
	}
	if m.report.Incomplete != "" {
		card.Notes = append(card.Notes, "Measured in part: "+m.report.Incomplete)
	}
	card.Notes = append(card.Notes, unhealthyNotes(n)...)
	for _, d := range m.report.Daemons {
		if d.OutdatedClients > 0 {
			card.Notes = append(card.Notes, fmt.Sprintf("%s: %d of %s keep the former limits until they end", d.Resource, d.OutdatedClients, count(int(d.Clients), "MPS client")))
		}
	}
	devices, pods, namespaces := devicesOf(n), podsByUID(n), map[string]bool{}
	replicas := replicasOn(n, n.Offered(r.Stack), devices)
	for _, d := range devices {
		card.GPUs = append(card.GPUs, gpuCard(d, replicas[d.UUID], units[d.UUID], pods))
		for _, h := range d.Holders {
			namespaces[h.Namespace] = true
		}
	}
	for _, u := range m.report.Units {
		for _, c := range u.Containers {
			namespaces[c.Namespace] = true
		}
	}
	for _, b := range n.GPU.Status.Rollout.Blockers {
		if b.Namespace != "" {
			namespaces[b.Namespace] = true
		}
	}
	card.Namespaces = append(card.Namespaces, slices.Sorted(maps.Keys(namespaces))...)
	return card
}

// resources are those that a node advertises now, and once its change is done.
func (s sight) resources(r *report) []dashboard.Resource {
	counts := map[string]dashboard.Resource{}
	for name, n := range r.Advertised {
		counts[name] = dashboard.Resource{Name: name, Now: &n}
	}
	if !r.Ready {
		for _, c := range r.node.GPU.Status.Rollout.Resources {
			found, is := counts[c.Name]
			if !is && !s.blind {
				found.Now = new(int64(0))
			}
			if found.Name = c.Name; found.Now == nil || *found.Now != c.Expected {
				found.Then = new(c.Expected)
			}
			if found.Then != nil || *found.Now != 0 {
				counts[c.Name] = found
			}
		}
	}
	sorted := []dashboard.Resource{}
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		sorted = append(sorted, counts[name])
	}
	return sorted
}

// replicasOn is how often each GPU that is not in MIG mode is advertised, by UUID, as far as what the node advertises
// tells: GPUs of the same resource have the same number. 0: not known.
func replicasOn(n *cluster.Node, offered map[string]int64, devices []gpu.Device) map[string]int {
	of, gpus := map[string]string{}, map[string]int{}
	unhealthy := n.Unhealthy(n.Expected())
	all := func(resource string) int { return int(offered[resource] + unhealthy[resource]) }
	shared := all(plan.ResourceGPU) == 0
	for _, d := range devices {
		switch {
		case d.State.MIG:
			continue
		case d.State.MPS != nil:
			of[d.UUID] = d.State.MPS.Resource
		case shared:
			of[d.UUID] = plan.ResourceGPUShared
		default:
			of[d.UUID] = plan.ResourceGPU
		}
		gpus[of[d.UUID]]++
	}
	replicas := map[string]int{}
	for uuid, resource := range of {
		if advertised := all(resource); advertised%gpus[resource] == 0 {
			replicas[uuid] = advertised / gpus[resource]
		}
	}
	return replicas
}

// gpuCard is a GPU with what was measured of it and its instances.
func gpuCard(d gpu.Device, replicas int, units []usage.Unit, pods map[string]string) dashboard.GPU {
	const bytesPerMiB = 1 << 20
	card := dashboard.GPU{UUID: d.UUID, Index: d.Index, Product: gpu.ProductLabel(d.Product), MemoryBytes: d.MemoryMiB * bytesPerMiB}
	type use struct {
		usage.Container

		where string
	}
	var uses []use
	instances := map[int]usage.Unit{}
	for _, u := range units {
		if u.Instance == nil {
			card.Memory, card.OtherBytes = memoryOf(u.Memory), card.OtherBytes+u.OtherBytes
			card.Utilization = computeOf(u.Utilization)
			if u.Replicas > 0 {
				replicas = u.Replicas
			}
		} else {
			instances[*u.Instance] = u
			card.OtherBytes += u.OtherBytes
		}
		for _, c := range u.Containers {
			where := ""
			if u.Instance != nil {
				where = strings.TrimPrefix(place(&u), fmt.Sprintf("GPU %d, ", u.Index))
			}
			uses = append(uses, use{c, where})
		}
	}
	slices.SortStableFunc(uses, func(a, b use) int { return usage.ByUse(a.Container, b.Container) })
	for _, c := range uses {
		card.Containers = append(card.Containers, dashboard.Container{
			Name: c.Namespace + "/" + c.Pod + " " + c.Name.Container, Where: c.where, UsedBytes: c.MemoryBytes, ShareBytes: c.ShareBytes,
			Utilization: computeOf(c.Utilization), Over: c.Over(),
		})
	}
	words := modes(d)
	switch {
	case d.State.MIG:
	case replicas > 1 && d.State.MPS == nil:
		words = append(words, fmt.Sprintf("%s, %d replicas", v1alpha1.StrategyTimeSlicing, replicas))
	case replicas > 1:
		words = append(words, fmt.Sprintf("%d replicas", replicas))
	case replicas == 1 && len(words) == 0:
		words = append(words, "not shared")
	}
	card.Sharing = strings.Join(words, ", ")
	card.Drawing = drawingOf(d, replicas, pods, instances)
	for _, user := range holderNames(d, gpu.WholeGPU, pods) {
		if drawn := func(b dashboard.Block) bool { return slices.Contains(b.Holders, user) }; !slices.ContainsFunc(card.Drawing.Blocks, drawn) {
			card.Others = append(card.Others, user)
		}
	}
	return card
}

func memoryOf(m *gpu.Memory) *dashboard.Memory {
	if m == nil || m.Total <= 0 {
		return nil
	}
	return &dashboard.Memory{Used: m.Used, Total: m.Total}
}

func computeOf(u *gpu.Utilization) *float64 {
	if u == nil {
		return nil
	}
	return &u.Compute
}

// drawingOf divides a GPU into its instances, or into its replicas: one for each that a container holds, and the others
// together.
func drawingOf(d gpu.Device, replicas int, pods map[string]string, instances map[int]usage.Unit) dashboard.Drawing {
	var drawing dashboard.Drawing
	held := holdersOf(d)
	if d.State.MIG || replicas <= 1 || len(held) > replicas {
		total, blocks := blocksOf(d, pods)
		drawing.Slices = total
		for _, b := range blocks {
			u := instances[b.instance]
			drawing.Blocks = append(drawing.Blocks, dashboard.Block{
				Size: b.size, Name: b.name, Holders: b.users, Memory: memoryOf(u.Memory), Utilization: computeOf(u.Utilization),
			})
		}
		return drawing
	}
	drawing.Slices = replicas
	for _, name := range held {
		drawing.Blocks = append(drawing.Blocks, dashboard.Block{Size: 1, Name: "replica", Holders: []string{name}})
	}
	if free := replicas - len(held); free > 0 {
		drawing.Blocks = append(drawing.Blocks, dashboard.Block{Size: free, Name: count(free, "replica")})
	}
	return drawing
}

// holdersOf are the pods that hold a whole GPU or a replica of it: one for each that a container holds.
func holdersOf(d gpu.Device) []string {
	var held []string
	for _, h := range d.Holders {
		if h.Instance == gpu.WholeGPU {
			held = append(held, h.Namespace+"/"+h.Pod)
		}
	}
	return held
}

// previewsOf draws the GPUs that a change of policies changes, before and after.
func previewsOf(s cluster.Snapshot, c change) []dashboard.NodePreview {
	previews := []dashboard.NodePreview{}
	of := s.NodesByName()
	asked := func(policy string) bool {
		return slices.Contains(c.deleted, policy) || slices.ContainsFunc(c.applied, named(policy))
	}
	was := map[string]string{}
	for _, n := range rollout.Decide(s).Nodes {
		was[n.Node] = n.Policy
	}
	for _, n := range rollout.Decide(c.of(s)).Nodes {
		settled := n.State == node.Unsupported || n.State == node.Unknown || n.State == node.UpToDate || n.Retained
		if object, found := of[n.Node]; found && !settled && (asked(n.Policy) || asked(was[n.Node])) {
			if preview := previewOf(n, s.Plugin.StackOf(object), object); len(preview.GPUs) > 0 {
				previews = append(previews, preview)
			}
		}
	}
	return previews
}

// previewOf draws the GPUs of a node that change.
func previewOf(n rollout.NodeState, stack dra.Stack, object *cluster.Node) dashboard.NodePreview {
	preview := dashboard.NodePreview{Name: n.Node}
	devices, pods := devicesOf(object), podsByUID(object)
	before := replicasOn(object, object.Offered(stack), devices)
	for _, d := range devices {
		at := slices.IndexFunc(n.Devices, func(s v1alpha1.DeviceSpec) bool { return s.UUID == d.UUID })
		if at < 0 {
			continue
		}
		want, err := plan.Want(n.Devices[at].Sharing, d)
		if err != nil {
			continue // the node cannot have it, and the text says why
		}
		after, often := d, wholeReplicas(n)
		after.State, after.Holders, after.Processes = want, nil, nil
		if want.MPS != nil {
			often = replicas(n, want.MPS.Resource)
		}
		g := dashboard.GPUPreview{
			Index: d.Index, Product: gpu.ProductLabel(d.Product), Before: drawingOf(d, before[d.UUID], pods, nil), After: drawingOf(after, int(often), pods, nil),
		}
		markNew(&g.After, want, d.State)
		preview.GPUs = append(preview.GPUs, g)
	}
	return preview
}

// markNew marks the instances that a change creates.
func markNew(after *dashboard.Drawing, want, have gpu.State) {
	if !want.MIG {
		return
	}
	at := 0
	for i := range after.Blocks {
		b := &after.Blocks[i]
		same := func(x gpu.Instance) bool {
			return x.Profile == b.Name && x.Placement == gpu.Placement{Start: at, Size: b.Size}
		}
		b.New = b.Name != "" && (!have.MIG || !slices.ContainsFunc(have.Instances, same))
		at += b.Size
	}
}
