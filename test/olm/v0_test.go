// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const catalogs = "olm" // the namespace of OLM v0 and of its CatalogSources

// startV0 starts OLM v0 with a CatalogSource of what was published, by the address of a program.
func (s *site) startV0() (serve func()) {
	s.t.Helper()
	s.Expect(s.client.Create(s.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: catalogs}})).To(Succeed())
	s.start("olm", filepath.Join(s.bin, "olm"), s.cluster.Config, "--namespace="+catalogs)
	s.start("catalog", filepath.Join(s.bin, "catalog"), s.cluster.Config, "--namespace="+catalogs,
		"--opmImage=example.com/opm:1", "--util-image=example.com/olm:1")
	address := s.freeAddress()
	_, port, _ := strings.Cut(address, ":")
	stop := func() {}
	serve = func() {
		s.t.Helper()
		stop()
		folder := s.folder("catalog-" + filepath.Base(s.released))
		s.Expect(os.Link(filepath.Join(s.released, "catalog.yaml"), filepath.Join(folder, "catalog.yaml"))).To(Succeed())
		stop = s.start("opm", filepath.Join(s.bin, "opm"), s.cluster.Config, "serve", folder, "--port="+port,
			"--cache-dir="+s.folder("cache-"+filepath.Base(s.released)), "--cache-enforce-integrity=false", "--termination-log="+filepath.Join(s.dir, "termination"))
	}
	serve()
	s.do(fmt.Sprintf(`kubectl apply -f - <<EOF
apiVersion: operators.coreos.com/v1alpha1
kind: CatalogSource
metadata: {name: gpu-sharing, namespace: %s}
spec: {sourceType: grpc, address: "%s"}
EOF`, catalogs, address))
	return serve
}

// installV0 installs as docs/install.md says.
func (s *site) installV0() {
	s.t.Helper()
	s.do(s.subscription())
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
}

// subscription are the commands that install, but for the name of the namespace in which catalogs are.
func (s *site) subscription() string {
	s.t.Helper()
	return strings.ReplaceAll(s.documented("With OLM v0", 2), "openshift-marketplace", catalogs)
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

// TestOLMv0 installs, upgrades, uninstalls in every order with live policies and takes them up again, and goes on to OLM
// v1.
func TestOLMv0(t *testing.T) {
	s := newSite(t, "0.1.0", "v0", "extensions", "catalogs")
	serve := s.startV0()
	s.startV1()
	before := s.snapshot()
	s.installV0()
	s.share()
	uids := s.uids()
	s.rights()
	s.editors()

	s.refused("kubectl delete crd gpusharingpolicies.gpusharing.io --wait=false")
	s.refused("kubectl delete crd gpunodes.gpusharing.io --wait=false")

	s.publish("0.2.0")
	serve()
	s.Eventually(s.versionOf, wait, poll).WithArguments("gpu-sharing-controller").Should(Equal("0.2.0"))
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
	s.shared()

	for _, order := range [][]string{{"subscription", "csv"}, {"csv", "subscription"}, {"operatorgroup", "csv", "subscription"}} {
		s.uninstallV0(order...)
		s.kept()
		s.installV0()
		s.shared()
	}
	s.do("kubectl delete namespace gpu-sharing-operator --timeout=2m")
	s.kept()
	s.installV0()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")

	s.uninstallV0("subscription", "csv")
	s.installV1()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
	s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")

	s.do(s.documented("With OLM v1", 3))
	s.Eventually(s.sinceThen(before), wait, time.Second).Should(BeEmpty(), "uninstalled")
	s.wholeAgain()

	s.installV0()
	s.share()
	s.do(s.documented("With OLM v0", 3))
	s.Eventually(s.sinceThen(before), wait, time.Second).Should(BeEmpty(), "uninstalled")
	s.wholeAgain()
}
