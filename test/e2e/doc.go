// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package e2e proves on a real node, with a real kubelet, containerd and NVIDIA's own programs, what users run.
// `make e2e` runs it, as root, on a Linux machine without Docker and without a GPU: the driver is test/simdriver.
package e2e
