// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

type options struct {
	programs string
	driver   string
	keep     bool
}

// demo is one run.
type demo struct {
	options
	site
	user

	dir    string
	before snapshot // of everything that is not ours, before the operator came
	ready  bool     // every policy was Ready
	cost   cost
}

// gpuOperator is the namespace of NVIDIA's operator, ours that of this one.
const (
	gpuOperator = "gpu-operator"
	ours        = "gpu-sharing-operator"
)

// shownPolicy is the policy of which the demo shows the spec.
const shownPolicy = "config/samples/time-slicing-t4.yaml"

// samples are the policies that are applied, in this order.
func samples() []string {
	return []string{
		"config/samples/mig-a100.yaml", "config/samples/mps-h100.yaml", shownPolicy, "test/demo/mig-a30.yaml",
	}
}

func fleet() []simdriver.Spec {
	return []simdriver.Spec{
		simdriver.Times(changedNode, sim.A100, 2), simdriver.Times(otherNode, sim.A100, 2),
		simdriver.Times("gpu-h100", sim.H100, 2), simdriver.Times("gpu-t4", sim.T4, 2), simdriver.Times(draNode, sim.A30, 2),
	}
}

// play plays the demo from the first process to the last.
func (d *demo) play(ctx context.Context) error {
	background, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer func() {
		stop()
		running.Wait()
		if d.cluster != nil {
			_ = d.cluster.Stop()
		}
	}()
	limited, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	for _, act := range d.acts() {
		if err := act(limited, background, &running); err != nil {
			return d.explain(err)
		}
	}
	if d.keep {
		<-ctx.Done()
	}
	return nil
}

// act is a part of the demo. What it starts for the rest of the demo runs in the second context and is waited for.
type act = func(limited, background context.Context, running *sync.WaitGroup) error

func (d *demo) acts() []act {
	begin := []act{d.startCluster, d.startNodes, d.startController, d.applyPolicies, d.showStatus, d.askForShares}
	if d.keep {
		return append(begin, d.showInvitation)
	}
	return append(begin, d.endOnDRA, d.changeLayout, d.failLayout, d.undo, d.showNext)
}

// explain adds to an error what the deadline means and where to look.
func (d *demo) explain(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("within %s: %w", deadline, err)
	}
	if kept, failed := d.keepLogs(); failed == nil {
		d.narration.show("What the programs logged is kept in " + kept)
	}
	return err
}

// keepLogs copies the logs to where they outlive the demo.
func (d *demo) keepLogs() (string, error) {
	kept := filepath.Join(d.programs, "demo-logs")
	if err := os.RemoveAll(kept); err != nil {
		return "", err
	}
	if err := os.MkdirAll(kept, 0o755); err != nil {
		return "", err
	}
	for _, log := range d.logs() {
		data, err := os.ReadFile(log)
		if err != nil {
			return "", err
		}
		name := strings.ReplaceAll(strings.TrimPrefix(log, d.dir+"/"), "/", "-")
		if err := os.WriteFile(filepath.Join(kept, name), data, 0o644); err != nil {
			return "", err
		}
	}
	return kept, nil
}

func (d *demo) logs() []string {
	logs, _ := filepath.Glob(filepath.Join(d.dir, "*.log"))
	more, _ := filepath.Glob(filepath.Join(d.dir, "*", "*.log"))
	return append(logs, more...)
}

