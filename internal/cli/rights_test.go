// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// The errors name roles of config/rbac/users.yaml. With exactly these roles each command works.
func TestUsersNeedTheRolesThatErrorsNameAndNoOthers(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t, env.WithNVIDIA())
	populate(t, cluster.Client, newNode(t, "a", sim.A100))
	g.Expect(cluster.Client.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "plugin"}})).To(Succeed())
	const view, edit, cli = "gpu-sharing-view", "gpu-sharing-edit", "gpu-sharing-cli"
	bindRoles(t, cluster.Client, map[string][]string{"viewer": {view}, "reader": {view, cli}, "editor": {view, edit, cli}})
	printed := func(user string, args []string) (string, error) {
		var out strings.Builder
		p := &Program{In: strings.NewReader(research), Out: &out, Clock: clocktesting.NewFakeClock(now), Width: 100}
		err := p.Run(t.Context(), append(slices.Clone(args), "--kubeconfig", kubeconfigOf(t, cluster.Config, user)))
		return out.String(), err
	}
	run := func(user string, args []string) error {
		_, err := printed(user, args)
		if errors.Is(err, ErrUnhealthy) {
			return nil // it could read everything
		}
		return failure(err)
	}
	for _, tc := range []struct {
		args []string
		may  []string            // users
		lack map[string][]string // users that lack rights, each with the roles that the error names
	}{
		{
			args: []string{"status"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"import", "--configmap", "default/plugin"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"doctor"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"plan", "-f", "-"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli, edit}},
		}, {
			args: []string{"advise", "--prometheus", answering(t, "", seenOn("a", "train"))}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"restore", "--yes"}, may: []string{"editor"},
			lack: map[string][]string{"nobody": {view, cli, edit}, "viewer": {cli, edit}},
		},
	} {
		t.Run(tc.args[0], func(t *testing.T) {
			g := NewWithT(t)
			for _, user := range tc.may {
				g.Eventually(run).WithArguments(user, tc.args).WithTimeout(time.Minute).Should(Succeed(), user)
			}
			for user, lacks := range tc.lack {
				err := run(user, tc.args)
				g.Expect(apierrors.IsForbidden(err)).To(BeTrue(), "%s: %v", user, err)
				for _, role := range lacks {
					g.Expect(err).To(MatchError(ContainSubstring(role)), user)
				}
			}
		})
	}
	t.Run("plan says what the API server has not checked", func(t *testing.T) {
		g := NewWithT(t)
		out, err := printed("reader", []string{"plan", "-f", "-"})
		g.Expect(err).To(Equal(Disruptive))
		g.Expect(strings.Join(strings.Fields(out), " ")).To(And(HavePrefix("You may not write policies, so the API server has not checked research"), ContainSubstring(edit),
			HaveSuffix("OUTCOME Disruptive: GPUs have to be idle for it, or workloads find nothing to run on (exit code 3)")))
		out, err = printed("editor", []string{"plan", "-f", "-"})
		g.Expect(err).To(Equal(Disruptive))
		g.Expect(out).To(HavePrefix("POLICY research (new)"))
	})
	t.Run("advise prints a policy without the right to plan, and names the role", func(t *testing.T) {
		g := NewWithT(t)
		address := answering(t, "", seenOn("a", "train"))
		out, err := printed("reader", []string{"advise", "--prometheus", address})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(And(ContainSubstring("kind: GPUSharingPolicy"), ContainSubstring("What it changes is not shown"), ContainSubstring(edit)))
		out, err = printed("editor", []string{"advise", "--prometheus", address})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(ContainSubstring("What it would change, as kubectl gpusharing plan prints it:"))
	})
	t.Run("doctor finds with these roles what an administrator finds", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(cluster.Client.Create(t.Context(), object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy", map[string]any{}))).To(Succeed())
		g.Expect(cluster.Client.Create(t.Context(), bindingOf("gpu-sharing-operator"))).To(Succeed())
		g.Expect(cluster.Client.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-sharing-operator", Name: controllerName}})).To(Succeed())
		found, err := printed("", []string{"doctor"})
		g.Expect(err).To(MatchError(ErrUnhealthy))
		g.Expect(found).To(And(ContainSubstring("ClusterPolicy cluster-policy"), ContainSubstring("nobody holds lease")))
		g.Eventually(func() string { out, _ := printed("reader", []string{"doctor"}); return out }).WithTimeout(time.Minute).Should(Equal(found))
	})
}

// bindRoles creates the roles of config/rbac/users.yaml, and binds them to users.
func bindRoles(t *testing.T, c client.Client, users map[string][]string) {
	t.Helper()
	g := NewWithT(t)
	roles, err := os.ReadFile("../../config/rbac/users.yaml")
	g.Expect(err).NotTo(HaveOccurred())
	for text := range strings.SplitSeq(string(roles), "\n---\n") {
		role := &rbacv1.ClusterRole{}
		g.Expect(yaml.UnmarshalStrict([]byte(text), role)).To(Succeed())
		g.Expect(c.Create(t.Context(), role)).To(Succeed())
	}
	for user, bound := range users {
		for _, role := range bound {
			g.Expect(c.Create(t.Context(), &rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: user + "-" + role},
				RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
				Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
			})).To(Succeed())
		}
	}
}

