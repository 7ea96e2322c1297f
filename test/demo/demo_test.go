// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == sweeperCommand {
		sweep(os.Args[2])
		return
	}
	os.Exit(m.Run())
}

func TestSweeperLeavesNothing(t *testing.T) {
	g := NewWithT(t)
	dir := filepath.Join(t.TempDir(), "demo")
	g.Expect(os.Mkdir(dir, 0o755)).To(Succeed())
	sweeper, err := startSweeper(dir)
	g.Expect(err).NotTo(HaveOccurred())
	t.Setenv(marker, dir)
	ours, err := start(filepath.Join(dir, "log"), "/bin/sleep", []string{"600"}, nil)
	g.Expect(err).NotTo(HaveOccurred())
	t.Setenv(marker, dir+"-of-another")
	anothers, err := start(filepath.Join(dir, "log"), "/bin/sleep", []string{"600"}, []string{"KUBECONFIG=" + dir + "/kubeconfig"})
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(anothers.Stop)

	sweeper.finish()
	g.Eventually(ours.Alive).WithTimeout(10*time.Second).Should(BeFalse(), "what the demo started is ended")
	g.Expect(anothers.Alive()).To(BeTrue(), "who only uses the demo is left alone")
	g.Expect(dir).NotTo(BeAnExistingFile())
}

// TestCostIsWhatTheTaintsSay: how many nodes were kept from new pods at once, and for how long.
func TestCostIsWhatTheTaintsSay(t *testing.T) {
	g := NewWithT(t)
	node := func(name string, taints ...corev1.Taint) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Taints: taints}}
	}
	kept, now := corev1.Taint{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule}, time.Now()
	c := cost{since: map[string]time.Time{}}
	g.Expect(c.sum()).To(Equal("no node was kept from new pods"))
	c.observe(node("a", kept), now)
	c.observe(node("b", corev1.Taint{Key: "example.com/other"}), now)
	c.observe(node("b", kept), now.Add(time.Second))
	c.observe(node("a"), now.Add(3*time.Second))
	c.observe(node("b"), now.Add(3*time.Second))
	g.Expect(c.sum()).To(Equal("at most 2 nodes at once kept from new pods, for 3.0 s at most"))
	g.Expect(c.sum()).To(Equal("no node was kept from new pods"), "each change is counted for itself")
}

// TestOfAnOutputThatMatters: what is left out is marked.
func TestOfAnOutputThatMatters(t *testing.T) {
	g := NewWithT(t)
	g.Expect(ends("a\n  b\n\nc\n\nd")).To(Equal("a\n  b\n[…]\nd"))
	g.Expect(ends("a\n\nb")).To(Equal("a\nb"))
	g.Expect(answer("a\nb\n\nc")).To(Equal("a\nb"))
}

func TestPathsOfAContainerOnItsNode(t *testing.T) {
	m := &machine{root: "/demo/node"}
	pod := &corev1.Pod{Spec: corev1.PodSpec{
		Containers: []corev1.Container{{VolumeMounts: []corev1.VolumeMount{
			{Name: "driver", MountPath: "/driver"}, {Name: "tmp", MountPath: "/tmp"}, {Name: "host", MountPath: "/host"},
		}}},
		Volumes: []corev1.Volume{
			{Name: "driver", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/run/nvidia/driver"}}},
			{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}},
			{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		},
	}}
	cases := map[string]struct{ arg, want string }{
		"through a mount":             {"--mps-root=/driver", "--mps-root=/demo/node/run/nvidia/driver"},
		"the node's root":             {"--host-root=/host", "--host-root=/demo/node"},
		"below a mount":               {"--socket=/driver/a/b", "--socket=/demo/node/run/nvidia/driver/a/b"},
		"a folder of the pod alone":   {"--log=/tmp/x", "--log=/tmp/x"},
		"an argument that is no path": {"--resync=1m", "--resync=1m"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) { NewWithT(t).Expect(m.onNode(tc.arg, pod)).To(Equal(tc.want)) })
	}
}
