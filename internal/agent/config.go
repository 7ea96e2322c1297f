// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// NVIDIA's config-manager and what of its environment matters (NVIDIA/k8s-device-plugin, cmd/config-manager/main.go).
const (
	configManager = "config-manager"
	oneShot       = "ONESHOT"
)

const (
	// hiddenPoll is how often one looks for a configuration that is on its way: the kubelet takes 0.1 to 0.9 s.
	hiddenPoll = 50 * time.Millisecond
	// forOthers is how long a report waits for further pods once one sees the configuration: the kubelet projects it
	// into all of them within a second. It costs a write less.
	forOthers = time.Second
	// lateAfter is when a configuration is late, and one looks every latePoll; each look goes through all processes.
	lateAfter, latePoll = 10 * time.Second, time.Second
	// settled is when nobody waits any more, and nothing is looked for but what is still hidden, every settledPoll.
	// Until then pods of NVIDIA's programs come and go, since they are configured, stopped and started again.
	settled, settledPoll = 2 * time.Minute, 30 * time.Second
	comingPoll           = 5 * time.Second
	// maxConfigPods is the bound of the API's list.
	maxConfigPods = 16
)

// ConfigReporter reports which of NVIDIA's programs on the node have the desired configuration before them. A node's
// label that names a configuration before that makes NVIDIA's config-manager exit.
type ConfigReporter struct {
	node      string
	client    client.Client
	writer    *StatusWriter
	processes host.Processes
	programs  host.Programs
	volumes   host.ConfigVolumes
	clock     clock.PassiveClock
	looking   looking
}

// looking is for which desired configuration one looks, since when, and when a program was first found to see it, by the
// clock of this node: that by which the controller has stamped it may be another.
type looking struct {
	key            string
	stamp          time.Time
	began, firstAt time.Time
}

// NewConfigReporter makes a reporter for a node.
func NewConfigReporter(
	node string, c client.Client, writer *StatusWriter, processes host.Processes, programs host.Programs, volumes host.ConfigVolumes, now clock.PassiveClock,
) *ConfigReporter {
	return &ConfigReporter{
		node: node, client: c, writer: writer, processes: processes, programs: programs,
		volumes: volumes, clock: now,
	}
}

// Name is the name in logs and metrics.
func (*ConfigReporter) Name() string { return "agent-config" }

// Register adds the reporter to a manager. A new spec wakes it.
func (r *ConfigReporter) Register(mgr ctrl.Manager) error {
	err := onNode(mgr, r.Name(), r.node, controller.Options{ReconciliationTimeout: reportTimeout}).
		Complete(reconcile.AsReconciler(r.client, r))
	if err != nil {
		return fmt.Errorf("registering the agent's reporter of configurations: %w", err)
	}
	return nil
}

// Reconcile looks for the desired configuration and reports which pods see it, at the latest a second after the first
// of them does: a process of any pod can look like one of NVIDIA's, and must not keep the others from being reported.
// The controller knows NVIDIA's pods by namespace and UID, and ignores others.
func (r *ConfigReporter) Reconcile(ctx context.Context, node *v1alpha1.GPUNode) (reconcile.Result, error) {
	key := node.Spec.ConfigName
	if !node.DeletionTimestamp.IsZero() || key == "" {
		return reconcile.Result{}, nil
	}
	seeing, hidden, err := r.look(key)
	if err != nil {
		return reconcile.Result{}, err
	}
	now := r.clock.Now()
	if stamp := node.Spec.ChangeTime.Time; r.looking.key != key || !r.looking.stamp.Equal(stamp) {
		r.looking = looking{key: key, stamp: stamp, began: now}
	}
	if len(seeing) > 0 && r.looking.firstAt.IsZero() {
		r.looking.firstAt = now
	}
	if !hidden || len(seeing) > 0 && now.Sub(r.looking.firstAt) >= forOthers {
		err = r.report(ctx, node, seeing)
	}
	return reconcile.Result{RequeueAfter: nextLook(hidden, now.Sub(r.looking.began))}, err
}

// nextLook is when to look again, by how long one has looked; 0: no need.
func nextLook(hidden bool, age time.Duration) time.Duration {
	switch {
	case hidden && age < lateAfter:
		return hiddenPoll
	case hidden && age < settled:
		return latePoll
	case hidden:
		return settledPoll
	case age < settled:
		return comingPoll
	}
	return 0
}

// look finds the pods with a config-manager that sees a key, and reports whether there is one that does not.
func (r *ConfigReporter) look(key string) (seeing []string, hidden bool, err error) {
	pids, err := r.programs.Running(configManager)
	if err != nil {
		return nil, false, err
	}
	privileged := map[string]bool{} // by UID of a pod that sees it
	for _, pid := range pids {
		pod := r.processes.Describe(pid).PodUID
		if r.programs.Environment(pid)[oneShot] == "true" || pod == "" {
			continue
		}
		if !r.volumes.Projected(pod, key) {
			hidden = true
			continue
		}
		privileged[pod] = privileged[pod] || r.programs.Privileged(pid)
	}
	return first(privileged), hidden, nil
}

// first are the pods for which a report has room. Any pod can run a program of that name and have a ConfigMap with that
// key, so those come first in which it is privileged, as in NVIDIA's.
func first(privileged map[string]bool) []string {
	pods := slices.Sorted(maps.Keys(privileged))
	slices.SortStableFunc(pods, func(a, b string) int {
		switch {
		case privileged[a] == privileged[b]:
			return 0
		case privileged[a]:
			return -1
		}
		return 1
	})
	pods = pods[:min(len(pods), maxConfigPods)]
	slices.Sort(pods)
	return pods
}

func (r *ConfigReporter) report(ctx context.Context, node *v1alpha1.GPUNode, seeing []string) error {
	set := func(part v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus {
		part.Config = v1alpha1.ConfigStatus{Name: node.Spec.ConfigName, ChangeTime: node.Spec.ChangeTime, PodUIDs: seeing}
		return part
	}
	_, err := r.writer.change(ctx, node, false, set)
	return err
}
