// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const (
	ownNamespace = "gpu-sharing-operator"
	nvidiaSpace  = "gpu-operator"
	controller   = "gpu-sharing-controller"
)

// The kinds of writes that the API server counts.
const (
	kindSpec    = "GPUNode specs"
	kindRecord  = "GPUNode annotations"
	kindStatus  = "GPUNode statuses"
	kindNode    = "Node patches"
	kindSync    = "pod patches (syncs)"
	kindEvent   = "Events"
	kindPolicy  = "policy statuses"
	kindKubelet = "Node statuses, by kubelets"
	kindLease   = "leases"
)

// kinds are the writes by resource and subresource. Whatever else is written is shown under its own name. Of the writes
// of GPUNodes those that make a new generation are specs.
var kinds = map[string]string{
	"gpunodes": kindRecord, "gpunodes/status": kindStatus, "nodes": kindNode, "nodes/status": kindKubelet, "pods": kindSync,
	"events": kindEvent, "gpusharingpolicies/status": kindPolicy, "leases": kindLease,
}

// scaled is a cluster of many nodes with the controller that is measured.
type scaled struct {
	*WithT
	t       *testing.T
	cluster *env.Cluster
	fleet   *fleet
	http    *http.Client // to the API server
	process *os.Process
	began   time.Time
}

// built is a program of cmd.
func built(t *testing.T, name string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", program, "../../cmd/"+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	NewWithT(t).Expect(err).NotTo(HaveOccurred(), string(out))
	return program
}

// measureScale measures a cluster of so many nodes.
func measureScale(t *testing.T, program string, nodes int, steady time.Duration) scaleFigures {
	t.Helper()
	s := &scaled{WithT: NewWithT(t), t: t, cluster: env.Start(t, env.WithNVIDIA()), began: time.Now()}
	var err error
	s.http, err = rest.HTTPClientFor(s.cluster.Config)
	s.Expect(err).NotTo(HaveOccurred())
	f := scaleFigures{nodes: nodes, quietFor: steady}
	config := s.prepare()
	s.startController(program, config)
	s.Eventually(s.served, "5m", "100ms").Should(BeTrue(), "the controller leads")
	s.settle() // its caches are there
	f.residentBefore, _ = s.memory()

	start := time.Now()
	s.startFleet(nodes)
	s.Eventually(s.reported, "20m", "500ms").Should(Equal(nodes))
	f.coming = time.Since(start)
	s.say("%d nodes have come, in %s", nodes, f.coming.Round(time.Second))
	start = time.Now()
	s.policy("fleet", 0, 2, "{}")
	s.policy("one", 1, 3, fmt.Sprintf("{matchLabels: {kubernetes.io/hostname: %s}}", s.fleet.names[nodes/2]))
	s.untilReady("fleet")
	s.untilReady("one")
	f.firstPolicy = time.Since(start)
	s.say("all share for the first time, after %s", f.firstPolicy.Round(time.Second))

	f.all = s.measure(func() { s.policy("fleet", 0, 4, "{}"); s.untilReady("fleet") })
	s.say("the replicas of all nodes: %s, CPU %s, %v", seconds(f.all.wall), seconds(f.all.cpu), f.all.writes)
	f.one = s.measure(func() {
		s.policy("one", 1, 5, fmt.Sprintf("{matchLabels: {kubernetes.io/hostname: %s}}", s.fleet.names[nodes/2]))
		s.untilReady("one")
	})
	s.say("one node: %s, CPU %s, %v", seconds(f.one.wall), f.one.cpu, f.one.writes)
	f.quiet = s.measure(func() {
		ctx, cancel := context.WithTimeout(t.Context(), steady)
		defer cancel()
		s.fleet.heartbeats(ctx)
	})
	s.say("nothing changes: CPU %s in %s, %v", f.quiet.cpu, steady, f.quiet.writes)
	f.resident, f.atMost = s.memory()
	f.size = s.size()
	f.status, f.statusComputed, f.statusLines = s.status()
	s.say("kubectl gpusharing status: %s, CPU %s, %d lines", shown(f.status), shown(f.statusComputed), f.statusLines)
	s.say("resident %s, at most %s, at first %s", mebibytes(f.resident), mebibytes(f.atMost), mebibytes(f.residentBefore))
	f.floor = s.measure(func() { s.byHand(config) })
	s.say("the floor: %s, %v", seconds(f.floor.wall), f.floor.writes)
	s.Expect(s.fleet.err()).NotTo(HaveOccurred())
	return f
}

