// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dashboard_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/cli/dashboard"
)

// served is a page that is served.
type served struct {
	*testing.T
	hub         *dashboard.Hub
	base, token string
	host        string
}

func serve(t *testing.T) *served {
	t.Helper()
	return serveBy(t, clock.RealClock{})
}

// serveBy serves by a clock.
func serveBy(t *testing.T, now clock.Clock) *served {
	t.Helper()
	g := NewWithT(t)
	s := &served{T: t, hub: dashboard.NewHub()}
	server := &dashboard.Server{Hub: s.hub, Clock: now, Preview: func(ctx context.Context, q dashboard.Question) (dashboard.Answer, error) {
		if _, ends := ctx.Deadline(); q.Policies == "slow" && ends {
			return dashboard.Answer{}, context.DeadlineExceeded
		}
		if q.Policies == "wrong" {
			return dashboard.Answer{}, errors.New("it holds no GPUSharingPolicy")
		}
		return dashboard.Answer{Text: q.Policies + strings.Join(q.Delete, ",")}, nil
	}}
	ctx, stop := context.WithCancel(t.Context())
	listener, address, err := server.Listen(ctx, 0)
	g.Expect(err).NotTo(HaveOccurred())
	u, err := url.Parse(address)
	g.Expect(err).NotTo(HaveOccurred())
	s.base, s.host, s.token = "http://"+u.Host, u.Host, u.Fragment
	var serving sync.WaitGroup
	serving.Go(func() { g.Expect(server.Serve(ctx, listener)).To(Succeed()) })
	t.Cleanup(func() { stop(); serving.Wait() })
	return s
}

// answer is what the page answered.
type answer struct {
	StatusCode int
	Header     http.Header
	Body       io.Reader
}

// ask sends a request with the token, as change makes it.
func (s *served) ask(method, path, body string, change func(*http.Request)) answer {
	s.Helper()
	g := NewWithT(s.T)
	r, err := http.NewRequestWithContext(s.Context(), method, s.base+path, strings.NewReader(body))
	g.Expect(err).NotTo(HaveOccurred())
	r.Header.Set("Authorization", "Bearer "+s.token)
	if change != nil {
		change(r)
	}
	got, err := http.DefaultClient.Do(r)
	g.Expect(err).NotTo(HaveOccurred())
	s.Cleanup(func() { _ = got.Body.Close() })
	return answer{got.StatusCode, got.Header, got.Body}
}

func TestOnlyThePageItselfReadsTheCluster(t *testing.T) {
	s := serve(t)
	NewWithT(t).Expect(s.hub.Show(dashboard.Page{Cluster: "secret"})).To(Succeed())
	_, port, _ := net.SplitHostPort(s.host)
	header := func(name, value string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set(name, value) }
	}
	host := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	for title, tc := range map[string]struct {
		change func(*http.Request)
		code   int
	}{
		"the page":                           {nil, http.StatusOK},
		"the page, by its origin":            {header("Origin", s.base), http.StatusOK},
		"the page, by the name localhost":    {host("localhost:" + port), http.StatusOK},
		"the browser says: of the same site": {header("Sec-Fetch-Site", "same-origin"), http.StatusOK},
		"no token":                           {func(r *http.Request) { r.Header.Del("Authorization") }, http.StatusUnauthorized},
		"another token":                      {header("Authorization", "Bearer "+strings.Repeat("A", len(s.token))), http.StatusUnauthorized},
		"an empty token":                     {header("Authorization", "Bearer "), http.StatusUnauthorized},
		"the token in another scheme":        {header("Authorization", "Basic "+s.token), http.StatusUnauthorized},
		"a name of another site that resolves to this machine": {host("evil.example:" + port), http.StatusForbidden},
		"another port":                      {host("127.0.0.1:1"), http.StatusForbidden},
		"no port":                           {host("localhost"), http.StatusForbidden},
		"another site":                      {header("Origin", "http://evil.example"), http.StatusForbidden},
		"a page of another port":            {header("Origin", "http://127.0.0.1:1"), http.StatusForbidden},
		"a sandboxed page":                  {header("Origin", "null"), http.StatusForbidden},
		"the browser says: of another site": {header("Sec-Fetch-Site", "cross-site"), http.StatusForbidden},
		"the browser says: of another port": {header("Sec-Fetch-Site", "same-site"), http.StatusForbidden},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			of := *s
			of.T = t
			answer := of.ask(http.MethodGet, "/api/stream", "", tc.change)
			g.Expect(answer.StatusCode).To(Equal(tc.code))
			line, err := bufio.NewReader(answer.Body).ReadString('\n')
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(strings.Contains(line, "secret")).To(Equal(tc.code == http.StatusOK))
			answer = of.ask(http.MethodPost, "/api/preview", `{"policies": "mine"}`, tc.change)
			g.Expect(answer.StatusCode).To(Equal(tc.code))
		})
	}
}

