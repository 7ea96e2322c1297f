// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	prometheusapi "github.com/prometheus/client_golang/api"
	prometheusv1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/node"
)

const (
	prometheusAddress = "127.0.0.1:9090"
	// Everything takes a part of the chart's times: what the alerts wait for, promtool tests (test/packaging).
	scrapeEvery  = "2s"
	alertAfter   = "5s"
	rateInterval = "30s"
)

// prometheus is a real Prometheus that scrapes what the chart's PodMonitors name, with the token of the chart's
// account, and has the rules of its PrometheusRule, as the Prometheus operator configures one.
type prometheus struct {
	prometheusv1.API

	// queries are those of the chart's dashboard; answered, those that have had data.
	queries  []string
	answered map[string]bool
}

// startPrometheus starts one. It ends with the specs that asked for it.
func startPrometheus(ctx context.Context) *prometheus {
	GinkgoHelper()
	folder, err := os.MkdirTemp("", "prometheus-")
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() error { return os.RemoveAll(folder) })
	writeYAML(filepath.Join(folder, "prometheus.yaml"), prometheusConfig(ctx))
	writeYAML(filepath.Join(folder, "rules.yaml"), prometheusRules(ctx))
	var log bytes.Buffer
	cmd := exec.Command(filepath.Join(bin, "prometheus"), "--config.file="+filepath.Join(folder, "prometheus.yaml"),
		"--storage.tsdb.path="+filepath.Join(folder, "data"), "--web.listen-address="+prometheusAddress, "--log.level=warn")
	cmd.Stdout, cmd.Stderr = &log, &log
	Expect(cmd.Start()).To(Succeed())
	apart = append(apart, cmd.Process.Pid)
	DeferCleanup(func() error {
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		_ = cmd.Wait() // how it ended matters to nobody
		AddReportEntry("what Prometheus logged", log.String(), ReportEntryVisibilityFailureOrVerbose)
		return nil
	})
	connection, err := prometheusapi.NewClient(prometheusapi.Config{Address: "http://" + prometheusAddress})
	Expect(err).NotTo(HaveOccurred())
	p := &prometheus{API: prometheusv1.NewAPI(connection), queries: dashboardQueries(), answered: map[string]bool{}}
	Eventually(p.value).WithContext(ctx).WithArguments(`min(up{job="gpu-sharing-agent"}) + min(up{job="gpu-sharing-controller"})`).
		Should(HaveValue(Equal(2.0)), "both are scraped")
	return p
}

// value is the one value that a query has. Nil: none.
func (p *prometheus) value(ctx context.Context, query string) (*float64, error) {
	found, _, err := p.Query(ctx, query, time.Now())
	if err != nil {
		return nil, err
	}
	if v, is := found.(model.Vector); is && len(v) == 1 {
		value := float64(v[0].Value)
		return &value, nil
	}
	return nil, nil //nolint:nilnil // it has none, or several
}

// firing are the pods that an alert names, with what it says of each.
func (p *prometheus) firing(ctx context.Context, alert string) (map[string]string, error) {
	all, err := p.Alerts(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for _, a := range all.Alerts {
		if a.Labels[model.AlertNameLabel] == model.LabelValue(alert) && a.State == prometheusv1.AlertStateFiring {
			found[string(a.Labels["namespace"]+"/"+a.Labels["pod"])] = string(a.Annotations["description"])
		}
	}
	return found, nil
}

// look asks the queries of the dashboard, and returns those that have had no data yet. Those that show failures have
// none here.
func (p *prometheus) look(ctx context.Context) ([]string, error) {
	var without []string
	for _, query := range p.queries {
		found, _, err := p.Query(ctx, strings.ReplaceAll(query, "$__rate_interval", rateInterval), time.Now())
		if err != nil {
			return nil, err
		}
		if v, is := found.(model.Vector); is && len(v) > 0 {
			p.answered[query] = true
		}
		if !p.answered[query] && !strings.HasSuffix(query, "> 0") {
			without = append(without, query)
		}
	}
	return without, nil
}

// dashboardQueries are those of the chart's dashboard.
func dashboardQueries() []string {
	GinkgoHelper()
	raw, err := os.ReadFile(filepath.Join(root, "config", "helm", "files", "monitoring", "dashboard.json"))
	Expect(err).NotTo(HaveOccurred())
	var dashboard struct {
		Panels []struct {
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
	}
	Expect(json.Unmarshal(raw, &dashboard)).To(Succeed())
	var queries []string
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			queries = append(queries, target.Expr)
		}
	}
	Expect(queries).NotTo(BeEmpty())
	return queries
}