func (s *scaled) say(format string, args ...any) {
	fmt.Printf("%6.1fs  "+format+"\n", append([]any{time.Since(s.began).Seconds()}, args...)...)
}

// prepare installs what the controller needs, and returns how it speaks to the API server: with the rights of its
// manifests, as any service account is paced.
func (s *scaled) prepare() *rest.Config {
	ctx := s.t.Context()
	for _, namespace := range []string{ownNamespace, nvidiaSpace} {
		s.Expect(s.cluster.Client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	}
	s.Expect(s.cluster.Apply(ctx, "config/rbac/role.yaml", "config/manager/rbac.yaml")).To(Succeed())
	s.apply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}, spec: {devicePlugin: {enabled: true}}}")
	clusterPolicy := &unstructured.Unstructured{}
	clusterPolicy.SetAPIVersion("nvidia.com/v1")
	clusterPolicy.SetKind("ClusterPolicy")
	clusterPolicy.SetName("cluster-policy")
	where := fmt.Appendf(nil, `{"status":{"namespace":%q,"state":"ready"}}`, nvidiaSpace)
	s.Expect(s.cluster.Client.Status().Patch(ctx, clusterPolicy, client.RawPatch(types.MergePatchType, where))).To(Succeed())
	config, err := s.cluster.ConfigAs(ctx, env.Identity{Namespace: ownNamespace, ServiceAccount: controller})
	s.Expect(err).NotTo(HaveOccurred())
	return config
}

func (s *scaled) startController(program string, config *rest.Config) {
	dir := s.t.TempDir()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	s.Expect(env.WriteKubeconfig(config, kubeconfig)).To(Succeed())
	log, err := os.Create(filepath.Join(dir, "log"))
	s.Expect(err).NotTo(HaveOccurred())
	command := exec.CommandContext(s.t.Context(), program, "--kubeconfig", kubeconfig, "--namespace", ownNamespace, "--health-probe-bind-address", "0")
	command.Stdout, command.Stderr = log, log
	s.Expect(command.Start()).To(Succeed())
	s.process = command.Process
	s.t.Cleanup(func() {
		_ = s.process.Signal(os.Interrupt)
		_ = command.Wait()
		_ = log.Close()
		if s.t.Failed() {
			data, _ := os.ReadFile(log.Name())
			s.t.Logf("the controller's last words: %s", data[max(0, len(data)-4000):])
		}
	})
}

// stopController ends the controller's process.
func (s *scaled) stopController() {
	s.Expect(s.process.Signal(os.Interrupt)).To(Succeed())
	_, _ = s.process.Wait()
}

// served reports whether the controller leads. The API server has Leases too, in another namespace.
func (s *scaled) served() bool {
	leases := &coordinationv1.LeaseList{}
	s.Expect(s.cluster.Client.List(s.t.Context(), leases, client.InNamespace(ownNamespace))).To(Succeed())
	return slices.ContainsFunc(leases.Items, func(l coordinationv1.Lease) bool { return ptr.Deref(l.Spec.HolderIdentity, "") != "" })
}

func (s *scaled) startFleet(nodes int) {
	ctx := s.t.Context()
	config := rest.CopyConfig(s.cluster.Config)
	config.QPS, config.DisableCompression = -1, true // as agents do
	c, err := client.New(config, client.Options{Scheme: s.cluster.Scheme})
	s.Expect(err).NotTo(HaveOccurred())
	cached, err := cache.New(config, cache.Options{Scheme: s.cluster.Scheme, ByObject: map[client.Object]cache.ByObject{
		&corev1.Node{}:      {Transform: cache.TransformStripManagedFields()},
		&v1alpha1.GPUNode{}: {},
	}})
	s.Expect(err).NotTo(HaveOccurred())
	go func() { _ = cached.Start(ctx) }()
	s.fleet = newFleet(s.t, c, cached, nodes)
	s.Expect(s.fleet.run(ctx)).To(Succeed())
	s.Expect(s.fleet.join(ctx)).To(Succeed())
}

