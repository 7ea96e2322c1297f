// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/ssa"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// TestAgent runs the two programs as they are shipped, with the rights that they have in a cluster, on a simulated
// driver: an A100 from whole to MIG to MPS and back.
func TestAgent(t *testing.T) {
	g := gomega.NewWithT(t)
	cluster := env.Start(t)
	g.Expect(cluster.Client.Apply(t.Context(), ac.GPUNode("n1"), client.FieldOwner("test"))).To(gomega.Succeed())
	driver := newDriver(t, sim.A100)
	config, err := cluster.ConfigAs(t.Context(), env.Identity{
		Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-agent", Pod: "agent-n1", Node: "n1",
	})
	g.Expect(err).NotTo(gomega.HaveOccurred())
	g.Expect(cluster.Apply(t.Context(), "config/agent/rbac.yaml", "config/agent/admission.yaml")).To(gomega.Succeed())
	mpsRoot, address := filepath.Join(t.TempDir(), "mps"), freeAddress(t)
	start(t, "mps-host", "--driver-root="+driver, "--mps-root="+mpsRoot)
	start(t, "--node-name=n1", "--driver-root="+driver, "--mps-root="+mpsRoot, "--pod-resources-socket=",
		"--cdi-root=", "--metrics-bind-address="+address, "--sampling-interval=5s",
		"--health-probe-bind-address=0", "--kubeconfig="+env.KubeconfigFile(t, config))

	g.Expect(cluster.Apply(t.Context(), "config/default/namespace.yaml", "config/rbac/role.yaml", "config/manager/rbac.yaml")).To(gomega.Succeed())
	controller, err := cluster.ClientAs(t.Context(), env.Identity{Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-controller"})
	g.Expect(err).NotTo(gomega.HaveOccurred())
	n := node{T: t, client: controller}
	g.Eventually(n.ready, "60s", "100ms").Should(gomega.Succeed())
	d := n.device()
	g.Expect(d.Product).To(gomega.HavePrefix("NVIDIA-A100-"))

	n.share(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled, Instances: []v1alpha1.InstanceCount{{Profile: "1g.5gb", Count: 7}}})
	g.Eventually(n.ready, "60s", "100ms").Should(gomega.Succeed())
	g.Expect(n.device().Instances).To(gomega.HaveLen(7))
	if os.Geteuid() == 0 { // others can make no device nodes
		nodes, err := filepath.Glob(filepath.Join(driver, "dev/nvidia-caps/nvidia-cap*"))
		g.Expect(err).NotTo(gomega.HaveOccurred())
		g.Expect(len(nodes)).To(gomega.BeNumerically(">=", 2*7), "one for each GPU instance and each compute instance")
	}

	mps := &v1alpha1.MPSDaemon{
		ResourceName: "nvidia.com/gpu", Owner: v1alpha1.MPSDaemonOwnerGPUSharing, ActiveThreadPercentage: 25, PinnedMemoryLimit: new(resource.MustParse("10000Mi")),
	}
	n.share(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled, MPS: mps})
	g.Eventually(n.ready, "60s", "100ms").Should(gomega.Succeed())
	g.Expect(n.device().Sharing.MPS).To(gomega.Equal(mps))
	g.Expect(filepath.Join(mpsRoot, "nvidia.com", "gpu", ".started")).To(gomega.BeAnExistingFile())

	expectUsage(t, cluster, config, "https://"+address)

	n.share(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled})
	g.Eventually(n.ready, "60s", "100ms").Should(gomega.Succeed())
	g.Expect(n.device().ComputeMode).To(gomega.Equal(v1alpha1.ComputeModeDefault))
	g.Expect(n.device().Sharing).To(gomega.Equal(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}))
}

