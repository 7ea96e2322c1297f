// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const csvFile = "config/bundle/manifests/gpu-sharing-operator.clusterserviceversion.yaml"

// bundler runs hack/bundle, a module of its own.
func bundler(t *testing.T, folder, command string) (string, error) {
	t.Helper()
	run := exec.CommandContext(t.Context(), "go", "run", ".", "-root", path(t), "-bundle", folder, command)
	run.Dir = path(t, "hack/bundle")
	return output(run)
}

func TestBundleIsAsItWouldBeGeneratedNow(t *testing.T) {
	g := NewWithT(t)
	fresh, committed := filepath.Join(t.TempDir(), "bundle"), path(t, "config/bundle")
	_, err := bundler(t, fresh, "generate")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(files(t, fresh)).To(Equal(files(t, committed)), "run make bundle")
}

// files are those of a folder: their contents by their paths.
func files(t *testing.T, folder string) map[string]string {
	t.Helper()
	contents := map[string]string{}
	err := filepath.WalkDir(folder, func(file string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(file)
		contents[strings.TrimPrefix(file, folder)] = string(data)
		return err
	})
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return contents
}

func TestBundlePassesTheOperatorFrameworksValidation(t *testing.T) {
	_, err := bundler(t, path(t, "config/bundle"), "validate")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
}

func TestValidationFindsWhatIsWrong(t *testing.T) {
	tests := map[string]struct {
		file, from, to, says string
	}{
		"no icon":                     {"manifests/gpu-sharing-operator.clusterserviceversion.yaml", "mediatype: image/svg+xml", "mediatype: text/plain", "does not have a valid mediatype"},
		"a kind that OLM cannot make": {"manifests/gpu-sharing-operands.configmap.yaml", "kind: ConfigMap", "kind: DaemonSet", "OLM installs no DaemonSet"},
		"a CRD that nobody describes": {"manifests/gpu-sharing-operator.clusterserviceversion.yaml", "kind: GPUNode\n      name: gpunodes.gpusharing.io\n      resources", "kind: Node\n      name: gpunodes.gpusharing.io\n      resources", `owned CRD "gpusharing.io/v1alpha1, Kind=Node" not found in bundle`},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			broken := filepath.Join(t.TempDir(), "bundle")
			g.Expect(os.CopyFS(broken, os.DirFS(path(t, "config/bundle")))).To(Succeed())
			file := filepath.Join(broken, tc.file)
			data, err := os.ReadFile(file)
			g.Expect(err).NotTo(HaveOccurred())
			edited := strings.Replace(string(data), tc.from, tc.to, 1)
			g.Expect(edited).NotTo(Equal(string(data)))
			g.Expect(os.WriteFile(file, []byte(edited), 0o600)).To(Succeed())
			_, err = bundler(t, broken, "validate")
			g.Expect(err).To(MatchError(ContainSubstring(tc.says)))
		})
	}
}

// csv is what these tests look at of a ClusterServiceVersion.
type csv struct {
	Spec struct {
		Install struct {
			Spec struct {
				ClusterPermissions, Permissions []permissions
				Deployments                     []struct {
					Name  string
					Label map[string]string
					Spec  appsv1.DeploymentSpec
				}
			}
		}
		RelatedImages []struct{ Name, Image string }
		Version       string
	}
}

type permissions struct {
	ServiceAccountName string
	Rules              []rbacv1.PolicyRule
}

func readCSV(t *testing.T) csv {
	t.Helper()
	var c csv
	data, err := read(t, csvFile)[0].MarshalJSON()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(json.Unmarshal(data, &c)).To(Succeed())
	return c
}

func TestBundleIsOfTheSameReleaseAsTheChart(t *testing.T) {
	g := NewWithT(t)
	chart := read(t, "config/helm/Chart.yaml")[0]
	c := readCSV(t)
	g.Expect(c.Spec.Version).To(Equal(chart.Object["version"]))
	g.Expect(chart.Object["appVersion"]).To(Equal(chart.Object["version"]))
	minimum, _, err := unstructured.NestedString(read(t, csvFile)[0].Object, "spec", "minKubeVersion")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(chart.Object["kubeVersion"]).To(Equal(">=" + version.MustParseSemantic(minimum).String() + "-0"))

	rendered := newHelm(t).render(t)
	controller := as[appsv1.Deployment](t, find(t, rendered, "Deployment gpu-sharing-controller"))
	agent := as[appsv1.DaemonSet](t, find(t, rendered, "DaemonSet gpu-sharing-agent"))
	var images []string
	for _, image := range c.Spec.RelatedImages {
		images = append(images, image.Image)
	}
	g.Expect(images).To(ConsistOf(controller.Spec.Template.Spec.Containers[0].Image, agent.Spec.Template.Spec.Containers[0].Image))
}

