// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/spf13/pflag"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// pluginConfigMap is the name of the operator's ConfigMap.
const pluginConfigMap = cluster.ConfigMapName

// waiting is a clock on which the time that a caller waits passes at once.
type waiting struct {
	*clocktesting.FakeClock

	waits int
	do    func(waits int) // what the cluster does meanwhile
}

func (w *waiting) After(d time.Duration) <-chan time.Time {
	w.waits++
	if w.do != nil {
		w.do(w.waits)
	}
	w.Step(d)
	done := make(chan time.Time, 1)
	done <- w.Now()
	return done
}

// shared is a cluster in which a policy shares the GPUs of the node a, and a controller runs.
type shared struct {
	*WithT
	t      *testing.T
	client client.WithWatch
	clock  *waiting
	lists  func(client.ObjectList) error // fails a call
}

func newShared(t *testing.T, cluster *env.Cluster) *shared {
	t.Helper()
	s := &shared{WithT: NewWithT(t), t: t, client: cluster.Client, clock: &waiting{FakeClock: clocktesting.NewFakeClock(now)}}
	s.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "gpu-sharing-operator"}})
	s.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "a", Labels: map[string]string{"gpusharing.io/mps.capable-overridden": "true"},
		Annotations: map[string]string{v1alpha1.AnnotationSelected: "research@1", v1alpha1.AnnotationRunsAgent: "true@1"},
	}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: v1alpha1.TaintChanging, Effect: corev1.TaintEffectNoSchedule}}}})
	s.create(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: v1alpha1.GPUNodeSpec{
		PolicyName: "research", Baseline: &v1alpha1.Baseline{}, Release: &v1alpha1.Release{ReleasePolicy: v1alpha1.ReleasePolicyRestore},
	}})
	p := policy(t, "research", slicing)
	s.create(&p)
	s.create(object("nfd.k8s-sigs.io/v1alpha1", "NodeFeature", "gpu-sharing-operator", action.OverrideName("a"),
		map[string]any{"labels": map[string]any{"nfd.node.kubernetes.io/node-name": "a"}}))
	s.create(object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy",
		map[string]any{"annotations": map[string]any{v1alpha1.AnnotationTolerations: "[]"}}))
	s.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: pluginConfigMap, Labels: map[string]string(managedByUs),
	}})
	s.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "machines"}})
	for _, name := range []string{"mine", pluginConfigMap} { // of a tenant, who does not let the controller delete the second
		s.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: "machines", Name: name, Labels: map[string]string(managedByUs), Finalizers: []string{"example.com/stays"},
		}})
	}
	s.Expect(s.client.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "machines", Name: pluginConfigMap}})).To(Succeed())
	overlay := nodeOverlay()
	overlay.SetLabels(map[string]string{autoscaling.LabelPolicy: "research"})
	set := machineSet()
	set.SetAnnotations(map[string]string{v1alpha1.AnnotationAutoscaling: `{"policy":"research"}`, autoscaling.AnnotationGPUCount: "8"})
	for _, o := range []*unstructured.Unstructured{overlay, set} {
		s.Expect(s.client.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(o), client.FieldOwner(autoscaling.FieldManager))).To(Succeed())
	}
	s.create(bindingOf("gpu-sharing-operator"))
	s.renew(s.clock.Now())
	t.Cleanup(s.clean)
	return s
}

func nodeOverlay() *unstructured.Unstructured {
	return object("karpenter.sh/v1alpha1", "NodeOverlay", "", autoscaling.OverlayPrefix+"research-gpu-0123", map[string]any{})
}

func machineSet() *unstructured.Unstructured {
	return object("machine.openshift.io/v1beta1", "MachineSet", "machines", "gpu", map[string]any{})
}

func object(apiVersion, kind, namespace, name string, metadata map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"metadata": metadata, "spec": map[string]any{}}}
	o.SetAPIVersion(apiVersion)
	o.SetKind(kind)
	o.SetNamespace(namespace)
	o.SetName(name)
	return o
}

func (s *shared) create(o client.Object) {
	s.t.Helper()
	s.Expect(client.IgnoreAlreadyExists(s.client.Create(s.t.Context(), o))).To(Succeed())
}

