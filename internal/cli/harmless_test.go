// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	nvidia "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/importer"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	policies "github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
)

// Random clusters, to which what advise or import prints is applied. HARMLESS=5000 plays more of them, HARMLESS_SEED=7 one again.

// eachSeed plays seeds; a failure names its seed.
func eachSeed(t *testing.T, play func(*rand.Rand) string) {
	t.Helper()
	first, count := uint64(1), 200
	if n, err := strconv.Atoi(os.Getenv("HARMLESS")); err == nil {
		count = n
	}
	if n, err := strconv.ParseUint(os.Getenv("HARMLESS_SEED"), 10, 64); err == nil {
		first, count = n, 1
	}
	for seed := first; seed < first+uint64(count); seed++ {
		if harm := play(rand.New(rand.NewPCG(seed, seed))); harm != "" {
			t.Fatalf("HARMLESS_SEED=%d: %s", seed, harm)
		}
	}
}

// adviseWorld is a cluster with policies, nodes in the desired state of these, and pods that run well on them.
type adviseWorld struct {
	cluster.Snapshot

	seen advice.Seen
}

func anyAdviseWorld(t *testing.T, r *rand.Rand) adviseWorld {
	t.Helper()
	w := adviseWorld{seen: advice.Seen{Source: "the test", Time: map[string]time.Duration{}, Concurrent: map[string]int{}}}
	for i := range r.IntN(3) {
		p := policy(t, fmt.Sprintf("p%d", i), slicing)
		p.Spec.Sharing, p.Spec.Priority = history.AnySharing(r), int32(r.IntN(2))
		if history.Maybe(r) {
			p.Spec.NodeSelector.MatchLabels = map[string]string{"team": history.Pick(r, "a", "b")}
		}
		w.Policies = append(w.Policies, p)
	}
	models := []sim.Model{sim.A100, sim.A30, sim.H100, sim.T4, sim.V100, sim.L40S, sim.VGPU}
	for i := range 1 + r.IntN(4) {
		name := fmt.Sprintf("n%d", i)
		model := history.Pick(r, models...)
		n := newNode(t, name, slices.Repeat([]sim.Model{model}, 1+r.IntN(4))...)
		n.Labels["team"], n.Labels["kubernetes.io/hostname"] = history.Pick(r, "a", "b"), name
		if r.IntN(5) == 0 {
			n = publishing(driven(t, n), history.Pick[int64](r, 1, 1, 2, 4))
		}
		w.Nodes = append(w.Nodes, n)
	}
	w.Plugin = devicePluginOf(&w.Snapshot)
	for i := range w.Nodes {
		w.settle(&w.Nodes[i])
		if r.IntN(6) == 0 {
			sicken(&w.Nodes[i])
		}
		w.populate(r, &w.Nodes[i])
	}
	return w
}

// publishing is a node whose GPUs and instances NVIDIA's DRA driver publishes, each GPU with shares.
func publishing(n cluster.Node, shares int64) cluster.Node {
	n.DRANode = cluster.DRANode{DRA: "ResourceSlice " + n.Name, Published: &dra.Pool{Complete: true}, Claims: n.Claims}
	for _, d := range n.GPU.Status.Devices {
		name := "gpu-" + strconv.Itoa(int(d.Index))
		if d.Sharing.MIGMode != v1alpha1.MIGModeEnabled {
			n.Published.Devices = append(n.Published.Devices, dra.Device{Name: name, Type: "gpu", UUID: d.UUID, Shares: shares})
		}
		for _, instance := range d.Sharing.Instances {
			for i := range instance.Count {
				n.Published.Devices = append(n.Published.Devices, dra.Device{
					Name: fmt.Sprintf("%s-mig-%s-%d", name, instance.Profile, i), Type: "mig", Profile: instance.Profile, Parent: d.UUID, Shares: 1,
				})
			}
		}
	}
	return n
}

