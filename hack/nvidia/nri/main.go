// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nri runs the NRI plugin of NVIDIA's container toolkit, which gives NVIDIA's pods the driver where no runtime
// class does: those in one namespace whose annotations ask for CDI devices. In NVIDIA's toolkit container the installer
// runs it.
//
//	nri NAMESPACE SOCKET
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk-installer/container/runtime/nri"
	"github.com/sirupsen/logrus"
)

// index orders the plugins of a node; it is the toolkit's default.
const index = "10"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: nri NAMESPACE SOCKET")
		os.Exit(2)
	}
	plugin := nri.NewPlugin(ctx, logrus.StandardLogger(), os.Args[1])
	if err := plugin.Start(ctx, os.Args[2], index); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	<-ctx.Done()
	plugin.Stop()
}
