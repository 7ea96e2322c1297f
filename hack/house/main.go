// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// house counts what the product weighs and how its packages hang together, and fails where a figure is above its bound.
// It runs at the top of the repository. A change that needs a higher bound raises it in bounds, and says why in its
// commit.
//
//	files below internal cmd api hack test docs → counts → a line each: figure, bound, what it is
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// bounds are the figures that were reached, in the order in which they are shown, each with what it counts.
var bounds = []bound{
	{"KB of Go in internal, without tests", 2335},
	{"KB of Go in internal, cmd, api and hack, without tests", 2723},
	{"KB of tests and of test", 4879},
	{"rooms: folders of internal", 7},
	{"arrows between rooms", 16},
	{"packages of internal", 40},
	{"arrows between packages of internal", 150},
	{"floors: packages of internal on the longest way down", 10},
	{"lines of the longest function of internal", 60},
	{"files of internal/engine on the way of one node", 40},
	{"words of docs/architecture.md", 1950},
	{"words of docs/dev", 15200},
	{"words of docs for users, with architecture.md and without generated pages", 15000},
	{"words of README.md", 902},
}

type bound struct {
	what string
	most int
}

func main() {
	figures, err := count(os.DirFS("."))
	if err != nil {
		fmt.Fprintln(os.Stderr, "house:", err)
		os.Exit(1)
	}
	if over := show(os.Stdout, figures); over > 0 {
		fmt.Fprintf(os.Stderr, "house: %d figures are above their bounds (hack/house/main.go). Take something out, or raise the bound and say why in the commit\n", over)
		os.Exit(1)
	}
}

// show prints each figure with its bound, and returns how many are above it.
func show(out io.Writer, figures []int) (over int) {
	for i, b := range bounds {
		mark := ""
		if figures[i] > b.most {
			mark, over = "over: ", over+1
		}
		_, _ = fmt.Fprintf(out, "%6d of %6d  %s%s\n", figures[i], b.most, mark, b.what)
	}
	return over
}

// count returns the figures in the order of bounds.
func count(root fs.FS) ([]int, error) {
	t := tree{root: root, fset: token.NewFileSet(), files: map[string]*ast.File{}, sizes: map[string]int{}, words: map[string]int{}}
	for _, folder := range []string{"internal", "cmd", "api", "hack", "test", "docs", "README.md"} {
		if err := fs.WalkDir(root, folder, t.add); err != nil {
			return nil, err
		}
	}
	imports := t.imports()
	rooms, between, arrows, floors := map[string]bool{}, map[string]bool{}, 0, 0
	for p, of := range imports {
		rooms[room(p)] = true
		arrows += len(of)
		floors = max(floors, floor(imports, p))
		for _, q := range of {
			if room(p) != room(q) {
				between[room(p)+" "+room(q)] = true
			}
		}
	}
	internal, product, tests := 0, 0, 0
	for name, size := range t.sizes {
		switch {
		case strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "test/"):
			tests += size
		case strings.HasPrefix(name, "internal/"):
			internal += size
			product += size
		default:
			product += size
		}
	}
	user, dev := 0, 0
	for name, n := range t.words {
		switch {
		case strings.HasPrefix(name, "docs/dev/"):
			dev += n
		case name != "README.md" && !slices.Contains([]string{"docs/api.md", "docs/reference.md", "docs/troubleshooting.md"}, name):
			user += n
		}
	}
	return []int{
		internal / 1000, product / 1000, tests / 1000,
		len(rooms), len(between), len(imports), arrows, floors,
		t.longest(), len(t.way("internal/engine/node", "Decide")),
		t.words["docs/architecture.md"], dev, user, t.words["README.md"],
	}, nil
}

// tree is what is read of the repository.
type tree struct {
	root  fs.FS
	fset  *token.FileSet
	files map[string]*ast.File // of internal, without tests
	sizes map[string]int       // of Go files that are written by hand, in bytes
	words map[string]int       // of documents
}

// generated are the parts of documents that are made from the code.
var generated = regexp.MustCompile(`(?s)<!-- BEGIN: generated.*?<!-- END: generated -->`)

const module = "github.com/gpusharing/gpu-sharing-operator/"

