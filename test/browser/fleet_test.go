// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	. "github.com/onsi/gomega"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
)

// serve serves a page that the test itself fills, and returns its address.
func serve(t *testing.T, hub *dashboard.Hub) string {
	t.Helper()
	return serveWith(t, hub, nil)
}

// serveWith serves a page as serve does, with an answer to previews.
func serveWith(t *testing.T, hub *dashboard.Hub, preview func(context.Context, dashboard.Question) (dashboard.Answer, error)) string {
	t.Helper()
	g := NewWithT(t)
	server := &dashboard.Server{Hub: hub, Clock: clock.RealClock{}, Preview: preview}
	ctx, stop := context.WithCancel(t.Context())
	listener, address, err := server.Listen(ctx, 0)
	g.Expect(err).NotTo(HaveOccurred())
	var serving sync.WaitGroup
	serving.Go(func() { g.Expect(server.Serve(ctx, listener)).To(Succeed()) })
	t.Cleanup(func() { stop(); serving.Wait() })
	return address
}

const gib = int64(1 << 30)

// fleet is a page with many nodes, each with 8 GPUs of 7 instances; round tells one value of a node from another.
func fleet(nodes int, round func(node int) int) dashboard.Page {
	p := dashboard.Page{Cluster: "fleet", Notes: []string{}, Policies: []dashboard.Policy{
		{Name: "research", Strategy: "MIG", Matched: int32(nodes), Ready: int32(nodes), State: "Ready", Tone: dashboard.ToneReady, Shares: dashboard.Shares{Offered: int64(56 * nodes), InUse: int64(56 * nodes)}},
	}}
	for i := range nodes {
		n := dashboard.Node{
			Name: fmt.Sprintf("node-%04d", i), Policy: "research", State: "Ready", Tone: dashboard.ToneReady, Products: []string{"NVIDIA-A100-SXM4-40GB"},
			Namespaces: []string{"team"}, Resources: []dashboard.Resource{{Name: "nvidia.com/mig-1g.5gb", Now: new(int64(56))}},
			Shares: dashboard.Shares{Offered: 56, InUse: 56},
		}
		for index := range 8 {
			g := dashboard.GPU{
				UUID: fmt.Sprintf("GPU-%d-%d", i, index), Index: index, Product: "NVIDIA-A100-SXM4-40GB", Sharing: "MIG", MemoryBytes: 40 * gib,
				Memory: &dashboard.Memory{Used: int64(round(i)%40) * gib, Total: 40 * gib}, Drawing: dashboard.Drawing{Slices: 8},
			}
			for slot := range 7 {
				pod := fmt.Sprintf("team/train-%d-%d-%d", i, index, slot)
				g.Drawing.Blocks = append(g.Drawing.Blocks, dashboard.Block{Size: 1, Name: "1g.5gb", Holders: []string{pod}})
				g.Containers = append(g.Containers, dashboard.Container{
					Name: pod + " main", Where: fmt.Sprintf("instance %d", slot), UsedBytes: new(int64(round(i)%5) * gib), ShareBytes: new(5 * gib),
				})
			}
			g.Drawing.Blocks = append(g.Drawing.Blocks, dashboard.Block{Size: 1})
			n.GPUs = append(n.GPUs, g)
		}
		p.Nodes = append(p.Nodes, n)
	}
	return p
}

// TestNoTaskIsLong: the page of 500 nodes, of which 50 change each second, always answers within 100 ms. What is the
// page's own fault takes long each time, and what other programs on the machine cost, which share the caches of its
// processors, does not.
func TestNoTaskIsLong(t *testing.T) {
	const longest, times = 100 * time.Millisecond, 5
	var best time.Duration
	for range times {
		if best = longestTask(t); best < longest {
			return
		}
	}
	NewWithT(t).Expect(best).To(BeNumerically("<", longest), "the longest task of the page, each of %d times", times)
}

