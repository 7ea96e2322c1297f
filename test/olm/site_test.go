// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
	"github.com/gpusharing/gpu-sharing-operator/test/olm"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

const (
	own    = "gpu-sharing-operator" // namespace, package and name of what OLM is told
	nvidia = "gpu-operator"

	programsVariable = "GPUSHARING_OLM" // the folder of hack/olm/build.sh

	wait   = 5 * time.Minute // most is there in seconds, but not on a machine that is busy
	poll   = 500 * time.Millisecond
	rarely = 3 * time.Second // for what costs more
)

// TestMain silences controller-runtime, and gives the tests a network of their own.
func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	if os.Getenv(programsVariable) != "" {
		code, done, err := env.InNetworkOfItsOwn("gpu-sharing.olm.svc") // the Service of the CatalogSource
		if err != nil {
			fmt.Fprintln(os.Stderr, "making a network of its own:", err)
			os.Exit(1)
		}
		if done {
			os.Exit(code)
		}
	}
	os.Exit(m.Run())
}

// site is a cluster with NVIDIA's GPU Operator, two nodes with GPUs, and an OLM.
type site struct {
	*WithT
	t          *testing.T
	cluster    *env.Cluster
	client     client.WithWatch // an administrator's
	bin        string           // programs
	dir        string
	kubeconfig string                         // an administrator's
	registry   string                         // with its folder
	version    string                         // that was published last
	released   string                         // what release wrote last: the bundle and the catalog
	bundles    map[string]string              // the files of each bundle that was pushed, by its image
	catalogs   map[string]string              // and those of each catalog
	serving    map[types.UID]*nodesim.Process // a catalog, by its pod
	programs   map[string]*program            // OLM's
	root       *os.Root
}

// newSite starts a cluster with these CRDs of OLM, and publishes the operator as a version, or the previous one as its
// own.
func newSite(t *testing.T, version string, crds ...string) (s *site) {
	t.Helper()
	bin := os.Getenv(programsVariable)
	if bin == "" {
		t.Skip("run by make olm-test")
	}
	s = &site{
		WithT: NewWithT(t), t: t, bin: bin, dir: t.TempDir(), bundles: map[string]string{}, catalogs: map[string]string{}, serving: map[types.UID]*nodesim.Process{},
		programs: map[string]*program{},
	}
	t.Cleanup(func() {
		if t.Failed() {
			s.showLogs()
		}
	})
	root, err := os.OpenRoot(s.dir)
	s.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = root.Close() })
	s.root = root
	options := []env.Option{
		env.WithNVIDIA(), env.WithFlag("advertise-address", "192.0.2.1"),
		env.WithFlag("enable-admission-plugins", "OwnerReferencesPermissionEnforcement"),
	}
	folders, err := olm.CRDs(bin, crds...)
	s.Expect(err).NotTo(HaveOccurred())
	for _, folder := range folders {
		options = append(options, env.WithCRDs(folder))
	}
	s.cluster = env.Start(t, options...)
	s.client = s.cluster.Client
	s.kubeconfig = filepath.Join(s.dir, "kubeconfig")
	s.Expect(env.WriteKubeconfig(s.cluster.Config, s.kubeconfig)).To(Succeed())
	s.removeOwnCRDs()
	s.startControllerManager()
	s.startNVIDIA()
	s.startNodes()
	s.startRegistry()
	if version == previous.Version {
		s.publishPrevious()
	} else {
		s.publish(version)
	}
	return s
}

// removeOwnCRDs removes the operator's kinds, which every cluster of the tests has.
func (s *site) removeOwnCRDs() {
	s.t.Helper()
	for _, name := range []string{"gpunodes.gpusharing.io", "gpusharingpolicies.gpusharing.io"} {
		crd := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", name)
		s.Expect(s.client.Delete(s.t.Context(), crd)).To(Succeed())
		s.Eventually(s.exists, wait, poll).WithArguments(crd).Should(BeFalse())
	}
}

// startControllerManager starts those controllers of Kubernetes that the simulated nodes do not play, each with an
// account of its own, as in a cluster.
func (s *site) startControllerManager() {
	s.t.Helper()
	assets, err := env.Assets(s.t.Context())
	s.Expect(err).NotTo(HaveOccurred())
	s.start("kube-controller-manager", filepath.Join(assets, "kube-controller-manager"), s.cluster.Config,
		"--kubeconfig="+s.kubeconfig, "--leader-elect=false", "--secure-port=0", "--use-service-account-credentials=true",
		"--controllers=garbage-collector-controller,namespace-controller,serviceaccount-controller,clusterrole-aggregation-controller,"+
			"deployment-controller,replicaset-controller,job-controller,resourcequota-controller")
}

