// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/operator-framework/api/pkg/apis/scorecard/v1alpha3"
	"github.com/operator-framework/api/pkg/manifests"
	"github.com/operator-framework/api/pkg/validation"
	interfaces "github.com/operator-framework/api/pkg/validation/interfaces"
	sigsyaml "sigs.k8s.io/yaml"
)

// kinds are those that a bundle may hold (operator-registry, pkg/lib/bundle/supported_resources.go), of which OLM
// itself refuses any other only when it installs.
func kinds() []string {
	return []string{
		"ClusterServiceVersion", "CustomResourceDefinition", "Secret", "ClusterRole", "ClusterRoleBinding", "ConfigMap",
		"ServiceAccount", "Service", "Role", "RoleBinding", "PrometheusRule", "ServiceMonitor", "PodDisruptionBudget",
		"PriorityClass", "VerticalPodAutoscaler", "ConsoleYAMLSample", "ConsoleQuickStart", "ConsoleCLIDownload", "ConsoleLink",
	}
}

// falseAlarms are warnings that are wrong: rights have no version, and events.k8s.io/v1 is the one that is served.
func falseAlarms() []string {
	return []string{"Migrate the API(s) for events:"}
}

// validate checks a bundle with every validator of the library that is not deprecated, with the one that looks at the
// images only once they are released. A warning is as bad as an error.
func validate(folder string, released bool) error {
	bundle, err := manifests.GetBundleFromDir(folder)
	if err != nil {
		return fmt.Errorf("reading the bundle: %w", err)
	}
	var errs []error
	for _, o := range bundle.Objects {
		if !slices.Contains(kinds(), o.GetKind()) {
			errs = append(errs, fmt.Errorf("OLM installs no %s: %s", o.GetKind(), o.GetName()))
		}
	}
	objects := bundle.ObjectsToValidate()
	for _, o := range bundle.Objects {
		objects = append(objects, o)
	}
	validators := interfaces.Validators{
		validation.ClusterServiceVersionValidator, validation.CustomResourceDefinitionValidator, validation.BundleValidator,
		validation.OperatorHubV2Validator, validation.StandardCapabilitiesValidator, validation.StandardCategoriesValidator,
		validation.ObjectValidator, validation.GoodPracticesValidator, validation.AlphaDeprecatedAPIsValidator,
	}
	if released {
		validators = append(validators, validation.MultipleArchitecturesValidator)
	}
	for _, result := range validators.Validate(objects...) {
		for _, found := range append(result.Errors, result.Warnings...) {
			if !isFalseAlarm(found) {
				errs = append(errs, fmt.Errorf("%s: %w", result.Name, found))
			}
		}
	}
	return errors.Join(append(errs, validateScorecard(folder))...)
}

func isFalseAlarm(found error) bool {
	return slices.ContainsFunc(falseAlarms(), func(text string) bool { return strings.Contains(found.Error(), text) })
}

func validateScorecard(folder string) error {
	data, err := os.ReadFile(filepath.Join(folder, "tests", "scorecard", "config.yaml"))
	if err != nil {
		return fmt.Errorf("reading the scorecard's configuration: %w", err)
	}
	var c v1alpha3.Configuration
	if err := sigsyaml.UnmarshalStrict(data, &c); err != nil {
		return fmt.Errorf("the scorecard's configuration: %w", err)
	}
	if len(c.Stages) == 0 {
		return errors.New("the scorecard's configuration has no stage")
	}
	return nil
}
