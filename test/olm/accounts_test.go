// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// documentedWrites are the rows of the table in docs/security.md of what the controller may write, each with the verbs and
// resources that it means. Those with an exclamation mark hold in the operator's namespace alone.
func documentedWrites() map[string][]string {
	return map[string][]string{
		"patch nodes": {"patch nodes"},
		"create pods/eviction; patch, delete pods": {"create pods/eviction", "patch pods", "delete pods"},
		"create, get configmaps; all but update on `gpu-sharing-device-plugin`": {
			"create configmaps", "patch configmaps gpu-sharing-device-plugin", "delete configmaps gpu-sharing-device-plugin",
		},
		"patch clusterpolicies": {"patch clusterpolicies"},
		"create, patch, delete deviceclasses, devicetaintrules": {
			"create deviceclasses", "patch deviceclasses", "delete deviceclasses", "create devicetaintrules", "patch devicetaintrules", "delete devicetaintrules",
		},
		"create, patch, delete nodefeatures in its own namespace":                            {"create nodefeatures!", "patch nodefeatures!", "delete nodefeatures!"},
		"with `autoscaling.manage=true` only: nodeoverlays, machinesets, machinedeployments": nil,
		"the status of policies, GPUNodes, leases, events": {
			"patch gpusharingpolicies/status", "patch gpunodes/status", "create gpunodes", "patch gpunodes", "delete gpunodes",
			"create leases!", "update leases gpu-sharing-controller!", "create events", "patch events",
		},
		"subjectaccessreviews": {"create subjectaccessreviews"},
	}
}

// limits are the rows of the other table there, each with what an admission policy denies the controller although it has
// the right, or, for autoscalers, the right that it lacks under OLM.
func (s *site) limits() map[string][]attempt {
	s.t.Helper()
	pod := object("v1", "Pod", "default", "of-a-user")
	pod.Object["spec"] = map[string]any{"containers": []any{map[string]any{"name": "a", "image": "a"}}}
	s.do("kubectl get pod of-a-user || kubectl run of-a-user --image=a")
	class := object("resource.k8s.io/v1", "DeviceClass", "", "of-another")
	class.Object["spec"] = map[string]any{}
	rule := object("resource.k8s.io/v1", "DeviceTaintRule", "", "of-another")
	rule.Object["spec"] = map[string]any{
		"taint": map[string]any{"key": "example.com/a", "effect": "NoExecute"}, "deviceSelector": map[string]any{"driver": "gpu.nvidia.com", "pool": "a"},
	}
	settings := object("v1", "ConfigMap", nvidia, "other")
	other := feature(own)
	other.Object["spec"] = map[string]any{"labels": map[string]any{"node-role.kubernetes.io/control-plane": ""}}
	strange := feature(own)
	strange.SetName("of-another")
	return map[string][]attempt{
		"Nodes": {
			patch(node(), `{"metadata": {"labels": {"a": "b"}}}`), patch(node(), `{"spec": {"unschedulable": true}}`),
			patch(node(), `{"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}`), patch(node(), `{"spec": {"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]}}`),
		},
		"Pods":                            {patch(pod, `{"metadata": {"labels": {"a": "b"}}}`), patch(pod, `{"spec": {"containers": [{"name": "of-a-user", "image": "b"}]}}`), create(pod), remove(pod)},
		"ClusterPolicies":                 {patch(clusterPolicy(), `{"spec": {"driver": {"image": "a"}}}`), patch(clusterPolicy(), `{"spec": {"devicePlugin": {"env": [{"name": "a", "value": "b"}]}}}`)},
		"ConfigMaps":                      {create(settings)},
		"NodeFeatures":                    {create(other), create(strange)},
		"DeviceClasses, DeviceTaintRules": {create(class), create(rule)},
		"NodeOverlays, MachineSets, MachineDeployments": nil,
	}
}

