// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/blang/semver/v4"
	"github.com/operator-framework/api/pkg/lib/version"
	operators "github.com/operator-framework/api/pkg/operators/v1alpha1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	sigsyaml "sigs.k8s.io/yaml"
)

// csv is the ClusterServiceVersion: what is written by hand and what the other sources say.
func (s *sources) csv() (*operators.ClusterServiceVersion, error) {
	csv := s.base.DeepCopy()
	parsed, err := semver.Parse(s.version)
	if err != nil {
		return nil, fmt.Errorf("the chart's version %q: %w", s.version, err)
	}
	csv.Spec.Version = version.OperatorVersion{Version: parsed}
	csv.Name = s.base.Name + ".v" + s.version
	if err := s.annotate(csv.Annotations); err != nil {
		return nil, err
	}
	icon, err := fs.ReadFile(s.files, "config/manifests/icon.svg")
	if err != nil {
		return nil, fmt.Errorf("reading the icon: %w", err)
	}
	csv.Spec.Icon = []operators.Icon{{Data: base64.StdEncoding.EncodeToString(icon), MediaType: "image/svg+xml"}}
	for _, name := range []string{"gpu-sharing-controller", "gpu-sharing-agent"} {
		csv.Spec.RelatedImages = append(csv.Spec.RelatedImages, operators.RelatedImage{Name: name, Image: s.images[name]})
	}
	csv.Spec.InstallStrategy = s.installStrategy()
	return csv, s.describe(csv.Spec.CustomResourceDefinitions.Owned)
}

// annotate adds the annotations whose values are known elsewhere.
func (s *sources) annotate(annotations map[string]string) error {
	examples, err := json.MarshalIndent(s.samples, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the examples: %w", err)
	}
	var namespace map[string]any
	if err := s.read("config/default/namespace.yaml", &namespace); err != nil {
		return err
	}
	template, err := json.Marshal(namespace)
	if err != nil {
		return fmt.Errorf("writing the namespace: %w", err)
	}
	annotations["alm-examples"] = string(examples)
	annotations["containerImage"] = s.images["gpu-sharing-controller"]
	annotations["operatorframework.io/suggested-namespace-template"] = string(template)
	// Any earlier version may be upgraded to this one at once: nothing on the nodes depends on the one between.
	annotations["olm.skipRange"] = "<" + s.version
	return nil
}

func (s *sources) installStrategy() operators.NamedInstallStrategy {
	strategy := operators.NamedInstallStrategy{StrategyName: operators.InstallStrategyNameDeployment}
	for _, d := range s.deployments {
		pod := &d.Spec.Template.Spec
		for i := range pod.Containers {
			s.nameImages(&pod.Containers[i])
		}
		pod.Affinity = s.supported()
		labels := maps.Clone(d.Spec.Template.Labels)
		labels[versionLabel] = s.version
		strategy.StrategySpec.DeploymentSpecs = append(strategy.StrategySpec.DeploymentSpecs,
			operators.StrategyDeploymentSpec{Name: d.Name, Label: labels, Spec: d.Spec})
	}
	strategy.StrategySpec.ClusterPermissions = s.rbac.permissions()
	return strategy
}

// supported are the nodes that the images are for, which are those that the ClusterServiceVersion has labels of.
func (s *sources) supported() *corev1.Affinity {
	var architectures []string
	for label := range s.base.Labels {
		if architecture, is := strings.CutPrefix(label, "operatorframework.io/arch."); is {
			architectures = append(architectures, architecture)
		}
	}
	slices.Sort(architectures)
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: corev1.LabelArchStable, Operator: corev1.NodeSelectorOpIn, Values: architectures},
			{Key: corev1.LabelOSStable, Operator: corev1.NodeSelectorOpIn, Values: []string{"linux"}},
		}}},
	}}}
}

