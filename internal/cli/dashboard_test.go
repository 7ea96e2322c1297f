// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// shownPage is the page as a browser has it: what the stream sent, one after the other.
type shownPage struct {
	*testing.T
	base, token string

	mu    sync.Mutex
	page  dashboard.Page
	nodes map[string]dashboard.Node
}

// startDashboard runs the command as a user, and reads its page.
func startDashboard(t *testing.T, kubeconfig string) *shownPage {
	t.Helper()
	g := NewWithT(t)
	ctx, stop := context.WithCancel(t.Context())
	read, written := io.Pipe()
	var running sync.WaitGroup
	p := &Program{Out: written, Clock: clock.RealClock{}}
	running.Go(func() {
		g.Expect(p.Run(ctx, []string{"dashboard", "--kubeconfig", kubeconfig})).To(Succeed(), "an interrupt is no error")
		_ = written.Close()
	})
	t.Cleanup(func() { stop(); running.Wait() })
	out := bufio.NewReader(read)
	first, err := out.ReadString('\n')
	g.Expect(err).NotTo(HaveOccurred())
	running.Go(func() { _, _ = io.Copy(io.Discard, out) })
	u, err := url.Parse(regexp.MustCompile(`http://\S+`).FindString(first))
	g.Expect(err).NotTo(HaveOccurred())
	s := &shownPage{T: t, base: "http://" + u.Host, token: u.Fragment, nodes: map[string]dashboard.Node{}}
	body := s.ask(ctx, http.MethodGet, "/api/stream", nil)
	running.Go(func() { s.follow(body) })
	return s
}

func (s *shownPage) ask(ctx context.Context, method, path string, body io.Reader) io.ReadCloser {
	s.Helper()
	g := NewWithT(s.T)
	r, err := http.NewRequestWithContext(ctx, method, s.base+path, body)
	g.Expect(err).NotTo(HaveOccurred())
	r.Header.Set("Authorization", "Bearer "+s.token)
	answer, err := http.DefaultClient.Do(r)
	g.Expect(err).NotTo(HaveOccurred())
	s.Cleanup(func() { _ = answer.Body.Close() })
	return answer.Body
}

func (s *shownPage) follow(body io.Reader) {
	lines := json.NewDecoder(body)
	for {
		var u struct {
			Page  *dashboard.Page  `json:"page"`
			Gone  []string         `json:"gone"`
			Nodes []dashboard.Node `json:"nodes"`
		}
		if lines.Decode(&u) != nil {
			return
		}
		s.mu.Lock()
		if u.Page != nil {
			s.page = *u.Page
		}
		for _, name := range u.Gone {
			delete(s.nodes, name)
		}
		for _, n := range u.Nodes {
			s.nodes[n.Name] = n
		}
		s.mu.Unlock()
	}
}

func (s *shownPage) node(name string) dashboard.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes[name]
}

func (s *shownPage) stale() *dashboard.Stale {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.page.Stale
}

func (s *shownPage) notes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.page.Notes)
}

// proxy is between a program and the API server. While it is closed it lets nothing through, and ends no connection: as
// a network that is gone does.
type proxy struct {
	address string

	mu    sync.Mutex
	opens *sync.Cond
	shut  bool
}

func proxyTo(t *testing.T, host string) *proxy {
	t.Helper()
	g := NewWithT(t)
	target, err := url.Parse(host)
	g.Expect(err).NotTo(HaveOccurred())
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	g.Expect(err).NotTo(HaveOccurred())
	p := &proxy{address: listener.Addr().String()}
	p.opens = sync.NewCond(&p.mu)
	var running sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	running.Go(func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			to, err := (&net.Dialer{}).DialContext(ctx, "tcp", target.Host)
			if err != nil {
				_ = from.Close()
				continue
			}
			context.AfterFunc(ctx, func() { _, _ = from.Close(), to.Close() })
			running.Go(func() { p.carry(to, from) })
			running.Go(func() { p.carry(from, to) })
		}
	})
	t.Cleanup(func() {
		stop()
		_ = listener.Close()
		p.open(true)
		running.Wait()
	})
	return p
}

