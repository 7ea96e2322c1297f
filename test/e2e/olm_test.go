// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
	"github.com/gpusharing/gpu-sharing-operator/test/olm"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

const (
	// The images with which OLM v0 unpacks bundles and serves catalogs. The kubelet pulls opm anew each time.
	opmImage, utilImage = registryAddress + "/olm/opm:e2e", registryAddress + "/olm/olm:e2e"
	// The Service of the CatalogSource, and its port.
	catalogService, catalogPort = "gpu-sharing", "50051"
	// publishedAt is where versions are published for OLM. By the time that one is installed nobody answers there: the node
	// has what the catalog lists from a mirror of it, which is the registry of all other specs, with another folder.
	publishedAt, publishedFolder = "127.0.0.1:5002", "/disconnected"
	// olmHome is the home folder of OLM's programs.
	olmHome = "/tmp/olm"
)

// throughOLM is a way to install the operator: the blocks of commands below a headline of docs/install.md.
type throughOLM struct {
	version, headline string
	install           []int // the catalogue first
	upgrade           int
	uninstall         int
	definitions       []string
	start             func(context.Context) []olm.Program
	// live is the policy that is in force while the operator comes and goes.
	live strategyCase
	// interrupt takes the operator away under it.
	interrupt func(context.Context)
}

// olmSpecs run both OLMs as processes beside the API server. Bundles are unpacked, catalogs served and the operator runs
// in pods of the kubelet, of images in the registry.
func olmSpecs() {
	ways := []throughOLM{{
		version: "v0", headline: "With OLM v0", install: []int{1, 2}, upgrade: 3, uninstall: 4, definitions: []string{"v0"}, start: startOLMv0,
		live: strategyCases()[1], interrupt: deleteSubscription,
	}, {
		version: "v1", headline: "With OLM v1", install: []int{1}, upgrade: 2, uninstall: 3, definitions: []string{"extensions", "catalogs"}, start: startOLMv1,
		live: strategyCases()[2], interrupt: deleteExtensionAndNamespace,
	}}
	for _, way := range ways {
		Describe("Through OLM "+way.version, Ordered, Offset(1), Label("olm"), func() {
			var (
				now, before string // folders of what was published
				was         found
				objects     map[string]string
			)
			BeforeAll(func(ctx SpecContext) {
				begin(ctx, sim.A100, sim.A100)
				settled(ctx)
				forget(ctx)
				disconnect := startRegistry(ctx, publishedAt)
				before = publishForOLM(ctx, previousSources(ctx), previous.Version, filepath.Join(bin, "previous"))
				now = publishForOLM(ctx, root, "", bin)
				mirror(ctx, before, previous.Version)
				mirror(ctx, now, chartVersion())
				disconnect()
				way.startOLM(ctx)
				var err error
				was, err = look(ctx)
				Expect(err).NotTo(HaveOccurred())
				objects = snapshot(ctx)
			})
			AfterAll(func(ctx SpecContext) {
				if !CurrentSpecReport().Failed() { // else the node is built anew
					installOperator(ctx)
				}
			})

			It("installs the previous version, with which each strategy gets Ready", func(ctx SpecContext) {
				way.installs(ctx, before, previous.Version)
				expectEachStrategy(ctx)
			})

			It("upgrades it, and touches no workload under "+way.live.title, func(ctx SpecContext) {
				way.shareLive(ctx)
				nothing := expectUntouched(ctx)
				administer(ctx, now, way.documented(way.upgrade, chartVersion()))
				way.expectInstalled(ctx, chartVersion())
				expectStillReady(ctx)
				nothing()
			})

			It("loses nothing when it is taken away under a live policy, and takes it up when it is installed again", func(ctx SpecContext) {
				way.shareLive(ctx)
				goesOn := way.expectGoesOn(ctx)
				way.interrupt(ctx)
				goesOn()
				install := way.install[len(way.install)-1]
				administer(ctx, now, way.documented(install, chartVersion()))
				way.expectInstalled(ctx, chartVersion())
				expectStillReady(ctx)
				goesOn()
			})

			It("is uninstalled, once every node is restored, and leaves nothing", func(ctx SpecContext) {
				stopPods(ctx)
				administer(ctx, now, way.documented(way.uninstall, chartVersion()))
				expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
				Eventually(func() []string { return olm.Differences(objects, snapshot(ctx)) }).WithContext(ctx).WithPolling(3 * time.Second).Should(BeEmpty())
				expectOperandsReady(ctx)
				Eventually(func() (found, error) { return look(ctx) }).WithContext(ctx).Should(BeComparableTo(was))
			})
		})
	}
}

