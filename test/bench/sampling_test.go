// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"google.golang.org/grpc"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	ac "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

const (
	// samplingEnv=1 runs the measurement, as root: it makes a process and a cgroup for each container.
	samplingEnv = "SAMPLING_BENCH"

	containersOfGPU = 48
	scrapes         = 60
	scrapeInterval  = 15 * time.Second // Prometheus' own default is a minute; the chart's is 30 s
)

// TestSampling measures the shipped agent while Prometheus scrapes it: 8 GPUs, each of which 48 containers share, and 8
// GPUs with 7 MIG instances each. Each container is a process in a cgroup as the kubelet makes it.
func TestSampling(t *testing.T) {
	if os.Getenv(samplingEnv) == "" {
		t.Skip("set " + samplingEnv + "=1, or make bench")
	}
	t.Run("replicas", func(t *testing.T) { newSampled(t, sim.A100, replicas).measure("8 GPUs × 48 containers") })
	t.Run("instances", func(t *testing.T) { newSampled(t, sim.H100, instances).measure("8 GPUs × 7 instances × 1 container") })
}

// measure prints what scrapes cost.
func (s *sampled) measure(of string) {
	s.t.Helper()
	s.scrape() // the first loads what the others share
	before, began, calls, writes := s.processorTime(), time.Now(), s.calls(), s.writes()
	for range scrapes {
		s.scrape()
	}
	used, took := s.processorTime()-before, time.Since(began)
	each := used / scrapes
	table := bufio.NewWriter(os.Stdout)
	row := func(what, is, aim string) { _, _ = fmt.Fprintf(table, "| %s | %s | %s |\n", what, is, aim) }
	row(of+", each scrape", "", "aim")
	row("---", "---", "---")
	row("agent's CPU", each.Round(10*time.Microsecond).String(), "")
	row("… at one scrape each 15 s", fmt.Sprintf("%.2f %% of a core", 100*each.Seconds()/scrapeInterval.Seconds()), "≤ 1 %")
	row("time until the answer is read", (took / scrapes).Round(time.Millisecond).String(), "")
	row("calls of NVML", strconv.FormatInt((s.calls()-calls)/scrapes, 10), "")
	row("agent's resident memory", fmt.Sprintf("%d MiB", s.memory("VmRSS")>>20), "≤ 64 MiB")
	program, driver := s.mapped("/agent"), s.mapped("/libnvidia-ml.so")
	row("… of it pages of its program, a file", fmt.Sprintf("%d MiB", program>>20), "")
	row("… of it pages of the simulated driver, a file", fmt.Sprintf("%d MiB", driver>>20), "")
	row("… of it what Go holds for the agent", fmt.Sprintf("%d MiB", s.held()>>20), "")
	row("writes to the API, all scrapes", strconv.FormatInt(s.writes()-writes, 10), "0")
	s.Expect(table.Flush()).To(Succeed())
	s.Expect(s.writes()-writes).To(BeZero(), "a sample is written nowhere")
}

// sampled is a node whose agent is scraped.
type sampled struct {
	*WithT

	t       *testing.T
	host    string // the root of the node's file system
	cluster *env.Cluster
	driver  *simdriver.Driver
	spots   []spot
	agent   *exec.Cmd
	url     string
	token   string
}

// spot is what one container has.
type spot struct {
	uuid     string // of the GPU
	instance int
	device   string // as the kubelet names it
}

// replicas are those of GPUs that many containers share.
func replicas(node *sim.Node) (spots []spot, err error) {
	for i := range node.GPUs {
		for c := range containersOfGPU {
			spots = append(spots, spot{node.GPUs[i].UUID, gpu.WholeGPU, fmt.Sprintf("%s::%d", node.GPUs[i].UUID, c)})
		}
	}
	return spots, nil
}

// instances partitions each GPU into the smallest MIG instances.
func instances(node *sim.Node) (spots []spot, err error) {
	for i := range node.GPUs {
		uuid := node.GPUs[i].UUID
		if _, err := node.SetMIG(uuid, true, 0); err != nil {
			return nil, err
		}
		for start := range node.GPUs[i].Spec().ComputeSlices {
			const all = 1 // slices of the instance
			if err := node.CreatePartial(uuid, "1g.10gb", gpu.Placement{Start: start, Size: 1}, all); err != nil {
				return nil, err
			}
		}
		for _, instance := range node.GPUs[i].Instances {
			spots = append(spots, spot{uuid, instance.ID, instance.Compute[0].UUID})
		}
	}
	return spots, nil
}

