// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package guides

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"slices"
	"strings"
)

// ItemKind is what an item of a guide's text is.
type ItemKind string

// The kinds of items.
const (
	Command  ItemKind = "command"
	Document ItemKind = "document" // YAML: an object, a part of one, or a file that the guide includes
	Output   ItemKind = "output"   // what the guide shows as a result
	Note     ItemKind = "note"     // what the guide sets apart: a note or a warning
)

// Item is a command, a document, an output or a note in a guide's text. It names its place and not its text, which is
// not ours.
type Item struct {
	Line int      `json:"line"`
	Kind ItemKind `json:"kind"`
	// Mark tells one text from another: the begin of the SHA-256 of its words.
	Mark string `json:"mark"`
}

// Index lists the items of a guide's text, which is stored elsewhere.
type Index struct {
	// Lines is the number of lines of the text.
	Lines int    `json:"lines"`
	Items []Item `json:"items"`
}

// block is a part of a text that is set apart by fences, by a directive or by its form.
type block struct {
	line     int // of its first line
	language string
	lines    []string
}

// Read finds the items of a text in Markdown or reStructuredText.
func Read(text string) Index {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	index := Index{Lines: len(lines)}
	for at := 0; at < len(lines); {
		b, next := blockAt(lines, at)
		switch {
		case next == at:
			at++
			continue
		case b.language == noteLanguage:
			index.add(b.line, Note, b.lines)
		case b.language == includeLanguage:
			index.add(b.line, included(b.lines[0]), b.lines)
		case len(words(b.lines)) > 0:
			index.block(b)
		}
		at = next
	}
	return index
}

const (
	noteLanguage    = "note"
	includeLanguage = "include"
)

var (
	fence       = regexp.MustCompile("^\\s*```\\s*(\\w*)")
	directive   = regexp.MustCompile(`^(\s*)\.\. (code-block|literalinclude)::\s*(\S*)`)
	note        = regexp.MustCompile(`(?i)^\s*(\.\. (note|warning|important)::|!!! (note|warning)|>\s*NOTE)`)
	option      = regexp.MustCompile(`^\s*:[\w-]+:`)
	bareObject  = regexp.MustCompile(`^apiVersion:`)
	prompt      = regexp.MustCompile(`^\s*(\$|[\w.-]+@[\w.-]+:\S*[$#])\s+(.*)$`)
	program     = regexp.MustCompile(`^\s*(kubectl|oc|helm|sudo|cat|tail|docker|openstack)\s`)
	assignment  = regexp.MustCompile(`^\s*[A-Za-z_]+=(\$\(|\S+$)`)
	heredoc     = regexp.MustCompile(`<<-?\s*'?(\w+)'?`)
	keyAndValue = regexp.MustCompile(`^\s*(- )?[\w./-]+:(\s|$)|^\s*- \S`)
)

// blockAt is the block that begins at a line, and the line after it. The same line: none begins there.
func blockAt(lines []string, at int) (block, int) {
	line := lines[at]
	if m := fence.FindStringSubmatch(line); m != nil {
		end := at + 1
		for end < len(lines) && !fence.MatchString(lines[end]) {
			end++
		}
		return block{line: at + 2, language: m[1], lines: lines[at+1 : min(end, len(lines))]}, end + 1
	}
	if m := directive.FindStringSubmatch(line); m != nil {
		if m[2] == "literalinclude" {
			return block{line: at + 1, language: includeLanguage, lines: []string{m[3]}}, at + 1
		}
		return indented(lines, at, len(m[1]), m[3])
	}
	if note.MatchString(line) {
		return block{line: at + 1, language: noteLanguage, lines: []string{line}}, at + 1
	}
	if bareObject.MatchString(line) {
		end := at
		for end < len(lines) && (strings.TrimSpace(lines[end]) == "" || keyAndValue.MatchString(lines[end])) {
			end++
		}
		return block{line: at + 1, language: "yaml", lines: lines[at:end]}, end
	}
	return block{}, at
}

// indented is the block of a directive: the lines after it that are indented further.
func indented(lines []string, at, indent int, language string) (block, int) {
	begin := at + 1
	for begin < len(lines) && (strings.TrimSpace(lines[begin]) == "" || option.MatchString(lines[begin])) {
		begin++
	}
	end := begin
	for end < len(lines) && (strings.TrimSpace(lines[end]) == "" || len(lines[end])-len(strings.TrimLeft(lines[end], " ")) > indent) {
		end++
	}
	return block{line: begin + 1, language: language, lines: lines[begin:end]}, end
}

// block adds the items of a block: its commands with the documents that they hold, or else one document or output.
func (x *Index) block(b block) {
	prompts := slices.ContainsFunc(b.lines, prompt.MatchString)
	commands := false
	for at := 0; at < len(b.lines); {
		line := b.lines[at]
		is := prompt.MatchString(line)
		if !prompts && b.language != "yaml" {
			is = program.MatchString(line) || assignment.MatchString(line)
		}
		if !is {
			at++
			continue
		}
		commands = true
		at = x.command(b, at)
	}
	if commands {
		return
	}
	first := b.line
	for len(b.lines) > 0 && strings.TrimSpace(b.lines[0]) == "" {
		b.lines, first = b.lines[1:], first+1
	}
	x.add(first, kindOf(b), b.lines)
}

// command adds the command that begins at a line of a block, with those lines that continue it, and the document that it holds.
func (x *Index) command(b block, at int) (next int) {
	end := at
	for end+1 < len(b.lines) && (strings.HasSuffix(strings.TrimRight(b.lines[end], " "), `\`) || b.lines[end] == "") && b.lines[end] != "" {
		end++
	}
	x.add(b.line+at, Command, b.lines[at:end+1])
	m := heredoc.FindStringSubmatch(b.lines[at])
	if m == nil {
		return end + 1
	}
	begin := end + 1
	for end = begin; end < len(b.lines) && strings.TrimSpace(b.lines[end]) != m[1]; {
		end++
	}
	if begin < end && strings.TrimSpace(b.lines[begin]) == "---" {
		begin++
	}
	x.add(b.line+begin, Document, b.lines[begin:min(end, len(b.lines))])
	return end + 1
}

func kindOf(b block) ItemKind {
	if b.language == "yaml" {
		return Document
	}
	for _, line := range b.lines {
		trimmed := strings.TrimSpace(line)
		switch {
		case trimmed == "", trimmed == "...", trimmed == "---", strings.HasPrefix(trimmed, "#"):
		case keyAndValue.MatchString(line):
			return Document
		default:
			return Output
		}
	}
	return Output
}

// included is the kind of a file that a guide includes.
func included(path string) ItemKind {
	if strings.HasSuffix(path, ".yaml") {
		return Document
	}
	return Output
}

func (x *Index) add(line int, kind ItemKind, lines []string) {
	sum := sha256.Sum256([]byte(strings.Join(words(lines), " ")))
	x.Items = append(x.Items, Item{Line: line, Kind: kind, Mark: hex.EncodeToString(sum[:4])})
}

func words(lines []string) []string { return strings.Fields(strings.Join(lines, "\n")) }
