// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/advice"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/mig"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// Random clusters to which what advise or import prints is applied, with the command line, the controllers and the agents that ship, beside
// NVIDIA's programs of test/nodesim. internal/cli plays thousands of such clusters as values. Variables as for CLUSTER_HISTORIES:
//
//	HARMLESS_CLUSTERS=100  so many of them for each rule; _FROM=7: from that seed

// harmless plays random clusters, usual if nothing else is asked for, on an API server of its own.
func harmless(t *testing.T, usual uint64, plays func(*run, *rand.Rand)) {
	t.Helper()
	t.Parallel()
	s := history.NewStudy(t, "HARMLESS_CLUSTERS", usual, usual)
	site := newSite(t)
	for seed, more := s.Next(); more; seed, more = s.Next() {
		var r *run
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r = bareRun(t, site, seed)
			plays(r, rand.New(rand.NewPCG(seed, seed)))
			if testing.Verbose() {
				t.Log(strings.Join(r.told, "\n"))
			}
		})
		s.Note(seed, r.Broken())
		if broken := r.Broken(); broken != "" {
			t.Errorf("HARMLESS_CLUSTERS=1 HARMLESS_CLUSTERS_FROM=%d: %s\n%s", seed, broken, strings.Join(r.told, "\n"))
		}
	}
	s.Report(t)
	if denied, err := site.cluster.Denied(t.Context(), env.ControllerWrites); err != nil || denied > 0 {
		t.Errorf("%d writes that config/manager/admission.yaml does not list, %v", denied, err)
	}
}

// TestImportHarmsNobodyInAWholeCluster: what import prints of nodes that are shared by hand, applied, changes no allocatable and no GPU, ends and
// restarts no pod, keeps no new one off, and is Ready. While NVIDIA's plugin restarts once, the kubelet may show none.
func TestImportHarmsNobodyInAWholeCluster(t *testing.T) {
	described := 0
	const usual = 6 // import describes none of the first four
	harmless(t, usual, func(s *run, random *rand.Rand) {
		s.sharedByHand(random)
		before := s.populated(random)
		s.record.begin()
		printed := s.kubectl("import")
		file := filepath.Join(s.dir, "policies.yaml")
		s.Expect(os.WriteFile(file, []byte(printed), 0o600)).To(Succeed())
		if strings.Contains(printed, "\n---\n") {
			if plan := s.kubectl("plan", "-f", file); !strings.Contains(plan, "OUTCOME NonDisruptive") {
				s.Breaks("foretold", "plan says: %s", plan)
			}
		}
		s.forget()
		policies := s.applies(printed)
		described += len(policies)
		s.rest(8*time.Hour, 150)
		const reads = 3 // of NVIDIA's programs on a node its ConfigMap
		if s.others["POST namespaces/gpu-operator/pods"] > reads*len(s.machines) {
			s.Breaks("unchanged", "NVIDIA's programs restart more than once: %s", s.counted())
		}
		if s.others["POST namespaces/"+draSpace+"/pods"] > 0 {
			s.Breaks("unchanged", "NVIDIA's DRA driver restarts: %s", s.counted())
		}
		s.unchanged(before)
		s.honoured(policies...)
		if s.Broken() != "" {
			s.Tell("import printed:\n%s", printed)
		}
	})
	if described == 0 && !t.Failed() {
		t.Error("nothing was ever described")
	}
}

// TestAdviceHarmsNobodyInAWholeCluster: what is advised, applied, ends no pod; and once the pods have ended by themselves and their nodes have
// changed, each of them can be started again on its node, and is isolated as well as before.
func TestAdviceHarmsNobodyInAWholeCluster(t *testing.T) {
	advised := 0
	const usual = 4
	harmless(t, usual, func(s *run, random *rand.Rand) {
		s.sharedByPolicies(random)
		before := s.populated(random)
		printed := s.kubectl("advise", "--prometheus", s.observed(random))
		policies := s.applies(printed)
		advised += len(policies)
		s.rest(8*time.Hour, 150)
		s.lives(before)
		s.startsAgain(before)
		s.honoured(policies...)
		if s.Broken() != "" {
			s.Tell("advise printed:\n%s", printed)
		}
	})
	if advised == 0 && !t.Failed() {
		t.Error("nothing was ever advised")
	}
}

// populated starts pods on all nodes, and returns those that run once the cluster rests.
func (s *run) populated(random *rand.Rand) running {
	s.t.Helper()
	for _, p := range s.Machines() {
		s.populates(p, random)
	}
	s.calms()
	return s.running()
}