// sicken lets the first GPU of several be unhealthy.
func sicken(n *cluster.Node) {
	gpus := int64(len(n.GPU.Status.Devices))
	if gpus == 1 {
		return
	}
	n.Unallocatable = map[string]int64{}
	for name, count := range n.Allocatable {
		n.Unallocatable[name] = count / gpus
		n.Allocatable[name] -= count / gpus
	}
	first := n.GPU.Status.Devices[0].UUID
	for i := 0; n.Published != nil && i < len(n.Published.Devices); i++ {
		if d := &n.Published.Devices[i]; d.UUID == first || d.Parent == first {
			d.Tainted = "gpu.nvidia.com/unhealthy=true"
		}
	}
}

// ofHealthy is what of a number a node has that has as many of them on each GPU.
func ofHealthy(n *cluster.Node, count int64) int64 {
	gpus, sick := int64(len(n.GPU.Status.Devices)), len(n.Unallocatable) > 0
	if n.Published != nil {
		sick = slices.ContainsFunc(n.Published.Devices, func(d dra.Device) bool { return d.Tainted != "" })
	}
	if sick {
		return count - count/gpus
	}
	return count
}

// asSeen is a node as policies see it.
func (w *adviseWorld) asSeen(n *cluster.Node) policies.Node {
	shares, _ := n.Published.Shares()
	return policies.Node{Name: n.Name, Labels: n.Labels, Devices: n.GPU.Status.Devices, Stack: w.Plugin.StackOf(n), Shares: shares}
}

// settle brings a node to the desired state of the policy that governs it.
func (w *adviseWorld) settle(n *cluster.Node) {
	by := policies.Rank(w.Policies).Govern(w.asSeen(n)).By
	if by == nil {
		return
	}
	want, err := policies.DesiredState(by, w.asSeen(n))
	if err != nil {
		return // it stays as it was, and the controller names no policy that it has
	}
	n.GPU.Spec.PolicyName = by.Name
	for _, d := range want.Devices {
		for i := range n.GPU.Status.Devices {
			if have := &n.GPU.Status.Devices[i]; have.UUID == d.UUID {
				have.Sharing = d.Sharing
			}
		}
	}
	if w.Plugin.StackOf(n) != dra.DRADriver {
		n.Allocatable = want.Config.Resources
		return
	}
	shares, _ := n.Published.Shares()
	*n = publishing(*n, shares)
}

// populate lets pods run on a node, most of which were observed, and others have run there.
func (w *adviseWorld) populate(r *rand.Rand, n *cluster.Node) {
	w.seen.Time[n.Name] = history.Pick(r, time.Hour, 6*24*time.Hour, 6*24*time.Hour, 6*24*time.Hour)
	namespaces := 1 + r.IntN(2)
	see := func(namespace, pod string) {
		c := advice.Container{Name: usage.Name{Namespace: namespace, Pod: pod, Container: "main"}, Node: n.Name, Held: 1}
		if r.IntN(8) > 0 {
			c.MemoryBytes = new(int64(r.IntN(8)) << 29)
		}
		if history.Maybe(r) {
			c.Compute95 = new(r.Float64() / 8)
			c.Compute = c.Compute95
		}
		w.seen.Containers = append(w.seen.Containers, c)
		w.seen.Concurrent[n.Name]++
	}
	user := history.Pick[*int64](r, nil, new(int64(1000)), new(int64(1000)))
	offers := n.OfferedGPUs(w.Plugin.StackOf(n))
	for _, resource := range slices.Sorted(maps.Keys(offers)) {
		for i := range r.IntN(int(min(offers[resource], 8)) + 1) {
			p := cluster.Pod{
				Namespace: fmt.Sprintf("team-%d", r.IntN(namespaces)), Name: fmt.Sprintf("%s-%d-%d", n.Name, len(n.Pods), i), GPU: true,
				Requests: map[string]int64{resource: 1}, RunsAs: user,
			}
			p.UID, p.Workload = p.Name, fmt.Sprintf("Deployment %s/%d", p.Namespace, r.IntN(9))
			if r.IntN(6) == 0 && r.IntN(int(offers[resource])) > 8 {
				p.Requests[resource] = 2
			}
			if n.Published != nil {
				byClaim(n, &p, resource)
			}
			if r.IntN(10) > 0 {
				see(p.Namespace, p.Name)
			}
			n.Pods = append(n.Pods, p)
		}
	}
	if r.IntN(4) == 0 {
		see("team-0", "gone")
	}
}

