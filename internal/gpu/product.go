// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"fmt"
	"strings"
)

// ProductLabel is a product's name as users and labels write it, with dashes for spaces and without the characters that
// a label cannot have: "NVIDIA A100-SXM4-40GB" is NVIDIA-A100-SXM4-40GB. It equals the value that NVIDIA's GPU Feature
// Discovery gives nvidia.com/gpu.product, but for the suffixes -SHARED and -MIG-….
func ProductLabel(name string) string {
	kept := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', strings.ContainsRune("-_. ", r):
			return r
		}
		return -1
	}, name)
	return strings.Join(strings.Fields(kept), "-")
}

// String is how messages name a GPU: by the index that nvidia-smi shows and the product, such as
// "GPU 0 (NVIDIA-A100-SXM4-40GB)".
func (d Device) String() string {
	return fmt.Sprintf("GPU %d (%s)", d.Index, ProductLabel(d.Product))
}
