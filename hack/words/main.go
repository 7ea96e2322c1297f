// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// words finds the words that docs/dev/language.md replaces: in comments, strings and names of Go files, and in docs,
// manifests and scripts, and messages of conditions and Events that are not as that page asks. It runs at the top of the repository, reads the names of the files from stdin, and ends with 1
// if it finds any.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// word is one that is not to be written, as a pattern, and what to write instead.
type word struct {
	pattern *regexp.Regexp
	instead string
}

var words = sync.OnceValue(func() []word {
	of := func(pattern, instead string) word {
		return word{regexp.MustCompile(`(?i)\b(` + pattern + `)\b`), instead}
	}
	return []word{
		of(`wish(es|ed)?`, "desired, desired state, spec"),
		of(`shall`, "must, will, is expected to"),
		of(`somebody|whoever`, "another controller, a user, an administrator"),
		of(`in the way`, "blocks, blocker"),
		of(`nudg(e|es|ed|ing)`, "trigger a sync of the pod's volumes"),
		of(`daemon sets?`, "DaemonSet"),
		of(`put(s|ting)? back`, "restore, roll back"),
		of(`quiesc(e|es|ed|ing)`, "drain"),
		of(`as the policy asks`, "in the desired state"),
		of(`as (it|they) (was|were) found`, "baseline, former state"),
	}
})

// inName is where a part of a name in camel case begins.
var inName = regexp.MustCompile(`([a-z0-9])([A-Z])`)

// parts are the words of a name in Go. DaemonSet is one, however its first letter is written.
func parts(name string) string {
	return strings.ReplaceAll(inName.ReplaceAllString(name, "$1 $2"), "aemon Set", "aemonSet")
}

// lineEnd is the end of a line, with what begins the next one in a comment.
var lineEnd = regexp.MustCompile(`[ \t]*\n[ \t]*(//|#)?[ \t]*`)

// excepted are the folders and files, each with what is left there. The list is to shrink: one without a finding is
// reported too.
func excepted() map[string]string {
	return map[string]string{
		"docs/dev/language.md": "names the words",
		"hack/words":           "names the words",
	}
}

// generated are made from other files, in which the words are found.
func generated(file string) bool {
	return strings.Contains(file, "zz_generated") || slices.ContainsFunc([]string{
		"api/v1alpha1/applyconfiguration/", "config/crd/", "config/bundle/", "config/helm/files/", "docs/api.md", "docs/reference.md",
	}, func(folder string) bool { return strings.HasPrefix(file, folder) })
}

// finding is a word in a line of a file.
type finding struct {
	file string
	line int
	word string
	of   word
}

func main() {
	problems, err := checkListed(os.Stdin)
	if err != nil {
		fmt.Fprintln(os.Stderr, "words:", err)
		os.Exit(1)
	}
	for _, problem := range problems {
		fmt.Fprintln(os.Stderr, problem)
	}
	if len(problems) > 0 {
		fmt.Fprintln(os.Stderr, "words: docs/dev/language.md says which words to write")
		os.Exit(1)
	}
}

// checkListed checks the files whose names it reads, one on each line.
func checkListed(names io.Reader) ([]string, error) {
	list, err := io.ReadAll(names)
	if err != nil {
		return nil, fmt.Errorf("reading the names of the files: %w", err)
	}
	return check(strings.Fields(string(list)), os.ReadFile)
}

// check lists what is wrong with the words of files: each finding outside of the exceptions, and each exception without
// one.
func check(files []string, read func(string) ([]byte, error)) ([]string, error) {
	var problems []string
	needed := map[string]bool{}
	for _, file := range files {
		if !text(file) || generated(file) {
			continue
		}
		content, err := read(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted, and not committed yet
		}
		if err != nil {
			return nil, err
		}
		messages, err := checkMessages(file, content)
		if err != nil {
			return nil, err
		}
		problems = append(problems, messages...)
		for _, f := range find(file, content) {
			if folder := exception(file); folder != "" {
				needed[folder] = true
				continue
			}
			problems = append(problems, fmt.Sprintf("%s:%d: %q: write %s", f.file, f.line, f.word, f.of.instead))
		}
	}
	for folder := range excepted() {
		if !needed[folder] {
			problems = append(problems, folder+": has no such word any more; remove it from the exceptions of hack/words")
		}
	}
	slices.Sort(problems)
	return problems, nil
}

// text reports whether people read the file.
func text(file string) bool {
	return slices.Contains([]string{".go", ".md", ".yaml", ".yml", ".sh", ".tpl", ".txt"}, path.Ext(file)) ||
		slices.Contains([]string{"Makefile", "Dockerfile", "run"}, path.Base(file))
}

// exception is the folder or file in the exceptions to which a file belongs; empty if there is none.
func exception(file string) string {
	for folder := range excepted() {
		if file == folder || strings.HasPrefix(file, folder+"/") {
			return folder
		}
	}
	return ""
}

// find lists the words in a file; of Go files in comments, strings and names.
func find(file string, content []byte) []finding {
	var found []finding
	if path.Ext(file) != ".go" {
		return findIn(found, file, 1, string(content))
	}
	files := token.NewFileSet()
	of := files.AddFile(file, -1, len(content))
	var s scanner.Scanner
	s.Init(of, content, nil, scanner.ScanComments)
	comment, first, last := "", 0, 0 // line comments below each other are one text
	for {
		position, kind, literal := s.Scan()
		line := files.Position(position).Line
		if kind == token.COMMENT && comment != "" && line == last+1 {
			comment, last = comment+"\n"+literal, line
			continue
		}
		if kind == token.SEMICOLON && literal == "\n" {
			continue
		}
		found = findIn(found, file, first, comment)
		comment = ""
		if kind == token.EOF {
			return found
		}
		if kind == token.COMMENT {
			comment, first, last = literal, line, line+strings.Count(literal, "\n")
		}
		switch kind { //nolint:exhaustive // nothing else has words
		case token.STRING:
			found = findIn(found, file, line, literal)
		case token.IDENT:
			found = findIn(found, file, line, parts(literal))
		}
	}
}

func findIn(found []finding, file string, first int, text string) []finding {
	// A phrase may be broken by the end of a line, and by what begins a line of a comment.
	joined := lineEnd.ReplaceAllStringFunc(text, func(end string) string {
		return " " + strings.Repeat("\x00", len(end)-1)
	})
	plain := strings.ReplaceAll(joined, "\x00", "")
	for _, w := range words() {
		for _, at := range w.pattern.FindAllStringIndex(plain, -1) {
			found = append(found, finding{file, first + linesBefore(joined, text, at[0]), plain[at[0]:at[1]], w})
		}
	}
	slices.SortFunc(found, func(a, b finding) int { return cmp.Or(cmp.Compare(a.file, b.file), cmp.Compare(a.line, b.line)) })
	return found
}

// linesBefore counts the ends of lines in text before the plain-th byte of joined that is not padding.
func linesBefore(joined, text string, plain int) int {
	for i := range len(joined) {
		if joined[i] == 0 {
			continue
		}
		if plain == 0 {
			return strings.Count(text[:i], "\n")
		}
		plain--
	}
	return strings.Count(text, "\n")
}
