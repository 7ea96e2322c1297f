// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package browser

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// command runs kubectl gpusharing dashboard, and returns the address that it prints, and how to end it.
func command(t *testing.T, kubeconfig string) (address string, end func()) {
	t.Helper()
	g := NewWithT(t)
	ctx, stop := context.WithCancel(t.Context())
	read, written := io.Pipe()
	var running sync.WaitGroup
	running.Go(func() {
		p := &cli.Program{Out: written, Clock: clock.RealClock{}}
		g.Expect(p.Run(ctx, []string{"dashboard", "--kubeconfig", kubeconfig})).To(Succeed())
		_ = written.Close()
	})
	end = func() { stop(); running.Wait() }
	t.Cleanup(end)
	out := bufio.NewReader(read)
	first, err := out.ReadString('\n')
	g.Expect(err).NotTo(HaveOccurred())
	running.Go(func() { _, _ = io.Copy(io.Discard, out) })
	return regexp.MustCompile(`http://\S+`).FindString(first), end
}

const podTemplate = "example.invalid/x"

// populate creates a node in MIG mode and one that is time-sliced, each with its agent.
func populate(t *testing.T, c client.Client) {
	t.Helper()
	g := NewWithT(t)
	create := func(o client.Object) { g.Expect(c.Create(t.Context(), o)).To(Succeed()) }
	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "gpu-sharing-operator"}})
	add := func(name string, advertised corev1.ResourceList, status v1alpha1.GPUNodeStatus) {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		create(n)
		n.Status.Allocatable, n.Status.Capacity = advertised, advertised
		g.Expect(c.Status().Update(t.Context(), n)).To(Succeed())
		gpuNode := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
		create(gpuNode)
		gpuNode.Status = status
		g.Expect(c.Status().Update(t.Context(), gpuNode)).To(Succeed())
		agent := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-sharing-operator", Name: "agent-" + name, Labels: map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"}},
			Spec:       corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "agent", Image: podTemplate}}},
		}
		create(agent)
		agent.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		g.Expect(c.Status().Update(t.Context(), agent)).To(Succeed())
	}
	add("gpu-a", corev1.ResourceList{"nvidia.com/mig-3g.20gb": resource.MustParse("1"), "nvidia.com/mig-1g.5gb": resource.MustParse("2")}, v1alpha1.GPUNodeStatus{
		Devices: []v1alpha1.DeviceStatus{{
			UUID: "GPU-a", Product: "NVIDIA-A100-SXM4-40GB", MemoryMiB: 40960, MIGCapable: true,
			Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: []v1alpha1.InstanceCount{{Profile: "3g.20gb", Count: 1}, {Profile: "1g.5gb", Count: 2}}},
			Instances: []v1alpha1.InstanceStatus{
				{ID: 1, Profile: "3g.20gb", Start: 0, Size: 4, UUID: "MIG-1"},
				{ID: 7, Profile: "1g.5gb", Start: 4, Size: 1, UUID: "MIG-7"},
				{ID: 8, Profile: "1g.5gb", Start: 6, Size: 1, UUID: "MIG-8"},
			},
			Profiles: []v1alpha1.ProfileStatus{
				{Name: "1g.5gb", ID: 19, Slices: 1, Max: 7, Size: 1, MemoryMiB: 4864, Starts: []int32{0, 1, 2, 3, 4, 5, 6}},
				{Name: "3g.20gb", ID: 9, Slices: 3, Max: 2, Size: 4, MemoryMiB: 19968, Starts: []int32{0, 4}},
				{Name: "7g.40gb", ID: 0, Slices: 7, Max: 1, Size: 8, MemoryMiB: 40192, Starts: []int32{0}},
			},
			Holders: []v1alpha1.HolderStatus{{Namespace: "ml", PodName: "train-0", ContainerName: "main", Instance: new(int32(1))}},
		}},
	})
	add("gpu-b", corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("4")}, v1alpha1.GPUNodeStatus{
		Devices: []v1alpha1.DeviceStatus{{
			UUID: "GPU-b", Product: "Tesla-T4", MemoryMiB: 15360, Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled},
			Holders: []v1alpha1.HolderStatus{{Namespace: "team", PodName: "notebook-0", ContainerName: "main"}},
		}},
	})
	create(&v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "notebooks"}, Spec: v1alpha1.GPUSharingPolicySpec{
		NodeSelector: &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "notebooks"}},
		Sharing:      v1alpha1.Sharing{Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4}},
	}})
}

