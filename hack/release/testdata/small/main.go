// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Small stands for our programs in tests: it has one module linked, and builds in a second.
package main

import (
	"fmt"

	"golang.org/x/mod/semver"
)

func main() { fmt.Println(semver.Major("v1.2.3")) }