func (s *shared) clean() {
	ctx := context.Background()
	for _, o := range []client.Object{
		&corev1.Node{}, &v1alpha1.GPUNode{}, &v1alpha1.GPUSharingPolicy{}, object("nvidia.com/v1", "ClusterPolicy", "", "", map[string]any{}),
		object("karpenter.sh/v1alpha1", "NodeOverlay", "", "", map[string]any{}),
	} {
		s.Expect(s.client.DeleteAllOf(ctx, o)).To(Succeed())
	}
	for _, o := range []client.Object{
		object("nfd.k8s-sigs.io/v1alpha1", "NodeFeature", "", "", map[string]any{}), &coordinationv1.Lease{},
	} {
		s.Expect(s.client.DeleteAllOf(ctx, o, client.InNamespace("gpu-sharing-operator"))).To(Succeed())
	}
	s.Expect(s.client.DeleteAllOf(ctx, object("machine.openshift.io/v1beta1", "MachineSet", "", "", map[string]any{}), client.InNamespace("machines"))).To(Succeed())
	s.Expect(s.client.DeleteAllOf(ctx, &corev1.ConfigMap{}, client.InNamespace("default"), managedByUs)).To(Succeed())
}

// renew lets the leader of the controllers renew its lease at a time.
func (s *shared) renew(at time.Time) {
	s.t.Helper()
	lease := leaseIn("gpu-sharing-operator", at)
	s.Expect(client.IgnoreNotFound(s.client.Delete(s.t.Context(), lease.DeepCopy()))).To(Succeed())
	s.create(lease)
}

// patch changes an object by a merge patch.
func (s *shared) patch(o client.Object, patch string) {
	s.t.Helper()
	s.Expect(s.client.Patch(s.t.Context(), o, client.RawPatch("application/merge-patch+json", []byte(patch)))).To(Succeed())
}

// report lets the controller report in the status of a GPUNode why its node is not ready.
func (s *shared) report(gpuNode *v1alpha1.GPUNode, reason, message string) {
	s.t.Helper()
	s.Expect(s.client.Get(s.t.Context(), client.ObjectKeyFromObject(gpuNode), gpuNode)).To(Succeed())
	gpuNode.Status.Conditions = condition.Set(gpuNode.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: reason, Message: message,
	}, now)
	s.Expect(s.client.Status().Update(s.t.Context(), gpuNode)).To(Succeed())
}

// restoreStep is the next step of the way back, as a controller takes it. It is false after the last.
func (s *shared) restoreStep(step int) bool {
	s.t.Helper()
	ctx, node := s.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	gpuNode := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	switch step {
	case 1:
		s.patch(gpuNode, `{"spec":{"policyName":null}}`)
		s.report(gpuNode, "GPUInUse", "pod team/train uses GPU 0")
	case 2:
		s.patch(gpuNode, `{"spec":{"baseline":null,"release":null}}`)
	case 3:
		s.patch(node, `{"spec":{"taints":null}}`)
	case 4:
		s.patch(node, `{"metadata":{"annotations":{"gpusharing.io/selected":null}}}`)
	case 5:
		s.patch(node, `{"metadata":{"labels":{"gpusharing.io/mps.capable-overridden":null}}}`)
	case 6:
		s.Expect(s.client.Delete(ctx, object("nfd.k8s-sigs.io/v1alpha1", "NodeFeature", "gpu-sharing-operator",
			action.OverrideName("a"), map[string]any{}))).To(Succeed())
	case 7:
		s.patch(object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy", map[string]any{}),
			`{"metadata":{"annotations":{"gpusharing.io/tolerations":null}}}`)
	case 8:
		s.Expect(s.client.Delete(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pluginConfigMap}})).To(Succeed())
	case 9:
		s.Expect(s.client.Delete(ctx, nodeOverlay())).To(Succeed())
	case 10:
		s.Expect(s.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(machineSet()), client.FieldOwner(autoscaling.FieldManager))).To(Succeed())
	default:
		return false
	}
	return true
}

// restoring are the flags of restore, as given.
func restoring(t *testing.T, args ...string) *flags {
	t.Helper()
	f, verbs := newFlags(), (&Program{}).verbs()
	set := pflag.NewFlagSet("restore", pflag.ContinueOnError)
	verbs[slices.IndexFunc(verbs, func(v verb) bool { return v.use == "restore" })].flags(f, set)
	NewWithT(t).Expect(set.Parse(args)).To(Succeed())
	return f
}

