// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"context"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	mpsPods    = "gpu-sharing-mps"
	controller = "gpu-sharing-controller"
	operands   = "gpu-sharing-operands"
	elsewhere  = metav1.NamespaceSystem
)

// escalation makes administrators.
const escalation = "applies a privileged DaemonSet with the account that adds up ClusterRoles"

// attempt is what an account tries in a dry run.
type attempt func(context.Context, client.Client) error

// rights checks with dry runs what the accounts that OLM has made may do: what docs/security.md says that they may not is
// refused, by RBAC or by an admission policy.
func (s *site) rights() {
	s.t.Helper()
	accounts := &corev1.ServiceAccountList{}
	s.Expect(s.client.List(s.t.Context(), accounts, client.InNamespace(own))).To(Succeed())
	tried := map[string]client.Client{}
	for _, account := range accounts.Items {
		if account.Name != "default" && account.Name != "gpu-sharing-installer" {
			tried[account.Name] = s.as(account.Name)
		}
	}
	s.Expect(tried).To(And(HaveKey(controller), HaveKey(operands), HaveKey("gpu-sharing-agent"), HaveKey(mpsPods)))

	// What is allowed comes first: so what is refused is not refused for want of the rights.
	for account, all := range permitted() {
		for what, try := range all {
			s.Eventually(func() error { return client.IgnoreNotFound(try(s.t.Context(), tried[account])) }, 20*time.Second, poll).Should(Succeed(), account+" "+what)
		}
	}
	for account, c := range tried {
		for what, try := range forAll() {
			s.forbidden(account+" "+what, try(s.t.Context(), c))
		}
		for what, try := range forbiddenTo()[account] {
			s.forbidden(account+" "+what, try(s.t.Context(), c))
		}
	}
}

func (s *site) forbidden(what string, err error) {
	s.t.Helper()
	s.Expect(apierrors.IsForbidden(err)).To(BeTrue(), "%s: not forbidden: %v", what, err)
}

// permitted is some of what accounts need.
func permitted() map[string]map[string]attempt {
	return map[string]map[string]attempt{
		operands: {
			"applies a DaemonSet of the operator":            apply(daemonSet(mpsPods, own, mpsPods)),
			"applies the account of the MPS pods":            apply(object("v1", "ServiceAccount", own, mpsPods)),
			"applies the admission policy of the controller": patch(binding("gpu-sharing-controller-writes"), `{"metadata": {"labels": {"a": "b"}}}`),
			"reads where the operator is":                    get(binding("gpu-sharing-mps-nodes")),
			"looks for MPS pods in all namespaces":           get(object("apps/v1", "DaemonSet", elsewhere, mpsPods)),
		},
		controller: {
			"creates its Lease":      create(object("coordination.k8s.io/v1", "Lease", own, controller)),
			"creates a NodeFeature":  create(feature(own)),
			"selects a config":       patch(node(), `{"metadata": {"labels": {"nvidia.com/device-plugin.config": "a"}}}`),
			"sets the ClusterPolicy": patch(clusterPolicy(), `{"spec": {"devicePlugin": {"config": {"name": "a"}}}}`),
		},
	}
}

// forAll is what no account of the operator may do.
func forAll() map[string]attempt {
	pod := object("v1", "Pod", own, "a")
	pod.Object["spec"] = map[string]any{"containers": []any{map[string]any{"name": "a", "image": "a"}}}
	deployment := daemonSet("a", own, controller)
	deployment.SetKind("Deployment")
	return map[string]attempt{
		escalation:                                       apply(daemonSet(mpsPods, elsewhere, "clusterrole-aggregation-controller")),
		"applies a DaemonSet of another name":            apply(daemonSet("other", own, mpsPods)),
		"deletes a DaemonSet in another namespace":       remove(daemonSet(mpsPods, elsewhere, mpsPods)),
		"creates a Deployment":                           create(deployment),
		"creates a pod":                                  create(pod),
		"reads Secrets":                                  get(object("v1", "Secret", own, "a")),
		"applies an account in another namespace":        apply(object("v1", "ServiceAccount", elsewhere, mpsPods)),
		"creates a Lease in another namespace":           create(object("coordination.k8s.io/v1", "Lease", elsewhere, controller)),
		"creates a NodeFeature in another namespace":     create(feature(elsewhere)),
		"deletes a NodeFeature in another namespace":     remove(feature(elsewhere)),
		"changes a Role":                                 apply(object(rbacv1.GroupName+"/v1", "Role", own, operands)),
		"creates a RoleBinding in another namespace":     apply(roleBinding("RoleBinding", elsewhere)),
		"creates a ClusterRoleBinding":                   apply(roleBinding("ClusterRoleBinding", "")),
		"deletes a Node":                                 remove(node()),
		"cordons a Node":                                 patch(node(), `{"spec": {"unschedulable": true}}`),
		"sets another label of a Node":                   patch(node(), `{"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}`),
		"adds a taint that ends pods":                    patch(node(), `{"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}`),
		"changes an image in the ClusterPolicy":          patch(clusterPolicy(), `{"spec": {"driver": {"image": "a"}}}`),
		"creates another ConfigMap":                      create(object("v1", "ConfigMap", elsewhere, "a")),
		"deletes a CRD":                                  remove(object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "gpunodes.gpusharing.io")),
		"deletes the admission policy of the controller": remove(binding("gpu-sharing-controller-writes")),
		"changes another admission policy":               apply(binding("other")),
		"deletes a policy":                               remove(object("gpusharing.io/v1alpha1", "GPUSharingPolicy", "", "sliced")),
		"changes a policy":                               patch(object("gpusharing.io/v1alpha1", "GPUSharingPolicy", "", "sliced"), `{"spec": {"priority": 7}}`),
		"writes what an agent reports, without a node":   patchStatus(gpuNode(), `{"status": {"driverVersion": "a"}}`),
	}
}

