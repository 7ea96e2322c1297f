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
	eventsv1 "k8s.io/api/events/v1"
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

func TestAbridge(t *testing.T) {
	policy := corev1.ObjectReference{Kind: "GPUSharingPolicy", Name: "p"}
	node := &corev1.ObjectReference{Kind: "Node", Name: "n"}
	cases := map[string]struct {
		event       eventsv1.Event
		about, note string
	}{
		"an action on a node, without the labels": {
			event: eventsv1.Event{Regarding: policy, Related: node, Note: "patch node n (selecting the configuration k): a=b c=d"},
			about: "n", note: "selecting the configuration k",
		},
		"a desired state": {
			event: eventsv1.Event{Regarding: policy, Related: node, Note: "set spec of GPUNode n: applying policy p"},
			about: "n", note: "applying policy p",
		},
		"a taint": {
			event: eventsv1.Event{Regarding: policy, Related: node, Note: "taint node n with x:NoSchedule"},
			about: "n", note: "taint the node with x:NoSchedule",
		},
		"a node, and one whose name begins alike": {
			event: eventsv1.Event{Regarding: policy, Related: node, Note: "wait for node n; node n-b waits too"},
			about: "n", note: "wait for the node; node n-b waits too",
		},
		"a node that a policy waits for": {
			event: eventsv1.Event{Regarding: policy, Note: "0 of 2 nodes ready; node n: the agent is changing the GPUs"},
			about: "n", note: "the agent is changing the GPUs",
		},
		"a policy": {
			event: eventsv1.Event{Regarding: policy, Note: "1 node advertises what the policy asks for"},
			about: "p", note: "1 node advertises what the policy asks for",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			about, note := abridge(&tc.event)
			g.Expect(about).To(Equal(tc.about))
			g.Expect(note).To(Equal(tc.note))
		})
	}
}

func TestCallOf(t *testing.T) {
	cases := map[string]struct{ line, want string }{
		"a call":           {"12:00:00.000 NVML[4711] nvmlDeviceSetMigMode GPU-1 SUCCESS", "nvmlDeviceSetMigMode"},
		"one that failed":  {"12:00:00.000 NVML[4711] nvmlDeviceSetMigMode GPU-1 IN_USE", "nvmlDeviceSetMigMode (IN_USE)"},
		"one of a program": {"12:00:00.000 nvidia-smi[4711] nvidia-smi --gpu-reset GPU-1 SUCCESS", "nvidia-smi --gpu-reset"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) { NewWithT(t).Expect(callOf(tc.line)).To(Equal(tc.want)) })
	}
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
