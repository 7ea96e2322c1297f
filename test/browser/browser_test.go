// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	. "github.com/onsi/gomega"
)

// patience is how long something that is expected may take on a busy machine.
const patience = 5 * time.Minute

// tab is a tab of the browser, with all that it asked the network for and all that it complained about.
type tab struct {
	*testing.T
	ctx context.Context

	mu         sync.Mutex
	requests   []string
	complaints []string
}

// open opens an address in a browser of its own.
func open(t *testing.T, address string) *tab {
	t.Helper()
	program := os.Getenv("CHROMIUM")
	if program == "" {
		t.Fatal("CHROMIUM names no browser: run `make browser-test`")
	}
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(program), chromedp.NoSandbox,
		chromedp.WindowSize(1400, 1000), chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"))
	allocator, end := chromedp.NewExecAllocator(context.WithoutCancel(t.Context()), options...)
	t.Cleanup(end)
	ctx, closeTab := chromedp.NewContext(allocator)
	t.Cleanup(closeTab)
	b := &tab{T: t, ctx: ctx}
	g := NewWithT(t)
	g.Expect(chromedp.Do(ctx)).To(Succeed(), "starting the browser")
	g.Expect(chromedp.Listen(ctx, func(event any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch e := event.(type) {
		case *network.EventRequestWillBeSent:
			b.requests = append(b.requests, e.Request.URL)
		case *runtime.EventExceptionThrown:
			text := e.ExceptionDetails.Text
			if e.ExceptionDetails.Exception != nil {
				text += " " + e.ExceptionDetails.Exception.Description
			}
			b.complaints = append(b.complaints, text)
		case *log.EventEntryAdded:
			b.complaints = append(b.complaints, e.Entry.Text+" "+e.Entry.URL)
		}
	})).To(Succeed())
	b.do(chromedp.Navigate(address))
	return b
}

// do runs actions in the tab.
func (b *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	NewWithT(b.T).Expect(chromedp.Do(ctx, actions...)).To(Succeed())
}

// get runs an action in the tab, and returns its value.
func get[T any](b *tab, action chromedp.Action[T]) T {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	NewWithT(b.T).Expect(err).NotTo(HaveOccurred())
	return value
}

// read evaluates an expression in the page.
func read[T any](b *tab, expression string) T {
	b.Helper()
	return get(b, chromedp.Evaluate[T](expression))
}

// eventually waits until an expression of the page has a value, and returns how long that took.
func (b *tab) eventually(expression string, is any) time.Duration {
	b.Helper()
	since := time.Now()
	NewWithT(b.T).Eventually(func() any { return read[any](b, expression) }, patience, "20ms").Should(BeEquivalentTo(is), expression)
	return time.Since(since)
}

// text is the text of what a selector finds first.
func (b *tab) text(selector string) string {
	b.Helper()
	return read[string](b, `document.querySelector(`+quoted(selector)+`)?.textContent ?? ""`)
}

// quoted is a text as a literal of JavaScript.
func quoted(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s) + `"`
}

// foreign are the requests that left for another host than that of the page.
func (b *tab) foreign(address string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	own, err := url.Parse(address)
	NewWithT(b.T).Expect(err).NotTo(HaveOccurred())
	var foreign []string
	for _, request := range b.requests {
		if u, err := url.Parse(request); err != nil || u.Host != own.Host {
			foreign = append(foreign, request)
		}
	}
	return foreign
}

// complained is what the browser reported: exceptions, and what the Content-Security-Policy did not let load.
func (b *tab) complained() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.complaints)
}
