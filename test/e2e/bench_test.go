// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// The environment of the measurement. GPUSHARING_BENCH=1 runs it; GPUSHARING_BENCH=a=5,b=3 says how often each way is
// measured, where that is not the default. GPUSHARING_BENCH_STATUS is another interval of the kubelet's.
const (
	benchVariable  = "GPUSHARING_BENCH"
	statusVariable = "GPUSHARING_BENCH_STATUS"
)

// statusEvery is how often the kubelet publishes what it offers: Kubernetes' default, where that is measured. It waits
// no longer for the answer than until it publishes again. If an API server is slower than that at the moment when a
// resource that was removed is set to zero, which the kubelet does once, the node offers what the resource had for
// ever.
func statusEvery() time.Duration {
	if os.Getenv(benchVariable) == "" {
		return 2 * time.Second
	}
	if every, err := time.ParseDuration(os.Getenv(statusVariable)); err == nil {
		return every
	}
	return 10 * time.Second
}

// counts are how often each way is measured.
func counts() (map[string]int, error) {
	found := map[string]int{"a": 10, "b": 10, "c": 5, "d": 10, "edits": 100, "mig": 3, "limits": 500}
	for pair := range strings.SplitSeq(os.Getenv(benchVariable), ",") {
		way, count, ok := strings.Cut(pair, "=")
		if !ok {
			continue
		}
		n, err := strconv.Atoi(count)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", benchVariable, err)
		}
		found[way] = n
	}
	return found, nil
}

// How long it takes from the first command of an administrator until the Node offers what it asks for, as a watch on
// the Node sees it.
func speedSpecs() {
	Describe("Speed", Label("bench"), Ordered, Offset(1), func() {
		if os.Getenv(benchVariable) == "" {
			return
		}
		const configMap = "by-hand"
		var (
			count   map[string]int
			samples = map[string][]time.Duration{}
			remarks []string
		)

		BeforeAll(func(ctx SpecContext) {
			var err error
			count, err = counts()
			Expect(err).NotTo(HaveOccurred())
			begin(ctx, sim.A100, sim.A100)
			Expect(kube.Create(ctx, handMade(configMap, map[string]string{
				"three": timeSliced(3), "four": timeSliced(4), "edited": timeSliced(5),
			}))).To(Succeed())
			mergeClusterPolicy(ctx, fmt.Sprintf(`{"spec":{"devicePlugin":{"config":{"name":%q}}}}`, configMap))
			label(ctx, configLabel, "three")
			expectAllocatable(ctx, replicated(3))
		})
		AfterAll(func() { printSpeed(samples, remarks) })

		It("(a) the floor: the label by hand, to a key that is projected", func(ctx SpecContext) {
			for i := range count["a"] {
				anyMoment(ctx, i, count["a"])
				key, replicas := [2]string{"four", "three"}[i%2], 4-i%2
				samples["a"] = append(samples["a"], until(ctx, replicated(replicas), func() { choose(ctx, key) }))
			}
		})

		It("(b) the guides: the ConfigMap edited, the DaemonSet restarted", func(ctx SpecContext) {
			choose(ctx, "edited")
			expectAllocatable(ctx, replicated(5))
			for i := range count["b"] {
				anyMoment(ctx, i, count["b"])
				samples["b"] = append(samples["b"], until(ctx, replicated(6+i), func() {
					writeKey(ctx, configMap, "edited", 6+i)
					kubectl(ctx, "", "rollout", "restart", "-n", gpuoperator.Namespace, "daemonset/nvidia-device-plugin-daemonset")
				}))
			}
		})

		It("(c) patience: a new key, waited for in the device plugin's pod, then the label", func(ctx SpecContext) {
			for i := range count["c"] {
				anyMoment(ctx, i, count["c"])
				key := fmt.Sprintf("new-%d", i)
				samples["c"] = append(samples["c"], until(ctx, replicated(20+i), func() {
					writeKey(ctx, configMap, key, 20+i)
					expectProjected(ctx, configMap, key)
					choose(ctx, key)
				}))
			}
		})

		It("(d) kubectl apply of a changed policy", func(ctx SpecContext) {
			choose(ctx, "")
			mergeClusterPolicy(ctx, `{"spec":{"devicePlugin":{"config":{"name":"","default":""}}}}`)
			Expect(client.IgnoreNotFound(kube.Delete(ctx, handMade(configMap, nil)))).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
			applyReplicas(ctx, 2)
			expectAllocatable(ctx, replicated(2))
			expectReady(ctx, "speed")
			startPod(ctx, "witness", "nvidia.com/gpu", 1)
			expectRunning(ctx, "witness")
			before, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())
			for i := range count["d"] {
				anyMoment(ctx, i, count["d"])
				expectReady(ctx, "speed")
				samples["d"] = append(samples["d"], until(ctx, replicated(3+i), func() { applyReplicas(ctx, 3+i) }))
			}
			expectReady(ctx, "speed")
			after, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())
			remarks = append(remarks, restarted(count["d"], before, after))
			Expect(after).To(Equal(before))
		}, NodeTimeout(time.Hour))

		It("edits of a policy in a row, and who restarts", func(ctx SpecContext) {
			Expect(machine.PublishEvery(ctx, time.Second)).To(Succeed())
			DeferCleanup(func(ctx SpecContext) error { return machine.PublishEvery(ctx, statusEvery()) })
			applyReplicas(ctx, 2)
			expectAllocatable(ctx, replicated(2))
			expectReady(ctx, "speed")
			startPod(ctx, "witness", "nvidia.com/gpu", 1)
			expectRunning(ctx, "witness")
			before, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())
			began := time.Now()
			for i := range count["edits"] {
				applyReplicas(ctx, 3+i%10)
				expectAllocatable(ctx, replicated(3+i%10))
			}
			took := time.Since(began)
			expectReady(ctx, "speed")
			after, err := restarts(ctx)
			Expect(err).NotTo(HaveOccurred())
			remarks = append(remarks, fmt.Sprintf("%s, with a kubelet that publishes every second, in %s",
				restarted(count["edits"], before, after), took.Round(time.Second)))
			Expect(after).To(Equal(before))
		}, NodeTimeout(time.Hour))

		for _, name := range slices.Sorted(maps.Keys(migChanges())) {
			c := migChanges()[name]
			It("(d) a MIG change of an idle GPU: "+name, func(ctx SpecContext) {
				begin(ctx, sim.A100, sim.A100)
				for call, takes := range latencies() {
					Expect(gpus.SetLatency(call, takes)).To(Succeed())
				}
				var all []migCost
				for i := range count["mig"] {
					share(ctx, c.from)
					expectReady(ctx, "shared")
					anyMoment(ctx, i, count["mig"])
					all = append(all, costOf(ctx, c))
				}
				remarks = append(remarks, "MIG, idle GPU, "+name+": "+told(all))
			}, NodeTimeout(30*time.Minute))
		}
	})
}