// reported is how many agents have told of their GPUs.
func (s *scaled) reported() int {
	nodes := &v1alpha1.GPUNodeList{}
	s.Expect(s.fleet.cache.List(s.t.Context(), nodes, client.UnsafeDisableDeepCopy)).To(Succeed())
	n := 0
	for i := range nodes.Items {
		if len(nodes.Items[i].Status.Devices) == gpusPerNode {
			n++
		}
	}
	return n
}

func (s *scaled) apply(object string) {
	o := &unstructured.Unstructured{}
	s.Expect(yaml.Unmarshal([]byte(object), &o.Object)).To(Succeed())
	s.Expect(s.cluster.ApplyObject(s.t.Context(), o)).To(Succeed())
}

// policy applies a policy of so many replicas that may change all its nodes at the same time.
func (s *scaled) policy(name string, priority, replicas int, selector string) {
	s.apply(fmt.Sprintf(`{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: %s}, spec: {
		priority: %d, nodeSelector: %s, rollout: {maxUnavailable: 100%%},
		sharing: {strategy: TimeSlicing, timeSlicing: {replicas: %d}}}}`, name, priority, selector, replicas))
}

func (s *scaled) untilReady(name string) {
	s.Eventually(func() bool {
		p := &v1alpha1.GPUSharingPolicy{}
		s.Expect(s.cluster.Client.Get(s.t.Context(), client.ObjectKey{Name: name}, p)).To(Succeed())
		return condition.IsTrueAt(p.Status.Conditions, v1alpha1.ConditionReady, p.Generation)
	}, "30m", "50ms").Should(BeTrue())
}

// settle waits until what follows a change is done too: nothing was written for two seconds.
func (s *scaled) settle() {
	last := map[string]int{}
	s.Eventually(func() bool {
		now := s.writes()
		delete(now, kindLease)
		same := maps.Equal(last, now)
		last = now
		return same
	}, "5m", "2s").Should(BeTrue())
}

// measure does something and says what it cost, with what follows it.
func (s *scaled) measure(do func()) cost {
	specs, cpu := s.specs(), s.cpu()
	writes, server := s.serverMetrics()
	start := time.Now()
	do()
	c := cost{wall: time.Since(start)}
	s.settle()
	c.cpu = s.cpu() - cpu
	c.writes, c.server = s.serverMetrics()
	c.server -= server
	c.writes[kindSpec] = s.specs() - specs
	c.writes[kindRecord] -= c.writes[kindSpec]
	for kind, before := range writes {
		if c.writes[kind] -= before; c.writes[kind] == 0 {
			delete(c.writes, kind)
		}
	}
	return c
}

// specs is how often the spec of a GPUNode was written.
func (s *scaled) specs() (written int) {
	nodes := &v1alpha1.GPUNodeList{}
	s.Expect(s.fleet.cache.List(s.t.Context(), nodes, client.UnsafeDisableDeepCopy)).To(Succeed())
	for i := range nodes.Items {
		written += int(nodes.Items[i].Generation)
	}
	return written
}

