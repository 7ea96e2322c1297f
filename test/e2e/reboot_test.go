// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"os/signal"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/sandbox"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// rebootFor applies a policy on a node whose GPUs cannot be reset: its agent asks the node's init system, once, to reboot it,
// as it asks systemd. The machine then loses its power and boots anew, which is what systemd would come to.
func rebootFor(ctx context.Context, s guides.Replay) {
	GinkgoHelper()
	refuseResets(true)
	DeferCleanup(refuseResets, false)
	allowReboot(ctx, "true")
	DeferCleanup(allowReboot, "false")
	before, err := bootID(ctx)
	Expect(err).NotTo(HaveOccurred())
	asked := make(chan os.Signal, 16)
	signal.Notify(asked, sandbox.RebootSignal)
	defer signal.Stop(asked)

	applySpec(ctx, guidePolicy, *s.Policy)
	Eventually(asked).WithContext(ctx).Should(Receive(), "process 1 is asked to reboot the machine")
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
}

// refuseResets says whether the GPUs refuse to be reset, as those of a virtual machine do.
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
