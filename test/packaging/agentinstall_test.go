// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"testing/fstest"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/agentinstall"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const (
	olmNamespace = "operators"
	agentImage   = "mirror.example.com/agent@sha256:0123"
)

// underOLM is a cluster in which OLM has done its part: service accounts, their rights and Deployments, but no
// operands.
type underOLM struct {
	*env.Cluster
	owner      *appsv1.Deployment
	account    env.Identity // of the program that installs operands
	manifests  map[string]string
	controller *agentinstall.Controller
}

func newUnderOLM(t *testing.T, openshift bool, agents ...agentinstall.Agents) underOLM {
	t.Helper()
	g := NewWithT(t)
	cluster := env.Start(t)
	g.Expect(cluster.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: olmNamespace}})).To(Succeed())
	if openshift {
		_, err := envtest.InstallCRDs(cluster.Config, envtest.CRDInstallOptions{MaxTime: time.Minute, CRDs: []*apiextensionsv1.CustomResourceDefinition{scc()}})
		g.Expect(err).NotTo(HaveOccurred())
	}
	u := underOLM{Cluster: cluster}
	for _, d := range readCSV(t).Spec.Install.Spec.Deployments {
		u.owner = &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: olmNamespace, Name: d.Name}, Spec: d.Spec}
		g.Expect(cluster.Client.Create(t.Context(), u.owner)).To(Succeed())
	}
	const account = "gpu-sharing-operands"
	g.Expect(u.owner.Name).To(Equal(account))
	u.account = env.Identity{Namespace: olmNamespace, ServiceAccount: account}
	c, err := cluster.ClientAs(t.Context(), u.account)
	g.Expect(err).NotTo(HaveOccurred())
	grantAsOLM(t, cluster)

	data := read(t, "config/bundle/manifests/gpu-sharing-operands.configmap.yaml")
	manifests := fstest.MapFS{}
	u.manifests = as[corev1.ConfigMap](t, data[0]).Data
	for key, content := range u.manifests {
		manifests[key] = &fstest.MapFile{Data: []byte(content)}
	}
	u.controller = agentinstall.New(c, agentinstall.Options{
		Owner:     types.NamespacedName{Namespace: olmNamespace, Name: account},
		Manifests: manifests, Images: map[string]string{"gpu-sharing-agent": agentImage},
		Agents: append(agents, agentinstall.Agents{})[0], Events: events.NewFakeRecorder(8),
	})
	return u
}

// scc is OpenShift's kind as far as the API server needs to know it.
func scc() *apiextensionsv1.CustomResourceDefinition {
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "securitycontextconstraints.security.openshift.io"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "security.openshift.io", Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{
				Plural: "securitycontextconstraints", Singular: "securitycontextconstraints", Kind: "SecurityContextConstraints",
				ListKind: "SecurityContextConstraintsList",
			},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", XPreserveUnknownFields: new(true),
				}},
			}},
		},
	}
}

// grantAsOLM gives the service accounts what the bundle asks for, as OLM does where the operator watches all
// namespaces: what a CSV permits in a namespace it permits everywhere, and Roles and RoleBindings of the bundle are
// created in the operator's namespace.
// https://github.com/operator-framework/operator-lifecycle-manager/blob/v0.45.0/pkg/controller/operators/olm/operatorgroup.go
func grantAsOLM(t *testing.T, cluster *env.Cluster) {
	t.Helper()
	install := readCSV(t).Spec.Install.Spec
	var objects []client.Object
	for i, p := range slices.Concat(install.ClusterPermissions, install.Permissions) {
		meta := metav1.ObjectMeta{Name: fmt.Sprintf("gpu-sharing-operator.v1-%d", i)}
		objects = append(objects, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: p.Rules}, &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: olmNamespace, Name: p.ServiceAccountName}},
		})
	}
	for _, o := range namespacedRights(t) {
		o.SetNamespace(olmNamespace)
		objects = append(objects, o)
	}
	for _, o := range objects {
		NewWithT(t).Expect(cluster.Client.Create(t.Context(), o)).To(Succeed())
	}
}

// namespacedRights are the Roles and RoleBindings of the bundle.
func namespacedRights(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	files, err := filepath.Glob(path(t, "config/bundle/manifests/*.role*.yaml"))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	var objects []*unstructured.Unstructured
	for _, file := range files {
		objects = append(objects, read(t, filepath.Join("config/bundle/manifests", filepath.Base(file)))...)
	}
	return objects
}

func (u underOLM) daemonSet(t *testing.T, name string) *appsv1.DaemonSet {
	t.Helper()
	d := &appsv1.DaemonSet{}
	NewWithT(t).Expect(u.Client.Get(t.Context(), types.NamespacedName{Namespace: olmNamespace, Name: name}, d)).To(Succeed())
	return d
}

