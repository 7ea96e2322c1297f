// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/importer"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

var update = flag.Bool("update", false, "write the golden files anew")

const a100 = "NVIDIA-A100-PCIE-40GB"

// whole is a GPU that is not partitioned.
func whole(index int32) v1alpha1.DeviceStatus {
	return v1alpha1.DeviceStatus{
		UUID: "GPU-" + string('a'+index), Index: index, Product: a100, MIGCapable: true,
		Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
	}
}

// cut is a GPU with instances.
func cut(index int32, instances ...v1alpha1.InstanceCount) v1alpha1.DeviceStatus {
	d := whole(index)
	d.Sharing = v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: instances}
	return d
}

func count(profile string, n int32) v1alpha1.InstanceCount {
	return v1alpha1.InstanceCount{Profile: profile, Count: n}
}

func node(name string, labels map[string]string, devices ...v1alpha1.DeviceStatus) cluster.Node {
	all := map[string]string{
		"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "nvidia.com/gpu.present": "true",
		"feature.node.kubernetes.io/pci-10de.present": "true",
	}
	maps.Copy(all, labels)
	return cluster.Node{Name: name, Labels: all, GPU: v1alpha1.GPUNode{Status: v1alpha1.GPUNodeStatus{Devices: devices}}}
}

type labels = map[string]string

const configLabel = v1alpha1.LabelConfig

// The configurations of the guides, word for word.
const (
	blogTimeSlicing = `version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 10
`
	blogMIG = `version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 2
      - name: nvidia.com/mig-1g.5gb
        replicas: 2
      - name: nvidia.com/mig-2g.10gb
        replicas: 2
      - name: nvidia.com/mig-3g.20gb
        replicas: 2
      - name: nvidia.com/mig-7g.40gb
        replicas: 2
`
	blogMPS = `version: v1
sharing:
  mps:
    # renameByDefault: false
    # if we rename the resources they will move
    # to gpu.shared vs gpu
    resources:
    - name: nvidia.com/gpu
      replicas: 10
`
	cernSlice4 = `version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - name: nvidia.com/gpu
        replicas: 4
`
	cernMIG = `version: v1
mig-configs:
  # A100-40GB
  3g.20gb-2x2g.10gb:
    - devices: all
      mig-enabled: true
      mig-devices:
        "2g.10gb": 2
        "3g.20gb": 1
`
	nvidiaMPSAny = `version: v1
sharing:
  mps:
    renameByDefault: false
    resources:
    - name: nvidia.com/gpu
      replicas: 4
`
)

// ofEKS are the labels of a node of a cloud.
func ofEKS(zone, id, key string) labels {
	all := labels{
		"eks.amazonaws.com/nodegroup": "gpu", "eks.amazonaws.com/nodegroup-image": "ami-" + id, "alpha.eksctl.io/instance-id": id,
		"topology.ebs.csi.aws.com/zone": zone, "topology.kubernetes.io/zone": zone, "topology.gke.io/zone": zone, "zone": zone,
		"disk.csi.example.com/node": id, "karpenter.sh/nodeclaim": id, "example.com/host": id, "hostname": id,
		"kubernetes.azure.com/node-image-version": id, "machine.example.com/machine": id, "node.kubernetes.io/instance-type": "g4dn.xlarge",
	}
	if key != "" {
		all[configLabel] = key
	}
	return all
}

