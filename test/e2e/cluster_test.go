// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/node"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// The cluster that all specs share.
var (
	// root is this checkout, and bin the programs.
	root, bin string
	// archives are those of the images that pods run.
	archives []string
	machine  *node.Node
	kube     client.WithWatch
	gpus     *simdriver.Driver
	// stopBeside ends what runs beside the specs: what stands for the GPU Operator, and the healing of the kubelet.
	stopBeside = func() {}
	// apart are the processes of machines other than the node: the registry, and Prometheus.
	apart []int
	// lost is how often the kubelet lost NVIDIA's device plugin on nodes that are gone.
	lost int
)

var _ = BeforeSuite(func(ctx SpecContext) {
	ctrllog.SetLogger(logr.Discard())
	var err error
	root, err = env.Root()
	Expect(err).NotTo(HaveOccurred())
	bin = filepath.Join(root, "bin", "e2e")
	for _, i := range images(ctx) {
		archives = append(archives, write(i))
	}
	startRegistry(ctx, registryAddress)
	publish(ctx, root, "", operatorImages(ctx, bin))
	DeferCleanup(stopNode)
	build(ctx)
}, NodeTimeout(15*time.Minute))

// build makes a cluster of nothing: a node with two A100, NVIDIA's programs on it, and the operator as the README
// installs it.
func build(ctx context.Context) {
	GinkgoHelper()
	say := sinceNow()
	startNode(ctx)
	say("images imported")
	installCRDs()
	fit(ctx, sim.A100, sim.A100)
	installGPUOperator(ctx, clusterPolicy())
	Eventually(offered).WithContext(ctx).Should(HaveKeyWithValue("nvidia.com/gpu", int64(2)))
	say("NVIDIA's device plugin advertises")
	installOperator(ctx)
	say("operator installed")
}

// startNode starts a node without GPUs.
func startNode(ctx context.Context) {
	GinkgoHelper()
	started, err := node.Start(ctx, node.Options{
		Name: nodeName, Bin: bin, Pause: write(pauseImage()), PauseImage: pauseImage().Name,
		Apart: func() []int { return apart }, StatusEvery: statusEvery(), Log: GinkgoWriter,
	})
	Expect(err).NotTo(HaveOccurred())
	machine = started
	for _, archive := range archives {
		Expect(machine.Import(ctx, archive)).To(Succeed())
	}
	connect()
	restrictUsers(ctx)
}

// sinceNow prints what is done, and how long after now.
func sinceNow() (say func(what string)) {
	began := time.Now()
	return func(what string) {
		GinkgoWriter.Printf("   %s after %s\n", what, time.Since(began).Round(100*time.Millisecond))
	}
}

// broken says that a spec failed, and so that nobody knows what the node is like.
var broken bool

// onDRA says that the node has NVIDIA's DRA driver, and not its device plugin; onGPUCluster, that the GPU Operator runs
// the driver.
var onDRA, onGPUCluster bool

var _ = ReportAfterEach(func(spec SpecReport) {
	broken = broken || spec.Failed()
	if spec.Failed() && machine != nil {
		GinkgoWriter.Printf("What the kubelet said last of device plugins, which it lost %d times on this node:\n%s", machine.Lost(), machine.DevicePlugins(60))
		GinkgoWriter.Printf("What the controller said last:\n%s", controllerLog(60))
	}
})

// controllerLog are the last lines that the controller has logged on the node.
func controllerLog(lines int) string {
	files, _ := filepath.Glob("/var/log/pods/" + operatorNamespace + "_gpu-sharing-controller-*/*/*.log") // the pattern is not malformed
	var said []string
	for _, file := range files {
		raw, _ := os.ReadFile(file) // a pod that is gone says nothing
		said = append(said, strings.SplitAfter(string(raw), "\n")...)
	}
	return strings.Join(said[max(0, len(said)-lines):], "")
}

// rebuild makes the cluster anew, so that what a spec leaves when it fails is no other's failure.
func rebuild(ctx context.Context) {
	GinkgoHelper()
	GinkgoWriter.Println("   a spec before this one failed, or needed another stack: the node is built anew")
	wipe()
	build(ctx)
}

// wipe removes the node with all that runs on it.
func wipe() {
	GinkgoHelper()
	stopBeside()
	stopDriver()
	gpus, fitted = nil, nil
	lost += machine.Lost()
	Expect(machine.Wipe()).To(Succeed())
	broken, onDRA, onGPUCluster = false, false, false
}

// stopNode keeps the logs, if they are asked for.
func stopNode() {
	stopBeside()
	if machine == nil {
		return // it did not start, and says why
	}
	Expect(machine.Stop()).To(Succeed())
	if to := os.Getenv(logsVariable); to != "" {
		Expect(machine.CopyLogs(filepath.Join(to, "node"))).To(Succeed())
	}
}

