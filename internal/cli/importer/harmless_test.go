// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer_test

import (
	"maps"
	"testing"

	nvidia "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/importer"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// t4 is a GPU that cannot be partitioned.
func t4(index int32) v1alpha1.DeviceStatus {
	d := whole(index)
	d.Product, d.MIGCapable = "Tesla-T4", false
	return d
}

// NVIDIA's plugin reads most names of fields in any case, and those of shared resources exactly.
func TestImportReadsWhatNVIDIAsPluginReads(t *testing.T) {
	for name, data := range map[string]string{
		"another case": "Version: v1\nsharing:\n  timeslicing:\n    resources: [{name: nvidia.com/gpu, replicas: 4}]\n",
		"exact names":  "sharing: {timeSlicing: {renamebydefault: true, resources: [{name: nvidia.com/gpu, replicas: 4, Replicas: 8}]}}\n",
		"renamed":      "sharing: {TIMESLICING: {renameByDefault: true, failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			var plugin nvidia.Config
			g.Expect(yaml.Unmarshal([]byte(data), &plugin)).To(Succeed())
			g.Expect(plugin.Sharing.TimeSlicing.Resources[0].Replicas).To(Equal(4))
			d := importer.Describe(importer.Cluster{ConfigMap: "ConfigMap a/b", Default: "k", Configs: labels{"k": data}, Nodes: []cluster.Node{node("a", nil, whole(0))}})
			g.Expect(d.Policies).To(HaveLen(1), "%v", d.Rest)
			sharing := d.Policies[0].Spec.Sharing
			g.Expect(sharing.TimeSlicing.Replicas).To(BeEquivalentTo(4))
			g.Expect(*sharing.Advertise.RenameByDefault).To(Equal(plugin.Sharing.TimeSlicing.RenameByDefault))
			g.Expect(*sharing.Advertise.FailRequestsGreaterThanOne).To(Equal(plugin.Sharing.TimeSlicing.FailRequestsGreaterThanOne))
		})
	}
}

// What the API server refuses is named and left out.
func TestImportPrintsNoLayoutThatTheAPIRefuses(t *testing.T) {
	for strategy, layouts := range map[string][]string{
		"mixed": {
			"{devices: all, mig-enabled: true, mig-devices: {1c.3g.20gb: 2}}", "{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 9}}",
			"{devices: all, mig-enabled: true, mig-devices: {1g.5gb+me: 2}}", "{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}, {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}",
		},
		"single": {
			"{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}",
			"{devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}, {devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 2}}",
		},
	} {
		for _, layout := range layouts {
			t.Run(layout, func(t *testing.T) {
				g := NewWithT(t)
				d := importer.Describe(importer.Cluster{
					MIGStrategy: strategy, MIGConfigs: "version: v1\nmig-configs:\n  split: [" + layout + "]\n",
					Nodes: []cluster.Node{node("a", labels{"nvidia.com/mig.config": "split"})},
				})
				g.Expect(d.Policies).To(BeEmpty())
				g.Expect(d.Rest).To(ContainElement(HavePrefix("node a: ")))
			})
		}
	}
}

// onKarpenter are the labels that Karpenter gives on AWS (https://karpenter.sh/docs/concepts/scheduling/#well-known-labels).
func onKarpenter(pool, instanceType, cpu, size string) labels {
	return labels{
		"node.kubernetes.io/instance-type": instanceType, "karpenter.sh/nodepool": pool, "karpenter.sh/capacity-type": "on-demand",
		"karpenter.k8s.aws/ec2nodeclass": "default", "karpenter.k8s.aws/instance-family": "g5", "karpenter.k8s.aws/instance-cpu": cpu,
		"karpenter.k8s.aws/instance-size": size, "karpenter.k8s.aws/instance-gpu-name": "a10g",
	}
}

