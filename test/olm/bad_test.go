// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// TestBadLuckUnderOLMv0 lets go wrong what goes wrong in clusters: it is said where an administrator looks, nothing is lost,
// and once it is mended all goes on by itself.
func TestBadLuckUnderOLMv0(t *testing.T) {
	s := newSite(t, "0.1.0", "v0")
	s.startV0()
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
	s.do("kubectl delete validatingadmissionpolicybinding no-daemonsets")
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
	s.share()

	// An upgrade begins while a node waits for a pod, and nobody can pull its bundle at first.
	pod := object("v1", "Pod", "default", "holder")
	pod.Object["spec"] = map[string]any{"nodeName": nodeA100, "containers": []any{map[string]any{
		"name": "a", "image": "a", "resources": map[string]any{"limits": map[string]any{"nvidia.com/gpu": "1"}},
	}}}
	s.Expect(s.client.Create(t.Context(), pod)).To(Succeed())
	s.do(`kubectl wait pod holder --for=jsonpath='{.status.phase}'=Running --timeout=1m
kubectl patch gpusharingpolicy parted --type=merge --patch='{"spec": {"sharing": {"mig": {"layouts": [{"fill": "2g.10gb"}]}}}}'
kubectl wait node gpu-a100 --for=jsonpath='{.spec.taints[?(@.key=="gpusharing.io/changing")].effect}'=NoSchedule --timeout=2m`)
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
	s.do("kubectl wait gpusharingpolicy --all --for=condition=Ready --timeout=2m")
}
