// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// serverOf tells servers from each other.
func serverOf(t *testing.T, cluster *env.Cluster) types.UID {
	t.Helper()
	ns := &corev1.Namespace{}
	NewWithT(t).Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: metav1.NamespaceSystem}, ns)).To(Succeed())
	return ns.UID
}

// left is what a test leaves on a server: something that keeps itself, guards others, grants rights, holds others or is
// a kind.
func left() []client.Object {
	kept := []string{"example.com/nobody-removes-this"}
	in := metav1.ObjectMeta{Namespace: "somewhere", Name: "left", Finalizers: kept}
	pod := &corev1.Pod{
		ObjectMeta: in,
		Spec:       corev1.PodSpec{NodeName: "left", Containers: []corev1.Container{{Name: "main", Image: "example.invalid/left"}}},
	}
	kind := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "leftovers.example.com"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "example.com", Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "leftovers", Kind: "Leftover"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object"}},
			}},
		},
	}
	return []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "somewhere"}},
		pod,
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "left"}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "left", Finalizers: kept}},
		&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "left", Finalizers: kept}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "left"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "somewhere", Name: "left"}},
		},
		kind,
		noPods(),
		&admissionv1.ValidatingAdmissionPolicyBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "left"},
			Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
				PolicyName: "left", ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
			},
		},
	}
}

// noPods denies to make or delete a pod.
func noPods() *admissionv1.ValidatingAdmissionPolicy {
	return &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "left"},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			FailurePolicy: new(admissionv1.Fail),
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
				RuleWithOperations: admissionv1.RuleWithOperations{
					Operations: []admissionv1.OperationType{admissionv1.OperationAll},
					Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
				},
			}}},
			Validations: []admissionv1.Validation{{Expression: "false"}},
		},
	}
}

