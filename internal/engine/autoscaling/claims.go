// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// An agent can report of its node whatever it likes, and what is written for a group holds for all its nodes. So where nodes of one
// instance type report different GPUs, or others than before, their kubelets and the other nodes decide:
//
//	claims → without those of more GPUs than their kubelets list → confirmed by a kubelet, or known and reported by most → the most GPUs
//
// A claim that loses by that is reported with its node (ReasonNodesDisagree). GPUs die, so a node with fewer of them is no liar.

// claim is the GPUs that some nodes of one instance type report.
type reportedGPUs struct {
	product   string
	count     int
	reported  []v1alpha1.DeviceStatus // by the first of the nodes
	devices   []v1alpha1.DeviceStatus // as a new node has them
	resources map[string]int64        // that such a node advertises under the policy that governs it; nil: not known
	nodes     []*cluster.Node
	confirmed bool // a kubelet lists what a node with these GPUs advertises
}

// reportedGPUsOf are the different GPUs that nodes of one instance type report.
func reportedGPUsOf(nodes []*cluster.Node) []*reportedGPUs {
	var all []*reportedGPUs
	for _, n := range nodes {
		reported := plan.WithProfiles(n.GPU.Status.Devices)
		at := slices.IndexFunc(all, func(c *reportedGPUs) bool { return slices.EqualFunc(c.reported, reported, alike) })
		if at < 0 {
			c := &reportedGPUs{product: productOf(n), count: len(reported), reported: reported}
			for _, d := range reported {
				c.devices = append(c.devices, fresh(d, int(d.Index)))
			}
			all, at = append(all, c), len(all)
		}
		all[at].nodes = append(all[at].nodes, n)
	}
	return all
}

// alike reports whether two GPUs are the same hardware, as far as sharing them goes.
func alike(a, b v1alpha1.DeviceStatus) bool {
	return a.Product == b.Product && a.MemoryMiB == b.MemoryMiB && a.ComputeCapability == b.ComputeCapability && a.Virtual == b.Virtual &&
		a.MIGCapable == b.MIGCapable && slices.EqualFunc(a.Profiles, b.Profiles, func(a, b v1alpha1.ProfileStatus) bool {
		return a.Name == b.Name && a.ID == b.ID && a.Slices == b.Slices && a.MemoryMiB == b.MemoryMiB && a.Max == b.Max && a.Size == b.Size &&
			slices.Equal(a.Starts, b.Starts)
	})
}

// settled is the claim that counts of the nodes of one instance type, and the others that a person should look at. The claim is nil if
// none counts; ambiguous is set if that is because the nodes have different products.
type settled struct {
	claim     *reportedGPUs
	doubts    []*reportedGPUs
	ambiguous bool
}

// settle decides which claim of the nodes of one instance type counts. last is what a policy reported of it before; nil: nothing.
func settle(nodes []*cluster.Node, last *v1alpha1.NodeGroupStatus, ranking policy.Ranking) settled {
	claims := reportedGPUsOf(nodes)
	known := func(c *reportedGPUs) bool {
		return last != nil && c.product == last.Product && c.count == int(last.GPUsPerNode)
	}
	if len(claims) == 1 && (last == nil || known(claims[0])) && !claims[0].refuted() {
		return settled{claim: claims[0]}
	}
	claims = weighed(claims, ranking)
	kept, backed := backedOf(claims, last, known, len(nodes))
	var s settled
	other := func(c *reportedGPUs) bool { return c.product != kept[0].product }
	if s.ambiguous = len(backed) != 1 && slices.ContainsFunc(kept, other); s.ambiguous {
		return s
	}
	if len(backed) > 0 {
		s.claim = slices.MaxFunc(backed, func(a, b *reportedGPUs) int {
			return cmp.Or(cmp.Compare(a.count, b.count), cmp.Compare(len(a.nodes), len(b.nodes)))
		})
	}
	s.doubts = only(claims, s.isDoubt)
	return s
}

// isDoubt reports whether a person should look at a claim beside the one that counts.
func (s settled) isDoubt(c *reportedGPUs) bool {
	if c == s.claim || s.claim == nil {
		return c != s.claim
	}
	if c.product == s.claim.product {
		return !c.confirmed && c.count >= s.claim.count // GPUs die
	}
	return true
}

// backedOf are the claims of so many nodes that their kubelets do not refute, and of these the ones that something confirms.
func backedOf(claims []*reportedGPUs, last *v1alpha1.NodeGroupStatus, known func(*reportedGPUs) bool, nodes int) (kept, backed []*reportedGPUs) {
	kept = slices.DeleteFunc(slices.Clone(claims), (*reportedGPUs).refuted)
	if last != nil && slices.ContainsFunc(kept, func(c *reportedGPUs) bool { return c.product == last.Product }) { // no kubelet lists products
		kept = slices.DeleteFunc(kept, func(c *reportedGPUs) bool { return c.product != last.Product })
	}
	backed = only(kept, func(c *reportedGPUs) bool { return c.confirmed || known(c) && 2*len(c.nodes) > nodes })
	if len(backed) == 0 {
		backed = only(kept, known)
	}
	if len(backed) == 0 && len(kept) == 1 && last == nil {
		backed = kept
	}
	return kept, backed
}

func only(claims []*reportedGPUs, is func(*reportedGPUs) bool) []*reportedGPUs {
	return slices.DeleteFunc(slices.Clone(claims), func(c *reportedGPUs) bool { return !is(c) })
}