// forbiddenTo is what single accounts may not do beyond that.
func forbiddenTo() map[string]map[string]attempt {
	limit := patch(binding("gpu-sharing-controller-writes"), `{"metadata": {"labels": {"a": "b"}}}`)
	labels := patch(node(), `{"metadata": {"labels": {"nvidia.com/device-plugin.config": "a"}}}`)
	spec := patch(gpuNode(), `{"spec": {"policyName": "a"}}`)
	return map[string]map[string]attempt{
		controller: {
			"changes its limit":     limit,
			"applies its DaemonSet": apply(daemonSet(mpsPods, own, mpsPods)),
			"creates a NodeFeature with a label of another owner": create(func() *unstructured.Unstructured {
				o := feature(own)
				o.Object["spec"] = map[string]any{"labels": map[string]any{"node-role.kubernetes.io/control-plane": ""}}
				return o
			}()),
		},
		operands:            {"labels a Node": labels, "writes a GPUNode": spec},
		"gpu-sharing-agent": {"labels a Node": labels, "writes a GPUNode": spec, "changes the limit": limit},
		mpsPods:             {"labels a Node": labels, "reads a GPUNode": get(gpuNode())},
	}
}

// editors checks that users with Kubernetes' role edit write no GPUNode. OLM v0 adds a role to that for each kind.
func (s *site) editors() {
	s.t.Helper()
	s.do("kubectl create clusterrolebinding eve --clusterrole=edit --user=eve")
	defer s.do("kubectl delete clusterrolebinding eve")
	config := rest.CopyConfig(s.cluster.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "eve", Groups: []string{"system:authenticated"}}
	eve, err := client.New(config, client.Options{Scheme: s.cluster.Scheme})
	s.Expect(err).NotTo(HaveOccurred())
	policy := patch(object("gpusharing.io/v1alpha1", "GPUSharingPolicy", "", "sliced"), `{"spec": {"priority": 7}}`)
	s.Eventually(func() error { return policy(s.t.Context(), eve) }, 20*time.Second, poll).Should(Succeed(), "OLM lets her write policies")
	s.forbidden("writes a GPUNode", patch(gpuNode(), `{"spec": {"policyName": "a"}}`)(s.t.Context(), eve))
	s.forbidden("deletes a GPUNode", remove(gpuNode())(s.t.Context(), eve))
}

func gpuNode() *unstructured.Unstructured {
	return object("gpusharing.io/v1alpha1", "GPUNode", "", nodeT4)
}

func node() *unstructured.Unstructured { return object("v1", "Node", "", nodeT4) }

func clusterPolicy() *unstructured.Unstructured {
	return object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy")
}

func binding(name string) *unstructured.Unstructured {
	return object("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", "", name)
}

func feature(namespace string) *unstructured.Unstructured {
	o := object("nfd.k8s-sigs.io/v1alpha1", "NodeFeature", namespace, "zz-gpu-sharing-n1")
	o.Object["spec"] = map[string]any{}
	return o
}

func daemonSet(name, namespace, account string) *unstructured.Unstructured {
	o := object("apps/v1", "DaemonSet", namespace, name)
	labels := map[string]any{"app.kubernetes.io/name": name}
	o.Object["spec"] = map[string]any{"selector": map[string]any{"matchLabels": labels}, "template": map[string]any{
		"metadata": map[string]any{"labels": labels}, "spec": map[string]any{"serviceAccountName": account, "containers": []any{
			map[string]any{"name": "x", "image": "x", "securityContext": map[string]any{"privileged": true}},
		}},
	}}
	return o
}

func roleBinding(kind, namespace string) *unstructured.Unstructured {
	o := object(rbacv1.GroupName+"/v1", kind, namespace, operands)
	o.Object["roleRef"] = map[string]any{"apiGroup": rbacv1.GroupName, "kind": "ClusterRole", "name": "cluster-admin"}
	return o
}

func apply(o *unstructured.Unstructured) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(o.DeepCopy()), client.FieldOwner("test"), client.ForceOwnership, client.DryRunAll)
	}
}

func create(o *unstructured.Unstructured) attempt {
	return func(ctx context.Context, c client.Client) error {
		return client.IgnoreAlreadyExists(c.Create(ctx, o.DeepCopy(), client.DryRunAll))
	}
}

func remove(o *unstructured.Unstructured) attempt {
	return func(ctx context.Context, c client.Client) error { return c.Delete(ctx, o.DeepCopy(), client.DryRunAll) }
}

func get(o *unstructured.Unstructured) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Get(ctx, client.ObjectKeyFromObject(o), o.DeepCopy())
	}
}

func patch(o *unstructured.Unstructured, content string) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Patch(ctx, o.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(content)), client.DryRunAll)
	}
}

func patchStatus(o *unstructured.Unstructured, content string) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Status().Patch(ctx, o.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(content)), client.DryRunAll)
	}
}
