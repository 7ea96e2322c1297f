// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package loopback is distribution's registry, for tests on this machine: without TLS and without accounts.
package loopback

import (
	"context"
	"io"
	"net/http"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // keeps what is pushed in a folder
	"github.com/sirupsen/logrus"
)

// Registry serves a registry that keeps what is pushed in a folder.
func Registry(ctx context.Context, folder string) http.Handler {
	logrus.SetOutput(io.Discard)
	config := &configuration.Configuration{
		Storage: configuration.Storage{
			"filesystem": {"rootdirectory": folder},
			"delete":     {"enabled": true},
		},
	}
	config.Log.AccessLog.Disabled = true
	return handlers.NewApp(ctx, config)
}
