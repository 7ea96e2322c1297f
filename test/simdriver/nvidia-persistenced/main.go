// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// nvidia-persistenced of the simulated driver, which holds every GPU open until a program that reaches its socket asks
// it to let go.
package main

import (
	"fmt"
	"os"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func main() {
	if err := simdriver.RunPersistenced(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
