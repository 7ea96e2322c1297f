// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package guides_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/guides"
)

const (
	top = "../../.." // of the repository
	// textsVariable is a folder with the texts of the guides, which are not in the repository. Their names begin with
	// the numbers of the case files.
	textsVariable = "GUIDES"
	// most is how many commands, documents, outputs and notes one entry may be about.
	most = 4
)

func all(t *testing.T) []guides.Guide {
	t.Helper()
	all, err := guides.All()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(all).To(HaveLen(5))
	return all
}

// each runs a test for each entry of the guides.
func each(t *testing.T, check func(*WithT, *guides.Entry)) {
	t.Helper()
	for _, g := range all(t) {
		for i := range g.Entries {
			e := &g.Entries[i]
			t.Run(fmt.Sprintf("%s/%d, lines %s", g.Name, i+1, e.Lines), func(t *testing.T) { check(NewWithT(t), e) })
		}
	}
}

// TestNothingOfAGuideIsLeftOut: each command, document, output and note of a guide's text has an entry, in the order of
// the text.
func TestNothingOfAGuideIsLeftOut(t *testing.T) {
	for _, g := range all(t) {
		t.Run(g.Name, func(t *testing.T) {
			index, err := g.Index()
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(index.Items).NotTo(BeEmpty())
			covered := map[int]bool{}
			last := 0
			for i := range g.Entries {
				e := &g.Entries[i]
				from, to, err := e.Range()
				NewWithT(t).Expect(err).NotTo(HaveOccurred())
				if from < last || to > index.Lines {
					t.Errorf("entry %d, lines %s: it comes after line %d, and the text has %d lines", i+1, e.Lines, last, index.Lines)
				}
				last = from
				items := 0
				for _, item := range index.Items {
					if from <= item.Line && item.Line <= to {
						covered[item.Line] = true
						items++
					}
				}
				if items > most {
					t.Errorf("entry %d, lines %s: %d commands, documents, outputs and notes; make several entries of it", i+1, e.Lines, items)
				}
			}
			for _, item := range index.Items {
				if !covered[item.Line] {
					t.Errorf("the %s at line %d has no entry", item.Kind, item.Line)
				}
			}
		})
	}
}

// TestEachEntryIsReplayedOrNotOurs: nothing is left out in silence.
func TestEachEntryIsReplayedOrNotOurs(t *testing.T) {
	each(t, func(g *WithT, e *guides.Entry) {
		ways := map[string]bool{
			"not ours": e.NotOurs != "", "a spec": len(e.Spec) > 0, "a test": e.Test != "", "with another": e.With != "", "replayed": e.Replayed(),
		}
		var found []string
		for way, is := range ways {
			if is {
				found = append(found, way)
			}
		}
		g.Expect(found).To(HaveLen(1), "it is replayed by itself, in a spec, in a test or with another entry, or it is not ours")
		g.Expect(e.Is).To(BeElementOf(guides.Step, guides.Check, guides.Caveat, guides.Observation))
		g.Expect(e.Guide).NotTo(BeEmpty())
		if e.NotOurs != "" {
			g.Expect(e.See).NotTo(BeEmpty(), "where does the reader find it?")
			g.Expect(e.Here).To(BeEmpty())
			return
		}
		g.Expect(e.See).To(BeEmpty())
		g.Expect(e.Here).NotTo(BeEmpty())
	})
}

// TestAnotherEntryIsReplayed, where an entry names it.
func TestAnotherEntryIsReplayed(t *testing.T) {
	for _, g := range all(t) {
		replayed := map[string]bool{}
		for i := range g.Entries {
			replayed[g.Entries[i].Lines] = g.Entries[i].Replayed()
		}
		for i := range g.Entries {
			if with := g.Entries[i].With; with != "" && !replayed[with] {
				t.Errorf("%s, entry %d: no entry with the lines %s is replayed", g.Name, i+1, with)
			}
		}
	}
}

// TestSpecsExist: an entry that names a spec names one of `make e2e`, and a test one of `make test`, with the reason.
func TestSpecsExist(t *testing.T) {
	specs := specsOf(t)
	each(t, func(g *WithT, e *guides.Entry) {
		for _, spec := range e.Spec {
			g.Expect(specs[spec]).To(BeTrue(), "no spec of make e2e is called %q", spec)
		}
		if e.Test != "" {
			g.Expect(e.Alone).NotTo(BeEmpty(), "why does make e2e not replay it?")
			folder, name, _ := strings.Cut(e.Test, " ")
			g.Expect(tests(g, folder)).To(ContainElement(name))
		}
	})
}