func (s *site) startNVIDIA() {
	s.t.Helper()
	s.Expect(s.client.Create(s.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: nvidia}})).To(Succeed())
	s.Expect(s.cluster.Apply(s.t.Context(), "test/demo/cluster-policy.yaml")).To(Succeed())
	operator := &nodesim.GPUOperator{Client: s.client, Namespace: nvidia, Clock: clock.RealClock{}, Tell: func(string, ...any) {}}
	s.background(func(ctx context.Context) { operator.Run(ctx, poll) })
	s.background(func(ctx context.Context) {
		s.each(ctx, time.Second, func() error { return nodesim.ReportDaemonSets(ctx, s.client) })
	})
}

func (s *site) startRegistry() {
	s.t.Helper()
	address := s.freeAddress()
	s.start("registry", filepath.Join(s.bin, "registry"), s.cluster.Config, address, filepath.Join(s.dir, "registry"))
	s.registry = address + "/gpu-sharing"
	s.Eventually(func() error {
		answer, err := http.Get("http://" + address + "/v2/")
		if err != nil {
			return err
		}
		return answer.Body.Close()
	}, wait, poll).Should(Succeed())
}

// publish publishes the operator of this checkout as a version, as make release does, with images that hold next to
// nothing: no kubelet pulls them. A description in its CRDs names the version, since those of two releases differ.
func (s *site) publish(version string) {
	s.t.Helper()
	root, err := env.Root()
	s.Expect(err).NotTo(HaveOccurred())
	var archives []string
	for _, name := range []string{"gpu-sharing-controller", "gpu-sharing-agent"} {
		archive := filepath.Join(s.dir, name+".tar")
		archives = append(archives, name+"="+archive)
		s.Expect(image.Write(image.Image{
			Name: "example.com/" + name + ":built", Files: map[string]string{"/license": filepath.Join(root, "LICENSE")}, Entrypoint: []string{"/" + name},
		}, archive)).To(Succeed())
	}
	sources := s.folder("sources-" + version)
	s.Expect(os.CopyFS(filepath.Join(sources, "config"), os.DirFS(filepath.Join(root, "config")))).To(Succeed())
	for _, folder := range []string{"crd", "helm/files/crd"} {
		file := filepath.Join(sources, "config", folder, "gpusharing.io_gpunodes.yaml")
		data, err := os.ReadFile(file)
		s.Expect(err).NotTo(HaveOccurred())
		changed := strings.Replace(string(data), "description: devices are the GPUs of the node.", "description: devices are the GPUs of the node, since "+version, 1)
		s.Expect(changed).NotTo(Equal(string(data)))
		s.Expect(os.WriteFile(file, []byte(changed), 0o600)).To(Succeed())
	}
	s.version, s.released = version, filepath.Join(s.dir, "released-"+version)
	push := exec.CommandContext(s.t.Context(), filepath.Join(s.bin, "release"), "-root="+sources, "-registry="+s.registry, "-as="+version,
		"-helm="+filepath.Join(s.bin, "helm"), "-bundler="+filepath.Join(s.bin, "bundle"), "-out="+s.released, "-trial="+strings.Join(archives, ","))
	push.Env = append(os.Environ(), "HELM_CACHE_HOME="+s.dir, "HELM_CONFIG_HOME="+s.dir, "HELM_DATA_HOME="+s.dir)
	out, err := push.CombinedOutput()
	s.Expect(err).NotTo(HaveOccurred(), string(out))
	catalog, err := os.Open(filepath.Join(s.released, "catalog.yaml"))
	s.Expect(err).NotTo(HaveOccurred())
	defer func() { _ = catalog.Close() }()
	for decoder := yaml.NewYAMLOrJSONDecoder(catalog, 4096); ; {
		var entry struct{ Schema, Image string }
		err := decoder.Decode(&entry)
		if errors.Is(err, io.EOF) {
			break
		}
		s.Expect(err).NotTo(HaveOccurred())
		if entry.Schema == "olm.bundle" {
			s.bundles[entry.Image] = filepath.Join(s.released, "bundle")
		}
	}
	s.layCatalog()
}

