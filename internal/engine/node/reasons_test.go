// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// declared are the reasons of the API, each with the name of its constant.
func declared(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../../../api/v1alpha1/conditions.go", nil, 0)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	reasons := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, is := n.(*ast.ValueSpec); is && strings.HasPrefix(spec.Names[0].Name, "Reason") {
			value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			reasons[value] = spec.Names[0].Name
		}
		return true
	})
	return reasons
}

func TestEveryReasonHasAClassAndSaysWhatToDo(t *testing.T) {
	g := NewWithT(t)
	of := declared(t)
	g.Expect(of).NotTo(BeEmpty())
	for reason, constant := range of {
		g.Expect(reasons).To(HaveKey(reason), "%s is missing in reasons.go", constant)
		g.Expect(WhatToDo(reason)).To(MatchRegexp(`^[A-Z][^|]{3,199}[^.]$`), "%s: a sentence of at most 200 characters without its full stop", constant)
	}
	g.Expect(reasons).To(HaveLen(len(of)))
}

func TestEveryReasonIsGivenSomewhere(t *testing.T) {
	g, named := NewWithT(t), map[string]bool{}
	word := regexp.MustCompile(`\bReason\w+`)
	g.Expect(filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || path == "../../engine/node/reasons.go" {
			return err
		}
		text, err := os.ReadFile(path)
		for _, name := range word.FindAllString(string(text), -1) {
			named[name] = true
		}
		return err
	})).To(Succeed())
	for reason, constant := range declared(t) {
		g.Expect(named).To(HaveKey(constant), "no code gives the reason %s", reason)
	}
}
