// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/mps"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	mpsfake "github.com/gpusharing/gpu-sharing-operator/test/mps/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

const (
	own    = "gpu-sharing-operator"
	nvidia = "gpu-operator"
	wait   = "60s"
)

// TestController runs the program with no more rights than its manifests give it, in a cluster into which NVIDIA's GPU
// Operator comes later.
func TestController(t *testing.T) {
	p := start(t)
	hardware := p.machine("a100", sim.A100)
	p.holder(hardware, "a100")
	p.apply(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {}
  rollout: {drain: {mode: Evict}}
  sharing: {strategy: MIG, mig: {layouts: [{fill: 3g.20gb}]}}
`)
	p.Eventually(p.reason(v1alpha1.ConditionAccepted), wait).Should(Equal(v1alpha1.ReasonNoDevicePlugin))

	p.Expect(p.cluster.Apply(t.Context(), "test/env/nvidia/clusterpolicies.yaml", "test/env/nvidia/gpuclusters.yaml",
		"test/env/nvidia/nodefeatures.yaml")).To(Succeed())
	p.Eventually(func() error {
		return p.tryApply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}, spec: {devicePlugin: {enabled: true}, mig: {strategy: single}}}")
	}, wait).Should(Succeed())
	operator := &nodesim.GPUOperator{Client: p.cluster.Client, Namespace: nvidia, Clock: clock.RealClock{}, Tell: t.Logf}
	go operator.Run(t.Context(), time.Second)
	p.Eventually(p.holds, wait).Should(BeFalse(), "found without a restart, and the pod that holds the GPU evicted")
	p.Expect(hardware.SetHolders(uuid(hardware))).To(Succeed())
	p.Eventually(p.reason(v1alpha1.ConditionReady), wait).Should(Equal(v1alpha1.ReasonReady))

	p.Eventually(p.announced, wait).Should(ContainElements("Accepted", "GPUSchedulingDisabled", "Evicting", "DesiredStateChanged", "GPUSchedulingEnabled", "Ready", "ClusterPolicyConfigured"))
	p.may("delete", "", "pods")
	p.may("delete", v1alpha1.Group, "gpunodes")
	p.quiet()
	p.Expect(p.client.DeleteAllOf(t.Context(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	p.Eventually(func() string {
		configMaps := &corev1.ConfigMapList{}
		p.Expect(p.client.List(t.Context(), configMaps, client.InNamespace(nvidia))).To(Succeed())
		return fmt.Sprint(len(configMaps.Items))
	}, wait).Should(Equal("0"), "what was there before is there again, with the rights that the program has")
	p.comesAndGoes()
	p.servesAnotherVersion()
	p.stop()
	lease := &coordinationv1.Lease{}
	p.Expect(p.client.Get(t.Context(), types.NamespacedName{Namespace: own, Name: name}, lease)).To(Succeed())
	p.Expect(lease.Spec.HolderIdentity).To(HaveValue(BeEmpty()), "another replica need not wait")
}

// comesAndGoes: NVIDIA's definitions are removed and installed again under the running program.
func (p *program) comesAndGoes() {
	p.t.Helper()
	p.apply(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {}
  rollout: {paused: true}
  sharing: {strategy: Exclusive}
`)
	p.Eventually(p.reason(v1alpha1.ConditionAccepted), wait).Should(Equal(v1alpha1.ReasonPaused))
	definition := &unstructured.Unstructured{}
	definition.SetAPIVersion("apiextensions.k8s.io/v1")
	definition.SetKind("CustomResourceDefinition")
	definition.SetName("clusterpolicies.nvidia.com")
	p.Expect(p.client.Delete(p.t.Context(), definition)).To(Succeed())
	p.Eventually(func() bool {
		return apierrors.IsNotFound(p.client.Get(p.t.Context(), client.ObjectKeyFromObject(definition), definition))
	}, wait).Should(BeTrue(), "one that is applied before the old one is gone goes with it")
	p.Eventually(p.reason(v1alpha1.ConditionAccepted), wait).Should(Equal(v1alpha1.ReasonNoDevicePlugin))
	p.Eventually(func() error { return p.cluster.Apply(p.t.Context(), "test/env/nvidia/clusterpolicies.yaml") }, wait).Should(Succeed())
	p.Eventually(func() error {
		return p.tryApply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: another}, spec: {devicePlugin: {enabled: true}}}")
	}, wait).Should(Succeed())
	p.Eventually(p.reason(v1alpha1.ConditionAccepted), wait).Should(Equal(v1alpha1.ReasonPaused))
}

