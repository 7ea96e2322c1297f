// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"strings"
	"testing"

	nvidia "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

var whole = v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}

// instances is MIG mode with one instance per profile named; none: MIG mode and nothing in it.
func instances(profiles ...string) v1alpha1.DeviceSharing {
	sharing := v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled}
	counts := map[string]int{}
	for _, p := range profiles {
		if at, seen := counts[p]; seen {
			sharing.Instances[at].Count++
			continue
		}
		counts[p] = len(sharing.Instances)
		sharing.Instances = append(sharing.Instances, v1alpha1.InstanceCount{Profile: p, Count: 1})
	}
	return sharing
}

// node has GPUs as they are.
func node(gpus ...v1alpha1.DeviceSharing) deviceplugin.Node {
	var n deviceplugin.Node
	for i, g := range gpus {
		n.Devices = append(n.Devices, v1alpha1.DeviceStatus{
			UUID: fmt.Sprintf("GPU-%d", i), Index: int32(i), Product: "NVIDIA-A100-SXM4-40GB", Sharing: g,
		})
	}
	return n
}

// desired asks that the first GPUs of the node become so.
func desired(n deviceplugin.Node, gpus ...v1alpha1.DeviceSharing) deviceplugin.Node {
	n.Desired = nil
	for i, g := range gpus {
		n.Desired = append(n.Desired, v1alpha1.DeviceSpec{UUID: n.Devices[i].UUID, Sharing: g})
	}
	return n
}

func replicated(n deviceplugin.Node, replicas map[string]int32) deviceplugin.Node {
	n.Replicas = replicas
	return n
}

var (
	exclusive   = v1alpha1.Sharing{Strategy: v1alpha1.StrategyExclusive}
	timeSlicing = v1alpha1.Sharing{
		Strategy:    v1alpha1.StrategyTimeSlicing,
		TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4},
	}
	mps   = v1alpha1.Sharing{Strategy: v1alpha1.StrategyMPS, MPS: &v1alpha1.MPS{Replicas: 10}}
	mixed = v1alpha1.Sharing{
		Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{ResourceNames: v1alpha1.MIGResourceNamesPerProfile},
	}
	single = v1alpha1.Sharing{
		Strategy: v1alpha1.StrategyMIG, MIG: &v1alpha1.MIG{ResourceNames: v1alpha1.MIGResourceNamesUniform},
	}
)

// advertised is a sharing with how what has replicas is advertised.
func advertised(s v1alpha1.Sharing, as v1alpha1.Advertise) v1alpha1.Sharing {
	s.Advertise = &as
	return s
}

func renamed(s v1alpha1.Sharing) v1alpha1.Sharing {
	return advertised(s, v1alpha1.Advertise{RenameByDefault: new(true)})
}

// wholeFourTimes is a sharing by MIG that shares whole GPUs too.
func wholeFourTimes(s v1alpha1.Sharing) v1alpha1.Sharing {
	s = *s.DeepCopy()
	s.MIG.WholeGPUs = &v1alpha1.MIGWholeGPUs{Replicas: 4}
	return s
}

