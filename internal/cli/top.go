// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// topInterval is how often top --watch measures.
const topInterval = 5 * time.Second

// top prints who uses the GPUs: of each node, or as a table of policies or pods.
func (p *Program) top(ctx context.Context, f *flags, args []string) error {
	of := "node"
	if len(args) > 0 {
		of, args = args[0], args[1:]
	}
	if !slices.Contains([]string{"node", "policy", "pod"}, of) {
		return hint(fmt.Errorf("top prints node, policy or pod, not %q", of))
	}
	agents, err := dial(f)
	if err != nil {
		return err
	}
	for printed := ""; ; {
		measured, err := agents.measure(ctx, p.Clock.Now())
		if f.watch && errors.Is(ctx.Err(), context.Canceled) {
			return nil // the user ends a watch so
		}
		if err != nil {
			return advise(err)
		}
		shown, err := p.topAs(f, of, measured, args)
		if err != nil {
			return err
		}
		if f.output != "" {
			shown = separator(printed, f.output) + shown
		}
		if err := p.write(shown); err != nil || !f.watch {
			return err
		}
		printed = shown
		select {
		case <-ctx.Done():
			return nil
		case <-p.Clock.After(topInterval):
		}
	}
}

// topAs is what top prints of what was measured: all, or what has one of some names.
func (p *Program) topAs(f *flags, of string, measured []measuredNode, names []string) (string, error) {
	chosen, err := choose(of, measured, names)
	if err != nil {
		return "", err
	}
	if f.output != "" {
		return usageReport(chosen, f.output)
	}
	shown := text{width: p.Width}
	if f.watch && p.Width > 0 {
		shown.WriteString("\x1b[H\x1b[2J") // a terminal: home, and clear
	}
	shown.top(of, chosen)
	return shown.String(), nil
}

// choose returns the part of what was measured that has one of some names, or may have one; without names all. It is an
// error if a name is not measured.
func choose(of string, measured []measuredNode, names []string) ([]measuredNode, error) {
	if len(names) == 0 {
		return measured, nil
	}
	for _, name := range names {
		if !slices.ContainsFunc(measured, func(n measuredNode) bool { return n.has(of, name) }) {
			return nil, fmt.Errorf("no GPU is measured for %s %q; `kubectl gpusharing top` lists them all", of, name)
		}
	}
	var chosen []measuredNode
	for _, n := range measured {
		has := slices.ContainsFunc(names, func(name string) bool { return n.has(of, name) })
		unknown := of != "node" && n.failed != ""
		if of == "pod" {
			n.report.Units = unitsWith(n.report.Units, names)
			unknown = unknown || n.report.Incomplete != ""
		}
		if has || unknown {
			chosen = append(chosen, n)
		}
	}
	return chosen, nil
}

// unitsWith are the units on which containers of some pods are, with only these containers.
func unitsWith(all []usage.Unit, pods []string) (units []usage.Unit) {
	for _, u := range all {
		u.Containers = slices.DeleteFunc(slices.Clone(u.Containers), func(c usage.Container) bool { return !slices.Contains(pods, c.Pod) })
		if len(u.Containers) > 0 {
			units = append(units, u)
		}
	}
	return units
}

// usageReport is what was measured as JSON or YAML.
func usageReport(measured []measuredNode, output string) (string, error) {
	type node struct {
		usage.Report

		// NotMeasured is why there is no measurement of the node; empty: there is.
		NotMeasured string `json:"notMeasured,omitempty"`
	}
	report := struct {
		Nodes []node `json:"nodes"`
	}{Nodes: []node{}}
	for _, n := range measured {
		n.report.Node = n.name // an agent speaks for no other node
		if n.report.Units == nil {
			n.report.Units = []usage.Unit{}
		}
		report.Nodes = append(report.Nodes, node{n.report, n.failed})
	}
	return marshal(report, output)
}

