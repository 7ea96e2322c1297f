// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/node"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// customLayouts is what an administrator has written for mig-manager: layouts of their own.
const customLayouts = `version: v1
mig-configs:
  all-disabled:
  - {devices: all, mig-enabled: false}
  mine:
  - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}
  too-many:
  - {devices: all, mig-enabled: true, mig-devices: {3g.40gb: 3}}
`

// On H100, whose MIG mode needs no reset: how NVIDIA's programs reset a GPU is played by the specs of the agent.
func migManagerSpecs() {
	Describe("NVIDIA's mig-manager with a ConfigMap of the administrator's", Ordered, Offset(1), func() {
		const custom = "custom-mig-config"
		mine, large := map[string]int64{"nvidia.com/gpu": 14}, map[string]int64{"nvidia.com/mig-3g.40gb": 4}

		BeforeAll(func(ctx SpecContext) {
			begin(ctx, sim.H100, sim.H100)
			Expect(machine.Import(ctx, write(managerImage(ctx)))).To(Succeed())
			stopBus, err := node.ServeBus()
			Expect(err).NotTo(HaveOccurred())
			configMap := handMade(custom, map[string]string{"config.yaml": customLayouts})
			Expect(kube.Create(ctx, configMap)).To(Succeed())
			// node-status-exporter, which NVIDIA's chart leaves off, may have a GPU open just when mig-manager changes
			// its mode.
			mergeClusterPolicy(ctx, fmt.Sprintf(`{"spec":{"nodeStatusExporter":{"enabled":false},"migManager":{"config":{"name":%q}}}}`, custom))
			DeferCleanup(func(ctx SpecContext) {
				Expect(client.IgnoreNotFound(kube.DeleteAllOf(ctx, &v1alpha1.GPUSharingPolicy{}))).To(Succeed())
				label(ctx, gpuoperator.LabelMIGConfig, "all-disabled")
				expectAllocatable(ctx, map[string]int64{"nvidia.com/gpu": 2})
				mergeClusterPolicy(ctx, `{"spec":{"nodeStatusExporter":{"enabled":true},"migManager":{"config":{"name":null}}}}`)
				Expect(kube.Delete(ctx, configMap)).To(Succeed())
				label(ctx, gpuoperator.LabelMIGState, "")
				label(ctx, gpuoperator.LabelDeploy+"nvsm", "")
				Expect(stopBus()).To(Succeed())
			})
		})

		It("partitions by hand as the guide has it, by a label", func(ctx SpecContext) {
			label(ctx, gpuoperator.LabelMIGConfig, "mine")
			expectAllocatable(ctx, mine)
			Eventually(nodeLabels).WithContext(ctx).Should(HaveKeyWithValue(gpuoperator.LabelMIGState, "success"))
		})

		It("reports by hand a layout that does not fit, empties the GPU on which it tried, and leaves the others", func(ctx SpecContext) {
			label(ctx, gpuoperator.LabelMIGConfig, "too-many")
			Eventually(nodeLabels).WithContext(ctx).Should(HaveKeyWithValue(gpuoperator.LabelMIGState, "failed"))
			Expect(instances()).To(HaveLen(7))
			label(ctx, gpuoperator.LabelMIGConfig, "mine")
			expectAllocatable(ctx, mine)
			Eventually(nodeLabels).WithContext(ctx).Should(HaveKeyWithValue(gpuoperator.LabelMIGState, "success"))
		})

		It("partitions as a policy asks, and the operator keeps the administrator's layouts beside its own", func(ctx SpecContext) {
			share(ctx, managed("{fill: 3g.40gb}"))
			expectAllocatable(ctx, large)
			expectReady(ctx, "shared")
			Expect(nodeLabels(ctx)).To(And(HaveKeyWithValue(gpuoperator.LabelMIGConfig, HavePrefix("gpusharing-")),
				HaveKeyWithValue(gpuoperator.LabelMIGState, "success")))
			name, err := managerConfig(ctx)
			Expect(err).NotTo(HaveOccurred())
			ours := &corev1.ConfigMap{}
			Expect(kube.Get(ctx, client.ObjectKey{Namespace: gpuoperator.Namespace, Name: name}, ours)).To(Succeed())
			Expect(name).NotTo(Equal(custom))
			Expect(ours.Data["config.yaml"]).To(And(ContainSubstring("mine:"), ContainSubstring("gpusharing-")))
			startPod(ctx, "instance", resourceOf("3g.40gb"), 1)
			Expect(expectRunning(ctx, "instance").uuid()).To(HavePrefix("MIG-"))
			stopPods(ctx)
		})

		// The driver refuses it: what does not fit by NVIDIA's table, the operator asks nobody for.
		It("returns to the last layout when mig-manager fails, and names it", func(ctx SpecContext) {
			failed := watchState(ctx, "failed")
			refused := simdriver.Fault{Call: "nvmlDeviceCreateGpuInstance", Return: sim.InsufficientResources}
			Expect(gpus.AddFault(refused)).To(Succeed())
			DeferCleanup(func() error { return gpus.ClearFaults() })
			share(ctx, managed("{fill: 2g.20gb}"))
			Eventually(failed).WithContext(ctx).Should(BeTrue())
			Expect(gpus.ClearFaults()).To(Succeed())
			Eventually(func() error { return ready(ctx, "shared") }).WithContext(ctx).Should(MatchError(And(
				ContainSubstring(v1alpha1.ReasonMIGManagerFailed), ContainSubstring("kubectl logs -n "+gpuoperator.Namespace))))
			expectAllocatable(ctx, large)
			share(ctx, managed("{fill: 3g.40gb}"))
			expectReady(ctx, "shared")
		})

		It("goes on with another pod of mig-manager when its pod is deleted in the middle of a change", func(ctx SpecContext) {
			pending := watchState(ctx, "pending")
			share(ctx, managed("{fill: 2g.20gb}"))
			Eventually(pending).WithContext(ctx).Should(BeTrue())
			Expect(kube.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(gpuoperator.Namespace),
				client.MatchingLabels{"app": gpuoperator.ManagerName})).To(Succeed())
			expectAllocatable(ctx, map[string]int64{"nvidia.com/mig-2g.20gb": 6})
			expectReady(ctx, "shared")
			Expect(nodeLabels(ctx)).To(HaveKeyWithValue(gpuoperator.LabelMIGState, "success"))
		})

		It("returns to the administrator's layout and ConfigMap when the policy goes, and answers before its pod is replaced", func(ctx SpecContext) {
			answered := firstVersion(ctx, &corev1.NodeList{}, func(o client.Object) bool {
				labels := o.GetLabels()
				return labels[gpuoperator.LabelMIGConfig] == "mine" && labels[gpuoperator.LabelMIGState] == "success"
			})
			policies := &unstructured.UnstructuredList{}
			policies.SetGroupVersionKind(gpuoperator.PolicyKind())
			restored := firstVersion(ctx, policies, func(o client.Object) bool {
				p, is := o.(*unstructured.Unstructured)
				return is && configOf(p) == custom
			})
			unshare(ctx, mine)
			Eventually(nodeLabels).WithContext(ctx).Should(And(
				HaveKeyWithValue(gpuoperator.LabelMIGConfig, "mine"), HaveKeyWithValue(gpuoperator.LabelMIGState, "success")))
			Eventually(managerConfig).WithContext(ctx).Should(Equal(custom))
			Eventually(restored).WithContext(ctx).ShouldNot(BeZero())
			Eventually(answered).WithContext(ctx).ShouldNot(BeZero())
			Expect(answered()).To(BeNumerically("<", restored()), "resource versions are the order in which it happened")
		})
	})
}

