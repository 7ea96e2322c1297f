// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// The controller's account has every right here, so that what is denied is denied by the admission policy.
func TestControllerWritesWhatItsAdmissionPolicyLists(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA(), env.WithAutoscalers())
	g := NewWithT(t)
	ctx := t.Context()
	g.Expect(cluster.Apply(ctx, "config/default/namespace.yaml", "config/manager/rbac.yaml", "config/manager/admission.yaml")).To(Succeed())
	for _, account := range []string{"gpu-sharing-controller", "another"} {
		g.Expect(cluster.Client.Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "everything-" + account},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: operatorNamespace, Name: account}},
		})).To(Succeed())
	}
	as := func(account string) client.Client {
		c, err := cluster.ClientAs(ctx, env.Identity{Namespace: operatorNamespace, ServiceAccount: account})
		g.Expect(err).NotTo(HaveOccurred())
		return c
	}
	w := writes{cluster: cluster, controller: as("gpu-sharing-controller")}
	for _, o := range writtenObjects() {
		g.Expect(cluster.Client.Create(ctx, o)).To(Succeed())
	}
	g.Eventually(func() error { return w.patch(&corev1.Node{}, "node-1", `{"metadata": {"labels": {"a": "b"}}}`)(ctx) }).
		WithTimeout(20*time.Second).Should(HaveOccurred(), "an admission policy takes effect a moment after it was applied")

	for name, c := range w.cases() {
		t.Run(name, func(t *testing.T) {
			err := c.do(t.Context())
			if c.says == "" {
				NewWithT(t).Expect(err).NotTo(HaveOccurred())
				return
			}
			NewWithT(t).Expect(err).To(MatchError(And(ContainSubstring("gpu-sharing-controller-writes"), ContainSubstring(c.says))))
		})
	}
	t.Run("counts what it denies", func(t *testing.T) {
		g := NewWithT(t)
		before, err := cluster.Denied(t.Context(), env.ControllerWrites)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(w.patch(&corev1.Node{}, "node-1", `{"metadata": {"labels": {"a": "b"}}}`)(t.Context())).NotTo(Succeed())
		g.Expect(cluster.Denied(t.Context(), env.ControllerWrites)).To(BeNumerically(">", before))
	})
	t.Run("concerns nobody else", func(t *testing.T) {
		w.controller = as("another")
		NewWithT(t).Expect(w.patch(&corev1.Node{}, "node-1", `{"metadata": {"labels": {"a": "b"}}}`)(t.Context())).To(Succeed())
	})
}

const operatorNamespace = "gpu-sharing-operator"

// writtenObjects are what the controller may touch, and what it may not.
func writtenObjects() []client.Object {
	container := []corev1.Container{{Name: "main", Image: "example.invalid/main"}}
	owner := []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "nvidia-device-plugin-daemonset", UID: "1"}}
	return []client.Object{
		&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name: "node-1", Labels: map[string]string{"pool": "a", "nvidia.com/gpu.deploy.device-plugin": "true"},
				Annotations: map[string]string{"gpusharing.io/taints": "example.com/policy:NoSchedule,b:NoSchedule"},
			},
			Spec: corev1.NodeSpec{Taints: []corev1.Taint{
				{Key: "example.com/policy", Value: "a", Effect: corev1.TaintEffectNoSchedule},
				{Key: "example.com/other", Effect: corev1.TaintEffectNoSchedule},
			}},
		},
		&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "plugin", OwnerReferences: owner}, Spec: corev1.PodSpec{Containers: container},
		},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "workload"}, Spec: corev1.PodSpec{Containers: container}},
		clusterPolicy(), machineSet(), nodeOverlay("theirs", nil, nil), nodeOverlay("gpu-sharing-old", ownOverlay, nil),
		draObject("DeviceClass", "gpu.nvidia.com", nil, map[string]any{}), draObject("DeviceClass", "gpusharing-mig-theirs", nil, map[string]any{}),
		draObject("DeviceTaintRule", "gpusharing-theirs", nil, dra.NewTaintRule("theirs", time.Unix(0, 0)).Object["spec"]),
	}
}

