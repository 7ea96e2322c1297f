// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// TestOrdersThatNobodyThoughtOf installs and removes with both OLMs in one cluster as nobody would who has read
// docs/install.md. Nothing is lost, and once OLM has what it needs all goes on by itself.
func TestOrdersThatNobodyThoughtOf(t *testing.T) {
	s := newSite(t, "0.1.0", "v0", "extensions", "catalogs")
	s.startV0()
	s.startV1()
	before := s.snapshot()
	s.catalogSource()
	s.installV0()
	s.share()

	// The OperatorGroup goes alone, and there are two.
	group := "kubectl apply -f - <<EOF\napiVersion: operators.coreos.com/v1\nkind: OperatorGroup\nmetadata: {name: NAME, namespace: gpu-sharing-operator}\nEOF"
	s.do("kubectl -n gpu-sharing-operator delete operatorgroup gpu-sharing-operator")
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Failed"))
	s.kept()
	s.do(strings.ReplaceAll(group, "NAME", "another"))
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
	s.do(strings.ReplaceAll(group, "NAME", own))
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Failed"))
	s.do("kubectl -n gpu-sharing-operator delete operatorgroup another")
	s.Eventually(s.phase, wait, poll).WithArguments(own).Should(Equal("Succeeded"))
	s.shared()

	// The Subscription goes and comes again.
	s.do("kubectl -n gpu-sharing-operator delete subscription --all")
	s.installV0()
	s.shared()

	// OLM v1 over OLM v0.
	s.do(strings.ReplaceAll(s.documented("With OLM v1", 1), "kubectl wait", "true kubectl wait"))
	s.saysV1("clusterextension gpu-sharing-operator", "cannot be managed by operator-controller")
	s.shared()
	s.do("kubectl delete clusterextension gpu-sharing-operator --timeout=1m\nkubectl delete clustercatalog gpu-sharing\nkubectl delete -f bundle/installer.yaml")
	s.shared()

	// The console's "delete all operands": all policies and the operator go at once, while a pod holds a GPU.
	s.do(`kubectl apply -f - <<EOF
apiVersion: v1
kind: Pod
metadata: {name: holder, namespace: default}
spec:
  nodeName: gpu-a100
  containers: [{name: a, image: a, resources: {limits: {nvidia.com/gpu: "1"}}}]
EOF
kubectl wait pod holder --for=jsonpath='{.status.phase}'=Running --timeout=1m
kubectl delete gpusharingpolicy --all & kubectl -n gpu-sharing-operator delete subscription,csv,operatorgroup --all
wait`)
	s.Eventually(s.exists, wait, poll).WithArguments(object("apps/v1", "Deployment", own, controller)).Should(BeFalse())
	s.installV0()
	s.do("kubectl delete pod holder")
	for _, name := range []string{nodeT4, nodeA100} {
		s.Eventually(s.offers, wait, poll).WithArguments(name).Should(Equal(map[string]int64{"nvidia.com/gpu": 1}))
	}
	s.share()
	s.uninstalls(s.documented("With OLM v0", 4), before)

	// OLM v0 over OLM v1.
	s.installV1()
	s.share()
	s.catalogSource()
	s.do(s.subscription())
	s.Eventually(s.phase, wait, poll).WithArguments(own).ShouldNot(BeEmpty())
	s.Consistently(s.phase, "20s", poll).WithArguments(own).ShouldNot(Equal("Succeeded"))
	s.shared()
}