// byClaim lets a pod have a device for a resource by a claim, if one is free: its own claim for what it requests, or, every other one, one that
// it names instead.
func byClaim(n *cluster.Node, p *cluster.Pod, resource string) {
	for _, d := range n.Published.Devices {
		used := int64(0)
		for _, c := range n.Claims {
			if c.Devices[0].Device == d.Name {
				used++
			}
		}
		if used >= d.Shares || d.Tainted != "" || resource != deviceResource(d) {
			continue
		}
		n.Claims = append(n.Claims, dra.Claim{
			Name: p.Namespace + "/" + p.Name, Classes: []string{"gpu.nvidia.com"}, Devices: []dra.Allocated{{Pool: n.Name, Device: d.Name}}, Pods: []string{p.UID},
		})
		if len(n.Claims)%2 == 0 {
			p.Requests = nil
		}
		return
	}
}

func deviceResource(d dra.Device) string {
	if d.Profile != "" {
		return plan.ResourceOf(d.Profile)
	}
	return plan.ResourceGPU
}

// requestsOf is what a pod of a node needs to be started again.
func requestsOf(n *cluster.Node, p *cluster.Pod) map[string]int64 {
	if len(p.Requests) > 0 {
		return p.Requests
	}
	needs := map[string]int64{}
	for _, c := range n.Claims {
		if device, found := n.Published.Named(c.Devices[0].Device); found && p.Has(c) {
			needs[deviceResource(device)]++
		}
	}
	return needs
}

// TestAdviceHarmsNobody: whatever is advised, once applied, each pod that runs can be started again on its node, nobody is isolated worse from
// others, no node refuses it, and a node of which too little is known stays as it is.
func TestAdviceHarmsNobody(t *testing.T) {
	advised := 0
	eachSeed(t, func(r *rand.Rand) string {
		w := anyAdviseWorld(t, r)
		all, err := advice.Of(advice.Cluster{Nodes: w.Nodes, Policies: w.Policies, Plugin: w.Plugin, Seen: w.seen, MinAge: 24 * time.Hour})
		if err != nil {
			return ""
		}
		var applied []v1alpha1.GPUSharingPolicy
		for _, a := range all {
			if a.Policy != nil {
				p := *a.Policy.DeepCopy()
				if p.CreationTimestamp = metav1.NewTime(now.Add(time.Hour)); slices.ContainsFunc(w.Policies, named(p.Name)) {
					p.CreationTimestamp = metav1.NewTime(now)
				}
				applied = append(applied, p)
				advised++
			}
		}
		after := policies.Rank(change{applied: applied}.of(w.Snapshot).Policies)
		for _, a := range all {
			for _, n := range a.Fleet.Nodes {
				if a.Policy != nil && after.Govern(w.asSeen(n)).By.Name != a.Policy.Name {
					return fmt.Sprintf("policy %s is advised for node %s, which it does not govern: policies\n%s", a.Policy.Name, n.Name, asYAML(w.Policies))
				}
			}
		}
		for i := range w.Nodes {
			if harm := w.harm(&w.Nodes[i], after); harm != "" {
				return fmt.Sprintf("%s: policies\n%s\nadvised\n%s", harm, asYAML(w.Policies), asYAML(applied))
			}
		}
		return ""
	})
	if advised == 0 {
		t.Fatal("nothing was ever advised")
	}
}

