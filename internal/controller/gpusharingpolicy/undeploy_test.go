// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/cli"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// kinds are the names of our definitions.
func kinds() []string { return []string{"gpunodes.gpusharing.io", "gpusharingpolicies.gpusharing.io"} }

// TestUndeploy: `make undeploy` leaves nothing of ours, and nothing of anybody else's as it was not before `make
// deploy`.
func TestUndeploy(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	i := &installation{scenario: newOpenScenario(t, cluster), cluster: cluster}
	i.prepare()
	i.apply(byHand)
	i.apply("{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: cluster-policy}, spec: {devicePlugin: {enabled: true, " +
		"config: {name: time-slicing-config}}, mig: {strategy: single}}}")

	i.make("deploy")
	i.runs("gpu-sharing-controller")
	i.agent, i.acts = i.asAgent, i.asController()
	i.Eventually(i.established).WithTimeout(time.Minute).Should(BeTrue())
	i.machine("t4", sim.T4)
	i.machine("a100", sim.A100, sim.A100)
	i.label("t4", "nvidia.com/device-plugin.config", "slice-4")
	i.label("a100", v1alpha1.LabelMIGManager, "true")
	i.quieten()
	before := i.snapshot()

	i.policy("t4s", `{gpuSelector: {products: ["Tesla-T4"]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}`)
	i.policy("a100s", `{gpuSelector: {products: ["NVIDIA-A100-*"]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}}`)
	i.settle()
	i.expectReady("t4s")
	i.expectReady("a100s")
	i.Expect(i.snapshot()).NotTo(Equal(before))

	i.make("restore", "RESTORE_TIMEOUT=600")
	i.quieten()
	i.Expect(i.snapshot()).To(Equal(before), "every node, ConfigMap and the ClusterPolicy, field by field")
	i.idle = true // the controller and the agents end with their objects
	i.annotate("t4", v1alpha1.AnnotationRunsAgent, `"true@1800000000"`)
	i.annotate("a100", v1alpha1.AnnotationRunsAgent, "null")
	i.make("undeploy", "UNDEPLOY_TIMEOUT=600")
	i.Expect(i.snapshot()).To(Equal(before))
	i.Expect(i.node("t4").Annotations).NotTo(HaveKey(v1alpha1.AnnotationRunsAgent))
	i.Expect(i.node("t4").Labels).NotTo(HaveKey(v1alpha1.LabelRunsAgent), "the operator set it")
	i.Expect(i.node("a100").Labels).To(HaveKeyWithValue(v1alpha1.LabelRunsAgent, "true"), "another controller set it")
	for _, name := range kinds() {
		i.Expect(i.kindExists(name)).To(BeFalse(), name)
	}
	i.Expect(i.kubectl("get", "-k", filepath.Join(i.root, "config", "default"), "--ignore-not-found", "-o", "name")).To(BeEmpty())
}

// TestRestoreEndsWhenEverythingIsAsBefore: at no moment of the way back does the plugin find nothing left, while
// something still differs from how it was.
func TestRestoreEndsWhenEverythingIsAsBefore(t *testing.T) {
	t.Parallel()
	cluster := env.Start(t, env.WithNVIDIA())
	i := &installation{scenario: newOpenScenario(t, cluster), cluster: cluster}
	i.machine("a100", sim.A100)
	i.machine("t4", sim.T4)
	i.quieten()
	before := i.snapshot()
	i.policy("a100s", `{gpuSelector: {products: ["NVIDIA-A100-*"]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}}`)
	i.policy("t4s", `{gpuSelector: {products: ["Tesla-T4"]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}`)
	i.settle()
	i.expectReady("a100s")
	i.delete("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: a100s}}")
	i.delete("{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: t4s}}")

	onTheWay := 0
	for {
		left, err := cli.Left(i.ctx(), i.client)
		i.Expect(err).NotTo(HaveOccurred())
		if len(left) == 0 {
			break
		}
		onTheWay++
		i.Expect(onTheWay).To(BeNumerically("<", 200), "%v", left)
		_, err = i.reconcile()
		i.Expect(err).NotTo(HaveOccurred())
		i.others()
	}
	i.Expect(onTheWay).To(BeNumerically(">", 3))
	i.Expect(i.settle()).To(BeEmpty(), "the controller has nothing left to do")
	i.Expect(i.snapshot()).To(Equal(before))
}

