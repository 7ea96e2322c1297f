// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
)

// daemonSteps are the steps for the MPS daemons of a node, which serve several GPUs each: those to stop, before any GPU
// is changed, and those to start or to give other limits, when all are.
//
// A daemon is stopped when no GPU wants it any more, and also when only some do: its server holds every GPU that it
// serves, so one that leaves is not free before the server is gone. The others then get it back. It is started anew as
// well for a GPU that is added, which a server that runs may not know, to serve other users, and for a GPU that is
// reset together with another one. New limits alone need no restart and disturb nobody: they are for clients that
// connect later.
func daemonSteps(goals []goal) (stops, starts []Step) {
	has, wanted := serving(goals, haveMPS), serving(goals, wantMPS)
	for _, resource := range slices.Sorted(maps.Keys(has)) {
		if leaves(has[resource], wanted[resource]) || leaves(wanted[resource], has[resource]) ||
			otherUsers(has[resource], wanted[resource]) || slices.ContainsFunc(has[resource], resetWithOthers(goals)) {
			stops = append(stops, stopMPS{resource: resource, devices: has[resource]})
			delete(has, resource)
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(wanted)) {
		start := startOf(resource, wanted[resource])
		start.runs = len(has[resource]) > 0
		if !sameDaemon(has[resource], start.daemon) {
			starts = append(starts, start)
		}
	}
	return stops, starts
}

// resetWithOthers reports whether a GPU has to be reset because the MIG mode of another one changes.
func resetWithOthers(goals []goal) func(goal) bool {
	return func(peer goal) bool {
		return slices.ContainsFunc(goals, func(g goal) bool {
			return g.desired && !g.waits && g.device.State.MIG != g.want.MIG && slices.Contains(g.device.ResetPeers, peer.device.UUID)
		})
	}
}

// serving groups the GPUs of the node by the operator's daemon that serves them, or must serve them.
func serving(goals []goal, daemon func(goal) *gpu.MPSDaemon) map[string][]goal {
	by := map[string][]goal{}
	for _, g := range goals {
		if m := daemon(g); m != nil && !m.External && !g.waits {
			by[m.Resource] = append(by[m.Resource], g)
		}
	}
	return by
}

func haveMPS(g goal) *gpu.MPSDaemon { return g.device.State.MPS }

func wantMPS(g goal) *gpu.MPSDaemon { return g.want.MPS }

// otherUsers reports whether the daemon serves one user and is to serve all, or the other way round.
func otherUsers(has, wanted []goal) bool {
	return slices.ContainsFunc(has, func(h goal) bool {
		return slices.ContainsFunc(wanted, func(w goal) bool { return h.device.State.MPS.MultiUser != w.want.MPS.MultiUser })
	})
}

// leaves reports whether a GPU that a daemon serves is not among those that it must serve.
func leaves(has, wanted []goal) bool {
	return slices.ContainsFunc(has, func(h goal) bool {
		return !slices.ContainsFunc(wanted, func(w goal) bool { return w.device.UUID == h.device.UUID })
	})
}

// startOf is the step that makes the daemon serve its GPUs as wanted. What the desired state says of threads counts,
// also for GPUs that it does not list, since a daemon has one percentage.
func startOf(resource string, wanted []goal) startMPS {
	s := startMPS{daemon: Daemon{Resource: resource}}
	for _, g := range wanted {
		m := g.want.MPS
		if g.desired || s.daemon.ActiveThreadPercentage == 0 {
			s.daemon.ActiveThreadPercentage, s.daemon.MultiUser = m.ActiveThreadPercentage, m.MultiUser
		}
		s.daemon.Devices = append(s.daemon.Devices, DaemonDevice{
			UUID: g.device.UUID, Index: g.device.Index, PinnedMemoryLimitMiB: m.PinnedMemoryLimitMiB,
		})
		s.devices = append(s.devices, g)
	}
	return s
}

// sameDaemon reports whether the daemon that serves the GPUs of has is the wanted one already.
func sameDaemon(has []goal, wanted Daemon) bool {
	if len(has) != len(wanted.Devices) {
		return false
	}
	for i, g := range has {
		m := g.device.State.MPS
		if m.ActiveThreadPercentage != wanted.ActiveThreadPercentage || m.MultiUser != wanted.MultiUser ||
			m.PinnedMemoryLimitMiB != wanted.Devices[i].PinnedMemoryLimitMiB {
			return false
		}
	}
	return true
}