// harm is what policies do to a node that it should not suffer; empty: nothing.
func (w *adviseWorld) harm(n *cluster.Node, after policies.Ranking) string {
	by, before := after.Govern(w.asSeen(n)).By, v1alpha1.Sharing{}
	if at := slices.IndexFunc(w.Policies, named(n.GPU.Spec.PolicyName)); at >= 0 {
		before = w.Policies[at].Spec.Sharing
	}
	if by == nil {
		if before.Strategy != "" {
			return fmt.Sprintf("node %s is governed no more", n.Name)
		}
		return ""
	}
	is := by.Spec.Sharing
	want, err := policies.DesiredState(by, w.asSeen(n))
	if was := policies.Rank(w.Policies).Govern(w.asSeen(n)).By; err != nil && was != nil && was.Name == by.Name && before.Strategy == "" {
		return "" // it refused that policy already
	}
	if fmt.Sprint(asYAML(is)) == fmt.Sprint(asYAML(before)) {
		return ""
	}
	if w.seen.Time[n.Name] < 24*time.Hour {
		return fmt.Sprintf("node %s changes, though it was observed for %s only", n.Name, w.seen.Time[n.Name])
	}
	if err != nil {
		return fmt.Sprintf("node %s refuses policy %s: %v", n.Name, by.Name, err)
	}
	if published, needed, other := n.OtherShares(is); other && before.Strategy != "" {
		return fmt.Sprintf("node %s publishes %d shares of each GPU, and %s needs %d", n.Name, published, asYAML(is), needed)
	}
	if harm := harmToPods(n, want, before, is); harm != "" {
		return harm
	}
	return lessIsolation(n, before, is)
}

// harmToPods is what the pods of a node suffer from another sharing of its GPUs; empty: nothing.
func harmToPods(n *cluster.Node, want policies.Desired, before, is v1alpha1.Sharing) string {
	sums := map[string]int64{}
	for i := range n.Pods {
		p := &n.Pods[i]
		for name, count := range requestsOf(n, p) {
			sums[name] += count
			if count > 1 && want.Config.Replicas[name] > 1 && refuses(is) && !refuses(before) {
				return fmt.Sprintf("node %s refuses pod %s two replicas", n.Name, p.Name)
			}
			if is.Strategy == v1alpha1.StrategyMPS && before.Strategy != is.Strategy && p.RunsAs == nil {
				return fmt.Sprintf("node %s gets MPS, and nobody knows as whom pod %s runs", n.Name, p.Name)
			}
		}
	}
	for name, sum := range sums {
		if ofHealthy(n, want.Config.Resources[name]) < sum {
			return fmt.Sprintf("node %s offers %v under %s, and its pods request %d %s", n.Name, want.Config.Resources, asYAML(is), sum, name)
		}
	}
	return ""
}

// lessIsolation is how another sharing of a node's GPUs isolates its pods less.
func lessIsolation(n *cluster.Node, before, is v1alpha1.Sharing) string {
	order := []v1alpha1.Strategy{v1alpha1.StrategyTimeSlicing, v1alpha1.StrategyMPS, v1alpha1.StrategyMIG, v1alpha1.StrategyExclusive}
	if slices.Index(order, is.Strategy) < slices.Index(order, before.Strategy) {
		return fmt.Sprintf("node %s isolates less: %s instead of %s", n.Name, is.Strategy, before.Strategy)
	}
	namespaces := map[string]bool{}
	for _, p := range n.Pods {
		if len(requestsOf(n, &p)) > 0 {
			namespaces[p.Namespace] = true
		}
	}
	if shared := is.Strategy == v1alpha1.StrategyTimeSlicing || is.Strategy == v1alpha1.StrategyMPS; shared && len(namespaces) > 1 && before.Strategy != is.Strategy {
		return fmt.Sprintf("node %s isolates namespaces no more", n.Name)
	}
	return ""
}

func refuses(s v1alpha1.Sharing) bool {
	return s.Strategy == v1alpha1.StrategyMPS || s.Strategy == v1alpha1.StrategyTimeSlicing && (s.Advertise == nil ||
		s.Advertise.FailRequestsGreaterThanOne == nil || *s.Advertise.FailRequestsGreaterThanOne)
}

func asYAML(v any) string {
	text, _ := yaml.Marshal(v)
	return string(text)
}

// offered is what NVIDIA's plugin offers of GPUs with a configuration; ok is false if it does not start.
func offered(data, strategy string, devices []v1alpha1.DeviceStatus) (offers map[string]int64, ok bool) {
	config := nvidia.Config{}
	if yaml.Unmarshal([]byte(data), &config) != nil || config.Version != "" && config.Version != "v1" {
		return nil, false
	}
	nvidia.DisableResourceNamingInConfig(&config)
	if config.Flags.MigStrategy != nil && strategy == "" {
		strategy = *config.Flags.MigStrategy
	}
	offers, profiles := unreplicated(strategy, devices)
	if strategy == "single" && len(profiles) > 1 {
		return nil, false
	}
	byMIG := slices.ContainsFunc(devices, func(d v1alpha1.DeviceStatus) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled })
	if config.Sharing.SharingStrategy() == nvidia.SharingStrategyMPS && byMIG {
		return nil, false
	}
	if replicated := config.Sharing.ReplicatedResources(); replicated != nil {
		replicate(offers, replicated.Resources)
	}
	return offers, true
}

