// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nvidiamps keeps NVIDIA's MPS DaemonSet off the nodes that the operator's MPS daemons serve, and lets it back afterwards.
//
//	Prepare, KeepOff → label nvidia.com/mps.capable=false → its pods are gone → … → NotNeeded → Allow
//
// The operator's own MPS daemons serve every node that a policy shares by MPS. NVIDIA's MPS DaemonSet must not be on such a
// node: it reads the default configuration only, and when it starts it unmounts the shared memory of the daemons that run.
// It is on each node with the label nvidia.com/mps.capable=true, which GPU Feature Discovery (GFD) asks for as soon as the
// node selects a configuration that shares by MPS. Node Feature Discovery (NFD) makes the label from NodeFeature objects.
// The operator keeps the label false:
//
//	by NodeFeature   an object of ours overrides that of GFD: under the GPU Operator, and where another object names the label
//	by hand          where no NodeFeature names the label but a user has set it, or NFD does not answer: a patch of the Node,
//	                 which records the value before (annotation gpusharing.io/mps-capable)
//	not at all       where the label is not set, and nothing sets it: a stand-alone device plugin without NFD
//
// On the way in: GPUs drained where NVIDIA's daemon serves them, label overridden, label false and no pod of the DaemonSet on
// the node, spec written. On the way out: our daemons gone, the other configuration selected, GFD's own object says
// false, override deleted.
package nvidiamps