// servesAnotherVersion: a later GPU Operator and Node Feature Discovery serve their kinds in other versions under the
// running program, then in the former ones again.
func (p *program) servesAnotherVersion() {
	p.t.Helper()
	ctx := p.t.Context()
	for _, v := range []struct{ policies, clusters, features string }{{"v2", "v1beta1", "v1"}, {"v1", "v1alpha1", "v1alpha1"}} {
		p.Expect(p.cluster.Serve(ctx, "clusterpolicies.nvidia.com", v.policies)).To(Succeed())
		p.Expect(p.cluster.Serve(ctx, "nodefeatures.nfd.k8s-sigs.io", v.features)).To(Succeed())
		p.Expect(p.cluster.Serve(ctx, "gpuclusters.nvidia.com", v.clusters)).To(Succeed())
		dra := "{apiVersion: nvidia.com/" + v.clusters + ", kind: GPUCluster, metadata: {name: dra}}"
		p.Eventually(func() error { return p.tryApply(dra) }, wait).Should(Succeed())
		p.Eventually(p.reason(v1alpha1.ConditionAccepted), wait).Should(Equal(v1alpha1.ReasonDRAStackActive))
		o := &unstructured.Unstructured{}
		p.Expect(yaml.Unmarshal([]byte(dra), &o.Object)).To(Succeed())
		p.Expect(p.client.Delete(ctx, o)).To(Succeed())
		p.Eventually(p.reason(v1alpha1.ConditionAccepted), wait).Should(Equal(v1alpha1.ReasonPaused))
		for _, plugin := range []struct{ enabled, reason string }{{"false", v1alpha1.ReasonNoDevicePlugin}, {"true", v1alpha1.ReasonPaused}} {
			p.apply("{apiVersion: nvidia.com/" + v.policies + ", kind: ClusterPolicy, metadata: {name: another}, spec: {devicePlugin: {enabled: " + plugin.enabled + "}}}")
			p.Eventually(p.reason(v1alpha1.ConditionAccepted), wait).Should(Equal(plugin.reason))
		}
	}
}

// program is the running controller and the cluster around it.
type program struct {
	*WithT
	t       *testing.T
	cluster *env.Cluster
	client  client.Client
	metrics string
	token   string
	stop    func()
}

func start(t *testing.T) *program {
	t.Helper()
	p := &program{WithT: NewWithT(t), t: t, cluster: env.Start(t)}
	p.client = p.cluster.Client
	for _, namespace := range []string{own, nvidia} {
		p.Expect(p.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})).To(Succeed())
	}
	p.Expect(p.cluster.Apply(t.Context(), "config/rbac/role.yaml", "config/manager/rbac.yaml")).To(Succeed())
	config, err := p.cluster.ConfigAs(t.Context(), env.Identity{Namespace: own, ServiceAccount: name})
	p.Expect(err).NotTo(HaveOccurred())
	file := env.KubeconfigFile(t, config)
	p.metrics, p.token = freeAddress(t), p.reader()

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, []string{
			"--kubeconfig", file, "--namespace", own, "--health-probe-bind-address", "0", "--metrics-bind-address", p.metrics,
		})
		if err != nil {
			t.Errorf("the controller ended: %v", err)
		}
		ended <- err
	}()
	p.stop = func() {
		cancel()
		p.Eventually(ended, wait).Should(Receive(BeNil()))
	}
	return p
}

// reader is the token of a user who may read metrics.
func (p *program) reader() string {
	p.t.Helper()
	p.Expect(p.client.Create(p.t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics"}}},
	})).To(Succeed())
	p.Expect(p.client.Create(p.t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "reader"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: own, Name: "reader"}},
	})).To(Succeed())
	config, err := p.cluster.ConfigAs(p.t.Context(), env.Identity{Namespace: own, ServiceAccount: "reader"})
	p.Expect(err).NotTo(HaveOccurred())
	return config.BearerToken
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

