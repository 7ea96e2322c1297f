// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestReconcile(t *testing.T) {
	cluster := env.Start(t)
	for name, test := range map[string]func(scenario){
		"reports the GPUs of a node that nobody governs":                     reportsWithoutPolicy,
		"partitions an idle GPU, with the reset that its architecture needs": partitionsIdle,
		"keeps what is in use and names who uses it":                         namesWhoUses,
		"lets other GPUs go on beside one that is in use":                    othersGoOn,
		"lets other GPUs go on beside an MPS daemon that is in use":          othersGoOnBesideMPS,
		"looks again before it destroys, if time has passed":                 looksAgain,
		"waits for a container that holds an instance without using it":      waitsForHolder,
		"a pod that has a GPU by a ResourceClaim keeps all instances":        waitsForClaim,
		"leaves what an init container has of a GPU that another changed":    waitsForInitContainer,
		"converges after a crash behind any step":                            convergesAfterCrash,
		"rebuilds what a reboot lost":                                        rebuildsAfterReboot,
		"rebuilds at the places that the instances had":                      rebuildsInPlace,
		"leaves instances that another program keeps changing":               leavesToOthers,
		"sets a time slice once the former one is recorded, and again":       setsTimeSlice,
		"restores the time slice before MIG mode hides it":                   restoresBeforeMIG,
		"is stalled by a time slice that the driver does not have":           noTimeSlice,
		"leaves a time slice that another program keeps changing":            leavesTimeSlice,
		"tells with the configuration that it has seen a spec":               tellsOnce,
		"reads no time slice for which nobody asks":                          readsNoTimeSlice,
		"finishes a GPU instance that a crash left without compute instance": finishesPartial,
		"rolls back a GPU on which a step failed":                            rollsBack,
		"changes the other GPUs beside one for which the spec does not fit":  unfitBeside,
		"says which step failed, retries, and clears the reason":             stepFails,
		"keeps the devices when NVML fails":                                  keepsDevices,
		"waits for a driver that is not there, and says why":                 waitsForDriver,
		"is ready only with the device nodes of its instances":               needsDeviceNodes,
		"does nothing while the kubelet cannot be asked":                     kubeletSilent,
		"is stalled by a profile that the GPU does not have":                 stalled,
		"asks for a reboot where the GPU cannot be reset":                    rebootRequired,
		"resets GPUs together that cannot be reset alone":                    resetsTogether,
		"names the kernel module that keeps a GPU":                           namesModule,
		"leaves MIG to NVIDIA's mig-manager and the driver closed meanwhile": leavesToManager,
		"reboots a node of which it may, once that is written":               rebootsOnce,
		"asks again for a reboot that was not carried out":                   rebootFails,
		"does not reboot a node twice for one spec":                          rebootInVain,
		"reboots no node of which a GPU is in use":                           rebootWaits,
		"says how to allow it to reboot":                                     rebootNotAllowed,
		"does not reboot for a spec of yesterday":                            rebootStale,
		"goes on beside a GPU that the node does not have":                   unknownDevice,
		"shows processes with their pods, and holders":                       showsUsers,
		"starts MPS, and puts the compute mode back when it goes":            mpsComesAndGoes,
		"says why MPS does not start":                                        mpsFails,
		"forgets the request for a daemon that died before it was stopped":   mpsForgotten,
		"leaves NVIDIA's own MPS daemon alone":                               mpsExternal,
		"keeps the compute mode where nvidia-persistenced does not":          mpsKeepsTheComputeMode,
		"says where the compute mode cannot be kept, and sets it once":       mpsCannotKeepTheComputeMode,
		"takes no process of a container for an MPS server by its name":      aNameIsNoMPSServer,
		"reports whatever answers in the place of the MPS daemon":            reportsWhateverAnswers,
		"takes MIG to MPS and back":                                          strategiesChange,
		"is not ready while it cannot report":                                cannotReport,
		"leaves a GPUNode that is being deleted":                             deleted,
	} {
		t.Run(name, func(t *testing.T) { test(scenario{T: t, cluster: cluster, name: nodeName(name)}) })
	}
}

// nodeName makes a node's name of a sentence.
func nodeName(sentence string) string {
	return regexp.MustCompile("[^a-z0-9]+").ReplaceAllString(strings.ToLower(sentence), "-")
}

func reportsWithoutPolicy(s scenario) {
	n := s.node("", sim.A100, sim.T4)
	n.settle()
	n.expectReady()
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionTrue, v1alpha1.ReasonNoPolicy)
	n.Expect(n.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionTrue, v1alpha1.ReasonDiscovered)).
		To(MatchRegexp(`^Read 2 GPUs with driver \d+\.`))
	status := n.get().Status
	n.Expect(status.BootID).To(Equal("boot-1"))
	n.Expect(status.Devices).To(HaveLen(2))
	n.Expect(status.GPUs).To(Equal("1× NVIDIA-A100-SXM4-40GB, 1× Tesla-T4"))
	a100, t4 := status.Devices[0], status.Devices[1]
	n.Expect(a100.UUID).To(Equal(n.uuid(0)))
	n.Expect(a100.Product).To(HavePrefix("NVIDIA-A100-"))
	n.Expect(a100.MIGCapable).To(BeTrue())
	n.Expect(a100.ComputeCapability).To(Equal("8.0"))
	n.Expect(a100.Profiles).To(BeEmpty(), "they are those of the catalogue")
	n.Expect(plan.WithProfiles(status.Devices)[0].Profiles).To(ContainElement(And(
		HaveField("Name", "1g.5gb"), HaveField("Max", int32(7)), HaveField("Starts", HaveLen(7)))))
	n.Expect(t4.Index).To(Equal(int32(1)))
	n.Expect(t4.MIGCapable).To(BeFalse())
	n.Expect(t4.Sharing).To(Equal(v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}))
	n.Expect(n.between.closed).To(Equal(2), "no NVML handle is open between two reconciles")
}

