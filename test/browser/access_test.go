// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/chromedp"
	. "github.com/onsi/gomega"
)

// readable: what a screen reader is given has names, values and headings.
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
	for _, role := range []string{"button", "combobox", "searchbox", "progressbar", "meter", "heading", "region"} {
		for _, name := range names[role] {
			g.Expect(name).NotTo(BeEmpty(), "a %s without a name", role)
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

// leastContrast is what WCAG 2.2 (1.4.3, level AA) asks for between text and what is behind it.
const leastContrast = 4.5

// contrastOf is the least contrast of a text of the page with what is behind it, and that text.
const contrastOf = `(() => {
	const parse = (c) => { const p = c.match(/[\d.]+/g).map(Number); return { rgb: p.slice(0, 3), a: p[3] ?? 1 }; };
	const light = (rgb) => { const [r, g, b] = rgb.map((x) => x / 255).map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
		return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
	let worst = [99, ""];
	for (const e of document.querySelectorAll("body *")) {
		if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.checkVisibility() || e.tagName === "OPTION") continue;
		let behind = e;
		while (behind.parentElement && parse(getComputedStyle(behind).backgroundColor).a === 0) behind = behind.parentElement;
		const [x, y] = [getComputedStyle(e).color, getComputedStyle(behind).backgroundColor].map((c) => light(parse(c).rgb));
		const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
		if (ratio < worst[0]) worst = [ratio, e.className + ": " + e.textContent];
	}
	return { ratio: worst[0], text: worst[1], ground: getComputedStyle(document.body).backgroundColor };
})()`

// contrasts: in light and in dark every text can be read.
func contrasts(b *tab) {
	b.Helper()
	g := NewWithT(b.T)
	grounds := map[string]bool{}
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		worst := read[struct {
			Ratio        float64
			Text, Ground string
		}](b, contrastOf)
		b.Logf("%s: least contrast %.1f: %s", scheme, worst.Ratio, worst.Text)
		g.Expect(worst.Ratio).To(BeNumerically(">=", leastContrast), fmt.Sprintf("%s: %s", scheme, worst.Text))
		grounds[worst.Ground] = true
	}
	g.Expect(grounds).To(HaveLen(2), "light and dark differ")
}
