// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
)

// TestAPreviewIsOfWhatWasAskedLast: an answer that comes late is of another question, and one of a question that was
// changed is of none.
func TestAPreviewIsOfWhatWasAskedLast(t *testing.T) {
	g := NewWithT(t)
	hub := dashboard.NewHub()
	page := dashboard.Page{Cluster: "x", Notes: []string{}, Nodes: []dashboard.Node{}}
	for _, name := range []string{"fast", "slow"} {
		page.Policies = append(page.Policies, dashboard.Policy{Name: name, State: "Ready", Tone: dashboard.ToneReady})
	}
	g.Expect(hub.Show(page)).To(Succeed())
	late, answered := make(chan struct{}), make(chan struct{})
	b := open(t, serveWith(t, hub, func(ctx context.Context, q dashboard.Question) (dashboard.Answer, error) {
		if strings.Join(q.Delete, "") == "slow" {
			select {
			case <-late:
			case <-ctx.Done():
			}
			defer close(answered)
		}
		return dashboard.Answer{Text: "of " + strings.Join(q.Delete, ""), Nodes: []dashboard.NodePreview{}}, nil
	}))
	deletion := func(of string) {
		b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector('[data-policy="` + of + `"]').click()`))
	}
	b.eventually(`document.querySelectorAll("#policies button").length`, 2)
	b.do(chromedp.Evaluate[chromedp.Void](`{ window.settled = 0; const real = fetch;
		window.fetch = (url, ...rest) => { const answer = real(url, ...rest); if (url === "api/preview") answer.catch(() => {}).then(() => settled++); return answer; }; }`))
	deletion("slow")
	b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#preview .close").click()`))
	deletion("fast")
	b.eventually(`document.querySelector("#preview-text").textContent`, "of fast")
	close(late)
	<-answered
	b.eventually(`settled`, 2)
	b.do(chromedp.Evaluate[chromedp.Void](`fetch("/app.js").then((r) => r.text())`, chromedp.EvalAwaitPromise)) // by then the page has read the answer
	g.Expect(b.text("#preview-text")).To(Equal("of fast"))
	b.do(chromedp.Evaluate[chromedp.Void](`{ const t = document.querySelector("#preview-policies"); t.value = "x"; t.dispatchEvent(new Event("input")); }`))
	b.eventually(`document.querySelector("#preview-text").hidden`, true)
}

// TestThePageIsNotLiveBeforeItKnowsTheCluster: an empty page would look like an empty cluster.
func TestThePageIsNotLiveBeforeItKnowsTheCluster(t *testing.T) {
	hub := dashboard.NewHub()
	b := open(t, serve(t, hub))
	b.eventually(`document.querySelector("#live").textContent`, "Reading the cluster…")
	NewWithT(t).Expect(hub.Show(dashboard.Page{Cluster: "x", Notes: []string{}, Policies: []dashboard.Policy{}})).To(Succeed())
	b.eventually(`document.querySelector("#live").textContent`, "Live")
}

// TestThePageIsNotLiveWhileTheAPIServerDoesNotAnswer: that the command answers the browser shows nothing of that.
func TestThePageIsNotLiveWhileTheAPIServerDoesNotAnswer(t *testing.T) {
	g := NewWithT(t)
	hub := dashboard.NewHub()
	b := open(t, serve(t, hub))
	stale := &dashboard.Stale{Since: time.Now().Add(-96 * time.Second), Why: "the API server does not answer"}
	page := dashboard.Page{Cluster: "x", Notes: []string{}, Policies: []dashboard.Policy{}, Stale: stale}
	g.Expect(hub.Show(page)).To(Succeed())
	b.eventually(`document.querySelector("#live").textContent`, "Not live: the API server does not answer")
	g.Expect(read[string](b, `document.querySelector("#live").dataset.tone`)).To(Equal("failed"))
	b.eventually(`(/^shown as of (9[6-9]|1\d\d) s ago$/).test(document.querySelector("#age").textContent) && !document.querySelector("#age").hidden`, true)
	before := b.text("#age")
	b.eventually(`document.querySelector("#age").textContent !== `+quoted(before), true) // it counts on
	page.Stale = nil
	g.Expect(hub.Show(page)).To(Succeed())
	b.eventually(`document.querySelector("#live").textContent`, "Live")
	g.Expect(read[bool](b, `document.querySelector("#age").hidden`)).To(BeTrue())
}

// TestAPreviewSaysThatTheCommandHasEnded: the browser's own words say nothing to a user.
func TestAPreviewSaysThatTheCommandHasEnded(t *testing.T) {
	hub := dashboard.NewHub()
	NewWithT(t).Expect(hub.Show(dashboard.Page{Cluster: "x", Notes: []string{}, Policies: []dashboard.Policy{}})).To(Succeed())
	b := open(t, serveWith(t, hub, func(context.Context, dashboard.Question) (dashboard.Answer, error) { panic(http.ErrAbortHandler) }))
	b.eventually(`document.querySelector("#live").textContent`, "Live")
	b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#ask").click(), document.querySelector("#preview-run").click()`))
	b.eventually(`document.querySelector("#preview-state").textContent.startsWith("The command does not answer")`, true)
}