// sharedByHand makes nodes with instances and configurations of NVIDIA's plugin that people wrote.
func (s *run) sharedByHand(random *rand.Rand) {
	s.t.Helper()
	configs := map[string]string{}
	for _, key := range []string{"a", "b", "c"} {
		configs[key] = history.PluginConfig(random)
	}
	s.Expect(s.client.Create(s.t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: nvidiaSpace, Name: "by-hand"}, Data: configs})).To(Succeed())
	plugin, strategy := history.Pick(random, "name: by-hand", "name: by-hand, default: a"), history.Pick(random, "", "", "{strategy: mixed}", "{strategy: single}")
	if strategy == "" {
		strategy = "{}"
	}
	s.apply(fmt.Sprintf(`{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy},
  spec: {daemonsets: {updateStrategy: RollingUpdate}, devicePlugin: {enabled: true, config: {%s}}, mig: %s}}`, plugin, strategy))
	s.Tell("keys %v; %s; mig %s", configs, plugin, strategy)
	s.record = newRecord(s.fleet)
	s.driven()
	for i := range 1 + random.IntN(3) {
		labels := s.orDriven(map[string]string{"karpenter.k8s.aws/instance-size": history.Pick(random, "large", "small"), "team": history.Pick(random, "x", "y")})
		if key := history.Pick(random, "", "a", "b", "c"); key != "" {
			labels[v1alpha1.LabelConfig] = key
		}
		model := history.Pick(random, sim.A100, sim.H100, sim.T4, sim.V100)
		p := s.place(fmt.Sprintf("n%d", i), labels, slices.Repeat([]sim.Model{model}, 1+random.IntN(3))...)
		s.cuts(p, random)
		p.restartDelay = 30 * time.Minute // a plugin that does not start tries again, and this cluster would never rest
		p.touches = func(op sim.Op, uuid string, _ int) error {
			s.Breaks("harmless", "GPU %s of %s is changed (%s)", uuid, p.name, op)
			return nil
		}
		s.enter(p)
		s.Tell("node %s: %d × %v, %v, first GPU %v", p.name, len(p.devices()), model, labels, bornAs(p.devices()[0]))
	}
	s.runs()
}

// cuts partitions GPUs as a person did.
func (s *run) cuts(p *place, random *rand.Rand) {
	s.t.Helper()
	for _, d := range p.devices() {
		if !d.MIGCapable || history.Maybe(random) {
			continue
		}
		var profiles []string
		for _, o := range d.Profiles {
			profiles = append(profiles, o.Name)
		}
		placed, err := mig.Pack(d, history.Layout(random, profiles))
		if err != nil {
			continue
		}
		s.Expect(p.hardware.SetMIG(s.t.Context(), d.UUID, true)).To(Succeed())
		for _, i := range placed.Create {
			s.Expect(p.hardware.CreateInstance(s.t.Context(), d.UUID, i.Profile, i.Placement)).To(Succeed())
		}
	}
}

// sharedByPolicies makes nodes that policies share.
func (s *run) sharedByPolicies(random *rand.Rand) {
	s.t.Helper()
	s.apply(clusterPolicy)
	s.record = newRecord(s.fleet)
	s.driven()
	for i := range 1 + random.IntN(3) {
		labels := s.orDriven(map[string]string{"team": history.Pick(random, "a", "b")})
		model := history.Pick(random, sim.A100, sim.A30, sim.H100, sim.T4, sim.V100, sim.L40S)
		p := s.place(fmt.Sprintf("n%d", i), labels, slices.Repeat([]sim.Model{model}, 1+random.IntN(2))...)
		p.restartDelay = 0
		p.touches = func(op sim.Op, uuid string, instance int) error { return s.takes(p, op, uuid, instance) }
		s.enter(p)
		s.Tell("node %s: %d × %v, %v", p.name, len(p.devices()), model, labels)
	}
	s.runs()
	for i := range 1 + random.IntN(2) {
		p := v1alpha1.GPUSharingPolicy{Spec: v1alpha1.GPUSharingPolicySpec{Sharing: history.AnySharing(random)}}
		sharing, err := yaml.Marshal(p.Spec.Sharing)
		s.Expect(err).NotTo(HaveOccurred())
		inline, err := yaml.YAMLToJSON(sharing)
		s.Expect(err).NotTo(HaveOccurred())
		selector := history.Pick(random, "{}", "{matchLabels: {team: a}}", "{matchLabels: {team: b}}")
		s.apply(fmt.Sprintf(`{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: p%d},
  spec: {priority: %d, nodeSelector: %s, sharing: %s, rollout: {maxUnavailable: "100%%"}}}`, i, random.IntN(2), selector, inline))
		s.Tell("policy p%d for %s: %s", i, selector, inline)
	}
	s.calms()
}