// tellsOnce: a spec that changes nothing on the GPUs is acknowledged with the report on its configuration, and without one after a while.
func tellsOnce(s scenario) {
	n := s.node("", sim.T4)
	proc := programs{T: s.T, dir: s.TempDir()}
	root, err := os.OpenRoot(proc.dir)
	n.Expect(err).NotTo(HaveOccurred())
	s.Cleanup(func() { _ = root.Close() })
	proc.start(10, pluginPod, "config-manager", environ)
	configs := agent.NewConfigReporter(n.name, n.client(), n.status, host.NewProc(root), host.NewProc(root),
		host.Kubelet{Host: proc.dir, Folder: "/kubelet"}, n.clock)
	look := func() {
		_, err := configs.Reconcile(s.Context(), n.get())
		n.Expect(err).NotTo(HaveOccurred())
	}
	seen := func() int64 {
		return meta.FindStatusCondition(n.get().Status.Conditions, v1alpha1.ConditionApplied).ObservedGeneration
	}
	request := func(key string) {
		n.setSpec(v1alpha1.GPUNodeSpec{PolicyName: "research", ConfigName: key, ChangeTime: metav1.NewTime(n.clock.Now())})
	}
	request("first")
	proc.project(pluginPod, "first")
	n.settle()
	look()

	request("second")
	writes, before := n.writes, seen()
	n.reconciled()
	look()
	n.Expect(n.writes).To(Equal(writes), "the configuration is on its way")
	proc.project(pluginPod, "second")
	look()
	n.Expect(n.writes).To(Equal(writes + 1))
	n.Expect(n.get().Status.Config.Name).To(Equal("second"))
	n.Expect(seen()).To(Equal(n.get().Generation))
	n.Expect(seen()).To(BeNumerically(">", before))

	request("third")
	result := n.reconciled()
	n.Expect(n.writes).To(Equal(writes + 1))
	<-n.clock.After(result.RequeueAfter)
	n.reconciled()
	n.Expect(n.writes).To(Equal(writes+2), "no configuration comes, and the controller must know all the same that the spec was seen")
	n.Expect(seen()).To(Equal(n.get().Generation))

	request("fourth")
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 7, Name: "python", Instance: gpu.WholeGPU})).To(Succeed())
	n.reconciled()
	n.Expect(n.writes).To(Equal(writes+3), "news does not wait")
}

func partitionsIdle(s scenario) {
	n := s.node("", sim.A100)
	n.specify(mig(n.uuid(0), instances("3g.20gb", 1), instances("1g.5gb", 2)))
	n.settle()
	n.expectReady()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionTrue, v1alpha1.ReasonApplied)).To(Equal("1 GPU in the desired state"))
	n.Expect(n.profiles(0)).To(ConsistOf("3g.20gb", "1g.5gb", "1g.5gb"))
	d := n.get().Status.Devices[0]
	n.Expect(d.Sharing.Instances).To(ConsistOf(instances("3g.20gb", 1), instances("1g.5gb", 2)))
	n.Expect(d.Instances).To(HaveLen(3))
	n.Expect(d.Instances[0].UUID).To(HavePrefix("MIG-"))
	n.Expect(n.writes).To(Equal(1), "one status write for the whole change")
}

// partitioned is a node whose only GPU has instances.
func (s scenario) partitioned(layout ...v1alpha1.InstanceCount) *node {
	s.Helper()
	n := s.node("", sim.A100)
	n.specify(mig(n.uuid(0), layout...))
	n.settle()
	return n
}

func namesWhoUses(s scenario) {
	n := s.partitioned(instances("1g.5gb", 7))
	used := n.device(0).State.Instances[3]
	n.processes.Set(4242, host.Process{Name: "python3", PodUID: "0a1b-pod"})
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 4242, Instance: used.ID})).To(Succeed())

	n.specify(mig(n.uuid(0), instances("7g.40gb", 1)))
	result, err := n.reconcile()
	n.Expect(err).NotTo(HaveOccurred(), "waiting is not an error")
	n.Expect(result.RequeueAfter).To(Equal(5*time.Second), "no event tells that a process has ended")
	message := n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)
	n.Expect(message).To(ContainSubstring(
		"destroy 1g.5gb at 3:1: waiting for process 4242 (python3) of the pod with uid 0a1b-pod to leave it"))
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)
	n.Expect(n.device(0).State.Instances).To(ContainElement(used))

	n.hardware.RemoveProcess(4242)
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(ConsistOf("7g.40gb"))
}

func othersGoOn(s scenario) {
	n := s.node("", sim.A100, sim.A100)
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 7, Name: "train", Instance: gpu.WholeGPU})).To(Succeed())
	n.specify(mig(n.uuid(0), instances("1g.5gb", 7)), mig(n.uuid(1), instances("1g.5gb", 7)))
	n.settle()
	message := n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)
	n.Expect(message).To(And(HavePrefix("GPU 0 ("), ContainSubstring("enable MIG mode: waiting for process 7 (train)"),
		Not(ContainSubstring("GPU 1"))))
	n.Expect(n.profiles(0)).To(BeEmpty())
	n.Expect(n.profiles(1)).To(HaveLen(7))
}

func othersGoOnBesideMPS(s scenario) {
	n := s.node("", sim.T4, sim.T4, sim.A100)
	n.specify(shared(n.uuid(0), 10, 1510), shared(n.uuid(1), 10, 1510))
	n.settle()
	n.allocations.hold("client", n.uuid(0)+"::3")
	n.specify(whole(n.uuid(0)), whole(n.uuid(1)), mig(n.uuid(2), instances("1g.5gb", 7)))
	n.settle()
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)
	n.Expect(n.profiles(2)).To(HaveLen(7))
	n.Expect(n.device(1).State.ComputeMode).To(Equal(gpu.ComputeExclusiveProcess), "the daemon serves it still")
}

