// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/tracing"
	"github.com/chromedp/chromedp"
	. "github.com/onsi/gomega"
)

// task is something that the main thread of the page did without a break.
type task struct {
	busy time.Duration // of a processor: what the page itself is to blame for, also on a machine that has others to run
	wall time.Duration
	what []string // the longest things in it
}

// traceEvent is an event of the browser's trace, with times in microseconds
// (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
type traceEvent struct {
	Name  string `json:"name"`
	Phase string `json:"ph"`
	PID   int    `json:"pid"`
	TID   int    `json:"tid"`
	At    int64  `json:"ts"`
	Wall  int64  `json:"dur"`
	Busy  int64  `json:"tdur"`
	Args  struct {
		Name string `json:"name"`
	} `json:"args"`
}

// tasks records the tasks of the page's main thread while something happens, the longest first.
func (b *tab) tasks(while func()) []task {
	b.Helper()
	g := NewWithT(b.T)
	var mu sync.Mutex
	var events []traceEvent
	done := make(chan struct{})
	ctx, stop := context.WithCancel(b.ctx)
	defer stop()
	g.Expect(chromedp.ListenBrowser(ctx, func(event any) {
		switch e := event.(type) {
		case *tracing.EventDataCollected:
			mu.Lock()
			defer mu.Unlock()
			for _, raw := range e.Value {
				var one traceEvent
				if text, err := json.Marshal(raw); err == nil && json.Unmarshal(text, &one) == nil {
					events = append(events, one)
				}
			}
		case *tracing.EventTracingComplete:
			close(done)
		}
	})).To(Succeed())
	_, err := chromedp.CallBrowser(b.ctx, tracing.Start, tracing.StartParams{
		TraceConfig: &tracing.TraceConfig{IncludedCategories: []string{"toplevel", "devtools.timeline", "__metadata"}},
	})
	g.Expect(err).NotTo(HaveOccurred())
	while()
	_, err = chromedp.CallBrowser(b.ctx, tracing.End, cdp.Empty{})
	g.Expect(err).NotTo(HaveOccurred())
	g.Eventually(done, patience).Should(BeClosed())
	mu.Lock()
	defer mu.Unlock()
	type thread struct{ pid, tid int }
	main, pages := map[thread]bool{}, map[int]bool{} // not "WebUI Top Renderer", which draws what belongs to the browser itself
	for _, e := range events {
		if e.Phase == "M" && e.Name == "process_name" && e.Args.Name == "Renderer" {
			pages[e.PID] = true
		}
	}
	for _, e := range events {
		if e.Phase == "M" && e.Name == "thread_name" && e.Args.Name == "CrRendererMain" && pages[e.PID] {
			main[thread{e.PID, e.TID}] = true
		}
	}
	g.Expect(main).NotTo(BeEmpty(), "the trace names the main thread of the page")
	var tasks []task
	for _, e := range events {
		if e.Phase != "X" || !strings.HasSuffix(e.Name, "RunTask") || !main[thread{e.PID, e.TID}] {
			continue
		}
		t := task{busy: time.Duration(e.Busy) * time.Microsecond, wall: time.Duration(e.Wall) * time.Microsecond}
		if t.wall > 50*time.Millisecond {
			for _, part := range events {
				within := part.PID == e.PID && part.TID == e.TID && part.At >= e.At && part.At+part.Wall <= e.At+e.Wall
				if within && part.Name != e.Name && part.Wall > e.Wall/5 {
					t.what = append(t.what, part.Name)
				}
			}
		}
		tasks = append(tasks, t)
	}
	slices.SortFunc(tasks, func(x, y task) int { return int(y.busy - x.busy) })
	return tasks
}

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