// calms lets time pass until nobody writes for a while.
func (s *run) calms() {
	const rounds, enough = 120, 3
	for quiet, n := 0, 0; quiet < enough && n < rounds; n++ {
		if quiet++; s.round() {
			quiet = 0
		}
		s.clock.skip(10 * time.Second)
	}
}

// runs starts the controllers, and waits for the agents.
func (s *run) runs() {
	s.t.Helper()
	s.leader = s.lead()
	s.until("every agent reports", func() bool {
		s.round()
		all := s.world().Nodes
		for i := range all {
			if !all[i].AgentReady || len(all[i].GPU.Status.Devices) == 0 {
				return false
			}
		}
		return len(all) == len(s.machines)
	})
	s.calms()
}

// populates lets pods run on what a node offers, some of which select it by the product of its GPUs.
func (s *run) populates(p *place, random *rand.Rand) {
	s.t.Helper()
	const most = 4
	node, offers := s.node(p.name), s.offers(p)
	team, user := history.Pick(random, users, users, "other"), history.Pick(random, 0, 1000, 1000)
	for _, resource := range slices.Sorted(maps.Keys(offers)) {
		for range random.IntN(int(min(offers[resource], most)) + 1) {
			s.serial++
			pod := podOf("replica", fmt.Sprintf("%s-%d", p.name, s.serial), p.name)
			if pod.Namespace = users; history.Maybe(random) {
				pod.Namespace = team
			}
			if user > 0 {
				pod.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64(user))}
			}
			if product := node.Labels["nvidia.com/gpu.product"]; random.IntN(6) == 0 && product != "" {
				pod.Spec.NodeSelector = map[string]string{"nvidia.com/gpu.product": product}
			}
			pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(resource): one}
			why := s.starts(pod)
			s.Tell("pod %s/%s: %s, runs as %d, selects %v%s", pod.Namespace, pod.Name, resource, user, pod.Spec.NodeSelector, why)
		}
	}
}

// starts creates a pod on its node; why says what keeps it off.
func (s *run) starts(pod *corev1.Pod) (why string) {
	s.t.Helper()
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: pod.Namespace}}
	if err := s.client.Create(s.t.Context(), space); client.IgnoreAlreadyExists(err) != nil {
		s.Expect(err).NotTo(HaveOccurred())
	}
	if place := s.places[pod.Spec.NodeName]; place.isDriven() {
		return s.schedules(pod)
	}
	s.Expect(s.client.Create(s.t.Context(), pod)).To(Succeed())
	return ""
}

// kubectl runs a command of the plugin, as an administrator.
func (s *run) kubectl(args ...string) string {
	s.t.Helper()
	kubeconfig := filepath.Join(s.dir, "kubeconfig")
	s.Expect(env.WriteKubeconfig(s.cluster.Config, kubeconfig)).To(Succeed())
	out := &strings.Builder{}
	p := cli.Program{In: strings.NewReader(""), Out: out, Clock: s.clock}
	if err := p.Run(s.t.Context(), append(args, "--kubeconfig", kubeconfig)); err != nil {
		s.Tell("%s: %v", args[0], err)
		var outcome cli.OutcomeError // of plan
		if !strings.Contains(err.Error(), "--min-age") && (!errors.As(err, &outcome) || outcome != cli.NonDisruptive) {
			s.Breaks("answers", "%s: %v", args[0], err)
		}
	}
	return out.String()
}

// applies does what kubectl apply does with what was printed, and returns the names of the policies.
func (s *run) applies(printed string) (policies []string) {
	s.t.Helper()
	documents := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(printed)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return policies
		}
		s.Expect(err).NotTo(HaveOccurred())
		o := &unstructured.Unstructured{}
		s.Expect(yaml.Unmarshal(document, &o.Object)).To(Succeed())
		if len(o.Object) == 0 {
			continue
		}
		policies = append(policies, o.GetName())
		s.Tell("applies %s", document)
		err = s.client.Apply(s.t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("kubectl"), client.ForceOwnership)
		if err != nil {
			s.Breaks("accepted", "the API server refuses what was printed: %v", err)
		}
	}
}

