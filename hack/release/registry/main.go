// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Registry serves distribution's registry on an address of this machine until it is ended: `make e2e` installs from it.
//
//	registry ADDRESS FOLDER
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/hack/release/internal/loopback"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: registry ADDRESS FOLDER")
		os.Exit(1)
	}
	server := &http.Server{
		Addr: os.Args[1], Handler: loopback.Registry(context.Background(), os.Args[2]), ReadHeaderTimeout: time.Minute,
	}
	fmt.Fprintln(os.Stderr, "registry:", server.ListenAndServe())
	os.Exit(1)
}