// podMonitor is what the chart says of one, by the fields that it uses.
type podMonitor struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     struct {
		Selector  metav1.LabelSelector `json:"selector"`
		Endpoints []struct {
			Port          string         `json:"port"`
			Interval      string         `json:"interval"`
			Scheme        string         `json:"scheme"`
			TLSConfig     map[string]any `json:"tlsConfig"`
			Authorization map[string]any `json:"authorization"`
			HonorLabels   bool           `json:"honorLabels"`
			Relabelings   []struct {
				TargetLabel  string   `json:"targetLabel"`
				Replacement  string   `json:"replacement"`
				SourceLabels []string `json:"sourceLabels"`
			} `json:"relabelings"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

// prometheusConfig is what the Prometheus operator makes of the chart's PodMonitors.
func prometheusConfig(ctx context.Context) map[string]any {
	GinkgoHelper()
	token, err := machine.Client.CoreV1().ServiceAccounts(operatorNamespace).
		CreateToken(ctx, "gpu-sharing-metrics", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	Expect(err).NotTo(HaveOccurred())
	var scrapes []any
	for _, document := range rendered(ctx, "podmonitors.yaml") {
		monitor := podMonitor{}
		Expect(json.Unmarshal(document, &monitor)).To(Succeed())
		if len(monitor.Spec.Endpoints) == 0 {
			continue // the Secret
		}
		Expect(monitor.Spec.Endpoints).To(HaveLen(1))
		endpoint := monitor.Spec.Endpoints[0]
		Expect(endpoint.TLSConfig).To(Equal(map[string]any{"insecureSkipVerify": true}))
		Expect(endpoint.Authorization).To(Equal(map[string]any{"credentials": map[string]any{"name": "gpu-sharing-metrics", "key": "token"}}))
		keep := func(label, value string) map[string]any {
			return map[string]any{"action": "keep", "source_labels": []string{label}, "regex": value}
		}
		relabel := []map[string]any{keep("__meta_kubernetes_pod_container_port_name", endpoint.Port)}
		for label, value := range monitor.Spec.Selector.MatchLabels {
			relabel = append(relabel, keep("__meta_kubernetes_pod_label_"+strings.NewReplacer(".", "_", "/", "_", "-", "_").Replace(label), value))
		}
		for label, target := range map[string]string{"namespace": "namespace", "pod_name": "pod", "pod_container_name": "container"} {
			relabel = append(relabel, map[string]any{"source_labels": []string{"__meta_kubernetes_" + label}, "target_label": target})
		}
		for _, r := range endpoint.Relabelings {
			rule := map[string]any{"target_label": r.TargetLabel}
			if r.Replacement != "" {
				rule["replacement"] = r.Replacement
			}
			if len(r.SourceLabels) > 0 {
				rule["source_labels"] = r.SourceLabels
			}
			relabel = append(relabel, rule)
		}
		scrapes = append(scrapes, map[string]any{
			"job_name": "podMonitor/" + monitor.Metadata.Name, "scheme": endpoint.Scheme, "honor_labels": endpoint.HonorLabels,
			"tls_config":    map[string]any{"insecure_skip_verify": true},
			"authorization": map[string]any{"credentials": token.Status.Token},
			"kubernetes_sd_configs": []any{map[string]any{
				"role": "pod", "kubeconfig_file": node.AdminConfig, "namespaces": map[string]any{"names": []string{operatorNamespace}},
			}},
			"relabel_configs": relabel,
		})
	}
	Expect(scrapes).To(HaveLen(2))
	return map[string]any{
		"global":     map[string]any{"scrape_interval": scrapeEvery, "scrape_timeout": scrapeEvery, "evaluation_interval": scrapeEvery},
		"rule_files": []string{"rules.yaml"}, "scrape_configs": scrapes,
	}
}

// prometheusRules are the chart's, of which each fires sooner.
func prometheusRules(ctx context.Context) map[string]any {
	GinkgoHelper()
	documents := rendered(ctx, "prometheusrule.yaml")
	Expect(documents).To(HaveLen(1))
	var rule struct {
		Spec struct {
			Groups []struct {
				Name  string           `json:"name"`
				Rules []map[string]any `json:"rules"`
			} `json:"groups"`
		} `json:"spec"`
	}
	Expect(json.Unmarshal(documents[0], &rule)).To(Succeed())
	for _, group := range rule.Spec.Groups {
		for _, r := range group.Rules {
			r["for"] = alertAfter
		}
	}
	return map[string]any{"groups": rule.Spec.Groups}
}

// rendered are the objects of a template of the chart, as JSON.
func rendered(ctx context.Context, template string) [][]byte {
	GinkgoHelper()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "helm"), "template", release, "config/helm", "--namespace", operatorNamespace,
		"--set", "metrics.enabled=true,metrics.podMonitor.enabled=true,metrics.prometheusRule.enabled=true",
		"--show-only", "templates/monitoring/"+template)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "HOME=/tmp")
	out, err := cmd.Output()
	Expect(err).NotTo(HaveOccurred())
	var documents [][]byte
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(out), 4096); ; {
		document := json.RawMessage{}
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return documents
		}
		Expect(err).NotTo(HaveOccurred())
		if len(document) > 0 && string(document) != "null" {
			documents = append(documents, document)
		}
	}
}

func writeYAML(path string, what map[string]any) {
	GinkgoHelper()
	raw, err := yaml.Marshal(what)
	Expect(err).NotTo(HaveOccurred())
	Expect(os.WriteFile(path, raw, 0o600)).To(Succeed())
}
