// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

func TestNodesOfInstancesAreMadeWhereNVIDIALooks(t *testing.T) {
	needsRoot(t)
	for name, tc := range map[string]struct{ root, ready string }{
		"in a driver container": {root: containerRoot, ready: inContainer}, "on the host": {root: "", ready: onHost},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.install(tc.root)
			m.write(driverReady, tc.ready)
			nodes := driver.NewDeviceNodes(m.node(), m.runner, "")
			m.Expect(nodes.Ensure(t.Context())).To(Succeed())
			m.Expect(m.runner.Lines()).To(BeEmpty(), "no instance, no node, nothing to do")

			m.instance(tc.root, 0, 1)
			m.instance(tc.root, 1, 7)
			m.Expect(nodes.Ensure(t.Context())).To(Succeed())
			m.Expect(m.caps(tc.root)).To(ConsistOf("cap12", "cap13", "cap201", "cap202"))
			m.Expect(m.runner.Commands()).To(HaveLen(1))
			m.Expect(m.runner.Commands()[0].Root).To(Equal(m.path(tc.root)))
			m.Expect(filepath.Join(m.container, "dev/nvidia-caps/nvidia-cap202")).To(BeAnExistingFile(), "the agent opens them too")
			if tc.root != "" {
				m.Expect(os.ReadDir(m.path("dev"))).To(BeEmpty(), "a host without NVIDIA's nodes stays without")
			}

			m.Expect(os.RemoveAll(m.path(tc.root, "proc/driver/nvidia/capabilities/gpu0"))).To(Succeed())
			m.Expect(nodes.Ensure(t.Context())).To(Succeed())
			m.Expect(m.caps(tc.root)).To(HaveLen(4), "nodes of instances that are gone stay: the next ones have the same numbers")
			m.Expect(m.runner.Lines()).To(HaveLen(1), "nothing is missing")
		})
	}
}

func TestNodesAreMadeByTheAgentWhereTheDriversProgramDoesNot(t *testing.T) {
	needsRoot(t)
	m := newMachine(t)
	m.install(containerRoot)
	m.instance(containerRoot, 0, 1)
	m.broken = errors.New("exit status 255: Unable to determine the device handle")
	nodes := driver.NewDeviceNodes(m.node(), m.runner, "")
	m.Expect(nodes.Ensure(t.Context())).To(Succeed())
	made, ok := host.DeviceAt(m.path(containerRoot, "dev/nvidia-caps/nvidia-cap13"))
	m.Expect(ok).To(BeTrue())
	m.Expect(made).To(Equal(host.Device{Major: major, Minor: 13, Mode: 0o444}))
	m.Expect(m.path(containerRoot, "dev/nvidiactl")).To(BeAnExistingFile(), "a control node that was missing")

	m.Expect(host.MakeDevice(m.path(containerRoot, "dev/nvidia-caps/nvidia-cap13"), host.Device{Major: 99, Minor: 13, Mode: 0o444})).To(Succeed())
	m.Expect(nodes.Ensure(t.Context())).To(Succeed())
	made, _ = host.DeviceAt(m.path(containerRoot, "dev/nvidia-caps/nvidia-cap13"))
	m.Expect(made.Major).To(BeEquivalentTo(major), "a node with the number of an earlier module")
}

func TestNodesThatCannotBeMade(t *testing.T) {
	needsRoot(t)
	broken := errors.New("exit status 9")
	tests := map[string]struct {
		spoil func(*machine)
		says  string
	}{
		"the driver forbids it": {
			spoil: func(m *machine) {
				m.write(containerRoot+"/proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", access(12, 0))
			},
			says: "1 device nodes of MIG instances are missing in /run/nvidia/driver, such as /dev/nvidia-caps/nvidia-cap12",
		},
		"the kernel has no such devices": {
			spoil: func(m *machine) { m.write(containerRoot+"/proc/devices", "Character devices:\n195 nvidia\n") },
			says:  "the kernel lists no nvidia-caps in /proc/devices: load the kernel module nvidia",
		},
		"nvidia-smi fails": {
			spoil: func(m *machine) { m.write(containerRoot+"/dev/nvidia-caps", "no folder") }, says: "running nvidia-smi: exit status 9",
		},
		"the kernel shows nonsense": {
			spoil: func(m *machine) {
				m.write(containerRoot+"/proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "DeviceFileMinor: many\n")
			},
			says: `no number in "DeviceFileMinor: many"`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.install(containerRoot)
			m.instance(containerRoot, 0, 1)
			m.broken = broken
			tc.spoil(m)
			m.Expect(driver.NewDeviceNodes(m.node(), m.runner, "").Ensure(t.Context())).To(MatchError(ContainSubstring(tc.says)))
		})
	}
}