// kubeconfigOf writes a kubeconfig with which the administrator acts as a user.
func kubeconfigOf(t *testing.T, admin *rest.Config, user string) string {
	t.Helper()
	as := rest.CopyConfig(admin)
	as.Impersonate.UserName = user
	return env.KubeconfigFile(t, as)
}

// Kubernetes' ClusterRole edit lets a tenant create Deployments, DaemonSets and pods with any label in a namespace of
// his own.

// servingAll is a cluster with these objects, which serves NVIDIA's, NFD's and DRA's kinds. Of one of them the user may
// not list any.
func servingAll(t *testing.T, forbidden string, objects ...client.Object) client.Client {
	t.Helper()
	scheme, err := newScheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	mapper := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []schema.GroupVersionKind{
		clusterPolicyKind(), kindOf("nvidia.com", "v1alpha1", "GPUCluster"), cluster.NodeFeatureKind(), kindOf(draGroup, "v1", kindSlice),
	} {
		mapper.Add(kind, meta.RESTScopeRoot)
		scheme.AddKnownTypeWithName(kind, &unstructured.Unstructured{})
		scheme.AddKnownTypeWithName(kind.GroupVersion().WithKind(kind.Kind+"List"), &unstructured.UnstructuredList{})
	}
	return fake.NewClientBuilder().WithScheme(scheme).WithRESTMapper(mapper).WithObjects(objects...).WithIndex(&coordinationv1.Lease{}, "metadata.name", byFieldName).
		WithInterceptorFuncs(interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if forbidden != "" && list.GetObjectKind().GroupVersionKind().Kind == forbidden+"List" {
				return apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no"))
			}
			return c.List(ctx, list, opts...)
		}}).Build()
}

// withGPUs are the objects of node a.
func withGPUs(t *testing.T) []client.Object {
	t.Helper()
	n := newNode(t, "a", sim.T4)
	return []client.Object{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: n.Labels}}, &n.GPU}
}

// printedOf is what status prints of a cluster.
func printedOf(t *testing.T, c client.Client) string {
	t.Helper()
	g := NewWithT(t)
	p := &Program{Clock: clocktesting.NewFakeClock(now)}
	render, err := p.statusNow(t.Context(), c, query{all: true}, newFlags())
	g.Expect(err).NotTo(HaveOccurred())
	out, err := render(now)
	g.Expect(err).NotTo(HaveOccurred())
	return out
}

// ofDaemonSet makes a pod one of a DaemonSet.
func ofDaemonSet(pod *corev1.Pod) *corev1.Pod {
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "x", UID: "x", Controller: new(true)}}
	return pod
}

