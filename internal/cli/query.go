// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// The values of --output.
const (
	outputWide = "wide"
	outputJSON = "json"
	outputYAML = "yaml"
)

// marshal is a value as JSON or YAML, which programs read.
func marshal(value any, output string) (string, error) {
	data, err := json.MarshalIndent(value, "", "  ")
	if err == nil && output == outputYAML {
		data, err = yaml.JSONToYAML(data)
	}
	if err != nil {
		return "", fmt.Errorf("writing %s: %w", output, err)
	}
	return strings.TrimRight(string(data), "\n") + "\n", nil
}

const (
	// mostDrawn is how many GPUs status draws unless it is asked for some nodes, or for all: what fits on a screen.
	mostDrawn = 6
	// mostInDetail is how many nodes of a policy status prints in detail.
	mostInDetail = 10
)

// query is which nodes status is asked for. Empty members leave none out.
type query struct {
	names           []string
	policy, product string
	labels          labels.Selector // nil: any
	notReady        bool
	all             bool      // in detail, however many they are
	ages            time.Time // until when the ages of policies count; zero: until the cluster was read
}

// resolved is the query once it is known which name is that of a policy, which is asked for alone.
func (q query) resolved(s cluster.Snapshot) query {
	if len(q.names) != 1 || slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool { return n.Name == q.names[0] }) ||
		!slices.ContainsFunc(s.Policies, named(q.names[0])) {
		return q
	}
	q.policy, q.names = q.names[0], nil
	return q
}

// check returns an error if a node, the policy or the product does not exist.
func (q query) check(s cluster.Snapshot) error {
	for _, name := range q.names {
		if !slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool { return n.Name == name }) {
			return fmt.Errorf("%q is no node with GPUs; `kubectl get gpunodes` lists those that are", name)
		}
	}
	if q.policy != "" && !slices.ContainsFunc(s.Policies, named(q.policy)) {
		return fmt.Errorf("there is no policy %q; `kubectl get gpusharingpolicies` lists them", q.policy)
	}
	if q.product != "" && !slices.ContainsFunc(s.Nodes, func(n cluster.Node) bool { return has(&n, q.product) }) {
		return fmt.Errorf("no node has GPUs of product %q; write it as the label nvidia.com/gpu.product does", q.product)
	}
	return nil
}

// has reports whether a node has GPUs of a product.
func has(n *cluster.Node, product string) bool {
	return slices.ContainsFunc(n.GPU.Status.Devices, func(d v1alpha1.DeviceStatus) bool { return d.Product == product })
}

// policies are those that are asked for.
func (q query) policies(all []v1alpha1.GPUSharingPolicy) []v1alpha1.GPUSharingPolicy {
	if q.policy == "" {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(p v1alpha1.GPUSharingPolicy) bool { return p.Name != q.policy })
}

// report is what status prints of a node. Its JSON is what -o json and -o yaml print.
type report struct {
	node     *cluster.Node
	standing node.Standing

	Name string `json:"name"`
	// Policy governs the node; empty: none does.
	Policy string `json:"policy,omitempty"`
	Ready  bool   `json:"ready"`
	// Stack is which of NVIDIA's programs offers the GPUs: DevicePlugin, DRA, or Both.
	Stack dra.Stack `json:"stack"`
	// Reason is Ready, or why the node is not; Message what to do about it. State is how far its change is.
	Reason     string           `json:"reason"`
	State      string           `json:"state,omitempty"`
	Message    string           `json:"message,omitempty"`
	Shares     shares           `json:"shares"`
	Products   []string         `json:"products"`
	Advertised map[string]int64 `json:"advertised"`
	Plan       []string         `json:"plan,omitempty"`
	BlockedBy  []string         `json:"blockedBy,omitempty"`
	GPUs       []gpuReport      `json:"gpus"`
}

// gpuReport is how a GPU is shared, and who has it.
type gpuReport struct {
	Index   int               `json:"index"`
	UUID    string            `json:"uuid"`
	Product string            `json:"product"`
	Sharing v1alpha1.Strategy `json:"sharing,omitempty"` // empty: it is not shared, or that is not known
	// Replicas is how often the GPU is advertised, and Used how many of these a container holds; nil: not known, or in
	// MIG mode.
	Replicas *int `json:"replicas,omitempty"`
	Used     *int `json:"used,omitempty"`
	// Users are the pods and processes that hold or use the GPU outside of instances, each once.
	Users     []string         `json:"users,omitempty"`
	Instances []instanceReport `json:"instances,omitempty"`
}

// instanceReport is a MIG instance, and who has it.
type instanceReport struct {
	Profile string   `json:"profile"`
	Start   int      `json:"start"` // memory slices
	Size    int      `json:"size"`
	Users   []string `json:"users,omitempty"`
}

