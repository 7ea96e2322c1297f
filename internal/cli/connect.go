// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// connect makes a client of the cluster that the flags name.
func connect(f *flags) (client.Client, error) {
	config, err := configOf(f)
	if err != nil {
		return nil, err
	}
	return clientOf(config)
}

// configOf finds the cluster that the flags name.
func configOf(f *flags) (*rest.Config, error) {
	config, err := f.config.ToRESTConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the cluster: %w; name it with --kubeconfig and --context", err)
	}
	config.UserAgent = "kubectl-gpusharing"
	return config, nil
}

func clientOf(config *rest.Config) (client.Client, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	return client.WithFieldValidation(c, metav1.FieldValidationStrict), nil
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme, authenticationv1.AddToScheme, authorizationv1.AddToScheme, coordinationv1.AddToScheme,
		rbacv1.AddToScheme, v1alpha1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("registering the API: %w", err)
		}
	}
	return scheme, nil
}

// advise adds to an error of the API server what to do about it.
func advise(err error) error {
	switch {
	case err == nil:
		return nil
	case meta.IsNoMatchError(err):
		return fmt.Errorf("%w; install the GPU Sharing Operator in this cluster, or choose another with --context", err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w; ask an administrator to bind the ClusterRoles gpu-sharing-view and gpu-sharing-cli to you, and for restore "+
			"and to have plan check policies gpu-sharing-edit too (plan changes nothing: all its writes are dry runs)", err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w; log in to the cluster anew", err)
	}
	return err
}
