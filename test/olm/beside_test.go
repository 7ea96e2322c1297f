// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// bothOLMs starts both in a cluster where v0 has installed the operator, which shares the GPUs: that cluster before, and what the policies are.
func bothOLMs(t *testing.T) (s *site, before, uids map[string]string) {
	t.Helper()
	s = newSite(t, "0.1.0", "v0", "extensions", "catalogs")
	s.startV0()
	s.startV1()
	before = s.snapshot()
	s.catalogSource()
	s.installV0()
	s.share()
	uids = s.uids()
	return s, before, uids
}

// onV1 waits until OLM v1 has the operator, with the same policies and GPUNodes as before.
func (s *site) onV1(uids map[string]string) {
	s.t.Helper()
	s.installed()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
}

// TestHalfInstalledByOLMv1 makes the ClusterExtension while v0 still has all, which takes nothing and goes again; and once more where a quota refuses
// Deployments. That one owns the CRDs already: without it they would keep a reference to it, and OLM v1 could never install again.
func TestHalfInstalledByOLMv1(t *testing.T) {
	s, before, uids := bothOLMs(t)
	makes, _ := s.documentedV1()
	s.do(makes)
	s.saysV1("clusterextension gpu-sharing-operator", "cannot be managed by operator-controller")
	s.do("kubectl delete clusterextension gpu-sharing-operator --timeout=1m\nkubectl delete clustercatalog gpu-sharing\nkubectl delete -f bundle/installer.yaml")
	s.shared()
	s.Expect(s.phase(own)).To(Equal("Succeeded"))

	s.do(s.documented("From OLM v0 to v1", 1) + "\nkubectl -n gpu-sharing-operator create quota none --hard=count/deployments.apps=0")
	s.do(makes)
	s.saysV1("clusterextension gpu-sharing-operator", "quota")
	s.kept()
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
	s.do("kubectl -n gpu-sharing-operator delete quota none")
	s.onV1(uids)
	s.do(s.documented("From OLM v0 to v1", 2))
	s.uninstalls(s.documented("With OLM v1", 3), before)
}

// helm installs what was published by it.
const helm = "helm install gpu-sharing-operator oci://$REGISTRY/charts/gpu-sharing-operator --version 0.1.0 --plain-http --namespace gpu-sharing-operator --create-namespace"

// TestOLMv1OverHelm: where Helm has installed the operator, OLM is not told to, and Helm not where OLM v1 has. Who deletes what refuses it makes the
// ClusterExtension where Helm has a release of its name in its namespace, of which OLM v1 takes what it knows: then the operator says so.
func TestOLMv1OverHelm(t *testing.T) {
	s := newSite(t, "0.1.0", "v0", "extensions", "catalogs")
	s.startV1()
	before := s.snapshot()
	s.do(helm)
	s.share()
	uids := s.uids()
	s.refusedBesideHelm(s.subscription())
	s.refusedBesideHelm(s.documented("With OLM v1", 1))
	s.do("kubectl delete validatingadmissionpolicybinding gpu-sharing-one-installer")
	makes, _ := s.documentedV1()
	s.Eventually(s.try, wait, poll).WithArguments(makes).Should(ContainSubstring("clusterextension.olm.operatorframework.io/gpu-sharing-operator created"))
	s.told(own, "was installed by Helm, and not by OLM")
	advice, err := s.try("kubectl gpusharing doctor")
	s.Expect(err).To(HaveOccurred())
	s.Expect(advice).To(ContainSubstring("Several programs install the operator"))
	s.kept()
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
	s.do(s.documented("From Helm to OLM", 1))
	s.kept()
	s.onV1(uids)
	advice, _ = s.try("kubectl gpusharing doctor")
	s.Expect(advice).NotTo(ContainSubstring("Several programs install the operator"), "Helm has kept the kinds, and nothing else")
	out, err := s.try(helm)
	s.Expect(err).To(HaveOccurred())
	s.Expect(out).To(ContainSubstring("ClusterExtension gpu-sharing-operator installs the operator already"))
	s.shared()
	s.uninstalls(s.documented("With OLM v1", 3), before)
}

// TestOLMv1WhereHelmsNamespaceIsGone: who deletes it instead of the release leaves objects of no namespace, which refuse nothing.
func TestOLMv1WhereHelmsNamespaceIsGone(t *testing.T) {
	s := newSite(t, "0.1.0", "extensions", "catalogs")
	s.startV1()
	before := s.snapshot()
	s.do(helm)
	s.share()
	uids := s.uids()
	s.do("kubectl delete namespace gpu-sharing-operator --timeout=4m")
	s.kept()
	s.do(`kubectl create --dry-run=server -f - <<EOF
apiVersion: olm.operatorframework.io/v1
kind: ClusterExtension
metadata: {name: allowed}
spec:
  namespace: gpu-sharing-operator
  serviceAccount: {name: gpu-sharing-installer}
  source: {sourceType: Catalog, catalog: {packageName: gpu-sharing-operator}}
EOF`)
	_, withoutHelm, _ := strings.Cut(s.documented("From Helm to OLM", 1), "\n")
	s.do(withoutHelm)
	s.installV1()
	s.onV1(uids)
	s.uninstalls(s.documented("With OLM v1", 3), before)
}

// refusedBesideHelm checks that commands which have OLM install the operator are refused, with what to do first.
func (s *site) refusedBesideHelm(commands string) {
	s.t.Helper()
	out, err := s.try(commands)
	s.Expect(err).To(HaveOccurred())
	s.Expect(out).To(ContainSubstring("OLM would take over a part of it. First uninstall that"))
}

// TestOLMv0OverV1 subscribes where OLM v1 has installed the operator: v0 overwrites all without a word, but doctor says so, and how to go back.
func TestOLMv0OverV1(t *testing.T) {
	s := newSite(t, "0.1.0", "v0", "extensions", "catalogs")
	s.startV0()
	s.startV1()
	before := s.snapshot()
	s.installV1()
	s.share()
	uids := s.uids()
	s.catalogSource()
	s.installV0()
	advice, err := s.try("kubectl gpusharing doctor")
	s.Expect(err).To(HaveOccurred())
	s.Expect(advice).To(And(ContainSubstring("Several programs install the operator"), ContainSubstring("#from-olm-v0-to-v1")))
	s.kept()
	s.do(s.documented("From OLM v0 to v1", 1))
	s.onV1(uids)
	s.do(s.documented("From OLM v0 to v1", 2))
	const list = "\nkubectl delete operators.operators.coreos.com gpu-sharing-operator.gpu-sharing-operator --ignore-not-found" // which OLM v0 made anew
	s.uninstalls(s.documented("With OLM v1", 3)+list, before)
}