func TestATestLeavesNothingToTheNext(t *testing.T) {
	var first types.UID
	var outlives client.Client
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "next"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "example.invalid/next"}}},
	}
	t.Run("one", func(t *testing.T) {
		g := NewWithT(t)
		cluster := env.Start(t, env.WithNVIDIA())
		first, outlives = serverOf(t, cluster), cluster.Client
		g.Expect(apiextensionsv1.AddToScheme(cluster.Scheme)).To(Succeed())
		_, err := cluster.ClientAs(t.Context(), env.Identity{Namespace: "somewhere", ServiceAccount: "left"})
		g.Expect(err).NotTo(HaveOccurred())
		for _, o := range left()[1:] {
			g.Expect(cluster.Client.Create(t.Context(), o)).To(Succeed(), "%T", o)
		}
		g.Eventually(func() bool {
			return apierrors.IsInvalid(cluster.Client.Create(t.Context(), pod.DeepCopy(), client.DryRunAll))
		}, time.Minute).Should(BeTrue(), "the policy applies")
		g.Expect(cluster.Denied(t.Context(), "left")).To(BeNumerically(">", 0))
	})
	t.Run("the next", func(t *testing.T) {
		g := NewWithT(t)
		cluster := env.Start(t)
		g.Expect(serverOf(t, cluster)).To(Equal(first))
		for _, o := range left() {
			g.Expect(cluster.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o)).NotTo(Succeed(), "%T", o)
		}
		nodes := &corev1.NodeList{}
		g.Expect(cluster.Client.List(t.Context(), nodes, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: "0"}})).To(Succeed())
		g.Expect(nodes.Items).To(BeEmpty(), "nor does an informer begin with them")
		g.Expect(cluster.Denied(t.Context(), "left")).To(BeZero())

		again, err := cluster.ClientAs(t.Context(), env.Identity{Namespace: "somewhere", ServiceAccount: "left"})
		g.Expect(err).NotTo(HaveOccurred(), "the namespace is a new one")
		g.Expect(apierrors.IsForbidden(again.List(t.Context(), nodes))).To(BeTrue(), "the rights are gone")
		g.Expect(cluster.Client.Create(t.Context(), pod.DeepCopy())).To(Succeed(), "the policy is gone")
		g.Expect(outlives.Create(context.WithoutCancel(t.Context()), pod.DeepCopy())).To(MatchError(ContainSubstring("has ended")))

		policies := &unstructured.UnstructuredList{}
		policies.SetAPIVersion("nvidia.com/v1")
		policies.SetKind("ClusterPolicyList")
		g.Expect(cluster.Client.List(t.Context(), policies)).NotTo(Succeed(), "it has the CRDs that it asks for and no others")
	})
	t.Run("with versions that a test changed", func(t *testing.T) {
		cluster := env.Start(t, env.WithNVIDIA())
		NewWithT(t).Expect(serverOf(t, cluster)).To(Equal(first))
		NewWithT(t).Expect(cluster.Serve(t.Context(), "clusterpolicies.nvidia.com")).To(Succeed())
	})
	t.Run("and the one after", func(t *testing.T) {
		g := NewWithT(t)
		cluster := env.Start(t, env.WithNVIDIA())
		g.Expect(serverOf(t, cluster)).To(Equal(first))
		policies := &unstructured.UnstructuredList{}
		policies.SetAPIVersion("nvidia.com/v1")
		policies.SetKind("ClusterPolicyList")
		g.Expect(cluster.Client.List(t.Context(), policies)).To(Succeed())
	})
	t.Run("where Kubernetes' own objects were changed", func(t *testing.T) {
		cluster := env.Start(t)
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceDefault}}
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"changed":"yes"}}}`))
		NewWithT(t).Expect(cluster.Client.Patch(t.Context(), ns, patch)).To(Succeed())
	})
	t.Run("they are as they were", func(t *testing.T) {
		g := NewWithT(t)
		cluster := env.Start(t)
		g.Expect(serverOf(t, cluster)).To(Equal(first))
		ns := &corev1.Namespace{}
		g.Expect(cluster.Client.Get(t.Context(), client.ObjectKey{Name: metav1.NamespaceDefault}, ns)).To(Succeed())
		g.Expect(ns.Labels).NotTo(HaveKey("changed"))
	})
}

func TestTestsAtTheSameTimeHaveServersOfTheirOwn(t *testing.T) {
	NewWithT(t).Expect(serverOf(t, env.Start(t))).NotTo(Equal(serverOf(t, env.Start(t))))
}

// killed is the variable by which the test binary learns that it is the process to be killed.
const killed = "GPUSHARING_TEST_KILLED"

func TestNothingStaysOfTestsThatAreKilled(t *testing.T) {
	g := NewWithT(t)
	if os.Getenv(killed) != "" {
		env.Start(t)
		fmt.Println("started")
		select {}
	}
	temporary := t.TempDir()
	self, err := os.Executable()
	g.Expect(err).NotTo(HaveOccurred())
	tests := exec.Command(self, "-test.run=^"+t.Name()+"$")
	tests.Env = append(os.Environ(), killed+"=yes", "TMPDIR="+temporary)
	out, err := tests.StdoutPipe()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(tests.Start()).To(Succeed())
	said := make([]byte, len("started"))
	_, err = out.Read(said)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(said)).To(Equal("started"))
	g.Expect(programsOf(temporary)).To(HaveLen(2), "etcd and kube-apiserver")
	g.Expect(tests.Process.Kill()).To(Succeed())
	_ = tests.Wait()
	g.Eventually(func() []string { return programsOf(temporary) }, time.Minute).Should(BeEmpty())
	g.Eventually(func() ([]string, error) { return filepath.Glob(temporary + "/*") }, time.Minute).Should(BeEmpty())
}

// programsOf lists the programs with a folder below this one as an argument.
func programsOf(folder string) []string {
	var programs []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		line, _ := os.ReadFile(file)
		if strings.Contains(string(line), "="+folder+"/") {
			programs = append(programs, string(line))
		}
	}
	return programs
}
