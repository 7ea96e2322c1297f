// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// guides FOLDER writes the indexes of the guides' texts in test/e2e/guides, from files there whose names begin with the case files' numbers. It runs at
// the top of the repository.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

const cases = "test/e2e/guides"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "guides:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("name the folder of the texts")
	}
	all, err := guides.All()
	if err != nil {
		return err
	}
	return writeIndexes(all, args[0])
}

func writeIndexes(all []guides.Guide, texts string) error {
	for i := range all {
		number, _, _ := strings.Cut(all[i].Name, "-")
		found, err := filepath.Glob(filepath.Join(texts, number+"*"))
		if err != nil || len(found) != 1 {
			return fmt.Errorf("%d texts in %s begin with %s, not 1: %w", len(found), texts, number, err)
		}
		text, err := os.ReadFile(found[0]) //nolint:gosec // named by who runs it
		if err != nil {
			return err
		}
		index := []byte(indexOf(guides.Read(string(text))))
		if err := os.WriteFile(filepath.Join(cases, "index", all[i].Name+".yaml"), index, 0o644); err != nil { //nolint:gosec // a source
			return err
		}
	}
	return nil
}

// indexOf writes an index, an item in a line.
func indexOf(x guides.Index) string {
	var b strings.Builder
	b.WriteString("# Written by hack/guides from the guide's text: where its commands, documents, outputs and notes stand.\n")
	fmt.Fprintf(&b, "lines: %d\nitems:\n", x.Lines)
	for _, i := range x.Items {
		fmt.Fprintf(&b, "- {line: %d, kind: %s, mark: %q}\n", i.Line, i.Kind, i.Mark)
	}
	return b.String()
}