var rendered = map[string]struct {
	sharing   v1alpha1.Sharing
	node      deviceplugin.Node
	data      string
	resources map[string]int64
	replicas  map[string]int32
}{
	"exclusive says none, so that an earlier strategy is undone": {
		sharing:   exclusive,
		node:      desired(node(instances("1g.5gb"), whole), whole, whole),
		data:      "version: v1\nflags:\n  migStrategy: none\n",
		resources: map[string]int64{"nvidia.com/gpu": 2},
		replicas:  map[string]int32{},
	},
	"time-slicing multiplies every GPU": {
		sharing:   timeSlicing,
		node:      desired(node(whole, whole), whole, whole),
		data:      document("none", false, true, "nvidia.com/gpu: 4"),
		resources: map[string]int64{"nvidia.com/gpu": 8},
		replicas:  map[string]int32{"nvidia.com/gpu": 4},
	},
	"renamed replicas are advertised as shared": {
		sharing:   renamed(timeSlicing),
		node:      desired(node(whole), whole),
		data:      document("none", true, true, "nvidia.com/gpu: 4"),
		resources: map[string]int64{"nvidia.com/gpu.shared": 4},
		replicas:  map[string]int32{"nvidia.com/gpu.shared": 4},
	},
	"MPS names its root": {
		sharing: renamed(mps),
		node:    desired(node(whole, whole), whole, whole),
		data: `version: v1
flags:
  migStrategy: none
  mpsRoot: /run/nvidia/mps
sharing:
  mps:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: nvidia.com/gpu
      replicas: 10
`,
		resources: map[string]int64{"nvidia.com/gpu.shared": 20},
		replicas:  map[string]int32{"nvidia.com/gpu.shared": 10},
	},
	"mixed names each profile, and GPUs that stay whole": {
		sharing: mixed,
		node:    desired(node(whole, whole, whole), instances("3g.20gb", "1g.5gb", "1g.5gb"), instances("1g.5gb+me")),
		data:    "version: v1\nflags:\n  migStrategy: mixed\n",
		resources: map[string]int64{
			"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-1g.5gb.me": 1, "nvidia.com/gpu": 1,
		},
		replicas: map[string]int32{},
	},
	"mixed counts the instances of a GPU that is not selected": {
		sharing:   mixed,
		node:      desired(node(whole, instances("2g.10gb")), instances("2g.10gb", "2g.10gb")),
		data:      "version: v1\nflags:\n  migStrategy: mixed\n",
		resources: map[string]int64{"nvidia.com/mig-2g.10gb": 3},
		replicas:  map[string]int32{},
	},
	"mixed advertises nothing of a GPU in MIG mode without instances": {
		sharing:   mixed,
		node:      desired(node(whole, instances()), instances("7g.40gb")),
		data:      "version: v1\nflags:\n  migStrategy: mixed\n",
		resources: map[string]int64{"nvidia.com/mig-7g.40gb": 1},
		replicas:  map[string]int32{},
	},
	"single advertises instances as GPUs": {
		sharing:   single,
		node:      desired(node(whole, whole), instances("3g.20gb", "3g.20gb"), instances("3g.20gb", "3g.20gb")),
		data:      "version: v1\nflags:\n  migStrategy: single\n",
		resources: map[string]int64{"nvidia.com/gpu": 4},
		replicas:  map[string]int32{},
	},
	"replicas of instances multiply those of that profile only": {
		sharing: mixed,
		node: replicated(desired(node(whole), instances("3g.20gb", "1g.5gb+me", "1g.5gb+me")),
			map[string]int32{"1g.5gb+me": 3}),
		data:      document("mixed", false, true, "nvidia.com/mig-1g.5gb.me: 3"),
		resources: map[string]int64{"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb.me": 6},
		replicas:  map[string]int32{"nvidia.com/mig-1g.5gb.me": 3},
	},
	"whole GPUs with replicas beside instances with replicas": {
		sharing: wholeFourTimes(mixed),
		node: replicated(desired(node(whole, whole, whole), instances("3g.20gb", "1g.5gb"), whole, whole),
			map[string]int32{"1g.5gb": 2}),
		data:      document("mixed", false, true, "nvidia.com/gpu: 4", "nvidia.com/mig-1g.5gb: 2"),
		resources: map[string]int64{"nvidia.com/gpu": 8, "nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb": 2},
		replicas:  map[string]int32{"nvidia.com/gpu": 4, "nvidia.com/mig-1g.5gb": 2},
	},
	"everything that has replicas beside instances is renamed, and requests of several are served": {
		sharing:   advertised(wholeFourTimes(mixed), v1alpha1.Advertise{RenameByDefault: new(true), FailRequestsGreaterThanOne: new(false)}),
		node:      replicated(desired(node(whole, whole), instances("3g.20gb", "1g.5gb"), whole), map[string]int32{"1g.5gb": 2}),
		data:      document("mixed", true, false, "nvidia.com/gpu: 4", "nvidia.com/mig-1g.5gb: 2"),
		resources: map[string]int64{"nvidia.com/gpu.shared": 4, "nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb.shared": 2},
		replicas:  map[string]int32{"nvidia.com/gpu.shared": 4, "nvidia.com/mig-1g.5gb.shared": 2},
	},
	"replicas of whole GPUs are left out where no GPU stays whole": {
		sharing:   wholeFourTimes(mixed),
		node:      desired(node(whole), instances("3g.20gb")),
		data:      "version: v1\nflags:\n  migStrategy: mixed\n",
		resources: map[string]int64{"nvidia.com/mig-3g.20gb": 1},
		replicas:  map[string]int32{},
	},
	"replicas of instances under single are renamed as those of GPUs": {
		sharing:   renamed(single),
		node:      replicated(desired(node(whole), instances("1g.5gb", "1g.5gb")), map[string]int32{"1g.5gb": 2}),
		data:      document("single", true, true, "nvidia.com/gpu: 2"),
		resources: map[string]int64{"nvidia.com/gpu.shared": 4},
		replicas:  map[string]int32{"nvidia.com/gpu.shared": 2},
	},
	"replicas of instances under single are replicas of nvidia.com/gpu": {
		sharing:   single,
		node:      replicated(desired(node(whole), instances("1g.5gb", "1g.5gb")), map[string]int32{"1g.5gb": 2}),
		data:      document("single", false, true, "nvidia.com/gpu: 2"),
		resources: map[string]int64{"nvidia.com/gpu": 4},
		replicas:  map[string]int32{"nvidia.com/gpu": 2},
	},
}

