// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// text collects lines that fit into a terminal.
type text struct {
	strings.Builder

	width int // columns; 0: as many as it takes
}

// row writes a line with a label in a column of its own. What does not fit into the width goes on below, indented as
// far.
func (t *text) row(indent int, label, content string) {
	const column = 13
	head := strings.Repeat(" ", indent)
	if label != "" {
		head += fmt.Sprintf("%-*s", column, label)
	}
	rest := strings.Repeat(" ", utf8.RuneCountInString(head))
	for _, line := range wrap(printable(content), t.width-len(rest)) {
		t.WriteString(strings.TrimRight(head+line, " ") + "\n")
		head = rest
	}
}

// printable is a text without what a terminal takes for commands: not all that is printed comes from the API server.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return utf8.RuneError
		}
		return r
	}, s)
}

// rows writes a label once, and a line for each content.
func (t *text) rows(label string, contents []string) {
	for _, content := range contents {
		t.row(2, label, content)
		label = strings.Repeat(" ", min(len(label), 1)) // the column stays, its text does not
	}
}

// wrap breaks a text at spaces into lines of at most so many characters; a word that is longer stays whole, so that it
// can be copied. A width below 20 is no width.
func wrap(s string, width int) []string {
	const least = 20
	if width < least || utf8.RuneCountInString(s) <= width {
		return []string{s}
	}
	var lines []string
	line := ""
	for word := range strings.SplitSeq(s, " ") {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= width:
			line += " " + word
		default:
			lines, line = append(lines, line), word
		}
	}
	return append(lines, line)
}

// fit makes a text exactly so many characters long.
func fit(s string, width int) string {
	if n := utf8.RuneCountInString(s); n <= width {
		return s + strings.Repeat(" ", width-n)
	}
	if width < 1 {
		return ""
	}
	return string([]rune(s)[:width-1]) + "~"
}

// resources lists extended resources with their counts.
func resources(counts map[string]int64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s: %d", name, counts[name]))
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

// alike are names of which the same is so, in the order in which that came up first.
type alike[T comparable] struct {
	order []T
	names map[T][]string
}

func (a *alike[T]) add(what T, name string) {
	if a.names == nil {
		a.names = map[T][]string{}
	}
	if a.names[what] == nil {
		a.order = append(a.order, what)
	}
	a.names[what] = append(a.names[what], name)
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
