// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling_test

import (
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// Cluster Autoscaler 1.36.1 was run by hand beside the operator on 2026-11-24, with played machines. Each row of what was seen is a case here: the
// loop below must start as many nodes with what the operator wrote then. With what it writes now, no row starts more nodes than its pods
// need, or the group reports beforehand why.

// caTold is what Cluster Autoscaler takes a new node of the group for, before one has been Ready for a minute.
type caTold struct {
	capacity map[string]int64
	labels   map[string]string
	taints   []string
}

// caLife is what becomes of a new node. Times are since it is Ready, or since the event before.
type caLife struct {
	every, label, annotate, done time.Duration
	// apart is how much later than one before each further node of a loop comes.
	apart time.Duration
	// early: it gets the taint once it tells its group; else with the label.
	early bool
	// ready is how many nodes of the group are ready before the pods come.
	ready int
	// never: no policy governs it, so it stays as it came.
	never bool
	// registered: it has the startup taint from the beginning. taints: the policy asks for it; keeps: under the key that it gets first.
	registered, taints, keeps bool
	// offers is what it offers in the end, and policyTaints the taints that it then has.
	offers       map[string]int64
	labels       map[string]string
	policyTaints []string
}

// caPods are pods that ask for one of a resource.
type caPods struct {
	count    int64
	resource string
	selects  map[string]string
}

const caBoot = 5 * time.Second

// at is a node as Cluster Autoscaler sees it some time after it was created: starting, if it is not Ready or has a startup taint that it
// waits for (utils/taints/taints.go), or has the GPU label without a GPU that it knows.
func (l caLife) at(age time.Duration) (starting bool, offers map[string]int64, taints []string) {
	ready, labelled := age-caBoot, caBoot+l.label
	finished := !l.never && age >= labelled+l.done
	switch {
	case finished:
		n := caNode{labels: l.labels, allocatable: l.offers}
		return n.unready(), l.offers, l.policyTaints
	case ready < 0 || l.registered:
		return true, nil, nil
	case l.never || !l.taints:
	case l.early:
		return ready >= l.told(), nil, nil
	case age >= labelled:
		return l.tainted(age - labelled)
	}
	return false, nil, nil
}

// tainted is a node that got the startup taint with its label, some time after that.
func (l caLife) tainted(since time.Duration) (starting bool, offers map[string]int64, taints []string) {
	if l.annotate == 0 || since >= l.annotate && !l.keeps {
		return true, nil, nil
	}
	return false, nil, []string{v1alpha1.TaintStartup}
}

// told is when a node tells its group, since it is Ready.
func (l caLife) told() time.Duration {
	const clusterAPI = 2 * time.Second // its Machine controller annotates a Node that it sees
	if l.annotate > 0 {
		return l.label + l.annotate
	}
	return clusterAPI
}

// started is how many nodes Cluster Autoscaler starts: in each loop the scheduler has bound what fits; what fits on nodes that start, as it
// takes them for, waits; for the rest it adds nodes, if the template of the group fits (core/static_autoscaler.go, RunOnce).
// There is one node already if ready says so.
func started(told caTold, cached *caTold, l caLife, pods caPods) int {
	if l.every == 0 {
		l.every = 12 * time.Second // 10, and what a loop takes
	}
	var created []time.Duration
	for range l.ready {
		created = append(created, -time.Hour)
	}
	for now := time.Duration(0); now < 10*time.Minute; now += l.every {
		template, left := told, pods.count
		if cached != nil {
			template = *cached
		}
		for _, at := range created {
			starting, offers, taints := l.at(now - at)
			if !starting && len(taints) == 0 && fits(l.labels, pods.selects) {
				left -= offers[pods.resource]
			}
			if !starting && now-at-caBoot > time.Minute {
				template = caTold{offers, l.labels, taints}
				cached = &template
			}
		}
		if each := template.capacity[pods.resource]; each > 0 && len(template.taints) == 0 && fits(template.labels, pods.selects) {
			at := now
			for left -= each * l.starting(created, now); left > 0; left -= each {
				created = append(created, at)
				at += l.apart
			}
		}
	}
	return len(created) - l.ready
}

// starting is how many of the nodes created then start at a time.
func (l caLife) starting(created []time.Duration, now time.Duration) (count int64) {
	for _, at := range created {
		if starting, _, _ := l.at(now - at); starting {
			count++
		}
	}
	return count
}

func fits(labels, selects map[string]string) bool {
	for key, value := range selects {
		if labels[key] != value {
			return false
		}
	}
	return true
}

// tells is what the annotations of an object tell.
func tells(t *testing.T, s autoscaling.Scalable) caTold {
	t.Helper()
	capacity, is := announcedBy(s)
	NewWithT(t).Expect(is).To(BeTrue())
	told := caTold{capacity: capacity, labels: map[string]string{}}
	for part := range strings.SplitSeq(s.Annotations[annotationLabels], ",") {
		if key, value, is := strings.Cut(part, "="); is {
			told.labels[key] = value
		}
	}
	if taints := s.Annotations[annotationTaints]; taints != "" {
		told.taints = strings.Split(taints, ",")
	}
	return told
}

func TestEachRowThatWasSeenBesideTheRealClusterAutoscaler(t *testing.T) {
	const (
		seconds = time.Second
		mig     = "nvidia.com/mig-1g.5gb"
		whole   = "nvidia.com/gpu"
		beside  = "sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 4}, {profile: 3g.20gb, count: 1}]}]}}"
	)
	counts := func(resource string, n int64) map[string]int64 { return map[string]int64{resource: n} }
	slow := caLife{label: 10 * seconds, done: 100 * seconds, taints: true, offers: counts(shared, 10)}
	pool, accelerator := map[string]string{"pool": "gpu"}, map[string]string{"pool": "gpu", "cluster-api/accelerator": "a100"}
	for name, c := range map[string]struct {
		spec string
		// then is what was announced, and cached what a former node had.
		then   caTold
		cached *caTold
		life   caLife
		pods   caPods
		// seen is how many nodes were started, and needed how many the pods need.
		seen, needed int
		// reports is why more than needed are started all the same.
		reports string
		// warns is what is reported beforehand, also if no node too many is started.
		warns string
		group string
		edit  func(*autoscaling.Snapshot)
	}{
		"time-slicing, renamed, from zero": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 15, resource: shared}, seen: 2, needed: 2,
			life: caLife{done: 40 * seconds, taints: true, offers: counts(shared, 10)},
		},
		"mig-1g.5gb": {
			spec: filled + untilReady, then: caTold{capacity: counts(mig, 7)}, pods: caPods{count: 10, resource: mig}, seen: 4, needed: 2,
			life: caLife{label: 10 * seconds, done: 60 * seconds, taints: true, offers: counts(mig, 7)},
		},
		"mig-1g.5gb, tainted from registration": {
			spec: filled + untilReady, then: caTold{capacity: counts(mig, 7)}, pods: caPods{count: 10, resource: mig}, seen: 2, needed: 2,
			life: caLife{label: 10 * seconds, done: 60 * seconds, registered: true, offers: counts(mig, 7)},
		},
		"name kept, from zero": {
			spec: unrenamed + untilReady, then: caTold{capacity: counts(whole, 8)}, pods: caPods{count: 16, resource: whole}, seen: 2, needed: 2,
			life: caLife{done: 40 * seconds, taints: true, offers: counts(whole, 8)},
		},
		"name kept, from one": {
			spec: unrenamed + untilReady, then: caTold{capacity: counts(whole, 8)}, pods: caPods{count: 24, resource: whole}, seen: 2, needed: 2,
			life: caLife{ready: 1, done: 40 * seconds, taints: true, offers: counts(whole, 8)},
		},
		"renamed, with the accelerator label": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 5, resource: shared}, seen: 1, needed: 1, warns: v1alpha1.ReasonAcceleratorLabel,
			life: caLife{done: 40 * seconds, taints: true, offers: counts(shared, 10), labels: accelerator},
			edit: func(s *autoscaling.Snapshot) {
				s.Scalables[0] = deployment(nil, map[string]any{annotationLabels: "pool=gpu,cluster-api/accelerator=a100"})
			},
		},
		"MPS": {
			spec: mps + untilReady, then: caTold{capacity: counts(shared, 4)}, pods: caPods{count: 8, resource: shared}, seen: 2, needed: 2,
			life: caLife{done: 40 * seconds, taints: true, offers: counts(shared, 4)},
		},
		"two MIG profiles, pods of the one that is not announced": {
			spec: layout + untilReady, then: caTold{capacity: counts(mig, 2)}, pods: caPods{count: 5, resource: "nvidia.com/mig-3g.20gb"}, seen: 0, needed: 0,
			reports: v1alpha1.ReasonMultipleResources, life: caLife{taints: true, offers: map[string]int64{mig: 2, "nvidia.com/mig-3g.20gb": 1}},
		},
		"two MIG profiles, pods of the one that is announced": {
			spec: beside + untilReady, then: caTold{capacity: counts(mig, 4)}, pods: caPods{count: 5, resource: mig}, seen: 3, needed: 2, warns: v1alpha1.ReasonMultipleResources,
			life: caLife{label: 10 * seconds, apart: 8 * seconds, done: 60 * seconds, taints: true, offers: map[string]int64{mig: 4, "nvidia.com/mig-3g.20gb": 1}},
		},
		"two MIG profiles, tainted from registration": {
			spec: beside + untilReady, then: caTold{capacity: counts(mig, 4)}, pods: caPods{count: 5, resource: mig}, seen: 2, needed: 2, warns: v1alpha1.ReasonMultipleResources,
			life: caLife{label: 10 * seconds, apart: 8 * seconds, done: 60 * seconds, registered: true, offers: map[string]int64{mig: 4, "nvidia.com/mig-3g.20gb": 1}},
		},
		"the policy changed while the group is empty": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, cached: &caTold{capacity: counts(shared, 2)}, pods: caPods{count: 8, resource: shared},
			seen: 4, needed: 1, reports: v1alpha1.ReasonStaleTemplate, life: caLife{taints: true, offers: counts(shared, 10)},
			edit: func(s *autoscaling.Snapshot) {
				s.Policies[0].Status.NodeGroups = []v1alpha1.NodeGroupStatus{{
					Kind: v1alpha1.NodeGroupMachineSet, Namespace: "ns", Name: "set", Product: a100, GPUsPerNode: 1, Advertised: []v1alpha1.NodeResource{{Name: shared, Count: 2}},
				}}
			},
		},
		"a slow agent": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 1, resource: shared}, life: slow, seen: 2, needed: 1,
		},
		"a slow agent without startup taint": {
			spec: renamed, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 1, resource: shared}, seen: 6, needed: 1, reports: v1alpha1.ReasonStartupGap,
			life: caLife{label: 10 * seconds, done: 100 * seconds, offers: counts(shared, 10)},
		},
		"the GPU label comes 25 seconds after Ready": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 1, resource: shared}, seen: 3, needed: 1,
			life: caLife{label: 25 * seconds, done: 60 * seconds, taints: true, offers: counts(shared, 10)},
		},
		"the annotation of the machine comes 6 seconds after the label": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 1, resource: shared}, seen: 6, needed: 1,
			life: caLife{annotate: 6 * seconds, done: 70 * seconds, taints: true, keeps: true, offers: counts(shared, 10)},
		},
		"pods select the label of the pool": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 15, resource: shared, selects: pool}, seen: 0, needed: 2,
			life: caLife{done: 40 * seconds, taints: true, offers: counts(shared, 10), labels: pool},
		},
		"taints of the policy, pods without toleration": {
			spec: renamed + untilReady + "\ntaints: [{key: shared, effect: NoSchedule}]", then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 1, resource: shared},
			seen: 4, needed: 0, life: caLife{every: 10 * seconds, done: 10 * seconds, taints: true, offers: counts(shared, 10), policyTaints: []string{"shared"}},
		},
		"status.capacity names whole GPUs that the policy renames": {
			spec: renamed + untilReady, then: caTold{capacity: map[string]int64{shared: 10, whole: 1}}, pods: caPods{count: 1, resource: whole}, seen: 3, needed: 0,
			life: caLife{every: 10 * seconds, done: 20 * seconds, taints: true, offers: counts(shared, 10)}, reports: v1alpha1.ReasonMultipleResources,
			edit: func(s *autoscaling.Snapshot) { s.Scalables[0].Capacity = counts(whole, 1) },
		},
		"a label of the template that nodes do not get": {
			spec: renamed + untilReady, then: caTold{capacity: counts(shared, 10)}, pods: caPods{count: 1, resource: shared}, seen: 6, needed: 0,
			life: caLife{never: true}, edit: func(s *autoscaling.Snapshot) { s.Scalables[0] = deployment(map[string]any{"pool": "gpu"}, nil) },
			reports: v1alpha1.ReasonNodeGroupNotSelected,
		},
		"Exclusive, from zero": {
			spec: exclusive, then: caTold{}, pods: caPods{count: 1, resource: whole}, seen: 0, needed: 1, life: caLife{offers: counts(whole, 1)},
		},
		"OpenShift, the default count": {
			spec: "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}" + untilReady, group: autoscaling.GroupOpenShift, then: caTold{capacity: counts(whole, 1)},
			pods: caPods{count: 4, resource: whole}, seen: 4, needed: 2, life: caLife{done: 40 * seconds, taints: true, offers: counts(whole, 2)},
		},
		"OpenShift, a count of the user's": {
			spec: "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 3}}" + untilReady, group: autoscaling.GroupOpenShift, then: caTold{capacity: counts(whole, 1)},
			pods: caPods{count: 6, resource: whole}, seen: 6, needed: 2, life: caLife{done: 40 * seconds, taints: true, offers: counts(whole, 3)},
			reports: v1alpha1.ReasonOwnedByOther,
			edit: func(s *autoscaling.Snapshot) {
				s.Scalables[0] = machineSet(autoscaling.GroupOpenShift, map[string]string{autoscaling.AnnotationGPUCount: "1"})
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			g.Expect(started(c.then, c.cached, c.life, c.pods)).To(Equal(c.seen), "with what was written then")
			if c.group == "" {
				c.group = autoscaling.GroupClusterAPI
			}
			s := scalable(t, c.group, c.spec, nil)
			tolerated(&s)
			if c.edit != nil {
				c.edit(&s)
			}
			beforehand := only(t, s)
			g.Expect(c.warns == "" || reports(beforehand, c.warns)).To(BeTrue(), beforehand.Message)
			for _, write := range s.Advise().Writes {
				apply(t, &s.Scalables[0], write.Annotate)
			}
			told := tells(t, s.Scalables[0])
			for resource, count := range s.Scalables[0].Capacity { // of which the annotation hides no other
				if _, announced := told.capacity[resource]; !announced {
					told.capacity[resource] = count
				}
			}
			joined(&s, 0)
			c.life.keeps, c.life.early = false, startups(s)["new"]
			if nodes := started(told, c.cached, c.life, c.pods); nodes != c.needed {
				g.Expect(nodes).To(BeNumerically(">", c.needed), "pods wait for ever")
				g.Expect(c.reports).NotTo(BeEmpty(), "%d nodes instead of %d", nodes, c.needed)
				g.Expect(beforehand.Reason == c.reports || strings.Contains(beforehand.Message, c.reports)).To(BeTrue(), beforehand.Message)
			}
		})
	}
}

// A full node is not scaled down where nvidia.com/gpu keeps its name; elsewhere the operator reports that it may be.
func TestFullNodesStayWhereTheirGPUsCount(t *testing.T) {
	g := NewWithT(t)
	full := func(resource string, n int64) caNode {
		return caNode{allocatable: map[string]int64{resource: n}, requested: map[string]int64{resource: n}, cpu: 0.1}
	}
	g.Expect(full("nvidia.com/gpu", 8).utilization()).To(BeEquivalentTo(1))
	g.Expect(full(shared, 10).utilization()).To(BeNumerically("<", 0.5))
	w := scalable(t, autoscaling.GroupClusterAPI, renamed, nil)
	n := ofClusterAPI(map[string]string{"pool": "gpu"})
	n.Allocatable = map[string]int64{shared: 10}
	w.Nodes = []cluster.Node{n}
	g.Expect(reports(only(t, w), v1alpha1.ReasonScaleDownCandidate)).To(BeTrue())
}
