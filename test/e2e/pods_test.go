// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
)

// users is the namespace of users' pods, which must keep to the Pod Security Standard restricted.
const users = "default"

// given is what a user's program says that it got (test/e2e/programs/workload).
type given struct {
	// Visible is "void" where devices come by CDI: ask for uuids instead.
	Visible       string
	PipeDirectory string
	Pipes         []string
	Devices       []device
	// Drivers are the versions of the driver whose CUDA library it got, which is none where devices do not come by CDI.
	Drivers []string
	// Began is when the program began.
	Began time.Time
	// Probes are the errors of opening device files that the program has made itself, by number.
	Probes map[string]string
}

// startPod starts a user's pod that asks for some of a resource, and removes it when the spec ends.
func startPod(ctx context.Context, name string, requests corev1.ResourceName, count int64, with ...func(*corev1.PodSpec)) {
	GinkgoHelper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, Labels: named(name)}, Spec: requesting(requests, count)}
	for _, change := range with {
		change(&pod.Spec)
	}
	Expect(kube.Create(ctx, pod)).To(Succeed())
	DeferCleanup(stopPods) // all at once; the pods of a spec that have gone by then cost nothing
}

// startDeployment starts a user's Deployment of one pod that asks for one of a resource. What it returns ends it, as
// the end of the spec does.
func startDeployment(ctx context.Context, name string, requests corev1.ResourceName) (stop func(context.Context)) {
	GinkgoHelper()
	return deploy(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name},
		Spec:       appsv1.DeploymentSpec{Selector: selecting(name), Template: template(name, requesting(requests, 1))},
	})
}

// deploy creates what makes pods. What it returns ends it, as the end of the spec does.
func deploy(ctx context.Context, workload client.Object) (stop func(context.Context)) {
	GinkgoHelper()
	Expect(kube.Create(ctx, workload)).To(Succeed())
	stop = func(ctx context.Context) {
		GinkgoHelper()
		// What it has made goes before it does, so that nothing makes pods any more once it is gone.
		Expect(client.IgnoreNotFound(kube.Delete(ctx, workload, client.PropagationPolicy(metav1.DeletePropagationForeground)))).To(Succeed())
		Eventually(func() error { return kube.Get(ctx, client.ObjectKeyFromObject(workload), workload) }).WithContext(ctx).
			Should(MatchError(ContainSubstring("not found")))
	}
	DeferCleanup(stop)
	return stop
}

func selecting(name string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: named(name)}
}

func template(name string, spec corev1.PodSpec) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: named(name)}, Spec: spec}
}

func named(name string) map[string]string { return map[string]string{"name": name} }

// requesting is a user's program that asks for some of a resource.
func requesting(resources corev1.ResourceName, count int64) corev1.PodSpec {
	return corev1.PodSpec{
		TerminationGracePeriodSeconds: ptr.To[int64](1),
		SecurityContext: &corev1.PodSecurityContext{
			RunAsNonRoot: new(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		Containers: []corev1.Container{{
			Name: "main", Image: workloadImage,
			SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: new(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			},
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{resources: *resource.NewQuantity(count, resource.DecimalSI)}},
		}},
	}
}

// stopPod ends a user's pod and waits until the kubelet has let go of it.
func stopPod(ctx context.Context, name string) {
	GinkgoHelper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name}}
	Expect(client.IgnoreNotFound(kube.Delete(ctx, pod))).To(Succeed())
	Eventually(func() error { return kube.Get(ctx, client.ObjectKeyFromObject(pod), pod) }).WithContext(ctx).
		Should(MatchError(ContainSubstring("not found")))
}

// stopPods ends all users' pods, side by side.
func stopPods(ctx context.Context) {
	GinkgoHelper()
	Expect(kube.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(users))).To(Succeed())
	Eventually(func() ([]string, error) {
		pods := &corev1.PodList{}
		err := kube.List(ctx, pods, client.InNamespace(users))
		var names []string
		for i := range pods.Items {
			names = append(names, pods.Items[i].Name)
		}
		return names, err
	}).WithContext(ctx).Should(BeEmpty())
}