// accounts checks that the tables of docs/security.md are what the API server says about the controller's account, and that
// the other accounts may write no more than it says, nor OLM gives them more than that.
func (s *site) accounts(byOLM ...string) {
	s.t.Helper()
	rows := tableOfSecurity(s.t, "| Right | For |")
	s.Expect(slices.Sorted(maps.Keys(documentedWrites()))).To(Equal(rows))
	// "Read GPUNodes and patch their status", "none", and on OpenShift the constraints of their own.
	there := map[string][]string{"gpu-sharing-agent": {"patch gpunodes/status"}, mpsPods: nil}
	here := map[string][]string{controller: slices.Clone(byOLM)}
	for account, writes := range there {
		here[account] = append(slices.Clone(writes), "use securitycontextconstraints gpu-sharing-node")
	}
	here["gpu-sharing-agent"] = append(here["gpu-sharing-agent"], byOLM...)
	for _, writes := range documentedWrites() {
		for _, write := range writes {
			name, namespaced := strings.CutSuffix(write, "!")
			here[controller] = append(here[controller], name)
			if !namespaced {
				there[controller] = append(there[controller], name)
			}
		}
	}
	for account := range here {
		s.Expect(s.writes(account, own)).To(ConsistOf(here[account]), account)
		s.Expect(s.writes(account, elsewhere)).To(ConsistOf(there[account]), account)
	}
	limits := s.limits()
	s.Expect(slices.Sorted(maps.Keys(limits))).To(Equal(tableOfSecurity(s.t, "| Object | May change |")))
	c := s.as(controller)
	for row, attempts := range limits {
		for _, try := range attempts {
			s.forbidden(row, try(s.t.Context(), c))
		}
	}
	s.do("kubectl delete pod of-a-user --grace-period=0 --force")
}

// writes are the verbs other than for reading, with resources and names, that an account has in a namespace.
func (s *site) writes(account, namespace string) []string {
	s.t.Helper()
	config, err := s.cluster.ConfigAs(s.t.Context(), env.Identity{Namespace: own, ServiceAccount: account})
	s.Expect(err).NotTo(HaveOccurred())
	c, err := kubernetes.NewForConfig(config)
	s.Expect(err).NotTo(HaveOccurred())
	review := &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace}}
	review, err = c.AuthorizationV1().SelfSubjectRulesReviews().Create(s.t.Context(), review, metav1.CreateOptions{})
	s.Expect(err).NotTo(HaveOccurred())
	found := map[string]bool{}
	for _, rule := range review.Status.ResourceRules {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				everybody := strings.HasPrefix(resource, "selfsubject") // of every account
				if everybody || slices.Contains([]string{"get", "list", "watch"}, verb) {
					continue
				}
				for _, name := range rule.ResourceNames {
					found[verb+" "+resource+" "+name] = true
				}
				if len(rule.ResourceNames) == 0 {
					found[verb+" "+resource] = true
				}
			}
		}
	}
	return slices.Collect(maps.Keys(found))
}

// tableOfSecurity are the first cells of a table of docs/security.md, by its first line, sorted.
func tableOfSecurity(t *testing.T, head string) (rows []string) {
	t.Helper()
	root, err := env.Root()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	data, err := os.ReadFile(filepath.Join(root, "docs", "security.md"))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	_, table, found := strings.Cut(string(data), head)
	NewWithT(t).Expect(found).To(BeTrue(), head)
	table, _, _ = strings.Cut(table, "\n\n")
	for _, line := range strings.Split(table, "\n")[2:] {
		rows = append(rows, strings.TrimSpace(strings.Split(line, "|")[1]))
	}
	slices.Sort(rows)
	return rows
}

// mirrored checks that every image of the operator's objects and pods is one that the bundle lists, by its digest: who
// mirrors the catalog mirrors all of them.
func (s *site) mirrored() {
	s.t.Helper()
	catalog, err := os.ReadFile(filepath.Join(s.released, "catalog.yaml"))
	s.Expect(err).NotTo(HaveOccurred())
	used := map[string]bool{}
	for _, kind := range []string{"DeploymentList", "DaemonSetList", "PodList"} {
		list := &unstructured.UnstructuredList{}
		list.SetAPIVersion(map[bool]string{true: "v1", false: "apps/v1"}[kind == "PodList"])
		list.SetKind(kind)
		s.Expect(s.client.List(s.t.Context(), list, client.InNamespace(own))).To(Succeed())
		s.Expect(list.Items).NotTo(BeEmpty(), kind)
		for i := range list.Items {
			data, err := list.Items[i].MarshalJSON()
			s.Expect(err).NotTo(HaveOccurred())
			for _, image := range regexp.MustCompile(`"image":"([^"]+)"`).FindAllStringSubmatch(string(data), -1) {
				used[image[1]] = true
			}
		}
	}
	_, related, found := strings.Cut(string(catalog), "\nrelatedImages:\n")
	s.Expect(found).To(BeTrue())
	s.Expect(len(used)).To(BeNumerically(">=", 2))
	for image := range used {
		s.Expect(image).To(ContainSubstring("@sha256:"))
		s.Expect(related).To(ContainSubstring("image: " + image + "\n"))
	}
}
