// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package format holds what the text of messages has in common: lists of names, cut texts and times of day.
package format

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Cut makes a text at most so many characters long.
func Cut(s string, most int) string {
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most-1]) + "…"
}

// MostMessage is how long the message of a condition, of an Event or of status.pending may be, in characters.
const MostMessage = 200

// Message is a text as conditions, Events and status.pending have it: it begins with a capital letter, and of a long one
// the middle is left out, since its end says what to do. What it lists is in status.rollout of the GPUNode.
func Message(s string) string {
	return shorten(Sentence(strings.ToValidUTF8(s, "�")), MostMessage)
}

// shorten leaves out the middle of a text that is longer than so many characters: first of long names, which a tenant can
// give a pod.
func shorten(s string, most int) string {
	const mark, leastBegin = " … ", 40
	if utf8.RuneCountInString(s) > most {
		s = shortNames(s)
	}
	if utf8.RuneCountInString(s) <= most || most < leastBegin {
		return Cut(s, most)
	}
	end := ""
	if at := lastClause(s); at > 0 && utf8.RuneCountInString(s[at:]) <= most-leastBegin {
		s, end = s[:at], s[at:]
	}
	room := min(most-utf8.RuneCountInString(mark+end), utf8.RuneCountInString(s))
	begin := strings.TrimRight(string([]rune(s)[:room]), " ")
	if at := strings.LastIndex(begin, " "); at > len(begin)/2 {
		begin = begin[:at]
	}
	return strings.TrimRight(begin+mark+end, " ")
}

func shortNames(s string) string {
	const most, begin, end = 63, 40, 20 // characters
	words := strings.Split(s, " ")
	for i, word := range words {
		if runes := []rune(word); len(runes) > most {
			words[i] = string(runes[:begin]) + "…" + string(runes[len(runes)-end:])
		}
	}
	return strings.Join(words, " ")
}

// lastClause is where the last clause of a text begins; 0 if it has only one. That of errors which wrap each other is the
// cause.
func lastClause(s string) int {
	for _, between := range [][]string{{"; ", ". "}, {": "}} {
		at := -1
		for _, b := range between {
			at = max(at, strings.LastIndex(s, b))
		}
		if at >= 0 {
			return at + len("; ")
		}
	}
	return 0
}

// Sentence begins a text with a capital letter, unless it begins with a name, such as nvidia-smi or gpuSelector.
func Sentence(s string) string {
	first, _, _ := strings.Cut(s, " ")
	for _, r := range strings.TrimRight(first, ",:;") {
		if !unicode.IsLower(r) {
			return s
		}
	}
	r, size := utf8.DecodeRuneInString(s)
	if size == 0 {
		return s
	}
	return string(unicode.ToUpper(r)) + s[size:]
}

// Fit joins clauses into a text of so many characters: those that fit, and what rest says of those from the i-th on that
// do not. Of the first the middle is left out if it is too long.
func Fit(clauses []string, most int, rest func(i int) string) (said string) {
	if whole := strings.Join(clauses, "; "); utf8.RuneCountInString(whole) <= most {
		return whole
	}
	for i, clause := range clauses {
		next, tail := clause, ""
		if i > 0 {
			next = said + "; " + clause
		}
		if i+1 < len(clauses) {
			tail = "; " + rest(i+1)
		}
		switch fits := utf8.RuneCountInString(next+tail) <= most; {
		case i == 0 && !fits:
			return shorten(clause, most-utf8.RuneCountInString(tail)) + tail
		case !fits:
			return said + "; " + rest(i)
		}
		said = next
	}
	return said
}

// End is the end of an error that another program gives, at most so many characters: what came of it, and not where.
func End(s string, most int) string {
	runes := []rune(s)
	if len(runes) <= most {
		return s
	}
	end := string(runes[len(runes)-most+1:])
	if _, words, several := strings.Cut(end, " "); several && len(words) > len(end)/2 {
		end = " " + words // no part of a word
	}
	return "…" + end
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
	const most = 100 // characters: half of a message
	return ListIn(names, most)
}

// ListIn is List in so many characters, and at least one name.
func ListIn(names []string, most int) string {
	const mostNames = 8
	for n := min(len(names), mostNames); n > 0; n-- {
		if text := Few(names, n); n == 1 || utf8.RuneCountInString(text) <= most {
			return text
		}
	}
	return ""
}

// Few are the first of many names, and how many others there are.
func Few(names []string, most int) string {
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

// Beside adds to a message what is not its point, if there is room for it: a message ends with what to do.
func Beside(message, also string) string {
	if whole := message + "; " + also; also != "" && utf8.RuneCountInString(whole) <= MostMessage {
		return whole
	}
	return message
}

// Clock is a time of day as messages tell it.
func Clock(at time.Time) string { return at.UTC().Format("15:04:05") + " UTC" }
