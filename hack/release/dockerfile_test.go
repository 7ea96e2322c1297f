// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	. "github.com/onsi/gomega"
)

func TestImagesRunAsTheDockerfileSays(t *testing.T) {
	g := NewWithT(t)
	content, err := os.ReadFile("../../Dockerfile")
	g.Expect(err).NotTo(HaveOccurred())
	stages := map[string]v1.Config{}
	stage := ""
	for line := range strings.Lines(string(content)) {
		instruction, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if instruction == "FROM" {
			g.Expect(strings.Fields(rest)).To(HaveLen(3), line)
			stage = strings.Fields(rest)[2]
			if strings.Fields(rest)[0] == "scratch" {
				stages[stage] = v1.Config{WorkingDir: "/"}
			}
		}
		config, isOurs := stages[stage]
		if !isOurs {
			continue
		}
		switch instruction {
		case "USER":
			config.User = rest
		case "ENV":
			config.Env = append(config.Env, rest)
		case "ENTRYPOINT":
			g.Expect(json.Unmarshal([]byte(rest), &config.Entrypoint)).To(Succeed())
		}
		stages[stage] = config
	}
	g.Expect(stages).To(Equal(map[string]v1.Config{
		"controller": controllerSpec("amd64", nil).Config, "agent": agentSpec("amd64", nil, nil).Config,
	}))
}