// longestTask is the longest task of the page of 500 nodes, from the start until the nodes of a group are shown and
// while 50 change each second and a person turns to other nodes and uses the keyboard.
func longestTask(t *testing.T) time.Duration {
	t.Helper()
	const nodes, perSecond = 500, 50
	g := NewWithT(t)
	hub := dashboard.NewHub()
	rounds := make([]int, nodes)
	show := func() { g.Expect(hub.Show(fleet(nodes, func(i int) int { return rounds[i] }))).To(Succeed()) }
	show()
	address := serve(t, hub)
	b := open(t, address) // once before: what a process of the browser loads with its first page is not the page's
	b.eventually(fleetIs, nodes)
	next := 0
	pace := time.NewTicker(200 * time.Millisecond)
	defer pace.Stop()
	tasks := b.tasks(func() {
		b.do(chromedp.Reload())
		b.eventually(fleetIs, nodes)
		b.do(chromedp.Click("#groups button"))
		for range 10 {
			for range 5 { // as the command does: what changed in 200 ms
				for range perSecond / 5 {
					rounds[next%nodes]++
					next++
				}
				show()
				<-pace.C
			}
			b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#next").click(); scrollBy(0, 3000)`), chromedp.KeyEvent(kb.ArrowDown))
		}
		last := (next - 1) % nodes
		b.do(chromedp.Evaluate[chromedp.Void](`{ const f = document.querySelector("#by-text"); f.value = "` + fmt.Sprintf("node-%04d", last) + `"; f.dispatchEvent(new Event("input")); }`))
		b.eventually(memoryOfFirst, fmt.Sprint(int64(rounds[last])*gib))
	})
	for _, task := range tasks[:min(len(tasks), 8)] {
		t.Logf("a task used a processor for %v, in %v: %v", task.busy, task.wall, task.what)
	}
	g.Expect(tasks[0].busy).To(BeNumerically(">", 0), "the trace has times of processors")
	g.Expect(b.complained()).To(BeEmpty())
	return tasks[0].busy
}

const (
	// fleetIs is how many nodes the page knows.
	fleetIs = `parseInt(document.querySelector("#count").textContent)`
	// memoryOfFirst is how much memory of the first GPU on the page is used.
	memoryOfFirst = `document.querySelector("#nodes [role=meter]")?.getAttribute("aria-valuenow")`
)

// TestAThousandNodes: the first useful picture, which has the totals and the groups, and then updates of 50 nodes, of
// which the first is on the page. As in TestNoTaskIsLong, what the page is to blame for is so each time.
func TestAThousandNodes(t *testing.T) {
	const nodes, changed, firstWithin, updateWithin, least, most = 1000, 50, 2 * time.Second, 100 * time.Millisecond, 5, 39
	g := NewWithT(t)
	hub := dashboard.NewHub()
	show := func(round int) {
		page := fleet(nodes, func(i int) int {
			if i < changed {
				return round
			}
			return 0
		})
		g.Expect(hub.Show(page)).To(Succeed())
	}
	show(0)
	b := open(t, serve(t, hub))
	const pictured = `document.querySelector("#totals dd")?.textContent === "1000 of 1000" && document.querySelector("#groups .shares")?.textContent === "56000 of 56000 shares in use"`
	first, update := patience, patience
	for try := 0; try < least || try < most && first > firstWithin; try++ {
		b.do(chromedp.Reload())
		first = min(first, get(b, chromedp.Evaluate[time.Duration](`new Promise((done) => { const look = () => `+pictured+` ? done(Math.round(performance.now() * 1e6)) : requestAnimationFrame(look); look(); })`, chromedp.EvalAwaitPromise)))
	}
	b.do(chromedp.Click("#groups button"))
	b.eventually(memoryOfFirst, "0")
	for round := 1; round <= least || round <= most && update > updateWithin; round++ {
		b.do(chromedp.Evaluate[chromedp.Void](fmt.Sprintf(`window.drawnAt = new Promise((done) => { const look = () => %s === "%d" ? done(Date.now()) : requestAnimationFrame(look); look(); }); void 0`,
			memoryOfFirst, int64(round)*gib)))
		show(round)
		shown := time.Now()
		drawn := get(b, chromedp.Evaluate[int64](`window.drawnAt`, chromedp.EvalAwaitPromise))
		update = min(update, time.UnixMilli(drawn).Sub(shown))
	}
	t.Logf("1,000 nodes of 8 GPUs: the first useful picture after %v, an update of %d nodes after %v", first, changed, update)
	g.Expect(first).To(BeNumerically("<=", firstWithin))
	g.Expect(update).To(BeNumerically("<=", updateWithin))
}

