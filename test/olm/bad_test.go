// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// TestBadLuckUnderOLMv0 lets go wrong what goes wrong in clusters: it is said where an administrator looks, nothing is lost,
// and once it is mended all goes on by itself.
func TestBadLuckUnderOLMv0(t *testing.T) {
	s := newSite(t, "0.1.0", "v0")
	s.startV0()
	before := s.snapshot()
	s.catalogSource()

	// There is an agent that OLM has not installed, the OperatorGroup names a namespace, and an admission policy refuses DaemonSets.
	s.do("kubectl create namespace gpu-sharing-operator")
	s.Expect(s.client.Create(t.Context(), daemonSet("gpu-sharing-agent", own, "default"))).To(Succeed())
	s.do(`kubectl apply -f - <<EOF
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-daemonsets}
spec:
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: gpu-sharing-operator}}
    resourceRules: [{apiGroups: [apps], apiVersions: ["*"], operations: [CREATE], resources: [daemonsets]}]
  validations: [{expression: 'false', message: no DaemonSet is welcome here}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-daemonsets}
spec: {policyName: no-daemonsets, validationActions: [Deny]}
EOF`)
	const group = "kind: OperatorGroup\nmetadata: {name: gpu-sharing-operator, namespace: gpu-sharing-operator}\n"
	s.Expect(s.subscription()).To(ContainSubstring(group))
	s.do(strings.Replace(s.subscription(), group, group+"spec: {targetNamespaces: [gpu-sharing-operator]}\n", 1))
	s.Eventually(s.try, wait, poll).WithArguments("kubectl -n gpu-sharing-operator get csv -o jsonpath='{.items[*].status.message}'").
		Should(ContainSubstring("OwnNamespace InstallModeType not supported"))
	s.do(`kubectl -n gpu-sharing-operator patch operatorgroup gpu-sharing-operator --type=merge --patch='{"spec": {"targetNamespaces": null}}'`)
	s.notInstalled(own, "DaemonSet gpu-sharing-operator/gpu-sharing-agent was installed by kubectl or kustomize")
	s.do("kubectl -n gpu-sharing-operator delete daemonset gpu-sharing-agent")
	s.notInstalled(own, "no DaemonSet is welcome here")
	s.do("kubectl -n gpu-sharing-operator create quota none --hard=count/daemonsets.apps=0")
	s.do("kubectl delete validatingadmissionpolicy,validatingadmissionpolicybinding no-daemonsets")
	s.notInstalled(own, "exceeded quota: none")
	s.do("kubectl -n gpu-sharing-operator delete quota none")
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
	s.share()

	// An upgrade begins while a node waits for a pod, and nobody can pull its bundle at first.
	s.whileHeld(`kubectl patch gpusharingpolicy parted --type=merge --patch='{"spec": {"sharing": {"mig": {"layouts": [{"fill": "2g.10gb"}]}}}}'`)
	s.publish("0.2.0")
	bundle := filepath.Join(s.released, "bundle")
	s.Expect(os.Rename(bundle, bundle+"-lost")).To(Succeed())
	s.upgradeV0()
	s.Eventually(s.try, wait, poll).WithArguments(`kubectl -n gpu-sharing-operator get subscription -o jsonpath='{.items[*].status.conditions[?(@.type=="BundleUnpacking")].status}'`).
		Should(Equal("True"))
	s.Expect(s.phase(own)).To(Equal("Succeeded"), "of the version before")
	s.Expect(os.Rename(bundle+"-lost", bundle)).To(Succeed())
	s.Eventually(s.versionOf, wait, poll).WithArguments(controller).Should(Equal("0.2.0"))
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
	s.kept()
	s.do("kubectl delete pod holder")
	s.Eventually(s.offers, wait, poll).WithArguments(nodeA100).Should(Equal(map[string]int64{"nvidia.com/gpu": 3}))
	s.do("kubectl patch gpusharingpolicy parted --type=merge --patch='{\"spec\": {\"sharing\": {\"mig\": {\"layouts\": [{\"fill\": \"1g.5gb\"}]}}}}'")
	s.shared()

	s.groupless()
	s.deadCatalog()
	s.downgradeV0()
	s.withoutFinalizer()
	s.uninstalls(s.documented("With OLM v0", 4), before)
}