// document is what the plugin reads where resources, each with its replicas, are time-sliced.
func document(migStrategy string, rename, fail bool, resources ...string) string {
	text := fmt.Sprintf("version: v1\nflags:\n  migStrategy: %s\nsharing:\n  timeSlicing:\n    renameByDefault: %t\n    failRequestsGreaterThanOne: %t\n    resources:\n",
		migStrategy, rename, fail)
	for _, r := range resources {
		name, replicas, _ := strings.Cut(r, ": ")
		text += "    - name: " + name + "\n      replicas: " + replicas + "\n"
	}
	return text
}

func TestRender(t *testing.T) {
	for name, c := range rendered {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			config, err := deviceplugin.Render("research", c.sharing, c.node)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(config.Data).To(Equal(c.data))
			g.Expect(config.Resources).To(Equal(c.resources))
			g.Expect(config.Replicas).To(Equal(c.replicas))
			g.Expect(config.Key).To(HavePrefix("research-"))
		})
	}
}

func TestWhichRequestsThePluginRefuses(t *testing.T) {
	slicing := func(fail *bool) v1alpha1.Sharing {
		return advertised(timeSlicing, v1alpha1.Advertise{FailRequestsGreaterThanOne: fail})
	}
	for name, c := range map[string]struct {
		sharing v1alpha1.Sharing
		refuses bool
	}{
		"time-slicing":                     {sharing: slicing(nil), refuses: true},
		"time-slicing that serves several": {sharing: slicing(new(false))},
		"MPS":                              {sharing: mps, refuses: true},
		"MIG":                              {sharing: mixed, refuses: true},
		"MIG with replicas":                {sharing: advertised(mixed, v1alpha1.Advertise{}), refuses: true},
		"MIG with replicas, which serves several": {sharing: advertised(mixed, v1alpha1.Advertise{FailRequestsGreaterThanOne: new(false)})},
		"exclusive": {sharing: exclusive},
	} {
		NewWithT(t).Expect(c.sharing.RefusesMoreThanOne()).To(Equal(c.refuses), name)
	}
}