// machine is a node with GPUs, kubelet, NVIDIA's programs and our agent.
func (p *program) machine(name string, models ...sim.Model) *sim.Hardware {
	p.t.Helper()
	hardware := sim.New(models...)
	node := nodesim.New(nodesim.Options{
		Name: name, Client: p.client, Inventory: hardware.Observe, Tell: p.t.Logf,
		StatusPeriod: time.Second, RestartDelay: time.Second, RetryDelay: time.Second,
	})
	root, err := os.OpenRoot(p.t.TempDir())
	p.Expect(err).NotTo(HaveOccurred())
	p.t.Cleanup(func() { _ = root.Close() })
	runner := hostfake.NewRunner().Add("nvidia-cuda-mps-control", mpsfake.NewDaemons().Program)
	a := agent.New(agent.Config{
		Node: name, BootID: "boot", Client: p.client, Hardware: hardware, Clock: clock.RealClock{},
		MPS:       mps.NewView(mps.NewControl(runner, root, mpsfake.NewClock(time.Now()))),
		Processes: hostfake.NewProcesses("boot"), Allocations: agent.NoAllocations{}, Resync: time.Minute,
	})
	p.Expect(node.Reconcile(p.t.Context())).To(Succeed())
	p.Expect(p.client.Create(p.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: own, Name: name + "-agent", Labels: map[string]string{"app.kubernetes.io/name": "gpu-sharing-agent"},
		},
		Spec: corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "agent", Image: "example.invalid/agent"}}},
	})).To(Succeed())
	go node.Run(p.t.Context(), 500*time.Millisecond)
	go p.report(a, name)
	return hardware
}

func uuid(hardware *sim.Hardware) (uuid string) {
	hardware.Update(func(n *sim.Node) { uuid = n.GPUs[0].UUID })
	return uuid
}

// holder is a pod that holds a GPU.
func (p *program) holder(hardware *sim.Hardware, node string) {
	p.t.Helper()
	p.Expect(p.client.Create(p.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "holder"},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	})).To(Succeed())
	p.Expect(hardware.SetHolders(uuid(hardware), gpu.Holder{
		Namespace: "default", Pod: "holder", Container: "main", Instance: gpu.WholeGPU,
	})).To(Succeed())
}

func (p *program) holds() bool {
	pod := &corev1.Pod{}
	err := p.client.Get(p.t.Context(), types.NamespacedName{Namespace: "default", Name: "holder"}, pod)
	p.Expect(client.IgnoreNotFound(err)).To(Succeed())
	return err == nil && pod.DeletionTimestamp == nil
}

// may checks a right that no step of the test needs.
func (p *program) may(verb, group, resource string) {
	p.t.Helper()
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               "system:serviceaccount:" + own + ":" + name,
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Group: group, Resource: resource},
	}}
	p.Expect(p.client.Create(p.t.Context(), review)).To(Succeed())
	p.Expect(review.Status.Allowed).To(BeTrue(), "%s %s", verb, resource)
}

// report is the agent's loop.
func (p *program) report(a *agent.Controller, name string) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-p.t.Context().Done():
			return
		case <-tick.C:
			gpuNode := &v1alpha1.GPUNode{}
			if err := p.client.Get(p.t.Context(), types.NamespacedName{Name: name}, gpuNode); err == nil {
				_, _ = a.Reconcile(p.t.Context(), gpuNode) // tried again
			}
		}
	}
}

func (p *program) apply(object string) {
	p.t.Helper()
	p.Expect(p.tryApply(object)).To(Succeed())
}

func (p *program) tryApply(object string) error {
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(object), &o.Object); err != nil {
		return err
	}
	return p.cluster.ApplyObject(p.t.Context(), o)
}

// reason of a condition of the policy.
func (p *program) reason(conditionType string) func() string {
	return func() string {
		policy := &v1alpha1.GPUSharingPolicy{}
		p.Expect(p.client.Get(p.t.Context(), types.NamespacedName{Name: "research"}, policy)).To(Succeed())
		c, _ := condition.Find(policy.Status.Conditions, conditionType)
		return c.Reason
	}
}

func (p *program) announced() []string {
	all := &eventsv1.EventList{}
	p.Expect(p.client.List(p.t.Context(), all)).To(Succeed())
	var reasons []string
	for i := range all.Items {
		if all.Items[i].ReportingController == name {
			reasons = append(reasons, all.Items[i].Reason)
		}
	}
	return reasons
}

// quiet checks that what happens all the time in a cluster wakes nobody.
func (p *program) quiet() {
	p.t.Helper()
	before, still := "", 0
	p.Eventually(func() bool {
		last := before
		before = p.reconciles()
		if before != last {
			still = 0
		}
		still++
		return before != "" && still > 4
	}, wait, "500ms").Should(BeTrue(), "after the last change nothing follows")

	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a100"}}
	for i := range 3 {
		heartbeat := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":"2026-01-01T00:00:0%dZ"}],`+
			`"images":[{"names":["image-%d"]}]},"metadata":{"annotations":{"others.example/x":"%d"}}}`, i, i, i)
		patch := client.RawPatch(types.MergePatchType, []byte(heartbeat))
		p.Expect(p.client.Patch(p.t.Context(), node, patch)).To(Succeed())
		p.Expect(p.client.Status().Patch(p.t.Context(), node, patch)).To(Succeed())
		p.Expect(p.client.Create(p.t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("bystander-%d", i)},
			Spec:       corev1.PodSpec{NodeName: "a100", Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
		})).To(Succeed())
	}
	p.Consistently(p.reconciles, "2s", "500ms").Should(Equal(before))
}