func TestEveryAnswerTellsTheBrowserToLoadNothingElse(t *testing.T) {
	s := serve(t)
	for path, code := range map[string]int{
		"/": http.StatusOK, "/app.js": http.StatusOK, "/draw.js": http.StatusOK, "/style.css": http.StatusOK, "/icon.svg": http.StatusOK,
		"/nothing": http.StatusNotFound, "/static/app.js": http.StatusNotFound, "/server.go": http.StatusNotFound, "/%2e%2e/server.go": http.StatusNotFound,
		"/api/preview": http.StatusNotFound, "/api/stream": http.StatusUnauthorized,
	} {
		g := NewWithT(t)
		answer := s.ask(http.MethodGet, path, "", func(r *http.Request) { r.Header.Del("Authorization") })
		g.Expect(answer.StatusCode).To(Equal(code), path)
		g.Expect(answer.Header.Get("Content-Security-Policy")).To(HavePrefix("default-src 'self'; "), path)
		g.Expect(answer.Header.Get("Content-Security-Policy")).To(And(Not(ContainSubstring("unsafe")), ContainSubstring("frame-ancestors 'none'")))
		g.Expect(answer.Header.Get("X-Content-Type-Options")).To(Equal("nosniff"), path)
		g.Expect(answer.Header.Get("Referrer-Policy")).To(Equal("no-referrer"), path)
		g.Expect(answer.Header.Get("Cache-Control")).To(Equal("no-store"), path)
		g.Expect(answer.Header).NotTo(HaveKey("Access-Control-Allow-Origin"))
	}
}

func TestOnlyThisMachineReachesThePage(t *testing.T) {
	g := NewWithT(t)
	s := serve(t)
	name, port, err := net.SplitHostPort(s.host)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(name).To(Equal("127.0.0.1"))
	g.Expect(s.token).To(MatchRegexp(`^[A-Z2-7]{26}$`))
	addresses, err := net.InterfaceAddrs()
	g.Expect(err).NotTo(HaveOccurred())
	for _, address := range addresses {
		if n, is := address.(*net.IPNet); is && !n.IP.IsLoopback() {
			connection, err := (&net.Dialer{Timeout: time.Second}).DialContext(t.Context(), "tcp", net.JoinHostPort(n.IP.String(), port))
			g.Expect(err).To(HaveOccurred(), "%s, of another machine's view: %v", n.IP, connection)
		}
	}
	_, _, err = (&dashboard.Server{}).Listen(t.Context(), portOf(g, port))
	g.Expect(err).To(MatchError(ContainSubstring("choose another with --port")))
}

func portOf(g *WithT, text string) uint16 {
	var port uint16
	g.Expect(json.Unmarshal([]byte(text), &port)).To(Succeed())
	return port
}

func TestAPreviewIsAnsweredOrRefusedWithItsReason(t *testing.T) {
	g := NewWithT(t)
	s := serve(t)
	answered := func(body string) (int, string) {
		answer := s.ask(http.MethodPost, "/api/preview", body, nil)
		line, _ := bufio.NewReader(answer.Body).ReadString('\n')
		return answer.StatusCode, line
	}
	code, text := answered(`{"policies": "mine", "delete": ["other"]}`)
	g.Expect(code).To(Equal(http.StatusOK))
	g.Expect(text).To(ContainSubstring("mineother"))
	code, text = answered(`{"policies": "wrong"}`)
	g.Expect(code).To(Equal(http.StatusUnprocessableEntity))
	g.Expect(text).To(ContainSubstring("it holds no GPUSharingPolicy"))
	code, text = answered(`{"policies": "slow"}`)
	g.Expect(code).To(Equal(http.StatusUnprocessableEntity), "an API server that does not answer is not waited for without end")
	g.Expect(text).To(ContainSubstring("did not answer within 1m0s"))
	code, _ = answered(`{"policies": "` + strings.Repeat("x", 2<<20) + `"}`)
	g.Expect(code).To(Equal(http.StatusBadRequest))
}

// late is a clock on which all time that a browser has is over.
type late struct{ clock.RealClock }

func (late) Now() time.Time { return time.Now().Add(-time.Hour) }

func TestABrowserThatTakesOrSendsNothingIsNotWaitedForWithoutEnd(t *testing.T) {
	s := serveBy(t, late{})
	NewWithT(t).Expect(s.hub.Show(dashboard.Page{})).To(Succeed())
	for _, request := range []struct{ method, path, body string }{
		{http.MethodGet, "/app.js", ""}, {http.MethodGet, "/api/stream", ""}, {http.MethodPost, "/api/preview", `{"policies": "mine"}`},
	} {
		g := NewWithT(t)
		r, err := http.NewRequestWithContext(t.Context(), request.method, s.base+request.path, strings.NewReader(request.body))
		g.Expect(err).NotTo(HaveOccurred())
		r.Header.Set("Authorization", "Bearer "+s.token)
		answer, err := http.DefaultClient.Do(r)
		if err == nil { // the page has refused what did not come in time
			g.Expect(answer.StatusCode).To(Equal(http.StatusBadRequest), request.path)
			g.Expect(answer.Body.Close()).To(Succeed())
		}
	}
	g := NewWithT(t)
	connection, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.host)
	g.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = connection.Close() }()
	_, err = fmt.Fprintf(connection, "POST /api/preview HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: 100\r\n\r\n{", s.host, s.token)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(connection.SetReadDeadline(time.Now().Add(time.Minute))).To(Succeed())
	said, err := bufio.NewReader(connection).ReadString('\n')
	g.Expect(err).NotTo(HaveOccurred(), "half a question is refused")
	g.Expect(said).To(ContainSubstring("400 Bad Request"))
}