const toolkitsSpec = `cdiVersion: 0.5.0
kind: management.nvidia.com/gpu
devices:
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      hostPath: /run/nvidia/driver/dev/nvidia0
      major: 195
      fileMode: 438
      permissions: rwm
    - path: /dev/nvidia-caps/nvidia-cap1
      hostPath: /run/nvidia/driver/dev/nvidia-caps/nvidia-cap1
      major: 241
      minor: 1
      fileMode: 292
      permissions: rwm
    fieldOfALaterVersion: kept
containerEdits:
  hooks:
  - hookName: createContainer
    path: /usr/local/nvidia/toolkit/nvidia-cdi-hook
`

func TestTheSpecOfNVIDIAsOwnPodsListsTheNodesThatThereAre(t *testing.T) {
	needsRoot(t)
	m := newMachine(t)
	m.install(containerRoot)
	m.instance(containerRoot, 0, 1)
	cdi := t.TempDir()
	spec := filepath.Join(cdi, "management.nvidia.com-gpu.yaml")
	nodes := driver.NewDeviceNodes(m.node(), m.runner, cdi)
	m.Expect(nodes.Ensure(t.Context())).To(Succeed())
	m.Expect(spec).NotTo(BeAnExistingFile(), "where the toolkit has written none there is none")

	m.Expect(os.WriteFile(spec, []byte(toolkitsSpec), 0o644)).To(Succeed())
	m.Expect(nodes.Ensure(t.Context())).To(Succeed())
	content, err := os.ReadFile(spec)
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(yaml.YAMLToJSON(content)).To(MatchJSON(`{
		"cdiVersion": "0.5.0", "kind": "management.nvidia.com/gpu",
		"containerEdits": {"hooks": [{"hookName": "createContainer", "path": "/usr/local/nvidia/toolkit/nvidia-cdi-hook"}]},
		"devices": [{"name": "all", "containerEdits": {"fieldOfALaterVersion": "kept", "deviceNodes": [
			{"path": "/dev/nvidia0", "hostPath": "/run/nvidia/driver/dev/nvidia0", "major": 195, "fileMode": 438, "permissions": "rwm"},
			{"path": "/dev/nvidia-caps/nvidia-cap12", "hostPath": "/run/nvidia/driver/dev/nvidia-caps/nvidia-cap12",
				"major": 241, "minor": 12, "fileMode": 292, "permissions": "rwm"},
			{"path": "/dev/nvidia-caps/nvidia-cap13", "hostPath": "/run/nvidia/driver/dev/nvidia-caps/nvidia-cap13",
				"major": 241, "minor": 13, "fileMode": 292, "permissions": "rwm"}]}}]}`),
		"the nodes that there are, cap1 not being among them, and all else as the toolkit wrote it")

	before, err := host.IDOf(spec)
	m.Expect(err).NotTo(HaveOccurred())
	m.Expect(nodes.Ensure(t.Context())).To(Succeed())
	m.Expect(host.IDOf(spec)).To(Equal(before), "one that is right is not written again")
	m.Expect(os.ReadDir(cdi)).To(HaveLen(1), "nothing is left beside it")
}

func TestASpecThatCannotBeBroughtUpToDate(t *testing.T) {
	needsRoot(t)
	for name, tc := range map[string]struct{ content, says string }{
		"no YAML":                  {"devices: [", "not YAML"},
		"no node of the driver":    {"devices: []\n", "it lists no device node of the driver"},
		"something else than maps": {"devices: [all]\ncontainerEdits: none\n", "it lists no device node of the driver"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.install(containerRoot)
			m.instance(containerRoot, 0, 1)
			cdi := t.TempDir()
			spec := filepath.Join(cdi, "management.nvidia.com-gpu.yaml")
			m.Expect(os.WriteFile(spec, []byte(tc.content), 0o644)).To(Succeed())
			err := driver.NewDeviceNodes(m.node(), m.runner, cdi).Ensure(t.Context())
			m.Expect(err).To(MatchError(And(ContainSubstring(spec), ContainSubstring(tc.says), ContainSubstring("delete the pod of NVIDIA's container toolkit"))))
			m.Expect(os.ReadFile(spec)).To(BeEquivalentTo(tc.content))
		})
	}
}
