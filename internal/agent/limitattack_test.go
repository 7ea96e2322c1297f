// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// runs adds a pod whose containers run; 0 replicas: it has the whole first GPU.
func (w *limitWorld) runs(name string, replicas int) *limitPod {
	w.t.Helper()
	w.serial++
	p := &limitPod{
		name: name, uid: "0000000" + string(rune('0'+w.serial)) + "-0000-4000-8000-000000000000", replicas: map[string]int{w.gpus[0]: replicas}, listed: map[string]int{w.gpus[0]: replicas},
		pids: map[int]string{}, uncounted: map[int]bool{}, covered: map[string]bool{},
	}
	w.pods = append(w.pods, p)
	w.allocated()
	for w.pods = []*limitPod{p}; p.stage != stageRuns; {
		w.advance()
	}
	return p
}

func (w *limitWorld) enforce() {
	w.node.Generation++
	w.node.Spec.Memory = memoryLimit(v1alpha1.MemoryLimitEnforce)
}

// limitedTrain is a world in which a pod that runs with one replica is to be limited.
func limitedTrain(t *testing.T, seed uint64) (*limitWorld, *limitPod) {
	t.Helper()
	w := newLimitWorld(t, seed, nil)
	w.enforce()
	p := w.runs("train", 1)
	return w, p
}

// TestWhatIsRefusedIsTriedAgainInPeace: each look opens the driver, asks the kubelet twice, and writes a line for each pod.
func TestWhatIsRefusedIsTriedAgainInPeace(t *testing.T) {
	w, _ := limitedTrain(t, 3)
	w.hardware.Fail = func(op sim.Op, _ string) error {
		if op == sim.OpSetMemoryLimit {
			return errLimits
		}
		return nil
	}
	w.settle()
	if w.last.Condition.Reason != v1alpha1.ReasonLimitFailed || w.last.After < 15*time.Second {
		t.Errorf("%s: tried again after %s", w.last.Condition.Reason, w.last.After)
	}
}

// TestALimitOfAnotherProgramRightAfterOurs stays: the agent tries no other limit over it.
func TestALimitOfAnotherProgramRightAfterOurs(t *testing.T) {
	for seed := range uint64(2) {
		w, _ := limitedTrain(t, 3+seed)
		w.hardware.after = func(_, path string) bool {
			w.hardware.Update(func(n *sim.Node) { w.must(n.SetMemoryLimit(w.gpus[0], path, 0, 7<<30+1, true)) })
			w.foreign[w.gpus[0]+" "+path] = 7<<30 + 1
			w.disturb(lied) // the agent cannot tell that it was not the driver, before it looks again
			return true
		}
		w.settle()
		w.checkForeign()
		w.settle()
		w.checkForeign()
		if w.last.Condition.Reason != v1alpha1.ReasonForeignLimit {
			t.Errorf("%s: %s", w.backend, w.last.Condition.Reason)
		}
	}
}

// TestAContainerKeepsNoInheritedLimit: on misc any new cgroup may have the address of one of ours that is gone, also that of a container
// whose pod has no share.
func TestAContainerKeepsNoInheritedLimit(t *testing.T) {
	w, first := limitedTrain(t, 1)
	w.settle()
	w.remove(first)
	w.settle()
	whole := w.runs("whole", 0)
	container := whole.containers[1]
	w.hardware.Update(func(n *sim.Node) { w.must(n.Inherit(container)) })
	if w.limitOf(w.gpus[0], container) == sim.NoLimit {
		t.Fatal("nothing was inherited")
	}
	w.settle()
	if is := w.limitOf(w.gpus[0], container); is != sim.NoLimit {
		t.Errorf("a container with a whole GPU is kept to %d", is)
	}
}

// TestTheRecordIsOneAgents, also where it has been removed meanwhile.
func TestTheRecordIsOneAgents(t *testing.T) {
	w := newLimitWorld(t, 3, nil)
	unlock, err := w.record.Lock()
	w.must(err)
	w.must(w.record.Write([]byte("{}")))
	w.must(w.record.Write(nil)) // as save does in the middle of a look
	if second, err := w.record.Lock(); err == nil {
		second()
		t.Error("two agents have the record")
	}
	unlock()
	again, err := w.record.Lock()
	w.must(err)
	again()
	if _, err := os.Stat(w.record.Path); err == nil {
		t.Error("a record is left")
	}
}

// TestAPodAboveItsShareGetsItsLimitOnceItUsesLess, and is said to have none until then.
func TestAPodAboveItsShareGetsItsLimitOnceItUsesLess(t *testing.T) {
	w, p := limitedTrain(t, 3)
	path := w.tree.pod(p.class, p.uid)
	w.hardware.Update(func(n *sim.Node) {
		w.must(n.StartProgram(w.gpus[0], gpu.Process{PID: 7, Name: "python3", Instance: gpu.WholeGPU}, p.containers[1]))
		w.must(n.Allocate(w.gpus[0], 7, sim.DeviceMemory, 20<<30))
	})
	w.settle()
	if c := w.last.Condition; c.Reason != v1alpha1.ReasonAboveLimit || c.Status != "False" || w.last.After > 15*time.Second || w.limitOf(w.gpus[0], path) != sim.NoLimit {
		t.Errorf("%s %s, looked at again after %s: %+v", c.Status, c.Reason, w.last.After, w.last.Status)
	}
	w.hardware.Update(func(n *sim.Node) { n.FreeMemory(7) })
	w.clock.Step(w.last.After)
	w.settle()
	if is := w.limitOf(w.gpus[0], path); w.last.Condition.Status != "True" || is != 4<<30 {
		t.Errorf("%s: %d", w.last.Condition.Reason, is)
	}
}

// TestPodsAreLimitedWhereTheKubeletsRecordCannotBeRead: those that it lists.
func TestPodsAreLimitedWhereTheKubeletsRecordCannotBeRead(t *testing.T) {
	w, _ := limitedTrain(t, 3)
	w.checkpoint()
	w.must(os.WriteFile(filepath.Join(w.hostRoot, "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"), []byte(`{"Data":{"PodDeviceEntries":[{"DeviceIDs":["x"]}]}}`), 0o600))
	w.settle()
	if w.last.Status.Limited != 1 {
		t.Errorf("%+v", w.last)
	}
}

// TestGPUsComeAndGo: one that is reported later, as after an upgrade of the driver, is looked at then. One that has fallen off the bus stays in the
// last report, as the agent can make no other, and keeps none from its limit, nor from losing it.
func TestGPUsComeAndGo(t *testing.T) {
	w, p := limitedTrain(t, 3)
	devices := w.node.Status.Devices
	w.node.Status.Devices = nil
	w.settle()
	w.node.Status.Devices = devices
	w.hardware.Update(func(n *sim.Node) { n.GPUs[0].Persistence = false })
	w.settle()
	if w.last.Condition.Reason != v1alpha1.ReasonNoPersistence {
		t.Errorf("%+v", w.last)
	}
	w.hardware.Update(func(n *sim.Node) { n.GPUs[0].Persistence, n.GPUs = true, n.GPUs[:1] })
	w.enforce()
	w.settle()
	if w.last.Condition.Status != "True" {
		t.Errorf("%+v", w.last)
	}
	w.node.Spec.Memory = nil
	w.settle()
	if is := w.limitOf(w.gpus[0], w.tree.pod(p.class, p.uid)); is != sim.NoLimit {
		t.Errorf("it has %d", is)
	}
}
