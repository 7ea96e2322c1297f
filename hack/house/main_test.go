// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"testing/fstest"

	. "github.com/onsi/gomega"
)

// small is a repository with two rooms: one imports the other, and a file of the engine calls a method of another file.
func small() fstest.MapFS {
	files := fstest.MapFS{}
	for name, text := range map[string]string{
		"internal/gpu/gpu.go":             "package gpu\n",
		"internal/engine/node/decide.go":  "package node\n\nimport _ \"" + module + "internal/gpu\"\n\nfunc Decide(v *View) {\n\tv.look()\n}\n",
		"internal/engine/node/view.go":    "package node\n\ntype View struct{}\n\nfunc (v *View) look() {}\n",
		"internal/engine/node/unused.go":  "package node\n\nfunc unused() {}\n",
		"internal/engine/node/a_test.go":  "package node\n" + strings.Repeat("\n", 2000),
		"internal/engine/other/other.go":  "package other\n\ntype T struct{}\n\nfunc (T) look() {}\n",
		"cmd/a/main.go":                   "package main\n",
		"api/v1/zz_generated.deepcopy.go": "package v1\n" + strings.Repeat("\n", 9000),
		"hack/a.go":                       "package main\n",
		"test/a.go":                       "package test\n" + strings.Repeat("\n", 1000),
		"docs/architecture.md":            "one two three",
		"docs/dev/a.md":                   "one two",
		"docs/users.md":                   "one",
		"README.md":                       "one two three four",
	} {
		files[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return files
}

func TestWhatIsCounted(t *testing.T) {
	g := NewWithT(t)
	figures, err := count(small())
	g.Expect(err).NotTo(HaveOccurred())
	is := map[string]int{}
	for i, b := range bounds {
		is[b.what] = figures[i]
	}
	g.Expect(is).To(Equal(map[string]int{
		"KB of Go in internal, without tests":                    0,
		"KB of Go in internal, cmd, api and hack, without tests": 0,
		"KB of tests and of test":                                3,
		"rooms: folders of internal":                             2,
		"arrows between rooms":                                   1,
		"packages of internal":                                   3,
		"arrows between packages of internal":                    1,
		"floors: packages of internal on the longest way down":   2,
		"lines of the longest function of internal":              3,
		"files of internal/engine on the way of one node":        2,
		"words of docs/architecture.md":                          3,
		"words of docs/dev":                                      2,
		"words of other docs that are written by hand":           1,
		"words of README.md":                                     4,
	}))
}

func TestAFigureAboveItsBoundIsNamed(t *testing.T) {
	g, out := NewWithT(t), &strings.Builder{}
	figures := make([]int, len(bounds))
	g.Expect(show(out, figures)).To(BeZero())
	figures[3] = bounds[3].most + 1
	g.Expect(show(out, figures)).To(Equal(1))
	g.Expect(out.String()).To(ContainSubstring("over: rooms: folders of internal\n"))
}