// drawnBlocks are the blocks of a node as the page draws them: "what|who|flex-grow".
const drawnBlocks = `[...[...document.querySelectorAll("#nodes > li")].find((c) => c.querySelector("h3").textContent === "%s").querySelectorAll(".block")]
	.map((b) => [...b.children].map((x) => x.textContent).join("|") + "|" + b.style.flexGrow).join(";")`

// TestDashboard: a person looks at a cluster.
func TestDashboard(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA())
	populate(t, cluster.Client)
	kubeconfig := env.KubeconfigFile(t, cluster.Config)
	address, end := command(t, kubeconfig)
	b := open(t, address)
	b.eventually(`document.querySelectorAll("#nodes > li").length`, 2)
	b.eventually(`document.querySelector("#live").textContent`, "Live")
	blocks := func(name string) string { return fmt.Sprintf(drawnBlocks, name) }

	t.Run("it shows what the API server has", func(t *testing.T) {
		b.T = t
		g := NewWithT(t)
		b.eventually(blocks("gpu-a"), "3g.20gb|ml/train-0|4;1g.5gb|free|1;unused||1;1g.5gb|free|1;unused||1")
		b.eventually(blocks("gpu-b"), "replica|team/notebook-0|1;3 replicas|free|3")
		g.Expect(b.text("#policies")).To(And(ContainSubstring("notebooks"), ContainSubstring("TimeSlicing")))
		g.Expect(b.text("#nodes > li:nth-child(1)")).To(And(ContainSubstring("nvidia.com/mig-1g.5gb: 2"), ContainSubstring("nvidia.com/mig-3g.20gb: 1"),
			ContainSubstring("NVIDIA-A100-SXM4-40GB"), ContainSubstring("no policy")))
		b.eventually(`document.querySelector("#notes").textContent.includes("metrics.enabled=true")`, true) // why nothing is measured
		width := read[float64](b, `(() => { const [x, y] = document.querySelectorAll("#nodes .block"); return x.getBoundingClientRect().width / y.getBoundingClientRect().width; })()`)
		g.Expect(width).To(BeNumerically("~", 4, 0.6), "to scale: 4 slices beside 1")
	})
	t.Run("a change appears within 2 seconds", func(t *testing.T) {
		b.T = t
		g := NewWithT(t)
		fastest := patience
		for round := range 5 {
			gpuNode := &v1alpha1.GPUNode{}
			g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: "gpu-b"}, gpuNode)).To(Succeed())
			pod := fmt.Sprintf("notebook-%d", round+1)
			gpuNode.Status.Devices[0].Holders[0].PodName = pod
			g.Expect(cluster.Client.Status().Update(t.Context(), gpuNode)).To(Succeed())
			took := b.eventually(blocks("gpu-b"), "replica|team/"+pod+"|1;3 replicas|free|3")
			t.Logf("shown after %v", took)
			fastest = min(fastest, took)
		}
		g.Expect(fastest).To(BeNumerically("<", 2*time.Second), "of five changes")
	})
	t.Run("filters", func(t *testing.T) {
		b.T = t
		visible := `[...document.querySelectorAll("#nodes > li:not([hidden]) h3")].map((h) => h.textContent).join()`
		choose := func(id, value string) {
			b.do(chromedp.Evaluate[chromedp.Void](`{ const f = document.getElementById("` + id + `"); f.value = "` + value + `"; f.dispatchEvent(new Event("input")); }`))
		}
		for _, f := range []struct{ id, value, shows string }{
			{"by-product", "Tesla-T4", "gpu-b"},
			{"by-namespace", "ml", "gpu-a"},
			{"by-policy", " ", "gpu-a,gpu-b"},
			{"by-text", "NOTEBOOK", "gpu-b"},
			{"by-tone", "ready", ""},
		} {
			b.eventually(`[...document.querySelectorAll("#`+f.id+` option")].some((o) => o.value === "`+f.value+`") || "`+f.id+`" === "by-text"`, true)
			choose(f.id, f.value)
			b.eventually(visible, f.shows)
			choose(f.id, "")
		}
		b.eventually(visible, "gpu-a,gpu-b")
	})
	t.Run("by keyboard", func(t *testing.T) {
		b.T = t
		focused := `document.activeElement.textContent`
		b.do(chromedp.Evaluate[chromedp.Void](`document.activeElement.blur(), document.querySelector("#by-text").focus()`), chromedp.KeyEvent(kb.Tab), chromedp.KeyEvent(kb.Home))
		b.eventually(focused, "gpu-a")
		b.do(chromedp.KeyEvent(kb.ArrowDown))
		b.eventually(focused, "gpu-b")
		b.do(chromedp.KeyEvent(kb.Home))
		b.eventually(focused, "gpu-a")
		b.do(chromedp.KeyEvent(kb.Enter))
		b.eventually(`document.querySelector("#detail").open && document.querySelector("#detail h2").textContent`, "gpu-a")
		b.eventually(`document.querySelector("#detail").textContent.includes("GPU-a")`, true)
		b.do(chromedp.KeyEvent(kb.Escape))
		b.eventually(`document.querySelector("#detail").open`, false)
		b.eventually(focused, "gpu-a")
		stops := read[int](b, `[...document.querySelectorAll("#nodes button")].filter((x) => x.tabIndex === 0).length`)
		NewWithT(t).Expect(stops).To(Equal(1), "the cards are one stop of the Tab key")
	})
	t.Run("by screen reader", func(t *testing.T) {
		b.T = t
		readable(b)
	})
	t.Run("a preview, before and after", func(t *testing.T) {
		b.T = t
		g := NewWithT(t)
		const policy = "apiVersion: gpusharing.io/v1alpha1\nkind: GPUSharingPolicy\nmetadata: {name: small}\nspec:\n" +
			"  nodeSelector: {}\n  gpuSelector: {products: [\"NVIDIA-A100-*\"]}\n  sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 4}]}]}}\n"
		b.do(chromedp.Click("#ask"), chromedp.WaitVisible("#preview-policies"),
			chromedp.Evaluate[chromedp.Void](`document.querySelector("#preview-policies").value = `+quoted(policy)), chromedp.Click("#preview-run"))
		b.eventually(`document.querySelector("#preview-text").hidden`, false)
		g.Expect(b.text("#preview-text")).To(ContainSubstring("POLICY small (new)"))
		g.Expect(b.text("#preview-nodes")).To(And(ContainSubstring("gpu-a"), Not(ContainSubstring("gpu-b"))))
		g.Expect(b.text(`[aria-label="GPU 0 before"]`)).To(ContainSubstring("3g.20gb ml/train-0"))
		g.Expect(read[int](b, `document.querySelectorAll('[aria-label="GPU 0 after"] .block.new').length`)).To(BeNumerically(">=", 2))
		b.do(chromedp.KeyEvent(kb.Escape))
		all := &v1alpha1.GPUSharingPolicyList{}
		g.Expect(cluster.Client.List(t.Context(), all)).To(Succeed())
		g.Expect(all.Items).To(HaveLen(1), "a preview creates nothing")
	})
	t.Run("no other site can read it", func(t *testing.T) {
		b.T = t
		noOtherSite(b, t, address)
	})
	t.Run("nothing left this machine, and the browser had nothing to complain about", func(t *testing.T) {
		b.T = t
		g := NewWithT(t)
		g.Expect(b.foreign(address)).To(BeEmpty())
		g.Expect(b.complained()).To(BeEmpty())
		g.Expect(read[string](b, `location.href`)).NotTo(ContainSubstring(strings.Split(address, "#")[1]), "the address bar does not keep the token")
	})
	t.Run("it says when it is not live any more", func(t *testing.T) {
		b.T = t
		end()
		b.eventually(`document.querySelector("#live").textContent.startsWith("Not live")`, true)
	})
}