const (
	agentName = cluster.AgentName
	// reader is the account of which top takes a token: an agent never sees what the user may do.
	reader = "gpu-sharing-usage"
	// metricsPort names the port of the agents.
	metricsPort = "metrics"
	// tokenLife is the shortest that Kubernetes gives; a token is renewed before that.
	tokenLife, renewAfter = 10 * time.Minute, 8 * time.Minute
	// askedAtOnce is how many agents are asked at the same time, each of which answers in measureTimeout.
	askedAtOnce, measureTimeout = 16, 15 * time.Second
	// maxUsage bounds the answer of an agent.
	maxUsage = 8 << 20
)

// errNoMetrics says what top needs.
var errNoMetrics = errors.New("the agents serve no usage: turn it on with metrics.enabled=true of the Helm chart (docs/monitoring.md)")

// measuredNode is what the agent of a node measured, or why it did not.
type measuredNode struct {
	name    string
	report  usage.Report
	history usage.History // in place of the report, if that was asked for
	failed  string
}

// agents asks the agents of a cluster, through the API server.
type agents struct {
	client client.Client
	http   *http.Client
	host   *url.URL

	tokens map[string]token // of the reader, by namespace
}

type token struct {
	value string
	since time.Time
}

func dial(f *flags) (*agents, error) {
	config, err := configOf(f)
	if err != nil {
		return nil, err
	}
	return agentsOf(config)
}

// agentsOf are the agents of a cluster.
func agentsOf(config *rest.Config) (*agents, error) {
	c, err := clientOf(config)
	if err != nil {
		return nil, err
	}
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	host, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	return &agents{client: c, http: httpClient, host: host, tokens: map[string]token{}}, nil
}

// errNoHistory says what advise needs.
var errNoHistory = errors.New("the agents keep no history and no Prometheus is named: give --prometheus URL, or set metrics.sampling.interval of the " +
	"Helm chart and wait for --min-age (docs/monitoring.md)")

// histories asks all agents what they keep. lacks names those that keep nothing or do not answer.
func (a *agents) histories(ctx context.Context, now time.Time) (histories []usage.History, lacks []string, err error) {
	nodes, err := a.gather(ctx, now, usage.HistoryQuery, func(n *measuredNode) any { return &n.history })
	if err != nil {
		return nil, nil, err
	}
	for _, n := range nodes {
		if n.failed != "" {
			lacks = append(lacks, fmt.Sprintf("node %s: %s", n.name, n.failed))
			continue
		}
		n.history.Node = n.name // an agent speaks for no other node
		histories = append(histories, n.history)
	}
	if len(histories) == 0 {
		return nil, nil, fmt.Errorf("%w. %s", errNoHistory, lacks[0])
	}
	return histories, lacks, nil
}

// measure has all agents measure.
func (a *agents) measure(ctx context.Context, now time.Time) ([]measuredNode, error) {
	return a.gather(ctx, now, "", func(n *measuredNode) any { return &n.report })
}

// running are the agents that can be asked.
func (a *agents) running(ctx context.Context) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	if err := a.client.List(ctx, pods, client.MatchingLabels{nameLabel: agentName}); err != nil {
		return nil, fmt.Errorf("listing the agents: %w", err)
	}
	own, err := ownNamespaces(ctx, a.client, "")
	if err != nil {
		return nil, err
	}
	running := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		ended := p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
		ofTenant := len(own) > 0 && !slices.Contains(own, p.Namespace) // who would answer for the node that it is on
		return p.Spec.NodeName == "" || !p.DeletionTimestamp.IsZero() || ended || ofTenant
	})
	if len(running) == 0 {
		return nil, errors.New("no agent runs: look at the DaemonSets " + agentName + " and " + draAgentName +
			", and at the labels nvidia.com/gpu.present of the nodes")
	}
	return running, nil
}

