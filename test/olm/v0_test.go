// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/olm"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

// startV0 starts OLM v0.
func (s *site) startV0() {
	s.t.Helper()
	s.namespace(olm.NamespaceV0)
	s.startAll(olm.V0("example.com/opm:1", "example.com/olm:1"))
}

// namespace makes a namespace, which has its account before anybody takes a snapshot.
func (s *site) namespace(name string) {
	s.t.Helper()
	s.Expect(s.client.Create(s.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})).To(Succeed())
	s.Eventually(s.exists, wait, poll).WithArguments(object("v1", "ServiceAccount", name, "default")).Should(BeTrue())
}

// startAll starts OLM's programs, each of which without can end for a while.
func (s *site) startAll(programs []olm.Program) {
	s.t.Helper()
	for _, p := range programs {
		start := func() (stop func()) {
			return s.start(p.Name, filepath.Join(s.bin, p.Name), s.cluster.Config, p.Args...)
		}
		s.programs[p.Name] = &program{start: start, stop: start()}
	}
}

// program is one of OLM.
type program struct {
	start func() (stop func())
	stop  func()
}

// without does something while a program of OLM does not run.
func (s *site) without(name string, do func()) {
	s.t.Helper()
	p := s.programs[name]
	p.stop()
	do()
	p.stop = p.start()
}

// catalogSource makes the CatalogSource of what was published last.
func (s *site) catalogSource() {
	s.t.Helper()
	s.do(strings.ReplaceAll(s.documented("With OLM v0", 1), "0.1.0", s.version))
}

// installV0 installs as docs/install.md says.
func (s *site) installV0() {
	s.t.Helper()
	s.do(s.subscription())
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
}

// upgradeV0 upgrades as docs/install.md says to what was published last.
func (s *site) upgradeV0() {
	s.t.Helper()
	s.do(strings.ReplaceAll(s.documented("With OLM v0", 3), "0.1.0", s.version))
}

// notInstalled waits until OLM's users are told why the operator is not installed in a namespace.
func (s *site) notInstalled(namespace, why string) {
	s.t.Helper()
	s.told(namespace, why)
	s.Expect(s.phase(namespace)).NotTo(Equal("Succeeded"))
}

// told waits until Events say why the operands are not installed in a namespace.
func (s *site) told(namespace, why string) {
	s.t.Helper()
	s.Eventually(s.try, wait, poll).WithArguments("kubectl -n " + namespace + " get events --field-selector reason=OperandsNotInstalled -o jsonpath='{.items[*].message}'").
		Should(ContainSubstring(why))
}

// subscription are the commands that install.
func (s *site) subscription() string {
	s.t.Helper()
	return s.documented("With OLM v0", 2)
}

// phase is that of the ClusterServiceVersion in a namespace.
func (s *site) phase(namespace string) (string, error) {
	return s.try("kubectl -n " + namespace + " get csv -o jsonpath='{.items[*].status.phase}'")
}

// uninstallV0 deletes what installed the operator, in an order.
func (s *site) uninstallV0(kinds ...string) {
	s.t.Helper()
	for _, kind := range kinds {
		s.do("kubectl -n gpu-sharing-operator delete --all " + kind)
	}
	s.Eventually(s.exists, wait, poll).WithArguments(object("apps/v1", "Deployment", own, "gpu-sharing-controller")).Should(BeFalse())
}

