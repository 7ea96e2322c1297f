// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"slices"
	"strconv"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
)

// ofType are the labels that Karpenter gives an instance type of AWS.
func ofType(name, gpu, count, memory string) map[string]string {
	return map[string]string{
		"karpenter.sh/nodepool": "gpu", "node.kubernetes.io/instance-type": name,
		"karpenter.k8s.aws/instance-gpu-name": gpu, "karpenter.k8s.aws/instance-gpu-count": count, "karpenter.k8s.aws/instance-gpu-memory": memory,
	}
}

// selects is Karpenter's comparison of a NodeOverlay with the labels of an instance type (sigs.k8s.io/karpenter pkg/scheduling/requirement.go).
func selects(o autoscaling.Overlay, labels map[string]string) bool {
	for _, r := range o.Requirements {
		is, _ := strconv.Atoi(labels[r.Key])
		bound, _ := strconv.Atoi(r.Values[0])
		if r.Operator == "In" && !slices.Contains(r.Values, labels[r.Key]) || r.Operator == "Gt" && is <= bound || r.Operator == "Lt" && is >= bound {
			return false
		}
	}
	return true
}

// Karpenter takes the cheapest instance type that offers what a pod asks for, so a NodeOverlay is for the GPUs of the policy alone: not for
// fractions of them (g6f has a vGPU of an L4, aws/karpenter-provider-aws issue 8324), nor for those of the same name and other memory; and for
// one whose GPU EC2 does not count (issue 8368).
func TestTheNodeOverlayOnAWSIsForTheGPUsOfThePolicy(t *testing.T) {
	vgpu := node("b", "NVIDIA-L4-6Q", 1, inPool("g6f.2xlarge"))
	vgpu.GPU.Status.Devices[0].Virtual = true
	for product, c := range map[string]struct {
		count   int
		is, not map[string]string
	}{
		"NVIDIA-L4":             {1, ofType("g6.xlarge", "l4", "1", "22888"), ofType("g6f.2xlarge", "l4", "1", "5722")},
		"NVIDIA-H100-80GB-HBM3": {1, ofType("p5.4xlarge", "h100", "0", "81920"), ofType("p5.48xlarge", "h100", "8", "81920")},
		"Tesla-V100-SXM2-32GB":  {8, ofType("p3dn.24xlarge", "v100", "8", "32768"), ofType("p3.16xlarge", "v100", "8", "16384")},
		"Tesla-V100-SXM2-16GB":  {8, ofType("p3.16xlarge", "v100", "8", "16384"), ofType("p3dn.24xlarge", "v100", "8", "32768")},
		"NVIDIA-A100-SXM4-80GB": {8, ofType("p4de.24xlarge", "a100", "8", "81920"), ofType("p4d.24xlarge", "a100", "8", "40960")},
		a100:                    {8, ofType("p4d.24xlarge", "a100", "8", "40960"), ofType("p4de.24xlarge", "a100", "8", "81920")},
		t4:                      {4, ofType("g4dn.12xlarge", "t4", "4", "16384"), ofType("g4dn.xlarge", "t4", "1", "16384")},
	} {
		t.Run(product, func(t *testing.T) {
			g := NewWithT(t)
			w := karpenter(t, renamed+"\nautoscaling: {mode: Manage}", node("a", product, c.count, inPool(c.is["node.kubernetes.io/instance-type"])))
			w.Pools[0].NodeClassGroup = "karpenter.k8s.aws"
			o := made(t, w)
			g.Expect(selects(o, c.is)).To(BeTrue(), "%v", o.Requirements)
			g.Expect(selects(o, c.not)).To(BeFalse(), "%v", o.Requirements)
			if product == "NVIDIA-L4" {
				w.Nodes = append(w.Nodes, vgpu)
				g.Expect(selects(made(t, w), c.not)).To(BeFalse(), "a virtual GPU that is there already changes nothing")
			}
		})
	}
}