// line is one of the stream.
type line struct {
	Page  *dashboard.Page  `json:"page"`
	Names []string         `json:"names"`
	Gone  []string         `json:"gone"`
	Nodes []dashboard.Node `json:"nodes"`
}

// reader reads the stream, and leaves out empty lines.
func (s *served) reader() func() line {
	s.Helper()
	lines := bufio.NewReader(s.ask(http.MethodGet, "/api/stream", "", nil).Body)
	return func() line {
		s.Helper()
		g := NewWithT(s.T)
		for {
			text, err := lines.ReadBytes('\n')
			g.Expect(err).NotTo(HaveOccurred())
			if len(text) > 1 {
				var one line
				g.Expect(json.Unmarshal(text, &one)).To(Succeed())
				return one
			}
		}
	}
}

func TestABrowserGetsThePageAndThenWhatChanges(t *testing.T) {
	g := NewWithT(t)
	s := serve(t)
	node := func(name, state string) dashboard.Node { return dashboard.Node{Name: name, State: state} }
	g.Expect(s.hub.Show(dashboard.Page{Cluster: "one", Nodes: []dashboard.Node{node("a", "Ready"), node("b", "Ready")}})).To(Succeed())
	next := s.reader()
	first := next()
	g.Expect(first.Page.Cluster).To(Equal("one"))
	g.Expect(first.Names).To(Equal([]string{"a", "b"}))
	g.Expect(first.Nodes).To(HaveLen(2))

	g.Expect(s.hub.Show(dashboard.Page{Cluster: "one", Nodes: []dashboard.Node{node("a", "Ready"), node("b", "Applying")}})).To(Succeed())
	second := next()
	g.Expect(second.Page).To(BeNil(), "it has not changed")
	g.Expect(second.Nodes).To(Equal([]dashboard.Node{node("b", "Applying")}), "a has not changed")

	g.Expect(s.hub.Show(dashboard.Page{Cluster: "two", Nodes: []dashboard.Node{node("b", "Applying")}})).To(Succeed())
	third := next()
	g.Expect(third.Page.Cluster).To(Equal("two"))
	g.Expect(third.Gone).To(Equal([]string{"a"}))
	g.Expect(third.Nodes).To(BeEmpty())

	late := s.reader()()
	g.Expect(late.Names).To(Equal([]string{"b"}), "another browser gets all that is so now")
	g.Expect(late.Nodes).To(Equal([]dashboard.Node{node("b", "Applying")}))
}

func TestManyNodesComeInShortLines(t *testing.T) {
	g := NewWithT(t)
	s := serve(t)
	page := dashboard.Page{}
	for len(page.Nodes) < 101 {
		page.Nodes = append(page.Nodes, dashboard.Node{Name: strings.Repeat("x", 1+len(page.Nodes))})
	}
	g.Expect(s.hub.Show(page)).To(Succeed())
	next := s.reader()
	got := next()
	g.Expect(got.Names).To(HaveLen(101))
	nodes := got.Nodes
	for len(nodes) < 101 {
		g.Expect(len(got.Nodes)).To(BeNumerically("<=", 20))
		got = next()
		nodes = append(nodes, got.Nodes...)
	}
	g.Expect(nodes).To(ConsistOf(page.Nodes))
}

func TestItIsKnownWhetherABrowserReads(t *testing.T) {
	g := NewWithT(t)
	s := serve(t)
	g.Expect(s.hub.IsRead()).To(BeFalse())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	g.Expect(s.hub.Read(ended)).To(MatchError(context.Canceled), "nobody reads")
	g.Expect(s.hub.Show(dashboard.Page{})).To(Succeed())
	ctx, leave := context.WithCancel(t.Context())
	answer := s.ask(http.MethodGet, "/api/stream", "", func(r *http.Request) { *r = *r.WithContext(ctx) })
	g.Expect(answer.StatusCode).To(Equal(http.StatusOK))
	g.Expect(s.hub.Read(t.Context())).To(Succeed())
	g.Expect(s.hub.IsRead()).To(BeTrue())
	leave()
	g.Eventually(s.hub.IsRead, "1m").Should(BeFalse())
	g.Expect(s.hub.Read(ended)).To(MatchError(context.Canceled), "it has left")
}