func readyPod(pod *corev1.Pod) *corev1.Pod {
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return pod
}

// TestADeploymentOfATenantIsNoInstallation: doctor takes neither flags nor agents from it.
func TestADeploymentOfATenantIsNoInstallation(t *testing.T) {
	const own, tenant = "gpu-sharing-operator", "team"
	for title, installed := range map[string][]client.Object{
		"beside the controller": {bindingOf(own), leaseIn(own, now), deploymentIn(own)}, "without a controller": nil,
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			tenants := deploymentIn(tenant)
			tenants.Spec.Template.Spec.Containers[0].Args = []string{
				"--node-selector=nothing=here", "--device-plugin-namespace=" + tenant, "--device-plugin-configmap=x",
			}
			c := servingAll(t, "", append(installed, tenants)...)
			is := healthy(t, 1)
			var err error
			is.controllers = nil
			is.leader, err = leadershipOf(t.Context(), c, "", now)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(is.readControllers(t.Context(), c)).To(Succeed())
			for _, f := range diagnose(is) {
				g.Expect(f.what).NotTo(Or(ContainSubstring("installed 2 times"), ContainSubstring(tenant)))
			}
			g.Expect(is.told).To(BeZero(), "what a tenant's Deployment says of the device plugin")
			g.Expect(is.nodeSelector).To(BeNil())
			g.Expect(is.isOf(tenant)).To(Equal(installed == nil), "without a controller nothing tells where agents run")
		})
	}
}

// TestAReadyPodOfATenantIsNoAgent: status says that the agent of the node is not Ready, whatever the label of a
// tenant's pod is.
func TestAReadyPodOfATenantIsNoAgent(t *testing.T) {
	const own, silent = "gpu-sharing-operator", v1alpha1.ReasonAgentNotReporting
	for namespace, says := range map[string]types.GomegaMatcher{own: Not(ContainSubstring(silent)), "team": ContainSubstring(silent)} {
		objects := append(withGPUs(t), bindingOf(own), leaseIn(own, now), readyPod(agentOn(namespace, "a")))
		NewWithT(t).Expect(printedOf(t, servingAll(t, "", objects...))).To(says, namespace)
	}
}

// TestAPodOfATenantIsNotNVIDIAsDRADriver, which would offer the same GPUs as NVIDIA's device plugin.
func TestAPodOfATenantIsNotNVIDIAsDRADriver(t *testing.T) {
	const tenant, nvidias, own = "team", "gpu-operator", "gpu-sharing-operator"
	driverIn := func(namespace string) *corev1.Pod {
		return readyPod(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "x", Labels: map[string]string{cluster.DRALabels()[0]: "kubelet-plugin"}},
			Spec:       corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{{Name: "gpus"}}},
		})
	}
	config := func(kind, version string) *unstructured.Unstructured {
		o := object("nvidia.com/"+version, kind, "", "x", map[string]any{})
		o.Object["status"] = map[string]any{"namespace": nvidias}
		return o
	}
	n, chart := newNode(t, "a", sim.T4), ofDaemonSet(driverIn("nvidia-dra"))
	chart.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}}}
	slices := published(&n, 1)
	for title, tc := range map[string]struct {
		objects   []client.Object
		forbidden string
		driver    bool
	}{
		"a pod of a tenant":                              {objects: []client.Object{driverIn(tenant)}},
		"a pod of a tenant's DaemonSet":                  {objects: []client.Object{ofDaemonSet(driverIn(tenant)), config("ClusterPolicy", "v1")}},
		"a pod of a tenant in a namespace of NVIDIA's":   {objects: []client.Object{driverIn(nvidias), config("ClusterPolicy", "v1")}},
		"the driver of its chart":                        {objects: []client.Object{chart, &slices}, driver: true},
		"the driver of a GPUCluster, which starts":       {objects: []client.Object{ofDaemonSet(driverIn(nvidias)), config("GPUCluster", "v1alpha1")}, driver: true},
		"a user who may not read NVIDIA's ClusterPolicy": {objects: []client.Object{driverIn(tenant)}, forbidden: "ClusterPolicy", driver: true},
		"a user who may not read NVIDIA's GPUClusters":   {objects: []client.Object{driverIn(tenant)}, forbidden: "GPUCluster", driver: true},
		"a user who may not read NodeFeatures":           {objects: []client.Object{driverIn(tenant)}, forbidden: "NodeFeature", driver: true},
		"a user who may not read ResourceSlices":         {objects: []client.Object{driverIn(tenant)}, forbidden: kindSlice, driver: true},
	} {
		t.Run(title, func(t *testing.T) {
			out := printedOf(t, servingAll(t, tc.forbidden, append(withGPUs(t), append(tc.objects, bindingOf(own), leaseIn(own, now))...)...))
			stack := ContainSubstring("  stack  ") // a line of its own, unless the device plugin alone offers them
			if tc.driver {
				NewWithT(t).Expect(out).To(stack)
				return
			}
			NewWithT(t).Expect(out).NotTo(stack)
		})
	}
}