// run restores with these flags and this answer.
func (s *shared) run(answer string, args ...string) (string, error) {
	s.t.Helper()
	f, out := restoring(s.t, append([]string{"--timeout=1m"}, args...)...), &strings.Builder{}
	p := &Program{In: strings.NewReader(answer), Interactive: answer != "", Out: out, Clock: s.clock}
	c := interceptor.NewClient(s.client, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if s.lists != nil {
				if err := s.lists(list); err != nil {
					return err
				}
			}
			return c.List(ctx, list, opts...)
		},
	})
	err := restoration{Program: p, client: c}.run(s.t.Context(), f)
	return out.String(), err
}

// policies counts those that are left.
func (s *shared) policies() int {
	s.t.Helper()
	all := &v1alpha1.GPUSharingPolicyList{}
	s.Expect(s.client.List(s.t.Context(), all)).To(Succeed())
	return len(all.Items)
}

func TestRestore(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA(), env.WithAutoscalers())
	for name, test := range map[string]func(*shared){
		"waits until the last trace is gone":               waitsForTheLastTrace,
		"takes no failed call for restored":                takesNoFailedCall,
		"ends with what is left when its time is over":     endsWithWhatIsLeft,
		"names the taint that keeps a toleration":          namesTheTaint,
		"says why a policy is there again":                 saysThatAPolicyIsThereAgain,
		"deletes nothing under releasePolicy Retain":       refusesRetain,
		"deletes nothing where no controller runs":         needsAController,
		"reports a controller that ends meanwhile":         reportsAnEndedController,
		"deletes nothing unless it is confirmed":           asksFirst,
		"waits for nothing if it is told so":               waitsForNothing,
		"does nothing where nothing is shared":             doesNothing,
		"reports which rights it lacks":                    reportsRights,
		"reports what is left where the kinds are missing": needsTheKinds,
	} {
		t.Run(name, func(t *testing.T) { test(newShared(t, cluster)) })
	}
}

func waitsForTheLastTrace(s *shared) {
	steps := 0
	s.clock.do = func(waits int) {
		if s.restoreStep(waits) {
			steps++
		}
	}
	out, err := s.run("", "--yes")
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(steps).To(Equal(10), out)
	s.Expect(s.clock.waits).To(Equal(10), "not a moment longer")
	for _, line := range []string{
		"gpusharingpolicy/research deleted\n", "node/a is shared by policy research\n",
		"node/a is not restored yet: GPUInUse: Pod team/train uses GPU 0\n",
		"node/a has the taint gpusharing.io/changing\n", "node/a has the annotation gpusharing.io/selected\n",
		"node/a has the label gpusharing.io/mps.capable-overridden\n",
		"nodefeature/zz-gpu-sharing-a of the operator exists in namespace gpu-sharing-operator\n",
		"clusterpolicy/cluster-policy has the annotation gpusharing.io/tolerations\n",
		"configmap/gpu-sharing-device-plugin of the operator exists in namespace default",
		"nodeoverlay/gpu-sharing-research-gpu-0123 of policy research exists",
		"MachineSet machines/gpu has annotations of the operator for the autoscaler",
	} {
		s.Expect(out).To(ContainSubstring(line))
	}
	s.Expect(out).NotTo(ContainSubstring(v1alpha1.AnnotationRunsAgent), "it stays as long as agents run")
	s.Expect(out).To(HaveSuffix("Restored: every node, and NVIDIA's ClusterPolicy, is as it was before the operator.\n"))
}