// expectRunning waits until a user's program runs, and returns what it got. NVIDIA's device plugin starts anew for a
// new configuration, and while it does the kubelet refuses a pod that the scheduler sends; then another takes its
// place, as a ReplicaSet would have it.
func expectRunning(ctx context.Context, name string) given {
	GinkgoHelper()
	pod := &corev1.Pod{}
	Eventually(func(g Gomega) {
		g.Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)).To(Succeed())
		if refused(pod) {
			AddReportEntry("refused while the device plugin started anew, and replaced", name)
			again := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: name, Labels: pod.Labels}, Spec: pod.Spec}
			again.Spec.NodeName = ""
			stopPod(ctx, name)
			g.Expect(kube.Create(ctx, again)).To(Succeed())
		}
		g.Expect(pod.Status.Phase).To(Equal(corev1.PodRunning), "%s", state(pod))
	}).WithContext(ctx).Should(Succeed())
	return givenTo(ctx, client.ObjectKeyFromObject(pod))
}

// givenTo waits until the program in the first container of a pod says what it got.
func givenTo(ctx context.Context, key client.ObjectKey) (got given) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		pod := &corev1.Pod{}
		g.Expect(kube.Get(ctx, key, pod)).To(Succeed())
		of := &corev1.PodLogOptions{Container: pod.Spec.Containers[0].Name}
		log, err := machine.Client.CoreV1().Pods(key.Namespace).GetLogs(key.Name, of).DoRaw(ctx)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(json.NewDecoder(bytes.NewReader(log)).Decode(&got)).To(Succeed(), "%s", log)
	}).WithContext(ctx).Should(Succeed())
	return got
}

// refused reports whether the kubelet did not take a pod since just then the device plugin offered nothing, or too
// little.
func refused(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodFailed &&
		(pod.Status.Reason == "UnexpectedAdmissionError" || strings.HasPrefix(pod.Status.Reason, "OutOf"+nvidiaDomain))
}

// expectPending checks that the scheduler has looked at a user's pod and found no room for it.
func expectPending(ctx context.Context, name, why string) {
	GinkgoHelper()
	expectPhase(ctx, name, corev1.PodPending, why)
}

// expectRefused checks that the kubelet has refused a user's pod. It is never tried again.
func expectRefused(ctx context.Context, name, why string) {
	GinkgoHelper()
	expectPhase(ctx, name, corev1.PodFailed, why)
}

func expectPhase(ctx context.Context, name string, phase corev1.PodPhase, why string) {
	GinkgoHelper()
	pod := &corev1.Pod{}
	Eventually(func(g Gomega) {
		g.Expect(kube.Get(ctx, client.ObjectKey{Namespace: users, Name: name}, pod)).To(Succeed())
		g.Expect(pod.Status.Phase).To(Equal(phase))
		g.Expect(state(pod)).To(ContainSubstring(why))
	}).WithContext(ctx).Should(Succeed())
}

// state is why a pod is as it is.
func state(pod *corev1.Pod) string {
	parts := []string{string(pod.Status.Phase), pod.Status.Reason, pod.Status.Message}
	for _, c := range pod.Status.Conditions {
		if c.Status != corev1.ConditionTrue {
			parts = append(parts, string(c.Type), c.Reason, c.Message)
		}
	}
	return strings.Join(parts, " ")
}

// expectSettled waits until NVIDIA's programs have taken over what was last asked of them, and returns their restarts
// and those of users' pods: from then on, none has a reason to restart.
func expectSettled(ctx context.Context) map[string]int32 {
	GinkgoHelper()
	Eventually(configuredForUs).WithContext(ctx).Should(Succeed())
	expectOperandsReady(ctx)
	Eventually(ending).WithContext(ctx).Should(BeEmpty(), "pods that others have replaced")
	before, err := restarts(ctx)
	Expect(err).NotTo(HaveOccurred())
	return before
}

// ending are the pods of NVIDIA's programs that are asked to end.
func ending(ctx context.Context) ([]string, error) {
	pods := &corev1.PodList{}
	if err := kube.List(ctx, pods, client.InNamespace(gpuoperator.Namespace)); err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	var names []string
	for i := range pods.Items {
		if pods.Items[i].DeletionTimestamp != nil {
			names = append(names, pods.Items[i].Name)
		}
	}
	return names, nil
}

// restarts counts the restarts of every container of NVIDIA's and of users', with the pods' names, so that a pod that
// was replaced shows as well.
func restarts(ctx context.Context) (map[string]int32, error) {
	found := map[string]int32{}
	for _, namespace := range []string{gpuoperator.Namespace, users} {
		pods := &corev1.PodList{}
		if err := kube.List(ctx, pods, client.InNamespace(namespace)); err != nil {
			return nil, fmt.Errorf("listing pods: %w", err)
		}
		for i := range pods.Items {
			p := &pods.Items[i]
			for _, c := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
				found[p.Namespace+"/"+p.Name+"/"+c.Name] = c.RestartCount
			}
		}
	}
	return found, nil
}