// ownOverlay is the label of the controller's NodeOverlays.
var ownOverlay = map[string]string{"gpusharing.io/policy": "research"}

func machineSet() *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"replicas": int64(1)}}}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "machine.openshift.io", Version: "v1beta1", Kind: "MachineSet"})
	u.SetNamespace("default")
	u.SetName("gpu")
	return u
}

// nodeOverlay is one that announces a shared GPU, and more.
func nodeOverlay(name string, labels map[string]string, more map[string]any) *unstructured.Unstructured {
	spec := map[string]any{"weight": int64(1), "requirements": []any{}, "capacity": map[string]any{"nvidia.com/gpu.shared": "10"}}
	maps.Copy(spec, more)
	u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "karpenter.sh", Version: "v1alpha1", Kind: "NodeOverlay"})
	u.SetName(name)
	u.SetLabels(labels)
	return u
}

func (w *writes) autoscalers(cases map[string]writeCase) {
	create := func(o *unstructured.Unstructured) func(context.Context) error {
		return func(ctx context.Context) error { return w.controller.Create(ctx, o) }
	}
	remove := func(name string) func(context.Context) error {
		return func(ctx context.Context) error { return w.controller.Delete(ctx, nodeOverlay(name, nil, nil)) }
	}
	set := func(patch string) func(context.Context) error {
		return func(ctx context.Context) error {
			return w.controller.Patch(ctx, machineSet(), client.RawPatch(types.MergePatchType, []byte(patch)))
		}
	}
	const resources, own = "may announce resources of NVIDIA through NodeOverlays, and nothing else", "may write NodeOverlays only that have the label"
	for name, c := range map[string]writeCase{
		"announces a shared GPU":               {do: create(nodeOverlay("gpu-sharing-new", ownOverlay, nil))},
		"ends a NodeOverlay":                   {do: remove("gpu-sharing-old")},
		"ends a NodeOverlay of another":        {do: remove("theirs"), says: own},
		"writes a NodeOverlay of another name": {do: create(nodeOverlay("other", ownOverlay, nil)), says: own},
		"writes a NodeOverlay for nobody":      {do: create(nodeOverlay("gpu-sharing-nobody", nil, nil)), says: own},
		"changes a price":                      {do: create(nodeOverlay("gpu-sharing-price", ownOverlay, map[string]any{"price": "1"})), says: resources},
		"announces another resource": {
			do: create(nodeOverlay("gpu-sharing-amd", ownOverlay, map[string]any{"capacity": map[string]any{"amd.com/gpu": "1"}})), says: resources,
		},
		"announces GPUs of a MachineSet": {do: set(`{"metadata": {"annotations": {"capacity.cluster-autoscaler.kubernetes.io/gpu-count": "8",
			"capacity.cluster-autoscaler.kubernetes.io/gpu-type": "nvidia.com/gpu.shared", "capacity.cluster-autoscaler.kubernetes.io/labels": "pool=gpu",
			"capacity.cluster-autoscaler.kubernetes.io/taints": "a=:NoSchedule", "gpusharing.io/autoscaling": "{}"}}}`)},
		"announces memory of a MachineSet": {
			do:   set(`{"metadata": {"annotations": {"capacity.cluster-autoscaler.kubernetes.io/memory": "1Gi"}}}`),
			says: "may not change these annotations of machinesets: capacity.cluster-autoscaler.kubernetes.io/memory",
		},
		"scales a MachineSet": {do: set(`{"spec": {"replicas": 9}}`), says: "may not change these fields of the spec of machinesets: replicas"},
		"labels a MachineSet": {do: set(`{"metadata": {"labels": {"a": "b"}}}`), says: "may not change these labels of machinesets: a"},
		"deletes a MachineSet": {
			do: func(ctx context.Context) error { return w.controller.Delete(ctx, machineSet()) }, says: "may not DELETE machinesets",
		},
	} {
		cases["autoscalers: "+name] = c
	}
}