// TestDescribe shows what clusters that were shared by hand, as the guides say, look like as policies.
func TestDescribe(t *testing.T) {
	balanced := []v1alpha1.InstanceCount{count("1g.5gb", 2), count("2g.10gb", 1), count("3g.20gb", 1)}
	for name, c := range map[string]importer.Cluster{
		"nothing-is-shared": {Nodes: []cluster.Node{node("a", nil, whole(0)), node("b", nil)}},
		"blog-time-slicing": {
			ConfigMap: "ConfigMap nvidia-gpu-operator/time-slicing-config", Configs: labels{a100: blogTimeSlicing}, MIGStrategy: "single",
			Nodes: []cluster.Node{node("perf-intel-6", labels{configLabel: a100}, whole(0), whole(1)), node("other", nil, whole(0))},
		},
		"blog-mig": {
			ConfigMap: "ConfigMap nvidia-gpu-operator/mig-profiles-config", Configs: labels{a100: blogMIG}, MIGStrategy: "mixed",
			Nodes: []cluster.Node{node("perf-intel-6", labels{
				configLabel: a100, "nvidia.com/mig.config": "all-3g.20gb", "nvidia.com/mig.config.state": "success",
			}, cut(0, count("3g.20gb", 2)), cut(1, count("3g.20gb", 2)))},
		},
		"blog-mps": {
			ConfigMap: "ConfigMap nvidia-gpu-operator/mps-enable-config", Configs: labels{a100: blogMPS},
			Nodes: []cluster.Node{node("perf-intel-6", labels{configLabel: a100}, whole(0))},
		},
		"cern": {
			ConfigMap: "ConfigMap kube-system/nvidia-time-slicing-config", Configs: labels{"slice-4": cernSlice4, "slice-8": cernSlice4},
			MIGConfigs: cernMIG, MIGStrategy: "mixed",
			Nodes: []cluster.Node{
				node("t4-1", labels{configLabel: "slice-4", "pool": "inference"}, whole(0)),
				node("t4-2", labels{configLabel: "slice-4", "pool": "inference"}, whole(0)),
				node("a100-1", labels{"nvidia.com/mig.config": "3g.20gb-2x2g.10gb"}),
			},
		},
		"nvidia-mps-for-all": {
			ConfigMap: "ConfigMap gpu-operator/mps-config-all", Configs: labels{"mps-any": nvidiaMPSAny}, Default: "mps-any",
			Nodes: []cluster.Node{node("a", nil, whole(0)), node("b", nil, whole(0))},
		},
		"builtin-layouts": {
			MIGStrategy: "mixed",
			Nodes: []cluster.Node{
				node("a", labels{"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/mig.config.state": "success"}, cut(0, count("1g.5gb", 7))),
				node("b", labels{"nvidia.com/mig.config": "all-balanced"}, cut(0, balanced...), cut(1, balanced...)),
				node("c", labels{"nvidia.com/mig.config": "all-disabled"}, whole(0)),
				node("d", labels{"nvidia.com/mig.config": "all-1g.10gb.me"}),
				node("e", labels{"nvidia.com/mig.config": "all-balanced"}),
				node("f", labels{"nvidia.com/mig.config": "all-enabled"}),
				node("g", labels{"nvidia.com/mig.config": "custom"}),
				node("h", labels{"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/mig.config.state": "failed"}, whole(0)),
			},
		},
		"what-no-policy-can-say": {
			ConfigMap: "ConfigMap gpu-operator/config", MIGStrategy: "mixed",
			Configs: labels{
				"more": "version: v1\nflags: {gfd: {sleepInterval: 30s}, migStrategy: none}\n" +
					"resources: {gpus: [{pattern: '*', name: nvidia.com/mine}]}\n" +
					"sharing: {timeSlicing: {resources: [{name: gpu, rename: mine, devices: [0], replicas: 2}, {name: nvidia.com/gpu, replicas: 3}]}}\n",
				"both": cernSlice4 + "  mps: {failRequestsGreaterThanOne: false, resources: [{name: nvidia.com/gpu, replicas: 2}]}\n",
				"bad":  "sharing: [", "v2": "version: v2\n", "few": "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}\n",
				"many": "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 49}]}}\n",
			},
			Nodes: []cluster.Node{
				node("both", labels{configLabel: "both"}, whole(0)),
				node("bad", labels{configLabel: "bad"}, whole(0)),
				node("few", labels{configLabel: "few"}, whole(0)),
				node("governed", labels{configLabel: "more"}),
				node("many", labels{configLabel: "many"}, whole(0)),
				node("missing", labels{configLabel: "nothing"}, whole(0)),
				node("mps-mig", labels{configLabel: "both"}, whole(0), cut(1, count("1g.5gb", 7))),
				node("sliced", labels{configLabel: "more"}, whole(0)),
				node("v2", labels{configLabel: "v2"}, whole(0)),
				node("without-instances", nil, cut(0)),
			},
		},
		"whole-gpus-beside-instances": {
			ConfigMap: "ConfigMap gpu-operator/config", MIGStrategy: "mixed",
			Configs: labels{
				"renamed": "sharing: {timeSlicing: {renameByDefault: true, failRequestsGreaterThanOne: true, resources: [" +
					"{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}\n",
				"both": "sharing: {timeSlicing: {renameByDefault: true, resources: [" +
					"{name: nvidia.com/gpu, replicas: 4}, {name: nvidia.com/mig-1g.5gb, replicas: 2}]}}\n",
				"plain": "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n",
			},
			Nodes: []cluster.Node{
				node("both", labels{configLabel: "both"}, whole(0), cut(1, count("1g.5gb", 7))),
				node("plain", labels{configLabel: "plain"}, whole(0), cut(1, count("1g.5gb", 7))),
				node("renamed", labels{configLabel: "renamed"}, cut(0, count("1g.5gb", 7))),
			},
		},
		"names-that-exist": {
			ConfigMap: "ConfigMap gpu-operator/config", Policies: []v1alpha1.GPUSharingPolicy{elsewhere("slice-4"), elsewhere("slice-4-2")},
			Configs: labels{"slice-4": cernSlice4, "slice-8": strings.ReplaceAll(cernSlice4, "4", "8")},
			Nodes: []cluster.Node{
				node("a", labels{configLabel: "slice-4"}, whole(0)), node("b", labels{configLabel: "slice-8"}, whole(0)),
			},
		},
		"the-device-plugin-is-not-known": {
			Unread: "its ConfigMap is not known; name it by --configmap NAMESPACE/NAME",
			Nodes:  []cluster.Node{node("a", labels{configLabel: "slice-4"}, whole(0)), node("b", nil, cut(0, count("1g.5gb", 7)))},
		},
		"a-label-without-effect": {
			MIGStrategy: "mixed",
			Nodes:       []cluster.Node{node("a", labels{configLabel: "slice-4"}, cut(0, count("1g.5gb", 7))), node("b", labels{configLabel: "slice-4"}, whole(0))},
		},
		"more-replicas-than-the-API-takes": {
			ConfigMap: "ConfigMap gpu-operator/config", MIGStrategy: "mixed",
			Configs: labels{
				"most":  "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 256}]}}\n",
				"more":  "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 257}]}}\n",
				"slice": "sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 1000}]}}\n",
			},
			Nodes: []cluster.Node{
				node("most", labels{configLabel: "most"}, whole(0)), node("more", labels{configLabel: "more"}, whole(0)),
				node("slice", labels{configLabel: "slice"}, cut(0, count("1g.5gb", 7))),
			},
		},
		"labels-that-do-not-last": {
			ConfigMap: "ConfigMap gpu-operator/config", Configs: labels{"slice-4": cernSlice4},
			Nodes: []cluster.Node{
				node("ip-10-0-1-7", ofEKS("us-east-1a", "i-1", "slice-4"), whole(0)), node("ip-10-0-2-9", ofEKS("us-east-1b", "i-2", ""), whole(0)),
			},
		},
		"labels-of-a-machine-set": {
			ConfigMap: "ConfigMap gpu-operator/config", Configs: labels{"slice-4": cernSlice4},
			Waits: "changing devicePlugin.config of ClusterPolicy cluster-policy ends pod team/train",
			Nodes: []cluster.Node{ofMachine(node("a", labels{configLabel: "slice-4"}, whole(0))), ofMachine(node("b", nil, whole(0)))},
		},
		"nodes-of-the-dra-driver": {
			Unread:  "its ConfigMap is not known; name it by --configmap NAMESPACE/NAME",
			Classes: []dra.Class{{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"}, {Name: "team-small", Resource: "nvidia.com/mig-1g.5gb"}},
			Nodes: []cluster.Node{
				driven(node("mig", labels{"pool": "notebooks"}, cut(0, count("1g.5gb", 7)), cut(1, count("1g.5gb", 7))), 1),
				driven(node("mig-2", labels{"pool": "inference"}, cut(0, count("2g.10gb", 3)), whole(1)), 4),
				driven(node("shared", labels{"pool": "ci"}, whole(0), whole(1)), 4),
				driven(node("shared-2", labels{"pool": "ci"}), 4, dra.Device{Name: "gpu-0", Type: "gpu", UUID: "GPU-x", Shares: 4}),
				driven(node("by-hand", labels{"pool": "hand"}), 1, instance("GPU-x", "3g.20gb", 0), instance("GPU-x", "3g.20gb", 4), instance("GPU-y", "3g.20gb", 0), instance("GPU-y", "3g.20gb", 4)),
				driven(node("unlike", nil), 1, instance("GPU-x", "3g.20gb", 0), instance("GPU-y", "7g.40gb", 0)),
				driven(node("whole", nil, whole(0)), 1),
				driven(node("unlimited", nil, whole(0)), 0),
				driven(node("too-many", nil, whole(0)), 1000),
				driven(node("nothing", nil), 1),
			},
			Lacks: []string{"You may not list DeviceTaintRules, so it is not known which nodes' devices are tainted"},
		},
		"what-no-policy-can-say-of-the-dra-driver": {
			Nodes: []cluster.Node{
				with(driven(node("both", nil, whole(0)), 1), func(n *cluster.Node) { n.Allocatable = map[string]int64{"nvidia.com/gpu": 1} }),
				with(driven(node("dynamic", nil, whole(0)), 1), func(n *cluster.Node) { n.Pods = []cluster.Pod{{DRA: true, DynamicMIG: true}} }),
				driven(node("on-demand", nil, whole(0)), 1, dra.Device{Name: "gpu-0-mig-1g5gb-19-0", Type: "mig", Profile: "1g.5gb"}),
			},
		},
		"gpus-that-differ": {
			MIGStrategy: "mixed",
			Nodes:       []cluster.Node{node("a", nil, whole(0), cut(1, count("1g.5gb", 7)), cut(2, balanced...), cut(3, balanced...))},
		},
	} {
		if name == "what-no-policy-can-say" {
			c.Nodes[3].GPU.Spec.PolicyName = "research"
		}
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			text, err := importer.Describe(c).YAML()
			g.Expect(err).NotTo(HaveOccurred())
			file := filepath.Join("testdata", name+".yaml")
			if *update {
				g.Expect(os.WriteFile(file, []byte(text), 0o600)).To(Succeed())
			}
			want, err := os.ReadFile(file)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(text).To(Equal(string(want)), "go test -update writes the golden files anew")
		})
	}
}

