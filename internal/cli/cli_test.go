// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

var update = flag.Bool("update", false, "write the golden files anew")

// newNode is a node of the GPU Operator whose agent reports these GPUs.
func newNode(tb testing.TB, name string, models ...sim.Model) cluster.Node {
	tb.Helper()
	simulated, err := sim.NewNode(name, models...)
	if err != nil {
		tb.Fatal(err)
	}
	return nodeWith(tb, name, sim.On(simulated))
}

func nodeWith(tb testing.TB, name string, hardware *sim.Hardware) cluster.Node {
	tb.Helper()
	n := cluster.Node{
		Name: name, AgentReady: true, Allocatable: map[string]int64{},
		Labels: map[string]string{deployPlugin: "true", v1alpha1.LabelRunsAgent: "true", "pool": name},
	}
	n.GPU.Name = name
	n.GPU.Status = statusOf(tb, hardware)
	for _, d := range n.GPU.Status.Devices {
		if d.Sharing.MIGMode == v1alpha1.MIGModeDisabled {
			n.Allocatable["nvidia.com/gpu"]++
		}
		for _, i := range d.Instances {
			n.Allocatable["nvidia.com/mig-"+i.Profile]++
		}
	}
	return n
}

// statusOf is what an agent reports of GPUs.
func statusOf(tb testing.TB, hardware *sim.Hardware) v1alpha1.GPUNodeStatus {
	tb.Helper()
	inventory, err := hardware.Observe(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	s := v1alpha1.GPUNodeStatus{}
	for _, conditionType := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionApplied} {
		s.Conditions = append(s.Conditions, metav1.Condition{
			Type: conditionType, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, Message: "the GPUs match the desired state",
			LastTransitionTime: metav1.NewTime(now),
		})
	}
	s.Devices = plan.Reported(inventory.Devices)
	return s
}

// hold lets a pod hold a GPU, or an instance of it.
func hold(n *cluster.Node, pod string, index int, instance *int32) {
	n.Pods = append(n.Pods, cluster.Pod{Namespace: "team", Name: pod, UID: "uid-" + pod, GPU: true, Controller: "ReplicaSet"})
	d := &n.GPU.Status.Devices[index]
	d.Holders = append(d.Holders, v1alpha1.HolderStatus{Namespace: "team", PodName: pod, ContainerName: "main", Instance: instance})
}

// policy is a policy as the API server completes it.
func policy(tb testing.TB, name, spec string) v1alpha1.GPUSharingPolicy {
	tb.Helper()
	p := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1, CreationTimestamp: metav1.NewTime(now)}}
	p.Spec.NodeSelector = &v1alpha1.NodeSelector{}
	if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
		tb.Fatalf("the test's own YAML: %v", err)
	}
	return p
}

var now = time.Unix(1_800_000_000, 0)

const (
	toMIG   = `{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 2g.10gb, count: 3}]}]}}, rollout: {drain: {mode: %s}}}`
	slicing = `{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}}`
)

func snapshotOf(nodes ...cluster.Node) cluster.Snapshot {
	s := cluster.Snapshot{Now: now, Nodes: nodes}
	s.Plugin = devicePluginOf(&s)
	return s
}