// draObject is an object of resource.k8s.io.
func draObject(kind, name string, labels map[string]string, spec any) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: kind})
	u.SetName(name)
	u.SetLabels(labels)
	return u
}

func (w *writes) dra(cases map[string]writeCase) {
	own := map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedByOperator}
	write := func(kind, name string, labels map[string]string, spec any) func(context.Context) error {
		return func(ctx context.Context) error {
			return w.controller.Apply(ctx, client.ApplyConfigurationFromUnstructured(draObject(kind, name, labels, spec)), client.FieldOwner("gpusharing-controller"), client.ForceOwnership)
		}
	}
	remove := func(kind, name string) func(context.Context) error {
		return func(ctx context.Context) error {
			return w.controller.Delete(ctx, draObject(kind, name, nil, map[string]any{}))
		}
	}
	with := func(resource, selector string) map[string]any {
		return map[string]any{"extendedResourceName": resource, "selectors": []any{map[string]any{"cel": map[string]any{"expression": selector}}}}
	}
	class := func(resource string) map[string]any { return with(resource, dra.ForInstances("1g.5gb").Selector) }
	whole := dra.ForGPUs()
	rule := func(change func(selector, taint map[string]any)) map[string]any {
		selector := map[string]any{"driver": "gpu.nvidia.com", "pool": "node-1"}
		taint := map[string]any{"key": "gpusharing.io/changing", "effect": "NoSchedule"}
		change(selector, taint)
		return map[string]any{"deviceSelector": selector, "taint": taint}
	}
	const offers = "may offer MIG instances and whole GPUs through DeviceClasses, and nothing else"
	const owner, taints = "only that have its label and whose names begin with gpusharing-", "may taint devices of NVIDIA's driver in one pool only"
	for name, c := range map[string]writeCase{
		"offers instances": {do: func(ctx context.Context) error {
			if err := write("DeviceClass", "gpusharing-mig-1g.5gb", own, class("nvidia.com/mig-1g.5gb"))(ctx); err != nil {
				return err
			}
			return remove("DeviceClass", "gpusharing-mig-1g.5gb")(ctx)
		}},
		"keeps new pods off the GPUs of a node": {do: func(ctx context.Context) error {
			made := dra.NewTaintRule("node-1", time.Unix(1_800_000_000, 0))
			if err := write("DeviceTaintRule", made.GetName(), own, made.Object["spec"])(ctx); err != nil {
				return err
			}
			return remove("DeviceTaintRule", made.GetName())(ctx)
		}},
		"offers whole GPUs": {do: func(ctx context.Context) error {
			if err := write("DeviceClass", whole.Name, own, with(whole.Resource, whole.Selector))(ctx); err != nil {
				return err
			}
			return remove("DeviceClass", whole.Name)(ctx)
		}},
		"offers whole GPUs as instances":      {do: write("DeviceClass", "gpusharing-mig-all", own, with("nvidia.com/gpu", whole.Selector)), says: offers},
		"offers instances as whole GPUs":      {do: write("DeviceClass", whole.Name, own, class("nvidia.com/gpu")), says: offers},
		"offers instances by the other class": {do: write("DeviceClass", whole.Name, own, class("nvidia.com/mig-1g.5gb")), says: offers},
		"writes a class of another name":      {do: write("DeviceClass", "mig", own, class("nvidia.com/mig-1g.5gb")), says: owner},
		"writes a class without its label":    {do: write("DeviceClass", "gpusharing-mig-1g.5gb", nil, class("nvidia.com/mig-1g.5gb")), says: owner},
		"takes a class of another owner over": {do: write("DeviceClass", "gpusharing-mig-theirs", own, class("nvidia.com/mig-1g.5gb")), says: owner},
		"deletes the class of NVIDIA's chart": {do: remove("DeviceClass", "gpu.nvidia.com"), says: owner},
		"deletes a rule of another owner":     {do: remove("DeviceTaintRule", "gpusharing-theirs"), says: owner},
		"evicts by a rule": {
			do: write("DeviceTaintRule", "gpusharing-a", own, rule(func(_, taint map[string]any) { taint["effect"] = "NoExecute" })), says: taints,
		},
		"taints with another key": {
			do: write("DeviceTaintRule", "gpusharing-a", own, rule(func(_, taint map[string]any) { taint["key"] = "example.com/a" })), says: taints,
		},
		"taints devices of another driver": {
			do: write("DeviceTaintRule", "gpusharing-a", own, rule(func(selector, _ map[string]any) { selector["driver"] = "example.com" })), says: taints,
		},
		"taints every node": {
			do: write("DeviceTaintRule", "gpusharing-a", own, rule(func(selector, _ map[string]any) { delete(selector, "pool") })), says: taints,
		},
	} {
		cases["DRA: it "+name] = c
	}
}