// whileHeld runs commands by which a node is to change while a pod, holder, has a GPU instance of it, and waits until the
// node waits for that.
func (s *site) whileHeld(commands string) {
	s.t.Helper()
	pod := object("v1", "Pod", "default", "holder")
	pod.Object["spec"] = map[string]any{"nodeName": nodeA100, "containers": []any{map[string]any{
		"name": "a", "image": "a", "resources": map[string]any{"limits": map[string]any{"nvidia.com/gpu": "1"}},
	}}}
	s.Expect(s.client.Create(s.t.Context(), pod)).To(Succeed())
	s.do(`kubectl wait pod holder --for=jsonpath='{.status.phase}'=Running --timeout=1m
` + commands + `
kubectl wait node gpu-a100 --for=jsonpath='{.spec.taints[?(@.key=="gpusharing.io/changing")].effect}'=NoSchedule --timeout=2m`)
}

// groupless deletes the OperatorGroup alone, which OLM notices when it next looks at the ClusterServiceVersion: the operator
// works on, and all is well once there is one again.
func (s *site) groupless() {
	s.t.Helper()
	s.do("kubectl -n gpu-sharing-operator delete operatorgroup --all\nkubectl -n gpu-sharing-operator annotate csv --all example.com/looked=at")
	s.Eventually(s.try, wait, poll).WithArguments("kubectl -n gpu-sharing-operator get csv -o jsonpath='{.items[*].status.reason}'").Should(Equal("NoOperatorGroup"))
	s.do(`kubectl patch gpusharingpolicy sliced --type=merge --patch='{"spec": {"sharing": {"timeSlicing": {"replicas": 3}}}}'`)
	s.Eventually(s.offers, wait, poll).WithArguments(nodeT4).Should(Equal(map[string]int64{"nvidia.com/gpu": 3}))
	s.do(`kubectl patch gpusharingpolicy sliced --type=merge --patch='{"spec": {"sharing": {"timeSlicing": {"replicas": 4}}}}'`)
	s.installV0()
	s.shared()
}

// deadCatalog lets the pod of the catalog run without its program: the CatalogSource says so, and the operator works on.
func (s *site) deadCatalog() {
	s.t.Helper()
	state := func() (string, error) {
		return s.try("kubectl -n olm get catalogsource gpu-sharing -o jsonpath='{.status.connectionState.lastObservedState}'")
	}
	const anew = "kubectl -n olm delete pod --selector=olm.catalogSource=gpu-sharing"
	root := s.catalogs[s.registry+"/gpu-sharing-catalog:"+s.version]
	s.Expect(os.Rename(root, root+"-lost")).To(Succeed())
	s.do(anew)
	s.Eventually(state, wait, poll).Should(Equal("TRANSIENT_FAILURE"))
	s.Expect(s.phase(own)).To(Equal("Succeeded"))
	s.do(`kubectl patch gpusharingpolicy sliced --type=merge --patch='{"spec": {"sharing": {"timeSlicing": {"replicas": 3}}}}'`)
	s.Eventually(s.offers, wait, poll).WithArguments(nodeT4).Should(Equal(map[string]int64{"nvidia.com/gpu": 3}))
	s.do(`kubectl patch gpusharingpolicy sliced --type=merge --patch='{"spec": {"sharing": {"timeSlicing": {"replicas": 4}}}}'`)
	s.shared()
	s.Expect(os.Rename(root+"-lost", root)).To(Succeed())
	s.do(anew)
	s.Eventually(state, wait, poll).Should(Equal("READY"))
}

// downgradeV0 goes back to version 0.1.0: a catalog without today's version changes nothing, and the Subscription and the
// ClusterServiceVersion made anew install what it has.
func (s *site) downgradeV0() {
	s.t.Helper()
	uids := s.uids()
	s.version = "0.1.0"
	s.upgradeV0()
	s.Eventually(s.try, wait, poll).WithArguments("kubectl -n olm get pod --selector=olm.catalogSource=gpu-sharing -o jsonpath='{.items[*].spec.initContainers[1].image}'").
		Should(Equal(s.registry + "/gpu-sharing-catalog:0.1.0"))
	s.Consistently(s.versionOf, 10*time.Second, poll).WithArguments(controller).Should(Equal("0.2.0"))
	s.uninstallV0("subscription", "csv")
	s.kept()
	s.installV0()
	s.Expect(s.versionOf(controller)).To(Equal("0.1.0"))
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")
}

// withoutFinalizer deletes the ClusterServiceVersion while OLM is dead, as an administrator does who removes its finalizer.
func (s *site) withoutFinalizer() {
	s.t.Helper()
	s.without("olm", func() {
		s.do(`kubectl -n gpu-sharing-operator delete subscription,csv --all --wait=false
kubectl -n gpu-sharing-operator get csv -o name | xargs -r kubectl -n gpu-sharing-operator patch --type=merge --patch='{"metadata": {"finalizers": null}}'`)
		s.Eventually(s.exists, wait, poll).WithArguments(object("apps/v1", "Deployment", own, controller)).Should(BeFalse())
		s.kept()
	})
	s.installV0()
	s.shared()
}

