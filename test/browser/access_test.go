// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"encoding/json"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/chromedp"
	. "github.com/onsi/gomega"
)

// readable: what a screen reader is given has the names and headings of what is shown; axe-core looks for the rest.
func readable(b *tab) {
	b.Helper()
	g := NewWithT(b.T)
	tree := get(b, func(ctx context.Context, target *chromedp.Target) (accessibility.GetFullAXTreeResult, error) {
		return cdp.Call(ctx, target, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
	})
	text := func(v *accessibility.Value) string {
		var s string
		if v != nil {
			_ = json.Unmarshal([]byte(v.Value), &s)
		}
		return s
	}
	names := map[string][]string{}
	for _, n := range tree.Nodes {
		if !n.Ignored {
			names[text(n.Role)] = append(names[text(n.Role)], text(n.Name))
		}
	}
	g.Expect(names["heading"]).To(ContainElements("GPU Sharing", "Policies", "notebooks", "Nodes", "gpu-a", "gpu-b"))
	g.Expect(names["combobox"]).To(ConsistOf(HavePrefix("Policy"), HavePrefix("Product"), HavePrefix("Namespace"), HavePrefix("State")))
	g.Expect(names["searchbox"]).To(ConsistOf(HavePrefix("Find")))
	g.Expect(names["progressbar"]).To(ConsistOf(HavePrefix("Rollout of notebooks: 0 of 0 nodes ready")))
	g.Expect(names["list"]).To(ContainElements("Nodes", "GPU 0"))
	g.Expect(names["main"]).To(HaveLen(1))
	g.Expect(names["banner"]).To(HaveLen(1))
	g.Expect(names["status"]).NotTo(BeEmpty(), "changes that are read out")
}