// layCatalog lays the files of the last catalog as they are in its image, and checks them as those do who make catalogues.
func (s *site) layCatalog() {
	s.t.Helper()
	root := s.folder(filepath.Base(s.released) + "-catalog")
	folder := s.folder(filepath.Join(filepath.Base(root), "configs", own))
	s.Expect(os.Link(filepath.Join(s.released, "catalog.yaml"), filepath.Join(folder, "catalog.yaml"))).To(Succeed())
	s.do("opm validate " + folder)
	s.catalogs[s.registry+"/gpu-sharing-catalog:"+s.version] = root
}

// publishPrevious makes a catalog of the previous version's bundle, whose version is 0.1.0.
func (s *site) publishPrevious() {
	s.t.Helper()
	const image = "example.com/bundle-of-the-previous-release:0.1.0"
	s.version, s.released = "0.1.0", s.folder("released-previous")
	s.bundles[image] = filepath.Join(s.released, "bundle")
	s.Expect(previous.ProgramsFolder(s.t.Context(), "config/bundle", s.bundles[image])).To(Succeed())
	s.Expect(os.WriteFile(filepath.Join(s.released, "catalog.yaml"), []byte(`
{schema: olm.package, name: gpu-sharing-operator, defaultChannel: candidate}
---
{schema: olm.channel, package: gpu-sharing-operator, name: candidate, entries: [{name: gpu-sharing-operator.v0.1.0}]}
---
schema: olm.bundle
package: gpu-sharing-operator
name: gpu-sharing-operator.v0.1.0
image: `+image+`
properties:
- {type: olm.package, value: {packageName: gpu-sharing-operator, version: 0.1.0}}
- {type: olm.gvk, value: {group: gpusharing.io, version: v1alpha1, kind: GPUSharingPolicy}}
- {type: olm.gvk, value: {group: gpusharing.io, version: v1alpha1, kind: GPUNode}}
`), 0o600)).To(Succeed())
	s.layCatalog()
}

// start starts a program, which ends with the test or when the returned function is called. Its log is shown if the
// test fails.
func (s *site) start(name, program string, as *rest.Config, args ...string) (stop func()) {
	s.t.Helper()
	kubeconfig := filepath.Join(s.dir, name+".kubeconfig")
	s.Expect(env.WriteKubeconfig(as, kubeconfig)).To(Succeed())
	p, err := s.run(name, program, []string{"KUBECONFIG=" + kubeconfig}, args...)
	s.Expect(err).NotTo(HaveOccurred(), program)
	s.t.Cleanup(p.Stop)
	return p.Stop
}

// run starts a program with an environment. Its log is shown if the test fails.
func (s *site) run(name, program string, variables []string, args ...string) (*nodesim.Process, error) {
	cmd := exec.Command(program, args...)
	cmd.Env = append([]string{"HOME=" + s.dir, "TMPDIR=" + s.dir, "PATH=" + os.Getenv("PATH")}, variables...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return nodesim.StartProcess(cmd, filepath.Join(s.dir, name+".log"), 10*time.Second)
}

// showLogs shows the ends of all logs.
func (s *site) showLogs() {
	logs, _ := filepath.Glob(filepath.Join(s.dir, "*.log"))
	for _, file := range logs {
		if text, err := os.ReadFile(file); err == nil {
			s.t.Logf("log %s:\n%s", filepath.Base(file), text[max(0, len(text)-12_000):])
		}
	}
}

func (s *site) freeAddress() string {
	s.t.Helper()
	address, err := nodesim.FreeAddress(s.t.Context())
	s.Expect(err).NotTo(HaveOccurred())
	return address
}

// background runs something until the test ends, and waits for its end.
func (s *site) background(run func(context.Context)) {
	ctx, cancel := context.WithCancel(s.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		run(ctx)
	}()
	s.t.Cleanup(func() { cancel(); <-done })
}

// each does something again and again until the context ends. Errors are logged when they are news.
func (s *site) each(ctx context.Context, interval time.Duration, do func() error) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	told := ""
	for {
		if err := do(); err != nil && ctx.Err() == nil && err.Error() != told {
			told = err.Error()
			s.t.Log(told)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func object(apiVersion, kind, namespace, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(schema.FromAPIVersionAndKind(apiVersion, kind))
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

// exists reads an object, and reports whether it is there.
func (s *site) exists(o *unstructured.Unstructured) (bool, error) {
	err := s.client.Get(s.t.Context(), client.ObjectKeyFromObject(o), o)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}