// Images that are named by digest tell no version: kubectl gpusharing doctor reads it from these labels. They are in no
// selector, which Kubernetes lets nobody change.
func TestVersionsStandInTheLabelsOfDeploymentsAndAgents(t *testing.T) {
	g := NewWithT(t)
	released := HaveKeyWithValue("app.kubernetes.io/version", read(t, "config/helm/Chart.yaml")[0].Object["appVersion"])
	rendered := newHelm(t).render(t)
	g.Expect(find(t, rendered, "Deployment gpu-sharing-controller").GetLabels()).To(released)
	for _, d := range readCSV(t).Spec.Install.Spec.Deployments {
		g.Expect(d.Label).To(released, d.Name)
	}
	for _, objects := range [][]*unstructured.Unstructured{rendered, installedByOLM(t)} {
		for _, name := range []string{"DaemonSet gpu-sharing-agent", "DaemonSet gpu-sharing-agent-dra"} {
			agents := as[appsv1.DaemonSet](t, find(t, objects, name))
			g.Expect(agents.Spec.Template.Labels).To(released, name)
			g.Expect(agents.Spec.Selector.MatchLabels).NotTo(released, name)
		}
	}
}

// OLM v1 gives nobody a way to set the environment of a Deployment.
func TestAConfigMapSetsWhatASubscriptionMaySet(t *testing.T) {
	g := NewWithT(t)
	settings := map[string][]string{}
	for _, d := range readCSV(t).Spec.Install.Spec.Deployments {
		container := d.Spec.Template.Spec.Containers[0]
		g.Expect(container.TerminationMessagePolicy).To(Equal(corev1.TerminationMessageFallbackToLogsOnError), "a wrong one is told by the pod")
		for _, e := range container.Env {
			if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
				from := e.ValueFrom.ConfigMapKeyRef
				g.Expect(from.Name).To(Equal("gpu-sharing-settings"))
				g.Expect(from.Key).To(Equal(e.Name))
				g.Expect(from.Optional).To(HaveValue(BeTrue()), "most clusters have none")
				settings[d.Name] = append(settings[d.Name], e.Name)
			}
		}
	}
	g.Expect(settings).To(Equal(map[string][]string{
		"gpu-sharing-controller": {"METRICS_BIND_ADDRESS", "FEATURE_GATES"}, "gpu-sharing-operands": {"METRICS_BIND_ADDRESS", "SAMPLING_INTERVAL", "FEATURE_GATES"},
	}))
}

// installedByOLM is what internal/controller/agentinstall installs from the bundle and what goes with the operator.
func installedByOLM(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	operands := as[corev1.ConfigMap](t, read(t, "config/bundle/manifests/gpu-sharing-operands.configmap.yaml")[0])
	objects, err := env.Objects([]byte(operands.Data["owned.yaml"]))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return objects
}

func TestBundleGivesTheSameRightsAsTheChart(t *testing.T) {
	g := NewWithT(t)
	rendered := withoutTests(newHelm(t).render(t, "openshift.enabled=true", "metrics.enabled=true"))
	install := readCSV(t).Spec.Install.Spec
	g.Expect(install.Permissions).To(BeEmpty(), "OLM would make ClusterRoles of them")
	clusterWide, namespaced := map[string][]rbacv1.PolicyRule{}, rulesOf(t, namespacedRights(t), "Role")
	for _, p := range install.ClusterPermissions {
		g.Expect(p.ServiceAccountName).NotTo(Equal("gpu-sharing-mps"), "OLM would delete this account, which stays with the MPS pods")
		clusterWide[p.ServiceAccountName] = p.Rules
	}
	for kind, given := range map[string]map[string][]rbacv1.PolicyRule{"ClusterRole": clusterWide, "Role": namespaced} {
		inChart := rulesOf(t, rendered, kind)
		delete(given, "gpu-sharing-operands") // only OLM needs it
		g.Expect(slices.Collect(maps.Keys(given))).To(ConsistOf(slices.Collect(maps.Keys(inChart))), kind)
		for account, rules := range given {
			g.Expect(rules).To(ConsistOf(inChart[account]), kind+" of "+account)
		}
	}
}

// rulesOf are the rules that the bindings to roles of a kind give to each service account.
func rulesOf(t *testing.T, objects []*unstructured.Unstructured, kind string) map[string][]rbacv1.PolicyRule {
	t.Helper()
	rules := map[string][]rbacv1.PolicyRule{}
	for _, o := range objects {
		if !slices.Contains([]string{"ClusterRoleBinding", "RoleBinding"}, o.GetKind()) {
			continue
		}
		binding := as[rbacv1.ClusterRoleBinding](t, o)
		if binding.RoleRef.Kind != kind {
			continue
		}
		role := as[rbacv1.ClusterRole](t, find(t, objects, kind+" "+binding.RoleRef.Name))
		for _, subject := range binding.Subjects {
			rules[subject.Name] = append(rules[subject.Name], role.Rules...)
		}
	}
	return rules
}