// TestEqualNodesAreOneLine: as kubectl gpusharing status groups them. A click shows those of a group alone, some at
// once.
func TestEqualNodesAreOneLine(t *testing.T) {
	g := NewWithT(t)
	hub := dashboard.NewHub()
	page := fleet(40, func(int) int { return 0 })
	for i := range 3 {
		page.Nodes[i].State, page.Nodes[i].Tone, page.Nodes[i].Shares.InUse = "GPUInUse (Draining)", dashboard.ToneBlocked, 1
	}
	g.Expect(hub.Show(page)).To(Succeed())
	b := open(t, serve(t, hub))
	const visible = `[...document.querySelectorAll("#nodes h3")].map((h) => h.textContent).join()`
	b.eventually(fleetIs, 40)
	b.eventually(`document.querySelectorAll("#groups button").length`, 2)
	b.eventually(visible, "")
	g.Expect(b.text("#groups li:nth-child(1)")).To(Equal("37 × (8 × NVIDIA-A100-SXM4-40GB) policy research Ready nvidia.com/mig-1g.5gb: 56 each 2072 of 2072 shares in use"))
	g.Expect(b.text("#groups li:nth-child(2)")).To(And(HavePrefix("3 × "), ContainSubstring("GPUInUse (Draining)"), HaveSuffix("3 of 168 shares in use")))
	g.Expect(b.text("#totals")).To(ContainSubstring("Shares in use2075 of 2240"))
	b.do(chromedp.Click("#groups li:nth-child(2) button"))
	b.eventually(visible, "node-0000,node-0001,node-0002")
	g.Expect(read[string](b, `document.querySelector("#groups li:nth-child(2) button").getAttribute("aria-pressed")`)).To(Equal("true"))
	b.do(chromedp.Click("#groups li:nth-child(1) button"))
	b.eventually(`document.querySelectorAll("#nodes > li").length`, 12)
	for range 3 {
		b.do(chromedp.Click("#next"))
	}
	b.eventually(visible, "node-0039")
	b.eventually(`document.querySelector("#range").textContent`, "Nodes 37 to 37 of 37")
	b.do(chromedp.Click("#previous"))
	b.eventually(`document.querySelector("#range").textContent`, "Nodes 25 to 36 of 37")
	b.do(chromedp.Click("#groups li:nth-child(1) button"))
	b.eventually(visible, "")
}

// markup is what must stay text.
const markup = `<img src=x onerror="window.injected=1"><script>window.injected=1</script>"><svg onload=window.injected=1>&lt;b&gt;`

// hostile is a page in which each text is markup.
func hostile() dashboard.Page {
	p := fleet(1, func(int) int { return 3 })
	p.Cluster, p.Notes = markup, []string{markup}
	p.Policies[0] = dashboard.Policy{Name: markup, Strategy: markup, Matched: 1, State: markup, Message: markup, Tone: dashboard.ToneFailed}
	n := &p.Nodes[0]
	n.Name, n.Policy, n.State, n.Message, n.Products, n.Namespaces = markup, markup, markup, markup, []string{markup}, []string{markup}
	n.Steps, n.Blockers, n.Notes, n.Resources = []string{markup}, []string{markup}, []string{markup}, []dashboard.Resource{{Name: markup}}
	gpu := &n.GPUs[0]
	gpu.UUID, gpu.Product, gpu.Sharing, gpu.Others = markup, markup, markup, []string{markup}
	gpu.Drawing.Blocks[0] = dashboard.Block{Size: 1, Name: markup, Holders: []string{markup}}
	gpu.Containers[0].Name, gpu.Containers[0].Where = markup, markup
	return p
}

func TestNoTextBecomesMarkup(t *testing.T) {
	g := NewWithT(t)
	hub := dashboard.NewHub()
	g.Expect(hub.Show(hostile())).To(Succeed())
	address := serve(t, hub)
	b := open(t, address)
	b.eventually(`document.querySelectorAll("#nodes > li").length`, 1)
	b.eventually(`document.querySelectorAll("#by-policy option").length`, 2)
	b.do(chromedp.Click("#nodes button"), chromedp.WaitVisible("#detail table"))
	for _, selector := range []string{
		"#cluster", "#notes li", "#policies h3", "#policies .state", "#policies .message", "#nodes h3 button", "#nodes .state", "#nodes .message",
		"#nodes .block .what", "#nodes .block .who", "#nodes .uses li", "#detail h2", "#detail ol li", "#detail td", "#by-policy option:nth-child(2)",
		"#by-product option:nth-child(2)", "#by-namespace option:nth-child(2)", "#preview-delete option:nth-child(2)",
	} {
		g.Expect(b.text(selector)).To(ContainSubstring(markup), selector)
	}
	g.Expect(read[bool](b, `"injected" in window`)).To(BeFalse())
	g.Expect(read[int](b, `document.querySelectorAll("img, script, svg, b, iframe, object").length`)).To(Equal(2), "the page's own picture and script")
	g.Expect(b.complained()).To(BeEmpty())
	g.Expect(b.foreign(address)).To(BeEmpty())
	// And if the page made markup of a text all the same, the browser would not let it.
	g.Expect(read[string](b, `(() => { try { document.body.innerHTML = "<b>x</b>"; return "it was let"; } catch (e) { return e.name; } })()`)).To(Equal("TypeError"))
	b.do(chromedp.Evaluate[chromedp.Void](`{ const elsewhere = document.createElement("img"); elsewhere.src = "http://127.0.0.1:1/x"; document.body.append(elsewhere); }`))
	g.Eventually(func() string { return strings.Join(b.complained(), "\n") }, patience).Should(ContainSubstring("Content Security Policy"))
}