func timeSliced(replicas int) string {
	return fmt.Sprintf("version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: %d}\n", replicas)
}

// replicated is what two GPUs are then offered as.
func replicated(replicas int) map[string]int64 {
	return map[string]int64{"nvidia.com/gpu": int64(2 * replicas)}
}

// anyMoment spreads what is measured over the kubelet's interval, which began when the last change was seen: without it
// each measurement would begin just after the kubelet has published and last a whole interval.
func anyMoment(ctx context.Context, i, of int) {
	select {
	case <-ctx.Done():
	case <-time.After(statusEvery() * time.Duration(i) / time.Duration(of)):
	}
}

// until does something and says how long it took from its beginning until the Node offers this.
func until(ctx context.Context, want map[string]int64, do func()) time.Duration {
	GinkgoHelper()
	ctx, stop := context.WithTimeout(ctx, 5*time.Minute)
	defer stop()
	w, err := machine.Client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + nodeName})
	Expect(err).NotTo(HaveOccurred())
	defer w.Stop()
	began := time.Now()
	do()
	var seen map[string]int64
	for event := range w.ResultChan() {
		n, ok := event.Object.(*corev1.Node)
		if !ok {
			continue
		}
		seen = advertised(n)
		maps.DeleteFunc(seen, func(_ string, count int64) bool { return count == 0 })
		if maps.Equal(seen, want) {
			return time.Since(began)
		}
	}
	Fail(fmt.Sprintf("the node offers %v and not %v", seen, want))
	return 0
}

// kubectl runs kubectl as an administrator and returns what it says.
func kubectl(ctx context.Context, input string, args ...string) string {
	GinkgoHelper()
	out, err := tryKubectl(ctx, input, args...)
	Expect(err).NotTo(HaveOccurred(), "kubectl %s:\n%s", strings.Join(args, " "), out)
	return out
}

// tryKubectl is kubectl where it may fail.
func tryKubectl(ctx context.Context, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "kubectl"), args...)
	// It finds our plugin beside it.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+node.AdminConfig, "HOME=/tmp", "PATH="+bin+":"+os.Getenv("PATH"))
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if plans := len(args) > 1 && args[1] == "plan"; plans && cmd.ProcessState != nil && cmd.ProcessState.ExitCode() >= 2 {
		err = nil // it says by its exit code what it has found
	}
	return string(out), err
}