// documented are commands of docs/install.md, for a version.
func (w throughOLM) documented(block int, version string) string {
	GinkgoHelper()
	commands, err := olm.Documented(w.headline, block)
	Expect(err).NotTo(HaveOccurred())
	return strings.ReplaceAll(commands, "0.1.0", version)
}

// installs brings a version that was published into a folder to the cluster.
func (w throughOLM) installs(ctx context.Context, released, version string) {
	GinkgoHelper()
	for _, block := range w.install {
		administer(ctx, released, w.documented(block, version))
	}
	w.expectInstalled(ctx, version)
}

// expectInstalled waits until a version runs, all of it but MPS pods, which have the version of before until they are deleted.
func (w throughOLM) expectInstalled(ctx context.Context, version string) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		for name, o := range map[string]client.Object{
			"gpu-sharing-controller": &appsv1.Deployment{}, "gpu-sharing-operands": &appsv1.Deployment{}, "gpu-sharing-agent": &appsv1.DaemonSet{},
		} {
			g.Expect(kube.Get(ctx, client.ObjectKey{Namespace: operatorNamespace, Name: name}, o)).To(Succeed())
			g.Expect(o.GetLabels()).To(HaveKeyWithValue("app.kubernetes.io/version", version), name)
		}
		g.Expect(notReady(ctx, operatorNamespace)).To(BeEmpty())
	}).WithContext(ctx).Should(Succeed())
	expectVersion(ctx, version)
	if w.version == "v0" {
		Eventually(func() string {
			return administer(ctx, root, "kubectl -n "+operatorNamespace+" get csv -o jsonpath='{.items[*].status.phase}'")
		}).WithContext(ctx).Should(Equal("Succeeded"), "of one, the one before is gone")
	}
}

// shareLive puts the policy in force, with workloads on what it offers.
func (w throughOLM) shareLive(ctx context.Context) {
	GinkgoHelper()
	share(ctx, w.live.sharing)
	expectAllocatable(ctx, w.live.offers)
	expectReady(ctx, "shared")
	for name, resource := range w.live.workloads {
		startPod(ctx, name, resourceName(resource), 1)
	}
	for name := range w.live.workloads {
		expectRunning(ctx, name)
	}
	for _, name := range w.live.served {
		expectServed(ctx, name)
	}
	expectSettled(ctx)
}

// expectGoesOn notes the containers of the workloads, the GPUs and what is offered, and for clients of MPS their servers.
func (w throughOLM) expectGoesOn(ctx context.Context) (check func()) {
	GinkgoHelper()
	now := func() (state []string) {
		GinkgoHelper()
		f, err := look(ctx)
		Expect(err).NotTo(HaveOccurred())
		all, err := containers(ctx)
		Expect(err).NotTo(HaveOccurred())
		for name, container := range all {
			if strings.HasPrefix(name, users+"/") {
				state = append(state, name+" "+container)
			}
		}
		for _, name := range w.live.served {
			state = append(state, fmt.Sprint(name, " has server ", expectServed(ctx, name).Server))
		}
		slices.Sort(state)
		return append(append(state, f.GPUs...), fmt.Sprint(f.Offered, f.Taints, f.Cordoned))
	}
	before := now()
	return func() {
		GinkgoHelper()
		Expect(now()).To(Equal(before))
	}
}

// deleteSubscription takes the operator away as docs/install.md says that nothing is lost.
func deleteSubscription(ctx context.Context) {
	GinkgoHelper()
	administer(ctx, root, "kubectl -n "+operatorNamespace+" delete subscription,csv,operatorgroup --all")
	expectOperatorGone(ctx)
}

// deleteExtensionAndNamespace tries to delete the ClusterExtension, which is refused, and then deletes the namespace.
func deleteExtensionAndNamespace(ctx context.Context) {
	GinkgoHelper()
	Expect(administer(ctx, root, "! kubectl delete clusterextension "+release+" --wait=false")).To(ContainSubstring("First run: kubectl gpusharing restore"))
	administer(ctx, root, "kubectl delete namespace "+operatorNamespace+" --timeout=3m")
	expectOperatorGone(ctx)
}

func expectOperatorGone(ctx context.Context) {
	GinkgoHelper()
	for _, name := range []string{"gpu-sharing-controller", "gpu-sharing-operands", "gpu-sharing-agent"} {
		Eventually(func() ([]string, error) {
			pods := &corev1.PodList{}
			err := kube.List(ctx, pods, client.InNamespace(operatorNamespace), client.MatchingLabels{"app.kubernetes.io/name": name})
			var left []string
			for i := range pods.Items {
				left = append(left, pods.Items[i].Name)
			}
			return left, err
		}).WithContext(ctx).Should(BeEmpty())
	}
}