func looksAgain(s scenario) {
	n := s.partitioned(instances("1g.5gb", 1))
	n.specify(whole(n.uuid(0)))
	n.between.afterDestroy = func() {
		n.clock.Step(2 * time.Second)
		n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 9, Name: "late", Instance: gpu.WholeGPU})).To(Succeed())
		n.between.afterDestroy = nil
	}
	writes := len(n.hardware.Writes())
	n.settle()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).
		To(ContainSubstring("process 9 (late)"))
	n.Expect(n.hardware.Writes()[writes:]).To(ConsistOf(HavePrefix("DestroyInstance")),
		"the hardware would have refused to change the mode, but it was not even asked")
}

func waitsForHolder(s scenario) {
	n := s.partitioned(instances("2g.10gb", 3))
	held := n.device(0).State.Instances[1]
	n.allocations.hold("notebook-0", held.UUID)
	n.specify(mig(n.uuid(0), instances("7g.40gb", 1)))
	n.reconciled()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).
		To(ContainSubstring("waiting for container main of pod ml/notebook-0 to leave it"))
	n.Expect(n.device(0).State.Instances).To(ContainElement(held))
}

// waitsForInitContainer: the kubelet lists it for nobody, and no process of it uses the GPU yet.
func waitsForInitContainer(s scenario) {
	n := s.partitioned(instances("2g.10gb", 3))
	for _, i := range n.device(0).State.Instances {
		n.Expect(n.hardware.DestroyInstance(s.Context(), n.uuid(0), i.ID)).To(Succeed())
	}
	n.Expect(n.hardware.CreateInstance(s.Context(), n.uuid(0), "7g.40gb", gpu.Placement{Size: 8})).To(Succeed())
	held := n.device(0).State.Instances[0]
	n.inits = []host.HeldDevice{{ContainerName: host.ContainerName{Namespace: "ml", Pod: "train-0", Container: "fetch"}, Device: held.UUID}}
	n.reconciled()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).
		To(ContainSubstring("waiting for container fetch of pod ml/train-0 to leave it"))
	n.Expect(n.device(0).State.Instances).To(Equal([]gpu.Instance{held}))
	n.inits = nil
	n.settle()
	n.expectReady()
}

func waitsForClaim(s scenario) {
	n := s.partitioned(instances("2g.10gb", 3))
	n.allocations.claim("notebook-0")
	before := n.device(0).State.Instances
	n.specify(mig(n.uuid(0), instances("7g.40gb", 1)))
	n.reconciled()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).
		To(ContainSubstring("pod ml/notebook-0"))
	n.Expect(n.device(0).State.Instances).To(Equal(before))
}

func convergesAfterCrash(s scenario) {
	for step := 0; ; step++ {
		n := s.node(fmt.Sprintf("-%d", step), sim.A100)
		ctx, kill := context.WithCancel(s.Context())
		done := 0
		n.hardware.Fail = func(op sim.Op, _ string) error {
			if op == sim.OpObserve {
				return nil
			}
			if done == step {
				kill()
				return sim.ErrCrash
			}
			done++
			return nil
		}
		n.specify(mig(n.uuid(0), instances("3g.20gb", 2)))
		_, _ = n.controller.Reconcile(ctx, n.get())
		killed := ctx.Err() != nil
		kill()
		n.hardware.Fail = nil
		n.restartAgent()
		n.settle()
		n.expectReady()
		n.Expect(n.profiles(0)).To(ConsistOf("3g.20gb", "3g.20gb"), "killed behind step %d", step)
		if !killed {
			n.Expect(step).To(BeNumerically(">=", 5), "the mode, and two halves of two instances")
			return
		}
	}
}

func rebuildsAfterReboot(s scenario) {
	n := s.partitioned(instances("1g.5gb", 7))
	n.hardware.Reboot()
	n.processes.Reboot("boot-2")
	n.Expect(n.profiles(0)).To(BeEmpty(), "no instance survives a reboot")
	n.restartAgent()
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(HaveLen(7))
	n.Expect(n.get().Status.BootID).To(Equal("boot-2"))
}

// rebuildsInPlace: the instances do not lie where a GPU without any would get them, since one that was there stayed
// where it was.
func rebuildsInPlace(s scenario) {
	n := s.node("", sim.A100)
	n.hardware.Update(func(h *sim.Node) {
		_, err := h.SetMIG(h.GPUs[0].UUID, true, 0)
		n.Expect(err).NotTo(HaveOccurred())
		n.Expect(h.CreatePartial(h.GPUs[0].UUID, "1g.5gb", gpu.Placement{Start: 2, Size: 1}, 1)).To(Succeed())
	})
	n.specify(mig(n.uuid(0), instances("1g.5gb", 1), instances("3g.20gb", 1)))
	n.settle()
	places := n.places()
	n.Expect(places).To(ContainElement("1g.5gb at 2:1"))
	for _, boot := range []string{"boot-2", "boot-3"} {
		n.hardware.Reboot()
		n.processes.Reboot(boot)
		n.restartAgent()
		if boot == "boot-3" { // at first the driver fails, which is reported
			n.hardware.Fail = func(op sim.Op, _ string) error {
				if op != sim.OpCreateInstance {
					return nil
				}
				return errors.New("the driver is not ready")
			}
			_, err := n.reconcile()
			n.Expect(err).To(HaveOccurred())
			n.Expect(n.get().Status.Devices[0].Instances).To(BeEmpty())
			n.hardware.Fail = nil
		}
		n.settle()
		n.Expect(n.places()).To(Equal(places))
	}
	n.Expect(n.hardware.DestroyInstance(n.Context(), n.uuid(0), n.device(0).State.Instances[0].ID)).To(Succeed())
	n.settle()
	n.Expect(n.places()).To(Equal(places), "one that another program destroyed")
}

// places are the instances of the first GPU, with their placements.
func (n *node) places() []string {
	var places []string
	for _, i := range n.device(0).State.Instances {
		places = append(places, i.Profile+" at "+i.Placement.String())
	}
	return places
}

