// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

// strategyCase is a policy that is in force during an upgrade, with workloads on all kinds of what it offers.
type strategyCase struct {
	title, sharing string
	offers         map[string]int64
	// workloads are users' pods and the resources for which they ask.
	workloads map[string]string
	// served are those among them that are clients of MPS.
	served []string
}

func strategyCases() []strategyCase {
	return []strategyCase{
		{
			title: "time-slicing", sharing: `{strategy: TimeSlicing, timeSlicing: {replicas: 4}}`,
			offers: map[string]int64{"nvidia.com/gpu": 8}, workloads: map[string]string{"sliced-a": "nvidia.com/gpu", "sliced-b": "nvidia.com/gpu"},
		},
		{
			title: "MPS", sharing: `{strategy: MPS, mps: {replicas: 4, activeThreadPercentage: 20}}`,
			offers: map[string]int64{"nvidia.com/gpu": 8}, workloads: map[string]string{"client-a": "nvidia.com/gpu", "client-b": "nvidia.com/gpu"},
			served: []string{"client-a", "client-b"},
		},
		{
			title: "MIG", sharing: `{strategy: MIG, mig: {strategy: mixed, layouts: [
				{gpus: {indexes: [0]}, instances: [{profile: 3g.20gb, count: 1}, {profile: 1g.5gb, count: 3}]}, {gpus: {indexes: [1]}, fill: 2g.10gb}]}}`,
			offers:    map[string]int64{"nvidia.com/mig-3g.20gb": 1, "nvidia.com/mig-1g.5gb": 3, "nvidia.com/mig-2g.10gb": 3},
			workloads: map[string]string{"large": "nvidia.com/mig-3g.20gb", "small": "nvidia.com/mig-1g.5gb", "middle": "nvidia.com/mig-2g.10gb"},
		},
		{
			title: "exclusive GPUs", sharing: `{strategy: Exclusive}`,
			offers: map[string]int64{"nvidia.com/gpu": 2}, workloads: map[string]string{"whole-a": "nvidia.com/gpu", "whole-b": "nvidia.com/gpu"},
		},
	}
}

// previousSpecs upgrade from the previous version, which is installed from the registry as the README installs today's.
func previousSpecs() {
	Describe("An upgrade from the previous version", Ordered, Offset(1), func() {
		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.A100, sim.A100)
			for _, program := range []string{"controller", "agent"} {
				printed, err := exec.CommandContext(ctx, filepath.Join(bin, "previous", program), "--version").Output()
				Expect(err).NotTo(HaveOccurred())
				Expect(strings.TrimSpace(string(printed))).To(HaveSuffix(fmt.Sprintf(" v%s (commit %s)", previous.Version, previous.Commit)))
			}
			publish(ctx, filepath.Join(bin, "previous"), previous.Version, operatorImages(ctx, filepath.Join(bin, "previous")))
			removeOperator(ctx)
			helm(ctx, append(documentedInstall(), "--version", previous.Version)...)
			expectOperatorReady(ctx)
			expectVersion(ctx, previous.Version)
		})
		AfterAll(func(ctx SpecContext) {
			stopPods(ctx)
			Expect(kube.DeleteAllOf(ctx, &v1alpha1.GPUSharingPolicy{})).To(Succeed())
			upgradeTo(ctx, "", documentedUpgrade()...)
		})

		for _, c := range strategyCases() {
			It("touches no workload under "+c.title+", nor does going back", func(ctx SpecContext) {
				share(ctx, c.sharing)
				expectAllocatable(ctx, c.offers)
				expectReady(ctx, "shared")
				for name, resource := range c.workloads {
					startPod(ctx, name, resourceName(resource), 1)
				}
				for name := range c.workloads {
					expectRunning(ctx, name)
				}
				servers := map[string]int{}
				for _, name := range c.served {
					servers[name] = expectServed(ctx, name).Server
				}
				expectSettled(ctx)
				nothing := expectUntouched(ctx)

				upgradeTo(ctx, "", documentedUpgrade()...)
				expectStillReady(ctx)
				nothing()
				nothing = expectUntouched(ctx)
				helm(ctx, "rollback", release, "--namespace", operatorNamespace)
				expectOperatorReady(ctx)
				expectVersion(ctx, previous.Version)
				expectStillReady(ctx)
				nothing()
				for _, name := range c.served {
					Expect(expectServed(ctx, name).Server).To(Equal(servers[name]), "%s has its connection from before", name)
				}
				stopPods(ctx)
			})
		}

		It("goes on with agents that are not upgraded yet", func(ctx SpecContext) {
			upgradeTo(ctx, "", append(documentedUpgrade(), "--set", "images.agent.tag="+previous.Version)...)
			expectEachStrategy(ctx)
		})

		It("goes on with agents and CRDs that are ahead of the controller", func(ctx SpecContext) {
			upgradeTo(ctx, previous.Version, append(documentedUpgrade(), "--version", previous.Version, "--set", "crds.install=false",
				"--set", "images.agent.tag="+chartVersion())...)
			expectEachStrategy(ctx)
		})
	})
}

