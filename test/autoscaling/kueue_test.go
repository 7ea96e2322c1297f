// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// kueueConfig lets Kueue manage pods. Its visibility server would write its certificate to a fixed folder.
const kueueConfig = `
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
namespace: kueue-system
health: {healthProbeBindAddress: "0"}
metrics: {bindAddress: "0"}
webhook: {host: 127.0.0.1, port: 443, certDir: %s}
leaderElection: {leaderElect: false}
integrations: {frameworks: [pod]}
featureGates: {VisibilityOnDemand: false}
`

// clusterQueue has so many instances as quota.
const clusterQueue = `
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: gpus}
spec:
  namespaceSelector: {}
  resourceGroups: [{coveredResources: [nvidia.com/mig-3g.20gb], flavors: [{name: any, resources: [{name: nvidia.com/mig-3g.20gb, nominalQuota: %d}]}]}]
`

// TestAPodThatKueueHoldsBack is no demand for a layout until its queue has the quota.
func TestAPodThatKueueHoldsBack(t *testing.T) {
	t.Parallel()
	module := filepath.Join(moduleOf(t, "kueue", "sigs.k8s.io/kueue"), "config", "components")
	s := newCluster(t, filepath.Join(module, "crd", "bases"))
	s.startKueue(module)
	s.apply(fmt.Sprintf(clusterQueue, 0))
	s.apply("{apiVersion: kueue.x-k8s.io/v1beta2, kind: LocalQueue, metadata: {namespace: default, name: gpus}, spec: {clusterQueue: gpus}}")

	s.startController("--feature-gates=OnDemandMIG=true")
	for _, missing := range []chan struct{}{s.toolkit, s.driver, s.changing} {
		close(missing)
	}
	s.playMachines()
	s.apply("{apiVersion: v1, kind: Node, metadata: {name: a, labels: {kubernetes.io/hostname: a}}}")
	s.apply(`
apiVersion: gpusharing.io/v1alpha1
kind: GPUSharingPolicy
metadata: {name: research}
spec:
  nodeSelector: {}
  sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 1}], onDemand: {mode: Apply, profiles: [1g, 3g]}}]}}
`)
	s.advertise("nvidia.com/mig-1g.5gb", 1)
	pod := s.pod("gated", "nvidia.com/mig-3g.20gb", map[string]string{"kueue.x-k8s.io/queue-name": "gpus"})
	s.Expect(pod.Spec.SchedulingGates).To(ContainElement(HaveField("Name", "kueue.x-k8s.io/admission")))
	s.Expect(pod.Status.Conditions).To(ConsistOf(HaveField("Reason", corev1.PodReasonSchedulingGated)))
	other := s.pod("other", "nvidia.com/mig-1g.5gb", nil)
	s.unschedulable(other)
	s.reported(v1alpha1.ConditionDemandMet, v1alpha1.ReasonInstancesIdle) // for this pod: the controller has seen the gated one too
	s.Expect(s.policy().Status.OnDemand.Pods).To(BeEquivalentTo(1))
	s.Expect(s.client.Delete(t.Context(), other, client.GracePeriodSeconds(0))).To(Succeed())
	s.reported(v1alpha1.ConditionDemandMet, v1alpha1.ReasonNoDemand)
	n := &v1alpha1.GPUNode{}
	s.Expect(s.client.Get(t.Context(), client.ObjectKey{Name: "a"}, n)).To(Succeed())
	s.Expect(n.Status.Demand).To(BeEmpty())

	s.apply(fmt.Sprintf(clusterQueue, 1))
	s.Eventually(func() []corev1.PodSchedulingGate {
		s.Expect(s.client.Get(t.Context(), client.ObjectKeyFromObject(pod), pod)).To(Succeed())
		return pod.Spec.SchedulingGates
	}, wait, poll).Should(BeEmpty())
	s.unschedulable(pod)
	s.advertise("nvidia.com/mig-3g.20gb", 1)
	s.Expect(s.advertised("nvidia.com/mig-1g.5gb")).To(BeEquivalentTo(1))
}

// startKueue starts Kueue with the webhooks of its module, as kustomize would name them, and plays the kubelet that mounts the
// certificate which Kueue makes. The Service of the webhooks leads to the loopback interface.
func (s *site) startKueue(module string) {
	s.t.Helper()
	program, err := kueueProgram()
	s.Expect(err).NotTo(HaveOccurred())
	s.apply("{apiVersion: v1, kind: Namespace, metadata: {name: kueue-system}}")
	s.apply("{apiVersion: v1, kind: Service, metadata: {namespace: kueue-system, name: kueue-webhook-service}, spec: {type: ExternalName, externalName: localhost}}")
	s.apply("{apiVersion: v1, kind: Secret, metadata: {namespace: kueue-system, name: kueue-webhook-server-cert}}")
	prefix := strings.NewReplacer("namespace: system", "namespace: kueue-system", "name: webhook-service", "name: kueue-webhook-service",
		"name: mutating-", "name: kueue-mutating-", "name: validating-", "name: kueue-validating-")
	files := []string{filepath.Join(module, "webhook", "manifests.yaml")}
	for _, kind := range []string{"clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads"} {
		files = append(files, filepath.Join(module, "crd", "patches", "webhook_in_"+kind+".yaml"))
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		s.Expect(err).NotTo(HaveOccurred())
		for object := range strings.SplitSeq(strings.TrimPrefix(prefix.Replace(string(text)), "---\n"), "\n---\n") {
			s.apply(object)
		}
	}
	config, certificate := filepath.Join(s.dir, "kueue.yaml"), filepath.Join(s.dir, "kueue")
	s.Expect(os.WriteFile(config, fmt.Appendf(nil, kueueConfig, certificate), 0o600)).To(Succeed())
	s.run("kueue", program, s.cluster.Config, "--config="+config)
	secret := &corev1.Secret{}
	s.Eventually(func() map[string][]byte {
		s.Expect(s.client.Get(s.t.Context(), client.ObjectKey{Namespace: "kueue-system", Name: "kueue-webhook-server-cert"}, secret)).To(Succeed())
		return secret.Data
	}, wait, poll).ShouldNot(BeEmpty())
	s.Expect(os.Mkdir(certificate+".new", 0o700)).To(Succeed())
	for name, data := range secret.Data {
		s.Expect(os.WriteFile(filepath.Join(certificate+".new", name), data, 0o600)).To(Succeed())
	}
	s.Expect(os.Rename(certificate+".new", certificate)).To(Succeed())
	s.Eventually(s.tryApply, wait, poll).WithArguments("{apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: any}}").Should(Succeed(), "the webhooks answer")
}