// leavesToOthers: instances that vanish are made again three times in an hour, and then left until the hour is over.
func leavesToOthers(s scenario) {
	n := s.partitioned(instances("3g.20gb", 2))
	harm := func() {
		for _, i := range n.device(0).State.Instances {
			n.Expect(n.hardware.DestroyInstance(s.Context(), n.uuid(0), i.ID)).To(Succeed())
		}
		n.clock.Step(time.Minute)
	}
	for range 3 {
		harm()
		n.settle()
		n.expectReady()
		n.Expect(n.profiles(0)).To(HaveLen(2), "made again")
		n.restartAgent() // it remembers nothing
	}
	n.Expect(n.get().Status.RebuildTimes).To(HaveLen(3))
	harm()
	writes := len(n.hardware.Writes())
	for range 3 {
		n.clock.Step(time.Minute)
		n.reconciled()
	}
	message := n.expectCondition(v1alpha1.ConditionApplyStalled, metav1.ConditionTrue, v1alpha1.ReasonChangedByOthers)
	n.Expect(message).To(And(ContainSubstring("GPU 0"), ContainSubstring("now in MIG mode without instances"),
		ContainSubstring("3 times within an hour")))
	n.Expect(n.hardware.Writes()).To(HaveLen(writes), "not fought over")

	n.clock.Step(time.Hour)
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(HaveLen(2), "tried again")
	n.Expect(n.get().Status.RebuildTimes).To(HaveLen(1))

	for range 2 {
		harm()
		n.settle()
	}
	n.clock.SetTime(n.clock.Now().Add(-24 * time.Hour)) // it was a day ahead
	harm()
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(HaveLen(2), "what was done in the future is no reason to leave it")
}

func finishesPartial(s scenario) {
	n := s.node("", sim.A100)
	ctx, kill := context.WithCancel(s.Context())
	defer kill()
	n.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpCreateComputeInstance {
			kill()
			return sim.ErrCrash
		}
		return nil
	}
	n.specify(mig(n.uuid(0), instances("1g.5gb", 1)))
	_, err := n.controller.Reconcile(ctx, n.get())
	n.Expect(err).To(HaveOccurred())
	n.Expect(n.device(0).State.Instances).To(ConsistOf(HaveField("Partial", true)))
	n.hardware.Fail = nil
	n.restartAgent()
	n.settle()
	n.expectReady()
	n.Expect(n.device(0).State.Instances).To(ConsistOf(HaveField("Partial", false)))
}

// rollsBack lets a step fail on one of two GPUs, for good: it is what it was, at the same places, and the other as
// desired.
func rollsBack(s scenario) {
	n := s.node("", sim.A100, sim.A100)
	n.specify(mig(n.uuid(0), instances("2g.10gb", 2), instances("1g.5gb", 1)), whole(n.uuid(1)))
	n.settle()
	before := n.device(0).State.Instances
	broken := errors.New("nvmlGpuInstanceCreateComputeInstance: ERROR_UNKNOWN")
	failing, first := true, n.uuid(0)
	n.hardware.Fail = func(op sim.Op, uuid string) error {
		if failing && op == sim.OpCreateComputeInstance && uuid == first {
			failing = false
			return broken
		}
		return nil
	}
	desired := []v1alpha1.InstanceCount{instances("3g.20gb", 2)}
	n.specify(mig(n.uuid(0), desired...), mig(n.uuid(1), desired...))
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(broken))
	n.Expect(places(n.device(0).State.Instances)).To(Equal(places(before)))
	n.Expect(n.profiles(1)).To(HaveLen(2))
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonStepFailed)).To(And(
		HavePrefix("GPU 0 (NVIDIA-A100"), ContainSubstring(": creating 3g.20gb at "),
		ContainSubstring("nvmlGpuInstanceCreateComputeInstance: ERROR_UNKNOWN; GPU 0 (NVIDIA-A100-SXM4-40GB) is as it was before; it is tried again")))
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(HaveLen(2))
}

func places(list []gpu.Instance) []string {
	var places []string
	for _, i := range list {
		places = append(places, i.Profile+" at "+i.Placement.String())
	}
	return places
}

// unfitBeside is stalled by one GPU and changes the other all the same.
func unfitBeside(s scenario) {
	n := s.node("", sim.A100, sim.A100)
	n.specify(mig(n.uuid(0), instances("7g.40gb", 2)), mig(n.uuid(1), instances("1g.5gb", 7)))
	result, err := n.reconcile()
	n.Expect(n.get().Status.GPUs).To(Equal("2× NVIDIA-A100-SXM4-40GB"))
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(result.RequeueAfter).To(Equal(resync), "a spec that cannot be reached is not tried again")
	n.Expect(n.expectCondition(v1alpha1.ConditionApplyStalled, metav1.ConditionTrue, v1alpha1.ReasonLayoutDoesNotFit)).
		To(And(ContainSubstring("GPU 0"), Not(ContainSubstring("GPU 1"))))
	n.Expect(n.hardware.Writes()).NotTo(ContainElement(ContainSubstring(n.uuid(0))))
	n.Expect(n.profiles(1)).To(HaveLen(7))
	n.expectIdle()
}

func stepFails(s scenario) {
	n := s.node("", sim.A100)
	broken := errors.New("NVML: ERROR_UNKNOWN")
	n.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpCreateInstance {
			return broken
		}
		return nil
	}
	n.specify(mig(n.uuid(0), instances("1g.5gb", 2)))
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(broken), "so that it is tried again, later each time")
	message := n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonStepFailed)
	n.Expect(message).To(And(HavePrefix("GPU 0 (NVIDIA-A100"), ContainSubstring("creating 1g.5gb at"),
		ContainSubstring("NVML: ERROR_UNKNOWN"), HaveSuffix("; it is tried again")))
	n.Expect(n.controller.Ready(nil)).To(Succeed(), "a step that fails is not the agent's illness")
	writes := n.writes
	_, err = n.reconcile()
	n.Expect(err).To(HaveOccurred())
	n.Expect(n.writes).To(Equal(writes), "the same failure is not reported twice")

	n.hardware.Fail = nil
	n.settle()
	n.expectReady()
}