// Policies select nodes by a label that the nodes of tomorrow have too: the name of the node pool, not what its machine of today is.
func TestImportSelectsTheNodePool(t *testing.T) {
	for name, c := range map[string]struct{ shared, other, want labels }{
		"Karpenter": {
			onKarpenter("notebooks", "g5.xlarge", "4", "xlarge"), onKarpenter("training", "g5.12xlarge", "48", "12xlarge"), labels{"karpenter.sh/nodepool": "notebooks"},
		},
		"GKE": {
			labels{"cloud.google.com/gke-nodepool": "notebooks", "cloud.google.com/gke-cpu-scaling-level": "4", "cloud.google.com/machine-family": "n1"},
			labels{"cloud.google.com/gke-nodepool": "training", "cloud.google.com/gke-cpu-scaling-level": "16", "cloud.google.com/machine-family": "n1"},
			labels{"cloud.google.com/gke-nodepool": "notebooks"},
		},
		"EKS": {
			labels{"eks.amazonaws.com/nodegroup": "notebooks", "eks.amazonaws.com/capacityType": "SPOT"},
			labels{"eks.amazonaws.com/nodegroup": "training", "eks.amazonaws.com/capacityType": "ON_DEMAND"},
			labels{"eks.amazonaws.com/nodegroup": "notebooks"},
		},
		"AKS": {
			labels{"kubernetes.azure.com/agentpool": "notebooks", "kubernetes.azure.com/mode": "user"},
			labels{"kubernetes.azure.com/agentpool": "training", "kubernetes.azure.com/mode": "system"},
			labels{"kubernetes.azure.com/agentpool": "notebooks"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			shared := maps.Clone(c.shared)
			shared[configLabel] = "ts"
			d := importer.Describe(importer.Cluster{
				ConfigMap: "ConfigMap gpu-operator/plugin", Nodes: []cluster.Node{node("a", shared), node("b", c.other)},
				Configs: labels{"ts": "{version: v1, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}"},
			})
			g.Expect(d.Policies).To(HaveLen(1))
			g.Expect(d.Policies[0].Spec.NodeSelector.MatchLabels).To(BeEquivalentTo(c.want))
		})
	}
}

// What a node offers is the proof: a policy that would change it is left out, whatever the reason.
func TestImportLeavesOutANodeThatOffersSomethingElse(t *testing.T) {
	g := NewWithT(t)
	is := importer.Cluster{ConfigMap: "ConfigMap a/b", Default: "k", Configs: labels{"k": cernSlice4}, Nodes: []cluster.Node{node("a", nil, t4(0), t4(1))}}
	is.Nodes[0].Allocatable = map[string]int64{"nvidia.com/gpu.shared": 8}
	g.Expect(importer.Describe(is).Policies).To(HaveLen(1))
	is.Nodes[0].Allocatable = map[string]int64{"nvidia.com/gpu.shared": 7}
	is.Nodes[0].Unallocatable = map[string]int64{"nvidia.com/gpu.shared": 1}
	g.Expect(importer.Describe(is).Policies).To(HaveLen(1), "an unhealthy replica is one of them")
	is.Nodes[0].Unallocatable = nil
	d := importer.Describe(is)
	g.Expect(d.Policies).To(BeEmpty())
	g.Expect(d.Rest).To(ContainElement(ContainSubstring("offers nvidia.com/gpu.shared: 7, and a policy would make it nvidia.com/gpu.shared: 8")))
	is.Default, is.Nodes[0].Allocatable = "", map[string]int64{"nvidia.com/gpu": 8}
	g.Expect(importer.Describe(is).Rest).To(ContainElement(ContainSubstring("offers nvidia.com/gpu: 8")), "by something that import does not read")
}

// Without the name of a ConfigMap config.default of the ClusterPolicy has no effect, and no config-manager fails by it.
func TestImportHeedsNoDefaultWithoutAConfigMap(t *testing.T) {
	g := NewWithT(t)
	is := importer.Cluster{GPUOperator: true, Default: "any", Nodes: []cluster.Node{node("a", nil, t4(0))}}
	is.Nodes[0].Allocatable = map[string]int64{"nvidia.com/gpu": 1}
	g.Expect(importer.Describe(is).Rest).To(ConsistOf("node a: whole GPUs that are not shared need no policy"))
}

// What mig-manager has not brought about is not there, and without an agent nobody knows what is: a policy by the label would change it.
func TestImportBelievesNoLayoutThatFailed(t *testing.T) {
	for state, described := range map[string]int{"failed": 0, "pending": 0, "rebooting": 0, "success": 1, "": 1} {
		t.Run(state, func(t *testing.T) {
			g := NewWithT(t)
			n := node("a", labels{"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/mig.config.state": state})
			d := importer.Describe(importer.Cluster{GPUOperator: true, MIGStrategy: "mixed", Nodes: []cluster.Node{n}})
			g.Expect(d.Policies).To(HaveLen(described), "%v", d.Rest)
			if described == 0 {
				g.Expect(d.Rest).To(ConsistOf(And(ContainSubstring("mig.config.state="+state), ContainSubstring("import again once the operator runs"))))
			}
		})
	}
}