// takesNoFailedCall fails each call in turn in a cluster in which nothing is left but what that call would tell.
func takesNoFailedCall(s *shared) {
	for step := 1; s.restoreStep(step); step++ {
		if step == 1 {
			s.Expect(s.client.DeleteAllOf(s.t.Context(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
		}
	}
	for _, kind := range []string{"GPUSharingPolicy", "GPUNode", "Node", "NodeFeature", "ClusterPolicy", "ConfigMap", "NodeOverlay", "MachineSet"} {
		p := policy(s.t, "research", slicing)
		s.create(&p)
		calls := 0
		s.lists = func(list client.ObjectList) error {
			gvk, err := s.client.GroupVersionKindFor(list)
			s.Expect(err).NotTo(HaveOccurred())
			if gvk.Kind == kind+"List" {
				calls++
			}
			if gvk.Kind == kind+"List" && s.policies() == 0 && s.clock.waits < 3 {
				return apierrors.NewServiceUnavailable("etcd has no leader")
			}
			return nil
		}
		s.clock.waits = 0
		s.clock.do = func(int) {}
		out, err := s.run("", "--yes")
		s.Expect(err).NotTo(HaveOccurred(), kind)
		s.Expect(calls).To(BeNumerically(">", 3), kind)
		s.Expect(s.clock.waits).To(Equal(3), "%s: %s", kind, out)
		s.Expect(out).To(And(ContainSubstring("not known: reading "), ContainSubstring("etcd has no leader"), ContainSubstring("Restored: every node")), kind)
	}
}

func endsWithWhatIsLeft(s *shared) {
	out, err := s.run("", "--yes", "--timeout=10s")
	s.Expect(err).To(MatchError(ErrNotRestored))
	s.Expect(err).To(MatchError(And(ContainSubstring("not restored within 10s"), ContainSubstring("run the command again"),
		ContainSubstring("node/a has the taint gpusharing.io/changing"))))
	s.Expect(strings.Count(out, "Waiting:")).To(Equal(1), "the same is printed once: %s", out)
	s.lists = func(client.ObjectList) error { return nil }
	s.clock.do = func(waits int) {
		if waits == s.clock.waits && waits > 6 {
			s.lists = func(client.ObjectList) error { return apierrors.NewServiceUnavailable("etcd has no leader") }
		}
	}
	s.clock.waits = 5
	_, err = s.run("", "--timeout=10s")
	s.Expect(err).To(MatchError(ErrNotRestored))
	s.Expect(err).To(MatchError(ContainSubstring("not known: reading policies: etcd has no leader")))
}

// namesTheTaint that was on the node before the policy asked for it, so that the operator does not remove it.
func namesTheTaint(s *shared) {
	policy := object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy", map[string]any{})
	s.Expect(s.client.Patch(s.t.Context(), policy, client.RawPatch(types.MergePatchType, []byte(`{
		"metadata": {"annotations": {"gpusharing.io/tolerations": "{\"added\":[{\"key\":\"example.com/gpu\",\"operator\":\"Exists\"}]}"}},
		"spec": {"daemonsets": {"tolerations": [{"key": "example.com/gpu", "operator": "Exists"}]}}}`)),
		client.FieldOwner(clusterpolicy.FieldManager))).To(Succeed())
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, `{"spec":{"taints":[{"key":"example.com/gpu","effect":"NoSchedule"}]}}`)
	_, err := s.run("", "--yes", "--timeout=10s")
	s.Expect(err).To(MatchError(ContainSubstring("gpusharing.io/tolerations: node/a has the taint example.com/gpu:NoSchedule")))
}

// saysThatAPolicyIsThereAgain because a program such as Argo CD applies it from a repository.
func saysThatAPolicyIsThereAgain(s *shared) {
	s.clock.do = func(int) {
		p := policy(s.t, "research", slicing)
		s.create(&p)
	}
	out, err := s.run("", "--yes", "--timeout=10s")
	s.Expect(err).To(MatchError(ErrNotRestored))
	s.Expect(err).To(MatchError(ContainSubstring("1 GPUSharingPolicy object created after all policies were deleted: research. Stop what creates policies, such as Argo CD")))
	before, _, _ := strings.Cut(out, "gpusharingpolicy/research exists")
	s.Expect(before).NotTo(ContainSubstring("created after"), "before it was there again")
}

func refusesRetain(s *shared) {
	s.patch(&v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}}, `{"spec":{"releasePolicy":"Retain"}}`)
	_, err := s.run("", "--yes")
	s.Expect(err).To(MatchError(And(ContainSubstring("releasePolicy Retain"), ContainSubstring("\n  gpusharingpolicy/research"))))
	s.Expect(s.policies()).To(Equal(1))
	s.patch(&v1alpha1.GPUSharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "research"}}, `{"spec":{"releasePolicy":"Restore"}}`)
	s.patch(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, `{"spec":{"release":{"releasePolicy":"Retain"}}}`)
	_, err = s.run("", "--yes")
	s.Expect(err).To(MatchError(ContainSubstring("\n  node/a")), "the controller has not brought Restore to the node yet")
	s.Expect(s.policies()).To(Equal(1))
	s.lists = func(list client.ObjectList) error {
		if _, is := list.(*v1alpha1.GPUNodeList); is {
			return apierrors.NewServiceUnavailable("etcd has no leader")
		}
		return nil
	}
	_, err = s.run("", "--yes")
	s.Expect(err).To(MatchError(ContainSubstring("etcd has no leader")))
	s.Expect(s.policies()).To(Equal(1), "who retains what is not known")
}