func (d *demo) startCluster(ctx, background context.Context, running *sync.WaitGroup) error {
	d.narration.show("etcd, kube-apiserver, controller, agents and their rights are real; GPUs, drivers, kubelets and NVIDIA's programs are simulated.")
	d.narration.chapter("A cluster with NVIDIA's GPU Operator and its DRA driver")
	cluster, err := env.New(ctx, env.WithNVIDIA(), env.WithDir(d.dir))
	if err != nil {
		return err
	}
	d.cluster = cluster
	if err := d.writeKubeconfig(ctx); err != nil {
		return err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: gpuOperator}}
	if err := cluster.Client.Create(ctx, namespace); err != nil {
		return fmt.Errorf("creating namespace %s: %w", gpuOperator, err)
	}
	if err := cluster.Apply(ctx, "test/demo/cluster-policy.yaml"); err != nil {
		return err
	}
	if err := d.installDRADriver(ctx); err != nil {
		return err
	}
	operator := &nodesim.GPUOperator{
		Client: cluster.Client, Namespace: gpuOperator, Clock: clock.RealClock{},
		Tell: func(format string, args ...any) { d.narration.note("NVIDIA", format, args...) },
	}
	running.Go(func() { operator.Run(background, 200*time.Millisecond) })
	running.Go(func() {
		for background.Err() == nil {
			if err := nodesim.ReportDaemonSets(background, cluster.Client); err != nil && background.Err() == nil {
				d.narration.note("cluster", "%v", err)
			}
			select {
			case <-background.Done():
			case <-time.After(time.Second):
			}
		}
	})
	return nil
}

func (d *demo) writeKubeconfig(ctx context.Context) error {
	d.kubeconfig = filepath.Join(d.dir, "kubeconfig")
	if err := env.WriteKubeconfig(d.cluster.Config, d.kubeconfig); err != nil {
		return err
	}
	assets, err := env.Assets(ctx)
	d.kubectl = filepath.Join(assets, "kubectl")
	return err
}

func (d *demo) startNodes(ctx, background context.Context, running *sync.WaitGroup) error {
	agent, err := filepath.Abs(filepath.Join(d.programs, "agent"))
	if err != nil {
		return err
	}
	for _, spec := range fleet() {
		m, err := newMachine(d, spec, agent)
		if err != nil {
			return err
		}
		d.machines = append(d.machines, m)
		running.Go(func() {
			if err := m.run(background); err != nil {
				d.narration.note(m.name, "%v", err)
			}
		})
	}
	offered := map[string][]string{}
	for _, m := range d.machines {
		var now string
		if err := until(ctx, func() (bool, error) {
			now, err = d.advertises(ctx, m.name)
			if now == nothing || err != nil {
				return false, err
			}
			return d.discovered(ctx, m.name)
		}); err != nil {
			return err
		}
		offered[now] = append(offered[now], m.name)
	}
	if d.before, err = d.settled(ctx); err != nil {
		return err
	}
	for _, now := range slices.Sorted(maps.Keys(offered)) {
		d.narration.say("%s offer %s each: %s.", nodes(len(offered[now])), now, strings.ReplaceAll(strings.Join(offered[now], ", "), draNode, draNode+" (by NVIDIA's DRA driver)"))
	}
	return nil
}

// discovered reports whether Node Feature Discovery has labelled a node with what GPU Feature Discovery found. That
// comes after its GPUs are advertised, and later still on a machine that is busy.
func (d *demo) discovered(ctx context.Context, name string) (bool, error) {
	node := &corev1.Node{}
	if err := d.cluster.Client.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return false, fmt.Errorf("reading Node %s: %w", name, err)
	}
	_, labelled := node.Labels["nvidia.com/gpu.product"]
	return labelled, nil
}

// settled is the snapshot once two in a row are alike.
func (s *site) settled(ctx context.Context) (last snapshot, err error) {
	err = until(ctx, func() (bool, error) {
		now, err := s.snapshot(ctx)
		same := last != nil && len(last.differences(now)) == 0
		last = now
		return same, err
	})
	return last, err
}