// byHand is what a person does to change the replicas of all nodes: a new key in the ConfigMap, and the label of each
// node, as `kubectl label nodes` sets it, one after the other. The label is one that nobody reads.
func (s *scaled) byHand(config *rest.Config) {
	config = rest.CopyConfig(config)
	config.QPS = -1
	c, err := client.New(config, client.Options{Scheme: s.cluster.Scheme})
	s.Expect(err).NotTo(HaveOccurred())
	configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: nvidiaSpace, Name: "gpu-sharing-device-plugin"}}
	s.Expect(c.Patch(s.t.Context(), configMap, client.RawPatch(types.MergePatchType, []byte(`{"data":{"by-hand":"version: v1"}}`)))).To(Succeed())
	for _, name := range s.fleet.names {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		s.Expect(c.Patch(s.t.Context(), node, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"by-hand":"by-hand"}}}`)))).To(Succeed())
	}
}

var requestTotal = regexp.MustCompile(`^apiserver_request_total\{(.*)\} ([0-9.e+]+)$`)

// writes are those that the API server has served since it started, by kind.
func (s *scaled) writes() map[string]int {
	writes, _ := s.serverMetrics()
	return writes
}

// serverMetrics are the writes that the API server has served since it started, by kind, and how long it has computed.
func (s *scaled) serverMetrics() (writes map[string]int, cpu time.Duration) {
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, strings.TrimSuffix(s.cluster.Config.Host, "/")+"/metrics", http.NoBody)
	s.Expect(err).NotTo(HaveOccurred())
	answer, err := s.http.Do(request)
	s.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = answer.Body.Close() }()
	s.Expect(answer.StatusCode).To(Equal(http.StatusOK))
	writes = map[string]int{}
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if seconds, is := strings.CutPrefix(lines.Text(), "process_cpu_seconds_total "); is {
			n, err := strconv.ParseFloat(seconds, 64)
			s.Expect(err).NotTo(HaveOccurred())
			cpu = time.Duration(n * float64(time.Second))
		}
		found := requestTotal.FindStringSubmatch(lines.Text())
		if found == nil {
			continue
		}
		labels := map[string]string{}
		for pair := range strings.SplitSeq(found[1], ",") {
			name, value, _ := strings.Cut(pair, "=")
			labels[name] = strings.Trim(value, `"`)
		}
		if !slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE"}, labels["verb"]) {
			continue
		}
		n, err := strconv.ParseFloat(found[2], 64)
		s.Expect(err).NotTo(HaveOccurred())
		what := labels["resource"]
		if labels["subresource"] != "" {
			what += "/" + labels["subresource"]
		}
		if kind, known := kinds[what]; known {
			what = kind
		}
		writes[what] += int(n)
	}
	return writes, cpu
}

// size is how many bytes of JSON a GPUNode has, on average.
func (s *scaled) size() (bytes int) {
	nodes := &v1alpha1.GPUNodeList{}
	s.Expect(s.fleet.client.List(s.t.Context(), nodes)).To(Succeed())
	for i := range nodes.Items {
		data, err := json.Marshal(&nodes.Items[i])
		s.Expect(err).NotTo(HaveOccurred())
		bytes += len(data)
	}
	return bytes / len(nodes.Items)
}

// status is how long kubectl gpusharing status takes and computes, the fastest of three, and how many lines it prints.
func (s *scaled) status() (took, computed time.Duration, lines int) {
	kubeconfig := filepath.Join(s.t.TempDir(), "kubeconfig")
	s.Expect(env.WriteKubeconfig(s.cluster.Config, kubeconfig)).To(Succeed())
	program := built(s.t, "kubectl-gpusharing")
	took = fastest(3, func() {
		cmd := exec.CommandContext(s.t.Context(), program, "status", "--kubeconfig", kubeconfig, "--namespace", ownNamespace)
		out, err := cmd.Output()
		s.Expect(err).NotTo(HaveOccurred())
		lines, computed = strings.Count(string(out), "\n"), cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()
	})
	return took, computed, lines
}

// cpu is how long the controller has computed.
func (s *scaled) cpu() time.Duration {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.process.Pid))
	s.Expect(err).NotTo(HaveOccurred(), "the controller has ended")
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	const user, system, tick = 11, 12, 10 * time.Millisecond // proc(5), counted from the state
	var sum time.Duration
	for _, i := range []int{user, system} {
		n, err := strconv.Atoi(fields[i])
		s.Expect(err).NotTo(HaveOccurred())
		sum += time.Duration(n) * tick
	}
	return sum
}

// memory is how much of the controller is resident, and has been at most.
func (s *scaled) memory() (now, most int64) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.process.Pid))
	s.Expect(err).NotTo(HaveOccurred())
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		for name, to := range map[string]*int64{"VmRSS:": &now, "VmHWM:": &most} {
			if fields[0] == name {
				n, err := strconv.ParseInt(fields[1], 10, 64)
				s.Expect(err).NotTo(HaveOccurred())
				*to = n << 10
			}
		}
	}
	return now, most
}