func newSampled(t *testing.T, model sim.Model, divide func(*sim.Node) ([]spot, error)) *sampled {
	t.Helper()
	s := &sampled{WithT: NewWithT(t), t: t, host: t.TempDir(), cluster: env.Start(t)}
	cache, err := simdriver.CacheDir()
	s.Expect(err).NotTo(HaveOccurred())
	programs, err := simdriver.Build(t.Context(), cache)
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(os.MkdirAll(filepath.Join(s.host, "driver", "dev"), 0o755)).To(Succeed()) // of its own, as a driver container has it
	s.driver, err = simdriver.New(filepath.Join(s.host, "driver"), programs, simdriver.Times(nodeName, model, 8))
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.driver.Update(func(state *simdriver.State) error {
		s.spots, err = divide(&state.Node)
		return err
	})).To(Succeed())
	s.fill()
	s.startAgent()
	return s
}

// fill puts the containers onto the GPUs.
func (s *sampled) fill() {
	s.t.Helper()
	logs := filepath.Join(s.host, "var", "log", "containers")
	s.Expect(os.MkdirAll(logs, 0o755)).To(Succeed())
	top := s.cgroups()
	kubelet := &podResources{}
	pids := make([]int, len(s.spots))
	for number, spot := range s.spots {
		name, id := fmt.Sprintf("pod-%d", number), fmt.Sprintf("%064x", number)
		group := filepath.Join(top, "kubepods", fmt.Sprintf("pod%08x-0000-0000-0000-000000000000", number), id)
		pids[number] = s.process(group)
		s.Expect(os.WriteFile(filepath.Join(logs, name+"_users_main-"+id+".log"), nil, 0o600)).To(Succeed())
		kubelet.add(name, spot.device)
	}
	kubelet.serve(s.t, filepath.Join(s.host, "kubelet.sock"))
	s.Expect(s.driver.Update(func(state *simdriver.State) error {
		for number, spot := range s.spots {
			use := gpu.ProcessUse{
				PID: pids[number], Instance: spot.instance, MemoryBytes: new(int64(512 << 20)), Utilization: &gpu.Utilization{Compute: 0.02, Memory: 0.01},
			}
			if err := state.Node.AddProcess(spot.uuid, gpu.Process{PID: use.PID, Instance: use.Instance}); err != nil {
				return err
			}
			if err := state.Node.SetUse(spot.uuid, use); err != nil {
				return err
			}
		}
		return nil
	})).To(Succeed())
}

// cgroups is a folder below which cgroups can be made, and goes with the test.
func (s *sampled) cgroups() string {
	s.t.Helper()
	mounted := "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(mounted, "cgroup.controllers")); err != nil {
		mounted = filepath.Join(mounted, "pids") // of version 1
	}
	top := filepath.Join(mounted, fmt.Sprintf("gpu-sharing-bench-%d", os.Getpid()))
	s.t.Cleanup(func() {
		for pattern := top + "/*/*/*"; pattern != filepath.Dir(top); pattern = filepath.Dir(pattern) {
			groups, _ := filepath.Glob(pattern) // the pattern is not malformed
			for _, group := range groups {
				if info, err := os.Stat(group); err == nil && info.IsDir() {
					s.Eventually(func() error { return os.Remove(group) }, "10s", "10ms").Should(Succeed())
				}
			}
		}
	})
	return top
}

// process starts a process in a cgroup.
func (s *sampled) process(group string) int {
	s.t.Helper()
	s.Expect(os.MkdirAll(group, 0o755)).To(Succeed(), "this measurement needs root")
	cmd := exec.Command("sleep", "infinity")
	s.Expect(cmd.Start()).To(Succeed())
	s.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	s.Expect(os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)).To(Succeed())
	return cmd.Process.Pid
}