// running is what runs in a cluster at rest.
type running struct {
	nodes map[string]shared
	pods  map[string]corev1.Pod // of users, by UID
}

// shared is how the GPUs of a node are shared, as NVIDIA's programs and the hardware show it.
type shared struct {
	offers     map[string]int64
	gpus       map[string]born
	devices    map[string][]string // that the kubelet has given to pods, by namespace/name
	isolation  int                 // 1 time-slicing, 2 MPS, 3 MIG, 4 none shares a GPU
	governed   bool
	namespaces map[string]bool // of pods with GPUs
}

func (s *run) running() running {
	s.t.Helper()
	r := running{nodes: map[string]shared{}, pods: map[string]corev1.Pod{}}
	for _, p := range s.Machines() {
		node := s.node(p.name)
		is := shared{
			offers: s.offers(p), gpus: map[string]born{}, devices: p.node.Allocations(), governed: s.gpuNode(p.name).Spec.PolicyName != "",
			isolation: map[string]int{"time-slicing": 1, "mps": 2}[node.Labels["nvidia.com/gpu.sharing-strategy"]], namespaces: map[string]bool{},
		}
		if is.isolation == 0 {
			is.isolation = 4
		}
		if p.isDriven() && s.sharesGPUs(p) {
			is.isolation = 1
		}
		for _, d := range p.devices() {
			if is.gpus[d.UUID] = bornAs(d); d.State.MIG {
				is.isolation = 3
			}
		}
		for _, pod := range s.podsOn(p.name) {
			if pod.Namespace == users || pod.Namespace == "other" {
				r.pods[string(pod.UID)] = pod
				is.namespaces[pod.Namespace] = true
			}
		}
		r.nodes[p.name] = is
	}
	return r
}

// lives: no pod has ended or been restarted.
func (s *run) lives(before running) running {
	s.t.Helper()
	now := s.running()
	for uid, was := range before.pods {
		is, there := now.pods[uid]
		if name := was.Namespace + "/" + was.Name; !there || is.DeletionTimestamp != nil || is.Status.Phase != was.Status.Phase ||
			!equal(restarts(&was), restarts(&is)) || !slices.Equal(before.nodes[was.Spec.NodeName].devices[name], now.nodes[was.Spec.NodeName].devices[name]) {
			s.Breaks("lives", "pod %s on %s was %s with %v, and is %s with %v", name, was.Spec.NodeName, was.Status.Phase, before.nodes[was.Spec.NodeName].devices[name],
				is.Status.Phase, now.nodes[was.Spec.NodeName].devices[name])
		}
	}
	return now
}

func restarts(pod *corev1.Pod) (counts []int32) {
	for _, c := range pod.Status.ContainerStatuses {
		counts = append(counts, c.RestartCount)
	}
	return counts
}

// unchanged: pods live, nodes offer what they did and at no moment anything else or a taint.
func (s *run) unchanged(before running) {
	s.t.Helper()
	now := s.lives(before)
	for name, was := range before.nodes {
		if is := now.nodes[name]; !maps.Equal(was.offers, is.offers) || !maps.Equal(was.gpus, is.gpus) {
			s.Breaks("unchanged", "node %s offered %v of %v, and offers %v of %v", name, was.offers, was.gpus, is.offers, is.gpus)
		}
	}
	s.record.mu.Lock()
	for _, h := range s.record.happened[s.record.from:] {
		if h.is == nil || h.deleted || before.nodes[h.node].offers == nil {
			continue
		}
		for resource, count := range offered(h.is) {
			if count != before.nodes[h.node].offers[resource] {
				s.Breaks("unchanged", "node %s offered %v for a while, and %v before", h.node, offered(h.is), before.nodes[h.node].offers)
			}
		}
		if len(h.is.Spec.Taints) > 0 {
			s.Breaks("unchanged", "node %s had the taints %v", h.node, h.is.Spec.Taints)
		}
	}
	s.record.mu.Unlock()
}

// honoured: each policy that was printed is Ready, or says how many shares the administrator has to set for NVIDIA's DRA driver.
func (s *run) honoured(printed ...string) {
	s.t.Helper()
	for _, p := range s.ListPolicies() {
		if c, _ := condition.Find(p.Status.Conditions, v1alpha1.ConditionReady); slices.Contains(printed, p.Name) && c.Status != metav1.ConditionTrue && c.Reason != v1alpha1.ReasonDRASharesDiffer {
			s.Breaks("honoured", "policy %s: %s: %s", p.Name, c.Reason, c.Message)
		}
	}
}