// installation is a scenario in which the operator is installed and removed by the Makefile.
type installation struct {
	*scenario

	cluster                   *env.Cluster
	root, kubeconfig, program string
	idle                      bool // nobody but the API server does anything
}

// configure finds the repository and kubectl.
func (i *installation) configure() {
	i.t.Helper()
	var err error
	i.root, err = env.Root()
	i.Expect(err).NotTo(HaveOccurred())
	assets, err := env.Assets(i.ctx())
	i.Expect(err).NotTo(HaveOccurred())
	i.program = filepath.Join(assets, "kubectl")
	i.kubeconfig = filepath.Join(i.t.TempDir(), "kubeconfig")
	i.Expect(env.WriteKubeconfig(i.cluster.Config, i.kubeconfig)).To(Succeed())
}

// prepare sees to it that our kinds are back in the end, since the scenario looks for them when it ends.
func (i *installation) prepare() {
	i.t.Helper()
	i.configure()
	i.t.Cleanup(func() {
		ctx := context.Background()
		for _, name := range kinds() {
			plural, _, _ := strings.Cut(name, ".")
			i.Expect(i.cluster.Apply(ctx, "config/crd/gpusharing.io_"+plural+".yaml")).To(Succeed())
		}
		i.Eventually(i.established).WithTimeout(time.Minute).Should(BeTrue())
	})
}

func (i *installation) kindExists(name string) bool {
	i.t.Helper()
	o := &unstructured.Unstructured{}
	o.SetAPIVersion("apiextensions.k8s.io/v1")
	o.SetKind("CustomResourceDefinition")
	err := i.client.Get(context.Background(), types.NamespacedName{Name: name}, o)
	i.Expect(client.IgnoreNotFound(err)).To(Succeed())
	return err == nil
}

// established reports whether the API server serves our kinds.
func (i *installation) established() bool {
	ctx := context.Background()
	return i.client.List(ctx, &v1alpha1.GPUNodeList{}) == nil && i.client.List(ctx, &v1alpha1.GPUSharingPolicyList{}) == nil
}

// asAgent is a client with the rights of the agent on a node, which are all that the admission policy lets write there.
func (i *installation) asAgent(node string) client.Client {
	i.t.Helper()
	c, err := i.cluster.ClientAs(i.ctx(), env.Identity{
		Namespace: ownNamespace, ServiceAccount: "gpu-sharing-agent", Pod: node + "-agent", Node: node,
	})
	i.Expect(err).NotTo(HaveOccurred())
	return c
}

// asController is a client by the name of the controller, which is all that the admission policies look at. Its rights
// are those of an administrator, because it reads without a cache.
func (i *installation) asController() client.WithWatch {
	i.t.Helper()
	config := rest.CopyConfig(i.cluster.Config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + ownNamespace + ":gpu-sharing-controller", Groups: []string{"system:masters"},
	}
	c, err := client.NewWithWatch(config, client.Options{Scheme: i.cluster.Scheme})
	i.Expect(err).NotTo(HaveOccurred())
	return c
}

// runs lets a Deployment have a pod that is available, as a cluster with nodes would.
func (i *installation) runs(name string) {
	i.t.Helper()
	d := &appsv1.Deployment{}
	key := types.NamespacedName{Namespace: ownNamespace, Name: name}
	if err := i.client.Get(i.ctx(), key, d); apierrors.IsNotFound(err) {
		i.Expect(i.cluster.Apply(i.ctx(), "config/manager/controller.yaml")).To(Succeed())
		i.Expect(i.client.Get(i.ctx(), key, d)).To(Succeed())
	}
	d.Status.Replicas, d.Status.AvailableReplicas, d.Status.ReadyReplicas, d.Status.UpdatedReplicas = 1, 1, 1, 1
	i.Expect(i.client.Status().Update(i.ctx(), d)).To(Succeed())
}

// make runs a target of the Makefile while everybody does what is due.
func (i *installation) make(args ...string) {
	i.t.Helper()
	out, err := i.target(args...)
	i.Expect(err).NotTo(HaveOccurred(), out)
}

