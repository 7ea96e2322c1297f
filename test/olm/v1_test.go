// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/olm"
)

// startV1 starts OLM v1.
func (s *site) startV1() {
	s.t.Helper()
	s.namespace(olm.NamespaceV1)
	host, _, _ := strings.Cut(s.registry, "/")
	programs, err := olm.V1(s.t.Context(), s.dir, host, host)
	s.Expect(err).NotTo(HaveOccurred())
	s.startAll(programs)
}

func (s *site) folder(name string) string {
	s.t.Helper()
	folder := filepath.Join(s.dir, name)
	s.Expect(os.MkdirAll(folder, 0o700)).To(Succeed())
	return folder
}

// installV1 installs as docs/install.md says.
func (s *site) installV1() {
	s.t.Helper()
	makes, waits := s.documentedV1()
	s.do(makes + waits)
	s.installed()
}

// documentedV1 are the commands that make the ClusterExtension, of what was published last, and the one that waits for it.
func (s *site) documentedV1() (makes, waits string) {
	s.t.Helper()
	const begins = "kubectl wait clusterextension"
	makes, waits, found := strings.Cut(strings.ReplaceAll(s.documented("With OLM v1", 1), "0.1.0", s.version), begins)
	s.Expect(found).To(BeTrue())
	return makes, begins + waits
}

// installed waits until the operator works: both Deployments have a pod that is ready.
func (s *site) installed() {
	s.t.Helper()
	for _, name := range []string{controller, operands} { // OLM v1 says that what was lost is installed, until it has looked
		s.Eventually(s.exists, wait, poll).WithArguments(object("apps/v1", "Deployment", own, name)).Should(BeTrue(), name)
	}
	s.do("kubectl -n gpu-sharing-operator wait deployment --all --for=condition=Available --timeout=2m")
}

// share creates a policy for each node, and waits until both are Ready.
func (s *site) share() {
	s.t.Helper()
	s.do(`kubectl apply -f - <<EOF
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: sliced}
spec:
  nodeSelector: {matchLabels: {kubernetes.io/hostname: gpu-t4}}
  sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}
---
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: parted}
spec:
  nodeSelector: {matchLabels: {kubernetes.io/hostname: gpu-a100}}
  sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g.5gb}]}}
EOF`)
	s.shared()
}

// shared waits until both policies are Ready, and checks what the nodes offer.
func (s *site) shared() {
	s.t.Helper()
	s.do("kubectl wait gpusharingpolicy --all --for=condition=Ready --timeout=2m")
	s.kept()
}

// kept checks that the nodes offer what the policies ask for.
func (s *site) kept() {
	s.t.Helper()
	s.Eventually(s.offers, wait, poll).WithArguments(nodeT4).Should(Equal(map[string]int64{"nvidia.com/gpu": 4}))
	s.Eventually(s.offers, wait, poll).WithArguments(nodeA100).Should(Equal(map[string]int64{"nvidia.com/gpu": 7}))
}

// refused checks that commands are refused, with what to do first.
func (s *site) refused(commands string) {
	s.t.Helper()
	s.Eventually(func() error { // an admission policy works some seconds after its objects are there
		_, err := s.try(commands + " --dry-run=server")
		return err
	}, wait, poll).Should(HaveOccurred(), commands)
	out, err := s.try(commands)
	s.Expect(err).To(HaveOccurred(), "%s\n%s", commands, out)
	s.Expect(out).To(MatchRegexp("(still shares GPUs, and would be deleted without restoring them|is not restored yet, and would be left as it is). First run: kubectl gpusharing restore"), commands)
}

