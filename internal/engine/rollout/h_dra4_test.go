package rollout_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// TestHSweep: something happens some seconds into a change for a pod; half an hour later no pod hangs, nothing is tainted, a bystander has kept its instance, and
// those who wait are served.
func TestHSweep(t *testing.T) {
	var later func()
	events := map[string]func(c *applied, h *host){
		"nothing":  func(*applied, *host) {},
		"gate off": func(c *applied, h *host) { h.GPU.Status.Demand = nil },
		"gate off, and the agent dies": func(c *applied, h *host) {
			h.GPU.Status.Demand, h.AgentReady = nil, false
			later = func() { h.AgentReady = true }
		},
		"paused": func(c *applied, h *host) {
			c.Policies[0].Spec.Rollout.Paused = true
			c.Policies[0].Generation++
			later = func() { c.Policies[0].Spec.Rollout.Paused = false; c.Policies[0].Generation++ }
		},
		"GPUNode lost": func(c *applied, h *host) { c.makeGPUNode(h) },
		"GPUNode lost, agent slow": func(c *applied, h *host) {
			c.makeGPUNode(h)
			h.lags = true
			later = func() { h.lags = false }
		},
		"GPUNode and annotation lost": func(c *applied, h *host) {
			c.makeGPUNode(h)
			h.Annotations = map[string]string{}
		},
		"rule deleted": func(c *applied, h *host) { h.DevicesTaintedAt = time.Time{} },
		"driver slow": func(c *applied, h *host) {
			h.driver.pulls = 90 * time.Second
			h.restartDriver()
			later = func() { h.driver.pulls = 0 }
		},
		"driver never starts": func(c *applied, h *host) {
			h.driver.pulls = 24 * time.Hour
			h.restartDriver()
			later = func() { h.driver.pulls = 0 }
		},
		"driver broken": func(c *applied, h *host) {
			h.driver.broken = true
			later = func() { h.driver.broken = false; h.restartDriver() }
		},
		"advise": func(c *applied, h *host) {
			of := c.Policies[0].Spec.Sharing.MIG.Layouts[0].OnDemand
			of.Mode = v1alpha1.OnDemandModeAdvise
			c.Policies[0].Generation++
			later = func() { of.Mode = v1alpha1.OnDemandModeApply; c.Policies[0].Generation++ }
		},
		"policy deleted": func(c *applied, h *host) {
			p := c.Policies
			c.Policies = nil
			later = func() { c.Policies = p }
		},
		"agent restarts": func(c *applied, h *host) {
			h.AgentReady = false
			later = func() { h.AgentReady = true; h.AgentSince = c.Now }
		},
		"node away": func(c *applied, h *host) {
			h.AgentReady, h.lags = false, true
			h.Taints = append(slices.Clone(h.Taints), corev1.Taint{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoSchedule})
			later = func() { h.AgentReady, h.lags, h.Taints = true, false, nil }
		},
		"to the plugin and back": func(c *applied, h *host) {
			c.switchOver(h, false)
			later = func() { c.switchOver(h, true) }
		},
		"a class of an administrator": func(c *applied, h *host) {
			c.setClass(dra.Class{Name: "admins", Resource: "nvidia.com/mig-7g.40gb", Age: c.Now.Unix() + 1})
			later = func() { c.dropClass("admins") }
		},
		"controllers restart": func(c *applied, h *host) { c.leads() },
	}
	for name, happens := range events {
		for phase := range 14 {
			for _, lasts := range []int{8, 45, 1000} {
				t.Run(fmt.Sprintf("%s/%d/%d", name, phase, lasts), func(t *testing.T) {
					c := newApplied(t, onDriver).large([]sim.Model{sim.A100, sim.A100}, "n0")
					c.random = rand.New(rand.NewPCG(uint64(phase*77+lasts), 46))
					h := c.hosts["n0"]
					c.waits("3g.20gb", 0)
					for range 60 {
						c.step()
					}
					by := h.Claims[0].Of("n0")[0]
					_, has, _ := h.located(by)
					c.waits("7g.40gb", 0)
					for !h.isTainted() {
						c.step()
					}
					for range phase {
						c.step()
					}
					later, c.edited, c.told = func() {}, true, nil
					happens(c, h)
					c.version["n0"]++
					c.waits("3g.20gb", 0)
					lost := ""
					for second := range 1000 + 3600 {
						if second == lasts {
							later()
							c.version["n0"]++
						}
						c.step()
						if _, is, _ := h.located(by); is.UUID != has.UUID && lost == "" {
							lost = fmt.Sprintf("the bystander lost its instance after %d s", second)
						}
						if second > 2800 && len(h.hanging()) > 0 {
							lost += fmt.Sprint("hangs ", h.hanging())
							break
						}
					}
					if lost != "" {
						t.Error(lost, "\n", strings.Join(c.told[:min(len(c.told), 45)], "\n"))
					}
					if h.isTainted() {
						t.Error("tainted at the end: ", h.waits(), tail(c.told, 10))
					}
					if c.users() > 0 {
						t.Error("waits at the end: ", h.waits(), len(c.waiting), says(h.GPU.Status.Demand), "\n", tail(c.told, 10))
					}
				})
			}
		}
	}
}