// startsAgain ends all pods, waits until their nodes are as they are to be, and starts them again, each on its node.
func (s *run) startsAgain(before running) {
	s.t.Helper()
	for _, pod := range before.pods {
		s.ended(pod.Namespace + "/" + pod.Name)
	}
	s.calms()
	after := s.running()
	remaining := map[string]map[string]int64{}
	for name, is := range after.nodes {
		remaining[name] = maps.Clone(is.offers)
	}
	for _, pod := range before.pods {
		if pod.Status.Phase == corev1.PodRunning {
			s.comesBack(&pod, remaining[pod.Spec.NodeName])
		}
	}
	s.calms()
	for _, pod := range s.running().pods {
		if pod.Status.Phase != corev1.PodRunning {
			s.Breaks("starts again", "pod %s on %s is %s: %s", pod.Name, pod.Spec.NodeName, pod.Status.Phase, pod.Status.Message)
		}
	}
	for name, was := range before.nodes {
		is := after.nodes[name]
		shares := is.isolation < 3 && was.isolation != is.isolation
		if was.governed && is.isolation < was.isolation || shares && len(was.namespaces) > 1 {
			s.Breaks("isolates", "node %s isolates pods of %v by %d, and did by %d", name, was.namespaces, is.isolation, was.isolation)
		}
	}
}

// comesBack starts a pod on its node again, as the scheduler may: remaining is what the node offers to it.
func (s *run) comesBack(pod *corev1.Pod, remaining map[string]int64) {
	s.t.Helper()
	node := s.node(pod.Spec.NodeName)
	for label, value := range pod.Spec.NodeSelector {
		if node.Labels[label] != value {
			s.Breaks("starts again", "pod %s selects %s=%s, and node %s has %q", pod.Name, label, value, node.Name, node.Labels[label])
		}
	}
	if len(node.Spec.Taints) > 0 {
		s.Breaks("starts again", "node %s has the taints %v", node.Name, node.Spec.Taints)
	}
	for resource := range pod.Spec.Containers[0].Resources.Limits {
		if remaining[string(resource)]--; remaining[string(resource)] < 0 {
			s.Breaks("starts again", "node %s offers %v, and its pods request more %s", node.Name, s.offers(s.places[node.Name]), resource)
		}
	}
	again := podOf("replica", pod.Name, node.Name)
	again.Namespace, again.Spec.NodeSelector, again.Spec.SecurityContext = pod.Namespace, pod.Spec.NodeSelector, pod.Spec.SecurityContext
	again.Spec.Containers, again.Spec.ResourceClaims = pod.Spec.Containers, pod.Spec.ResourceClaims
	if why := s.starts(again); why != "" {
		s.Breaks("starts again", "pod %s does not get on node %s again: %s", pod.Name, node.Name, why)
	}
}

// observed is a Prometheus that has observed the pods for a week.
func (s *run) observed(random *rand.Rand) (url string) {
	s.t.Helper()
	const day = 24 * 3600
	answers := map[advice.Query][]advice.Sample{}
	answer := func(query advice.Query, labels map[string]string, value float64) {
		answers[query] = append(answers[query], advice.Sample{Labels: labels, Value: value})
	}
	for _, p := range s.Machines() {
		held, of := 0, map[string]string{"node": p.name}
		for _, pod := range s.podsOn(p.name) {
			if pod.Namespace != users && pod.Namespace != "other" || random.IntN(12) == 0 {
				continue
			}
			held++
			labels := map[string]string{"node": p.name, "namespace": pod.Namespace, "pod": pod.Name, "container": "main"}
			answer(advice.QueryHeld, labels, 1)
			if random.IntN(8) > 0 {
				answer(advice.QueryMemory, labels, float64(int64(random.IntN(8))<<29))
			}
			if load := random.Float64() / 8; history.Maybe(random) {
				answer(advice.QueryCompute, labels, load)
				answer(advice.QueryCompute95, labels, load)
			}
		}
		answer(advice.QueryTime, of, history.Pick[float64](random, day/24, 6*day, 6*day, 6*day))
		answer(advice.QueryConcurrent, of, float64(held))
	}
	s.Tell("observed: %v", answers)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = r.ParseForm()
		result := []map[string]any{}
		for name, query := range advice.Queries(7*24*time.Hour, "") {
			if query != r.Form.Get("query") {
				continue
			}
			for _, a := range answers[name] {
				result = append(result, map[string]any{"metric": a.Labels, "value": []any{float64(s.clock.Now().Unix()), fmt.Sprint(a.Value)}})
			}
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"status": "success", "data": map[string]any{"resultType": "vector", "result": result}})
	}))
	s.t.Cleanup(server.Close)
	return server.URL
}