func clusterPolicy() *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"operator":     map[string]any{"defaultRuntime": "containerd"},
		"driver":       map[string]any{"enabled": true},
		"toolkit":      map[string]any{"enabled": true},
		"devicePlugin": map[string]any{"enabled": true, "config": map[string]any{"name": "before"}},
		"dcgmExporter": map[string]any{}, "dcgm": map[string]any{}, "nodeStatusExporter": map[string]any{}, "gfd": map[string]any{},
		"mig":        map[string]any{"strategy": "single"},
		"daemonsets": map[string]any{"priorityClassName": "system-node-critical"},
	}}}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicy"})
	u.SetName("cluster-policy")
	return u
}

type writes struct {
	cluster    *env.Cluster
	controller client.Client
}

// writeCase is a write of the controller; says is why it is denied, empty if it is not.
type writeCase struct {
	do   func(context.Context) error
	says string
}

func (w *writes) cases() map[string]writeCase {
	cases := map[string]writeCase{}
	w.nodes(cases)
	w.clusterPolicies(cases)
	w.nodeFeatures(cases)
	w.autoscalers(cases)
	w.dra(cases)
	w.others(cases)
	return cases
}

func (w *writes) nodes(cases map[string]writeCase) {
	node := func(patch string) func(context.Context) error { return w.patch(&corev1.Node{}, "node-1", patch) }
	const taints, labels = "may not add or remove these taints: ", "may not change these labels of nodes: "
	for name, c := range map[string]writeCase{
		"selects a configuration": {do: node(`{"metadata": {"labels": {"nvidia.com/device-plugin.config": "a-1"},
			"annotations": {"gpusharing.io/selected": "a-1@1"}}}`)},
		"stops a client":        {do: node(`{"metadata": {"labels": {"nvidia.com/gpu.deploy.device-plugin": "paused-for-mig-change"}}}`)},
		"lets agents run":       {do: node(`{"metadata": {"labels": {"nvidia.com/gpu.deploy.client": "true"}, "annotations": {"gpusharing.io/client": "true@1"}}}`)},
		"asks mig-manager":      {do: node(`{"metadata": {"labels": {"nvidia.com/mig.config": "a", "nvidia.com/mig.config.state": null}}}`)},
		"adds a label":          {do: node(`{"metadata": {"labels": {"role": "control-plane"}}}`), says: labels + "role"},
		"changes a label":       {do: node(`{"metadata": {"labels": {"pool": "b"}}}`), says: labels + "pool"},
		"removes a label":       {do: node(`{"metadata": {"labels": {"pool": null}}}`), says: labels + "pool"},
		"sets a label of GFD's": {do: node(`{"metadata": {"labels": {"nvidia.com/gpu.product": "x"}}}`), says: labels + "nvidia.com/gpu.product"},
		"stops the driver":      {do: node(`{"metadata": {"labels": {"nvidia.com/gpu.deploy.driver": "false"}}}`), says: labels + "nvidia.com/gpu.deploy.driver"},
		"adds an annotation": {
			do:   node(`{"metadata": {"annotations": {"example.com/a": "b"}}}`),
			says: "may not change these annotations of nodes: example.com/a",
		},
		"cordons a node":        {do: node(`{"spec": {"unschedulable": true}}`), says: "may not change these fields of the spec of nodes: unschedulable"},
		"adds a finalizer":      {do: node(`{"metadata": {"finalizers": ["example.com/a"]}}`), says: "may not change finalizers and owner references"},
		"adds an owner":         {do: node(`{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "1"}]}}`), says: "may not change finalizers and owner references"},
		"taints with its own":   {do: node(withTaints(other, `{"key": "gpusharing.io/changing", "effect": "NoSchedule"}`))},
		"taints for a policy":   {do: node(withTaints(other, policyTaint, `{"key": "c", "effect": "PreferNoSchedule"}`))},
		"taints a role":         {do: node(withTaints(other, `{"key": "node-role.kubernetes.io/gpu", "value": "true", "effect": "NoSchedule"}`))},
		"removes its own taint": {do: node(withTaints(other))},
		"taints so that pods are evicted": {
			do: node(withTaints(other, `{"key": "a", "effect": "NoExecute"}`)), says: taints + "a:NoExecute",
		},
		"taints as Kubernetes does": {
			do: node(withTaints(other, `{"key": "node.kubernetes.io/out-of-service", "effect": "NoSchedule"}`)), says: taints + "node.kubernetes.io/out-of-service",
		},
		"removes another's taint": {do: node(withTaints(policyTaint)), says: taints + "example.com/other:NoSchedule"},
		"records the taint that it adds": {do: node(`{"metadata": {"annotations": {"gpusharing.io/taints": "c:NoSchedule,example.com/policy:NoSchedule"}}, ` +
			strings.TrimPrefix(withTaints(other, policyTaint, `{"key": "c", "effect": "NoSchedule"}`), "{"))},
		"records another's taint as its own": {
			do:   node(`{"metadata": {"annotations": {"gpusharing.io/taints": "example.com/other:NoSchedule"}}}`),
			says: "may not record these taints as its own: example.com/other:NoSchedule",
		},
	} {
		cases["node: it "+name] = c
	}
}

