// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package catalogue_test

import (
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/catalogue"
)

func TestFindKnowsProductsByTheirLabels(t *testing.T) {
	g := NewWithT(t)
	specs, err := catalogue.Specs()
	g.Expect(err).NotTo(HaveOccurred())
	for _, spec := range specs {
		d, found := catalogue.Find(gpu.ProductLabel(spec.Product))
		g.Expect(found).To(BeTrue(), spec.Product)
		g.Expect(d.MIGCapable).To(Equal(spec.MIGCapable()))
		g.Expect(d.Profiles).To(HaveLen(len(spec.Profiles)))
		g.Expect(d.State).To(BeZero(), "nothing is changed on it")
	}
	d, _ := catalogue.Find("NVIDIA-A100-SXM4-40GB")
	profile, has := d.Profile("1g.5gb")
	g.Expect(has).To(BeTrue())
	g.Expect(profile.Max).To(Equal(7))
	_, found := catalogue.Find("Voodoo-2")
	g.Expect(found).To(BeFalse())
}