const drivenLabel = "test.example/dra"

// driven installs NVIDIA's DRA driver, for every other cluster; sometimes with shares, and with classes of a person's for instances.
func (s *run) driven() {
	s.t.Helper()
	if s.drives = history.Maybe(s.random); !s.drives {
		return
	}
	set, class := nodesim.NewDRADriver(draSpace, map[string]string{drivenLabel: "true"})
	shares := history.Pick(s.random, "", "", "2", "4")
	set.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "CONSUMABLE_SHARES", Value: shares}}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: draSpace}}
	s.Expect(client.IgnoreAlreadyExists(s.client.Create(s.t.Context(), space))).To(Succeed())
	objects := []client.Object{set, class}
	if history.Maybe(s.random) {
		objects = append(objects, &resourcev1.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: "small"},
			Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: new("nvidia.com/mig-1g.5gb"), Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
				Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].profile == '1g.5gb'",
			}}}},
		})
	}
	for _, o := range objects {
		s.Expect(s.client.Create(s.t.Context(), o)).To(Succeed())
	}
	s.scheduler = &nodesim.DRAScheduler{Client: s.sim}
	s.background(func(ctx context.Context) { s.scheduler.Run(ctx, 200*time.Millisecond) })
	s.Tell("NVIDIA's DRA driver, shares %q, %d classes", shares, len(objects)-1)
}

// orDriven are the labels of a node, which may become one of NVIDIA's DRA driver.
func (s *run) orDriven(labels map[string]string) map[string]string {
	if s.drives && s.random.IntN(3) > 0 {
		labels[drivenLabel], labels["nvidia.com/gpu.deploy.device-plugin"] = "true", "false"
	}
	return labels
}

// isDriven reports whether NVIDIA's DRA driver serves the node.
func (p *place) isDriven() bool { return p.labels[drivenLabel] != "" }

// published are the devices that the slices of a node show.
func (s *run) published(p *place) (devices []resourcev1.Device) {
	s.t.Helper()
	list := &resourcev1.ResourceSliceList{}
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	for _, slice := range list.Items {
		if *slice.Spec.NodeName == p.name {
			devices = append(devices, slice.Spec.Devices...)
		}
	}
	return devices
}

// offers is what pods can get of the GPUs of a node, by resource.
func (s *run) offers(p *place) map[string]int64 {
	s.t.Helper()
	offers := offered(s.node(p.name))
	if !p.isDriven() {
		return offers
	}
	for _, d := range s.published(p) {
		resource, count := plan.ResourceGPU, int64(1)
		if profile := d.Attributes["profile"].StringValue; profile != nil {
			resource = plan.ResourceOf(*profile)
		}
		if shares, has := d.Capacity["shares"]; has {
			count = shares.Value.Value()
		}
		offers[resource] += count
	}
	return offers
}

// sharesGPUs reports whether several claims can have a GPU of the node.
func (s *run) sharesGPUs(p *place) bool {
	s.t.Helper()
	for _, d := range s.published(p) {
		if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
			return true
		}
	}
	return false
}

// schedules binds a pod to its node with a claim: one for its resource or, of whole GPUs, sometimes one that it names.
func (s *run) schedules(pod *corev1.Pod) (why string) {
	s.t.Helper()
	node := pod.Spec.NodeName
	pod.Spec.NodeName = ""
	_, whole := pod.Spec.Containers[0].Resources.Limits[plan.ResourceGPU]
	var err error
	switch {
	case len(pod.Spec.ResourceClaims) == 0 && (!whole || s.random.IntN(3) > 0):
		why, err = s.scheduler.Schedule(s.t.Context(), pod, node)
	default:
		claim := &resourcev1.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: "of-" + pod.Name},
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
				Name: "device", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"},
			}}}},
		}
		if err := s.client.Create(s.t.Context(), claim); client.IgnoreAlreadyExists(err) != nil {
			s.Expect(err).NotTo(HaveOccurred())
		}
		s.Expect(s.client.Get(s.t.Context(), client.ObjectKeyFromObject(claim), claim)).To(Succeed())
		pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "device"}}}
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "device", ResourceClaimName: &claim.Name}}
		why, err = s.scheduler.ScheduleByClaim(s.t.Context(), pod, node, claim)
	}
	s.Expect(err).NotTo(HaveOccurred())
	return strings.TrimSpace(why)
}
