// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package history

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/policy"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// Machine is a machine of a world, and its node.
type Machine interface {
	NodeName() string
	Pool() string
	IsOff() bool
	Hardware() *sim.Hardware
	EndAgent()
}

// World is what can happen to a cluster, whatever plays it. Objects of the API are called by the name of their node. What changes something
// reports whether it has.
type World[M Machine] interface { //nolint:interfacebloat // so much can happen, and each world does all of it
	Tell(format string, args ...any)
	Breaks(invariant, format string, args ...any)
	Broken() string // the first invariant that broke; empty: none
	Serial() int    // another number each time
	Begin()         // an event, or an end, begins
	Reconcile(n int)
	Pass(d time.Duration) // as if nobody looked

	Machines() []M
	MostMachines() int
	Join(name string, random *rand.Rand)
	ReplaceNode(m M, random *rand.Rand)
	Die(m M, forGood bool)
	Boot(m M)
	SwapGPU(m M, index int, model sim.Model, serial int) // empty model: it is taken out
	LoseGPU(m M, index int)                              // while the machine runs
	InUse(m M, gpu int) bool
	DestroyInstance(m M, gpu int) error
	MoveToPool(m M, pool string)
	Lie(m M, report func(*v1alpha1.GPUNode)) bool // the agent reports that, and nothing more
	Lead()                                        // another controller does

	PodKinds() []string
	Start(m M, kind string, random *rand.Rand)
	UserPods(m M) []string
	EndPod(m M, name string)

	ListPolicies() []v1alpha1.GPUSharingPolicy
	UpdatePolicy(p *v1alpha1.GPUSharingPolicy) // it is of another generation then, whatever has changed
	ReplacePolicies(by []v1alpha1.GPUSharingPolicy)
	DeletePolicy(name string)
	CountAnew() // the indexes of GPUs in policies are the present ones

	ChangeNode(name string, change func(*corev1.Node)) bool
	SetByOthers(name, label, value string) bool // a label or an annotation; empty: it is removed
	Theirs(name, label, value string)           // another controller sets that, so that nobody restores it
	ChangeConfigMap(change func(data map[string]string)) bool
	ChangeGPUNode(name string, change func(*v1alpha1.GPUNode)) bool
	DeleteConfigMap()
	DeleteNodeFeature(name string) bool
	DeleteGPUNode(name string)
	ClusterPolicyRewrites() []Rewrite
	Fight(again func() bool, d time.Duration) // another controller does that again and again
	HasClusterPolicy() bool
	DeleteClusterPolicy(random *rand.Rand) // for a while
	ApplyChart(random *rand.Rand)
	Counted() map[string]int // what the operator did, since a fight or a rest began

	EndFaults()      // but the death of the machines that never return
	Repair(m M)      // when its users have left
	DeletePolicies() // or have them leave the nodes as they are
	Rest()           // for eight hours, in which nothing may go on all the time
	CheckBudget()    // since Begin
	CheckRestored()

	Desired(m M) (by *v1alpha1.GPUSharingPolicy, want policy.Desired, err error)
	Differs(m M, want policy.Desired) string
	Unready(m M, by *v1alpha1.GPUSharingPolicy) string // what is said of the node; empty: it is up to date
	Unknown(m M, by *v1alpha1.GPUSharingPolicy) bool   // nobody can know how it is
	Excused(m M, by *v1alpha1.GPUSharingPolicy) bool   // it need not get there
	AgentRuns(m M) bool
	OfferedByOthers(m M, reason string) bool // the GPUs; reason: how they are said to be
	InMaintenance(m M) bool
	NamesUser(m M, message string) bool // a message names a pod or claim that is there
}

// Happenings are events by name.
type Happenings[W any] map[string]func(W, *rand.Rand)

// Names are the names of events, sorted, those of some of other worlds too.
func (h Happenings[W]) Names(more ...string) []string {
	return slices.Sorted(slices.Values(slices.AppendSeq(more, maps.Keys(h))))
}

// Play lets a history take place: its events, with reconciles between, and three ends. The faults stop, then the users leave, then the policies
// go. Own are the events of the world alone. It returns what is broken.
func Play[M Machine, W World[M]](w W, h History, own ...Happenings[W]) (broken string) {
	shared := []Happenings[World[M]]{Events[M](), LateEvents[M]()}
	for _, e := range h.Events {
		w.Begin()
		for _, events := range own {
			if event, is := events[e.Kind]; is {
				event(w, e.Random())
			}
		}
		for _, events := range shared {
			if event, is := events[e.Kind]; is {
				event(w, e.Random())
			}
		}
		if w.Reconcile(e.Reconciles); w.Broken() != "" {
			return w.Broken()
		}
	}
	for _, end := range []func(World[M]){faultsStop[M], usersLeave[M], policiesGo[M]} {
		w.Begin()
		if end(w); w.Broken() != "" {
			break
		}
	}
	return w.Broken()
}
