// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"time"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
)

// sbom is the list, as CycloneDX 1.6 in JSON, of the Go modules that are linked into a program, as Go wrote them there,
// of Go itself, and of Debian's packages beside it.
func sbom(s source, p program, packages []debianPackage) ([]byte, error) {
	info, err := buildinfo.ReadFile(p.File)
	if err != nil {
		return nil, fmt.Errorf("reading the modules of %s: %w", p.File, err)
	}
	components := []cyclonedx.Component{golang("stdlib", info.GoVersion[len("go"):], "")}
	for _, module := range info.Deps {
		linked := module
		if module.Replace != nil {
			linked = module.Replace
		}
		components = append(components, golang(linked.Path, linked.Version, linked.Sum))
	}
	for _, d := range packages {
		url := fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=debian-12", d.Name, d.Version, d.Arch)
		components = append(components, cyclonedx.Component{
			BOMRef: url, Type: cyclonedx.ComponentTypeLibrary, Name: d.Name, Version: d.Version, PackageURL: url,
		})
	}
	var refs []string
	for _, c := range components {
		refs = append(refs, c.BOMRef)
	}
	bom := cyclonedx.NewBOM()
	main := golang(info.Main.Path, s.Version, "")
	main.Type, main.Name = cyclonedx.ComponentTypeApplication, p.Name
	main.Properties = &[]cyclonedx.Property{{Name: "os", Value: p.OS}, {Name: "arch", Value: p.Arch}, {Name: "commit", Value: s.Commit}}
	bom.Metadata = &cyclonedx.Metadata{Timestamp: s.Time.Format(time.RFC3339), Component: &main}
	bom.Components = &components
	bom.Dependencies = &[]cyclonedx.Dependency{{Ref: main.BOMRef, Dependencies: &refs}}
	var out bytes.Buffer
	if err := cyclonedx.NewBOMEncoder(&out, cyclonedx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cyclonedx.SpecVersion1_6); err != nil {
		return nil, fmt.Errorf("writing the SBOM of %s: %w", p.Name, err)
	}
	return out.Bytes(), nil
}

// golang is a Go module as a component. Its sum is Go's own (go.sum), which is no hash of a file.
func golang(path, version, sum string) cyclonedx.Component {
	url := "pkg:golang/" + path + "@" + version
	c := cyclonedx.Component{BOMRef: url, Type: cyclonedx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: url}
	if sum != "" {
		c.Properties = &[]cyclonedx.Property{{Name: "go.sum", Value: sum}}
	}
	return c
}