// TestBadLuckUnderOLMv1 is the same for OLM v1.
func TestBadLuckUnderOLMv1(t *testing.T) {
	s := newSite(t, "0.1.0", "extensions", "catalogs")
	s.startV1()
	before := s.snapshot()

	// A quota refuses DaemonSets. OLM v1 looks at no Deployment's state.
	s.do("kubectl create namespace gpu-sharing-operator\nkubectl -n gpu-sharing-operator create quota none --hard=count/daemonsets.apps=0")
	s.do(s.documented("With OLM v1", 1))
	s.told(own, "exceeded quota: none")
	s.do("kubectl -n gpu-sharing-operator delete quota none")
	s.installed()
	s.share()
	uids := s.uids()

	// The image of the catalog is gone, then that of the bundle, in the middle of an upgrade.
	s.publish("0.2.0")
	upgrade := s.documented("With OLM v1", 2)
	s.do(strings.ReplaceAll(upgrade, "0.1.0", "9.9.9"))
	s.saysV1("clustercatalog gpu-sharing", "9.9.9")
	bundle := filepath.Join(s.dir, "registry", "docker", "registry", "v2", "repositories", "gpu-sharing", "gpu-sharing-bundle")
	s.Expect(os.Rename(bundle, bundle+"-lost")).To(Succeed())
	s.do(strings.ReplaceAll(upgrade, "0.1.0", s.version))
	s.saysV1("clusterextension gpu-sharing-operator", "gpu-sharing-bundle")
	s.Expect(s.versionOf(controller)).To(Equal("0.1.0"))
	s.shared()
	s.Expect(os.Rename(bundle+"-lost", bundle)).To(Succeed())
	s.Eventually(s.versionOf, wait, poll).WithArguments(controller).Should(Equal("0.2.0"))
	s.installed()
	s.shared()

	// Back to the version before.
	s.do(strings.ReplaceAll(upgrade, "bundle/installer.yaml", "../released-0.1.0/bundle/installer.yaml"))
	s.saysV1("clusterextension gpu-sharing-operator", `error upgrading from currently installed version "0.2.0"`)
	s.Expect(s.versionOf(controller)).To(Equal("0.2.0"))
	s.do(`kubectl patch clusterextension gpu-sharing-operator --type=merge --patch='{"spec": {"source": {"catalog": {"upgradeConstraintPolicy": "SelfCertified"}}}}'`)
	s.Eventually(s.versionOf, wait, poll).WithArguments(controller).Should(Equal("0.1.0"))
	s.installed()
	s.shared()

	// The namespace goes by force.
	s.do("kubectl delete namespace gpu-sharing-operator --force --grace-period=0 --timeout=2m")
	s.kept()
	s.version, s.released = "0.1.0", filepath.Join(s.dir, "released-0.1.0")
	s.installV1()
	s.shared()
	s.Expect(s.uids()).To(Equal(uids), "neither policies nor GPUNodes were made anew")

	s.insists()
	s.installV1()
	s.share()
	s.uninstalls(s.documented("With OLM v1", 3), before)
}

// saysV1 waits until an object of OLM v1 says what it waits for.
func (s *site) saysV1(object, why string) {
	s.t.Helper()
	s.Eventually(s.try, wait, poll).WithArguments(`kubectl get ` + object + ` -o jsonpath='{.status.conditions[?(@.type=="Progressing")].message}'`).
		Should(ContainSubstring(why))
}

// insists deletes the ClusterExtension with live policies all the same: an administrator removes what refuses it, and the
// finalizers, while OLM is dead. The policies are lost then, but no GPU changes.
func (s *site) insists() {
	s.t.Helper()
	s.without("operator-controller", func() {
		s.refused("kubectl delete clusterextension gpu-sharing-operator --wait=false")
		s.Eventually(s.try, wait, poll).WithArguments(`kubectl delete validatingadmissionpolicybinding gpu-sharing-in-use gpu-sharing-not-restored --ignore-not-found
kubectl delete clusterextension gpu-sharing-operator --wait=false
kubectl patch clusterextension gpu-sharing-operator --type=merge --patch='{"metadata": {"finalizers": null}}'`).Should(ContainSubstring("patched"))
		for _, name := range []string{"gpunodes.gpusharing.io", "gpusharingpolicies.gpusharing.io"} {
			s.Eventually(s.exists, wait, poll).WithArguments(object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", name)).Should(BeFalse())
		}
		s.Eventually(s.exists, wait, poll).WithArguments(object("apps/v1", "Deployment", own, controller)).Should(BeFalse())
		s.kept()
	})
}
