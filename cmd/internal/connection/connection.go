// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package connection is how the programs in the cluster reach the API server.
package connection

import (
	"fmt"

	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
)

// Config finds the API server by KUBECONFIG or the pod's account. As Kubernetes' own controllers, the programs take what it answers as it is: since
// Kubernetes 1.37 it compresses each event of each watch otherwise, for every node anew.
func Config(userAgent string) (*rest.Config, error) {
	config, err := ctrl.GetConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the API server: %w", err)
	}
	config.UserAgent, config.DisableCompression = userAgent, true
	return config, nil
}