const (
	other       = `{"key": "example.com/other", "effect": "NoSchedule"}`
	policyTaint = `{"key": "example.com/policy", "value": "b", "effect": "NoSchedule"}`
)

// withTaints replaces the taints of a node, but for the one that the API server put there.
func withTaints(taints ...string) string {
	taints = append(taints, `{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}`)
	return fmt.Sprintf(`{"spec": {"taints": [%s]}}`, strings.Join(taints, ", "))
}

func (w *writes) clusterPolicies(cases map[string]writeCase) {
	policy := func(patch string) func(context.Context) error {
		return w.patch(clusterPolicy(), "cluster-policy", patch)
	}
	const fields = "may not change more than its fields of the ClusterPolicy in spec: "
	for name, c := range map[string]writeCase{
		"configures the device plugin": {do: policy(`{"metadata": {"annotations": {"gpusharing.io/baseline": "{}"}},
			"spec": {"devicePlugin": {"config": {"name": "gpu-sharing-device-plugin", "default": "a"}}, "mig": {"strategy": null}}}`)},
		"configures mig-manager":          {do: policy(`{"spec": {"migManager": {"config": {"name": "gpu-sharing-device-plugin"}}}}`)},
		"restores what mig-manager reads": {do: policy(`{"spec": {"migManager": null}}`)},
		"adds tolerations": {do: policy(`{"metadata": {"annotations": {"gpusharing.io/tolerations": "[]"}},
			"spec": {"daemonsets": {"tolerations": [{"key": "a", "operator": "Exists"}]}}}`)},
		"disables the driver":            {do: policy(`{"spec": {"driver": {"enabled": false}}}`), says: fields + "driver"},
		"adds a validator":               {do: policy(`{"spec": {"validator": {"image": "a"}}}`), says: fields + "validator"},
		"replaces the plugin's image":    {do: policy(`{"spec": {"devicePlugin": {"image": "a"}}}`), says: fields + "devicePlugin"},
		"disables the device plugin":     {do: policy(`{"spec": {"devicePlugin": {"enabled": false}}}`), says: fields + "devicePlugin"},
		"changes a priority":             {do: policy(`{"spec": {"daemonsets": {"priorityClassName": null}}}`), says: fields + "daemonsets"},
		"replaces mig-manager's image":   {do: policy(`{"spec": {"migManager": {"image": "a", "config": {"name": "b"}}}}`), says: fields + "migManager"},
		"labels the ClusterPolicy":       {do: policy(`{"metadata": {"labels": {"a": "b"}}}`), says: "may not change these labels of clusterpolicies: a"},
		"deletes the ClusterPolicy":      {do: func(ctx context.Context) error { return w.controller.Delete(ctx, clusterPolicy()) }, says: "may not DELETE clusterpolicies"},
		"annotates it as another's does": {do: policy(`{"metadata": {"annotations": {"a": "b"}}}`), says: "may not change these annotations of clusterpolicies: a"},
	} {
		cases["ClusterPolicy: it "+name] = c
	}
}

