// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
)

// look is a state of the page. Enter brings it about once the page is shown, and leave ends it; empty: nothing is to do.
type look struct {
	name         string
	page         dashboard.Page
	enter, leave string
}

func looks(t *testing.T) []look {
	t.Helper()
	empty := dashboard.Page{Cluster: "empty (https://cluster.example.com:6443)", Notes: []string{}, Policies: []dashboard.Policy{}, NoPolicy: "There is no GPUSharingPolicy: all GPUs are in their former state."}
	many := fleet(1000, func(i int) int { return i % 40 })
	for i := range 17 {
		n := &many.Nodes[7*i]
		n.GPUs, n.Shares, n.Resources = n.GPUs[:1], dashboard.Shares{Offered: 7, InUse: 7}, []dashboard.Resource{count("nvidia.com/mig-1g.5gb", 7, 7)}
		n.State, n.Tone, n.Message = "GPUInUse (Draining)", dashboard.ToneBlocked, fmt.Sprintf("Waiting until 14:20 for 1 pod to leave GPU 0: team/train-%d-0-0", 7*i)
	}
	return []look{
		{"blocked", shown(t), "", ""},
		{"every state", everyState(t), "", ""},
		{"node opened", everyState(t), `document.querySelector("#nodes button").click()`, `document.querySelector("#detail").close()`},
		{"preview", shown(t), `document.querySelector("#ask").click()`, `document.querySelector("#preview").close()`},
		{"empty", empty, "", ""},
		{"1000 nodes", many, "", ""},
		{"1000 nodes, group opened", many, `document.querySelector("#groups li:nth-child(2) button").click()`, `document.querySelector("#groups li:nth-child(2) button").click()`},
	}
}

// each brings the page into each state, in light on a wide screen, and in dark on a phone.
func each(t *testing.T, b *tab, hub *dashboard.Hub, see func(name string)) {
	t.Helper()
	g := NewWithT(t)
	for _, l := range looks(t) {
		g.Expect(hub.Show(l.page)).To(Succeed())
		b.eventually(`document.querySelector("#cluster").textContent + " " + document.querySelector("#count").textContent`, fmt.Sprintf("%s %d nodes", l.page.Cluster, len(l.page.Nodes)))
		b.do(chromedp.Evaluate[chromedp.Void](l.enter + `; void 0`))
		for scheme, width := range map[string]int64{"light": 1280, "dark": 400} {
			b.scheme(scheme)
			b.do(chromedp.EmulateViewport(width, 1180))
			b.eventually(`[...document.querySelectorAll("#nodes > li")].every((card) => card.querySelector(".gpu"))`, true)
			see(fmt.Sprintf("%s, %s, %d wide", l.name, scheme, width))
		}
		b.do(chromedp.Evaluate[chromedp.Void](l.leave + `; void 0`))
	}
}

// TestEachStateCanBeUsed: axe-core finds nothing serious in any state of the page, and nothing is wider than the screen.
func TestEachStateCanBeUsed(t *testing.T) {
	axe, err := os.ReadFile(os.Getenv("AXE"))
	if err != nil {
		t.Fatalf("AXE names no axe.min.js: run `make browser-test`: %v", err)
	}
	hub := dashboard.NewHub()
	NewWithT(t).Expect(hub.Show(shown(t))).To(Succeed())
	b := open(t, serve(t, hub))
	b.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error { // the page lets no script but its own work
		_, err := cdp.Call(ctx, target, page.SetBypassCSP, page.SetBypassCSPParams{Enabled: true})
		return err
	}), chromedp.Reload(), chromedp.Evaluate[chromedp.Void](string(axe)+`; void 0`))
	each(t, b, hub, func(name string) {
		t.Run(name, func(t *testing.T) {
			found := get(b, chromedp.Evaluate[[]string](`axe.run({ resultTypes: ["violations"] }).then((r) => r.violations.filter((v) => ["serious", "critical"].includes(v.impact))
				.map((v) => v.id + ": " + v.help + ": " + v.nodes.map((n) => n.target.join(" ")).join(", ")))`, chromedp.EvalAwaitPromise))
			g := NewWithT(t)
			g.Expect(strings.Join(found, "\n")).To(BeEmpty())
			g.Expect(read[bool](b, `document.documentElement.scrollWidth > innerWidth`)).To(BeFalse(), "something is wider than the screen")
		})
	})
}

// TestPictures is no test: it makes pictures of each state of the page, among them that of the docs, dashboard.png, if
// PICTURES names a folder.
func TestPictures(t *testing.T) {
	folder := os.Getenv("PICTURES")
	if folder == "" {
		t.Skip("PICTURES names no folder")
	}
	hub := dashboard.NewHub()
	NewWithT(t).Expect(hub.Show(shown(t))).To(Succeed())
	b := open(t, serve(t, hub))
	each(t, b, hub, func(name string) {
		g := NewWithT(t)
		png := get(b, chromedp.CaptureScreenshot())
		g.Expect(os.WriteFile(filepath.Join(folder, name+".png"), png, 0o644)).To(Succeed())
		if name == "blocked, light, 1280 wide" {
			g.Expect(os.WriteFile(filepath.Join(folder, "dashboard.png"), png, 0o644)).To(Succeed())
		}
	})
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
