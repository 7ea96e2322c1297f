// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

func TestChartRendersWithEveryPreset(t *testing.T) {
	h := newHelm(t)
	g := NewWithT(t)
	presets, err := filepath.Glob(path(t, "config/helm/presets/*.yaml"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(presets).To(HaveLen(3))
	for _, preset := range presets {
		t.Run(filepath.Base(preset), func(t *testing.T) {
			_, err := h.template(t, "--values", preset)
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
		})
	}
}

// Helm itself passes on any field that a template has.
func TestChartHasNoFieldThatKubernetesDoesNotKnow(t *testing.T) {
	strict := map[string]func(testing.TB, *unstructured.Unstructured){
		"ClusterRole":                      known[rbacv1.ClusterRole],
		"ClusterRoleBinding":               known[rbacv1.ClusterRoleBinding],
		"ConfigMap":                        known[corev1.ConfigMap],
		"CustomResourceDefinition":         known[apiextensionsv1.CustomResourceDefinition],
		"DaemonSet":                        known[appsv1.DaemonSet],
		"Deployment":                       known[appsv1.Deployment],
		"NetworkPolicy":                    known[networkingv1.NetworkPolicy],
		"Pod":                              known[corev1.Pod],
		"PodDisruptionBudget":              known[policyv1.PodDisruptionBudget],
		"ResourceQuota":                    known[corev1.ResourceQuota],
		"Role":                             known[rbacv1.Role],
		"RoleBinding":                      known[rbacv1.RoleBinding],
		"Secret":                           known[corev1.Secret],
		"ServiceAccount":                   known[corev1.ServiceAccount],
		"ValidatingAdmissionPolicy":        known[admissionregistrationv1.ValidatingAdmissionPolicy],
		"ValidatingAdmissionPolicyBinding": known[admissionregistrationv1.ValidatingAdmissionPolicyBinding],
	}
	foreign := []string{"PodMonitor", "PrometheusRule", "SecurityContextConstraints"}
	for _, o := range newHelm(t).render(t, everything()...) {
		if check, isKnown := strict[o.GetKind()]; isKnown {
			check(t, o)
			continue
		}
		NewWithT(t).Expect(foreign).To(ContainElement(o.GetKind()))
	}
}

func known[T any](tb testing.TB, o *unstructured.Unstructured) {
	tb.Helper()
	as[T](tb, o)
}

func TestChartHasWhatWasGeneratedAsItIs(t *testing.T) {
	files := []string{
		"config/crd/gpusharing.io_gpunodes.yaml", "config/crd/gpusharing.io_gpusharingpolicies.yaml",
		"config/rbac/role.yaml", "config/manager/rbac.yaml", "config/agent/rbac.yaml",
		"config/agent/admission.yaml", "config/manager/installer.yaml", "config/openshift/scc.yaml", "config/metrics/rbac.yaml",
	}
	rendered := newHelm(t).render(t, everything()...)
	for _, file := range files {
		for _, source := range read(t, file) {
			t.Run(name(source), func(t *testing.T) {
				g := NewWithT(t)
				o := find(t, rendered, name(source))
				g.Expect(asGenerated(o)).To(Equal(asGenerated(source)), "run make manifests")
				g.Expect(o.GetLabels()).To(HaveKeyWithValue("app.kubernetes.io/part-of", "gpu-sharing-operator"))
				if source.GetNamespace() != "" {
					g.Expect(o.GetNamespace()).To(Equal(namespace))
				}
			})
		}
	}
}

func TestAdmissionPolicyNamesTheConfigMapOfAStandAlonePlugin(t *testing.T) {
	h, guard := newHelm(t), "ValidatingAdmissionPolicy gpu-sharing-controller-writes"
	configMaps := func(values ...string) any {
		policy := as[admissionregistrationv1.ValidatingAdmissionPolicy](t, find(t, h.render(t, values...), guard))
		for _, v := range policy.Spec.Variables {
			if v.Name == "configMaps" {
				return v.Expression
			}
		}
		return nil
	}
	g := NewWithT(t)
	g.Expect(configMaps()).To(Equal("['gpu-sharing-device-plugin', 'nvidia-plugin-configs']"))
	g.Expect(configMaps(everything()...)).To(Equal("['gpu-sharing-device-plugin', 'plugin-configs']"))
	for _, source := range read(t, "config/manager/admission.yaml") {
		g.Expect(asGenerated(find(t, h.render(t), name(source)))).To(Equal(asGenerated(source)), "run make manifests")
	}
}

// asGenerated is an object without what the chart adds.
func asGenerated(o *unstructured.Unstructured) map[string]any {
	c := o.DeepCopy()
	c.SetLabels(nil)
	annotations := c.GetAnnotations()
	delete(annotations, "helm.sh/resource-policy")
	if len(annotations) == 0 {
		annotations = nil
	}
	c.SetAnnotations(annotations)
	return c.Object
}

func TestChartIsAtHomeInTheNamespaceOfTheRelease(t *testing.T) {
	out, err := newHelm(t).run(t, append([]string{"template", release, path(t, "config/helm"), "--namespace", "elsewhere"},
		set(everything())...)...)
	g := NewWithT(t)
	g.Expect(err).NotTo(HaveOccurred())
	objects, err := env.Objects([]byte(out))
	g.Expect(err).NotTo(HaveOccurred())
	for _, o := range objects {
		g.Expect(o.GetNamespace()).To(BeElementOf("", "elsewhere", "nvidia-device-plugin"), name(o))
		subjects, _, err := unstructured.NestedSlice(o.Object, "subjects")
		g.Expect(err).NotTo(HaveOccurred())
		for _, s := range subjects {
			g.Expect(s).To(HaveKeyWithValue("namespace", "elsewhere"), name(o))
		}
	}
}

func TestValuesThatMakeNoSenseAreRefused(t *testing.T) {
	h := newHelm(t)
	tests := map[string]struct {
		value, says string
	}{
		"a misspelt name":                        {"controler.replicas=1", "additional properties 'controler' not allowed"},
		"a misspelt name further down":           {"agent.memory=1Gi", "at '/agent': additional properties 'memory' not allowed"},
		"no controller":                          {"controller.replicas=0", "at '/controller/replicas': minimum: got 0, want 1"},
		"a crowd of controllers":                 {"controller.replicas=6", "at '/controller/replicas': maximum: got 6, want 5"},
		"a device plugin in no place":            {"devicePlugin.configMap=a", "at '/devicePlugin/namespace': minLength: got 0, want 1"},
		"a device plugin without a ConfigMap":    {"devicePlugin.namespace=a", "at '/devicePlugin/configMap': minLength: got 0, want 1"},
		"a name that no ConfigMap can have":      {"devicePlugin.namespace=a,devicePlugin.configMap=a..b", "at '/devicePlugin/configMap': 'a..b' does not match pattern"},
		"a value of an earlier version is gone":  {"metrics.sampling=null", "Upgrade with --reset-then-reuse-values instead of --reuse-values"},
		"a relative driver root":                 {"driver.root=run/nvidia", "at '/driver/root': 'run/nvidia' does not match pattern"},
		"the root as the folder of MPS":          {"mps.root=/", "at '/mps/root': '/' does not match pattern"},
		"half a digest":                          {"images.agent.digest=sha256:12", "at '/images/agent/digest': 'sha256:12' does not match pattern"},
		"nodes of every kind":                    {"gpuNodes.selector=null", "at '/gpuNodes': missing property 'selector'"},
		"nodes without any label":                {`gpuNodes.selector.nvidia\.com/gpu\.present=null`, "at '/gpuNodes/selector': minProperties: got 0, want 1"},
		"a label value with a blank":             {`gpuNodes.selector.pool=a b`, "at '/gpuNodes/selector/pool': 'a b' does not match pattern"},
		"a switch that is no boolean":            {"crds.install=yes", "at '/crds/install': got string, want boolean"},
		"memory that is no quantity":             {"agent.resources.limits.memory=lots", "at '/agent/resources/limits/memory': 'lots' does not match pattern"},
		"an update of no node":                   {"agent.maxUnavailable=0%", "at '/agent/maxUnavailable': '0%' does not match pattern"},
		"a log level that is none":               {"logLevel=verbose", "at '/logLevel': value must be one of 'error', 'info', 'debug'"},
		"a monitor of metrics that nobody gives": {"metrics.podMonitor.enabled=true", "at '/metrics/enabled': value must be true"},
		"samples that nobody can read":           {"metrics.sampling.interval=60s", "at '/metrics/enabled': value must be true"},
		"a sampling interval without a unit":     {"metrics.enabled=true,metrics.sampling.interval=60x", "at '/metrics/sampling/interval'"},
		"alerts on what nobody measures":         {"metrics.enabled=true,metrics.prometheusRule.enabled=true", "at '/metrics/podMonitor/enabled': value must be true"},
		"an OpenShift that is none":              {"openshift.enabled=maybe", "at '/openshift/enabled': value must be one of true, false, 'auto'"},
		"a quota for no pod":                     {"priorityClassQuota.pods=0", "at '/priorityClassQuota/pods': minimum: got 0, want 3"},
		"a port that is none":                    {"networkPolicy.apiServerPorts[0]=0", "at '/networkPolicy/apiServerPorts/0': minimum: got 0, want 1"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := h.template(t, "--set", tc.value)
			NewWithT(t).Expect(err).To(MatchError(ContainSubstring(tc.says)))
		})
	}
}

// TestAnyConfigMapOfADevicePluginCanBeNamed: NVIDIA's chart adds -configs to its name, which has up to 63 characters.
func TestAnyConfigMapOfADevicePluginCanBeNamed(t *testing.T) {
	for _, name := range []string{"plugin.configs", strings.Repeat("a", 63) + "-configs", strings.Repeat("a", 253)} {
		NewWithT(t).Expect(validation.IsDNS1123Subdomain(name)).To(BeEmpty())
		objects := newHelm(t).render(t, "devicePlugin.namespace=nvidia,devicePlugin.configMap="+name)
		controller := podOf(t, find(t, objects, "Deployment gpu-sharing-controller"))
		NewWithT(t).Expect(controller.Spec.Containers[0].Args).To(ContainElement("--device-plugin-configmap=" + name))
	}
}

func TestEveryValueHasADefaultAndDoesSomething(t *testing.T) {
	g := NewWithT(t)
	defaults := read(t, "config/helm/values.yaml")[0].Object
	schema := read(t, "config/helm/values.schema.json")[0].Object
	templates := contents(t, "config/helm/templates/*.*", "config/helm/templates/*/*.*")
	values := leaves(schema, nil)
	g.Expect(len(values)).To(BeNumerically(">", 40))
	for _, value := range values {
		_, found, err := unstructured.NestedFieldNoCopy(defaults, value...)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(found).To(BeTrue(), "values.yaml has no %v", value)
		if value[0] != "images" { // looked up by the name of the image
			g.Expect(templates).To(ContainSubstring(".Values."+strings.Join(value, ".")), "the value does nothing")
		}
	}
}

// leaves are the paths of the values that a schema describes.
func leaves(schema map[string]any, at []string) [][]string {
	properties, _, err := unstructured.NestedMap(schema, "properties")
	if err != nil || len(properties) == 0 {
		return [][]string{at}
	}
	var paths [][]string
	for name, property := range properties {
		if child, isSchema := property.(map[string]any); isSchema && name != "global" {
			paths = append(paths, leaves(child, append(slices.Clone(at), name))...)
		}
	}
	return paths
}

// The CRDs, and the records of how nodes were, may go only once the plugin says that everything is restored.
func TestNotesNameTheCommandThatRestores(t *testing.T) {
	g := NewWithT(t)
	notes, err := os.ReadFile(path(t, "config/helm/templates/NOTES.txt"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(notes)).To(ContainSubstring("\n     kubectl gpusharing restore\n"))
	g.Expect(string(notes)).NotTo(ContainSubstring(".spec.policyName"), "a node without a policy may still be on its way back")
	description, _, err := unstructured.NestedString(read(t, csvFile)[0].Object, "spec", "description")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(description).To(And(ContainSubstring("`kubectl gpusharing restore`"), Not(ContainSubstring("kubectl get gpunodes"))), "of OLM's console")
}

// TestDocsNameTheReleaseThatTheReadmeInstalls: Helm knows no other.
func TestDocsNameTheReleaseThatTheReadmeInstalls(t *testing.T) {
	g := NewWithT(t)
	files, err := filepath.Glob(path(t, "docs/*.md"))
	g.Expect(err).NotTo(HaveOccurred())
	named := map[string][]string{}
	for _, file := range append(files, path(t, "README.md")) {
		text, err := os.ReadFile(file)
		g.Expect(err).NotTo(HaveOccurred())
		for _, found := range regexp.MustCompile("helm (?:install|upgrade|uninstall|test|rollback) ([a-z][a-z0-9-]*)").FindAllStringSubmatch(string(text), -1) {
			named[found[1]] = append(named[found[1]], filepath.Base(file))
		}
	}
	g.Expect(named).To(HaveLen(1), "%v", named)
	g.Expect(named["gpu-sharing-operator"]).To(ContainElements("README.md", "install.md", "monitoring.md"))
}

// TestOpenShiftIsDetected: a cluster that has the kind gets the SecurityContextConstraints, unless it is told
// otherwise.
func TestOpenShiftIsDetected(t *testing.T) {
	const constraints = "SecurityContextConstraints gpu-sharing-node"
	for title, tc := range map[string]struct {
		args []string
		has  bool
	}{
		"another cluster":          {nil, false},
		"OpenShift":                {[]string{"--api-versions", "security.openshift.io/v1/SecurityContextConstraints"}, true},
		"OpenShift, switched off":  {[]string{"--api-versions", "security.openshift.io/v1/SecurityContextConstraints", "--set", "openshift.enabled=false"}, false},
		"OpenShift in a rendering": {[]string{"--set", "openshift.enabled=true"}, true},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			objects, err := newHelm(t).template(t, tc.args...)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(slices.ContainsFunc(objects, func(o *unstructured.Unstructured) bool { return name(o) == constraints })).To(Equal(tc.has))
		})
	}
}