func keepsDevices(s scenario) {
	n := s.partitioned(instances("1g.5gb", 7))
	before := n.get().Status
	n.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpObserve {
			return errors.New("nvmlInit: ERROR_DRIVER_NOT_LOADED")
		}
		return nil
	}
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(ContainSubstring("ERROR_DRIVER_NOT_LOADED")))
	message := n.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionUnknown, v1alpha1.ReasonNVMLFailed)
	n.Expect(message).To(ContainSubstring("the status shows the GPUs as they were last seen, and none is changed"))
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionUnknown, v1alpha1.ReasonNVMLFailed)
	after := n.get().Status
	n.Expect(after.Devices).To(Equal(before.Devices))
	n.Expect(after.DriverVersion).To(Equal(before.DriverVersion))
	n.Expect(n.controller.Ready(nil)).To(MatchError(ContainSubstring("ERROR_DRIVER_NOT_LOADED")))

	n.hardware.Fail = nil
	n.settle()
	n.expectReady()
	n.Expect(n.controller.Ready(nil)).To(Succeed())

	never := s.node("-never", sim.A100)
	never.hardware.Fail = func(sim.Op, string) error { return errors.New("nvmlInit: ERROR_LIBRARY_NOT_FOUND") }
	_, err = never.reconcile()
	never.Expect(err).To(HaveOccurred())
	never.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionFalse, v1alpha1.ReasonNVMLFailed)
	never.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionUnknown, v1alpha1.ReasonNVMLFailed)
}

func waitsForDriver(s scenario) {
	n := s.node("", sim.A100)
	n.Expect(n.controller.Ready(nil)).To(MatchError(ContainSubstring("has not reported")), "the controller takes one that is Ready at its word")
	for state, reason := range map[driver.State]string{
		driver.NotFound: v1alpha1.ReasonDriverNotFound, driver.NotReady: v1alpha1.ReasonDriverNotReady,
		driver.Unsupported: v1alpha1.ReasonPlatformNotSupported,
	} {
		n.hardware.Fail = func(sim.Op, string) error { return &driver.Missing{State: state, Message: "Waiting for the driver"} }
		result, err := n.reconcile()
		n.Expect(err).NotTo(HaveOccurred(), "waiting is no error")
		n.Expect(result.RequeueAfter).To(BeNumerically("<=", 5*time.Second), "no event tells of a driver that comes")
		n.Expect(n.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionFalse, reason)).To(ContainSubstring("Waiting for the driver"))
		n.Expect(n.controller.Ready(nil)).To(MatchError(ContainSubstring("Waiting for the driver")))
	}
	n.hardware.Fail = func(sim.Op, string) error { return gpu.ErrDriverMismatch }
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(gpu.ErrDriverMismatch))
	n.Expect(n.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionFalse, v1alpha1.ReasonDriverMismatch)).
		To(ContainSubstring("wait for the driver upgrade, or reboot the node"))

	n.hardware.Fail = nil
	n.settle()
	n.expectReady()
	n.Expect(n.controller.Ready(nil)).To(Succeed())
}

func needsDeviceNodes(s scenario) {
	n := s.node("", sim.A100)
	n.settle()
	n.Expect(n.nodes.ensured).To(BeZero(), "a node without instances needs none")
	n.nodes.err = errors.New("2 device nodes are missing in /run/nvidia/driver")
	n.specify(mig(n.uuid(0), instances("1g.5gb", 2)))
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(n.nodes.err))
	n.Expect(n.profiles(0)).To(HaveLen(2), "the instances stay")
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonDeviceNodesMissing)).
		To(ContainSubstring("2 device nodes are missing in /run/nvidia/driver"))
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonDeviceNodesMissing)
	n.Expect(n.controller.Ready(nil)).To(Succeed(), "the agent reports")

	n.nodes.err = nil
	n.settle()
	n.expectReady()
	n.restartAgent()
	ensured := n.nodes.ensured
	n.settle()
	n.Expect(n.nodes.ensured).To(BeNumerically(">", ensured), "also after a restart, since a boot loses them")
	n.setSpec(v1alpha1.GPUNodeSpec{
		PolicyName: "research", MIGActuator: v1alpha1.MIGActuatorMIGManager, Devices: []v1alpha1.DeviceSpec{mig(n.uuid(0), instances("1g.5gb", 2))},
	})
	ensured = n.nodes.ensured
	n.settle()
	n.Expect(n.nodes.ensured).To(Equal(ensured), "mig-manager makes its own")
}

func kubeletSilent(s scenario) {
	n := s.partitioned(instances("1g.5gb", 7))
	n.allocations.err = errors.New("connection refused")
	n.specify(whole(n.uuid(0)))
	_, err := n.reconcile()
	n.Expect(err).To(MatchError(ContainSubstring("reading the kubelet's pod resources: connection refused")))
	n.expectCondition(v1alpha1.ConditionDiscovered, metav1.ConditionUnknown, v1alpha1.ReasonPodResourcesFailed)
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionUnknown, v1alpha1.ReasonPodResourcesFailed)
	n.Expect(n.profiles(0)).To(HaveLen(7), "a container may hold what no process uses")
	n.allocations.err = nil
	n.settle()
	n.expectReady()
}

func stalled(s scenario) {
	n := s.partitioned(instances("1g.5gb", 1))
	writes := len(n.hardware.Writes())
	n.specify(mig(n.uuid(0), instances("1g.10gb", 1), instances("9g.90gb", 1)))
	result, err := n.reconcile()
	n.Expect(err).NotTo(HaveOccurred(), "a spec that cannot be reached is not tried again")
	n.Expect(result.RequeueAfter).To(Equal(resync))
	message := n.expectCondition(v1alpha1.ConditionApplyStalled, metav1.ConditionTrue, v1alpha1.ReasonProfileNotAvailable)
	n.Expect(message).To(And(ContainSubstring("GPU 0"), ContainSubstring("9g.90gb")))
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonProfileNotAvailable)
	n.expectIdle()
	n.Expect(n.hardware.Writes()).To(HaveLen(writes), "the GPU stays as it was")

	n.specify(mig(n.uuid(0), instances("1g.5gb", 2)))
	n.settle()
	n.expectReady()
}

