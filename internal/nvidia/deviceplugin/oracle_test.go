// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin_test

import (
	"bytes"
	"flag"
	"testing"

	nvidia "github.com/NVIDIA/k8s-device-plugin/api/config/v1"
	. "github.com/onsi/gomega"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
)

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