// unreplicated is what NVIDIA's plugin offers of GPUs that it does not replicate, and the profiles behind nvidia.com/gpu.
func unreplicated(strategy string, devices []v1alpha1.DeviceStatus) (offers map[string]int64, profiles map[string]bool) {
	offers, profiles = map[string]int64{}, map[string]bool{}
	for _, d := range devices {
		switch {
		case d.Sharing.MIGMode != v1alpha1.MIGModeEnabled:
			offers["nvidia.com/gpu"]++
			profiles["whole"] = true
		case strategy == "mixed":
			for _, i := range d.Sharing.Instances {
				offers[plan.ResourceOf(i.Profile)] += int64(i.Count)
			}
		case strategy == "single":
			for _, i := range d.Sharing.Instances {
				offers["nvidia.com/gpu"] += int64(i.Count)
				profiles[i.Profile] = true
			}
		default:
			offers["nvidia.com/gpu"]++
		}
	}
	return offers, profiles
}

// replicate multiplies and renames what NVIDIA's plugin offers.
func replicate(offers map[string]int64, resources []nvidia.ReplicatedResource) {
	for _, one := range resources {
		name := string(one.Name)
		if count := offers[name]; count > 0 {
			delete(offers, name)
			if one.Rename != "" {
				name = string(one.Rename)
			}
			offers[name] = count * int64(one.Replicas)
		}
	}
}

