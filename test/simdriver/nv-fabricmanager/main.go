// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// nv-fabricmanager of the simulated driver, which holds the NVSwitches.
package main

import (
	"fmt"
	"os"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func main() {
	if err := simdriver.RunFabricManager(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