// forget removes the operator that Helm has installed, and all that it leaves.
func forget(ctx context.Context) {
	GinkgoHelper()
	removeOperator(ctx)
	administer(ctx, root, "kubectl delete namespace "+operatorNamespace+" --timeout=3m\nbash unlabel.sh")
}

// snapshot is every object of the cluster but those of the node, which look compares.
func snapshot(ctx context.Context) map[string]string {
	GinkgoHelper()
	all, err := olm.Snapshot(ctx, machine.Config, "nodes", "nodefeatures", "csinodes")
	Expect(err).NotTo(HaveOccurred())
	return all
}

// administer runs commands as an administrator, who is in a folder, and returns what they print.
func administer(ctx context.Context, folder, commands string) string {
	GinkgoHelper()
	shell := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	shell.Dir = folder
	shell.Env = []string{
		"PATH=" + bin + ":" + filepath.Join(root, "hack", "install") + ":" + os.Getenv("PATH"), "HOME=/tmp",
		"KUBECONFIG=" + node.AdminConfig, "REGISTRY=" + publishedAt + publishedFolder,
	}
	out, err := shell.CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "%s\n%s", commands, out)
	return string(out)
}

// previousSources is a folder with what the previous version's chart and bundle are made of.
func previousSources(ctx context.Context) string {
	GinkgoHelper()
	folder := filepath.Join(os.TempDir(), "previous")
	Expect(previous.ProgramsFolder(ctx, "config", filepath.Join(folder, "config"))).To(Succeed())
	return folder
}

// publishForOLM publishes a version with its bundle and catalog, and returns the folder with what a release has beside.
func publishForOLM(ctx context.Context, sources, version, programs string) string {
	GinkgoHelper()
	released, err := os.MkdirTemp("", "released-")
	Expect(err).NotTo(HaveOccurred())
	publish(ctx, sources, version, operatorImages(ctx, programs), "-registry="+publishedAt+publishedFolder,
		"-bundler="+filepath.Join(bin, "bundle"), "-out="+released)
	return released
}

// mirror does what an administrator of a disconnected cluster does: it copies the catalog of a version and all images that
// the catalog lists, and no other, and lets the node pull from the copies by the names of before.
func mirror(ctx context.Context, released, version string) {
	GinkgoHelper()
	catalog, err := os.ReadFile(filepath.Join(released, "catalog.yaml"))
	Expect(err).NotTo(HaveOccurred())
	images := []string{publishedAt + publishedFolder + "/gpu-sharing-catalog:" + version}
	for _, listed := range regexp.MustCompile(`(?m)^- image: (\S+)$`).FindAllSubmatch(catalog, -1) {
		images = append(images, string(listed[1]))
	}
	Expect(images).To(HaveLen(4), "the catalog, the bundle, the controller and the agent: %v", images)
	for _, from := range images {
		repository, _, _ := strings.Cut(strings.TrimPrefix(from, publishedAt), "@")
		to := registryAddress + repository
		if strings.Contains(from, "@") {
			to += ":" + version
		}
		ctr(ctx, "content", "fetch", "--plain-http", "--all-platforms", from)
		ctr(ctx, "images", "tag", "--force", from, to)
		ctr(ctx, "images", "push", "--local", "--plain-http", to)
	}
	folder := "/etc/containerd/certs.d/" + publishedAt
	Expect(os.MkdirAll(folder, 0o755)).To(Succeed())
	Expect(os.WriteFile(filepath.Join(folder, "hosts.toml"), []byte("[host.\"http://"+registryAddress+"\"]\n"), 0o644)).To(Succeed())
}

// ctr works on images of which the kubelet knows nothing.
func ctr(ctx context.Context, args ...string) {
	GinkgoHelper()
	out, err := exec.CommandContext(ctx, filepath.Join(bin, "ctr"), append([]string{"--namespace=mirror"}, args...)...).CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "ctr %s: %s", strings.Join(args, " "), out)
}

