// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

const (
	own    = "gpu-sharing-operator"
	nvidia = "gpu-operator"
	users  = "default"

	wait = 5 * time.Minute // everything else of make test may run beside
	// poll is how often the test looks. What it looks at stays; only the taints do not, and those are watched.
	poll = 250 * time.Millisecond
)

// site is a cluster with NVIDIA's GPU Operator and Karpenter.
type site struct {
	*WithT
	t       *testing.T
	cluster *env.Cluster
	client  client.Client // an administrator's
	dir     string
	// changing is open while no GPU may change its MIG mode.
	changing chan struct{}
	// toolkit is open while NVIDIA's container toolkit and validator are not done, without which no device plugin
	// starts. The agent needs the driver only.
	toolkit chan struct{}
	// driver is open while the agents find no driver.
	driver    chan struct{}
	requested time.Time // when the pod was created
	metrics   string    // URL of Karpenter's
	root      *os.Root  // of the machines, which have no files
	tainted   tainted
}

// tainted are the keys of all taints that a Node ever had.
type tainted struct {
	sync.Mutex
	keys map[string]bool
}

// newSite starts a cluster in which Karpenter makes nodes with an A100 for pending pods. The nodes start with these
// taints, a list in YAML.
func newSite(t *testing.T, startupTaints string, flags ...string) *site {
	t.Helper()
	module := moduleOf(t, "karpenter", "sigs.k8s.io/karpenter")
	s := newCluster(t, filepath.Join(module, "pkg", "apis", "crds"), filepath.Join(module, "kwok", "apis", "crds"))
	s.recordTaints()
	s.apply("{apiVersion: karpenter.kwok.sh/v1alpha1, kind: KWOKNodeClass, metadata: {name: default}, spec: {}}")
	s.apply(fmt.Sprintf(nodePool, startupTaints))
	s.startKarpenter(flags...)
	return s
}

// newCluster starts a cluster with NVIDIA's GPU Operator and the CRDs of these folders.
func newCluster(t *testing.T, crds ...string) *site {
	t.Helper()
	s := &site{WithT: NewWithT(t), t: t, dir: t.TempDir(), requested: time.Now(), changing: make(chan struct{}), driver: make(chan struct{}), toolkit: make(chan struct{}), tainted: tainted{keys: map[string]bool{}}}
	root, err := os.OpenRoot(s.dir)
	s.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	s.root = root
	s.cluster = env.Start(t, env.WithNVIDIA(), env.WithCRDs(crds...),
		env.WithFlag("advertise-address", "192.0.2.1")) // there is no route by which it could find one
	s.client = s.cluster.Client
	for _, name := range []string{own, nvidia} {
		s.Expect(s.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})).To(Succeed())
	}
	s.apply(clusterPolicy)
	operator := &nodesim.GPUOperator{Client: s.client, Namespace: nvidia, Clock: clock.RealClock{}, Tell: func(string, ...any) {}}
	s.background(func(ctx context.Context) { operator.Run(ctx, time.Second) })
	return s
}

// clusterPolicy has the tolerations that docs/install.md says, and that of the taint of --karpenter-readiness-taint.
const clusterPolicy = `
apiVersion: nvidia.com/v1
kind: ClusterPolicy
metadata: {name: cluster-policy}
spec:
  daemonsets:
    updateStrategy: RollingUpdate
    tolerations:
    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
    - {key: gpusharing.io/startup, operator: Exists}
    - {key: startup-taint.cluster-autoscaler.kubernetes.io/gpusharing, operator: Exists}
    - {key: readiness.k8s.io/gpusharing, operator: Exists}
  devicePlugin: {enabled: true}
  mig: {strategy: single}
`

// nodePool replaces no node by itself. Its limit ends what a test that fails starts.
const nodePool = `
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: gpu}
spec:
  disruption: {consolidateAfter: Never}
  limits: {nvidia.com/gpu: 12}
  template:
    spec:
      expireAfter: Never
      nodeClassRef: {group: karpenter.kwok.sh, kind: KWOKNodeClass, name: default}
      requirements: [{key: kubernetes.io/arch, operator: In, values: [amd64]}]
      startupTaints: %s
`

// instanceTypes is the only machine that Karpenter can start.
const instanceTypes = `[{"name": "gpu.one", "architecture": "amd64", "operatingSystems": ["linux"],
	"resources": {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "1"},
	"offerings": [{"Price": 1.5, "Available": true, "Requirements": [
		{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
		{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["zone-a"]}]}]}]`

// The paths of programs, which are built if they were not yet. That needs a network.
var karpenterProgram, kueueProgram = built("karpenter"), built("kueue")