// TestPreviews compares what plan prints with testdata/plan-*.golden.
func TestPreviews(t *testing.T) {
	for name, situation := range map[string]func(*testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy){
		"a MIG layout evicts": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			a, b, c := newNode(t, "a", sim.A100, sim.A100), newNode(t, "b", sim.A100), newNode(t, "t", sim.T4)
			hold(&a, "train", 1, nil)
			hold(&a, "daemon", 0, nil)
			a.Pods[1].Controller = "DaemonSet"
			b.GPU.Status.Devices[0].Processes = []v1alpha1.ProcessStatus{{PID: 4711, Name: "python"}}
			return snapshotOf(a, b, c), policy(t, "research", fmt.Sprintf(toMIG, "Evict"))
		},
		"a reboot that other pods block": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			a := newNode(t, "a", sim.A100)
			hold(&a, "train", 0, nil)
			for name, controller := range map[string]string{"web": "ReplicaSet", "log-shipper": "DaemonSet", "by-hand": ""} {
				a.Pods = append(a.Pods, cluster.Pod{Namespace: "team", Name: name, UID: name, Controller: controller})
			}
			p := policy(t, "research", fmt.Sprintf(toMIG, "Evict"))
			p.Spec.Rollout.Reboot, p.Spec.Rollout.Drain.BeforeReboot = v1alpha1.RebootModeIfRequired, v1alpha1.BeforeRebootAllPods
			s := snapshotOf(a)
			s.Policies = []v1alpha1.GPUSharingPolicy{p}
			asked := rollout.Decide(s).Nodes[0]
			n := &s.Nodes[0].GPU
			n.Spec = v1alpha1.GPUNodeSpec{PolicyName: "research", ConfigName: asked.ConfigName, Devices: asked.Devices, Baseline: &v1alpha1.Baseline{}}
			n.Status.CanReboot = true
			n.Status.Conditions = append(n.Status.Conditions, metav1.Condition{
				Type: v1alpha1.ConditionRebootRequired, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonRebootRequired,
			})
			s.Policies[0].Spec.Rollout.Reboot = v1alpha1.RebootModeNever // until now
			return s, p
		},
		"time-slicing disturbs nobody": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			a := newNode(t, "a", sim.T4, sim.T4)
			hold(&a, "train", 1, nil)
			return snapshotOf(a), policy(t, "cheap", slicing)
		},
		"another policy loses a node": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			s := snapshotOf(newNode(t, "a", sim.A100), newNode(t, "b", sim.A100))
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "everywhere", slicing)}
			p := policy(t, "research", fmt.Sprintf(toMIG, "WaitForIdle"))
			p.Spec.Priority, p.Spec.NodeSelector = 1, &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}}
			return s, p
		},
		"a selector that leaves a node out": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			s := snapshotOf(newNode(t, "a", sim.T4), newNode(t, "b", sim.T4))
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "cheap", slicing)}
			d := rollout.Decide(s)
			for i := range s.Nodes {
				s.Nodes[i].Labels[v1alpha1.LabelConfig] = d.Nodes[i].ConfigName
				s.Nodes[i].GPU.Spec = v1alpha1.GPUNodeSpec{PolicyName: "cheap", Baseline: &v1alpha1.Baseline{}}
			}
			p := policy(t, "cheap", slicing)
			p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "b"}}
			return s, p
		},
		"a new name and a taint affect workloads": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			a := newNode(t, "a", sim.T4)
			hold(&a, "web", 0, nil)
			a.Pods[0].Requests, a.Pods[0].Workload = map[string]int64{"nvidia.com/gpu": 1}, "Deployment team/web"
			s := snapshotOf(a)
			s.Unscheduled = []cluster.Pod{{
				Namespace: "team", Name: "train", GPU: true, Requests: map[string]int64{"nvidia.com/gpu": 8}, Workload: "Job team/train",
			}}
			s.Plugin.Operands = &clusterpolicy.Operands{Name: "cluster-policy", Driver: true, Upgrades: true}
			return s, policy(t, "cheap", "{taints: [{key: example.com/shared, effect: NoSchedule}], "+
				"sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}, advertise: {renameByDefault: true}}}")
		},
		"a change that waits for a maintenance window": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			p := policy(t, "research", fmt.Sprintf(toMIG, "Evict"))
			p.Spec.Rollout.Windows = []v1alpha1.MaintenanceWindow{{Schedule: "0 22 * * FRI", Duration: "4h", TimeZone: "Europe/Berlin"}}
			return snapshotOf(newNode(t, "a", sim.A100)), p
		},
		"nothing to configure": func(t *testing.T) (cluster.Snapshot, v1alpha1.GPUSharingPolicy) {
			s := snapshotOf(newNode(t, "a", sim.T4))
			s.Plugin = cluster.DevicePlugin{Reason: v1alpha1.ReasonNoDevicePlugin, Message: "there is no ClusterPolicy; install the GPU Operator"}
			return s, policy(t, "cheap", slicing)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, p := situation(t)
			compare(t, "plan "+name, func(shown *text) { shown.plan(s, change{applied: []v1alpha1.GPUSharingPolicy{p}}) })
		})
	}
}