// expectEachStrategy changes the policy from strategy to strategy, and waits until it is Ready each time and a pod
// runs.
func expectEachStrategy(ctx context.Context) {
	GinkgoHelper()
	for _, c := range strategyCases() {
		By(c.title)
		share(ctx, c.sharing)
		expectAllocatable(ctx, c.offers)
		expectReady(ctx, "shared")
		for name, resource := range c.workloads {
			startPod(ctx, name, resourceName(resource), 1)
		}
		for name := range c.workloads {
			expectRunning(ctx, name)
		}
		for _, name := range c.served {
			expectServed(ctx, name)
		}
		stopPods(ctx)
	}
	unshare(ctx, map[string]int64{"nvidia.com/gpu": 2})
}

// documentedUpgrade is how docs/install.md says that the operator is upgraded: the arguments of helm.
func documentedUpgrade() []string {
	GinkgoHelper()
	raw, err := os.ReadFile(filepath.Join(root, "docs", "install.md"))
	Expect(err).NotTo(HaveOccurred())
	Expect(string(raw)).To(ContainSubstring("**Upgrade** with `helm upgrade` instead of `helm install`"))
	args := documentedInstall()
	Expect(args[0]).To(Equal("install"))
	args[0] = "upgrade"
	return args
}

// upgradeTo upgrades by Helm, and waits until the operator's pods are new and Ready. An empty version is that of
// today's chart.
func upgradeTo(ctx context.Context, version string, args ...string) {
	GinkgoHelper()
	helm(ctx, args...)
	expectOperatorReady(ctx)
	if version == "" {
		version = chartVersion()
	}
	expectVersion(ctx, version)
}

func expectOperatorReady(ctx context.Context) {
	GinkgoHelper()
	Eventually(func() ([]string, error) { return notReady(ctx, operatorNamespace) }).WithContext(ctx).Should(BeEmpty())
}

// chartVersion is the version of today's chart.
func chartVersion() string {
	GinkgoHelper()
	raw, err := os.ReadFile(filepath.Join(root, "config", "helm", "Chart.yaml"))
	Expect(err).NotTo(HaveOccurred())
	for line := range strings.Lines(string(raw)) {
		if version, is := strings.CutPrefix(line, "version: "); is {
			return strings.TrimSpace(version)
		}
	}
	Fail("the chart has no version")
	return ""
}

// expectVersion waits until the pods of the controller are those of a version of the chart, and lead.
func expectVersion(ctx context.Context, version string) {
	GinkgoHelper()
	deployment := &appsv1.Deployment{}
	Expect(kube.Get(ctx, client.ObjectKey{Namespace: operatorNamespace, Name: "gpu-sharing-controller"}, deployment)).To(Succeed())
	Expect(deployment.Labels).To(HaveKeyWithValue("app.kubernetes.io/version", version))
	image := deployment.Spec.Template.Spec.Containers[0].Image
	Eventually(func(g Gomega) {
		pods := &corev1.PodList{}
		g.Expect(kube.List(ctx, pods, client.InNamespace(operatorNamespace), client.MatchingLabels{"app.kubernetes.io/name": "gpu-sharing-controller"})).To(Succeed())
		g.Expect(pods.Items).NotTo(BeEmpty())
		for i := range pods.Items {
			g.Expect(pods.Items[i].Spec.Containers[0].Image).To(Equal(image), "pod %s", pods.Items[i].Name)
		}
	}).WithContext(ctx).Should(Succeed())
}

// expectStillReady changes the policy in a way that changes nothing on the node, so that the controller that leads now
// has to report it.
func expectStillReady(ctx context.Context) {
	GinkgoHelper()
	p := &v1alpha1.GPUSharingPolicy{}
	Expect(kube.Get(ctx, client.ObjectKey{Name: "shared"}, p)).To(Succeed())
	before := p.DeepCopy()
	budget := intstr.FromString(fmt.Sprintf("%d%%", 50+p.Generation%50))
	p.Spec.Rollout.MaxUnavailable = &budget
	Expect(kube.Patch(ctx, p, client.MergeFrom(before))).To(Succeed())
	Expect(p.Generation).To(BeNumerically(">", before.Generation))
	expectReady(ctx, "shared")
}