func built(name string) func() (string, error) {
	return sync.OnceValues(func() (string, error) {
		root, err := env.Root()
		if err != nil {
			return "", err
		}
		build := exec.Command(filepath.Join(root, "hack", name, "build.sh"))
		build.Stderr = os.Stderr
		path, err := build.Output()
		return strings.TrimSpace(string(path)), err
	})
}

// moduleOf is the folder with the source of the module of a program, without which the test is skipped.
func moduleOf(t *testing.T, program, path string) string {
	t.Helper()
	if os.Getenv("GPUSHARING_PROGRAMS") == "" {
		t.Skip("run by make test and make autoscaling")
	}
	g := NewWithT(t)
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	download := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", path)
	download.Dir = filepath.Join(root, "hack", program)
	out, err := download.Output()
	g.Expect(err).NotTo(HaveOccurred(), string(out))
	var module struct{ Dir string }
	g.Expect(json.Unmarshal(out, &module)).To(Succeed())
	return module.Dir
}

// recordTaints looks at each state of each Node until the test ends.
func (s *site) recordTaints() {
	s.t.Helper()
	watch, err := s.cluster.Client.Watch(s.t.Context(), &corev1.NodeList{})
	s.Expect(err).NotTo(HaveOccurred())
	s.background(func(ctx context.Context) {
		defer watch.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case event, open := <-watch.ResultChan():
				if !open {
					if ctx.Err() == nil {
						s.t.Error("the watch of the Nodes ended")
					}
					return
				}
				if node, is := event.Object.(*corev1.Node); is {
					s.tainted.Lock()
					for _, taint := range node.Spec.Taints {
						s.tainted.keys[taint.Key] = true
					}
					s.tainted.Unlock()
				}
			}
		}
	})
}

// everTainted are the keys of the taints that a Node had at any time, besides those of Kubernetes and Karpenter.
func (s *site) everTainted() []string {
	s.tainted.Lock()
	defer s.tainted.Unlock()
	var keys []string
	for key := range s.tainted.keys {
		if !strings.HasPrefix(key, "node.kubernetes.io/") && !strings.HasPrefix(key, "karpenter.sh/") {
			keys = append(keys, key)
		}
	}
	return keys
}

func (s *site) startKarpenter(flags ...string) {
	s.t.Helper()
	program, err := karpenterProgram()
	s.Expect(err).NotTo(HaveOccurred())
	file := filepath.Join(s.dir, "instance-types.json")
	s.Expect(os.WriteFile(file, []byte(instanceTypes), 0o600)).To(Succeed())
	port := s.freePort()
	s.metrics = "http://127.0.0.1:" + port + "/metrics"
	s.run("karpenter", program, s.cluster.Config, append([]string{
		"--disable-leader-election=true", "--log-level=debug", "--instance-types-file-path=" + file,
		"--metrics-port=" + port, "--health-probe-port=" + s.freePort(), "--feature-gates=NodeOverlay=true",
	}, flags...)...)
	s.Eventually(func() error {
		connection, err := (&net.Dialer{}).DialContext(s.t.Context(), "tcp", "127.0.0.1:"+port)
		if err == nil {
			err = connection.Close()
		}
		return err
	}, wait, poll).Should(Succeed(), "Karpenter serves its metrics")
}

// startController starts the controller that ships, with the rights that it ships with.
func (s *site) startController(flags ...string) {
	s.t.Helper()
	s.Expect(s.cluster.Apply(s.t.Context(), "config/rbac/role.yaml", "config/manager/rbac.yaml", "config/manager/admission.yaml")).To(Succeed())
	controller := filepath.Join(os.Getenv("GPUSHARING_PROGRAMS"), "controller")
	_, err := os.Stat(controller) // go test keeps no result of another controller
	s.Expect(err).NotTo(HaveOccurred())
	config, err := s.cluster.ConfigAs(s.t.Context(), env.Identity{Namespace: own, ServiceAccount: "gpu-sharing-controller"})
	s.Expect(err).NotTo(HaveOccurred())
	s.run("controller", controller, config, append(flags, "--namespace="+own, "--health-probe-bind-address=0", "--leader-elect=false")...)
}