// startOLM installs OLM's definitions, and starts its programs until the specs end.
func (w throughOLM) startOLM(ctx context.Context) {
	GinkgoHelper()
	definitions, err := olm.CRDs(filepath.Join(bin, "olm"), w.definitions...)
	Expect(err).NotTo(HaveOccurred())
	_, err = envtest.InstallCRDs(machine.Config, envtest.CRDInstallOptions{Paths: definitions, ErrorIfPathMissing: true, MaxTime: time.Minute})
	Expect(err).NotTo(HaveOccurred())
	for _, program := range w.start(ctx) {
		cmd := exec.Command(filepath.Join(bin, "olm", program.Name), program.Args...)
		cmd.Env = []string{"KUBECONFIG=" + node.AdminConfig, "HOME=" + olmHome, "PATH=" + os.Getenv("PATH")}
		p, err := nodesim.StartProcess(cmd, filepath.Join("/var/log", program.Name+".log"), 10*time.Second)
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(p.Stop)
	}
}

func startOLMv1(ctx context.Context) []olm.Program {
	GinkgoHelper()
	Expect(client.IgnoreAlreadyExists(kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: olm.NamespaceV1}}))).To(Succeed())
	programs, err := olm.V1(ctx, olmHome, publishedAt, registryAddress)
	Expect(err).NotTo(HaveOccurred())
	return programs
}

func startOLMv0(ctx context.Context) []olm.Program {
	GinkgoHelper()
	Expect(client.IgnoreAlreadyExists(kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: olm.NamespaceV0}}))).To(Succeed())
	for _, i := range olmImages(ctx) {
		ctr(ctx, "images", "import", "--local", write(i))
		ctr(ctx, "images", "push", "--local", "--plain-http", i.Name)
	}
	passOnToCatalog(ctx)
	return olm.V0(opmImage, utilImage)
}

// olmImages have OLM's own programs, as its images have them: opm beside the program of its probes, and what copies
// catalogs and bundles out of their images.
func olmImages(ctx context.Context) []image.Image {
	GinkgoHelper()
	programs := filepath.Join(bin, "olm")
	opm, err := image.Image{Name: opmImage, Entrypoint: []string{"/bin/opm"}, User: "1001", Env: []string{"PATH=/bin"}, Files: map[string]string{
		"/bin/opm": filepath.Join(programs, "opm"), "/bin/grpc_health_probe": filepath.Join(bin, "grpc_health_probe"),
	}}.WithLibrariesOf(ctx)
	Expect(err).NotTo(HaveOccurred())
	util, err := image.Image{Name: utilImage, Entrypoint: []string{"/bin/cp"}, User: "1001", Env: []string{"PATH=/bin"}, Files: map[string]string{
		"/bin/cp": "/bin/cp", "/bin/cpb": filepath.Join(programs, "cpb"), "/bin/copy-content": filepath.Join(programs, "copy-content"),
	}}.WithLibrariesOf(ctx, "/bin/cp")
	Expect(err).NotTo(HaveOccurred())
	return []image.Image{opm, util}
}

// passOnToCatalog does what a cluster's DNS and kube-proxy do for OLM v0, and which the node lacks: the name of the
// CatalogSource's Service means this process, which passes each connection on to the pod behind the Service.
func passOnToCatalog(ctx context.Context) {
	GinkgoHelper()
	hosts, err := os.ReadFile("/etc/hosts")
	Expect(err).NotTo(HaveOccurred())
	name := catalogService + "." + olm.NamespaceV0 + ".svc"
	if !strings.Contains(string(hosts), name) {
		Expect(os.WriteFile("/etc/hosts", fmt.Appendf(hosts, "\n127.0.0.1 localhost %s\n", name), 0o644)).To(Succeed())
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:"+catalogPort)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() { _ = listener.Close() })
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				if err := passOn(from); err != nil {
					_, _ = fmt.Fprintln(GinkgoWriter, "   passing on to the catalog:", err)
				}
			}()
		}
	}()
}

// passOn passes a connection on to a pod that is ready behind the Service of the catalog.
func passOn(from net.Conn) error {
	defer from.Close() //nolint:errcheck // the other end sees that it is over
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	behind := &discoveryv1.EndpointSliceList{}
	if err := kube.List(ctx, behind, client.InNamespace(olm.NamespaceV0), client.MatchingLabels{discoveryv1.LabelServiceName: catalogService}); err != nil {
		return err
	}
	for _, s := range behind.Items {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready == nil || !*e.Conditions.Ready {
				continue
			}
			to, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(e.Addresses[0], catalogPort))
			if err != nil {
				return err
			}
			go func() {
				_, _ = io.Copy(to, from)
				_ = to.Close()
			}()
			_, _ = io.Copy(from, to)
			_ = to.Close()
			return nil
		}
	}
	return nil // as where nobody listens
}