// expectUntouched notes what workloads depend on: all containers but those of controller and agents, the GPUs, what an
// administrator had, and the desired state of the node. What it returns checks that nothing of it is another, and that
// the node was neither tainted nor cordoned at any moment. Labels that NFD sets do not count: those of NVIDIA's feature
// discovery come after the containers are there.
func expectUntouched(ctx context.Context) (check func()) {
	GinkgoHelper()
	type state struct {
		Containers map[string]string
		Found      found
		Devices    []v1alpha1.DeviceSpec
		Config     string
	}
	now := func() (s state) {
		GinkgoHelper()
		var err error
		s.Containers, err = containers(ctx)
		Expect(err).NotTo(HaveOccurred())
		s.Found, err = look(ctx)
		Expect(err).NotTo(HaveOccurred())
		s.Found.leaveOutFeatures()
		n := &v1alpha1.GPUNode{}
		Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)).To(Succeed())
		s.Devices, s.Config = n.Spec.Devices, n.Spec.ConfigName
		return s
	}
	before := now()
	seen := notes(func() (corev1.NodeSpec, error) {
		n := &corev1.Node{}
		err := kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)
		return n.Spec, err
	})
	was := &corev1.Node{}
	Expect(kube.Get(ctx, client.ObjectKey{Name: nodeName}, was)).To(Succeed())
	return func() {
		GinkgoHelper()
		Expect(now()).To(BeComparableTo(before))
		Expect(seen()).To(HaveEach(was.Spec), "the node takes pods all the time")
	}
}

// containers are those of users and of NVIDIA's programs, and of the MPS pods: their IDs, when they were started, and
// whether they run.
func containers(ctx context.Context) (map[string]string, error) {
	found := map[string]string{}
	for _, namespace := range []string{users, gpuoperator.Namespace, operatorNamespace} {
		pods := &corev1.PodList{}
		if err := kube.List(ctx, pods, client.InNamespace(namespace)); err != nil {
			return nil, err
		}
		for i := range pods.Items {
			p := &pods.Items[i]
			if namespace == operatorNamespace && p.Labels["app.kubernetes.io/name"] != "gpu-sharing-mps" {
				continue
			}
			for _, c := range p.Status.ContainerStatuses {
				started := metav1.Time{}
				if c.State.Running != nil {
					started = c.State.Running.StartedAt
				}
				found[namespace+"/"+p.Name+"/"+c.Name] = fmt.Sprintf("%s since %s", c.ContainerID, started)
			}
		}
	}
	return found, nil
}

// removeOperator uninstalls the operator, and removes all that Helm keeps.
func removeOperator(ctx context.Context) {
	GinkgoHelper()
	helm(ctx, "uninstall", release, "--namespace", operatorNamespace)
	kept := []client.Object{
		&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: "gpu-sharing-mps"}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: operatorNamespace, Name: "gpu-sharing-mps"}},
	}
	for _, name := range []string{"gpunodes.gpusharing.io", "gpusharingpolicies.gpusharing.io"} {
		crd := &unstructured.Unstructured{}
		crd.SetAPIVersion("apiextensions.k8s.io/v1")
		crd.SetKind("CustomResourceDefinition")
		crd.SetName(name)
		kept = append(kept, crd)
	}
	for _, kind := range []string{"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} {
		guard := &unstructured.Unstructured{}
		guard.SetAPIVersion("admissionregistration.k8s.io/v1")
		guard.SetKind(kind)
		guard.SetName("gpu-sharing-mps-nodes")
		kept = append(kept, guard)
	}
	for _, o := range kept {
		Expect(client.IgnoreNotFound(kube.Delete(ctx, o))).To(Succeed(), "the previous version does not keep all of them")
	}
	for _, o := range kept {
		Eventually(func() error { return kube.Get(ctx, client.ObjectKeyFromObject(o), o) }).WithContext(ctx).
			Should(MatchError(ContainSubstring("not found")))
	}
	names := []string{"gpu-sharing-agent", "gpu-sharing-controller", "gpu-sharing-mps"}
	Eventually(func() ([]string, error) {
		pods := &corev1.PodList{}
		err := kube.List(ctx, pods, client.InNamespace(operatorNamespace))
		var left []string
		for i := range pods.Items {
			if slices.Contains(names, pods.Items[i].Labels["app.kubernetes.io/name"]) {
				left = append(left, pods.Items[i].Name)
			}
		}
		return left, err
	}).WithContext(ctx).Should(BeEmpty())
	releaseLease(ctx) // Helm took the right to do it before they had ended
}