func (w *writes) nodeFeatures(cases map[string]writeCase) {
	feature := func(namespace, name, label string, instances map[string]any) func(context.Context) error {
		u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
			"labels":   map[string]any{label: "false"},
			"features": map[string]any{"flags": map[string]any{}, "attributes": map[string]any{}, "instances": instances},
		}}}
		u.SetGroupVersionKind(schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeature"})
		u.SetNamespace(namespace)
		u.SetName(name)
		u.SetLabels(map[string]string{"nfd.node.kubernetes.io/node-name": "node-1"})
		return func(ctx context.Context) error { return w.controller.Create(ctx, u.DeepCopy(), client.DryRunAll) }
	}
	write := func(namespace, name, label string) func(context.Context) error {
		return feature(namespace, name, label, map[string]any{})
	}
	pci := map[string]any{"pci.device": map[string]any{"elements": []any{map[string]any{"attributes": map[string]any{"vendor": "10de"}}}}}
	const place = "may write NodeFeatures in its own namespace only, whose names begin with zz-gpu-sharing-"
	for name, c := range map[string]writeCase{
		"overrides nvidia.com/mps.capable": {do: write(operatorNamespace, "zz-gpu-sharing-node-1", "nvidia.com/mps.capable")},
		"writes in another namespace":      {do: write("default", "zz-gpu-sharing-node-1", "nvidia.com/mps.capable"), says: place},
		"writes what is GFD's":             {do: write(operatorNamespace, "nvidia-features-for-node-1", "nvidia.com/mps.capable"), says: place},
		"sets another label": {
			do: write(operatorNamespace, "zz-gpu-sharing-node-1", "node-role.kubernetes.io/a"), says: "may set these labels through NodeFeatures only: nvidia.com/mps.capable",
		},
		"invents a device, for which a NodeFeatureRule may label, taint or annotate the node": {
			do:   feature(operatorNamespace, "zz-gpu-sharing-node-1", "nvidia.com/mps.capable", pci),
			says: "may report no features of hardware",
		},
	} {
		cases["NodeFeature: it "+name] = c
	}
}

