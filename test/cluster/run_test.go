// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/history"
	hostfake "github.com/gpusharing/gpu-sharing-operator/test/host/fake"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// run is a history as it takes place: a fleet whose time passes as fast as something happens.
type run struct {
	*fleet

	random     *rand.Rand
	operator   *nodesim.GPUOperator
	reconciles atomic.Int64 // of the controller
	written    atomic.Int64 // writes of everything but the test itself
	fighting   atomic.Bool
	acted      int64 // how many writes there were when the nodes last acted
	actedAt    time.Duration
	told       []string
	serial     int
	drives     bool // NVIDIA's DRA driver serves some nodes
	scheduler  *nodesim.DRAScheduler
	fights     []func() bool   // other controllers that set something again and again
	theirs     map[string]bool // node and label or annotation that another controller has written
	backup     []client.Object
	rested     cluster.Snapshot // when everything last rested
	waiting    waiting

	facts    sync.RWMutex // guards what follows, the machines, and born and slots of the places
	places   map[string]*place
	policies map[string][]v1alpha1.GPUSharingPolicy // all that a policy ever was, by name
	kinds    map[string]string                      // of the pods of users, by name
	homes    map[string]string                      // their nodes

	mu     sync.Mutex     // guards what follows
	count  map[string]int // what the controller did, and the others
	others map[string]int
	broken string
	gone   map[string]string // pods of users that the controller has evicted since the last round, with their nodes
	ends   map[string]bool   // and all of them
}

// place is a machine with what happens to it.
type place struct {
	*machine

	off, lost  bool
	halt, stop func() // ends the kubelet, and the agent
	born       map[string]born
	slots      map[string]int // by UUID: where in the machine the GPU is
}

// born is how a GPU was when it came into the machine.
type born struct {
	mig         bool
	instances   string
	timeSlice   gpu.TimeSlice
	persistence gpu.Persistence
}

func bornAs(d gpu.Device) born {
	var profiles []string
	for _, i := range d.State.Instances {
		profiles = append(profiles, i.Profile)
	}
	slices.Sort(profiles)
	return born{mig: d.State.MIG, instances: strings.Join(profiles, ","), timeSlice: d.State.TimeSlice, persistence: d.Persistence}
}

// newRun makes the cluster of a seed on the API server of a site, which it leaves empty.
func newRun(t *testing.T, site *fleet, seed uint64) *run {
	t.Helper()
	s := bareRun(t, site, seed)
	random := rand.New(rand.NewPCG(seed, 2))
	if seed >= history.Late {
		s.demands = s.reviews
	}
	s.apply(clusterPolicy)
	s.record = newRecord(s.fleet)
	for i := range []int{1, 1, 2, 2, 3}[random.IntN(5)] {
		s.join(fmt.Sprintf("n%d", i), random)
	}
	s.leader = s.lead()
	s.until("every node is discovered", func() bool { s.round(); return s.discovered() })
	s.before = s.world()
	history.Replace(s, history.Policies(random))
	return s
}

// bareRun makes a cluster without GPUs on the API server of a site, which it leaves empty.
func bareRun(t *testing.T, site *fleet, seed uint64) *run {
	t.Helper()
	f := *site
	f.t, f.WithT, f.clock, f.dir = t, NewWithT(t), &skewed{}, t.TempDir()
	s := &run{
		fleet: &f, random: rand.New(rand.NewPCG(seed, 0)), places: map[string]*place{}, policies: map[string][]v1alpha1.GPUSharingPolicy{},
		kinds: map[string]string{}, homes: map[string]string{}, theirs: map[string]bool{}, count: map[string]int{}, others: map[string]int{}, gone: map[string]string{}, ends: map[string]bool{},
	}
	s.waiting = waiting{
		random: rand.New(rand.NewPCG(seed, 5)), asks: make(chan struct{}, 1), pods: map[string]*waits{}, calm: map[string]calm{},
	}
	t.Cleanup(s.empty)
	watched := func(c *rest.Config, note func(*http.Request, int, string)) *rest.Config {
		c = rest.CopyConfig(c)
		c.Wrap(func(next http.RoundTripper) http.RoundTripper { return noting{next, note} })
		return c
	}
	f.controller = watched(site.controller, s.note)
	f.agents = watched(site.cluster.Config, s.wrote)
	var err error
	f.sim, err = client.New(watched(site.cluster.Config, s.wrote), client.Options{Scheme: f.cluster.Scheme})
	f.Expect(err).NotTo(HaveOccurred())
	f.paces, f.stamps = &paced{skewed: f.clock, looks: &s.reconciles}, &stamped{skewed: f.clock, fights: &s.fighting}
	s.operator = f.operator()
	f.Expect(f.client.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: clockNode}})).To(Succeed())
	return s
}