func needsAController(s *shared) {
	s.renew(s.clock.Now().Add(-10 * time.Minute))
	_, err := s.run("", "--yes")
	s.Expect(err).To(MatchError(And(ContainSubstring("No controller runs"), ContainSubstring("nothing was deleted"),
		ContainSubstring("lease gpu-sharing-operator/gpu-sharing-controller was last renewed at 2027-01-15T07:50:00Z, by controller-1"))))
	s.Expect(s.client.DeleteAllOf(s.t.Context(), &coordinationv1.Lease{}, client.InNamespace("gpu-sharing-operator"))).To(Succeed())
	_, err = s.run("", "--yes")
	s.Expect(err).To(MatchError(ContainSubstring("namespace gpu-sharing-operator has neither lease gpu-sharing-controller nor an available Deployment")))
	s.Expect(s.policies()).To(Equal(1))
}

func reportsAnEndedController(s *shared) {
	out, err := s.run("", "--yes", "--timeout=3m")
	s.Expect(err).To(MatchError(ErrNotRestored))
	s.Expect(out).To(ContainSubstring("No controller runs: lease"))
}

func asksFirst(s *shared) {
	_, err := s.run("")
	s.Expect(err).To(MatchError(And(ContainSubstring("confirm that by --yes"), ContainSubstring("gpusharingpolicy/research"))))
	out, err := s.run("n\n")
	s.Expect(err).To(MatchError(ContainSubstring("canceled: nothing was deleted")))
	s.Expect(out).To(ContainSubstring("You are about to delete 1 GPUSharingPolicy object and to restore the nodes:\n  gpusharingpolicy/research\n"))
	s.Expect(s.policies()).To(Equal(1))
	_, err = s.run("y\n", "--wait=false")
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(s.policies()).To(BeZero())
}

func waitsForNothing(s *shared) {
	out, err := s.run("", "--yes", "--wait=false")
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(out).To(And(ContainSubstring("gpusharingpolicy/research deleted"), ContainSubstring("waits until it has")))
	s.Expect(s.clock.waits).To(BeZero())
}

func doesNothing(s *shared) {
	for step := 1; s.restoreStep(step); step++ {
		s.Expect(s.client.DeleteAllOf(s.t.Context(), &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	}
	out, err := s.run("")
	s.Expect(err).NotTo(HaveOccurred())
	s.Expect(out).To(Equal("Restored: there was nothing to restore.\n"))
}

func reportsRights(s *shared) {
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", fmt.Errorf("no"))
	s.lists = func(list client.ObjectList) error {
		if _, is := list.(*corev1.NodeList); is {
			return forbidden
		}
		return nil
	}
	_, err := s.run("", "--yes")
	s.Expect(err).To(MatchError(ContainSubstring("gpu-sharing-view, gpu-sharing-edit and gpu-sharing-cli")))
	s.Expect(s.policies()).To(Equal(1))
}

// needsTheKinds plays a cluster whose kinds a user has deleted, and with them what the operator knew.
func needsTheKinds(s *shared) {
	gone := &noKinds{WithWatch: s.client}
	p := &Program{Out: &strings.Builder{}, Clock: s.clock}
	err := restoration{Program: p, client: gone}.run(s.t.Context(), newFlags())
	s.Expect(err).To(MatchError(And(ContainSubstring("its records of the nodes are gone"), ContainSubstring("node/a has the taint gpusharing.io/changing"))))
	for step := 3; s.restoreStep(step); step++ {
		s.Expect(restoration{Program: p, client: gone}.run(s.t.Context(), newFlags()) == nil).To(Equal(step == 10), "after step %d", step)
	}
}

// noKinds is a client of an API server that does not serve the operator's kinds.
type noKinds struct{ client.WithWatch }

func (n *noKinds) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	gvk, err := n.GroupVersionKindFor(list)
	if err != nil {
		return err
	}
	if gvk.Group == v1alpha1.Group {
		return &meta.NoKindMatchError{GroupKind: gvk.GroupKind(), SearchedVersions: []string{gvk.Version}}
	}
	return n.WithWatch.List(ctx, list, opts...)
}

// TestARestoreDoesNotSayThatItDidNotBeginWhereThatIsNotKnown: the connection is lost after the API server has deleted
// the first policy.
func TestARestoreDoesNotSayThatItDidNotBeginWhereThatIsNotKnown(t *testing.T) {
	g := NewWithT(t)
	scheme, err := newScheme()
	g.Expect(err).NotTo(HaveOccurred())
	a, lease := policy(t, "a", slicing), leaseIn("gpu-sharing-operator", now)
	a.ResourceVersion = ""
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(&a, lease, bindingOf("gpu-sharing-operator")).
		WithIndex(lease, "metadata.name", byFieldName).
		WithInterceptorFuncs(interceptor.Funcs{
			Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
				return errors.Join(c.Delete(ctx, o, opts...), io.ErrUnexpectedEOF)
			},
		}).Build()
	f := restoring(t, "--yes")
	p := &Program{In: strings.NewReader(""), Out: &strings.Builder{}, Clock: &waiting{FakeClock: clocktesting.NewFakeClock(now)}}
	err = restoration{Program: p, client: c}.run(t.Context(), f)
	g.Expect(err).To(MatchError(And(ContainSubstring("unexpected EOF"), ContainSubstring("Run the command again"))))
	g.Expect(errors.Is(err, ErrNotRestored)).To(BeTrue(), "exit code 2: %v", err)
}