// reconciles counts those of the rollout controller so far, from the metrics.
func (p *program) reconciles() string {
	p.t.Helper()
	status, _ := p.scrape("")
	p.Expect(status).To(Equal(http.StatusUnauthorized))
	status, body := p.scrape(p.token)
	p.Expect(status).To(Equal(http.StatusOK))
	lines := bufio.NewScanner(strings.NewReader(body))
	for lines.Scan() {
		if count, found := strings.CutPrefix(lines.Text(), `controller_runtime_reconcile_time_seconds_count{controller="rollout"} `); found {
			return count
		}
	}
	return ""
}

func (p *program) scrape(token string) (status int, body string) {
	p.t.Helper()
	request, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "https://"+p.metrics+"/metrics", nil)
	p.Expect(err).NotTo(HaveOccurred())
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	insecure := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	answer, err := insecure.Do(request)
	p.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = answer.Body.Close() }()
	data, err := io.ReadAll(answer.Body)
	p.Expect(err).NotTo(HaveOccurred())
	return answer.StatusCode, string(data)
}

func TestFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	for name, tc := range map[string]struct {
		args []string
		env  string // FEATURE_GATES
		want string // what is wrong; nothing if empty
	}{
		"the namespace is enough":              {args: []string{"--namespace=own"}},
		"no namespace":                         {want: "--namespace, or the environment variable POD_NAMESPACE, must name the controller's namespace"},
		"an argument":                          {args: []string{"--namespace=own", "serve"}, want: `unknown argument "serve"; see --help`},
		"a ConfigMap without its namespace":    {args: []string{"--namespace=own", "--device-plugin-configmap=x"}, want: "--device-plugin-configmap needs --device-plugin-namespace"},
		"a selector that is none":              {args: []string{"--namespace=own", "--node-selector=a b"}, want: `--node-selector "a b": unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt`},
		"a selector that selects every node":   {args: []string{"--namespace=own", "--node-selector="}, want: "--node-selector must not be empty: it says which nodes have GPUs"},
		"help is no mistake":                   {args: []string{"--help"}, want: flag.ErrHelp.Error()},
		"a flag that there is none of":         {args: []string{"--nonsense"}, want: "flag provided but not defined: -nonsense"},
		"the namespace of the GPU Operator":    {args: []string{"--namespace=own", "--device-plugin-namespace=nvidia"}},
		"a stand-alone plugin and its keys":    {args: []string{"--namespace=own", "--device-plugin-namespace=n", "--device-plugin-configmap=c"}},
		"several labels for the nodes' GPUs":   {args: []string{"--namespace=own", "--node-selector=a=b,c in (d,e)"}},
		"metrics, probes and leader election":  {args: []string{"--namespace=own", "--metrics-bind-address=:1", "--health-probe-bind-address=0", "--leader-elect=false"}},
		"a feature gate":                       {args: []string{"--namespace=own", "--feature-gates=OnDemandMIG=true"}},
		"a feature gate that there is none of": {args: []string{"--namespace=own", "--feature-gates=OnDemand=true"}, want: `invalid value "OnDemand=true" for flag -feature-gates: no feature gate is called "OnDemand"; there is MemoryLimits, OnDemandMIG`},
		"a feature gate without a value":       {args: []string{"--namespace=own", "--feature-gates=OnDemandMIG"}, want: `invalid value "OnDemandMIG" for flag -feature-gates: feature gate OnDemandMIG must be true or false, not ""`},
		"a feature gate by the environment":    {args: []string{"--namespace=own"}, env: "OnDemandMIG=true,MemoryLimits=true"},
		"one by the environment that is none":  {args: []string{"--namespace=own"}, env: "OnDemand=true", want: `environment variable FEATURE_GATES: no feature gate is called "OnDemand"; there is MemoryLimits, OnDemandMIG`},
		"the level of detail of what it tells": {args: []string{"--namespace=own", "--zap-log-level=debug"}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			t.Setenv("FEATURE_GATES", tc.env)
			_, err := parseFlags(tc.args)
			if tc.want == "" {
				g.Expect(err).NotTo(HaveOccurred())
			} else {
				g.Expect(err).To(MatchError(tc.want))
			}
		})
	}
}
