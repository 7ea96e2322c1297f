// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !cgroupstand

package main

import "github.com/gpusharing/gpu-sharing-operator/internal/agent/host"

// cgroups is the tree of control groups, mounted at the same path on the node and in the agent's container: NVML takes
// the path that it has on the node.
func cgroups() host.Cgroups { return host.Cgroups{Folder: "/sys/fs/cgroup"} }