// TestStatuses compares what status prints with testdata/status-*.golden.
func TestStatuses(t *testing.T) {
	for name, situation := range map[string]func(*testing.T) (s cluster.Snapshot, only []string){
		"nothing there": func(*testing.T) (cluster.Snapshot, []string) { return snapshotOf(), nil },
		"instances and their holders": func(t *testing.T) (cluster.Snapshot, []string) {
			a := partitioned(t)
			a.GPU.Spec.PolicyName = "research"
			of := func(i int) *int32 { return &a.GPU.Status.Devices[0].Instances[i].ID }
			hold(&a, "train-with-a-long-name-0", 0, of(0))
			hold(&a, "web", 0, of(1))
			a.GPU.Status.Devices[0].Processes = []v1alpha1.ProcessStatus{
				{PID: 7, Name: "python", PodUID: "uid-web", Instance: of(1)}, {PID: 8, Name: "bench", Instance: of(2)},
			}
			return snapshotOf(a), []string{"a"}
		},
		"why policies and nodes are not ready": func(t *testing.T) (cluster.Snapshot, []string) {
			s := snapshotOf(newNode(t, "a", sim.A100, sim.A100), newNode(t, "t", sim.T4), newNode(t, "u", sim.T4))
			hold(&s.Nodes[0], "train", 1, nil)
			s.Nodes[2].AgentReady = false
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "research", fmt.Sprintf(toMIG, "Never"))}
			d := rollout.Decide(s)
			s.Policies[0].Status = d.Policies["research"]
			for _, a := range d.Actions {
				if r, is := a.(action.Report); is {
					i := slices.IndexFunc(s.Nodes, func(n cluster.Node) bool { return n.Name == r.Node })
					s.Nodes[i].GPU.Status.Rollout = r.Status.Rollout
				}
			}
			return s, nil
		},
		"a generation that no controller has seen": func(t *testing.T) (cluster.Snapshot, []string) {
			s := snapshotOf(newNode(t, "t", sim.T4))
			s.Policies = []v1alpha1.GPUSharingPolicy{policy(t, "cheap", slicing)}
			s.Policies[0].Status = v1alpha1.GPUSharingPolicyStatus{ObservedGeneration: 1, Nodes: v1alpha1.NodeCounts{Matched: 1, Ready: 1}, Conditions: []metav1.Condition{
				{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAccepted, ObservedGeneration: 1},
				{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonReady, ObservedGeneration: 1},
			}}
			s.Policies[0].Generation = 2
			return s, nil
		},
		"a GPU shared by time-slicing": func(t *testing.T) (cluster.Snapshot, []string) {
			a := ready(newNode(t, "a", sim.T4, sim.T4))
			a.Allocatable = map[string]int64{"nvidia.com/gpu.shared": 16}
			a.Unallocatable = map[string]int64{"nvidia.com/gpu": 2} // of the former plugin
			for i := range 4 {
				hold(&a, fmt.Sprintf("notebook-%d", i), 0, nil)
			}
			hold(&a, "notebook-3", 0, nil)
			return snapshotOf(a), nil
		},
		"a GPU shared by MPS": func(t *testing.T) (cluster.Snapshot, []string) {
			a := newNode(t, "a", sim.H100)
			a.Allocatable = map[string]int64{"nvidia.com/gpu.shared": 10}
			a.GPU.Status.Devices[0].Sharing.MPS = &v1alpha1.MPSDaemon{
				ResourceName: "nvidia.com/gpu.shared", Owner: v1alpha1.MPSDaemonOwnerGPUSharing, ActiveThreadPercentage: 10, PinnedMemoryLimit: new(resource.MustParse("8155Mi")),
			}
			for i := range 9 {
				hold(&a, fmt.Sprintf("inference-%d", i), 0, nil)
			}
			return snapshotOf(a), nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, only := situation(t)
			compare(t, "status "+name, func(shown *text) { shown.status(s, query{names: only}) })
		})
	}
}

// partitioned is a node with an A100 in MIG mode.
func partitioned(t *testing.T) cluster.Node {
	t.Helper()
	g := NewWithT(t)
	simulated, err := sim.NewNode("a", sim.A100)
	g.Expect(err).NotTo(HaveOccurred())
	hardware, uuid := sim.On(simulated), simulated.GPUs[0].UUID
	_ = hardware.SetMIG(t.Context(), uuid, true) // says that it needs a reset
	g.Expect(hardware.Reset(t.Context(), uuid)).To(Succeed())
	for profile, at := range map[string]gpu.Placement{
		"3g.20gb": {Start: 4, Size: 4}, "2g.10gb": {Start: 0, Size: 2}, "1g.5gb": {Start: 2, Size: 1},
	} {
		g.Expect(hardware.CreateInstance(t.Context(), uuid, profile, at)).To(Succeed())
	}
	return nodeWith(t, "a", hardware)
}

// ofTable are the lines of tables.
var ofTable = regexp.MustCompile(`^ *(MEMORY|POLICY) +(SHARE|NODES) |^ *([\d.]+ GiB|-)  +([\d.]+ GiB|-) |^(research|notebooks|\(none\)) +\d|^POLICY +STRATEGY|^\S+ +(MIG|MPS|TimeSlicing) +\d+ +\d+`)

// compare compares with a golden file what is printed without a terminal, and looks whether all fits into one.
func compare(t *testing.T, name string, show func(*text)) {
	t.Helper()
	g := NewWithT(t)
	shown := &text{}
	show(shown)
	file := filepath.Join("testdata", strings.ReplaceAll(name, " ", "-")+".golden")
	if *update {
		g.Expect(os.WriteFile(file, []byte(shown.String()), 0o644)).To(Succeed())
	}
	want, err := os.ReadFile(file)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(shown.String()).To(Equal(string(want)), "go test -update writes the golden files anew")
	for _, width := range []int{60, 80, 132} {
		narrow := &text{width: width}
		show(narrow)
		g.Expect(words(narrow.String())).To(ContainElements(words(shown.String())), "no word is lost")
		for line := range strings.Lines(narrow.String()) {
			line = strings.TrimRight(line, "\n")
			if ofTable.MatchString(line) { // its columns stay side by side, as kubectl prints them
				continue
			}
			g.Expect(utf8.RuneCountInString(line)).To(Or(BeNumerically("<=", width), BeNumerically("<=", longest(line)+15)), line)
			g.Expect(line).To(Equal(strings.TrimRight(line, " ")), "no space at the end")
		}
	}
}