// expectUsage reads what the agent serves about a GPU that is shared by MPS: with the right to, without, and with the
// agent's own token.
func expectUsage(t *testing.T, cluster *env.Cluster, agent *rest.Config, address string) {
	t.Helper()
	g := gomega.NewWithT(t)
	for _, o := range []client.Object{
		&rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: "reads-usage"},
			Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics", usage.Path}}},
		},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "reads-usage"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "reads-usage"},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "monitoring", Name: "reader"}},
		},
	} {
		g.Expect(cluster.Client.Create(t.Context(), o)).To(gomega.Succeed())
	}
	reader, err := cluster.ConfigAs(t.Context(), env.Identity{Namespace: "monitoring", ServiceAccount: "reader"})
	g.Expect(err).NotTo(gomega.HaveOccurred())
	for _, path := range []string{"/metrics", usage.Path, usage.Path + "?" + usage.HistoryQuery} {
		for token, status := range map[string]int{
			"": http.StatusUnauthorized, agent.BearerToken: http.StatusForbidden, reader.BearerToken: http.StatusOK,
		} {
			code, body := get(t, address+path, token)
			g.Expect(code).To(gomega.Equal(status), path)
			if status == http.StatusOK && !strings.HasSuffix(path, usage.HistoryQuery) {
				g.Expect(body).To(gomega.ContainSubstring("NVIDIA-A100-SXM4-40GB"), path)
			}
		}
	}
	g.Eventually(func() (h usage.History) {
		_, body := get(t, address+usage.Path+"?"+usage.HistoryQuery, reader.BearerToken)
		g.Expect(json.Unmarshal([]byte(body), &h)).To(gomega.Succeed())
		return h
	}, "60s", "100ms").Should(gomega.SatisfyAll(
		gomega.HaveField("Node", "n1"), gomega.HaveField("Interval", 5*time.Second), gomega.HaveField("Samples", gomega.BeNumerically(">", 0))))
	_, body := get(t, address+usage.Path, reader.BearerToken)
	var report usage.Report
	g.Expect(json.Unmarshal([]byte(body), &report)).To(gomega.Succeed())
	g.Expect(report.Units).To(gomega.HaveLen(1))
	g.Expect(report.Units[0].Strategy).To(gomega.Equal(v1alpha1.StrategyMPS))
	g.Expect(*report.Units[0].Limits.MemoryBytes).To(gomega.Equal(int64(10000 << 20)))
	_, body = get(t, address+"/metrics", reader.BearerToken)
	g.Expect(body).To(gomega.MatchRegexp(`gpusharing_agent_usage_complete\{node="n1"\} 1`))
	g.Expect(body).To(gomega.ContainSubstring("gpusharing_mps_server_limits_pinned_memory_bytes"))
}

// get reads a URL over TLS with the agent's own certificate.
func get(t *testing.T, url, token string) (status int, body string) {
	t.Helper()
	g := gomega.NewWithT(t)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	g.Expect(err).NotTo(gomega.HaveOccurred())
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	answer, err := c.Do(request)
	g.Expect(err).NotTo(gomega.HaveOccurred())
	defer answer.Body.Close()
	content, err := io.ReadAll(answer.Body)
	g.Expect(err).NotTo(gomega.HaveOccurred())
	return answer.StatusCode, string(content)
}

// freeAddress is an address at which nobody listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	return address
}

// start runs the program until the test ends.
func start(t *testing.T, args ...string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx, args) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("agent %v: %v", args, err)
		}
	})
}

// newDriver makes a driver root with simulated GPUs and returns its path.
func newDriver(t *testing.T, models ...sim.Model) string {
	t.Helper()
	cache, err := simdriver.CacheDir()
	if err != nil {
		t.Fatal(err)
	}
	programs, err := simdriver.Build(t.Context(), cache)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if os.Geteuid() == 0 { // with a dev of its own, as a driver container has it
		if err := os.Mkdir(filepath.Join(root, "dev"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := simdriver.New(root, programs, simdriver.Spec{Name: "n1", Models: models}); err != nil {
		t.Fatal(err)
	}
	return root
}

// node is the GPUNode n1.
type node struct {
	*testing.T

	client client.Client
}

func (n node) get() *v1alpha1.GPUNode {
	n.Helper()
	o := &v1alpha1.GPUNode{}
	if err := n.client.Get(n.Context(), client.ObjectKey{Name: "n1"}, o); err != nil {
		n.Fatal(err)
	}
	return o
}

func (n node) device() v1alpha1.DeviceStatus { return n.get().Status.Devices[0] }

// share asks for the only GPU to be shared like that.
func (n node) share(sharing v1alpha1.DeviceSharing) {
	n.Helper()
	devices := []v1alpha1.DeviceSpec{{UUID: n.device().UUID, Sharing: sharing}}
	spec, err := ssa.Configuration[ac.GPUNodeSpecApplyConfiguration](v1alpha1.GPUNodeSpec{Devices: devices})
	if err != nil {
		n.Fatal(err)
	}
	if err := n.client.Apply(n.Context(), ac.GPUNode("n1").WithSpec(spec), client.FieldOwner("test")); err != nil {
		n.Fatal(err)
	}
}

// ready reports why the desired state is not reached.
func (n node) ready() error {
	o := n.get()
	if condition.IsTrueAt(o.Status.Conditions, v1alpha1.ConditionApplied, o.Generation) {
		return nil
	}
	return fmt.Errorf("not ready at generation %d: %+v", o.Generation, o.Status.Conditions)
}
