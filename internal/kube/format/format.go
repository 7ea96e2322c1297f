// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package format

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Cut makes a text at most so many characters long.
func Cut(s string, most int) string {
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most-1]) + "…"
}

// CutBytes makes a text at most so many bytes long, as Events have a limit in bytes.
func CutBytes(s string, most int) string {
	if len(s) <= most {
		return s
	}
	end := most - len("…")
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + "…"
}

// First returns the first characters of a name that is no text for people, without a sign that it was cut.
func First(s string, most int) string {
	if runes := []rune(s); len(runes) > most {
		return string(runes[:most])
	}
	return s
}

// Join joins parts of a sentence: "a, b and c".
func Join(parts []string) string {
	if len(parts) < 2 {
		return strings.Join(parts, "")
	}
	return strings.Join(parts[:len(parts)-1], ", ") + " and " + parts[len(parts)-1]
}

// List joins names for a message, the first few of many.
func List(names []string) string {
	const most = 8
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

// Clock is a time of day as messages tell it.
func Clock(at time.Time) string { return at.UTC().Format("15:04:05") + " UTC" }