func gpuReports(n *cluster.Node, stack dra.Stack) []gpuReport {
	devices, pods := devicesOf(n), podsByUID(n)
	replicas := replicasOn(n, n.Offered(stack), devices)
	all := make([]gpuReport, 0, len(devices))
	for _, d := range devices {
		r := gpuReport{Index: d.Index, UUID: d.UUID, Product: gpu.ProductLabel(d.Product), Users: holderNames(d, gpu.WholeGPU, pods)}
		if often := replicas[d.UUID]; often > 0 {
			r.Replicas, r.Used = &often, new(len(holdersOf(d)))
		}
		switch {
		case d.State.MIG:
			r.Sharing = v1alpha1.StrategyMIG
		case d.State.MPS != nil:
			r.Sharing = v1alpha1.StrategyMPS
		case replicas[d.UUID] > 1:
			r.Sharing = v1alpha1.StrategyTimeSlicing
		}
		for _, i := range d.State.Instances {
			r.Instances = append(r.Instances, instanceReport{i.Profile, i.Placement.Start, i.Placement.Size, holderNames(d, i.ID, pods)})
		}
		all = append(all, r)
	}
	return all
}

// reports are those of all nodes, by name.
func reports(s cluster.Snapshot) []report {
	pending := unready(s)
	left := stepsLeft(s, pending)
	var all []report
	for i := range s.Nodes {
		r := reportOf(&s.Nodes[i], s.Plugin.StackOf(&s.Nodes[i]), pending[s.Nodes[i].Name])
		if !r.Ready && len(r.Plan) == 0 {
			r.Plan = left[r.Name]
		}
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b report) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// of are the reports that are asked for.
func (q query) of(all []report) []report {
	return slices.DeleteFunc(slices.Clone(all), func(r report) bool {
		return len(q.names) > 0 && !slices.Contains(q.names, r.Name) || q.policy != "" && r.Policy != q.policy || q.notReady && r.Ready ||
			q.product != "" && !has(r.node, q.product) || q.labels != nil && !q.labels.Matches(labels.Set(r.node.Labels))
	})
}

func reportOf(n *cluster.Node, stack dra.Stack, pending pendingNode) report {
	r := report{
		node: n, Name: n.Name, Policy: cmp.Or(pending.policy, n.GPU.Spec.PolicyName), Products: []string{}, Advertised: offers(n, stack),
		Stack: stack, Plan: pending.steps, BlockedBy: blockers(&n.GPU), GPUs: gpuReports(n, stack), Shares: sharesOn(n, stack),
	}
	r.Reason, r.Message = stateOf(n.GPU.Status.Conditions)
	r.standing = node.StandingOf("", r.Reason)
	if pending.NodeName != "" {
		r.Reason, r.State, r.Message = pending.Reason, pending.State, pending.Message
		r.standing = node.StandingOf(node.State(pending.State), pending.Reason)
	}
	if !n.AgentReady && pending.NodeName == "" {
		r.Reason, r.Message = v1alpha1.ReasonAgentNotReporting,
			"the agent on the node is not Ready; look at the pods with app.kubernetes.io/name=gpu-sharing-agent there"
	}
	if r.Ready = r.Reason == v1alpha1.ReasonReady; r.Ready {
		r.standing = node.NodeReady
	}
	for _, d := range n.GPU.Status.Devices {
		if !slices.Contains(r.Products, d.Product) {
			r.Products = append(r.Products, d.Product)
		}
	}
	return r
}

// stands says why a node is not ready, and how far its change is.
func (r *report) stands() string {
	if r.State == "" || r.State == r.Reason {
		return r.Reason
	}
	return r.Reason + " (" + r.State + ")"
}

// doubts are why the status may not be what is so.
type doubts struct {
	// NoController says why no controller runs, so that nothing changes and the objects may be out of date; empty: one
	// does, or the user may not know.
	NoController string `json:"noController,omitempty"`
	// Unread is what is not known, because the user may not read it.
	Unread []string `json:"unread,omitempty"`
}

// encoded is the status as JSON or YAML.
func encoded(s cluster.Snapshot, q query, about doubts, output string) (string, error) {
	type policyReport struct {
		Name     string              `json:"name"`
		Strategy v1alpha1.Strategy   `json:"strategy"`
		Ready    bool                `json:"ready"`
		Reason   string              `json:"reason"`
		Message  string              `json:"message,omitempty"`
		Nodes    v1alpha1.NodeCounts `json:"nodeCounts"`
		Shares   shares              `json:"shares"`
	}
	all := reports(s)
	shown := struct {
		doubts

		Shares     shares         `json:"shares"`
		Namespaces []namespaceUse `json:"namespaces"`
		Policies   []policyReport `json:"policies"`
		Nodes      []report       `json:"nodes"`
	}{doubts: about, Namespaces: []namespaceUse{}, Policies: []policyReport{}, Nodes: q.of(all)}
	if shown.Nodes == nil {
		shown.Nodes = []report{}
	}
	shown.Shares, shown.Namespaces = sumOf(shown.Nodes, anyPolicy), append(shown.Namespaces, byNamespace(shown.Nodes)...)
	policies := q.policies(s.Policies)
	for i := range policies {
		p := &policies[i]
		reason, why := policyState(p)
		shown.Policies = append(shown.Policies, policyReport{
			p.Name, p.Spec.Sharing.Strategy, reason == v1alpha1.ReasonReady, reason, why, p.Status.Nodes, sumOf(all, p.Name),
		})
	}
	return marshal(shown, output)
}