func (d *demo) startController(ctx, background context.Context, running *sync.WaitGroup) error {
	d.narration.chapter("The GPU Sharing Operator is installed")
	if err := d.cluster.Apply(ctx, "config/default/namespace.yaml", "config/rbac/role.yaml", "config/manager/rbac.yaml",
		"config/manager/admission.yaml",
		"config/agent/rbac.yaml", "config/agent/admission.yaml", "config/agent/daemonset/agent.yaml", "config/agent/mps.yaml"); err != nil {
		return err
	}
	d.cost.since = map[string]time.Time{}
	running.Go(func() { d.cost.follow(background, &d.site) })
	p, err := d.runController(ctx)
	if err != nil {
		return err
	}
	running.Go(func() { d.keepRunning(background, p) })
	err = until(ctx, func() (bool, error) {
		nodes := &v1alpha1.GPUNodeList{}
		if err := d.cluster.Client.List(ctx, nodes); err != nil {
			return false, err
		}
		reported := 0
		for _, n := range nodes.Items {
			if meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionDiscovered) {
				reported++
			}
		}
		if !p.Alive() {
			return false, errors.New("the controller ended; see its log")
		}
		return reported == len(d.machines), nil
	})
	if err != nil {
		return err
	}
	now, err := d.snapshot(ctx)
	d.narration.say("Its agents report the GPUs of %s. Of %d fields of nodes, GPUs and NVIDIA's objects it has changed %d.", nodes(len(d.machines)),
		len(d.before), len(d.before.differences(now)))
	return err
}

// keepRunning starts the controller again as its Deployment does: it ends when it loses its lease, as on a laptop that slept.
func (d *demo) keepRunning(background context.Context, p *nodesim.Process) {
	for {
		select {
		case <-background.Done():
			p.Stop()
			return
		case <-p.Done():
			<-time.After(time.Second)
		}
		next, err := d.runController(background)
		if err != nil {
			d.narration.note("controller", "%v", err)
			return
		}
		d.narration.show("The controller has ended, and is started again as its Deployment would: its log says why.")
		p = next
	}
}

// runController runs the controller as its manifest does, with its own service account.
func (d *demo) runController(ctx context.Context) (*nodesim.Process, error) {
	config, err := d.cluster.ConfigAs(ctx, env.Identity{Namespace: ours, ServiceAccount: "gpu-sharing-controller"})
	if err != nil {
		return nil, err
	}
	kubeconfig := filepath.Join(d.dir, "controller.kubeconfig")
	if err := env.WriteKubeconfig(config, kubeconfig); err != nil {
		return nil, err
	}
	return start(filepath.Join(d.dir, "controller.log"), filepath.Join(d.programs, "controller"),
		[]string{"--leader-elect", "--health-probe-bind-address=0"},
		[]string{"KUBECONFIG=" + kubeconfig, "POD_NAMESPACE=" + ours})
}

func (d *demo) applyPolicies(ctx, _ context.Context, _ *sync.WaitGroup) error {
	d.narration.chapter("You ask: MIG on A100 and A30, MPS on H100, time-slicing on T4")
	policy, err := os.ReadFile(shownPolicy)
	if err != nil {
		return err
	}
	_, spec, _ := strings.Cut(string(policy), "\nspec:")
	d.narration.show("The spec of " + shownPolicy + ", the others are alike:" + spec)
	began := time.Now()
	args := []string{"apply"}
	for _, sample := range samples() {
		args = append(args, "-f", sample)
	}
	if err := d.runKubectl(ctx, args...); err != nil {
		return err
	}
	if err := until(ctx, func() (bool, error) { return d.allReady(ctx) }); err != nil {
		return err
	}
	denied, err := env.Denied(ctx, d.cluster.Config, env.ControllerWrites)
	if err != nil {
		return err
	}
	if denied > 0 {
		return fmt.Errorf("the admission policy of the controller denied %d writes; controller.log names the fields", denied)
	}
	return d.sayCost(ctx, began, fmt.Sprintf("all %d policies are Ready, each one node at a time", len(samples())))
}

func (d *demo) allReady(ctx context.Context) (bool, error) {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := d.cluster.Client.List(ctx, policies); err != nil {
		return false, fmt.Errorf("reading the policies: %w", err)
	}
	ready := 0
	for _, p := range policies.Items {
		c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionReady)
		if c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == p.Generation {
			ready++
		}
	}
	d.ready = ready == len(samples())
	return d.ready, nil
}

// until asks again and again until it is so.
func until(ctx context.Context, so func() (bool, error)) error {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		if yes, err := so(); yes || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}
