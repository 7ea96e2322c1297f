// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/operator-framework/api/pkg/operators/v1alpha1"
	"github.com/operator-framework/operator-registry/alpha/declcfg"
	"github.com/operator-framework/operator-registry/alpha/property"
	"sigs.k8s.io/yaml"
)

// catalog is the file-based catalog (https://olm.operatorframework.io/docs/reference/file-based-catalogs) with one
// version: that of a bundle, given by its ClusterServiceVersion, its annotations and its image. Every earlier version
// is upgraded to it at once, as the bundle says.
func catalog(manifest []byte, annotations map[string]string, image string) ([]byte, error) {
	var csv v1alpha1.ClusterServiceVersion
	if err := yaml.Unmarshal(manifest, &csv); err != nil {
		return nil, fmt.Errorf("reading the ClusterServiceVersion: %w", err)
	}
	const prefix = "operators.operatorframework.io.bundle."
	pkg, channel := annotations[prefix+"package.v1"], annotations[prefix+"channel.default.v1"]
	version := csv.Spec.Version.String()
	bundle := declcfg.Bundle{
		Schema: declcfg.SchemaBundle, Name: csv.Name, Package: pkg, Image: image,
		Properties:    []property.Property{property.MustBuildPackage(pkg, version)},
		RelatedImages: []declcfg.RelatedImage{{Image: image}},
	}
	for _, crd := range csv.Spec.CustomResourceDefinitions.Owned {
		_, group, _ := strings.Cut(crd.Name, ".")
		bundle.Properties = append(bundle.Properties, property.MustBuildGVK(group, crd.Version, crd.Kind))
	}
	bundle.Properties = append(bundle.Properties, property.MustBuildCSVMetadata(csv))
	for _, related := range csv.Spec.RelatedImages {
		bundle.RelatedImages = append(bundle.RelatedImages, declcfg.RelatedImage{Name: related.Name, Image: related.Image})
	}
	all := declcfg.DeclarativeConfig{
		Packages: []declcfg.Package{{Schema: declcfg.SchemaPackage, Name: pkg, DefaultChannel: channel, Description: csv.Spec.Description}},
		Channels: []declcfg.Channel{{Schema: declcfg.SchemaChannel, Name: channel, Package: pkg, Entries: []declcfg.ChannelEntry{
			{Name: csv.Name, SkipRange: csv.Annotations["olm.skipRange"]},
		}}},
		Bundles: []declcfg.Bundle{bundle},
	}
	// The same check as that of `opm validate`.
	if _, err := declcfg.ConvertToModel(all); err != nil {
		return nil, fmt.Errorf("the catalog: %w", err)
	}
	var out bytes.Buffer
	if err := declcfg.WriteYAML(all, &out); err != nil {
		return nil, fmt.Errorf("writing the catalog: %w", err)
	}
	return out.Bytes(), nil
}