// words are those of a text, apart from pictures.
func words(s string) []string {
	var kept []string
	for line := range strings.Lines(s) {
		if !strings.Contains(line, "|") {
			kept = append(kept, strings.Fields(line)...)
		}
	}
	return slices.DeleteFunc(kept, func(word string) bool { return strings.HasSuffix(word, "~") })
}

// longest is the length of the longest word of a line, which is not broken.
func longest(line string) int {
	most := 0
	for word := range strings.FieldsSeq(line) {
		most = max(most, utf8.RuneCountInString(word))
	}
	return most
}

func TestFilesThatHoldNoPolicy(t *testing.T) {
	for name, test := range map[string]struct{ data, says string }{
		"empty":             {"---\n", "it holds no GPUSharingPolicy"},
		"another kind":      {"{apiVersion: v1, kind: ConfigMap, metadata: {name: x}}", "it holds a \"ConfigMap\" of \"v1\", but plan takes policies only"},
		"without a name":    {"{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy}", "a policy has no metadata.name"},
		"not even YAML":     {"a: b: c", "mapping values are not allowed"},
		"one good, one bad": {"{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: x}}\n---\n{kind: Pod}", "it holds a \"Pod\""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse([]byte(test.data))
			NewWithT(t).Expect(err).To(MatchError(ContainSubstring(test.says)))
		})
	}
}

// A pipeline takes exit code 0 of plan for no change.
func TestAFileWithoutAPolicyIsNoPlan(t *testing.T) {
	g, empty := NewWithT(t), filepath.Join(t.TempDir(), "empty.yaml")
	g.Expect(os.WriteFile(empty, []byte("# nothing yet\n---\n"), 0o600)).To(Succeed())
	_, err := (&Program{}).policies([]string{empty}, false)
	g.Expect(err).To(MatchError(And(ContainSubstring(empty), ContainSubstring("it holds no GPUSharingPolicy"))))
}

func TestCommands(t *testing.T) {
	for name, test := range map[string]struct {
		args       []string
		says, errs string
	}{
		"version":             {args: []string{"version"}, says: "kubectl-gpusharing v1.2.3\n"},
		"the flag for it":     {args: []string{"--version"}, says: "kubectl-gpusharing v1.2.3\n"},
		"nothing":             {says: "\n  status      Shows policies"},
		"help":                {args: []string{"help"}, says: "kubectl gpusharing COMMAND"},
		"the flag for help":   {args: []string{"plan", "-h"}, says: "--filename"},
		"an unknown command":  {args: []string{"apply"}, errs: `unknown command "apply"; ` + "`kubectl gpusharing help` lists"},
		"an unknown flag":     {args: []string{"status", "--all"}, errs: "unknown flag: --all; `kubectl gpusharing help` lists"},
		"plan without a file": {args: []string{"plan"}, errs: "plan needs a policy: -f POLICY.yaml"},
		"no such file":        {args: []string{"plan", "-f", "/no/such/file"}, errs: `the path "/no/such/file" does not exist`},
		"no such kubeconfig":  {args: []string{"status", "--kubeconfig", "/no/such/file"}, errs: "name it with --kubeconfig and --context"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			var out strings.Builder
			err := (&Program{Out: &out, Version: "v1.2.3"}).Run(t.Context(), test.args)
			if test.errs != "" {
				g.Expect(err).To(MatchError(ContainSubstring(test.errs)))
				g.Expect(out.String()).To(BeEmpty())
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(out.String()).To(ContainSubstring(test.says))
		})
	}
}

// TestStatusSaysWhyANodeWithoutAPolicyIsNotBack: no policy's status can.
func TestStatusSaysWhyANodeWithoutAPolicyIsNotBack(t *testing.T) {
	g := NewWithT(t)
	n := newNode(t, "a", sim.A100)
	n.GPU.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonDrainTimedOut,
		Message: "not idle within 10m0s: pod team/train (GPU 0)",
	}}
	shown := text{width: 120}
	shown.status(cluster.Snapshot{Nodes: []cluster.Node{n}}, query{})
	g.Expect(shown.String()).To(And(
		ContainSubstring("NODE a   no policy   DrainTimedOut\n"), ContainSubstring("Not idle within 10m0s: pod team/train (GPU 0)")))
}
