// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
)

// reboot is what follows, where a MIG mode waits for a reboot, from the permission that the spec gives.
type reboot struct {
	now    bool     // the node is to be rebooted once that was reported
	waits  []string // who has to leave a GPU before, in words
	inVain bool     // the node was rebooted for this desired state, and the mode waits all the same
	failed error    // why the node could not be asked to reboot; it is asked again
}

// rebootFor decides whether the node is rebooted. A permission holds for one boot: while that lasts, the node may be
// asked again, whatever became of an earlier request; in any other it is spent.
func rebootFor(permission *v1alpha1.RebootPermission, bootID string, o outcome, devices []gpu.Device) reboot {
	switch {
	case permission == nil || len(o.pending) == 0:
		return reboot{}
	case permission.BootID != bootID:
		return reboot{inVain: true}
	}
	if users := describeUsers(devices); len(users) > 0 {
		return reboot{waits: users}
	}
	// Other GPUs come first: one whose mode is not pending yet would need a second reboot.
	return reboot{now: len(o.failures)+len(o.waits) == 0 && o.problem == nil}
}

// describeUsers names who uses any GPU of the node: a reboot ends them all.
func describeUsers(devices []gpu.Device) []string {
	var users []string
	for _, d := range devices {
		for i := range d.Processes {
			if p := &d.Processes[i]; !p.MPSServer {
				users = append(users, nameOf(plan.Blocker{Process: p})+" on "+d.String())
			}
		}
		for i := range d.Holders {
			users = append(users, nameOf(plan.Blocker{Holder: &d.Holders[i]})+" on "+d.String())
		}
	}
	slices.Sort(users)
	users = slices.Compact(users)
	if more := len(users) - maxNamed; more > 0 {
		users = append(users[:maxNamed], fmt.Sprintf("%d more", more))
	}
	return users
}

// consider fills in what follows from the permission. Before it says yes it asks the API server, past the cache,
// whether the desired state is still the one that this reconcile has worked on.
func (c *Controller) consider(ctx context.Context, node *v1alpha1.GPUNode, r *report) error {
	o := &r.outcome
	read := r.failed == nil
	if read && len(o.pending) == 0 && c.knowsOfReboot(node) {
		o.pending = stillPending(node.Spec.Devices, r.observed.devices)
	}
	if read {
		o.reboot = rebootFor(node.Spec.Reboot, c.bootID, *o, r.observed.devices)
	}
	if o.reboot.now {
		o.reboot = rebootFor(node.Spec.Reboot, c.bootID, *o, c.withInitContainers(ctx, r.observed.devices))
	}
	if !o.reboot.now {
		return nil
	}
	o.reboot.now = false
	able := c.rebooter.Able() == nil // if not, the report says so
	if !able {
		return nil
	}
	var current v1alpha1.GPUNode
	if err := c.reader.Get(ctx, client.ObjectKeyFromObject(node), &current); err != nil {
		return fmt.Errorf("making sure that the node may be rebooted: %w", err)
	}
	o.reboot.now = current.Generation == node.Generation
	return nil
}

// knowsOfReboot reports whether an earlier reconcile in this boot has found that only a reboot helps. That does not
// change because a program uses the GPU meanwhile, so that it cannot be tried again.
func (c *Controller) knowsOfReboot(node *v1alpha1.GPUNode) bool {
	return node.Status.BootID == c.bootID && condition.IsTrue(node.Status.Conditions, v1alpha1.ConditionRebootRequired)
}

// stillPending are the GPUs, in words, whose desired MIG mode is pending.
func stillPending(desired []v1alpha1.DeviceSpec, devices []gpu.Device) []string {
	var pending []string
	for _, spec := range desired {
		d, found := find(devices, spec.UUID)
		if found && d.PendingMIG != d.State.MIG && d.PendingMIG == (spec.Sharing.MIGMode == v1alpha1.MIGModeEnabled) {
			pending = append(pending, d.String())
		}
	}
	return pending
}

// restart reboots the node, after the status says so.
func (c *Controller) restart(ctx context.Context, node *v1alpha1.GPUNode, r report) error {
	log(ctx).Info("Rebooting the node", "boot", c.bootID)
	err := c.rebooter.Reboot()
	if err == nil {
		return nil
	}
	r.outcome.reboot = reboot{failed: err}
	if _, reported := c.report(ctx, node, r); reported != nil {
		return reported
	}
	return err
}
