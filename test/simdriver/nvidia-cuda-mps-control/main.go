// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// nvidia-smi of the simulated driver: what the agent and NVIDIA's programs call, and a table for people.
package main

func main() {}