func TestOLMUsersGetAgentAndMPSPodsWithTheBundlesRightsAlone(t *testing.T) {
	u := newUnderOLM(t, true)
	g := NewWithT(t)
	_, err := u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())

	agent, mps := u.daemonSet(t, "gpu-sharing-agent"), u.daemonSet(t, "gpu-sharing-mps")
	g.Expect(agent.Spec.Template.Spec.Containers[0].Image).To(Equal(agentImage))
	g.Expect(mps.Spec.Template.Spec.Containers[0].Image).To(Equal(agentImage))
	g.Expect(mps.Spec.Template.Spec.InitContainers[0].Image).To(Equal(agentImage))
	g.Expect(agent.OwnerReferences).To(ConsistOf(HaveField("UID", u.owner.UID)), "it goes with the operator")
	dra := u.daemonSet(t, "gpu-sharing-agent-dra")
	g.Expect(dra.Spec.Template.Spec.Containers[0].Image).To(Equal(agentImage))
	g.Expect(dra.OwnerReferences).To(Equal(agent.OwnerReferences))
	g.Expect(mps.OwnerReferences).To(BeEmpty(), "MPS clients live on when the operator is uninstalled")
	account := &corev1.ServiceAccount{}
	g.Expect(u.Client.Get(t.Context(), types.NamespacedName{Namespace: olmNamespace, Name: mps.Spec.Template.Spec.ServiceAccountName}, account)).To(Succeed())
	g.Expect(account.OwnerReferences).To(BeEmpty(), "MPS pods can be created again when the operator is uninstalled")
	constraints := object("security.openshift.io/v1", "SecurityContextConstraints", "", "gpu-sharing-node")
	g.Expect(u.Client.Get(t.Context(), client.ObjectKeyFromObject(constraints), constraints)).To(Succeed())
	g.Expect(constraints.Object["users"]).To(Equal([]any{"system:serviceaccount:" + olmNamespace + ":" + account.Name}), "also on OpenShift")
	for _, o := range []client.Object{
		object("security.openshift.io/v1", "SecurityContextConstraints", "", "gpu-sharing-node"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", "gpu-sharing-agent-own-node"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", "gpu-sharing-agent-own-node"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", "gpu-sharing-controller-writes"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", "gpu-sharing-controller-writes"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", "gpu-sharing-in-use"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", "gpu-sharing-in-use"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", "gpu-sharing-mps-nodes"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", "gpu-sharing-mps-nodes"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", "gpu-sharing-not-restored"),
		object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", "gpu-sharing-not-restored"),
	} {
		g.Expect(u.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o)).To(Succeed())
	}

	_, err = u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(u.daemonSet(t, "gpu-sharing-agent").ResourceVersion).To(Equal(agent.ResourceVersion), "a second reconcile changes nothing")
	g.Expect(u.daemonSet(t, "gpu-sharing-mps").ResourceVersion).To(Equal(mps.ResourceVersion))

	edited := agent.DeepCopy()
	edited.Spec.Template.Spec.Containers[0].Image = "another/image"
	g.Expect(u.Client.Patch(t.Context(), edited, client.MergeFrom(agent))).To(Succeed())
	_, err = u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(u.daemonSet(t, "gpu-sharing-agent").Spec.Template.Spec.Containers[0].Image).To(Equal(agentImage), "what a user changed is restored")
}

// The previous version's ClusterServiceVersion owned the account, and OLM deletes it after an upgrade: garbage collection would take the
// account along, and no MPS pod could start any more.
func TestWhatStaysBelongsToNoClusterServiceVersion(t *testing.T) {
	u := newUnderOLM(t, false)
	g := NewWithT(t)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: olmNamespace, Name: "gpu-sharing-mps", OwnerReferences: []metav1.OwnerReference{{
		APIVersion: "operators.coreos.com/v1alpha1", Kind: "ClusterServiceVersion", Name: "gpu-sharing-operator.v0.0.9", UID: "1",
	}}}}
	g.Expect(u.Client.Create(t.Context(), account)).To(Succeed())

	_, err := u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(u.Client.Get(t.Context(), client.ObjectKeyFromObject(account), account)).To(Succeed())
	g.Expect(account.OwnerReferences).To(BeEmpty())
	g.Expect(u.daemonSet(t, "gpu-sharing-agent").OwnerReferences).NotTo(BeEmpty(), "the agent goes with the operator")
}

func TestWhatAnotherControllerDeletesIsInstalledAgainWithinAMinute(t *testing.T) {
	u := newUnderOLM(t, false)
	g := NewWithT(t)
	result, err := u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(result.RequeueAfter).To(BeNumerically(">", 0), "the next reconcile comes without an event")
	g.Expect(result.RequeueAfter).To(BeNumerically("<=", time.Minute))
	binding := object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", "gpu-sharing-controller-writes")
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: olmNamespace, Name: "gpu-sharing-mps"}}
	for _, o := range []client.Object{binding, account} {
		g.Expect(u.Client.Delete(t.Context(), o)).To(Succeed())
	}

	_, err = u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())
	for _, o := range []client.Object{binding, account} {
		g.Expect(u.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o)).To(Succeed())
	}
}