// choose names a key in the node's label; empty: none.
func choose(ctx context.Context, key string) {
	GinkgoHelper()
	set := configLabel + "=" + key
	if key == "" {
		set = configLabel + "-"
	}
	kubectl(ctx, "", "label", "node", nodeName, set, "--overwrite")
}

func writeKey(ctx context.Context, configMap, key string, replicas int) {
	GinkgoHelper()
	kubectl(ctx, "", "patch", "configmap", configMap, "-n", gpuoperator.Namespace, "--type=merge",
		"-p", fmt.Sprintf(`{"data":{%q:%q}}`, key, timeSliced(replicas)))
}

// expectProjected waits until the kubelet has written a key to the volume of the device plugin's pod, as it does by
// itself.
func expectProjected(ctx context.Context, configMap, key string) {
	GinkgoHelper()
	pods := &corev1.PodList{}
	Expect(kube.List(ctx, pods, client.InNamespace(gpuoperator.Namespace),
		client.MatchingLabels{"app": "nvidia-device-plugin-daemonset"})).To(Succeed())
	Expect(pods.Items).To(HaveLen(1))
	file := filepath.Join("/var/lib/kubelet/pods", string(pods.Items[0].UID), "volumes/kubernetes.io~configmap", configMap, key)
	Eventually(func() error {
		_, err := os.Stat(file)
		return err
	}, "4m").WithContext(ctx).Should(Succeed())
}

func applyReplicas(ctx context.Context, replicas int) {
	GinkgoHelper()
	kubectl(ctx, fmt.Sprintf(`apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: speed}
spec: {nodeSelector: {}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: %d}}}
`, replicas), "apply", "-f", "-")
}

func restarted(edits int, before, after map[string]int32) string {
	total := int32(0)
	for container, now := range after {
		was, known := before[container]
		if total += now - was; !known {
			total++ // its pod was replaced
		}
	}
	return fmt.Sprintf("%d edits of a policy: %d restarts of %d containers of NVIDIA's and users'", edits, total, len(before))
}

// printSpeed prints the table that docs/dev/performance.md shows.
func printSpeed(samples map[string][]time.Duration, remarks []string) {
	fmt.Printf("\n%s, %d cores, the kubelet publishes every %s, load %s\n\n",
		time.Now().UTC().Format(time.RFC3339), runtime.NumCPU(), statusEvery(), load())
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', 0)
	row := func(cells ...any) {
		_, _ = fmt.Fprintf(table, "| %v\t| %v\t| %v\t| %v\t| %v\t| %v\t|\n", cells...)
	}
	row("way", "runs", "median", "worst", "median / floor", "worst / floor's worst")
	row("---", "---", "---", "---", "---", "---")
	names := map[string]string{
		"a": "(a) floor: label by hand, key projected", "b": "(b) guides: edit the ConfigMap, restart the DaemonSet",
		"c": "(c) add a key, wait for it in the pod, then label", "d": "(d) kubectl apply of a changed policy",
	}
	floor, floorWorst := summary(samples["a"])
	for _, way := range slices.Sorted(maps.Keys(samples)) {
		median, worst := summary(samples[way])
		row(names[way], len(samples[way]), shown(median), shown(worst), ratio(median, floor), ratio(worst, floorWorst))
	}
	_ = table.Flush()
	if median, worst := summary(samples["d"]); median > 0 && floor > 0 {
		fmt.Printf("\naim (d)/(a) ≤ 1.2 in the median: %s; aim (d) never later than the floor + 3 s: %s\n",
			kept(float64(median) <= 1.2*float64(floor)), kept(worst <= floorWorst+3*time.Second))
	}
	for _, r := range remarks {
		fmt.Println(r)
	}
}

// summary is the median, of two in the middle their mean, and the worst; 0 of none.
func summary(all []time.Duration) (median, worst time.Duration) {
	if len(all) == 0 {
		return 0, 0
	}
	sorted := slices.Sorted(slices.Values(all))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2, sorted[n-1]
}

func shown(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

func ratio(d, floor time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/float64(floor)) }

func kept(ok bool) string {
	if ok {
		return "kept"
	}
	return "MISSED"
}

// load is the machine's load average, without which times say little.
func load() string {
	raw, _ := os.ReadFile("/proc/loadavg") // an empty one says so
	one, _, _ := strings.Cut(string(raw), " ")
	return one
}