// noOtherSite opens a page of another site, which knows even the token, and lets it try.
func noOtherSite(b *tab, t *testing.T, address string) {
	t.Helper()
	g := NewWithT(t)
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<!doctype html><title>another site</title>")
	}))
	defer site.Close()
	base, token, _ := strings.Cut(address, "#")
	other := open(t, site.URL)
	for _, try := range []string{
		`fetch("` + base + `api/stream")`, `fetch("` + base + `api/stream", {headers: {Authorization: "Bearer ` + token + `"}})`,
		`fetch("` + base + `api/preview", {method: "POST", body: "{}", headers: {"Content-Type": "text/plain"}})`,
	} {
		got := get(other, chromedp.Evaluate[string](try+`.then((r) => r.text(), (e) => e.name)`, chromedp.EvalAwaitPromise))
		g.Expect(got).To(Equal("TypeError"), "the browser hands it nothing: %s", try)
	}
	framed := get(other, chromedp.Evaluate[string](`new Promise((done) => { const f = document.createElement("iframe"); f.src = "`+base+`";
		f.onload = () => { try { done(f.contentDocument ? "read" : "closed"); } catch (e) { done(e.name); } }; document.body.append(f); })`, chromedp.EvalAwaitPromise))
	g.Expect(framed).NotTo(Equal("read"))
}