func TestWithoutOpenShiftNoSCCIsMissed(t *testing.T) {
	u := newUnderOLM(t, false)
	g := NewWithT(t)
	_, err := u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())
	u.daemonSet(t, "gpu-sharing-agent")
}

// TestOLMUsersGiveAgentsWhatHelmDoes: they then serve what Helm's agents serve, so that `kubectl gpusharing top` finds their port, and see the
// same of the node.
func TestOLMUsersGiveAgentsWhatHelmDoes(t *testing.T) {
	u := newUnderOLM(t, false, agentinstall.Agents{
		Args: []string{"--metrics-bind-address=:8443", "--sampling-interval=60s", "--feature-gates=MemoryLimits=true"}, Port: 8443, Cgroups: true,
	})
	g := NewWithT(t)
	_, err := u.controller.Reconcile(t.Context(), u.owner)
	g.Expect(err).NotTo(HaveOccurred())
	byHelm := podOf(t, find(t, newHelm(t).render(t, "metrics.enabled=true", "metrics.sampling.interval=60s", "featureGates.MemoryLimits=true"), "DaemonSet gpu-sharing-agent")).Spec
	for _, name := range []string{"gpu-sharing-agent", "gpu-sharing-agent-dra"} {
		pod := u.daemonSet(t, name).Spec.Template.Spec
		agent := pod.Containers[0]
		g.Expect(agent.Args).To(ConsistOf(byHelm.Containers[0].Args), name)
		g.Expect(agent.VolumeMounts).To(ConsistOf(byHelm.Containers[0].VolumeMounts), name)
		g.Expect(pod.Volumes).To(ConsistOf(byHelm.Volumes), name)
		ports := map[string]int32{}
		for _, port := range agent.Ports {
			ports[port.Name] = port.ContainerPort
		}
		g.Expect(ports).To(Equal(map[string]int32{"metrics": 8443, "health": 8081}), name)
	}
	g.Expect(u.daemonSet(t, "gpu-sharing-mps").Spec.Template.Spec.Containers[0].Ports).To(BeEmpty())
	top := as[rbacv1.Role](t, read(t, "config/bundle/manifests/gpu-sharing-top.role.yaml")[0])
	g.Expect(top.Namespace).To(BeEmpty(), "OLM puts it where the operator is")
	g.Expect(top.Rules).To(Equal(as[rbacv1.Role](t, find(t, newHelm(t).render(t, "metrics.enabled=true"), "Role gpu-sharing-top")).Rules))
}

func TestTheProgramRestoresWhatAUserDeletes(t *testing.T) {
	u := newUnderOLM(t, true)
	g := NewWithT(t)
	u.startProgram(t)
	agent := object("apps/v1", "DaemonSet", olmNamespace, "gpu-sharing-agent")
	there := func() error { return u.Client.Get(t.Context(), client.ObjectKeyFromObject(agent), agent) }
	g.Eventually(there, time.Minute).Should(Succeed())
	first := agent.GetUID()
	g.Expect(u.Client.Delete(t.Context(), agent)).To(Succeed())
	g.Eventually(func() (types.UID, error) { err := there(); return agent.GetUID(), err }, time.Minute).ShouldNot(Equal(first))
}

// startProgram runs the program itself, with the rights of its account, until the test ends.
func (u underOLM) startProgram(t *testing.T) {
	t.Helper()
	g := NewWithT(t)
	folder := t.TempDir()
	for file, content := range u.manifests {
		g.Expect(os.WriteFile(filepath.Join(folder, file), []byte(content), 0o600)).To(Succeed())
	}
	config, err := u.ConfigAs(t.Context(), u.account)
	g.Expect(err).NotTo(HaveOccurred())
	kubeconfig := filepath.Join(folder, "kubeconfig")
	g.Expect(env.WriteKubeconfig(config, kubeconfig)).To(Succeed())

	ctx, stop := context.WithCancel(t.Context())
	program := exec.CommandContext(ctx, shipped(t, "controller"), "operands", "--manifests="+folder,
		"--namespace="+olmNamespace, "--health-probe-bind-address=0", "--kubeconfig="+kubeconfig)
	program.Env = []string{"RELATED_IMAGE_AGENT=" + agentImage}
	program.Stderr = t.Output()
	g.Expect(program.Start()).To(Succeed())
	t.Cleanup(func() {
		stop()
		_ = program.Wait() // it was killed
	})
}
