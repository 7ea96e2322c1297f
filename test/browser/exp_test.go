package browser
import ("testing";"time"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/gpusharing/gpu-sharing-operator/internal/dashboard"
)
func TestExp(t *testing.T) {
	hub := dashboard.NewHub()
	const nodes=500
	rounds := make([]int, nodes)
	_ = hub.Show(fleet(nodes, func(i int) int { return rounds[i] }))
	address := serve(t, hub)
	b := open(t, "about:blank")
	phase := func(name string, f func()) {
		s := time.Now()
		tasks := b.tasks(f)
		t.Logf("%s: %v", name, time.Since(s))
		for _, task := range tasks[:min(len(tasks), 4)] { t.Logf("   busy %v, wall %v: %v", task.busy, task.wall, task.what) }
	}
	phase("load", func() {
	b.do(chromedp.Navigate(address))
	b.eventually(`document.querySelectorAll("#nodes > li .gpu").length`, nodes*8) })
	t.Log(read[int](b, `document.querySelectorAll("*").length`))
	phase("idle", func() { time.Sleep(2*time.Second) })
	phase("change", func() { for range 5 { for k:=range 10 { rounds[k]++ }; hub.Show(fleet(nodes, func(i int) int { return rounds[i] })); time.Sleep(300*time.Millisecond) } })
	phase("eval", func() { read[string](b, `document.querySelector("h1").textContent`) })
	phase("tab", func() { b.do(chromedp.KeyEvent(kb.Tab)) })
	phase("tab", func() { b.do(chromedp.KeyEvent(kb.Tab)) })
	phase("js focus", func() { b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#nodes button").focus()`)) })
	phase("arrow", func() { b.do(chromedp.KeyEvent(kb.ArrowDown)) })
}