// cutAtRandom partitions GPUs of simulated hardware, if they can be.
func cutAtRandom(t *testing.T, r *rand.Rand, hardware *sim.Hardware) {
	t.Helper()
	inventory, err := hardware.Observe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range inventory.Devices {
		d := inventory.Devices[i]
		if !d.MIGCapable || history.Maybe(r) {
			continue
		}
		var profiles []string
		for _, p := range d.Profiles {
			profiles = append(profiles, p.Name)
		}
		placed, err := mig.Pack(d, history.Layout(r, profiles))
		if err != nil {
			continue
		}
		if err := hardware.SetMIG(t.Context(), d.UUID, true); err != nil {
			t.Fatal(err)
		}
		for _, p := range placed.Create {
			if err := hardware.CreateInstance(t.Context(), d.UUID, p.Profile, p.Placement); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestImportChangesNothingOfRandomClusters: what import prints of nodes that are shared by hand, applied, changes neither what a node offers nor
// a GPU, and needs no pod to end. Nodes that it leaves out stay without a policy.
func TestImportChangesNothingOfRandomClusters(t *testing.T) {
	described := 0
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	eachSeed(t, func(r *rand.Rand) string {
		is := importer.Cluster{ConfigMap: "ConfigMap nvidia/config", Configs: map[string]string{}, GPUOperator: true}
		is.MIGStrategy = history.Pick(r, "", "", "mixed", "single")
		for _, key := range []string{"a", "b", "c"} {
			is.Configs[key] = history.PluginConfig(r)
		}
		is.Default = history.Pick(r, "", "a")
		for i := range 1 + r.IntN(4) {
			if n, ok := byHand(t, r, &is, fmt.Sprintf("n%d", i)); ok {
				is.Nodes = append(is.Nodes, n)
			}
		}
		if is.Classes = []dra.Class{{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"}}; history.Maybe(r) {
			is.Classes = append(is.Classes, dra.Class{Name: "small", Resource: "nvidia.com/mig-1g.5gb"})
		}
		d := importer.Describe(is)
		s := snapshotOf(is.Nodes...)
		s.DRA = cluster.DRA{ServesClasses: true, ServesTaintRules: true, Classes: is.Classes}
		for _, p := range d.Policies {
			s.Policies = append(s.Policies, v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: p.Name, Generation: 1, CreationTimestamp: metav1.NewTime(now)}, Spec: p.Spec})
			described++
		}
		if change := changed(s); change != "" {
			return change
		}
		return takenUndescribed(is.Nodes, d.Rest, policies.Rank(s.Policies))
	})
	if described == 0 {
		t.Fatal("nothing was ever described")
	}
}

// changed is what policies would change of a node that they govern; empty: nothing.
func changed(s cluster.Snapshot) string {
	for _, n := range rollout.Decide(s).Nodes {
		switch {
		case n.Policy == "":
		case n.State == "Unsupported" || n.State == "Failed":
			return fmt.Sprintf("node %s refuses policy %s: %s", n.Node, n.Policy, n.Message)
		case len(n.Plan) > 0 || len(n.Blockers) > 0:
			return fmt.Sprintf("node %s would be changed: %v, %v", n.Node, n.Plan, n.Blockers)
		case !maps.Equal(n.Expected, n.Advertised):
			return fmt.Sprintf("node %s offers %v, and would offer %v", n.Node, n.Advertised, n.Expected)
		}
	}
	return ""
}

// takenUndescribed is which node a policy governs though import leaves it out; empty: none.
func takenUndescribed(nodes []cluster.Node, rest []string, ranking policies.Ranking) string {
	for i := range nodes {
		n := &nodes[i]
		by := ranking.Govern(policies.Node{Name: n.Name, Labels: n.Labels, Devices: n.GPU.Status.Devices}).By
		for _, why := range rest {
			if by != nil && strings.HasPrefix(why, "node "+n.Name+":") {
				return fmt.Sprintf("policy %s takes node %s, which is not described: %s", by.Name, n.Name, why)
			}
		}
	}
	return ""
}

// byHand is a node that is shared by hand; ok is false if NVIDIA's plugin does not start there.
func byHand(t *testing.T, r *rand.Rand, is *importer.Cluster, name string) (n cluster.Node, ok bool) {
	t.Helper()
	simulated, err := sim.NewNode(name, slices.Repeat([]sim.Model{history.Pick(r, sim.A100, sim.H100, sim.T4, sim.V100)}, 1+r.IntN(3))...)
	if err != nil {
		t.Fatal(err)
	}
	hardware := sim.On(simulated)
	cutAtRandom(t, r, hardware)
	n = nodeWith(t, name, hardware)
	delete(n.Labels, "pool")
	n.Labels["kubernetes.io/hostname"], n.Labels["karpenter.sh/nodepool"] = name, history.Pick(r, "x", "y")
	n.Labels["karpenter.k8s.aws/instance-size"] = history.Pick(r, "large", "small")
	if r.IntN(4) == 0 {
		n = publishing(driven(t, n), history.Pick[int64](r, 0, 1, 1, 2, 4))
		if devices := n.Published.Devices; len(devices) > 0 && history.Maybe(r) {
			p := cluster.Pod{Namespace: "team", Name: name, UID: name, GPU: true, Controller: "ReplicaSet", Requests: map[string]int64{deviceResource(devices[0]): 1}}
			byClaim(&n, &p, deviceResource(devices[0]))
			n.Pods = append(n.Pods, p)
		}
		return n, true
	}
	key := history.Pick(r, "", "a", "b", "c")
	if key != "" {
		n.Labels[v1alpha1.LabelConfig] = key
	} else {
		key = is.Default
	}
	n.Allocatable, ok = offered(is.Configs[key], is.MIGStrategy, n.GPU.Status.Devices)
	if !ok {
		n.Allocatable = map[string]int64{}
		return n, r.IntN(4) == 0
	}
	if offers := slices.Sorted(maps.Keys(n.Allocatable)); len(offers) > 0 {
		resource := offers[0]
		for i := range r.IntN(int(min(n.Allocatable[resource], 4)) + 1) {
			pod := fmt.Sprintf("%s-%d", name, i)
			n.Pods = append(n.Pods, cluster.Pod{Namespace: "team", Name: pod, UID: pod, GPU: true, Controller: "ReplicaSet", Requests: map[string]int64{resource: 1}})
		}
	}
	return n, true
}