// startAgent builds the agent and starts it with the rights that it has in a cluster, and waits until it has reported.
func (s *sampled) startAgent() {
	s.t.Helper()
	ctx := s.t.Context()
	program := filepath.Join(s.t.TempDir(), "agent")
	out, err := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags", "grpcnotrace", "-ldflags", "-s -w", "-o", program, "../../cmd/agent").CombinedOutput()
	s.Expect(err).NotTo(HaveOccurred(), string(out))
	s.Expect(s.cluster.Client.Apply(ctx, ac.GPUNode(nodeName), client.FieldOwner("test"))).To(Succeed())
	config, err := s.cluster.ConfigAs(ctx, env.Identity{
		Namespace: "gpu-sharing-operator", ServiceAccount: "gpu-sharing-agent", Pod: "agent", Node: nodeName,
	})
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.cluster.Apply(ctx, "config/agent/rbac.yaml", "config/agent/admission.yaml")).To(Succeed())
	file := filepath.Join(s.t.TempDir(), "kubeconfig")
	s.Expect(env.WriteKubeconfig(config, file)).To(Succeed())
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	s.Expect(err).NotTo(HaveOccurred())
	address := listener.Addr().String()
	s.Expect(listener.Close()).To(Succeed())
	var log bytes.Buffer
	s.agent = exec.Command(program, "--node-name="+nodeName, "--host-root="+s.host, "--driver-root=/driver",
		"--mps-root="+filepath.Join(s.host, "mps"), "--pod-resources-socket="+filepath.Join(s.host, "kubelet.sock"), "--cdi-root=",
		"--health-probe-bind-address=0", "--metrics-bind-address="+address, "--kubeconfig="+file)
	s.agent.Env = append(os.Environ(), simdriver.CountEnv+"="+s.countFile())
	s.agent.Stdout, s.agent.Stderr = &log, &log
	s.Expect(s.agent.Start()).To(Succeed())
	s.t.Cleanup(func() {
		_ = s.agent.Process.Signal(syscall.SIGTERM)
		_ = s.agent.Wait() // how it ended is not what is measured
		if s.t.Failed() {
			s.t.Log(log.String())
		}
	})
	s.url, s.token = "https://"+address+"/metrics", s.reader()
	series := "gpusharing_container_gpu_memory_used_bytes{"
	s.Eventually(func() int {
		body, _ := s.get()
		return strings.Count(body, "\n"+series)
	}, "2m", "1s").Should(Equal(len(s.spots)), "all containers are seen")
	s.Expect(s.scrape()).To(ContainSubstring(fmt.Sprintf(`namespace="users",node="bench",pod="pod-%d"`, len(s.spots)-1)))
}

// reader is the token of an account that may read metrics.
func (s *sampled) reader() string {
	s.t.Helper()
	for _, o := range []client.Object{
		&rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: "reads-metrics"},
			Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics"}}},
		},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "reads-metrics"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "reads-metrics"},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "monitoring", Name: "reader"}},
		},
	} {
		s.Expect(s.cluster.Client.Create(s.t.Context(), o)).To(Succeed())
	}
	config, err := s.cluster.ConfigAs(s.t.Context(), env.Identity{Namespace: "monitoring", ServiceAccount: "reader"})
	s.Expect(err).NotTo(HaveOccurred())
	return config.BearerToken
}

func (s *sampled) get() (string, error) {
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url, nil)
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer "+s.token)
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	answer, err := c.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return string(body), err
}

// scrape reads the metrics once, all of them.
func (s *sampled) scrape() string {
	s.t.Helper()
	body, err := s.get()
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(body).To(ContainSubstring(`gpusharing_agent_usage_complete{node="bench"} 1`))
	return body
}

func (s *sampled) countFile() string { return filepath.Join(s.host, "calls") }

// calls is how often the agent has called the driver.
func (s *sampled) calls() int64 {
	s.t.Helper()
	raw, err := os.ReadFile(s.countFile())
	s.Expect(err).NotTo(HaveOccurred())
	n, err := strconv.ParseInt(string(raw), 10, 64)
	s.Expect(err).NotTo(HaveOccurred())
	return n
}

// processorTime is what the agent has used.
func (s *sampled) processorTime() time.Duration {
	s.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.agent.Process.Pid))
	s.Expect(err).NotTo(HaveOccurred())
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	var ticks int64
	for _, field := range fields[11:13] { // utime and stime, which proc(5) counts as 14 and 15
		n, err := strconv.ParseInt(field, 10, 64)
		s.Expect(err).NotTo(HaveOccurred())
		ticks += n
	}
	return time.Duration(ticks) * time.Second / 100
}