// carry carries bytes one way, until one side ends.
func (p *proxy) carry(to, from net.Conn) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		p.mu.Lock()
		for p.shut {
			p.opens.Wait()
		}
		p.mu.Unlock()
		if err != nil {
			return
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// open lets everything through, or nothing.
func (p *proxy) open(is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut = !is
	p.opens.Broadcast()
}

// TestDashboardOnAnAPIServer: what the page shows is what the API server has, soon after each change.
func TestDashboardOnAnAPIServer(t *testing.T) {
	const patience = time.Minute
	t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "1") // client-go's own are half a minute and 15 seconds
	t.Setenv("HTTP2_PING_TIMEOUT_SECONDS", "1")
	g := NewWithT(t)
	cluster := env.Start(t, env.WithNVIDIA())
	n := newNode(t, "a", sim.A100, sim.T4)
	hold(&n, "train", 0, nil)
	populate(t, cluster.Client, n)
	bindRoles(t, cluster.Client, map[string][]string{
		"viewer": {"gpu-sharing-view"}, "editor": {"gpu-sharing-view", "gpu-sharing-edit", "gpu-sharing-cli"},
	})
	present := policy(t, "research", slicing)
	present.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "none"}}
	g.Expect(cluster.Client.Create(t.Context(), &present)).To(Succeed())
	g.Eventually(func() error { return cluster.Client.List(t.Context(), &v1alpha1.GPUNodeList{}) }, patience).Should(Succeed())
	kubeconfig := kubeconfigOf(t, cluster.Config, "editor")
	printed := func(in string, args ...string) string {
		var out bytes.Buffer
		p := &Program{In: strings.NewReader(in), Out: &out, Clock: clock.RealClock{}, Width: previewWidth}
		g.Eventually(func() error { return failure(p.Run(t.Context(), append(args, "--kubeconfig", kubeconfig))) }, patience).Should(Succeed())
		return out.String()
	}
	status := func() (s struct {
		Policies []struct{ Name, Strategy, Reason, Message string }
		Nodes    []struct {
			Name, Policy, Reason, State, Message string
			Products, BlockedBy                  []string
			Advertised                           map[string]int64
		}
	},
	) {
		g.Expect(json.Unmarshal([]byte(printed("", "status", "-o", "json")), &s)).To(Succeed())
		return s
	}
	before := status()
	s := startDashboard(t, kubeconfig)
	same := func(g Gomega) {
		now := status()
		s.mu.Lock()
		defer s.mu.Unlock()
		g.Expect(s.nodes).To(HaveLen(len(now.Nodes)))
		for _, want := range now.Nodes {
			card := s.nodes[want.Name]
			g.Expect([]string{card.Policy, card.State, card.Message}).To(Equal([]string{want.Policy, (&report{Reason: want.Reason, State: want.State}).stands(), want.Message}))
			g.Expect(card.Products).To(Equal(want.Products))
			g.Expect(card.Blockers).To(Equal(want.BlockedBy))
			advertised := map[string]int64{}
			for _, r := range card.Resources {
				if r.Now != nil && *r.Now != 0 {
					advertised[r.Name] = *r.Now
				}
			}
			g.Expect(advertised).To(Equal(want.Advertised))
		}
		g.Expect(s.page.Policies).To(HaveLen(len(now.Policies)))
		for i, want := range now.Policies {
			p := s.page.Policies[i]
			g.Expect([]string{p.Name, p.Strategy, p.State, p.Message}).To(Equal([]string{want.Name, want.Strategy, want.Reason, want.Message}))
		}
	}
	g.Eventually(same, patience).Should(Succeed())
	g.Expect(before.Nodes).To(HaveLen(1))
	g.Expect(s.node("a").GPUs[0].Drawing.Blocks).To(Equal([]dashboard.Block{drawn(wholeSlices, wholeGPU, "team/train")}))
	g.Eventually(s.notes, patience).Should(ContainElement(HavePrefix("Memory and utilization: the agents serve no usage: turn it on with metrics.enabled=true")))
	g.Eventually(s.notes, patience).Should(ContainElement(HavePrefix("No controller is installed: ")))

	t.Run("a preview is what plan prints, and changes nothing", func(t *testing.T) {
		g := NewWithT(t)
		question, err := json.Marshal(dashboard.Question{Policies: research})
		g.Expect(err).NotTo(HaveOccurred())
		var answer dashboard.Answer
		g.Expect(json.NewDecoder(s.ask(t.Context(), http.MethodPost, "/api/preview", bytes.NewReader(question))).Decode(&answer)).To(Succeed())
		g.Expect(answer.Text).To(Equal(printed(research, "plan", "-f", "-")))
		g.Expect(answer.Nodes).To(HaveLen(1))
		all := &v1alpha1.GPUSharingPolicyList{}
		g.Expect(cluster.Client.List(t.Context(), all)).To(Succeed())
		g.Expect(all.Items).NotTo(ContainElement(HaveField("Spec.Sharing.Strategy", v1alpha1.StrategyMIG)))
		for body, says := range map[string]string{
			`{}`: "a preview needs a policy", `{"delete": ["none"]}`: `there is no policy "none" to delete`, `{"policies": "kind: Pod"}`: "plan takes policies only",
		} {
			refused, err := io.ReadAll(s.ask(t.Context(), http.MethodPost, "/api/preview", strings.NewReader(body)))
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(string(refused)).To(ContainSubstring(says))
		}
	})
	t.Run("a change of each kind is shown", func(t *testing.T) {
		g := NewWithT(t)
		gpuNode := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(gpuNode), gpuNode)).To(Succeed())
		gpuNode.Status.Devices[1].Holders = []v1alpha1.HolderStatus{{Namespace: "team", PodName: "infer", ContainerName: "main"}}
		since := time.Now()
		g.Expect(cluster.Client.Status().Update(t.Context(), gpuNode)).To(Succeed())
		g.Eventually(func() []string { return s.node("a").GPUs[1].Drawing.Blocks[0].Holders }, patience, "10ms").Should(Equal([]string{"team/infer"}))
		t.Logf("a change of a GPUNode was in the browser after %v", time.Since(since))

		object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
		more := client.RawPatch(types.MergePatchType, []byte(`{"status":{"capacity":{"nvidia.com/gpu":"8"},"allocatable":{"nvidia.com/gpu":"8"}}}`))
		g.Expect(cluster.Client.Status().Patch(t.Context(), object, more)).To(Succeed())
		g.Eventually(func() int { return s.node("a").GPUs[1].Drawing.Slices }, patience).Should(Equal(4))

		agent := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-sharing-operator", Name: "agent"}}
		g.Expect(cluster.Client.Delete(t.Context(), agent, client.GracePeriodSeconds(0))).To(Succeed())
		g.Eventually(func() string { return s.node("a").State }, patience).Should(Equal(v1alpha1.ReasonAgentNotReporting))

		g.Expect(cluster.Client.Delete(t.Context(), &v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}})).To(Succeed())
		second := newNode(t, "b", sim.H100)
		g.Expect(cluster.Client.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}})).To(Succeed())
		g.Expect(cluster.Client.Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Spec: second.GPU.Spec})).To(Succeed())
		g.Eventually(func() string { return s.node("b").Name }, patience).Should(Equal("b"))
		g.Eventually(same, patience).Should(Succeed())
		g.Expect(cluster.Client.Delete(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "b"}})).To(Succeed())
		g.Eventually(func() string { return s.node("b").Name }, patience).Should(BeEmpty())
		g.Eventually(same, patience).Should(Succeed())
	})
	t.Run("it says so where the API server sends nothing any more, and shows what is so once it does again", func(t *testing.T) {
		g := NewWithT(t)
		between := proxyTo(t, cluster.Config.Host)
		behind := rest.CopyConfig(cluster.Config)
		behind.Host = "https://" + between.address
		s := startDashboard(t, kubeconfigOf(t, behind, "editor"))
		stale := []any{
			HavePrefix("Policies are not shown as they are now: "), HavePrefix("GPUs are not shown as they are now: "),
			HavePrefix("What the nodes advertise is not shown as it is now: "), HavePrefix("Processes are not shown with their pods"),
		}
		g.Eventually(func() string { return s.node("a").Name }, patience).Should(Equal("a"))
		g.Expect(s.notes()).NotTo(ContainElement(Or(HavePrefix("Policies are not"), HavePrefix("GPUs are not"))))
		g.Expect(s.stale()).To(BeNil())
		gone := time.Now()
		between.open(false)
		g.Eventually(s.stale, patience).Should(HaveField("Why", "the API server does not answer"))
		g.Expect(s.stale().Since).To(BeTemporally("~", gone, heartbeat+time.Second))
		g.Eventually(s.notes, patience).Should(ContainElements(stale...))
		g.Expect(s.node("a").Name).To(Equal("a"), "what was so last is shown still")
		third := newNode(t, "c", sim.T4)
		g.Expect(cluster.Client.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "c"}})).To(Succeed())
		g.Expect(cluster.Client.Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Spec: third.GPU.Spec})).To(Succeed())
		between.open(true)
		g.Eventually(func() string { return s.node("c").Name }, 2*patience).Should(Equal("c"))
		g.Eventually(s.notes, patience).ShouldNot(ContainElement(Or(HavePrefix("Policies are not"), HavePrefix("GPUs are not"))))
		g.Eventually(s.stale, 2*patience).Should(BeNil())
		g.Expect(cluster.Client.Delete(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "c"}})).To(Succeed())
	})
	t.Run("without a right it says what is missing", func(t *testing.T) {
		g := NewWithT(t)
		s := startDashboard(t, kubeconfigOf(t, cluster.Config, "viewer"))
		g.Eventually(s.notes, patience).Should(ContainElements(
			And(HavePrefix("What the nodes advertise is not shown as it is now: "), ContainSubstring("gpu-sharing-cli")),
			And(HavePrefix("Processes are not shown with their pods"), ContainSubstring("gpu-sharing-cli")),
			And(HavePrefix("Memory and utilization: "), ContainSubstring("cannot list resource \"pods\"")),
		))
		g.Eventually(func() int { return len(s.node("a").GPUs) }, patience).Should(Equal(2), "what it may read is shown")
		g.Expect(s.node("a").Resources).To(BeEmpty(), "not 0: it is not known")
		g.Expect(s.node("a").State).NotTo(Equal(v1alpha1.ReasonAgentNotReporting), "it is not known")
		var out bytes.Buffer
		err := (&Program{Out: &out, Clock: clock.RealClock{}}).Run(t.Context(), []string{"dashboard", "--kubeconfig", kubeconfigOf(t, cluster.Config, "nobody")})
		g.Expect(err).To(MatchError(ContainSubstring("gpu-sharing-view")))
		g.Expect(out.String()).To(BeEmpty(), "no page is offered")
	})
}