// refusedElsewhere checks that the operator does not begin in another namespace than that of its MPS pods, and says why.
func (s *site) refusedElsewhere() {
	s.t.Helper()
	const why = "the operator is installed in namespace gpu-sharing-operator already, or was: daemonset gpu-sharing-operator/gpu-sharing-mps is there."
	before := s.logged("controller", why)
	s.do(strings.NewReplacer("namespace: "+own, "namespace: second", "\n  name: "+own, "\n  name: second").Replace(s.subscription()))
	s.notInstalled("second", "The operator is installed in namespace gpu-sharing-operator already, or was: ") // and the end: what to do
	s.Eventually(s.logged, wait, poll).WithArguments("controller", why).Should(BeNumerically(">", before))
	s.Expect(s.do("kubectl -n second get daemonsets")).To(ContainSubstring("No resources found"))
	s.kept()
	s.do("SECOND=second\n" + s.documented("With the Operator Lifecycle Manager", 1))
	s.Consistently(s.exists, 5*time.Second, poll).WithArguments(object("operators.coreos.com/v1", "Operator", "", own+".second")).Should(BeFalse())
}

// logged counts how often a program has logged a text.
func (s *site) logged(program, text string) int {
	s.t.Helper()
	log, err := os.ReadFile(filepath.Join(s.dir, program+".log"))
	s.Expect(err).NotTo(HaveOccurred())
	return strings.Count(string(log), text)
}

// TestOLMv0 upgrades from the previous version, and uninstalls in every order with live policies and takes them up again.
func TestOLMv0(t *testing.T) {
	s := newSite(t, previous.Version, "v0")
	s.startV0()
	before := s.snapshot()
	s.catalogSource()
	s.installV0()
	s.share()
	uids := s.uids()

	s.publish("0.2.0")
	s.upgradeV0()
	s.Eventually(s.versionOf, wait, poll).WithArguments(controller).Should(Equal("0.2.0"))
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"), "of one, the previous one is gone")
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
	account := object("v1", "ServiceAccount", own, mpsPods)
	s.Expect(s.exists(account)).To(BeTrue())
	s.Expect(account.GetOwnerReferences()).To(BeEmpty(), "it does not go with the previous ClusterServiceVersion")
	s.rights()
	s.accounts("update operatorconditions gpu-sharing-operator.v0.2.0", "patch operatorconditions gpu-sharing-operator.v0.2.0")
	s.editors()
	s.refused("kubectl delete crd gpusharingpolicies.gpusharing.io --wait=false")
	s.refused("kubectl delete crd gpunodes.gpusharing.io --wait=false")

	s.uninstallV0("subscription", "csv", "operatorgroup")
	s.kept()
	s.refusedElsewhere()
	s.installV0()
	s.shared()

	// The namespace goes first, with the operator in it. OLM tries to install it again for as long as the namespace goes.
	s.do("kubectl delete namespace gpu-sharing-operator --timeout=4m")
	s.kept()
	s.installV0()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")

	// The policies are gone, and a node waits for a pod before it is restored. Installed again, the operator finishes that.
	s.whileHeld("kubectl delete gpusharingpolicy --all")
	s.refused("kubectl delete crd gpunodes.gpusharing.io --wait=false")
	s.uninstallV0("csv", "subscription")
	s.do("kubectl delete pod holder")
	s.installV0()
	s.uninstalls(s.documented("With OLM v0", 4), before)
}

// TestFromOLMv0ToV1 goes on to OLM v1 where policies live.
func TestFromOLMv0ToV1(t *testing.T) {
	s, before, uids := bothOLMs(t)
	s.uninstallV0("csv", "subscription")
	s.kept()
	s.toV1()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
	s.do(s.documented("From OLM v0 to v1", 2))
	s.uninstalls(s.documented("With OLM v1", 3), before)
}

// toV1 goes on with OLM v1 where v0 has uninstalled the operator, by commands that doctor prints.
func (s *site) toV1() {
	s.t.Helper()
	advice, err := s.try("kubectl gpusharing doctor")
	s.Expect(err).To(HaveOccurred(), "no controller runs")
	documented := s.documented("From OLM v0 to v1", 1)
	for _, command := range slices.Collect(strings.Lines(documented))[1:] { // the first one was run
		s.Expect(advice).To(ContainSubstring(command))
	}
	s.do(documented)
	s.installV1()
	s.shared()
}
