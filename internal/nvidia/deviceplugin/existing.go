// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bytes"
	"errors"
	"fmt"

	"go.yaml.in/yaml/v3"
)

// Adopt is a configuration that the administrator wrote, as it has to be once ClusterPolicy.spec.mig.strategy was
// emptied: that field overruled flags.migStrategy of every configuration, so what it said is written there. Everything
// else, also comments and fields that are not known here, stays. An empty strategy changes nothing. Errors: the
// document is not a YAML mapping, so the plugin does not accept it either.
func Adopt(data, migStrategy string) (string, error) {
	if migStrategy == "" {
		return data, nil
	}
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(data), &doc); err != nil {
		return "", fmt.Errorf("parsing the device-plugin configuration: %w", err)
	}
	if doc.Kind == 0 || isNull(doc.Content[0]) { // the plugin's defaults
		return Default(migStrategy).Data, nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return "", errors.New("parsing the device-plugin configuration: not a mapping")
	}
	flags := entry(root, "flags")
	if isNull(flags) {
		*flags = yaml.Node{Kind: yaml.MappingNode}
	}
	if flags.Kind != yaml.MappingNode {
		return "", errors.New("parsing the device-plugin configuration: flags is not a mapping")
	}
	strategy := entry(flags, "migStrategy")
	*strategy = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: migStrategy, LineComment: strategy.LineComment}
	return marshal(&doc)
}

// SharesByMPS reports whether a configuration that the administrator wrote asks for NVIDIA's MPS daemon.
func SharesByMPS(data string) bool {
	var c struct {
		Sharing struct{ MPS *yaml.Node }
	}
	return yaml.Unmarshal([]byte(data), &c) == nil && c.Sharing.MPS != nil
}

// entry finds the value of a key in a mapping, or adds a null.
func entry(mapping *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return mapping.Content[i+1]
		}
	}
	value := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null"}
	mapping.Content = append(mapping.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: key}, value)
	return value
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func marshal(doc *yaml.Node) (string, error) {
	var b bytes.Buffer
	encoder := yaml.NewEncoder(&b)
	encoder.SetIndent(2)
	if err := errors.Join(encoder.Encode(doc), encoder.Close()); err != nil {
		return "", fmt.Errorf("writing the device-plugin configuration: %w", err)
	}
	return b.String(), nil
}