func (w *writes) others(cases map[string]writeCase) {
	pod := func(patch string) func(context.Context) error {
		return w.patch(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}}, "workload", patch)
	}
	const cuda = "nvidia-cuda-validator"
	const deletesOnly = "may delete pods of DaemonSets and NVIDIA's validator pods of the ClusterPolicy only"
	ofClusterPolicy := ownedBy("nvidia.com/v1", "ClusterPolicy")
	deletes := func(name string, owner []metav1.OwnerReference, app string) func(context.Context) error {
		return func(ctx context.Context) error {
			p := validatorsPod(name, owner, app)
			if err := w.cluster.Client.Create(ctx, p); err != nil {
				return err
			}
			return w.controller.Delete(ctx, p)
		}
	}
	configMap := func(name string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": "gpu-sharing-operator"},
		}}
	}
	for name, c := range map[string]writeCase{
		"triggers a sync of a pod's volumes": {do: pod(`{"metadata": {"annotations": {"gpusharing.io/config": "a@1"}}}`)},
		"annotates a pod":                    {do: pod(`{"metadata": {"annotations": {"a": "b"}}}`), says: "may not change these annotations of pods: a"},
		"labels a pod":                       {do: pod(`{"metadata": {"labels": {"a": "b"}}}`), says: "may not change these labels of pods: a"},
		"replaces a pod's image":             {do: pod(`{"spec": {"containers": [{"name": "main", "image": "evil"}]}}`), says: "may not change these fields of the spec of pods: containers"},
		"deletes a workload's pod": {
			do: func(ctx context.Context) error {
				return w.controller.Delete(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "workload"}})
			},
			says: deletesOnly,
		},
		"deletes a test workload of NVIDIA's validator": {do: deletes("nvidia-cuda-validator-x", ofClusterPolicy, cuda)},
		"deletes the other test workload of NVIDIA's validator": {
			do: deletes("nvidia-device-plugin-validator-x", ofClusterPolicy, "nvidia-device-plugin-validator"),
		},
		"deletes a pod with the label of NVIDIA's validator and no owner": {
			do: deletes("nvidia-cuda-validator-y", nil, cuda), says: deletesOnly,
		},
		"deletes a pod with the label of NVIDIA's validator that a ReplicaSet owns": {
			do: deletes("nvidia-cuda-validator-z", ownedBy("apps/v1", "ReplicaSet"), cuda), says: deletesOnly,
		},
		"deletes a pod of another kind named ClusterPolicy": {
			do: deletes("nvidia-cuda-validator-k", ownedBy("kyverno.io/v1", "ClusterPolicy"), cuda), says: deletesOnly,
		},
		"deletes another pod of the ClusterPolicy": {
			do: deletes("nvidia-cuda-validator-w", ofClusterPolicy, "nvidia-driver"), says: deletesOnly,
		},
		"deletes a pod of the ClusterPolicy by another name": {do: deletes("train", ofClusterPolicy, cuda), says: deletesOnly},
		"deletes a pod of a DaemonSet": {do: func(ctx context.Context) error {
			return w.controller.Delete(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "plugin"}})
		}},
		"creates a pod": {
			do: func(ctx context.Context) error {
				return w.controller.Create(ctx, &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "new"},
					Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "a", Image: "b"}}},
				})
			},
			says: "may not CREATE pods",
		},
		"creates and deletes its ConfigMap": {do: func(ctx context.Context) error {
			if err := w.controller.Create(ctx, configMap("gpu-sharing-device-plugin")); err != nil {
				return err
			}
			return w.controller.Delete(ctx, configMap("gpu-sharing-device-plugin"))
		}},
		"creates another ConfigMap": {
			do:   func(ctx context.Context) error { return w.controller.Create(ctx, configMap("kube-root-ca.crt2")) },
			says: "may write these ConfigMaps only: gpu-sharing-device-plugin, nvidia-plugin-configs",
		},
	} {
		cases["it "+name] = c
	}
}

// patch is a merge patch of an object by the controller, which changes nothing yet.
func (w *writes) patch(o client.Object, name, body string) func(context.Context) error {
	return func(ctx context.Context) error {
		target, is := o.DeepCopyObject().(client.Object)
		if !is {
			return fmt.Errorf("%T is no object", o)
		}
		target.SetName(name)
		return w.controller.Patch(ctx, target, client.RawPatch(types.MergePatchType, []byte(body)), client.DryRunAll)
	}
}

// validatorsPod is a pod in the form of a test workload of NVIDIA's validator. Its owner is that of the validator's
// DaemonSet (NVIDIA/gpu-operator cmd/nvidia-validator/main.go).
func validatorsPod(name string, owner []metav1.OwnerReference, app string) *corev1.Pod {
	labels := map[string]string{"app": app}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: labels, OwnerReferences: owner},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "example.invalid/main"}}},
	}
}

// ownedBy is a reference to the controller of an object.
func ownedBy(apiVersion, kind string) []metav1.OwnerReference {
	return []metav1.OwnerReference{{
		APIVersion: apiVersion, Kind: kind, Name: "owner", UID: "1", Controller: new(true), BlockOwnerDeletion: new(true),
	}}
}