func rebootRequired(s scenario) {
	n := s.node("", sim.A100)
	n.hardware.Update(func(h *sim.Node) { h.GPUs[0].NoReset = true })
	n.specify(mig(n.uuid(0), instances("1g.5gb", 7)))
	result, err := n.reconcile()
	n.Expect(err).NotTo(HaveOccurred(), "trying again does not help before a reboot")
	n.Expect(result.RequeueAfter).To(Equal(resync))
	message := n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(message).To(MatchRegexp(`^GPU 0 \(.*\) cannot be reset on this node; reboot the node, and the MIG mode changes$`))
	n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonRebootRequired)
	n.Expect(n.get().Status.Devices[0].PendingMIGMode).To(Equal(v1alpha1.MIGModeEnabled))

	n.hardware.Reboot()
	n.processes.Reboot("boot-2")
	n.restartAgent()
	n.settle()
	n.expectReady()
	n.expectNoCondition(v1alpha1.ConditionRebootRequired)
}

func unknownDevice(s scenario) {
	n := s.node("", sim.A100)
	n.specify(mig("GPU-gone", instances("1g.5gb", 7)), mig(n.uuid(0), instances("1g.5gb", 7)))
	n.settle()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonUnknownDevice)).
		To(ContainSubstring("The node has no GPU GPU-gone (any more)"))
	n.Expect(n.profiles(0)).To(HaveLen(7))
}

func showsUsers(s scenario) {
	n := s.partitioned(instances("3g.20gb", 2))
	instance := n.device(0).State.Instances[0]
	n.processes.Set(11, host.Process{Name: "python3", PodUID: "uid-1", ContainerID: "cid-1"})
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 11, Instance: instance.ID})).To(Succeed())
	n.allocations.hold("b", instance.UUID+"::2")
	n.allocations.hold("a", n.uuid(0))
	n.allocations.hold("elsewhere", "GPU-of-another-node")
	n.settle()
	id := int32(instance.ID)
	d := n.get().Status.Devices[0]
	n.Expect(d.Processes).To(ConsistOf(v1alpha1.ProcessStatus{
		PID: 11, Name: "python3", Instance: &id, PodUID: "uid-1", ContainerID: "cid-1",
	}))
	n.Expect(d.Holders).To(Equal([]v1alpha1.HolderStatus{
		{Namespace: "ml", PodName: "a", ContainerName: "main"}, {Namespace: "ml", PodName: "b", ContainerName: "main", Instance: &id},
	}))
	n.expectReady()
	n.allocations.free()
	result := n.reconciled()
	n.Expect(result.RequeueAfter).To(Equal(5*time.Second), "no event tells that a process has followed its container")
	n.hardware.RemoveProcess(11)
	n.settle()
	d = n.get().Status.Devices[0]
	n.Expect(d.Processes).To(BeEmpty())
	n.Expect(d.Holders).To(BeEmpty())
}

func mpsComesAndGoes(s scenario) {
	n := s.node("", sim.T4, sim.T4)
	n.specify(shared(n.uuid(0), 10, 1510), shared(n.uuid(1), 10, 1510))
	n.settle()
	n.expectReady()
	n.Expect(n.device(0).State.ComputeMode).To(Equal(gpu.ComputeExclusiveProcess))
	daemon := n.daemons.Get(n.pipe("nvidia.com/gpu"))
	n.Expect(daemon.Defaults.Memory).To(Equal(map[int]int64{0: 1510, 1: 1510}))
	d := n.get().Status.Devices[1]
	n.Expect(d.ComputeMode).To(Equal(v1alpha1.ComputeModeExclusiveProcess))
	n.Expect(d.Sharing).To(Equal(shared("", 10, 1510).Sharing))

	n.daemons.Crash(n.pipe("nvidia.com/gpu"))
	n.settle()
	n.expectReady()
	n.Expect(n.daemons.Get(n.pipe("nvidia.com/gpu"))).NotTo(BeNil(), "a daemon that died is brought back")

	client := n.daemons.Run(n.pipe("nvidia.com/gpu"), "pod-a", 1000)
	_, served, err := n.daemons.Connect(client)
	n.Expect(served, err).To(BeTrue())
	waiting := n.daemons.Run(n.pipe("nvidia.com/gpu"), "pod-b", 2000)
	n.specify(shared(n.uuid(0), 25, 2000), shared(n.uuid(1), 25, 2000))
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 5, Name: "nvidia-cuda-mps-server", MPSServer: true, Instance: gpu.WholeGPU})).To(Succeed())
	n.processes.Set(5, host.Process{Name: gpu.MPSServer, PodUID: "uid-mps", HostPIDs: true})
	n.allocations.hold("client", n.uuid(0)+"::3")
	n.settle()
	n.expectReady()
	n.Expect(n.daemons.Get(n.pipe("nvidia.com/gpu")).Defaults.Percentage).To(Equal(25.0), "limits change beside clients that run")
	n.Expect(n.get().Status.MPS).To(Equal([]v1alpha1.MPSStatus{{
		ResourceName: "nvidia.com/gpu", User: new(int64(1000)), Clients: 1, OutdatedClients: 1, OutdatedPodUIDs: []string{"pod-a"},
		WaitingPods: []v1alpha1.MPSWaitingPod{{UID: "pod-b", User: 2000}},
	}}))
	n.sharedMemoryReplaced = true
	n.Expect(n.mpsHost.Converge(s.Context(), true)).To(Succeed())
	n.settle()
	n.Expect(n.get().Status.MPS).To(ConsistOf(HaveField("Unreachable", true)))
	n.sharedMemoryReplaced = false
	n.daemons.End(client)
	n.daemons.End(waiting)

	n.specify(whole(n.uuid(0)), whole(n.uuid(1)))
	n.reconciled()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).
		To(ContainSubstring("stop MPS for nvidia.com/gpu: waiting for container main of pod ml/client to leave it"))
	n.allocations.free()
	n.hardware.RemoveProcess(5)
	n.settle()
	n.expectReady()
	n.Expect(n.daemons.Get(n.pipe("nvidia.com/gpu"))).To(BeNil())
	for i := range 2 {
		n.Expect(n.device(i).State.ComputeMode).To(Equal(gpu.ComputeDefault))
	}
}

