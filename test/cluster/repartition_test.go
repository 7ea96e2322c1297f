// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

const wantedInstance = "nvidia.com/mig-3g.20gb"

// TestRepartition measures how soon a pod runs for which a GPU is repartitioned, and what is written for it: REPARTITIONS pods, one after the other or
// one each REPARTITIONS_EVERY, on as many GPUs, eight on a node, with 7 × 1g at rest. API server and kube-scheduler are the real ones. Kubelets publish
// every 10 to 11 s, an instance takes 0.15 s, and the device plugin reads the GPUs at once. REPARTITIONS_ON=dra: so does NVIDIA's DRA driver, which serves all.
func TestRepartition(t *testing.T) {
	count, err := strconv.Atoi(os.Getenv("REPARTITIONS"))
	if err != nil {
		t.Skip("set REPARTITIONS=200, or make bench-repartition")
	}
	every, _ := time.ParseDuration(os.Getenv("REPARTITIONS_EVERY"))
	f := newSite(t)
	s := &stopwatch{fleet: f, seen: map[string][]seen{}, pods: map[string]bool{}, writes: map[string]int{}}
	f.agents = rest.CopyConfig(f.cluster.Config)
	f.agents.Wrap(s.counting("agent"))
	f.controller.Wrap(s.counting("controller"))
	f.apply(clusterPolicy)
	f.runNVIDIA()
	var labels map[string]string
	if os.Getenv("REPARTITIONS_ON") == "dra" {
		labels = f.installDRA()
	}
	for i := range (count + 7) / 8 {
		m := newMachine(f, fmt.Sprintf("n%02d", i+1), labels, slices.Repeat([]sim.Model{sim.A100}, min(8, count))...)
		m.statusPeriod, m.restartDelay, m.reportsConfig = 10*time.Second, 0, true
		m.touches = func(sim.Op, string, int) error { <-time.After(150 * time.Millisecond); return nil }
		m.boot(f)
		f.background(func(ctx context.Context) { m.node.Run(ctx, 125*time.Millisecond) })
		f.machines = append(f.machines, m)
	}
	f.wakeNodes()
	f.runAgents()
	f.demands = (*demand.Controller).Register
	f.leader = f.lead()
	s.startScheduler()
	t.Cleanup(func() { s.print(len(s.homes), every) }) // also of what ran before a failure
	s.watch(&v1alpha1.GPUNodeList{}, &corev1.NodeList{}, &corev1.PodList{})
	f.Eventually(func() bool { return labels != nil || f.discovered() }, patience, pollEvery).Should(BeTrue())
	f.policy("{strategy: MIG, mig: {layouts: [{fill: 1g, onDemand: {mode: Apply, profiles: [1g, 3g], idleSeconds: 30}}]}}", "{maxUnavailable: 100%}")
	f.ready()
	<-time.After(35 * time.Second) // until all are idle for long enough
	s.reset()

	for i := range count {
		name := fmt.Sprintf("p%03d", i)
		f.Expect(f.client.Create(t.Context(), requesting(name, wantedInstance))).To(Succeed())
		if every > 0 {
			<-time.After(every)
			continue
		}
		f.Eventually(s.running, patience, pollEvery).Should(BeNumerically(">", i), s.why)
		<-time.After(rand.N(10 * time.Second)) // or each would come when a kubelet has just published
	}
	f.Eventually(s.running, patience, pollEvery).Should(Equal(count), s.why)
}

// seen is that something happened to a node, or a pod that runs there.
type seen struct {
	what string
	at   time.Time
}

// stages are what happens for a pod, in turn.
var stages = []string{"pending", "decided", "tainted", "asked of the agent", "made", "config selected", "advertised", "taint removed", "bound", "running"}

// stopwatch notes when things happen, as watches tell, and what is written.
type stopwatch struct {
	*fleet

	mu     sync.Mutex
	seen   map[string][]seen // by node, and by pod
	homes  map[string]string // of pods
	pods   map[string]bool   // that run
	writes map[string]int
}

var written = regexp.MustCompile(`/([a-z]+s)(/[^/]+)?(/[a-z]+)?$`)

func (s *stopwatch) counting(who string) func(http.RoundTripper) http.RoundTripper {
	return func(rt http.RoundTripper) http.RoundTripper {
		return noting{rt, func(r *http.Request, _ int, _ string) {
			of := written.FindStringSubmatch(r.URL.Path)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.writes[who+": "+r.Method+" "+of[1]+of[3]]++
		}}
	}
}

func (s *stopwatch) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen, s.homes, s.writes = map[string][]seen{}, map[string]string{}, map[string]int{}
}

func (s *stopwatch) running() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pods)
}

// why is why pods do not run.
func (s *stopwatch) why() (text string) {
	policies, nodes, pods := &v1alpha1.GPUSharingPolicyList{}, &v1alpha1.GPUNodeList{}, &corev1.PodList{}
	for _, list := range []client.ObjectList{policies, nodes, pods} {
		s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	}
	for i := range policies.Items {
		text += fmt.Sprintf("%+v %+v\n", policies.Items[i].Status.Pending, policies.Items[i].Status.OnDemand)
	}
	for i := range nodes.Items {
		if r := nodes.Items[i].Status.Rollout; r.State != "UpToDate" {
			text += fmt.Sprintf("%s: %+v %+v %+v\n", nodes.Items[i].Name, r, nodes.Items[i].Status.Demand, nodes.Items[i].Status.Conditions)
		}
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; p.Status.Phase != corev1.PodRunning {
			text += fmt.Sprintf("%s/%s on %q: %+v\n", p.Namespace, p.Name, p.Spec.NodeName, p.Status)
		}
	}
	return text
}