func TestRenderRefusesWhatThePluginCannotAdvertise(t *testing.T) {
	for name, c := range map[string]struct {
		sharing v1alpha1.Sharing
		node    deviceplugin.Node
		reason  string
		message string
	}{
		"MPS beside a GPU that stays in MIG mode": {
			sharing: mps, node: desired(node(whole, instances("1g.5gb")), whole),
			reason:  v1alpha1.ReasonMIGActive,
			message: "GPU 1 (NVIDIA-A100-SXM4-40GB) is in MIG mode and not selected by the policy, and keeps NVIDIA's device plugin from serving MPS",
		},
		"whole GPUs beside one that stays in MIG mode": {
			sharing: exclusive, node: desired(node(instances(), whole), nil...),
			reason:  v1alpha1.ReasonMIGActive,
			message: "GPU 0 (NVIDIA-A100-SXM4-40GB) is in MIG mode and not selected by the policy, and would be advertised as a whole GPU",
		},
		"time-slicing beside a GPU that stays in MIG mode": {
			sharing: timeSlicing, node: desired(node(whole, instances("1g.5gb")), whole),
			reason: v1alpha1.ReasonMIGActive, message: "would be time-sliced as a whole GPU",
		},
		"single with a whole GPU": {
			sharing: single, node: desired(node(whole, whole), instances("1g.5gb")),
			reason: v1alpha1.ReasonMixedInstances, message: "GPU 1 (NVIDIA-A100-SXM4-40GB) stays whole",
		},
		"single with two profiles on one GPU": {
			sharing: single, node: desired(node(whole), instances("3g.20gb", "1g.5gb")),
			reason: v1alpha1.ReasonMixedInstances, message: "has instances of 1g.5gb and of 3g.20gb",
		},
		"single with another profile on the second GPU": {
			sharing: single, node: desired(node(whole, whole), instances("3g.20gb"), instances("1g.5gb")),
			reason: v1alpha1.ReasonMixedInstances, message: "GPU 1 (NVIDIA-A100-SXM4-40GB) has instances of 1g.5gb and GPUs before it of 3g.20gb",
		},
		"single with a GPU in MIG mode that has no instances": {
			sharing: single, node: desired(node(whole, instances()), instances("3g.20gb")),
			reason: v1alpha1.ReasonMixedInstances, message: "GPU 1 (NVIDIA-A100-SXM4-40GB) is in MIG mode without instances",
		},
		"different replicas of one resource under single": {
			sharing: single,
			node:    replicated(desired(node(whole), instances("1g.5gb")), map[string]int32{"1g.5gb": 2, "2g.10gb": 3}),
			reason:  v1alpha1.ReasonReplicasDiffer, message: "layouts ask for 2 and for 3 replicas of nvidia.com/gpu",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			_, err := deviceplugin.Render("research", c.sharing, c.node)
			var problem *plan.Problem
			g.Expect(errors.As(err, &problem)).To(BeTrue(), "%v", err)
			g.Expect(problem.Reason).To(Equal(c.reason))
			g.Expect(problem.Message).To(ContainSubstring(c.message))
		})
	}
}

func TestKeys(t *testing.T) {
	render := func(policy string, s v1alpha1.Sharing, n deviceplugin.Node) string {
		config, err := deviceplugin.Render(policy, s, n)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		return config.Key
	}
	two := node(whole, whole)
	for name, c := range map[string]struct {
		a, b string
		same bool
	}{
		"nodes that are alike share a key": {
			a: render("p", timeSlicing, desired(node(whole), whole)), b: render("p", timeSlicing, desired(two, whole, whole)), same: true,
		},
		"other replicas are another key": {
			a: render("p", timeSlicing, two), b: render("p", renamed(timeSlicing), two),
		},
		"other instances are another key though the document is the same": {
			a: render("p", mixed, desired(two, instances("1g.5gb"))), b: render("p", mixed, desired(two, instances("2g.10gb"))),
		},
		"the same instances on another GPU are another key": {
			a: render("p", mixed, desired(two, instances("1g.5gb"))), b: render("p", mixed, desired(two, whole, instances("1g.5gb"))),
		},
		"the order of instances does not matter": {
			a:    render("p", mixed, desired(two, instances("1g.5gb", "2g.10gb"))),
			b:    render("p", mixed, desired(two, instances("2g.10gb", "1g.5gb"))),
			same: true,
		},
		"the state before does not matter": {
			a: render("p", mixed, desired(node(instances("7g.40gb")), instances("1g.5gb"))), b: render("p", mixed, desired(node(whole), instances("1g.5gb"))),
			same: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if c.same {
				NewWithT(t).Expect(c.a).To(Equal(c.b))
				return
			}
			NewWithT(t).Expect(c.a).NotTo(Equal(c.b))
		})
	}
}

func TestKeysAreLabelValuesAndConfigMapKeys(t *testing.T) {
	for _, policy := range []string{
		"p", "team.example.com", strings.Repeat("long-", 60) + "name", strings.Repeat("a", 51) + ".b", strings.Repeat("a", 51) + "-b",
	} {
		g := NewWithT(t)
		config, err := deviceplugin.Render(policy, exclusive, node(whole))
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(validation.IsValidLabelValue(config.Key)).To(BeEmpty(), config.Key)
		g.Expect(validation.IsConfigMapKey(config.Key)).To(BeEmpty(), config.Key)
	}
}

