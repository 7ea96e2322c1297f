// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// extension makes the ClusterExtension as docs/install.md says, and does not wait for it.
func (s *site) extension() {
	s.t.Helper()
	commands, _, _ := strings.Cut(s.documented("With OLM v1", 1), "kubectl wait clusterextension")
	s.do(strings.ReplaceAll(commands, "0.1.0", s.version))
}

// TestHalfInstalledByOLMv1 makes the ClusterExtension while v0 still has all, which takes nothing and goes again; and once more where a quota refuses
// Deployments. That one owns the CRDs already: without it they would keep a reference to it, and OLM v1 could never install again.
func TestHalfInstalledByOLMv1(t *testing.T) {
	s := newSite(t, "0.1.0", "v0", "extensions", "catalogs")
	s.startV0()
	s.startV1()
	before := s.snapshot()
	s.catalogSource()
	s.installV0()
	s.share()
	uids := s.uids()
	s.extension()
	s.saysV1("clusterextension gpu-sharing-operator", "cannot be managed by operator-controller")
	s.do("kubectl delete clusterextension gpu-sharing-operator --timeout=1m\nkubectl delete clustercatalog gpu-sharing\nkubectl delete -f bundle/installer.yaml")
	s.shared()
	s.Expect(s.phase(own)).To(Equal("Succeeded"))

	s.do(s.documented("From OLM v0 to v1", 1) + "\nkubectl -n gpu-sharing-operator create quota none --hard=count/deployments.apps=0")
	s.extension()
	s.saysV1("clusterextension gpu-sharing-operator", "quota")
	s.kept()
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
	s.do("kubectl -n gpu-sharing-operator delete quota none")
	s.installed()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
	s.do(s.documented("From OLM v0 to v1", 2))
	s.uninstalls(s.documented("With OLM v1", 3), before)
}

// TestOLMv1OverHelm makes the ClusterExtension where Helm has a release of its name in its namespace, of which OLM v1 takes what it knows.
func TestOLMv1OverHelm(t *testing.T) {
	s := newSite(t, "0.1.0", "extensions", "catalogs")
	s.startV1()
	before := s.snapshot()
	s.do("helm install gpu-sharing-operator oci://$REGISTRY/charts/gpu-sharing-operator --version 0.1.0 --plain-http --namespace gpu-sharing-operator --create-namespace")
	s.share()
	uids := s.uids()
	s.extension()
	s.told(own, "was installed by Helm, and not by OLM")
	s.kept()
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
	s.do("helm uninstall gpu-sharing-operator --namespace gpu-sharing-operator")
	s.kept()
	s.installed()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
	s.uninstalls(s.documented("With OLM v1", 3), before)
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
	s.installed()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
	s.do(s.documented("From OLM v0 to v1", 2))
	const list = "\nkubectl delete operators.operators.coreos.com gpu-sharing-operator.gpu-sharing-operator --ignore-not-found" // which OLM v0 made anew
	s.uninstalls(s.documented("With OLM v1", 3)+list, before)
}
