// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
)

// TestAxeFindsNothingSerious: axe-core looks at each state of the page, in light and dark, on a wide screen and a phone.
func TestAxeFindsNothingSerious(t *testing.T) {
	axe, err := os.ReadFile(os.Getenv("AXE"))
	if err != nil {
		t.Fatalf("AXE names no axe.min.js: run `make browser-test`: %v", err)
	}
	hub := dashboard.NewHub()
	g := NewWithT(t)
	g.Expect(hub.Show(shown(t))).To(Succeed())
	b := open(t, serve(t, hub))
	b.eventually(`document.querySelectorAll("#nodes > li").length`, 4)
	b.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error { // the page lets no script but its own work
		_, err := cdp.Call(ctx, target, page.SetBypassCSP, page.SetBypassCSPParams{Enabled: true})
		return err
	}), chromedp.Reload())
	b.eventually(`document.querySelectorAll("#nodes > li").length`, 4)
	b.do(chromedp.Evaluate[chromedp.Void](string(axe) + `; void 0`))
	states := []struct{ name, enter, leave string }{
		{"the page", "", ""},
		{"a node in detail", `document.querySelector("#nodes button").click()`, `document.querySelector("#detail").close()`},
		{"a preview", `document.querySelector("#ask").click()`, `document.querySelector("#preview").close()`},
	}
	for _, scheme := range []string{"light", "dark"} {
		for _, width := range []int64{1400, 400} {
			b.scheme(scheme)
			b.do(chromedp.EmulateViewport(width, 900))
			for _, state := range states {
				t.Run(fmt.Sprintf("%s, %s, %d wide", state.name, scheme, width), func(t *testing.T) {
					b.do(chromedp.Evaluate[chromedp.Void](state.enter + `; void 0`))
					found := get(b, chromedp.Evaluate[[]string](`axe.run().then((r) => r.violations.filter((v) => ["serious", "critical"].includes(v.impact))
						.map((v) => v.id + ": " + v.help + ": " + v.nodes.map((n) => n.target.join(" ")).join(", ")))`, chromedp.EvalAwaitPromise))
					over := read[bool](b, `document.documentElement.scrollWidth > innerWidth`)
					b.do(chromedp.Evaluate[chromedp.Void](state.leave + `; void 0`))
					g := NewWithT(t)
					g.Expect(strings.Join(found, "\n")).To(BeEmpty())
					g.Expect(over).To(BeFalse(), "nothing is wider than the screen")
				})
			}
		}
	}
}

// scheme has the browser prefer light or dark.
func (b *tab) scheme(name string) {
	b.Helper()
	b.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}},
		})
		return err
	}))
}
