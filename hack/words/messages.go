// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"strconv"
	"strings"
	"unicode/utf8"
)

// mostMessage is how long a message may be: format.MostMessage of internal/kube/format.
const mostMessage = 200

// checkMessages lists what is wrong with what the operator reports in conditions and Events, in a Go file of its own:
//
//	a reason that is no constant of the API, so that the table of reasons (internal/engine/node/reasons.go) does not have it
//	an Event whose note has not passed format.Message
//	a condition that has not passed internal/kube/condition, which alone knows when it changed
//	a text that no message has room for
func checkMessages(file string, content []byte) ([]string, error) {
	reports := strings.HasPrefix(file, "internal/") && !strings.HasPrefix(file, "internal/cli/") // which prints, and reports nothing
	if !reports || path.Ext(file) != ".go" || strings.HasSuffix(file, "_test.go") {
		return nil, nil
	}
	files := token.NewFileSet()
	parsed, err := parser.ParseFile(files, file, content, parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("looking for messages: %w", err)
	}
	var problems []string
	add := func(at ast.Node, says string) {
		problems = append(problems, fmt.Sprintf("%s:%d: %s", file, files.Position(at.Pos()).Line, says))
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		checkReasons(add, n)
		checkDoors(add, file, n)
		text, is := n.(*ast.BinaryExpr)
		if !is {
			return true
		}
		literal, is := textOf(text)
		if length := utf8.RuneCountInString(literal); is && length > mostMessage {
			add(n, fmt.Sprintf("a text of %d characters: a message has %d at most", length, mostMessage))
		}
		return !is
	})
	return problems, nil
}

// checkDoors looks whether Events and conditions pass through the functions that know how they are written.
func checkDoors(add func(ast.Node, string), file string, n ast.Node) {
	switch n := n.(type) {
	case *ast.CallExpr:
		if of, is := n.Fun.(*ast.SelectorExpr); is && of.Sel.Name == "Eventf" && !isCall(n.Args[len(n.Args)-1], "format", "Message") {
			add(n, "an Event whose note has not passed format.Message")
		}
	case *ast.CompositeLit:
		if !strings.HasPrefix(file, "internal/kube/condition/") && isSelector(n.Type, "metav1", "Condition") && hasField(n, "LastTransitionTime") {
			add(n, "a condition with a time of its own: set it by internal/kube/condition")
		}
	}
}

// checkReasons looks whether a reason is a literal.
func checkReasons(add func(ast.Node, string), n ast.Node) {
	switch n := n.(type) {
	case *ast.KeyValueExpr:
		if key, is := n.Key.(*ast.Ident); is {
			checkField(add, key.Name, n.Value)
		}
	case *ast.AssignStmt:
		for i, to := range n.Lhs {
			if field, is := to.(*ast.SelectorExpr); is && len(n.Lhs) == len(n.Rhs) {
				checkField(add, field.Sel.Name, n.Rhs[i])
			}
		}
	}
}

func checkField(add func(ast.Node, string), name string, value ast.Expr) {
	if literal, is := value.(*ast.BasicLit); is && name == "Reason" && literal.Kind == token.STRING && literal.Value != `""` {
		add(value, "the reason "+literal.Value+" is a literal: declare it in api/v1alpha1, so that the table of reasons has it")
	}
}

// textOf is a text that is written in several parts.
func textOf(e ast.Expr) (text string, is bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, err == nil && e.Kind == token.STRING
	case *ast.BinaryExpr:
		left, isLeft := textOf(e.X)
		right, isRight := textOf(e.Y)
		return left + right, isLeft && isRight && e.Op == token.ADD
	}
	return "", false
}

func isSelector(e ast.Expr, of, name string) bool {
	s, is := e.(*ast.SelectorExpr)
	if !is || s.Sel.Name != name {
		return false
	}
	x, is := s.X.(*ast.Ident)
	return is && x.Name == of
}

func isCall(e ast.Expr, of, name string) bool {
	call, is := e.(*ast.CallExpr)
	return is && isSelector(call.Fun, of, name)
}

func hasField(of *ast.CompositeLit, name string) bool {
	for _, element := range of.Elts {
		if pair, is := element.(*ast.KeyValueExpr); is {
			if key, is := pair.Key.(*ast.Ident); is && key.Name == name {
				return true
			}
		}
	}
	return false
}