// TestPodsMayReachWhatTheValuesSay: DNS, by the port of OpenShift's too, and the API server.
func TestPodsMayReachWhatTheValuesSay(t *testing.T) {
	objects := newHelm(t).render(t, "networkPolicy.enabled=true", "networkPolicy.apiServerPorts={443}")
	for _, program := range []string{"gpu-sharing-controller", "gpu-sharing-agent"} {
		g := NewWithT(t)
		var ports []string
		for _, rule := range as[networkingv1.NetworkPolicy](t, find(t, objects, "NetworkPolicy "+program)).Spec.Egress {
			g.Expect(rule.To).To(BeEmpty())
			for _, port := range rule.Ports {
				ports = append(ports, string(*port.Protocol)+" "+port.Port.String())
			}
		}
		g.Expect(ports).To(ConsistOf("UDP 53", "TCP 53", "UDP 5353", "TCP 5353", "TCP 443"), program)
	}
}

// TestNotesSayWhatToDoWhereNoPodIsCreated: GKE's admission refuses the pods, and Helm reports success.
func TestNotesSayWhatToDoWhereNoPodIsCreated(t *testing.T) {
	g := NewWithT(t)
	h := newHelm(t)
	for value, says := range map[string]bool{"priorityClassQuota.enabled=false": true, "priorityClassQuota.enabled=true": false} {
		notes, err := h.run(t, "install", release, h.chart, "--dry-run=client", "--set", value)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(strings.Contains(notes, `"insufficient quota to match these scopes" (GKE)? Upgrade with --set priorityClassQuota.enabled=true.`)).To(Equal(says), value)
	}
}