// mapped is how much of a file, which the agent has mapped, is resident.
func (s *sampled) mapped(file string) (sum int64) {
	s.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", s.agent.Process.Pid))
	s.Expect(err).NotTo(HaveOccurred())
	of := false
	for line := range strings.Lines(string(raw)) {
		fields := strings.Fields(line)
		switch {
		case !strings.HasSuffix(fields[0], ":"): // a mapping: address, rights, offset, device, inode and perhaps path
			of = strings.Contains(fields[len(fields)-1], file)
		case of && fields[0] == "Rss:":
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			s.Expect(err).NotTo(HaveOccurred())
			sum += kib << 10
		}
	}
	return sum
}

// held is what the agent's Go runtime has from the system and has not given back. The simulated driver, a Go library,
// has a runtime of its own.
func (s *sampled) held() int64 {
	s.t.Helper()
	value := func(name string) float64 {
		found := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(s.scrape())
		s.Expect(found).NotTo(BeNil())
		n, err := strconv.ParseFloat(found[1], 64)
		s.Expect(err).NotTo(HaveOccurred())
		return n
	}
	return int64(value("go_memstats_sys_bytes") - value("go_memstats_heap_released_bytes"))
}

func (s *sampled) memory(field string) int64 {
	s.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.agent.Process.Pid))
	s.Expect(err).NotTo(HaveOccurred())
	found := regexp.MustCompile(field + `:\s+(\d+) kB`).FindSubmatch(raw)
	s.Expect(found).NotTo(BeNil())
	n, err := strconv.ParseInt(string(found[1]), 10, 64)
	s.Expect(err).NotTo(HaveOccurred())
	return n << 10
}

// writes is how often the API server was asked to write something, by others than itself, and not counting questions
// (reviews).
func (s *sampled) writes() (sum int64) {
	s.t.Helper()
	clients, err := kubernetes.NewForConfig(s.cluster.Config)
	s.Expect(err).NotTo(HaveOccurred())
	raw, err := clients.RESTClient().Get().AbsPath("/metrics").DoRaw(s.t.Context())
	s.Expect(err).NotTo(HaveOccurred())
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(raw))
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(families).To(HaveKey("apiserver_request_total"))
	for _, m := range families["apiserver_request_total"].GetMetric() {
		labels := map[string]string{}
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		reads := slices.Contains([]string{"GET", "LIST", "WATCH", "CONNECT"}, labels["verb"])
		asks := slices.Contains([]string{"tokenreviews", "subjectaccessreviews", "leases"}, labels["resource"])
		if !reads && !asks {
			sum += int64(m.GetCounter().GetValue())
		}
	}
	return sum
}

// podResources is the kubelet's API, which tells the devices of containers.
type podResources struct {
	podresourcesv1.UnimplementedPodResourcesListerServer

	pods    []*podresourcesv1.PodResources
	devices []string
}

func (p *podResources) add(pod, device string) {
	p.devices = append(p.devices, device)
	p.pods = append(p.pods, &podresourcesv1.PodResources{Name: pod, Namespace: "users", Containers: []*podresourcesv1.ContainerResources{{
		Name: "main", Devices: []*podresourcesv1.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{device}}},
	}}})
}

func (p *podResources) serve(t *testing.T, socket string) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	server := grpc.NewServer()
	podresourcesv1.RegisterPodResourcesListerServer(server, p)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
}

// List implements the API.
func (p *podResources) List(context.Context, *podresourcesv1.ListPodResourcesRequest) (*podresourcesv1.ListPodResourcesResponse, error) {
	return &podresourcesv1.ListPodResourcesResponse{PodResources: p.pods}, nil
}

// GetAllocatableResources implements the API.
func (p *podResources) GetAllocatableResources(
	context.Context, *podresourcesv1.AllocatableResourcesRequest,
) (*podresourcesv1.AllocatableResourcesResponse, error) {
	return &podresourcesv1.AllocatableResourcesResponse{Devices: []*podresourcesv1.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: p.devices}}}, nil
}
