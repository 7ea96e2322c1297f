// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvidia

import (
	"fmt"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

func whole(uuid string) gpu.Device { return gpu.Device{UUID: uuid} }

func split(uuid string, profiles ...string) gpu.Device {
	d := gpu.Device{UUID: uuid, State: gpu.State{MIG: true}}
	for i, p := range profiles {
		d.State.Instances = append(d.State.Instances, gpu.Instance{Profile: p, ID: i, UUID: "MIG-" + uuid + string(rune('a'+i))})
	}
	return d
}

func TestAdvertise(t *testing.T) {
	const mps = "version: v1\nsharing: {mps: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}"
	cases := map[string]struct {
		config string
		env    Environment
		gpus   []gpu.Device
		want   map[string]int
		says   string
	}{
		"without a configuration, whole GPUs": {
			gpus: []gpu.Device{whole("a"), whole("b")}, want: map[string]int{"nvidia.com/gpu": 2},
		},
		"a GPU in MIG mode looks whole to the strategy none": {
			gpus: []gpu.Device{split("a", "1g.5gb")}, want: map[string]int{"nvidia.com/gpu": 1},
		},
		"replicas": {
			config: "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}",
			gpus:   []gpu.Device{whole("a"), whole("b")}, want: map[string]int{"nvidia.com/gpu": 6},
		},
		"renamed replicas": {
			config: mps, env: Environment{MPSRoot: "/run/nvidia/mps"},
			gpus: []gpu.Device{whole("a")}, want: map[string]int{"nvidia.com/gpu.shared": 2},
		},
		"replicas of what is not there are skipped": {
			config: "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 3}]}}",
			gpus:   []gpu.Device{whole("a")}, want: map[string]int{"nvidia.com/gpu": 1},
		},
		"mixed names instances by profile and whole GPUs as ever": {
			config: "version: v1\nflags: {migStrategy: mixed}",
			gpus:   []gpu.Device{split("a", "3g.20gb", "1g.5gb+me"), whole("b")},
			want:   map[string]int{"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb.me": 1, "nvidia.com/gpu": 1},
		},
		"single names instances as GPUs": {
			config: "version: v1\nflags: {migStrategy: single}",
			gpus:   []gpu.Device{split("a", "1g.5gb", "1g.5gb"), split("b", "1g.5gb")}, want: map[string]int{"nvidia.com/gpu": 3},
		},
		"the environment beats the configuration": {
			config: "version: v1\nflags: {migStrategy: mixed}", env: Environment{MIGStrategy: "single"},
			gpus: []gpu.Device{split("a", "1g.5gb", "2g.10gb")}, says: "more than one MIG device type present on node",
		},
		"single refuses an empty GPU": {
			config: "version: v1\nflags: {migStrategy: single}", gpus: []gpu.Device{split("a")}, says: "invalid MIG configuration",
		},
		"single refuses GPUs in different modes": {
			config: "version: v1\nflags: {migStrategy: single}", gpus: []gpu.Device{split("a", "1g.5gb"), whole("b")},
			says: "same migEnabled value",
		},
		"MPS refuses mixed": {
			config: mps, env: Environment{MPSRoot: "/mps", MIGStrategy: "mixed"}, gpus: []gpu.Device{whole("a")},
			says: "using --mig-strategy=mixed is not supported with MPS",
		},
		"MPS refuses instances": {
			config: mps, env: Environment{MPSRoot: "/mps", MIGStrategy: "single"}, gpus: []gpu.Device{split("a", "1g.5gb")},
			says: "sharing using MPS is not supported for MIG devices",
		},
		"MPS needs a root": {config: mps, gpus: []gpu.Device{whole("a")}, says: "using MPS requires --mps-root"},
		"an unknown strategy": {
			config: "version: v1\nflags: {migStrategy: double}", gpus: []gpu.Device{whole("a")}, says: "unknown MIG strategy: double",
		},
		"an unknown version": {config: "version: v2", says: "unknown version: v2"},
		"one replica": {
			config: "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}",
			says:   "number of replicas must be >= 2",
		},
		"no resources": {config: "version: v1\nsharing: {timeSlicing: {resources: []}}", says: "no resources specified"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			config, err := Parse(tc.config)
			var got map[string][]Advertised
			if err == nil {
				got, err = Advertise(config, tc.env, tc.gpus)
			}
			if tc.says != "" {
				g.Expect(err).To(MatchError(ContainSubstring(tc.says)))
				return
			}
			g.Expect(err).NotTo(HaveOccurred())
			counted := map[string]int{}
			for resource, devices := range got {
				counted[resource] = len(devices)
			}
			g.Expect(counted).To(Equal(tc.want))
		})
	}
}

func TestSelectConfig(t *testing.T) {
	g := NewWithT(t)
	files := map[string]string{"a": "", "b": ""}
	selected := func(label, byDefault string) string {
		name, err := SelectConfig(label, byDefault, files)
		return fmt.Sprint(name, err)
	}
	g.Expect(selected("a", "b")).To(Equal("a<nil>"))
	g.Expect(selected("", "b")).To(Equal("b<nil>"))
	g.Expect(selected("", "")).To(Equal("<nil>"), "the plugin's defaults")
	g.Expect(selected("c", "b")).To(Equal("specified config c does not exist"))
	files = nil
	g.Expect(selected("", "")).To(Equal("no configuration files available"))
}
