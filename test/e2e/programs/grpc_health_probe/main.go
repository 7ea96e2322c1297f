// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command grpc_health_probe asks a gRPC server whether it serves, as the program of that name does that lies beside opm
// in its image: OLM's probes of a catalog's pod run it.
//
//	grpc_health_probe -addr=:50051 -rpc-timeout=5s
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
)

func main() {
	address := flag.String("addr", "", "where the server listens")
	timeout := flag.Duration("rpc-timeout", time.Second, "how long to wait for the answer")
	flag.Parse()
	if err := serves(*address, *timeout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serves(address string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	connection, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close() //nolint:errcheck // the program ends
	answer, err := grpc_health_v1.NewHealthClient(connection).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if answer.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		return fmt.Errorf("the server answers %s", answer.Status)
	}
	return nil
}