func mpsFails(s scenario) {
	n := s.node("", sim.T4)
	n.runner.Fail(func(c host.Command) error {
		if len(c.Args) > 0 {
			return errors.New("exit status 1: no CUDA device")
		}
		return nil
	})
	n.specify(shared(n.uuid(0), 10, 1510))
	_, err := n.reconcile()
	n.Expect(err).To(HaveOccurred())
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonMPSDaemonFailed)).
		To(ContainSubstring("nvidia-cuda-mps-control: exit status 1: no CUDA device"))
	n.runner.Fail(nil)
	n.Expect(n.mpsHost.Converge(s.Context(), true)).To(Succeed())
	n.settle()
	n.expectReady()
}

func mpsForgotten(s scenario) {
	n := s.node("", sim.T4)
	n.specify(shared(n.uuid(0), 10, 1510))
	n.settle()
	n.clock.Meanwhile = nil // the MPS pod is gone, and its daemons with it
	n.daemons.Crash(n.pipe("nvidia.com/gpu"))
	n.specify(whole(n.uuid(0)))
	n.settle()
	n.expectReady()
	n.Expect(n.mpsHost.Converge(s.Context(), true)).To(Succeed())
	n.Expect(n.daemons.Get(n.pipe("nvidia.com/gpu"))).To(BeNil(), "a pod that comes back starts nothing that no spec asks for")
}

func mpsExternal(s scenario) {
	n := s.node("", sim.T4)
	n.startNVIDIAs()
	spec := whole(n.uuid(0))
	spec.Sharing.MPS = &v1alpha1.MPSDaemon{
		ResourceName: "nvidia.com/gpu", Owner: v1alpha1.MPSDaemonOwnerNVIDIA, ActiveThreadPercentage: 50, PinnedMemoryLimit: new(resource.MustParse("1Mi")),
	}
	n.specify(spec)
	n.settle()
	n.expectReady()
	n.Expect(n.get().Status.Devices[0].Sharing.MPS.Owner).To(Equal(v1alpha1.MPSDaemonOwnerNVIDIA))

	n.specify(whole(n.uuid(0)))
	result := n.reconciled()
	n.Expect(result.RequeueAfter).To(BeNumerically("<", resync))
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonApplying)).
		To(ContainSubstring("GPU 0 ("))
	n.Expect(n.daemons.Get(n.pipe("nvidia.com/gpu")).Commands).NotTo(ContainElement("quit"))

	n.daemons.Crash(n.pipe("nvidia.com/gpu"))
	n.specify(spec)
	n.settle()
	n.expectReady()
}

func strategiesChange(s scenario) {
	n := s.node("", sim.H100)
	for range 2 {
		n.specify(mig(n.uuid(0), instances("1g.10gb", 7)))
		n.settle()
		n.expectReady()
		n.Expect(n.profiles(0)).To(HaveLen(7))
		n.specify(shared(n.uuid(0), 25, 20000))
		n.settle()
		n.expectReady()
		n.Expect(n.device(0).State.MIG).To(BeFalse())
		n.Expect(n.daemons.Get(n.pipe("nvidia.com/gpu"))).NotTo(BeNil())
	}
	n.specify(whole(n.uuid(0)))
	n.settle()
	n.expectReady()
	n.Expect(n.device(0).State).To(Equal(gpu.State{ComputeMode: gpu.ComputeDefault}))
}

func cannotReport(s scenario) {
	n := s.node("", sim.A100)
	n.refusal = errors.New("the server is away")
	_, err := n.controller.Reconcile(s.Context(), n.get())
	n.Expect(err).To(MatchError(ContainSubstring("reporting: applying the status as gpusharing-agent: the server is away")))
	n.Expect(n.controller.Ready(nil)).To(MatchError(ContainSubstring("the server is away")))
	n.refusal = nil
	n.settle()
	n.Expect(n.controller.Ready(nil)).To(Succeed())
}

func deleted(s scenario) {
	n := s.node("", sim.A100)
	o := n.get()
	n.Expect(s.cluster.Client.Delete(s.Context(), o)).To(Succeed())
	_, err := n.controller.Reconcile(s.Context(), o)
	n.Expect(err).NotTo(HaveOccurred(), "a report that comes too late is no error")
	n.Expect(s.cluster.Client.Get(s.Context(), client.ObjectKey{Name: s.name}, o)).NotTo(Succeed(), "and does not bring the object back")

	now := metav1.Now()
	o.DeletionTimestamp = &now
	writes := n.writes
	_, err = n.controller.Reconcile(s.Context(), o)
	n.Expect(err).NotTo(HaveOccurred())
	n.Expect(n.writes).To(Equal(writes))
}

// aNameIsNoMPSServer: a container calls its processes as it likes, and the controller goes by the name that is reported.
func aNameIsNoMPSServer(s scenario) {
	n := s.node("", sim.T4)
	n.specify(shared(n.uuid(0), 10, 1510))
	n.settle()
	n.Expect(n.hardware.AddProcess(n.uuid(0), gpu.Process{PID: 11, Name: gpu.MPSServer, MPSServer: true, Instance: gpu.WholeGPU})).To(Succeed())
	n.processes.Set(11, host.Process{Name: gpu.MPSServer, PodUID: "uid-1"})
	n.specify(whole(n.uuid(0)))
	n.reconciled()
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)).To(ContainSubstring("stop MPS"))
	n.Expect(n.get().Status.Devices[0].Processes).To(ConsistOf(v1alpha1.ProcessStatus{
		PID: 11, Name: "nvidia-cuda-mps-server (by its own account)", PodUID: "uid-1",
	}))
	n.Expect(n.daemons.Get(n.pipe("nvidia.com/gpu"))).NotTo(BeNil())
}