// startScheduler starts kube-scheduler.
func (s *stopwatch) startScheduler() {
	assets, err := env.Assets(s.t.Context())
	s.Expect(err).NotTo(HaveOccurred())
	kubeconfig := filepath.Join(s.dir, "scheduler.kubeconfig")
	s.Expect(env.WriteKubeconfig(s.cluster.Config, kubeconfig)).To(Succeed())
	command := exec.Command(filepath.Join(assets, "kube-scheduler"), "--kubeconfig="+kubeconfig, "--leader-elect=false", "--secure-port=0")
	process, err := nodesim.StartProcess(command, filepath.Join(s.dir, "scheduler.log"), 5*time.Second)
	s.Expect(err).NotTo(HaveOccurred())
	s.t.Cleanup(process.Stop)
}

func (s *stopwatch) watch(lists ...client.ObjectList) {
	for _, list := range lists {
		before := map[string]client.Object{}
		s.background(func(ctx context.Context) {
			for ctx.Err() == nil { // the API server ends a watch after half an hour
				w, err := s.client.Watch(ctx, list.DeepCopyObject().(client.ObjectList))
				if err != nil {
					continue
				}
				for e := range w.ResultChan() {
					o, is := e.Object.(client.Object)
					if !is {
						continue
					}
					was := before[o.GetName()]
					before[o.GetName()] = o
					if _, isPod := o.(*corev1.Pod); isPod && o.GetNamespace() == users || !isPod && was != nil {
						s.note(was, o)
					}
				}
			}
		})
	}
}

// note notes what is new of an object.
func (s *stopwatch) note(before, after client.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	when := func(what string, is bool) {
		if is {
			s.seen[after.GetName()] = append(s.seen[after.GetName()], seen{what, time.Now()})
		}
	}
	switch is := after.(type) {
	case *v1alpha1.GPUNode:
		was := before.(*v1alpha1.GPUNode)
		when("decided", fmt.Sprint(was.Status.Demand) != fmt.Sprint(is.Status.Demand))
		when("asked of the agent", was.Generation != is.Generation)
		when("made", instancesOf(was) != instancesOf(is))
	case *corev1.Node:
		was, now := cluster.NodeAlone(before.(*corev1.Node)), cluster.NodeAlone(is)
		when("tainted", !was.HasChangingTaint() && now.HasChangingTaint())
		when("taint removed", was.HasChangingTaint() && !now.HasChangingTaint())
		when("config selected", was.Labels[v1alpha1.LabelConfig] != now.Labels[v1alpha1.LabelConfig])
		when("advertised", was.Allocatable[wantedInstance] != now.Allocatable[wantedInstance])
	case *corev1.Pod:
		was, _ := before.(*corev1.Pod)
		when("pending", was == nil)
		if s.homes[is.Name] == "" && is.Spec.NodeName != "" {
			when("bound", true)
			s.homes[is.Name] = is.Spec.NodeName
		}
		if is.Status.Phase == corev1.PodRunning && !s.pods[is.Name] {
			when("running", true)
			s.pods[is.Name] = true
		}
	}
}

func instancesOf(n *v1alpha1.GPUNode) (sum string) {
	for _, d := range n.Status.Devices {
		for _, i := range d.Instances {
			sum += i.UUID
		}
	}
	return sum
}

// print prints how long the stages took, and the writes.
func (s *stopwatch) print(count int, every time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	took := map[string][]time.Duration{}
	for pod, home := range s.homes {
		at, bound := map[string]time.Time{}, time.Time{}
		for _, e := range s.seen[pod] {
			if at[e.what] = e.at; e.what == "bound" {
				bound = e.at
			}
		}
		for _, e := range s.seen[home] {
			if e.at.Before(bound.Add(50 * time.Millisecond)) {
				at[e.what] = e.at
			}
		}
		last := at["pending"]
		for _, stage := range stages[1:] {
			d := max(0, at[stage].Sub(last)) // another pod's change may have come before
			took[stage], last = append(took[stage], d), last.Add(d)
		}
		took["sum"] = append(took["sum"], at["running"].Sub(at["pending"]))
	}
	if len(took) == 0 {
		return
	}
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Printf("\n%d pods, every %s (0s: one after the other); load %.4s\n\n| pending → | median | p95 | worst |\n|---|---|---|---|\n", count, every, load)
	for _, stage := range append(stages[1:], "sum") {
		d := slices.Sorted(slices.Values(took[stage]))
		fmt.Printf("| %s | %.1f s | %.1f s | %.1f s |\n", stage, d[len(d)/2].Seconds(), d[len(d)*95/100].Seconds(), d[len(d)-1].Seconds())
	}
	fmt.Print("\n| writes for each pod | |\n|---|---|\n")
	for _, what := range slices.SortedFunc(maps.Keys(s.writes), func(a, b string) int { return cmp.Compare(s.writes[b], s.writes[a]) }) {
		fmt.Printf("| %s | %.2f |\n", what, float64(s.writes[what])/float64(count))
	}
}
