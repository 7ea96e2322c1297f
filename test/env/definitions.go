// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// define gives a server the CRDs of these folders, and no others. Most tests of a package want the same.
func (s *server) define(ctx context.Context, folders []string) error {
	read := envtest.CRDInstallOptions{Paths: folders, ErrorIfPathMissing: true}
	if err := envtest.ReadCRDFiles(&read); err != nil {
		return fmt.Errorf("reading CRDs: %w", err)
	}
	wanted := map[string]string{}
	for _, crd := range read.CRDs {
		file, err := json.Marshal(crd)
		if err != nil {
			return fmt.Errorf("reading CRDs: %w", err)
		}
		wanted[crd.Name] = string(file)
	}
	if maps.Equal(s.defined, wanted) {
		return nil
	}
	for name := range s.defined {
		if wanted[name] == s.defined[name] {
			continue
		}
		if err := s.undefine(ctx, name); err != nil {
			return err
		}
	}
	var missing []*apiextensionsv1.CustomResourceDefinition
	for _, crd := range read.CRDs {
		if wanted[crd.Name] != s.defined[crd.Name] {
			missing = append(missing, crd)
		}
	}
	s.defined, s.crds = wanted, read.CRDs
	if _, err := envtest.InstallCRDs(s.Config, envtest.CRDInstallOptions{CRDs: missing, MaxTime: time.Minute}); err != nil {
		return fmt.Errorf("installing CRDs: %w", err)
	}
	return s.begin(ctx)
}

// begin notes how the server is when its tests begin.
func (s *server) begin(ctx context.Context) (err error) {
	service := client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: "kubernetes"}
	made := map[client.ObjectKey]client.Object{
		service: &corev1.Service{}, {Name: metav1.NamespacePublic}: &corev1.Namespace{},
		{Name: metav1.NamespaceSystem}: &corev1.Namespace{}, {Name: corev1.NamespaceNodeLease}: &corev1.Namespace{},
	}
	err = untilDone(ctx, func(ctx context.Context) (bool, error) {
		for key, o := range made { // by the API server, while it starts
			if err := s.Client.Get(ctx, key, o); err != nil {
				return false, err
			}
		}
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for what an API server makes: %w", err)
	}
	if s.own, err = s.records(ctx, true); err != nil {
		return fmt.Errorf("reading what an API server begins with: %w", err)
	}
	return nil
}

// served waits until the API server serves the kinds that were restored.
func (s *server) served(ctx context.Context) error {
	deadline, _ := ctx.Deadline()
	wait := envtest.CRDInstallOptions{MaxTime: time.Until(deadline), PollInterval: 20 * time.Millisecond}
	return envtest.WaitForCRDs(s.Config, s.crds, wait)
}

// undefine deletes a CRD and waits until it is gone.
func (s *server) undefine(ctx context.Context, name string) error {
	crd := &unstructured.Unstructured{}
	crd.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
	crd.SetName(name)
	if err := client.IgnoreNotFound(s.Client.Delete(ctx, crd)); err != nil {
		return fmt.Errorf("deleting CRD %s: %w", name, err)
	}
	return untilDone(ctx, func(ctx context.Context) (bool, error) {
		err := s.Client.Get(ctx, client.ObjectKeyFromObject(crd), crd)
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	})
}