// weighed are the claims with what a node would advertise by each, and whether a kubelet lists that. Those by which it would advertise
// the same are one: drivers differ in the MIG profiles that they list.
func weighed(claims []*reportedGPUs, ranking policy.Ranking) []*reportedGPUs {
	var all []*reportedGPUs
	for _, c := range claims {
		c.resources = advertises(c, c.nodes[0], ranking)
		c.confirmed = slices.ContainsFunc(c.nodes, func(n *cluster.Node) bool {
			listed := listedGPUs(n)
			return maps.Equal(listed, map[string]int64{plan.ResourceGPU: int64(c.count)}) || len(listed) > 0 && maps.Equal(listed, advertises(c, n, ranking))
		})
		at := slices.IndexFunc(all, func(o *reportedGPUs) bool {
			return o.product == c.product && o.count == c.count && maps.Equal(o.resources, c.resources)
		})
		if at < 0 {
			all = append(all, c)
			continue
		}
		all[at].nodes = append(all[at].nodes, c.nodes...)
		all[at].confirmed = all[at].confirmed || c.confirmed
	}
	return all
}

// advertises is what a node with the GPUs of a claim and the labels of another node advertises once it is ready; nil: no policy governs
// it, or none can be honoured there.
func advertises(c *reportedGPUs, as *cluster.Node, ranking policy.Ranking) map[string]int64 {
	n := policy.Node{Name: as.Name, Labels: as.Labels, Devices: c.devices}
	by := ranking.Govern(n).By
	if by == nil {
		return nil
	}
	want, err := policy.DesiredState(by, n)
	if err != nil {
		return nil
	}
	return want.Config.Resources
}

// refuted reports whether the kubelet of each of the nodes lists fewer GPUs, instances and replicas than the GPUs that they report. A
// kubelet that lists none says nothing: NVIDIA's device plugin does not run yet, or its DRA driver offers the GPUs.
func (c *reportedGPUs) refuted() bool {
	return !slices.ContainsFunc(c.nodes, func(n *cluster.Node) bool {
		sum := int64(0)
		for _, count := range listedGPUs(n) {
			sum += count
		}
		return sum == 0 || sum >= int64(c.count)
	})
}

// listedGPUs is what the kubelet of a node lists of GPUs and instances.
func listedGPUs(n *cluster.Node) map[string]int64 {
	listed := advertised(n)
	maps.DeleteFunc(listed, func(name string, _ int64) bool { return !cluster.IsGPUResource(name) })
	return listed
}

// advertised are the resources of NVIDIA that the kubelet of a node lists, each with its number, which is not 0.
func advertised(n *cluster.Node) map[string]int64 {
	listed := maps.Clone(n.Allocatable)
	maps.DeleteFunc(listed, func(_ string, count int64) bool { return count <= 0 })
	return listed
}

// doubt tells of the nodes whose agents nobody confirms.
func (s settled) doubt(g *group) string {
	if len(s.doubts) == 0 {
		return ""
	}
	var parts, names []string
	for _, c := range s.doubts {
		n := c.nodes[0]
		names = append(names, n.Name)
		lists := "lists no GPU"
		if listed := listedGPUs(n); len(listed) > 0 {
			lists = "lists " + text(listed)
		}
		parts = append(parts, fmt.Sprintf("node %s reports %d × %s, and its kubelet %s", n.Name, c.count, c.product, lists))
	}
	goesBy := "so nothing new is written"
	if s.claim != nil {
		goesBy = fmt.Sprintf("so the operator goes by %d × %s", s.claim.count, s.claim.product)
	}
	return fmt.Sprintf("The agents of %s report GPUs that neither their kubelets nor other nodes confirm: %s; %s. Look at the pods with "+
		"app.kubernetes.io/name=gpu-sharing-agent on %s", g.Ref, format.List(parts), goesBy, format.List(names))
}

// hardwareOf keeps one GPU of each product: as most nodes report it, of those that tell its MIG profiles if any does. What one node
// alone reports of a GPU that the operator knows counts for nothing: it would hold for all groups that have such GPUs.
func hardwareOf(nodes []cluster.Node) hardware {
	reported := map[string][]*reportedGPUs{}
	for i := range nodes {
		n := &nodes[i]
		seen := map[string]bool{}
		for _, d := range plan.WithProfiles(n.GPU.Status.Devices) {
			if seen[d.Product] {
				continue
			}
			seen[d.Product] = true
			all := reported[d.Product]
			at := slices.IndexFunc(all, func(c *reportedGPUs) bool { return alike(c.devices[0], d) })
			if at < 0 {
				all, at = append(all, &reportedGPUs{product: d.Product, devices: []v1alpha1.DeviceStatus{d}}), len(all)
				reported[d.Product] = all
			}
			all[at].nodes = append(all[at].nodes, n)
		}
	}
	known := hardware{}
	for product, claims := range reported {
		best := slices.MaxFunc(claims, func(a, b *reportedGPUs) int {
			x, y := len(a.devices[0].Profiles), len(b.devices[0].Profiles)
			return cmp.Or(cmp.Compare(min(x, 1), min(y, 1)), cmp.Compare(len(a.nodes), len(b.nodes)), cmp.Compare(x, y))
		})
		if _, listed := catalogue.Find(product); !listed || len(best.nodes) > 1 {
			known[product] = fresh(best.devices[0], 0)
		}
	}
	return known
}