func (i *installation) target(args ...string) (string, error) {
	i.t.Helper()
	c := exec.CommandContext(i.ctx(), "make", append([]string{"-s", "-C", i.root, "KUBECTL=" + i.program}, args...)...)
	c.Env = append(os.Environ(), "KUBECONFIG="+i.kubeconfig)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	i.Expect(c.Start()).To(Succeed())
	done := make(chan error, 1)
	go func() { done <- c.Wait() }()
	for {
		select {
		case err := <-done:
			i.t.Logf("make %s:\n%s", strings.Join(args, " "), out.String())
			return out.String(), err
		case <-time.After(50 * time.Millisecond):
		}
		i.finalize()
		if !i.idle && i.established() {
			_, err := i.reconcile()
			i.Expect(err).NotTo(HaveOccurred())
			i.others()
		}
	}
}

// quieten lets NVIDIA's programs finish what the last write made them begin: they act on it by themselves, and later.
func (i *installation) quieten() {
	i.t.Helper()
	for range 10 {
		i.others()
	}
}

// finalize plays the controller of namespaces: it empties one that is being deleted, and lets it go.
func (i *installation) finalize() {
	i.t.Helper()
	ns := &corev1.Namespace{}
	err := i.client.Get(i.ctx(), types.NamespacedName{Name: ownNamespace}, ns)
	if err != nil || ns.DeletionTimestamp == nil {
		return
	}
	i.Expect(i.client.DeleteAllOf(i.ctx(), &corev1.Pod{}, client.InNamespace(ns.Name), client.GracePeriodSeconds(0))).To(Succeed())
	ns.Spec.Finalizers = nil
	i.Expect(client.IgnoreNotFound(i.client.SubResource("finalize").Update(i.ctx(), ns))).To(Succeed())
}

func (i *installation) kubectl(args ...string) string {
	i.t.Helper()
	c := exec.CommandContext(i.ctx(), i.program, append(args, "--kubeconfig", i.kubeconfig)...)
	out, err := c.Output()
	if err != nil && !bytes.Contains(out, []byte("no matches")) {
		i.t.Logf("kubectl %v: %v", args, err) // kinds that are gone have no objects
	}
	return string(out)
}

// annotate sets an annotation of a node to a value in JSON.
func (i *installation) annotate(node, name, value string) {
	i.t.Helper()
	patch := []byte(`{"metadata":{"annotations":{"` + name + `":` + value + `}}}`)
	i.Expect(i.client.Patch(i.ctx(), i.node(node), client.RawPatch(types.MergePatchType, patch))).To(Succeed())
}

// snapshot is all that belongs to others and that the operator could have changed.
func (i *installation) snapshot() map[string]any {
	i.t.Helper()
	found := map[string]any{}
	for _, m := range i.nodes {
		n := i.node(m.name)
		delete(n.Annotations, v1alpha1.AnnotationRunsAgent) // it stays while agents run
		delete(n.Labels, v1alpha1.LabelRunsAgent)
		found["Node "+n.Name] = []any{n.Labels, n.Annotations, n.Finalizers, n.Spec, i.allocatable(n.Name)}
	}
	configMaps := &corev1.ConfigMapList{}
	i.Expect(i.client.List(i.ctx(), configMaps, client.InNamespace(nvidiaSpace))).To(Succeed())
	for _, c := range configMaps.Items {
		found["ConfigMap "+c.Name] = []any{c.Labels, c.Annotations, c.Data}
	}
	policy := &unstructured.Unstructured{}
	policy.SetAPIVersion("nvidia.com/v1")
	policy.SetKind("ClusterPolicy")
	i.Expect(i.client.Get(i.ctx(), types.NamespacedName{Name: clusterName}, policy)).To(Succeed())
	found["ClusterPolicy"] = []any{policy.GetLabels(), policy.GetAnnotations(), policy.Object["spec"]}
	sets := &appsv1.DaemonSetList{}
	i.Expect(i.client.List(i.ctx(), sets, client.InNamespace(nvidiaSpace))).To(Succeed())
	for _, d := range sets.Items {
		found["DaemonSet "+d.Name] = d.Spec.Template.Spec
	}
	return found
}