// TestOLMv1 installs with an account that has the rights of config/olm/installer.yaml and no others, upgrades, loses the
// namespace, and uninstalls.
func TestOLMv1(t *testing.T) {
	s := newSite(t, "0.1.0", "extensions", "catalogs")
	s.startV1()
	before := s.snapshot()
	s.installV1()
	s.share()
	s.rights()
	s.accounts()
	s.mirrored()

	// With live policies nothing is deleted that could not be restored.
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
	s.refused("kubectl delete clusterextension gpu-sharing-operator --cascade=foreground --wait=false")
	s.refused("kubectl delete crd gpusharingpolicies.gpusharing.io --wait=false")
	s.refused("kubectl delete crd gpunodes.gpusharing.io --wait=false")

	// A second one takes nothing over, and goes although GPUs are shared.
	s.do(`kubectl apply -f - <<EOF
apiVersion: olm.operatorframework.io/v1
kind: ClusterExtension
metadata: {name: second}
spec:
  namespace: gpu-sharing-operator
  serviceAccount: {name: gpu-sharing-installer}
  source: {sourceType: Catalog, catalog: {packageName: gpu-sharing-operator}}
EOF`)
	s.Eventually(s.try, wait, poll).WithArguments(`kubectl get clusterextension second -o jsonpath='{.status.conditions[?(@.type=="Progressing")].message}'`).
		Should(ContainSubstring("cannot be managed by operator-controller"))
	s.do("kubectl delete clusterextension second")
	s.shared()

	uids := s.uids()
	s.publish("0.2.0")
	s.do(strings.ReplaceAll(s.documented("With OLM v1", 2), "0.1.0", s.version))
	s.Eventually(s.versionOf, wait, poll).WithArguments("gpu-sharing-controller").Should(Equal("0.2.0"))
	s.installed()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")

	s.settings()

	// The namespace takes the operator with it, and its installer. Policies and GPUs stay.
	s.do("kubectl delete namespace gpu-sharing-operator --timeout=2m")
	s.kept()
	s.installV1()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")

	// The policies are gone, and a node waits for a pod before it is restored.
	s.whileHeld("kubectl delete gpusharingpolicy --all")
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
	s.refused("kubectl delete crd gpunodes.gpusharing.io --wait=false")
	s.do("kubectl delete pod holder")
	s.uninstalls(s.documented("With OLM v1", 3), before)
}

// settings turns metrics on as docs/monitoring.md says: OLM v1 gives no environment.
func (s *site) settings() {
	s.t.Helper()
	root, err := env.Root()
	s.Expect(err).NotTo(HaveOccurred())
	page, err := os.ReadFile(filepath.Join(root, "docs", "monitoring.md"))
	s.Expect(err).NotTo(HaveOccurred())
	const begins = "kubectl -n gpu-sharing-operator create configmap"
	_, commands, found := strings.Cut(string(page), "```sh\n"+begins)
	s.Expect(found).To(BeTrue())
	commands, _, _ = strings.Cut(commands, "```")
	s.do(begins + commands)
	s.Eventually(s.try, wait, poll).WithArguments("kubectl -n gpu-sharing-operator get daemonset gpu-sharing-agent -o jsonpath='{.spec.template.spec.containers[0].args}'").
		Should(And(ContainSubstring("--metrics-bind-address=:8443"), ContainSubstring("--sampling-interval=60s")))
}

// uninstalls runs the commands that uninstall, after which the cluster is as it was before, and its nodes offer whole GPUs.
func (s *site) uninstalls(commands string, before map[string]string) {
	s.t.Helper()
	s.do(commands)
	s.Eventually(s.sinceThen(before), wait, rarely).Should(BeEmpty(), "uninstalled")
	for _, name := range []string{nodeT4, nodeA100} {
		s.Expect(s.offers(name)).To(Equal(map[string]int64{"nvidia.com/gpu": 1}))
	}
}

// uids are those of all policies and GPUNodes.
func (s *site) uids() map[string]string {
	s.t.Helper()
	all := map[string]string{}
	for _, kind := range []string{"GPUSharingPolicyList", "GPUNodeList"} {
		list := &unstructured.UnstructuredList{}
		list.SetAPIVersion("gpusharing.io/v1alpha1")
		list.SetKind(kind)
		s.Expect(s.client.List(s.t.Context(), list)).To(Succeed())
		for i := range list.Items {
			all[list.Items[i].GetName()] = string(list.Items[i].GetUID())
		}
	}
	return all
}

// versionOf is that of a Deployment of the operator.
func (s *site) versionOf(deployment string) (string, error) {
	o := object("apps/v1", "Deployment", own, deployment)
	err := s.client.Get(s.t.Context(), client.ObjectKeyFromObject(o), o)
	return o.GetLabels()["app.kubernetes.io/version"], client.IgnoreNotFound(err)
}

// as is a client of an account of the operator, which OLM has made.
func (s *site) as(account string) client.Client {
	s.t.Helper()
	there, err := s.exists(object("v1", "ServiceAccount", own, account))
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(there).To(BeTrue(), account)
	c, err := s.cluster.ClientAs(s.t.Context(), env.Identity{Namespace: own, ServiceAccount: account})
	s.Expect(err).NotTo(HaveOccurred())
	return c
}