// driven is a node that NVIDIA's DRA driver alone serves, which publishes its GPUs or these devices.
func driven(n cluster.Node, shares int64, devices ...dra.Device) cluster.Node {
	for _, d := range n.GPU.Status.Devices {
		devices = append(devices, dra.Device{Name: "gpu-0", Type: "gpu", UUID: d.UUID, Shares: shares})
	}
	n.DRANode = cluster.DRANode{DRA: "ResourceSlice " + n.Name, Published: &dra.Pool{Complete: true, Devices: devices}}
	return n
}

func with(n cluster.Node, change func(*cluster.Node)) cluster.Node {
	change(&n)
	return n
}

// instance is a MIG instance as NVIDIA's DRA driver publishes it.
func instance(of, profile string, start int) dra.Device {
	return dra.Device{Name: fmt.Sprintf("%s-%s-%d", of, profile, start), Type: "mig", UUID: fmt.Sprintf("MIG-%s-%d", of, start), Profile: profile, Parent: of, Shares: 1}
}

// ofMachine is a node of OpenShift.
func ofMachine(n cluster.Node) cluster.Node {
	n.Annotations = map[string]string{cluster.AnnotationMachine: "openshift-machine-api/gpu-" + n.Name}
	return n
}

// elsewhere is a policy for other nodes.
func elsewhere(name string) v1alpha1.GPUSharingPolicy {
	p := v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: labels{"elsewhere": "true"}}
	return p
}

// TestKeysOfTheOperatorAreNoRest: it removes those that no node selects by itself.
func TestKeysOfTheOperatorAreNoRest(t *testing.T) {
	c := importer.Cluster{ConfigMap: "ConfigMap gpu-operator/" + cluster.ConfigMapName, Configs: map[string]string{"default-f678f1952f": "version: v1\n"}}
	NewWithT(t).Expect(importer.Describe(c).Rest).To(BeEmpty())
	c.ConfigMap = "ConfigMap gpu-operator/config"
	NewWithT(t).Expect(importer.Describe(c).Rest).To(HaveLen(1))
}