// clockNode is a node without GPUs. Its label wakes the controller.
const clockNode = "clock"

// paced is the clock of the controller, which looks at it once when a reconcile begins.
type paced struct {
	*skewed

	looks *atomic.Int64
}

func (p *paced) Now() time.Time {
	p.looks.Add(1)
	return p.skewed.Now()
}

// stamped is the clock of what compares the time with the managed fields of an object. The API server writes them by
// its own clock, which is not ahead. So this clock is not ahead either while another controller writes again and again,
// or each of its writes would be hours old at once.
type stamped struct {
	*skewed

	fights *atomic.Bool
}

func (s *stamped) Now() time.Time {
	if s.fights.Load() {
		return s.RealClock.Now()
	}
	return s.skewed.Now()
}

// noting tells of each request that the API server has answered.
type noting struct {
	http.RoundTripper

	note func(r *http.Request, status int, answer string)
}

func (n noting) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := n.RoundTripper.RoundTrip(r)
	if err != nil || r.Method == http.MethodGet {
		return answer, err
	}
	text := ""
	if answer.StatusCode >= http.StatusMultipleChoices {
		body, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		answer.Body, text = io.NopCloser(bytes.NewReader(body)), string(body)
	}
	n.note(r, answer.StatusCode, text)
	return answer, nil
}

// wrote counts what everybody else does.
func (s *run) wrote(r *http.Request, status int, _ string) {
	if status >= http.StatusMultipleChoices {
		return
	}
	s.written.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.others[r.Method+" "+strings.Join(strings.Split(strings.TrimPrefix(r.URL.Path, "/"), "/")[2:], "/")]++
}

