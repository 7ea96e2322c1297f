// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/rollout"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const managerStopped = "paused-for-mig-change"

// manager is NVIDIA's mig-manager on a host, as its sources have it (NVIDIA/mig-parted, pkg/mig/reconfigure): it
// notices another value of its label and applies what the label says when it starts; it stops NVIDIA's operands and
// waits until they are gone; it clears a GPU before it makes instances, and all GPUs where the mode of one changes; it
// drains nobody.
type manager struct {
	acts     bool          // otherwise its pod does nothing
	starts   time.Duration // how long its pod takes to start
	compares time.Duration // how long it compares what it was asked for with what is there, before it says anything
	runs     bool
	compared time.Time // until when it does that
	last     string    // what it was asked for last
	began    time.Time // when it began with that; zero: it is at rest
	applied  []string  // what it has applied, in order
	mishap   func(name string) string
	mistakes []string // what it was let do and must not
}

// partition is mig-manager's part of what happens on a node.
func (c *site) partition(h *host) {
	if !h.acts {
		return
	}
	at := slices.IndexFunc(h.Pods, playedBy(v1alpha1.LabelMIGManager))
	if at >= 0 && h.Pods[at].MountsConfig != c.Plugin.MIGReady && len(h.Taints) == 0 {
		if !h.began.IsZero() {
			h.mistakes = append(h.mistakes, "the pod is replaced while it applies "+h.last)
		}
		h.Pods = slices.Delete(h.Pods, at, at+1) // the DaemonSet has changed; it does not tolerate our taint
		at = -1
	}
	if at < 0 {
		h.runs, h.last, h.began, h.compared = false, "", time.Time{}, time.Time{}
		return
	}
	if c.Now.Sub(h.Pods[at].Scheduled) < h.starts {
		return
	}
	if h.Pods[at].ReadySince.IsZero() {
		h.Pods[at].ReadySince = c.Now.Add(h.skew)
	}
	if name := h.Labels[v1alpha1.LabelMIGConfig]; name != h.last && h.compared.IsZero() {
		h.last = name
		if name != "" {
			h.began, h.compared = c.Now, c.Now.Add(h.compares)
		}
	}
	c.serve(h, at)
}

// serve is what a pod of mig-manager does with what it was asked for.
func (c *site) serve(h *host, pod int) {
	if !h.compared.IsZero() {
		if c.Now.Before(h.compared) {
			return
		}
		h.compared = time.Time{}
		h.begin(c.file(h, pod))
	}
	h.runs = true
	if !h.began.IsZero() && c.Now.Sub(h.began) >= 10*time.Second {
		h.work(c.file(h, pod))
	}
}

// file are the configurations as its pod sees them.
func (c *site) file(h *host, pod int) map[string]migConfig {
	data := h.plugin.seen[migmanager.FileKey]
	if !h.Pods[pod].MountsConfig {
		data = builtIn
	}
	var file struct {
		Configs map[string]migConfig `json:"mig-configs"`
	}
	if err := yaml.Unmarshal([]byte(data), &file); err != nil {
		panic(err)
	}
	return file.Configs
}

type migConfig []struct {
	Devices    any              `json:"devices"`
	MIGEnabled bool             `json:"mig-enabled"`
	MIGDevices map[string]int32 `json:"mig-devices"`
}

// builtIn is what mig-manager reads unless it is told otherwise.
const builtIn = `version: v1
mig-configs:
  all-disabled:
  - devices: all
    mig-enabled: false
  all-1g.5gb:
  - devices: all
    mig-enabled: true
    mig-devices: {1g.5gb: 7}
`

// requested is what a configuration asks for; nil if it does not cover every GPU.
func (m migConfig) requested(devices []gpu.Device) []v1alpha1.DeviceSpec {
	var specs []v1alpha1.DeviceSpec
	for _, d := range devices {
		for _, e := range m {
			indexes, some := e.Devices.([]any)
			if some && !slices.Contains(indexes, any(float64(d.Index))) {
				continue
			}
			s := v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeDisabled}
			if e.MIGEnabled {
				s.MIGMode = v1alpha1.MIGModeEnabled
			}
			for profile, n := range e.MIGDevices {
				s.Instances = append(s.Instances, v1alpha1.InstanceCount{Profile: profile, Count: n})
			}
			specs = append(specs, v1alpha1.DeviceSpec{UUID: d.UUID, Sharing: s})
		}
	}
	if len(specs) != len(devices) {
		return nil
	}
	return specs
}

func (h *host) state(state string) {
	h.Labels[v1alpha1.LabelMIGConfigState] = state
	if state == "success" || state == "failed" {
		h.began = time.Time{}
	}
}

func (h *host) begin(file map[string]migConfig) {
	requested := file[h.last].requested(h.devices())
	switch {
	case requested == nil:
		h.state("failed") // an unknown name
	case len(migmanager.Clears(requested, h.devices())) == 0:
		h.state("success")
	default:
		h.state("pending")
		for _, label := range managerLabels() {
			if h.Labels[label] != "false" && (label != v1alpha1.LabelRunsAgent || h.Labels[label] != "") {
				h.Labels[label] = managerStopped
			}
		}
	}
}

// managerLabels are the labels that mig-manager v0.15 stops, that of clients where it has a value.
func managerLabels() []string {
	return []string{pluginLabel, gfdLabel, dcgmLabel, v1alpha1.LabelRunsAgent}
}