// managed is the sharing of a policy with a layout that mig-manager makes.
func managed(layout string) string {
	return "{strategy: MIG, mig: {actuator: MIGManager, layouts: [" + layout + "]}}"
}

// watchState watches from now on what mig-manager reports. What it returns reports whether that once was as asked.
func watchState(ctx context.Context, state string) func() bool {
	GinkgoHelper()
	Expect(nodeLabels(ctx)).NotTo(HaveKeyWithValue(gpuoperator.LabelMIGState, state))
	first := firstVersion(ctx, &corev1.NodeList{}, func(o client.Object) bool {
		return o.GetLabels()[gpuoperator.LabelMIGState] == state
	})
	return func() bool { return first() > 0 }
}

// managerConfig is the name of the ConfigMap that mig-manager reads.
func managerConfig(ctx context.Context) (string, error) {
	p := &unstructured.Unstructured{}
	p.SetGroupVersionKind(gpuoperator.PolicyKind())
	err := kube.Get(ctx, client.ObjectKey{Name: gpuoperator.PolicyName}, p)
	return configOf(p), err
}

func configOf(clusterPolicy *unstructured.Unstructured) string {
	name, _, _ := unstructured.NestedString(clusterPolicy.Object, "spec", "migManager", "config", "name")
	return name
}

// firstVersion watches objects from now on. What it returns is the resource version of the first one that is as asked;
// 0: none was yet.
func firstVersion(ctx context.Context, list client.ObjectList, is func(client.Object) bool) func() uint64 {
	GinkgoHelper()
	w, err := kube.Watch(ctx, list)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(w.Stop)
	var first atomic.Uint64
	go func() {
		for event := range w.ResultChan() {
			o, known := event.Object.(client.Object)
			if !known || !is(o) {
				continue
			}
			if version, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64); err == nil {
				first.CompareAndSwap(0, version)
			}
		}
	}()
	return first.Load
}