// Nodes that NVIDIA's device plugin does not serve share nothing by its keys, and refuse a policy.
func TestImportLeavesOutNodesThatOptedOut(t *testing.T) {
	for name, c := range map[string]struct {
		labels   labels
		workload string
		policies int
	}{
		"no operands":                     {labels{"nvidia.com/gpu.deploy.operands": "false"}, "", 0},
		"virtual machines":                {labels{"nvidia.com/gpu.workload.config": "vm-passthrough"}, "container", 0},
		"virtual machines by default":     {nil, "vm-vgpu", 0},
		"a label that counts for nothing": {labels{"nvidia.com/gpu.workload.config": "vm-passthrough"}, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			d := importer.Describe(importer.Cluster{
				GPUOperator: true, ConfigMap: "ConfigMap a/b", Default: "k", Configs: labels{"k": cernSlice4}, Workload: c.workload, Nodes: []cluster.Node{node("a", c.labels)},
			})
			NewWithT(t).Expect(d.Policies).To(HaveLen(c.policies), "%v", d.Rest)
		})
	}
}

// What decides how a container gets its GPUs is not taken from pods that start later: a policy cannot say it. What NVIDIA's README shows is what its
// plugin does anyway.
func TestImportTakesNoWayOfGivingGPUs(t *testing.T) {
	const readme = "migStrategy: none, failOnInitError: true, nvidiaDriverRoot: /, plugin: {passDeviceSpecs: false, deviceListStrategy: [envvar], deviceIDStrategy: uuid}"
	for flags, left := range map[string]string{
		"flags: {" + readme + "}":                                    "",
		"flags: {gfd: {sleepInterval: 30s}}":                         "",
		"flags: {plugin: {deviceListStrategy: volume-mounts}}":       "flags.plugin.deviceListStrategy volume-mounts",
		"flags: {Plugin: {DeviceIDStrategy: index}}":                 "flags.Plugin.DeviceIDStrategy index",
		"flags: {plugin: {deviceListStrategy: [envvar, cdi-cri]}}":   "flags.plugin.deviceListStrategy envvar cdi-cri",
		"flags: {gdsEnabled: true, plugin: {passDeviceSpecs: true}}": "flags.gdsEnabled true and flags.plugin.passDeviceSpecs true",
		"imex: {channelIDs: [0]}":                                    "imex.channelIDs 0",
	} {
		t.Run(flags, func(t *testing.T) {
			g := NewWithT(t)
			d := importer.Describe(importer.Cluster{
				ConfigMap: "ConfigMap a/b", GPUOperator: true, Nodes: []cluster.Node{node("a", labels{configLabel: "k"}, whole(0))},
				Configs: map[string]string{"k": "{version: v1, " + flags + ", sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}"},
			})
			if left == "" {
				g.Expect(d.Policies).To(HaveLen(1), "%v", d.Rest)
				return
			}
			g.Expect(d.Policies).To(BeEmpty())
			g.Expect(d.Rest).To(ContainElement(ContainSubstring("node a: its key sets " + left + ", which no policy can say")))
		})
	}
}

// A node that a policy selects and cannot be honoured on has no policy either, and one that is printed for it would conflict for ever.
func TestImportLeavesOutNodesThatAPolicySelects(t *testing.T) {
	selects := func(priority int32) v1alpha1.GPUSharingPolicy {
		p := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}}
		p.Spec.Priority, p.Spec.NodeSelector = priority, &v1alpha1.NodeSelector{}
		p.Spec.Sharing = v1alpha1.Sharing{Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{Layouts: []v1alpha1.MIGLayout{{Fill: "1g"}}}}
		return p
	}
	for priority, described := range map[int32]int{0: 0, -1: 1} {
		g := NewWithT(t)
		d := importer.Describe(importer.Cluster{
			ConfigMap: "ConfigMap a/b", GPUOperator: true, Nodes: []cluster.Node{node("a", labels{configLabel: "k"}, whole(0))},
			Configs:  map[string]string{"k": "{version: v1, sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}"},
			Policies: []v1alpha1.GPUSharingPolicy{selects(priority)},
		})
		g.Expect(d.Policies).To(HaveLen(described), "%v", d.Rest)
		if described == 0 {
			g.Expect(d.Rest).To(ContainElement(ContainSubstring("node a: policy all selects already")))
		}
	}
}