func (h *host) work(file map[string]migConfig) {
	outcome := ""
	if h.mishap != nil {
		outcome = h.mishap(h.last)
	}
	switch outcome {
	case "hangs": // an operand that did not end: nothing is restored
		return
	case "fails":
	case "lies":
		outcome = ""
	default:
		outcome = h.apply(file[h.last].requested(h.devices()))
	}
	for _, label := range managerLabels() {
		if h.Labels[label] == managerStopped {
			h.Labels[label] = "true"
		}
	}
	if outcome != "" {
		h.state("failed")
		return
	}
	h.applied = append(h.applied, h.last)
	h.state("success")
}

// apply changes the GPUs, and returns what blocked that.
func (h *host) apply(requested []v1alpha1.DeviceSpec) (failed string) {
	if h.AgentReady && h.GPU.Spec.PolicyName != "" && h.GPU.Spec.MIGConfigName == "" && migmanager.Ours(h.last) {
		h.mistakes = append(h.mistakes, "the agent has the driver open")
	}
	for _, d := range migmanager.Clears(requested, h.devices()) {
		if len(d.Holders) > 0 {
			h.mistakes = append(h.mistakes, fmt.Sprintf("pod %s holds GPU %d", d.Holders[0].Pod, d.Index))
			return "In use by another client"
		}
		h.change(d.UUID, func(g *sim.GPU) { g.Instances = nil })
	}
	steps, err := plan.Node(requested, h.devices())
	for err == nil && len(steps) > 0 {
		if err := steps[0].Do(context.Background(), plan.Tools{Hardware: h.hardware, MPS: h}); err != nil {
			return err.Error()
		}
		steps, err = plan.Node(requested, h.devices())
	}
	return ""
}

// configureMIG is what the executor does with the ClusterPolicy.
func (c *site) configureMIG(d rollout.Decision) {
	c.reconfigured = d.ConfigureMIGManager != c.Plugin.MIGReady
	if !c.reconfigured {
		return
	}
	c.Plugin.MIGReady = d.ConfigureMIGManager
	if d.ConfigureMIGManager {
		if c.Configs == nil {
			c.Configs = map[string]string{}
		}
		c.Configs[migmanager.FileKey] = builtIn
	}
}

// reportAside is what the agent reports while it leaves the driver closed.
func (h *host) reportAside() {
	h.GPU.Status.Conditions = condition.Set(h.GPU.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonMIGManagerPartitioning,
		ObservedGeneration: h.GPU.Generation,
	}, h.now)
}

// TestMIGManagerIsNotWaitedForBecauseAClockWasAhead: another controller, whose clock was a day ahead, wrote since when
// mig-manager was asked.
func TestMIGManagerIsNotWaitedForBecauseAClockWasAhead(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := releasedTo(g, c, "all-1g.5gb")
	h.mishap = func(string) string { return "hangs" }
	c.Now = c.Now.Add(-24 * time.Hour)
	d := c.during(45*time.Minute, 10*time.Second)
	g.Expect(d.ConfigureMIGManager).To(BeFalse(), "%+v", d.Nodes)
	g.Expect(d.Nodes).To(BeEmpty(), "%+v", d.Nodes)
	isForgotten(g, h)
	g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
}

// TestTheReasonToWaitForMIGManagerHoldsBesideOtherNodes: where mig-manager partitions another node the ClusterPolicy is
// not restored.
func TestTheReasonToWaitForMIGManagerHoldsBesideOtherNodes(t *testing.T) {
	g := NewWithT(t)
	c := newSite()
	h := releasedTo(g, c, "all-1g.5gb")
	h.mishap = func(string) string { return "hangs" }
	other := c.add("b", sim.A100)
	other.acts, other.Labels["pool"] = true, "other"
	other.Labels[v1alpha1.LabelMIGManager], other.Labels[v1alpha1.LabelMIGConfig] = "true", "all-disabled"
	c.setPolicy("other", byManager(count("2g", 3)), evicting, func(p *v1alpha1.GPUSharingPolicy) {
		p.Spec.NodeSelector = &v1alpha1.NodeSelector{MatchLabels: map[string]string{"pool": "other"}}
	})
	d := c.during(5*time.Minute, time.Second)
	g.Expect(d.Nodes).To(HaveLen(2))
	g.Expect(one(d).State).To(Equal(node.Finishing), "%+v", one(d))
	g.Expect(one(d).Message).NotTo(ContainSubstring("then the ClusterPolicy is restored"))
	d = c.during(25*time.Minute, 10*time.Second)
	g.Expect(d.ConfigureMIGManager).To(BeTrue())
}

// TestMIGManagerKeepsItsPodBesideTheNextPolicy: one that governs the node before mig-manager has answered.
func TestMIGManagerKeepsItsPodBesideTheNextPolicy(t *testing.T) {
	for name, next := range map[string]v1alpha1.Sharing{"TimeSlicing": timeSlicing(4), "MIG": mig(count("3g", 2)), "MPS": mps(4)} {
		for _, outcome := range []string{"", "hangs", "fails"} {
			for _, after := range []int{1, 5} {
				t.Run(name+outcome, func(t *testing.T) {
					g := NewWithT(t)
					c := newSite()
					h := releasedTo(g, c, "all-1g.5gb")
					h.mishap = func(string) string {
						if c.Plugin.MIGReady { // its next pod succeeds
							return outcome
						}
						return ""
					}
					for range after {
						c.tick(time.Second)
						c.reconcile()
					}
					c.setPolicy("next", next, evicting)
					d := c.during(40*time.Minute, 5*time.Second)
					g.Expect(d.ConfigureMIGManager).To(BeFalse())
					isUpToDate(g, one(d))
					g.Expect(h.Annotations).NotTo(HaveKey(v1alpha1.AnnotationMIGConfig))
					if outcome != "hangs" {
						g.Expect(h.mistakes).To(BeEmpty())
					}
				})
			}
		}
	}
}