// specsOf are the texts of the specs of `make e2e`: what It and Describe are called with, and the titles of those that
// are made in a loop. A spec that is pending is none.
func specsOf(t *testing.T) map[string]bool {
	t.Helper()
	g := NewWithT(t)
	files, err := filepath.Glob(filepath.Join("..", "*_test.go"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(files).NotTo(BeEmpty())
	found := map[string]bool{}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		g.Expect(err).NotTo(HaveOccurred())
		ast.Inspect(parsed, func(n ast.Node) bool {
			if literal, is := textOf(n).(*ast.BasicLit); is && literal.Kind == token.STRING {
				if text, err := strconv.Unquote(literal.Value); err == nil {
					found[text] = true
				}
			}
			return true
		})
	}
	return found
}

// textOf is the text of a spec; nil: the node is none.
func textOf(n ast.Node) ast.Expr {
	switch n := n.(type) {
	case *ast.CallExpr:
		if called, is := n.Fun.(*ast.Ident); is && (called.Name == "It" || called.Name == "Describe") && len(n.Args) > 0 {
			return n.Args[0]
		}
	case *ast.KeyValueExpr:
		if key, is := n.Key.(*ast.Ident); is && key.Name == "title" {
			return n.Value
		}
	}
	return nil
}

// tests are the names of the tests in a folder.
func tests(g *WithT, folder string) []string {
	files, err := filepath.Glob(filepath.Join(top, folder, "*_test.go"))
	g.Expect(err).NotTo(HaveOccurred())
	var names []string
	for _, file := range files {
		source, err := os.ReadFile(file)
		g.Expect(err).NotTo(HaveOccurred())
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(source, -1) {
			names = append(names, string(m[1]))
		}
	}
	return names
}

// TestTheReaderFindsWhatIsNotOurs: the document exists, and has the headline.
func TestTheReaderFindsWhatIsNotOurs(t *testing.T) {
	each(t, func(g *WithT, e *guides.Entry) {
		if e.See == "" {
			return
		}
		file, headline, named := strings.Cut(e.See, "#")
		document, err := os.ReadFile(filepath.Join(top, file))
		g.Expect(err).NotTo(HaveOccurred())
		if named {
			g.Expect(anchors(string(document))).To(ContainElement(headline))
		}
	})
}

// anchors are those of a document's headlines, as GitHub makes them.
func anchors(document string) []string {
	var found []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(document, -1) {
		kept := regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(m[1]), "")
		found = append(found, strings.ReplaceAll(kept, " ", "-"))
	}
	return found
}

// TestIndexesAreThoseOfTheTexts, where the texts are.
func TestIndexesAreThoseOfTheTexts(t *testing.T) {
	folder := os.Getenv(textsVariable)
	if folder == "" {
		t.Skip("set " + textsVariable + " to the folder with the guides' texts")
	}
	for _, guide := range all(t) {
		g := NewWithT(t)
		number, _, _ := strings.Cut(guide.Name, "-")
		found, err := filepath.Glob(filepath.Join(folder, number+"*"))
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(found).To(HaveLen(1))
		text, err := os.ReadFile(found[0])
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(guide.Index()).To(Equal(guides.Read(string(text))), "go run ./hack/guides FOLDER writes the indexes anew")
	}
}

// TestReadFindsWhatAReaderTypes, in both markup languages.
func TestReadFindsWhatAReaderTypes(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"a command in fences":          {"Look:\n```bash\nkubectl get nodes\n```\n", []string{"3 command"}},
		"one that goes on":             {"```\nkubectl label node a \\\n  x=y\nkubectl get nodes\n```\n", []string{"2 command", "4 command"}},
		"with a prompt and its output": {"```\nme@host:~$ kubectl get pods\nNAME READY\noc  1/1\n```\n", []string{"2 command"}},
		"with an object":               {"```bash\ncat << EOF | kubectl apply -f -\n---\nkind: Pod\nEOF\nkubectl get pods\n```\n", []string{"2 command", "4 document", "6 command"}},
		"a document":                   {"- so:\n\n    ```yaml\n    kind: Pod\n    ```\n", []string{"4 document"}},
		"one without its language":     {"```\n# values\nmig:\n  strategy: mixed\n```\n", []string{"2 document"}},
		"one without fences":           {"text\napiVersion: v1\n\nkind: Pod\n\n- name: x\nThe end\n", []string{"2 document"}},
		"an output":                    {"```\n+-----+\n| GPU |\n```\n", []string{"2 output"}},
		"a directive":                  {"#. So:\n\n   .. code-block:: console\n      :emphasize-lines: 1\n\n      $ kubectl get \\\n          pods\n\n   text\n", []string{"6 command"}},
		"included files":               {".. literalinclude:: ./input/a.yaml\n   :language: yaml\n.. literalinclude:: ./output/a.txt\n", []string{"1 document", "3 output"}},
		"notes":                        {"> NOTE: x\n!!! warning\n    y\n.. note::\n\n    z\n", []string{"1 note", "2 note", "4 note"}},
		"nothing":                      {"Just text with `kubectl get nodes` in it.\n```\n\n```\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			var found []string
			for _, i := range guides.Read(test.text).Items {
				found = append(found, fmt.Sprintf("%d %s", i.Line, i.Kind))
			}
			NewWithT(t).Expect(found).To(Equal(test.want))
		})
	}
}

func TestMarksTellTextsApart(t *testing.T) {
	g := NewWithT(t)
	mark := func(text string) string { return guides.Read("```bash\n" + text + "\n```\n").Items[0].Mark }
	g.Expect(mark("kubectl get nodes")).To(Equal(mark("kubectl  get nodes ")))
	g.Expect(mark("kubectl get nodes")).NotTo(Equal(mark("kubectl get pods")))
}