// TestARestoreThatHasBegunDoesNotSayThatItDidNot: exit code 1 says that it did not begin. After the first policy is
// deleted a failure has code 2.
func TestARestoreThatHasBegunDoesNotSayThatItDidNot(t *testing.T) {
	scheme, err := newScheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	for failing, begun := range map[int]bool{1: false, 2: true} {
		t.Run(fmt.Sprintf("deletion %d fails", failing), func(t *testing.T) {
			g := NewWithT(t)
			a, b, lease := policy(t, "a", slicing), policy(t, "b", slicing), leaseIn("gpu-sharing-operator", now)
			a.ResourceVersion, b.ResourceVersion = "", ""
			deletions := 0
			c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(&a, &b, lease, bindingOf("gpu-sharing-operator")).
				WithIndex(lease, "metadata.name", byFieldName).
				WithInterceptorFuncs(interceptor.Funcs{
					Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
						if deletions++; deletions == failing {
							return apierrors.NewServiceUnavailable("etcd has no leader")
						}
						return c.Delete(ctx, o, opts...)
					},
				}).Build()
			f, out := restoring(t, "--yes", "--timeout=1m"), &strings.Builder{}
			p := &Program{In: strings.NewReader(""), Out: out, Clock: &waiting{FakeClock: clocktesting.NewFakeClock(now)}}
			err := restoration{Program: p, client: c}.run(t.Context(), f)
			g.Expect(err).To(MatchError(ContainSubstring("etcd has no leader")))
			g.Expect(errors.Is(err, ErrNotRestored)).To(Equal(begun), "exit code 2: %v", err)
			g.Expect(strings.Contains(out.String(), "gpusharingpolicy/a deleted")).To(Equal(begun))
			if begun {
				g.Expect(err).To(MatchError(And(ContainSubstring("1 of 2 GPUSharingPolicy objects deleted"), ContainSubstring("Run the command again"))))
			}
		})
	}
}

// restore waits for the startup taint of a node without a GPU label too: once the controller is gone, nobody takes it off. One that a user
// registers nodes with is the user's.
func TestTheStartupTaintOfANodeWithoutAGPULabelIsLeft(t *testing.T) {
	g := NewWithT(t)
	early := autoscaling.WithStartup(nil, true)
	theirs := []corev1.Taint{{Key: early[0].Key, Effect: corev1.TaintEffectNoSchedule}}
	c := fake.NewClientBuilder().WithObjects(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "new"}, Spec: corev1.NodeSpec{Taints: early}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "registered"}, Spec: corev1.NodeSpec{Taints: theirs}},
	).Build()
	left, err := leftNodes(t.Context(), c)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(left).To(Equal([]string{"node/new has the taint startup-taint.cluster-autoscaler.kubernetes.io/gpusharing"}))
}

// Once the agent is gone nobody removes the limits that it has set.
func TestMemoryLimitsThatTheAgentHasYetToRemoveAreLeft(t *testing.T) {
	g := NewWithT(t)
	scheme := runtime.NewScheme()
	g.Expect(v1alpha1.AddToScheme(scheme)).To(Succeed())
	n := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(n).Build()
	g.Expect(leftGPUNodes(t.Context(), c)).To(BeEmpty())
	n.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionMemoryLimited, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonLimitFailed, Message: "2 limits remain",
	}}
	g.Expect(c.Update(t.Context(), n)).To(Succeed())
	g.Expect(leftGPUNodes(t.Context(), c)).To(Equal([]string{"node/n1 may have the driver's memory limits yet: LimitFailed: 2 limits remain"}))
}