// TestDoctorTakesNoPodOfATenantForAProgram: neither hides it that NVIDIA's is missing, nor is its version one of
// NVIDIA's.
func TestDoctorTakesNoPodOfATenantForAProgram(t *testing.T) {
	const nvidias = "gpu-operator"
	for title, tc := range map[string]struct {
		labels map[string]string
		found  func(*nodeParts) []component
	}{
		"the device plugin":      {map[string]string{"app": "nvidia-device-plugin-daemonset"}, func(n *nodeParts) []component { return n.plugins }},
		"Node Feature Discovery": {map[string]string{nameLabel: featureDiscovery}, func(n *nodeParts) []component { return n.discovery }},
		"the DRA driver":         {map[string]string{cluster.DRALabels()[0]: "kubelet-plugin"}, func(n *nodeParts) []component { return n.drivers }},
	} {
		for namespace, count := range map[string]int{nvidias: 1, "team": 0} {
			is := installation{programs: cluster.Programs{GPUOperators: []string{nvidias}, PublishedOn: map[string]bool{"a": true}}}
			is.snapshot.Plugin.NodeFeatures = true
			pod := ofDaemonSet(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Labels: tc.labels}})
			pod.Spec.NodeName, pod.Spec.Containers = "a", []corev1.Container{{Name: "gpus"}}
			n := nodeParts{stack: dra.DRADriver}
			is.place(pod, &n)
			NewWithT(t).Expect(tc.found(&n)).To(HaveLen(count), "%s in namespace %s", title, namespace)
		}
	}
}

// TestThePageTakesNoPodOfATenantForAProgram once it has read where programs run.
func TestThePageTakesNoPodOfATenantForAProgram(t *testing.T) {
	g := NewWithT(t)
	seen := watching(t)
	n := newNode(t, "a", sim.T4)
	pod := readyPod(agentOn("team", "a"))
	pod.Labels[cluster.DRALabels()[0]], pod.Spec.Containers[0].Name = "kubelet-plugin", "gpus"
	for k, o := range map[*kind]any{
		seen.gpuNodes: &n.GPU, seen.nodes: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: n.Labels}}, seen.pods: pod,
	} {
		g.Expect(k.GetStore().Add(o)).To(Succeed())
		seen.touch(o)
	}
	shown := func() cluster.Pod { s, _, _ := seen.snapshot(now); return s.Nodes[0].Pods[0] }
	g.Expect(shown().DRA).To(BeTrue(), "nothing is known yet")
	seen.know(cluster.Programs{Own: []string{"gpu-sharing-operator"}})
	g.Expect(shown().DRA).To(BeFalse())
	g.Expect(seen.known["a"].AgentReady).To(BeFalse())
}
