// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

func TestContainersAreNamedByTheirLogs(t *testing.T) {
	g := NewWithT(t)
	folder := t.TempDir()
	logs := host.NewContainerLogs(openRoot(t, folder))
	g.Expect(logs.Names()).To(BeEmpty(), "no container has run yet")

	id, other, short := strings.Repeat("0a", 32), strings.Repeat("1b", 32), strings.Repeat("2c", 32)
	links := filepath.Join(folder, "var", "log", "containers")
	g.Expect(os.MkdirAll(links, 0o755)).To(Succeed())
	g.Expect(os.MkdirAll(filepath.Join(folder, "var/log/pods/team-a_starts_c0ffee"), 0o755)).To(Succeed())
	for _, name := range []string{
		"train-0_team-a_main-" + id + ".log", "web.v2-7d_default_cuda-sidecar-" + other + ".log", "lost+found", "a_b_c.log",
	} {
		g.Expect(os.Symlink("/var/log/pods/nowhere", filepath.Join(links, name))).To(Succeed())
	}
	g.Expect(os.Symlink("/var/log/pods/team-a_cut-off_uid-1/main/0.log", filepath.Join(links, "cut-off_team-a_main-"+id[:40]+".log"))).To(Succeed())
	g.Expect(os.Symlink("/var/log/pods/team-a_cut-off_uid-1/a/0.log", filepath.Join(links, "cut-off_team-a_a-"+short+".log"))).To(Succeed())
	g.Expect(logs.Names()).To(Equal(map[string]host.ContainerName{
		id:    {Namespace: "team-a", Pod: "train-0", Container: "main"},
		other: {Namespace: "default", Pod: "web.v2-7d", Container: "cuda-sidecar"},
		// The kubelet cuts the names of such links, not where they lead.
		"uid-1": {Namespace: "team-a", Pod: "cut-off"}, "c0ffee": {Namespace: "team-a", Pod: "starts"},
		short: {Namespace: "team-a", Pod: "cut-off", Container: "a"}, "uid-1/a": {Namespace: "team-a", Pod: "cut-off", Container: "a"},
	}))
}

// names are containers by ID, and pods by UID.
type names map[string]host.ContainerName

func (n names) Names() (map[string]host.ContainerName, error) { return n, nil }

// TestInitContainersHoldWhatTheKubeletHasRecorded while they run.
func TestInitContainersHoldWhatTheKubeletHasRecorded(t *testing.T) {
	g := NewWithT(t)
	uid := func(n string) string { return strings.Repeat(n, 8) + "-1111-1111-1111-111111111111" }
	id := func(n string) string { return strings.Repeat(n, 64) }
	in := func(pod, container string) string { return "0::/kubepods/pod" + uid(pod) + "/" + id(container) + "\n" }
	of := func(pod, container string) host.ContainerName {
		return host.ContainerName{Namespace: "ml", Pod: pod, Container: container}
	}
	known := names{
		id("a"): of("fetches", "fetch"), id("b"): of("trains", "main"),
		uid("1"): of("fetches", ""), uid("2"): of("trains", ""), uid("3"): of("cut", ""),
		uid("1") + "/fetch": {}, uid("2") + "/fetch": {}, uid("2") + "/main": {},
		id("e"): of("proxied", "proxy"), uid("5"): of("proxied", ""), uid("5") + "/proxy": {},
	}
	proc := newProc(t, map[string]string{
		"1/cgroup": "0::/init.scope\n", "10/cgroup": in("1", "a"), "11/cgroup": in("1", "c"), "20/cgroup": in("2", "b"), "30/cgroup": in("3", "d"),
		"50/cgroup": in("5", "e"), "51/cgroup": in("5", "f"),
	})
	kubelet := host.Kubelet{Host: t.TempDir(), Folder: "/var/lib/kubelet"}
	g.Expect(kubelet.Held(proc, known)).To(BeEmpty(), "the kubelet has allocated nothing yet")
	entry := func(pod, device string) string {
		return `{"PodUID":"` + uid(pod) + `","ContainerName":"fetch","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["` + device + `"]},"AllocResp":"Cg=="}`
	}
	folder := filepath.Join(kubelet.Host, kubelet.Folder, "device-plugins")
	g.Expect(os.MkdirAll(folder, 0o755)).To(Succeed())
	record := `{"Data":{"PodDeviceEntries":[` + entry("1", "GPU-1") + "," + entry("2", "GPU-2") + "," + entry("3", "GPU-3") + "," + entry("4", "GPU-4") + "," + entry("5", "GPU-5") +
		`],"RegisteredDevices":{"nvidia.com/gpu":["GPU-1"]}},"Checksum":1}`
	g.Expect(os.WriteFile(filepath.Join(folder, "kubelet_internal_checkpoint"), []byte(record), 0o600)).To(Succeed())
	g.Expect(kubelet.Held(proc, known)).To(Equal([]host.HeldDevice{
		{of("fetches", "fetch"), "GPU-1"},
		{of("cut", "fetch"), "GPU-3"},
		{of("proxied", "fetch"), "GPU-5"},
	}), "another has ended, and a whole pod; one beside a sidecar may be about to start")
}