// watching are watches of an API server that does not answer.
func watching(t *testing.T) *watches {
	t.Helper()
	seen, err := newWatches(&rest.Config{Host: "http://127.0.0.1:1"})
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return seen
}

// TestThePageForbidsNothingThatItHasNotRead: the page reads no NodeFeatures, which says nothing about whether there are
// any.
func TestThePageForbidsNothingThatItHasNotRead(t *testing.T) {
	g := NewWithT(t)
	seen := watching(t)
	n := newNode(t, "a", sim.T4)
	n.Labels[cluster.LabelMPSCapable] = "false"
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: n.Labels}}
	p := policy(t, "shared", `{sharing: {strategy: MPS, mps: {replicas: 4}}}`) // which the controller has not observed yet
	n.GPU.Name = "a"
	for k, o := range map[*kind]any{seen.policies: &p, seen.gpuNodes: &n.GPU, seen.nodes: object} {
		g.Expect(k.GetStore().Add(o)).To(Succeed())
		seen.touch(o)
	}
	s, _, _ := seen.snapshot(now)
	cards := sight{snapshot: s}.page().Nodes
	g.Expect(cards).To(HaveLen(1))
	g.Expect(cards[0].Policy).To(Equal("shared"))
	g.Expect(cards[0].State).NotTo(ContainSubstring(v1alpha1.ReasonNoNodeFeatures))
}