// reportsWhateverAnswers: root in a client's container can put a socket in the place of the daemon's.
func reportsWhateverAnswers(s scenario) {
	n := s.node("", sim.T4)
	n.specify(shared(n.uuid(0), 10, 1510))
	n.settle()
	for _, answer := range []string{"1000.0\n", "-5\n", "NaN\n"} {
		n.runner.Add("nvidia-cuda-mps-control", n.daemons.Answering("get_default_active_thread_percentage", answer))
		_, err := n.reconcile()
		n.Expect(err).To(MatchError(ContainSubstring("instead of a percentage")))
		n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonMPSDaemonFailed)).
			To(ContainSubstring("instead of a percentage"), "it is reported")
	}
	n.runner.Add("nvidia-cuda-mps-control", n.daemons.Program)
	n.Expect(n.mpsHost.Converge(s.Context(), true)).To(Succeed())
	n.settle()
	n.expectReady()
}

// setsExclusive counts how often the compute mode for MPS was set.
func (n *node) setsExclusive() (sets int) {
	for _, w := range n.hardware.Writes() {
		if strings.Contains(w, "EXCLUSIVE_PROCESS") {
			sets++
		}
	}
	return sets
}

func (n *node) persistent() (on bool) {
	n.hardware.Update(func(s *sim.Node) { on = s.GPUs[0].Persistence })
	return on
}

func mpsKeepsTheComputeMode(s scenario) {
	n := s.node("", sim.H100)
	n.hardware.Update(func(s *sim.Node) { s.Forgets = true })
	n.specify(shared(n.uuid(0), 10, 1510))
	for range 3 {
		n.reconciled()
	}
	n.Expect(n.setsExclusive()).To(Equal(1))
	n.Expect(n.device(0).State.ComputeMode).To(Equal(gpu.ComputeExclusiveProcess), "it is there for the first client")
	n.expectIdle()

	n.hardware.Update(func(s *sim.Node) { s.GPUs[0].Persistence, s.GPUs[0].ComputeMode = false, gpu.ComputeDefault }) // another driver
	n.settle()
	n.expectReady()
	n.Expect(n.persistent()).To(BeTrue())

	n.restartAgent()
	n.specify(whole(n.uuid(0)))
	n.settle()
	n.expectReady()
	n.Expect(n.persistent()).To(BeFalse(), "what was turned on is turned off again")

	n.specify(shared(n.uuid(0), 10, 1510))
	n.settle()
	n.specify(mig(n.uuid(0), instances("1g.10gb", 7)))
	n.settle()
	n.expectReady()
	n.Expect(n.persistent()).To(BeFalse(), "in persistence mode the GPU counts as open")

	n.hardware.Update(func(s *sim.Node) { s.GPUs[0].Persistence = true }) // by an administrator
	n.specify(shared(n.uuid(0), 10, 1510))
	n.settle()
	n.specify(whole(n.uuid(0)))
	n.settle()
	n.Expect(n.persistent()).To(BeTrue(), "what the agent has found on stays on")
}

func mpsCannotKeepTheComputeMode(s scenario) {
	n := s.node("", sim.T4)
	n.hardware.Update(func(s *sim.Node) { s.Forgets = true })
	n.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpSetPersistence {
			return gpu.ErrNotSupported
		}
		return nil
	}
	n.specify(shared(n.uuid(0), 10, 1510))
	for range 3 {
		n.reconciled()
	}
	n.Expect(n.setsExclusive()).To(Equal(1))
	n.Expect(n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionTrue, v1alpha1.ReasonApplied)).
		To(ContainSubstring("the compute mode of GPU 0 (Tesla-T4) is not kept"))
	n.allocations.hold("client", n.uuid(0)+"::3")
	n.specify(shared(n.uuid(0), 20, 1510))
	n.settle()
	n.expectReady()
	n.allocations.free()
	n.specify(whole(n.uuid(0)))
	n.settle()
	n.expectReady()
}

// resetsTogether: without a fabric manager the GPUs behind NVSwitches are reset in one command, once all of them are
// idle.
func resetsTogether(s scenario) {
	n := s.node("", sim.A100, sim.A100)
	n.hardware.Update(func(h *sim.Node) { h.NVSwitch = true })
	n.allocations.hold("train", n.uuid(1))
	n.specify(mig(n.uuid(0), instances("1g.5gb", 7)))
	_, err := n.reconcile()
	n.Expect(err).NotTo(HaveOccurred(), "it is no failure")
	n.Expect(n.get().Status.Devices[0].ResetPeers).To(Equal([]string{n.uuid(1)}), "which the controller drains")

	n.reconciled()
	message := n.expectCondition(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonGPUInUse)
	n.Expect(message).To(ContainSubstring("ml/train"), "a pod on the other GPU")

	n.allocations.free()
	n.settle()
	n.expectReady()
	n.Expect(n.profiles(0)).To(HaveLen(7))
	n.Expect(strings.Join(n.hardware.Writes(), "\n")).To(ContainSubstring("Reset " + n.uuid(0) + " " + n.uuid(1)))
}

// namesModule: nvidia_drm keeps a GPU open for good, so that trying again does not help.
func namesModule(s scenario) {
	n := s.node("", sim.A100)
	n.hardware.Update(func(h *sim.Node) { h.DRM = true })
	n.specify(mig(n.uuid(0), instances("1g.5gb", 7)))
	n.reconciled()
	message := n.expectCondition(v1alpha1.ConditionRebootRequired, metav1.ConditionTrue, v1alpha1.ReasonRebootRequired)
	n.Expect(message).To(ContainSubstring("the kernel module nvidia_drm keeps the GPU open: unload it on the node (modprobe -r nvidia_drm)"))

	n.hardware.Update(func(h *sim.Node) { h.DRM = false })
	n.settle()
	n.expectReady()
	n.expectNoCondition(v1alpha1.ConditionRebootRequired)
}