// gather asks all agents, a few at a time.
func (a *agents) gather(ctx context.Context, now time.Time, query string, into func(*measuredNode) any) ([]measuredNode, error) {
	running, err := a.running(ctx)
	if err != nil {
		return nil, err
	}
	nodes := make([]measuredNode, len(running))
	// Where it is not known which namespaces are the operator's, one that cannot be asked must not hide the others.
	refusals, renewed := make([]error, len(running)), map[string]error{}
	for i := range running {
		p := &running[i]
		if _, asked := renewed[p.Namespace]; !asked && portOf(p) != 0 {
			renewed[p.Namespace] = a.renew(ctx, p.Namespace, now)
		}
		if refusals[i] = renewed[p.Namespace]; portOf(p) == 0 {
			refusals[i] = errNoMetrics
		}
		if refusals[i] != nil {
			nodes[i] = notMeasured(p, refusals[i])
		}
	}
	if !slices.Contains(refusals, nil) {
		return nil, refusals[0]
	}
	places := make(chan struct{}, askedAtOnce)
	var asking sync.WaitGroup
	for i := range running {
		if refusals[i] != nil {
			continue
		}
		asking.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			nodes[i] = a.ask(ctx, &running[i], query, into)
		})
	}
	asking.Wait()
	slices.SortFunc(nodes, func(x, y measuredNode) int { return cmp.Compare(x.name, y.name) })
	return nodes, nil
}

// renew gets a token of the reader in a namespace, unless there is one that lasts.
func (a *agents) renew(ctx context.Context, namespace string, now time.Time) error {
	if had, is := a.tokens[namespace]; is && now.Sub(had.since) < renewAfter {
		return nil
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: reader}}
	request := &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(tokenLife.Seconds()))},
	}
	switch err := a.client.SubResource("token").Create(ctx, account, request); {
	case apierrors.IsNotFound(err):
		return errNoMetrics
	case apierrors.IsForbidden(err):
		return notAllowed(namespace, err.Error())
	case err != nil:
		return fmt.Errorf("getting a token of %s/%s: %w", namespace, reader, err)
	}
	a.tokens[namespace] = token{request.Status.Token, now}
	return nil
}

func notMeasured(p *corev1.Pod, why error) measuredNode {
	return measuredNode{name: p.Spec.NodeName, failed: fmt.Sprintf("pod %s/%s: %v", p.Namespace, p.Name, why)}
}

func notAllowed(namespace, why string) error {
	return fmt.Errorf("%s; ask an administrator to bind the Role gpu-sharing-top to you: kubectl -n %s create rolebinding NAME "+
		"--role=gpu-sharing-top --user=YOU", why, namespace)
}

func portOf(p *corev1.Pod) int32 {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name == metricsPort {
				return port.ContainerPort
			}
		}
	}
	return 0
}

// ask asks one agent.
func (a *agents) ask(ctx context.Context, p *corev1.Pod, query string, into func(*measuredNode) any) measuredNode {
	ctx, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	node := measuredNode{name: p.Spec.NodeName}
	target := a.host.JoinPath("api/v1/namespaces", p.Namespace, "pods", fmt.Sprintf("https:%s:%d", p.Name, portOf(p)), "proxy", usage.Path)
	target.RawQuery = query
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return notMeasured(p, err)
	}
	request.Header.Set(usage.TokenHeader, a.tokens[p.Namespace].value)
	answer, err := a.http.Do(request)
	if err != nil {
		return notMeasured(p, err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxUsage))
	if err == nil && answer.StatusCode == http.StatusOK {
		err = json.Unmarshal(body, into(&node))
	} else if err == nil {
		err = refusal(p.Namespace, answer.StatusCode, body)
	}
	if err != nil {
		return notMeasured(p, err)
	}
	return node
}

// refusal is why there is no usage: the API server answers with an object, an agent with text.
func refusal(namespace string, code int, body []byte) error {
	var status metav1.Status
	if json.Unmarshal(body, &status) == nil && status.Kind == "Status" {
		if code == http.StatusForbidden {
			return notAllowed(namespace, status.Message)
		}
		return errors.New(status.Message)
	}
	return fmt.Errorf("%d: %s", code, strings.TrimSpace(string(body)))
}
