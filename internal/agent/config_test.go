// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const (
	pluginPod   = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
	featuresPod = "1a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
)

// programs is the proc file system of a node, with the kubelet's folder below it.
type programs struct {
	*testing.T
	dir string
}

func (p programs) write(file, content string) {
	p.Helper()
	path := filepath.Join(p.dir, file)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		p.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		p.Fatal(err)
	}
}

// start starts a process of a pod, which sees some configurations.
func (p programs) start(pid int, pod, command, environ string, keys ...string) {
	p.Helper()
	dir := strconv.Itoa(pid)
	p.write(dir+"/comm", command+"\n")
	p.write(dir+"/environ", environ)
	p.write(dir+"/cgroup", "4:memory:/kubepods/pod"+pod+"/"+pod+"\n")
	for _, key := range keys {
		p.project(pod, key)
	}
}

func (p programs) project(pod, key string) {
	p.write("kubelet/pods/"+pod+"/volumes/kubernetes.io~configmap/available-configs/"+key, "version: v1\n")
}

const environ = "PATH=/bin\x00CONFIG_FILE_SRCDIR=/available-configs\x00ONESHOT=false\x00"

func TestConfigReporter(t *testing.T) {
	g, cluster := NewWithT(t), env.Start(t)
	proc := programs{T: t, dir: t.TempDir()}
	root, err := os.OpenRoot(proc.dir)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	since := metav1.NewTime(time.Unix(1_800_000_000, 0))
	clock := testclock.NewFakePassiveClock(since.Time)
	reporter := agent.NewConfigReporter("node-config", cluster.Client, agent.NewStatusWriter(cluster.Client), host.NewProc(root), host.NewProc(root),
		host.Kubelet{Host: proc.dir, Folder: "/kubelet"}, clock)

	desired := func(key string) {
		want := ac.GPUNode("node-config").WithSpec(ac.GPUNodeSpec().WithConfigName(key).WithChangeTime(since))
		g.Expect(cluster.Client.Apply(t.Context(), want, client.FieldOwner("gpusharing-controller"), client.ForceOwnership)).To(Succeed())
	}
	get := func() *v1alpha1.GPUNode {
		o := &v1alpha1.GPUNode{}
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: "node-config"}, o)).To(Succeed())
		return o
	}
	again := func() time.Duration {
		result, err := reporter.Reconcile(t.Context(), get())
		g.Expect(err).NotTo(HaveOccurred())
		return result.RequeueAfter
	}
	report := func(key string, pods ...string) v1alpha1.ConfigStatus {
		return v1alpha1.ConfigStatus{Name: key, ChangeTime: since, PodUIDs: pods}
	}

	proc.start(10, pluginPod, "config-manager", environ, "first")
	proc.start(11, featuresPod, "config-manager", environ)
	proc.start(12, "3a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "config-manager", "CONFIG_FILE_SRCDIR=/available-configs\x00ONESHOT=true\x00")
	proc.start(13, "2a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "python3", environ)

	desired("")
	g.Expect(again()).To(BeZero(), "nothing is looked for where nothing is desired")

	desired("first")
	g.Expect(again()).To(Equal(50*time.Millisecond), "GPU Feature Discovery does not see it yet")
	g.Expect(get().Status.Config).To(BeZero())
	clock.SetTime(since.Add(time.Second - 1))
	g.Expect(again()).To(Equal(50 * time.Millisecond))
	g.Expect(get().Status.Config).To(BeZero(), "one write is enough for pods that see it within a second")
	clock.SetTime(since.Add(time.Second))
	g.Expect(again()).To(Equal(50 * time.Millisecond))
	g.Expect(get().Status.Config).To(Equal(report("first", pluginPod)),
		"a process that only looks like NVIDIA's, in a pod of any user, holds up no other for longer")

	clock.SetTime(since.Add(10 * time.Second))
	g.Expect(again()).To(Equal(time.Second), "it is late")
	proc.project(featuresPod, "first")
	g.Expect(again()).To(Equal(5*time.Second), "pods still come and go")
	g.Expect(get().Status.Config).To(Equal(report("first", pluginPod, featuresPod)))

	g.Expect(os.RemoveAll(filepath.Join(proc.dir, "11"))).To(Succeed())
	clock.SetTime(since.Add(time.Hour))
	g.Expect(again()).To(BeZero(), "long after a change of the spec nothing is looked for")
	g.Expect(get().Status.Config).To(Equal(report("first", pluginPod)), "a pod that is gone sees nothing")

	desired("second")
	version := get().ResourceVersion
	g.Expect(again()).To(Equal(50*time.Millisecond), "the clock of the controller that stamped it may be an hour behind")
	clock.SetTime(since.Add(time.Hour + 2*time.Minute))
	g.Expect(again()).To(Equal(30 * time.Second))
	g.Expect(get().Status.Config).To(Equal(report("first", pluginPod)), "what was reported stays until one sees the other")
	g.Expect(get().ResourceVersion).To(Equal(version), "nothing was written")
}

// TestTenantsDoNotCrowdOutNVIDIAsPods: any pod can run a program of that name and mount a ConfigMap of its own with the
// key, and a report has room for 16.
func TestTenantsDoNotCrowdOutNVIDIAsPods(t *testing.T) {
	g, cluster := NewWithT(t), env.Start(t)
	proc := programs{T: t, dir: t.TempDir()}
	root, err := os.OpenRoot(proc.dir)
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	link := func(name, target string) {
		g.Expect(os.MkdirAll(filepath.Join(proc.dir, filepath.Dir(name)), 0o755)).To(Succeed())
		g.Expect(os.Symlink(target, filepath.Join(proc.dir, name))).To(Succeed())
	}
	link("self", "1")
	link("1/ns/user", "user:[1]")
	for i := range 40 {
		proc.start(100+i, fmt.Sprintf("000000%02d-4e5f-6071-8293-a4b5c6d7e8f9", i), "config-manager", environ, "research")
	}
	proc.start(10, pluginPod, "config-manager", environ, "research")
	proc.write("10/status", "CapEff:\t000001ffffffffff\n")
	link("10/ns/user", "user:[1]")
	since := metav1.NewTime(time.Unix(1_800_000_000, 0))
	want := ac.GPUNode("node-crowded").WithSpec(ac.GPUNodeSpec().WithConfigName("research").WithChangeTime(since))
	g.Expect(cluster.Client.Apply(t.Context(), want, client.FieldOwner("gpusharing-controller"), client.ForceOwnership)).To(Succeed())
	node := &v1alpha1.GPUNode{}
	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: "node-crowded"}, node)).To(Succeed())
	reporter := agent.NewConfigReporter("node-crowded", cluster.Client, agent.NewStatusWriter(cluster.Client), host.NewProc(root), host.NewProc(root),
		host.Kubelet{Host: proc.dir, Folder: "/kubelet"}, testclock.NewFakePassiveClock(since.Time))
	_, err = reporter.Reconcile(t.Context(), node)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: "node-crowded"}, node)).To(Succeed())
	g.Expect(node.Status.Config.PodUIDs).To(And(HaveLen(16), ContainElement(pluginPod)))
}