func connect() {
	scheme := runtime.NewScheme()
	Expect(clientgoscheme.AddToScheme(scheme)).To(Succeed())
	Expect(v1alpha1.AddToScheme(scheme)).To(Succeed())
	var err error
	kube, err = client.NewWithWatch(machine.Config, client.Options{Scheme: scheme})
	Expect(err).NotTo(HaveOccurred())
}

// restrictUsers holds users' pods to the Pod Security Standard restricted.
func restrictUsers(ctx context.Context) {
	GinkgoHelper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: users}}
	patch := []byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`)
	Expect(kube.Patch(ctx, namespace, client.RawPatch(types.MergePatchType, patch))).To(Succeed())
}

func installCRDs() {
	_, err := envtest.InstallCRDs(machine.Config, envtest.CRDInstallOptions{Paths: []string{
		filepath.Join(root, "test", "env", "nvidia", "clusterpolicies.yaml"), filepath.Join(root, "test", "env", "nvidia", "gpuclusters.yaml"),
	}, ErrorIfPathMissing: true, MaxTime: time.Minute})
	Expect(err).NotTo(HaveOccurred())
}

// installGPUOperator installs Node Feature Discovery and what stands for the GPU Operator, in one namespace as the GPU
// Operator's chart does, with the ClusterPolicy or the GPUCluster, and waits for nothing.
func installGPUOperator(ctx context.Context, with *unstructured.Unstructured) {
	operator, err := gpuoperator.New(machine.Config, kube.Scheme(), GinkgoWriter)
	Expect(err).NotTo(HaveOccurred())
	Expect(operator.Install(ctx)).To(Succeed())
	installNFD(ctx, gpuoperator.Namespace)
	Expect(kube.Create(ctx, with)).To(Succeed())
	runBeside(operator.Run, machine.Heal)
}

// runBeside runs something beside the specs until stopBeside is called.
func runBeside(all ...func(context.Context)) {
	running, stop := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	for _, run := range all {
		ended.Go(func() { run(running) })
	}
	stopBeside = sync.OnceFunc(func() {
		stop()
		ended.Wait()
	})
}

// clusterPolicy is the ClusterPolicy as NVIDIA's Helm chart makes it, as far as it matters here.
func clusterPolicy() *unstructured.Unstructured {
	p := &unstructured.Unstructured{Object: map[string]any{
		"spec": map[string]any{
			"cdi":                map[string]any{"enabled": true},
			"daemonsets":         map[string]any{"updateStrategy": "RollingUpdate", "rollingUpdate": map[string]any{"maxUnavailable": "1"}},
			"devicePlugin":       map[string]any{"enabled": true, "config": map[string]any{"name": "", "default": ""}},
			"gfd":                map[string]any{"enabled": true},
			"dcgm":               map[string]any{"enabled": true}, // NVIDIA's chart leaves it off: the exporter has one inside
			"dcgmExporter":       map[string]any{"enabled": true},
			"nodeStatusExporter": map[string]any{"enabled": true}, // likewise off
			"mig":                map[string]any{"strategy": "single"},
			"migManager":         map[string]any{"enabled": true, "config": map[string]any{"default": "all-disabled"}},
		},
	}}
	p.SetGroupVersionKind(gpuoperator.PolicyKind())
	p.SetName(gpuoperator.PolicyName)
	return p
}

// allocatable is what of NVIDIA's the node's kubelet says can be allocated.
func allocatable(ctx context.Context) (map[string]int64, error) {
	n := &corev1.Node{}
	if err := kube.Get(ctx, client.ObjectKey{Name: nodeName}, n); err != nil {
		return nil, err
	}
	return advertised(n), nil
}

func advertised(n *corev1.Node) map[string]int64 {
	found := map[string]int64{}
	for name, quantity := range n.Status.Allocatable {
		if isGPU(name) {
			found[string(name)] = quantity.Value()
		}
	}
	return found
}

// offered is allocatable without the resources of which there is none: the kubelet lists a name for good.
func offered(ctx context.Context) (map[string]int64, error) {
	found, err := allocatable(ctx)
	maps.DeleteFunc(found, func(_ string, count int64) bool { return count == 0 })
	return found, err
}

// nvidiaDomain is that of NVIDIA's resources.
const nvidiaDomain = "nvidia.com/"

func isGPU(name corev1.ResourceName) bool {
	return len(name) > len(nvidiaDomain) && name[:len(nvidiaDomain)] == nvidiaDomain
}

// write assembles an image and returns its archive.
func write(i image.Image) string {
	archive := filepath.Join(os.TempDir(), filepath.Base(i.Name)+".tar")
	Expect(image.Write(i, archive)).To(Succeed())
	return archive
}
