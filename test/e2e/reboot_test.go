// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"os/signal"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/sandbox"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// rebootFor applies a policy on a node whose GPUs cannot be reset: its agent asks the node's init system, once, to
// reboot it, as it asks systemd. The machine then loses its power and boots anew, which is what systemd would come to.
// Pods that use no GPU run on the node too. They leave it before that where the policy says so, and stay where it does
// not.
func rebootFor(ctx context.Context, s guides.Replay) {
	GinkgoHelper()
	refuseResets(true)
	DeferCleanup(refuseResets, false)
	allowReboot(ctx, "true")
	DeferCleanup(allowReboot, "false")
	beside := startBesideGPUs(ctx)
	before, err := bootID(ctx)
	Expect(err).NotTo(HaveOccurred())
	asked := make(chan os.Signal, 16)
	signal.Notify(asked, sandbox.RebootSignal)
	defer signal.Stop(asked)

	empties := s.Policy.Rollout.Drain.BeforeReboot == v1alpha1.BeforeRebootAllPods
	if empties {
		beside.leaveBefore(ctx, asked, *s.Policy)
	} else {
		applySpec(ctx, guidePolicy, *s.Policy)
	}
	Eventually(asked).WithContext(ctx).Should(Receive(), "process 1 is asked to reboot the machine")
	beside.expectOnNode(ctx, empties)
	if s.Holding != nil {
		for i := range s.Holding.Running {
			expectGone(ctx, holderName(i)) // drained as the policy says, before the machine goes down
		}
	}
	crash(ctx)
	Expect(rebootCondition(ctx)).To(HavePrefix(v1alpha1.ReasonRebooting), "what the agent has said before")
	drain(asked) // the agent that ran before may have asked more than once
	Expect(gpus.Reboot()).To(Succeed())
	boot(ctx)

	timed("from kubelet Ready to Ready in", func() {
		expectAllocatable(ctx, s.Advertised)
		expectReady(ctx, guidePolicy)
	})
	Eventually(bootID).WithContext(ctx).ShouldNot(Equal(before))
	Expect(asked).NotTo(Receive(), "nobody reboots a machine twice")
	Expect(modes()).To(HaveEach(true), "the MIG mode holds")
	expectDeployed(ctx, webName) // the one that was there, or another one
	beside.expectUID(ctx, empties)
}

// besideGPUs are users' pods that use no GPU: one of a Deployment, and one of a DaemonSet.
type besideGPUs struct {
	web  types.UID
	pod  string // its name
	logs types.UID
}

const (
	webName  = "web"
	logsName = "logs"
)

func startBesideGPUs(ctx context.Context) besideGPUs {
	GinkgoHelper()
	spec := requesting("", 0)
	spec.Containers[0].Resources = corev1.ResourceRequirements{}
	deploy(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: webName},
		Spec:       appsv1.DeploymentSpec{Selector: selecting(webName), Template: template(webName, spec)},
	})
	deploy(ctx, &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: users, Name: logsName},
		Spec:       appsv1.DaemonSetSpec{Selector: selecting(logsName), Template: template(logsName, spec)},
	})
	b := besideGPUs{pod: expectDeployed(ctx, webName)}
	expectDeployed(ctx, logsName)
	onNode, err := podsOnNode(ctx)
	Expect(err).NotTo(HaveOccurred())
	b.web, b.logs = onNode[webName], onNode[logsName]
	return b
}

// podsOnNode are the UIDs of users' pods that are bound to the node and have not ended, by their names' label. The
// kubelet deletes the object of a pod a moment after its containers have ended.
func podsOnNode(ctx context.Context) (map[string]types.UID, error) {
	pods := &corev1.PodList{}
	err := kube.List(ctx, pods, client.InNamespace(users))
	found := map[string]types.UID{}
	for i := range pods.Items {
		ended := pods.Items[i].Status.Phase == corev1.PodSucceeded || pods.Items[i].Status.Phase == corev1.PodFailed
		if p := &pods.Items[i]; p.Spec.NodeName != "" && !ended {
			found[p.Labels["name"]] = p.UID
		}
	}
	return found, err
}