// run starts a program that ends with the test. Its log is shown if the test fails.
func (s *site) run(name, program string, as *rest.Config, args ...string) {
	s.t.Helper()
	kubeconfig, logFile := filepath.Join(s.dir, name+".kubeconfig"), filepath.Join(s.dir, name+".log")
	s.Expect(env.WriteKubeconfig(as, kubeconfig)).To(Succeed())
	log, err := os.Create(logFile)
	s.Expect(err).NotTo(HaveOccurred())
	command := exec.CommandContext(s.t.Context(), program, args...)
	command.Env = []string{"KUBECONFIG=" + kubeconfig, "HOME=" + s.dir, "PATH=" + os.Getenv("PATH")}
	command.Stdout, command.Stderr = log, log
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGTERM) }
	command.WaitDelay = 5 * time.Second
	s.Expect(command.Start()).To(Succeed(), program)
	s.t.Cleanup(func() {
		_ = command.Wait() // it was told to end
		_ = log.Close()
		if text, err := os.ReadFile(logFile); s.t.Failed() && err == nil {
			s.t.Logf("log of %s:\n%s", name, text[max(0, len(text)-20_000):])
		}
	})
}

func (s *site) freePort() string {
	s.t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(s.t.Context(), "tcp", "127.0.0.1:0")
	s.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = listener.Close() }()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	s.Expect(err).NotTo(HaveOccurred())
	return port
}

// background runs something until the test ends, and waits for its end.
func (s *site) background(run func(context.Context)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		run(s.t.Context())
	}()
	s.t.Cleanup(func() { <-done })
}

// apply applies an object, as kubectl does.
func (s *site) apply(object string) {
	s.t.Helper()
	s.Expect(s.tryApply(object)).To(Succeed())
}

func (s *site) tryApply(object string) error {
	o := &unstructured.Unstructured{}
	s.Expect(yaml.Unmarshal([]byte(object), &o.Object)).To(Succeed())
	return s.cluster.ApplyObject(s.t.Context(), o)
}

// pod creates a pod that asks for a resource.
func (s *site) pod(name, requests string, labels map[string]string) *corev1.Pod {
	s.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, Labels: labels},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "example.invalid/main",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(requests): resource.MustParse("1")}},
		}}},
	}
	s.Expect(s.client.Create(s.t.Context(), pod)).To(Succeed())
	return pod
}

// unschedulable says of a pod that the scheduler found no node for it.
func (s *site) unschedulable(pod *corev1.Pod) {
	s.t.Helper()
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.Now(),
	}}
	s.Expect(s.client.Status().Update(s.t.Context(), pod)).To(Succeed())
}

// nodeClaims are the machines that Karpenter has started, in the order of their creation.
func (s *site) nodeClaims() []string {
	s.t.Helper()
	return s.names("v1", "NodeClaim")
}

// names are those of all objects of a kind of Karpenter, in the order of their creation.
func (s *site) names(version, kind string) (names []string) {
	s.t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(schema.GroupVersionKind{Group: "karpenter.sh", Version: version, Kind: kind + "List"})
	s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
	slices.SortFunc(list.Items, func(a, b unstructured.Unstructured) int {
		return a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time)
	})
	for i := range list.Items {
		names = append(names, list.Items[i].GetName())
	}
	return names
}

// looks is how often Karpenter has planned nodes for pending pods since it started.
func (s *site) looks() int {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.metrics, nil)
	s.Expect(err).NotTo(HaveOccurred())
	response, err := http.DefaultClient.Do(request)
	s.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = response.Body.Close() }()
	metrics, err := io.ReadAll(response.Body)
	s.Expect(err).NotTo(HaveOccurred())
	for line := range strings.Lines(string(metrics)) {
		metric, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if metric == `karpenter_scheduler_scheduling_duration_seconds_count{controller="provisioner"}` {
			count, err := strconv.Atoi(value)
			s.Expect(err).NotTo(HaveOccurred())
			return count
		}
	}
	return 0
}

// initialized is the reason of the NodeClaim's condition Initialized: why Karpenter does not take the node for ready,
// or Initialized.
func (s *site) initialized(nodeClaim string) string {
	s.t.Helper()
	return s.condition(nodeClaim, "Initialized")
}

// condition is the reason of a condition of a NodeClaim; empty: it has none.
func (s *site) condition(nodeClaim, kind string) string {
	s.t.Helper()
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.GroupVersionKind{Group: "karpenter.sh", Version: "v1", Kind: "NodeClaim"})
	s.Expect(s.client.Get(s.t.Context(), types.NamespacedName{Name: nodeClaim}, o)).To(Succeed())
	conditions, _, err := unstructured.NestedSlice(o.Object, "status", "conditions")
	s.Expect(err).NotTo(HaveOccurred())
	for _, c := range conditions {
		if c, is := c.(map[string]any); is && c["type"] == kind {
			return fmt.Sprint(c["reason"])
		}
	}
	return ""
}