func TestDefault(t *testing.T) {
	g := NewWithT(t)
	g.Expect(deviceplugin.Default("single").Data).To(Equal("version: v1\nflags:\n  migStrategy: single\n"))
	g.Expect(deviceplugin.Default("").Data).To(Equal("version: v1\nflags:\n  migStrategy: none\n"))
	g.Expect(deviceplugin.Default("single").Key).To(MatchRegexp(`^default-[0-9a-f]{10}$`))
	g.Expect(deviceplugin.Default("single").Key).NotTo(Equal(deviceplugin.Default("mixed").Key))
}

func TestAdopt(t *testing.T) {
	for name, c := range map[string]struct{ data, strategy, want string }{
		"writes the strategy that the ClusterPolicy forced upon it, and keeps all else": {
			data: `# by hand
version: v1
flags:
  migStrategy: none # never counted
  plugin:
    passDeviceSpecs: true
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 4
unknown: stays
`,
			strategy: "mixed",
			want: `# by hand
version: v1
flags:
  migStrategy: mixed # never counted
  plugin:
    passDeviceSpecs: true
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 4
unknown: stays
`,
		},
		"adds the flags where there are none": {
			data: "version: v1\n", strategy: "single", want: "version: v1\nflags:\n  migStrategy: single\n",
		},
		"fills empty flags": {
			data: "version: v1\nflags:\n", strategy: "single", want: "version: v1\nflags:\n  migStrategy: single\n",
		},
		"an empty document is the plugin's defaults": {
			data: "", strategy: "single", want: "version: v1\nflags:\n  migStrategy: single\n",
		},
		"changes nothing when the ClusterPolicy forced nothing": {
			data: "version: v1\n# odd\n", strategy: "", want: "version: v1\n# odd\n",
		},
		"understands JSON": {
			data: `{"version": "v1", "flags": {"migStrategy": "none"}}`, strategy: "mixed",
			want: `{"version": "v1", "flags": {"migStrategy": mixed}}` + "\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			got, err := deviceplugin.Adopt(c.data, c.strategy)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(got).To(Equal(c.want))
			again, err := deviceplugin.Adopt(got, c.strategy)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(again).To(Equal(got))
		})
	}
}

func TestAdoptRefusesWhatThePluginRefuses(t *testing.T) {
	for _, data := range []string{"- a\n", "flags: 3\n", "a: b: c", "just text"} {
		_, err := deviceplugin.Adopt(data, "single")
		NewWithT(t).Expect(err).To(HaveOccurred(), data)
	}
}

// TestNVIDIAUnderstandsEveryWord reads each document with NVIDIA's own types, strictly, and finds nothing lost: neither
// on reading nor when the plugin takes away what it does not support.
func TestNVIDIAUnderstandsEveryWord(t *testing.T) {
	warnings := captureWarnings(t)
	for name, c := range rendered {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			warnings.Reset()
			ours, err := deviceplugin.Render("research", c.sharing, c.node)
			g.Expect(err).NotTo(HaveOccurred())
			var config nvidia.Config
			g.Expect(yaml.UnmarshalStrict([]byte(ours.Data), &config)).To(Succeed())
			nvidia.DisableResourceNamingInConfig(&config)
			klog.Flush()
			g.Expect(warnings.String()).To(BeEmpty())

			g.Expect(config.Version).To(Equal(nvidia.Version))
			g.Expect(*config.Flags.MigStrategy).To(BeElementOf("none", "single", "mixed"))
			g.Expect(factors(config)).To(Equal(ours.Replicas))
			if config.Sharing.SharingStrategy() == nvidia.SharingStrategyMPS {
				g.Expect(*config.Flags.MpsRoot).To(Equal(deviceplugin.MPSRoot))
				g.Expect(*config.Flags.MigStrategy).To(Equal("none"))
			}
		})
	}
}

// factors are the resources that the plugin would advertise more than once.
func factors(config nvidia.Config) map[string]int32 {
	found := map[string]int32{}
	for _, r := range config.Sharing.ReplicatedResources().Resources {
		name := r.Name
		if r.Rename != "" {
			name = r.Rename
		}
		found[string(name)] = int32(r.Replicas)
	}
	return found
}

func captureWarnings(t *testing.T) *bytes.Buffer {
	t.Helper()
	flags := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(flags)
	NewWithT(t).Expect(flags.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"})).To(Succeed())
	var warnings bytes.Buffer
	klog.SetOutput(&warnings)
	return &warnings
}
