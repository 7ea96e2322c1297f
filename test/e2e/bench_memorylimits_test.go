// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// How long a pod has no limit, and what the agent costs at rest.
func limitSpeedSpecs() {
	Describe("Speed of memory limits", Label("bench"), Ordered, Offset(1), func() {
		if os.Getenv(benchVariable) == "" {
			return
		}
		ask := func(ctx context.Context, limit string) {
			GinkgoHelper()
			share(ctx, "{strategy: TimeSlicing, timeSlicing: {replicas: 110, memory: {perReplica: 256Mi, limit: "+limit+"}}}")
			expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 110})
			expectReady(ctx, "shared")
		}
		BeforeAll(func(ctx SpecContext) {
			beginLimits(ctx)
			ask(ctx, "Enforce")
		})
		AfterAll(endLimits)

		It("from a pod's cgroup to its limit, beside the first process of its container", func(ctx SpecContext) {
			count, err := counts()
			Expect(err).NotTo(HaveOccurred())
			made := watchPods(ctx)
			limited, began := samplesOf{}, samplesOf{}
			before := 0
			for first := 0; first < count["limits"]; first += 10 {
				for _, p := range startTogether(ctx, first, 10) {
					path := filepath.Join(standRoot, "kubepods/besteffort/pod"+string(p.UID))
					var set time.Time
					Eventually(func() (err error) { set, err = whenLimited(path); return err }).WithContext(ctx).Should(Succeed())
					started := givenTo(ctx, client.ObjectKeyFromObject(&p)).Began
					limited = append(limited, set.Sub(made(path)))
					began = append(began, started.Sub(made(path)))
					if started.Before(set) {
						before++
					}
				}
				stopPods(ctx)
			}
			load, _ := os.ReadFile("/proc/loadavg") // it is only said
			AddReportEntry("memory limits", fmt.Sprintf("%d pods, 10 at once, load %s\nfrom the pod's cgroup to its limit: %s\nto the container's first process: %s\nprocesses that began before the limit: %d",
				len(limited), strings.TrimSpace(string(load)), limited, began, before))
		}, NodeTimeout(80*time.Minute))

		It("the processor's time of the agent with 100 pods at rest, beside the same without limits", func(ctx SpecContext) {
			startTogether(ctx, 10_000, 90)
			DeferCleanup(stopPods)
			const during = 2 * time.Minute
			for _, mode := range []string{"Enforce", "None"} {
				ask(ctx, mode)
				reason := map[string]string{"Enforce": "True Enforced"}[mode]
				Eventually(limitedReason).WithContext(ctx).Should(Equal(reason))
				pid := processOf(ctx, client.ObjectKey{Namespace: operatorNamespace, Name: podNamed(ctx, "gpu-sharing-agent")})
				was := processorTime(pid)
				Consistently(limitedReason, during, "1m").WithContext(ctx).Should(Equal(reason))
				AddReportEntry("agent at rest, 90 pods, "+mode, fmt.Sprintf("%.3f %% of a core", 100*float64(processorTime(pid)-was)/float64(during)))
			}
		}, NodeTimeout(40*time.Minute))
	})
}

type samplesOf []time.Duration

func (s samplesOf) String() string {
	sorted := slices.Sorted(slices.Values(s))
	at := func(percent int) time.Duration { return sorted[(len(sorted)-1)*percent/100].Round(time.Millisecond) }
	return fmt.Sprintf("p50 %s, p99 %s, %s to %s", at(50), at(99), at(0), at(100))
}

// startTogether starts pods at once, and waits until all run.
func startTogether(ctx context.Context, first, count int) (pods []corev1.Pod) {
	GinkgoHelper()
	for i := range count {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: fmt.Sprintf("many-%d", first+i)}, Spec: requesting("nvidia.com/gpu", 1)}
		Expect(kube.Create(ctx, &p)).To(Succeed())
		pods = append(pods, p)
	}
	for i := range pods {
		expectRunning(ctx, pods[i].Name)
		Expect(kube.Get(ctx, client.ObjectKeyFromObject(&pods[i]), &pods[i])).To(Succeed()) // another one may have taken its place
	}
	return pods
}

// watchPods notes when the kubelet makes the cgroups of pods. What it returns is when one was made.
func watchPods(ctx context.Context) (made func(path string) time.Time) {
	GinkgoHelper()
	w, err := fsnotify.NewWatcher()
	Expect(err).NotTo(HaveOccurred())
	Expect(w.Add(filepath.Join(standRoot, "kubepods/besteffort"))).To(Succeed())
	context.AfterFunc(ctx, func() { _ = w.Close() })
	var mu sync.Mutex
	seen := map[string]time.Time{}
	go func() {
		for e := range w.Events {
			mu.Lock()
			if e.Has(fsnotify.Create) {
				seen[e.Name] = time.Now()
			}
			mu.Unlock()
		}
	}()
	return func(path string) time.Time {
		GinkgoHelper()
		mu.Lock()
		defer mu.Unlock()
		Expect(seen).To(HaveKey(path))
		return seen[path]
	}
}

// whenLimited is when the driver was first told the limit of a cgroup, by its log of calls.
func whenLimited(path string) (time.Time, error) {
	raw, err := os.ReadFile(filepath.Join(driver.Hardware, "calls.log"))
	if err != nil {
		return time.Time{}, err
	}
	for line := range strings.SplitSeq(string(raw), "\n") {
		if f := strings.Fields(line); len(f) == 5 && f[2] == simdriver.LimitSet && f[3] == path {
			return time.Parse("2006-01-02 15:04:05.000", time.Now().UTC().Format("2006-01-02 ")+f[0])
		}
	}
	return time.Time{}, fmt.Errorf("%s has no limit yet", path)
}

// processorTime is what a process has had so far, of the kernel's time too.
func processorTime(pid int) (sum time.Duration) {
	GinkgoHelper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	Expect(err).NotTo(HaveOccurred())
	const user, system, tick = 11, 12, 10 * time.Millisecond // after the name, from 0; 100 ticks a second
	f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	for _, i := range []int{user, system} {
		n, err := strconv.Atoi(f[i])
		Expect(err).NotTo(HaveOccurred())
		sum += time.Duration(n) * tick
	}
	return sum
}
