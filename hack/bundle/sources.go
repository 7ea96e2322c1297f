// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"

	operators "github.com/operator-framework/api/pkg/operators/v1alpha1"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"
)

// sources are what a bundle is made from.
type sources struct {
	files fs.FS

	base        operators.ClusterServiceVersion // what is written by hand
	version     string
	images      map[string]string // by the name that manifests have
	deployments []appsv1.Deployment
	rbac        rbac
	crds        []apiextensions.CustomResourceDefinition
	samples     []map[string]any
}

// rbac are the objects that give rights. A Role has the fields of a ClusterRole, and so has its binding.
type rbac struct {
	roles    []rbacv1.ClusterRole
	bindings []rbacv1.ClusterRoleBinding
}

func readSources(files fs.FS) (*sources, error) {
	s := &sources{files: files}
	for _, read := range []func() error{s.readBase, s.readChart, s.readDeployments, s.readRBAC, s.readCRDs, s.readSamples} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *sources) readBase() error {
	return s.read("config/manifests/gpu-sharing-operator.clusterserviceversion.yaml", &s.base)
}

// readChart takes version and images from the chart, so that both packages are of one release.
func (s *sources) readChart() error {
	var chart struct {
		Version     string
		Annotations map[string]string
	}
	if err := s.read("config/helm/Chart.yaml", &chart); err != nil {
		return err
	}
	var values struct {
		Images struct {
			Controller, Agent struct{ Repository string }
		}
	}
	if err := s.read("config/helm/values.yaml", &values); err != nil {
		return err
	}
	s.version = chart.Version
	s.images = map[string]string{}
	for name, repository := range map[string]string{"controller": values.Images.Controller.Repository, "agent": values.Images.Agent.Repository} {
		// The chart of a release names its images by their digests.
		s.images["gpu-sharing-"+name] = cmp.Or(chart.Annotations["gpusharing.io/"+name+"-image"], repository+":"+chart.Version)
	}
	return nil
}

func (s *sources) readDeployments() error {
	for _, file := range []string{"config/manager/controller.yaml", "config/operands/deployment.yaml"} {
		var d appsv1.Deployment
		if err := s.read(file, &d); err != nil {
			return err
		}
		s.deployments = append(s.deployments, d)
	}
	return nil
}

func (s *sources) readRBAC() error {
	for _, file := range []string{
		"config/rbac/role.yaml", "config/manager/rbac.yaml", "config/agent/rbac.yaml", "config/openshift/scc.yaml", "config/operands/rbac.yaml",
		"config/metrics/rbac.yaml",
	} {
		err := s.each(file, func(document []byte, kind string) error {
			switch kind {
			case "ClusterRole", "Role":
				s.rbac.roles = append(s.rbac.roles, rbacv1.ClusterRole{})
				return sigsyaml.UnmarshalStrict(document, &s.rbac.roles[len(s.rbac.roles)-1])
			case "ClusterRoleBinding", "RoleBinding":
				s.rbac.bindings = append(s.rbac.bindings, rbacv1.ClusterRoleBinding{})
				return sigsyaml.UnmarshalStrict(document, &s.rbac.bindings[len(s.rbac.bindings)-1])
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *sources) readCRDs() error {
	return s.glob("config/crd/gpusharing.io_*.yaml", func(document []byte, _ string) error {
		s.crds = append(s.crds, apiextensions.CustomResourceDefinition{})
		return sigsyaml.UnmarshalStrict(document, &s.crds[len(s.crds)-1])
	})
}

func (s *sources) readSamples() error {
	add := func(document []byte, kind string) error {
		if kind == "Kustomization" || kind == "" {
			return nil
		}
		sample := map[string]any{}
		s.samples = append(s.samples, sample)
		return sigsyaml.Unmarshal(document, &sample)
	}
	if err := s.glob("config/samples/*.yaml", add); err != nil {
		return err
	}
	return s.each("config/manifests/example-gpunode.yaml", add)
}

// glob calls a function with each document of the files that match a pattern, in the order of their names.
func (s *sources) glob(pattern string, do func(document []byte, kind string) error) error {
	names, err := fs.Glob(s.files, pattern)
	if err != nil {
		return fmt.Errorf("looking for %s: %w", pattern, err)
	}
	if len(names) == 0 {
		return fmt.Errorf("there is no %s", pattern)
	}
	for _, name := range names {
		if err := s.each(name, do); err != nil {
			return err
		}
	}
	return nil
}

// each calls a function with each document of a file.
func (s *sources) each(file string, do func(document []byte, kind string) error) error {
	data, err := fs.ReadFile(s.files, file)
	if err != nil {
		return fmt.Errorf("reading the sources: %w", err)
	}
	documents, err := split(data)
	if err != nil {
		return fmt.Errorf("reading %s: %w", file, err)
	}
	for _, document := range documents {
		var object struct{ Kind string }
		if err := sigsyaml.Unmarshal(document, &object); err != nil {
			return fmt.Errorf("reading %s: %w", file, err)
		}
		if err := do(document, object.Kind); err != nil {
			return fmt.Errorf("reading %s: %w", file, err)
		}
	}
	return nil
}

// read reads a file with one document into a value.
func (s *sources) read(file string, into any) error {
	data, err := fs.ReadFile(s.files, file)
	if err != nil {
		return fmt.Errorf("reading the sources: %w", err)
	}
	if err := sigsyaml.Unmarshal(data, into); err != nil {
		return fmt.Errorf("reading %s: %w", file, err)
	}
	return nil
}

func split(data []byte) ([][]byte, error) {
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	var documents [][]byte
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return nil, err
		}
		if len(bytes.TrimSpace(document)) > 0 {
			documents = append(documents, document)
		}
	}
}