func (t *tree) add(name string, entry fs.DirEntry, err error) error {
	if err != nil || entry.IsDir() {
		if entry != nil && entry.IsDir() && (entry.Name() == "testdata" || entry.Name() == "applyconfiguration") {
			return fs.SkipDir
		}
		return err
	}
	goes, document := strings.HasSuffix(name, ".go") && !strings.HasPrefix(path.Base(name), "zz_generated"), strings.HasSuffix(name, ".md")
	if !goes && !document {
		return nil
	}
	text, err := fs.ReadFile(t.root, name)
	switch {
	case err != nil:
		return err
	case document:
		t.words[name] = len(strings.Fields(generated.ReplaceAllString(string(text), "")))
		return nil
	}
	t.sizes[name] = len(text)
	if !strings.HasPrefix(name, "internal/") || strings.HasSuffix(name, "_test.go") {
		return nil
	}
	t.files[name], err = parser.ParseFile(t.fset, name, text, parser.ParseComments)
	return err
}

// imports are, of each package of internal, those of internal that it imports.
func (t *tree) imports() map[string][]string {
	all := map[string][]string{}
	for name, f := range t.files {
		p := path.Dir(name)
		all[p] = append(all[p], importsOf(f)...)
	}
	for p, of := range all {
		slices.Sort(of)
		all[p] = slices.Compact(of)
	}
	return all
}

func importsOf(f *ast.File) (of []string) {
	for _, i := range f.Imports {
		if p, err := strconv.Unquote(i.Path.Value); err == nil && strings.HasPrefix(p, module+"internal/") {
			of = append(of, strings.TrimPrefix(p, module))
		}
	}
	return of
}

func room(p string) string { return strings.Split(p, "/")[1] }

// floor is how many packages lie on the longest way from a package down, itself included.
func floor(imports map[string][]string, p string) int {
	below := 0
	for _, q := range imports[p] {
		below = max(below, floor(imports, q))
	}
	return below + 1
}

// reach are a package and all that it imports, directly or not.
func reach(imports map[string][]string, p string) map[string]bool {
	all := map[string]bool{p: true}
	for _, q := range imports[p] {
		maps.Copy(all, reach(imports, q))
	}
	return all
}

func (t *tree) longest() (lines int) {
	for _, f := range t.files {
		for _, d := range f.Decls {
			if d, is := d.(*ast.FuncDecl); is {
				lines = max(lines, t.fset.Position(d.End()).Line-t.fset.Position(d.Pos()).Line+1)
			}
		}
	}
	return lines
}

// way are the files of internal/engine with functions that a function may call, and those that they may. Methods are
// told by their names alone, in the packages that its package may reach, so there are at most as many.
func (t *tree) way(from, name string) []string {
	w := walk{tree: t, declared: map[function][]*ast.FuncDecl{}, fileOf: map[*ast.FuncDecl]string{}, seen: map[function]bool{}, files: map[string]bool{}}
	below := reach(t.imports(), from)
	for file, f := range t.files {
		if strings.HasPrefix(file, "internal/engine/") && below[path.Dir(file)] {
			w.declare(file, f)
		}
	}
	w.follow(function{from, name})
	return slices.Sorted(maps.Keys(w.files))
}

// function names functions of a folder, or all methods of a name: they have no folder.
type function struct{ folder, name string }

type walk struct {
	*tree

	declared map[function][]*ast.FuncDecl
	fileOf   map[*ast.FuncDecl]string
	seen     map[function]bool
	files    map[string]bool
}

func (w *walk) declare(file string, f *ast.File) {
	for _, d := range f.Decls {
		d, is := d.(*ast.FuncDecl)
		if !is {
			continue
		}
		of := function{path.Dir(file), d.Name.Name}
		if d.Recv != nil {
			of.folder = ""
		}
		w.declared[of], w.fileOf[d] = append(w.declared[of], d), file
	}
}

func (w *walk) follow(f function) {
	if w.seen[f] {
		return
	}
	w.seen[f] = true
	for _, d := range w.declared[f] {
		w.files[w.fileOf[d]] = true
		if d.Body != nil {
			w.read(d.Body, w.fileOf[d])
		}
	}
}

// read follows all that the body of a function of a file names.
func (w *walk) read(body *ast.BlockStmt, file string) {
	folders := map[string]string{}
	for _, p := range importsOf(w.tree.files[file]) {
		folders[path.Base(p)] = p
	}
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			w.follow(function{"", n.Sel.Name})
			if x, is := n.X.(*ast.Ident); is && folders[x.Name] != "" {
				w.follow(function{folders[x.Name], n.Sel.Name})
			}
		case *ast.Ident:
			w.follow(function{path.Dir(file), n.Name})
		}
		return true
	})
}
