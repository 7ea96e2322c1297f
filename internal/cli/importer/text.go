// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"encoding/json"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

const head = "How the GPUs of this cluster are shared, as policies that change nothing on their nodes. `kubectl gpusharing plan -f` " +
	"shows that before you apply them. What a policy cannot say stands beside it."

// YAML is the description as a file for kubectl apply.
func (d Description) YAML() (string, error) {
	var text strings.Builder
	comment(&text, head)
	if d.Waits != "" && len(d.Policies) > 0 {
		comment(&text, "The policies wait once you apply them ("+v1alpha1.ReasonMPSClientsRunning+"): "+d.Waits+".")
	}
	for _, note := range d.Rest {
		comment(&text, "Not described: "+note+".")
	}
	for _, p := range d.Policies {
		text.WriteString("---\n")
		for _, note := range p.Notes {
			comment(&text, "Note: "+note+".")
		}
		data, err := p.yaml()
		if err != nil {
			return "", err
		}
		text.Write(data)
	}
	if len(d.Policies) == 0 && !d.Unknown {
		comment(&text, "No GPU is shared by hand, so there is no policy to write.")
	}
	return text.String(), nil
}

// yaml is the policy without what has its default anyway.
func (p Policy) yaml() ([]byte, error) {
	spec, err := json.Marshal(p.Spec)
	if err != nil {
		return nil, fmt.Errorf("writing policy %s: %w", p.Name, err)
	}
	fields := map[string]any{}
	if err := json.Unmarshal(spec, &fields); err != nil {
		return nil, fmt.Errorf("writing policy %s: %w", p.Name, err)
	}
	return yaml.Marshal(map[string]any{
		"apiVersion": v1alpha1.SchemeGroupVersion.String(), "kind": "GPUSharingPolicy",
		"metadata": map[string]any{"name": p.Name}, "spec": fields,
	})
}

// comment writes a text as a comment of lines that fit.
func comment(text *strings.Builder, what string) {
	const width = 100
	line := "#"
	for word := range strings.SplitSeq(strings.ReplaceAll(what, "\n", " "), " ") {
		if len(line)+1+len(word) > width && line != "#" {
			text.WriteString(line + "\n")
			line = "#"
		}
		line += " " + word
	}
	text.WriteString(line + "\n")
}