// nameImages puts the released images in the place of their names in a container and in what its environment tells it.
func (s *sources) nameImages(container *corev1.Container) {
	if image, isOurs := s.images[container.Image]; isOurs {
		container.Image = image
	}
	for i, variable := range container.Env {
		if image, isOurs := s.images[variable.Value]; isOurs {
			container.Env[i].Value = image
		}
	}
}

// permissions are what the ClusterRoleBindings give to each service account. What RoleBindings give is none of them:
// OLM would make ClusterRoles of it, see namespacedRights.
func (r rbac) permissions() []operators.StrategyDeploymentPermissions {
	rules := map[string][]rbacv1.PolicyRule{}
	for _, binding := range r.bindings {
		for _, role := range r.roles {
			if binding.Kind != "ClusterRoleBinding" || role.Kind != "ClusterRole" || role.Name != binding.RoleRef.Name {
				continue
			}
			for _, subject := range binding.Subjects {
				rules[subject.Name] = append(rules[subject.Name], role.Rules...)
			}
		}
	}
	var permissions []operators.StrategyDeploymentPermissions
	for account := range rules {
		permissions = append(permissions, operators.StrategyDeploymentPermissions{ServiceAccountName: account, Rules: rules[account]})
	}
	slices.SortFunc(permissions, func(a, b operators.StrategyDeploymentPermissions) int {
		return strings.Compare(a.ServiceAccountName, b.ServiceAccountName)
	})
	return permissions
}

// describe gives each kind and each field the description that the CRD has.
func (s *sources) describe(owned []operators.CRDDescription) error {
	for i := range owned {
		schema, err := s.schema(owned[i].Name)
		if err != nil {
			return err
		}
		owned[i].Description = sentence(schema.Description)
		for j, d := range owned[i].SpecDescriptors {
			if owned[i].SpecDescriptors[j].Description, err = description(schema.Properties["spec"], d.Path); err != nil {
				return fmt.Errorf("%s: %w", owned[i].Name, err)
			}
		}
		for j, d := range owned[i].StatusDescriptors {
			if owned[i].StatusDescriptors[j].Description, err = description(schema.Properties["status"], d.Path); err != nil {
				return fmt.Errorf("%s: %w", owned[i].Name, err)
			}
		}
	}
	return nil
}

func (s *sources) schema(crd string) (*apiextensions.JSONSchemaProps, error) {
	for i := range s.crds {
		if s.crds[i].Name == crd {
			return s.crds[i].Spec.Versions[0].Schema.OpenAPIV3Schema, nil
		}
	}
	return nil, fmt.Errorf("there is no CRD %s", crd)
}

// description is that of a field, which is given by its path.
func description(schema apiextensions.JSONSchemaProps, path string) (string, error) {
	for name := range strings.SplitSeq(path, ".") {
		property, found := schema.Properties[name]
		if !found {
			return "", fmt.Errorf("there is no field %s, of which a descriptor speaks", path)
		}
		schema = property
	}
	return sentence(schema.Description), nil
}

// sentence is the text of a comment on one line.
func sentence(comment string) string { return strings.Join(strings.Fields(comment), " ") }

// marshal writes an object without what only a server sets.
func marshal(object any) ([]byte, error) {
	data, err := json.Marshal(object)
	if err != nil {
		return nil, fmt.Errorf("encoding %T: %w", object, err)
	}
	var plain map[string]any
	if err := json.Unmarshal(data, &plain); err != nil {
		return nil, fmt.Errorf("encoding %T: %w", object, err)
	}
	delete(plain, "status")
	dropCreation(plain)
	return sigsyaml.Marshal(plain)
}

// dropCreation removes the empty times that Go's types print, at any depth.
func dropCreation(value any) {
	switch v := value.(type) {
	case map[string]any:
		if created, present := v["creationTimestamp"]; present && created == nil {
			delete(v, "creationTimestamp")
		}
		for _, member := range v {
			dropCreation(member)
		}
	case []any:
		for _, item := range v {
			dropCreation(item)
		}
	}
}