// TestHelm3RendersWhatHelm4Renders: users have either.
func TestHelm3RendersWhatHelm4Renders(t *testing.T) {
	objects := func(script string) map[string]map[string]any {
		found := map[string]map[string]any{}
		// A Helm that is built from its module alone takes a version of Kubernetes for that of the cluster which the
		// chart refuses.
		rendered, err := helmOf(t, script).template(t, append(set(everything()), "--kube-version", "1.37.1")...)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		for _, o := range rendered {
			found[name(o)] = o.Object
		}
		return found
	}
	NewWithT(t).Expect(objects(helm3)).To(Equal(objects(helm4)))
}

// The schema takes an empty list: agents and MPS pods then tolerate nothing.
func TestNoTolerationsAtAllCanBeInstalled(t *testing.T) {
	objects, err := newHelm(t).template(t, "--set-json", "gpuNodes.tolerations=[]")
	g := NewWithT(t)
	g.Expect(err).NotTo(HaveOccurred())
	for _, o := range objects {
		if o.GetKind() == "DaemonSet" {
			_, has, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "tolerations")
			g.Expect(has).To(BeFalse(), o.GetName())
		}
	}
}

// TestTheAgentSeesControlGroupsWithTheFeatureGateAlone: the mount is the only thing that the gate adds to its rights.
func TestTheAgentSeesControlGroupsWithTheFeatureGateAlone(t *testing.T) {
	const gate = "--feature-gates=MemoryLimits=true"
	h := newHelm(t)
	for _, daemonSet := range []string{"DaemonSet gpu-sharing-agent", "DaemonSet gpu-sharing-agent-dra"} {
		g := NewWithT(t)
		without := podOf(t, find(t, h.render(t), daemonSet))
		with := podOf(t, find(t, h.render(t, "featureGates.MemoryLimits=true"), daemonSet))
		g.Expect(without.Spec.Containers[0].Args).NotTo(ContainElement(gate))
		g.Expect(with.Spec.Containers[0].Args).To(ContainElement(gate))
		last := len(with.Spec.Volumes) - 1
		g.Expect(with.Spec.Volumes[last].HostPath.Path).To(Equal("/sys/fs/cgroup"))
		mounts := with.Spec.Containers[0].VolumeMounts
		g.Expect(mounts[len(mounts)-1].MountPath).To(Equal("/sys/fs/cgroup"))
		with.Spec.Volumes, with.Spec.Containers[0].VolumeMounts, with.Spec.Containers[0].Args = with.Spec.Volumes[:last], mounts[:len(mounts)-1], without.Spec.Containers[0].Args
		g.Expect(with).To(Equal(without))
	}
}
