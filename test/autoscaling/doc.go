// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package autoscaling runs the controller that ships beside the real Karpenter and the real Kueue, on a real API server.
// Both are the programs of their Go modules, Karpenter with the kwok provider, whose machines are Node objects and
// nothing else. The tests play the rest of a machine: the kubelet, NVIDIA's programs (test/nodesim) and a GPU
// (test/gpu/sim), which the operator's agent partitions.
//
// `make test` runs these tests, and `make autoscaling` only these. Building them takes three and eight minutes of CPU
// time, once, and each test waits for as long as Karpenter takes to look at a pending pod several times: it looks every 10 s.
//
// What they do not show:
//   - A scheduler. The pod is pending in all tests, also while the node has room for it, so Karpenter looks at it all the time.
//   - The time that a machine takes to boot, and drivers to load. Karpenter's kwok provider registers the Node at once.
//   - A Node as the kubelet registers it. That of the kwok provider advertises the GPUs of its instance type. The tests take them away with
//     the first report of the kubelet, before the Node gets the label by which the operator finds it.
//   - More pods than replicas that come one after the other: the kwok provider gives a NodeClaim the capacity that its pods asked for, so the
//     pods of a test come together.
//
// Karpenter's ports for metrics and health listen on all addresses. It has no flag for that, so the tests run in a
// network namespace of their own.
package autoscaling