// note counts what the controller does.
func (s *run) note(r *http.Request, status int, answer string) {
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if slices.Contains(parts, "events") || slices.Contains(parts, "leases") {
		return
	}
	name := path.Base(r.URL.Path)
	if name == "eviction" {
		s.evicts(parts[len(parts)-2], status)
		return
	}
	switch {
	case status == http.StatusForbidden || status == http.StatusUnprocessableEntity && !strings.Contains(answer, "metadata.uid"): // our guard
		s.Breaks("harmless", "the API server denies the controller %s %s: %s", r.Method, r.URL.Path, answer)
		return
	case status >= http.StatusMultipleChoices:
		return
	}
	s.written.Add(1)
	what := r.Method + " " + strings.Join(parts[2:], "/")
	if r.Method == http.MethodDelete && slices.Contains(parts, "pods") {
		what = "restart " + name[:max(0, strings.LastIndex(name, "-"))]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count[what]++
}

// join adds a node, which boots.
func (s *run) join(name string, random *rand.Rand) {
	s.t.Helper()
	one := func(in int) bool { return random.IntN(in) == 0 }
	models := history.Models(random)
	labels := map[string]string{history.PoolLabel: []string{"a", "b"}[random.IntN(2)]}
	if one(3) {
		labels["team.example/label"] = "research"
	}
	if one(2) {
		labels[v1alpha1.LabelMIGManager] = "true"
	}
	p := s.place(name, labels, models...)
	if len(models) == 1 && name == "n0" && s.serial%6 == 0 {
		p.hardware.Update(func(n *sim.Node) { n.GPUs[0].NoReset = true })
	}
	if len(models) == 1 && models[0] != sim.T4 && one(4) {
		s.Expect(p.hardware.SetMIG(s.t.Context(), p.devices()[0].UUID, true)).To(Or(Succeed(), MatchError(gpu.ErrResetRequired)))
		p.hardware.Update(func(n *sim.Node) { n.GPUs[0].MIG, n.GPUs[0].PendingMIG = true, true })
		history.Partition(p, p.devices()[0])
	}
	p.touches = func(op sim.Op, uuid string, instance int) error { return s.touches(p, op, uuid, instance) }
	p.restartDelay = 0 // nobody waits for it: time passes as fast as something happens
	s.enter(p)
	s.Tell("node %s: %v, %v, %v", name, models, bornAs(p.devices()[0]), labels)
}

// place is a machine that has not booted yet.
func (s *run) place(name string, labels map[string]string, models ...sim.Model) *place {
	s.t.Helper()
	s.serial++
	p := &place{machine: newMachine(s.fleet, name, labels, models...), born: map[string]born{}, slots: map[string]int{}}
	p.hardware.Update(func(n *sim.Node) {
		n.Name = fmt.Sprintf("%s-%d", name, s.serial) // its instances have other UUIDs than those of a former one
		for i := range n.GPUs {
			n.GPUs[i].UUID = fmt.Sprintf("%s-%d", n.GPUs[i].UUID[:len(n.GPUs[i].UUID)-2], 10+s.serial) // another machine of that name
		}
	})
	return p
}

// enter lets a machine boot.
func (s *run) enter(p *place) {
	s.facts.Lock()
	p.remember()
	s.places[p.name] = p
	s.machines = append(s.machines, p.machine)
	s.facts.Unlock()
	s.boots(p)
}

// partitionsAgain makes the instance of a person again after a boot, as a person's service does, where the operator has not recorded how it
// found the node. Without it NVIDIA's device plugin ends again and again, with or without a policy.
func (s *run) partitionsAgain(p *place) {
	node, of := &corev1.Node{}, &v1alpha1.GPUNode{}
	key := client.ObjectKey{Name: p.name}
	s.Expect(errors.Join(client.IgnoreNotFound(s.client.Get(s.t.Context(), key, node)), client.IgnoreNotFound(s.client.Get(s.t.Context(), key, of)))).To(Succeed())
	found := node.Annotations[v1alpha1.AnnotationBaseline]
	if of.Spec.Baseline != nil || found != "" && !strings.Contains(found, `"untouched"`) { // else its record is still to follow what is there (15022)
		return
	}
	for _, d := range p.devices() {
		if p.born[d.UUID].instances != "" && d.State.MIG && len(d.State.Instances) == 0 {
			history.Partition(p, d)
		}
	}
	s.rebornUnmanaged(p) // a Hopper loses its MIG mode (13121)
}

func (p *place) devices() []gpu.Device {
	var devices []gpu.Device
	p.hardware.Update(func(n *sim.Node) {
		devices = n.Observe().Devices
		for i := range devices {
			var err error
			if devices[i].State.TimeSlice, err = n.TimeSlice(devices[i].UUID); err != nil {
				devices[i].State.TimeSlice = gpu.TimeSliceNone
			}
		}
	})
	return devices
}

// remember notes where each GPU is, and how it was when it came.
func (p *place) remember() {
	for _, d := range p.devices() {
		if _, known := p.slots[d.UUID]; !known {
			p.slots[d.UUID], p.born[d.UUID] = d.Index, bornAs(d)
		}
	}
}

// Machines are the places by name.
func (s *run) Machines() []*place {
	s.facts.RLock()
	defer s.facts.RUnlock()
	var all []*place
	for _, m := range s.machines {
		all = append(all, s.places[m.name])
	}
	return all
}

func (s *run) Tell(format string, args ...any) {
	s.told = append(s.told, fmt.Sprintf("%s %s", s.clock.Now().UTC().Format("15:04:05"), fmt.Sprintf(format, args...)))
}

// Breaks notes that an invariant does not hold. The first one counts.
func (s *run) Breaks(invariant, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken == "" {
		s.broken = invariant + ": " + fmt.Sprintf(format, args...)
	}
}

func (s *run) Broken() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// until plays rounds until something is so. What never comes breaks progress.
func (s *run) until(what string, is func() bool) {
	for range 200 {
		if is() {
			return
		}
		s.clock.skip(time.Second)
	}
	s.Breaks("progress", "%s does not come", what)
}

// answerWithin is how long a controller may take for a reconcile, on a busy machine.
const answerWithin = 20 * time.Second

// round lets everybody act once: the machines, NVIDIA's operator, the agents, and then the controller. It reports
// whether anybody has written anything.
func (s *run) round() (active bool) {
	before := s.written.Load()
	s.noteCalm()
	late := slices.Clone(s.waiting.late)
	for _, name := range late {
		if history.Maybe(s.waiting.random) {
			s.bind(name)
		}
	}
	looks, reconciles := map[string]int64{}, s.reconciles.Load()
	for _, p := range s.Machines() {
		looks[p.name] = p.looks.Load()
	}
	if now := s.clock.skipped(); before != s.acted || now != s.actedAt {
		s.acted, s.actedAt = before, now
		s.nodesAct()
	}
	s.wake()
	deadline := time.Now().Add(answerWithin)
	for _, answered := range []func() bool{
		s.review(),
		func() bool { return s.reconciles.Load() > reconciles },
		func() bool {
			return !slices.ContainsFunc(s.Machines(), func(p *place) bool { // an agent without a GPUNode has never looked
				return !p.off && !p.down.Load() && p.looks.Load() == looks[p.name] && looks[p.name] > 0
			})
		},
	} {
		s.poll(deadline, answered)
	}
	for _, name := range late {
		s.bind(name)
	}
	return s.written.Load() != before
}

// nodesAct lets everything on the nodes, and NVIDIA's operator, do what is due.
func (s *run) nodesAct() {
	for _, p := range s.Machines() {
		if !p.off && p.reboots.Requested() > 0 {
			s.rebooted(p)
		}
		if !p.off {
			p.serveMPS(s.t.Context())
			_ = p.node.Reconcile(s.t.Context()) // a conflict is tried again in the next round
		}
	}
	_ = s.operator.Reconcile(s.t.Context())
	s.comeBack()
	s.schedule()
}

// poll looks every few milliseconds whether something is so.
func (s *run) poll(deadline time.Time, is func() bool) {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for !is() && time.Now().Before(deadline) && s.t.Context().Err() == nil {
		<-ticker.C
	}
}

func (s *run) wake() {
	s.t.Helper()
	s.label(clockNode, "test.example/clock", fmt.Sprint(s.clock.Now().UnixNano()))
}

// rounds lets so many rounds follow one another.
func (s *run) rounds(n int, random *rand.Rand) {
	for range n {
		if s.Broken() != "" {
			return
		}
		s.round()
		d := time.Duration(1+random.IntN(3)) * time.Second
		if len(s.waiting.late) > 0 {
			d = min(d, 2*time.Second) // a scheduler takes no longer to bind
		}
		s.clock.skip(d)
	}
}

// rest lets time pass until nothing goes on, or for a time. It reports whether it came to rest.
func (s *run) rest(horizon time.Duration, most int) bool {
	steps := []time.Duration{5 * time.Second, 55 * time.Second, 2 * time.Minute, 6 * time.Minute, 30 * time.Minute, 3 * time.Hour} // in the middle of a verification too (16058)
	end := s.clock.Now().Add(horizon)
	for idle, next := 0, 0; most > 0; most-- {
		fought := s.fought()
		if s.Broken() != "" || s.clock.Now().After(end) {
			return true
		}
		switch active := s.round(); {
		case active || fought:
			idle, next = 0, 0
			s.clock.skip(time.Second)
		case idle == 0: // the writes of the last reconcile may have come after its round
			idle++
		case next == len(steps):
			return true
		default:
			s.clock.skip(steps[next])
			idle = 0
			next++
		}
	}
	return false
}

// fought lets the other controllers look again.
func (s *run) fought() (changed bool) {
	for _, again := range s.fights {
		changed = again() || changed
	}
	return changed
}

// boots starts a machine with its agent.
func (s *run) boots(p *place) {
	p.off = false
	p.reboots = &hostfake.Rebooter{Boot: func() {}}
	p.halt = p.boot(s.fleet)
	s.startAgent(p)
}

func (s *run) startAgent(p *place) {
	p.down.Store(false)
	mgr := s.manager(s.agents, func(*manager.Options) {})
	p.agent(s.fleet, mgr, 150*time.Millisecond)
	p.stop = s.background(func(ctx context.Context) { _ = mgr.Start(ctx) })
}

// halts switches a machine off.
func (s *run) halts(p *place) {
	p.stop()
	p.halt()
	p.off = true
}

// empty removes everything from the API server, for the next history.
func (s *run) empty() {
	ctx, f := context.Background(), s.fleet
	nodeFeatures := &unstructured.UnstructuredList{}
	nodeFeatures.SetGroupVersionKind(schema.GroupVersionKind{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Kind: "NodeFeatureList"})
	clusterPolicies := &unstructured.UnstructuredList{}
	clusterPolicies.SetGroupVersionKind(schema.GroupVersionKind{Group: "nvidia.com", Version: "v1", Kind: "ClusterPolicyList"})
	for _, list := range []client.ObjectList{
		&v1alpha1.GPUSharingPolicyList{}, &v1alpha1.GPUNodeList{}, &appsv1.DaemonSetList{}, &resourcev1.ResourceSliceList{}, &resourcev1.ResourceClaimList{},
		&resourcev1.DeviceClassList{}, &resourcev1.DeviceTaintRuleList{}, &policyv1.PodDisruptionBudgetList{}, nodeFeatures,
		clusterPolicies, &corev1.PodList{}, &corev1.ConfigMapList{}, &corev1.NodeList{},
	} {
		if err := f.client.List(ctx, list); err != nil {
			f.t.Errorf("emptying the cluster: %v", err)
			continue
		}
		for _, o := range objects(list) {
			if strings.HasPrefix(o.GetNamespace(), "kube-") || o.GetName() == "kube-root-ca.crt" {
				continue
			}
			if len(o.GetFinalizers()) > 0 {
				_ = f.client.Patch(ctx, o, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`)))
			}
			if err := client.IgnoreNotFound(f.client.Delete(ctx, o, client.GracePeriodSeconds(0))); err != nil {
				f.t.Errorf("emptying the cluster: %v", err)
			}
		}
	}
}
