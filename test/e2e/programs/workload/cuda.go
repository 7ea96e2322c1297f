// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver/cuda"
)

// allocateVariable lists what the program takes of its GPU's memory when it begins and keeps, in MiB; so do arguments
// after "allocate", for a program that runs beside it in the container. "managed" makes the rest managed memory.
const allocateVariable = "CUDA_ALLOCATE"

// allocate takes memory of the first GPU and prints what came of it: the total that it sees, and the outcome of each.
func allocate(want []string) (end func()) {
	gpus, _ := filepath.Glob("/dev/nvidia[0-9]*") // the pattern is not malformed
	if len(gpus) == 0 {
		fmt.Println("CUDA_ERROR_NO_DEVICE")
		return func() {}
	}
	minor, _ := strconv.Atoi(gpus[0][len("/dev/nvidia"):])
	c, err := cuda.Open("/var/lib/simdriver", minor)
	if err != nil {
		fmt.Println(err)
		return func() {}
	}
	if total, err := c.Total(); err == nil {
		fmt.Println("total", total>>20)
	}
	managed := false
	for _, one := range want {
		if managed = managed || one == "managed"; one == "managed" {
			continue
		}
		mib, _ := strconv.ParseUint(one, 10, 64) // 0 is refused
		outcome := "CUDA_SUCCESS"
		if err := c.Allocate(mib<<20, managed); err != nil {
			outcome = err.Error()
		}
		fmt.Println(one, outcome)
	}
	return func() { _ = c.Close() }
}
