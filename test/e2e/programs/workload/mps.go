// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"

	"github.com/gpusharing/gpu-sharing-operator/test/simdriver/mpsclient"
)

// useMPS uses the GPUs through MPS, as CUDA does where the environment names a pipe directory: it waits until it is
// served, reports what it got, and fails with its server.
func useMPS(pipe string) {
	c, err := mpsclient.Connect(pipe)
	if err != nil {
		fail(err)
		return // it has its replica all the same
	}
	answer, err := c.Wait()
	if err != nil {
		fail(err)
		return
	}
	_ = answer.Write(os.Stdout) // the log is all that it has
	c.Lost()
	fmt.Fprintln(os.Stderr, "CUDA_ERROR_MPS_RPC_FAILURE: the MPS server has ended")
	os.Exit(1)
}

func fail(err error) { _ = mpsclient.Answer{Error: err.Error()}.Write(os.Stdout) }
