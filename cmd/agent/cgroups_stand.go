// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgroupstand

package main

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
)

// stand says what stands for cgroup v2 with dmem or misc on a machine that has neither (test/e2e/memorylimits_test.go writes it). No program
// that ships has this.
type stand struct {
	Root       string // a hierarchy of cgroup v1, in which kubelet and runc make their directories
	Controller string // dmem or misc
	File       string // of that hierarchy; a directory with it has files of the controller
}

const standFile = "/var/lib/simdriver/cgroups.json" // which every container of such a machine sees

// cgroups is a hierarchy of cgroup v1 in place of the tree of control groups.
func cgroups() host.Cgroups {
	root := "/sys/fs/cgroup"
	if s, err := readStand(); err == nil {
		root = s.Root
	}
	return host.Cgroups{
		Folder:  root,
		Unified: func(string) bool { _, err := readStand(); return err == nil },
		Stand: func(dir string) []string {
			s, err := readStand()
			if err != nil {
				return nil
			}
			if _, err := os.Lstat(filepath.Join(dir, s.File)); err != nil && dir != root {
				return nil
			}
			return []string{s.Controller}
		},
	}
}

func readStand() (s stand, err error) {
	content, err := os.ReadFile(standFile)
	if err == nil {
		err = json.Unmarshal(content, &s)
	}
	return s, err
}