// leaveBefore applies a policy while a PodDisruptionBudget keeps the pod of the Deployment on the node: the policy
// names the pod, and nobody reboots the machine as long as the pod is there.
func (b besideGPUs) leaveBefore(ctx context.Context, asked <-chan os.Signal, spec v1alpha1.GPUSharingPolicySpec) {
	GinkgoHelper()
	budget := guard(ctx, webName)
	applySpec(ctx, guidePolicy, spec)
	Eventually(func() error { return ready(ctx, guidePolicy) }).WithContext(ctx).Should(MatchError(And(
		ContainSubstring(v1alpha1.ReasonGPUInUse), ContainSubstring("%s/%s", users, b.pod))))
	Consistently(asked, "3s").ShouldNot(Receive(), "a pod is there that must leave first")
	Expect(podsOnNode(ctx)).To(HaveKeyWithValue(webName, b.web))
	Expect(kube.Delete(ctx, budget)).To(Succeed())
}

// expectOnNode checks which pods are on the node at this moment. The one of a DaemonSet stays in any case.
func (b besideGPUs) expectOnNode(ctx context.Context, empties bool) {
	GinkgoHelper()
	onNode, err := podsOnNode(ctx)
	Expect(err).NotTo(HaveOccurred())
	Expect(onNode).To(HaveKeyWithValue(logsName, b.logs))
	if empties {
		Expect(onNode).NotTo(HaveKey(webName), "it has left, and no other has taken its place")
		return
	}
	Expect(onNode).To(HaveKeyWithValue(webName, b.web))
}

// expectUID checks whether the pod of the Deployment is still the same after the reboot.
func (b besideGPUs) expectUID(ctx context.Context, empties bool) {
	GinkgoHelper()
	onNode, err := podsOnNode(ctx)
	Expect(err).NotTo(HaveOccurred())
	Expect(onNode).To(And(HaveKeyWithValue(logsName, b.logs), HaveKey(webName)))
	if empties {
		Expect(onNode[webName]).NotTo(Equal(b.web))
		return
	}
	Expect(onNode[webName]).To(Equal(b.web))
}

// modes are the MIG modes of the GPUs.
func modes() ([]bool, error) {
	n, err := gpus.Node()
	var found []bool
	for i := range n.GPUs {
		found = append(found, n.GPUs[i].MIG)
	}
	return found, err
}

// refuseResets reports whether the GPUs refuse to be reset, as those of a virtual machine do.
func refuseResets(refuse bool) {
	GinkgoHelper()
	Expect(gpus.Update(func(s *simdriver.State) error {
		for i := range s.Node.GPUs {
			s.Node.GPUs[i].NoReset = refuse
		}
		return nil
	})).To(Succeed())
}

// allowReboot says in the chart whether agents may reboot their nodes, and waits until the node's agent knows it.
func allowReboot(ctx context.Context, allow string) {
	GinkgoHelper()
	agents, err := podUIDs(ctx, "gpu-sharing-agent")
	Expect(err).NotTo(HaveOccurred())
	upgradeOperator(ctx, "agent.allowReboot="+allow)
	expectOtherAgents(ctx, agents)
}

// bootID is the boot in which the node says that it is.
func bootID(ctx context.Context) (string, error) {
	n := &corev1.Node{}
	err := kube.Get(ctx, client.ObjectKey{Name: nodeName}, n)
	return n.Status.NodeInfo.BootID, err
}

// rebootCondition is reason and message of the agent's condition RebootRequired.
func rebootCondition(ctx context.Context) (string, error) {
	n := &v1alpha1.GPUNode{}
	if err := kube.Get(ctx, client.ObjectKey{Name: nodeName}, n); err != nil {
		return "", err
	}
	c := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionRebootRequired)
	if c == nil {
		return "", nil
	}
	return c.Reason + ": " + c.Message, nil
}

// drain takes all that has come.
func drain[T any](from <-chan T) {
	for {
		select {
		case <-from:
		default:
			return
		}
	}
}
