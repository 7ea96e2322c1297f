// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	_ "embed"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// completionScript is the program kubectl_complete-gpusharing, which kubectl runs to complete the arguments of the
// plugin (k8s.io/kubectl pkg/cmd/plugin/plugin_completion.go). A release has it beside the plugin.
//
//go:embed kubectl_complete-gpusharing
var completionScript string

// The directives that end an answer to kubectl: complete no files, or files (github.com/spf13/cobra
// ShellCompDirective).
const (
	noFiles  = ":4"
	anyFiles = ":0"
)

// commands are those that help lists.
var commands = []string{"advise", "completion", "dashboard", "doctor", "help", "import", "must-gather", "plan", "restore", "status", "top", "version"}

// completion is what the last word of a command may become.
type completion struct {
	words []string
	kind  string // words are the names of the objects of a kind, or contexts
	files bool   // words are files
}

// complete decides what the last word may become; value is how much of its value is typed, and flags those before it.
func complete(args []string) (c completion, value string, f *flags) {
	f = newFlags()
	if len(args) == 0 {
		args = []string{""}
	}
	before, word := args[:len(args)-1], args[len(args)-1]
	flag, typed, isValue := strings.Cut(word, "=")
	if last := len(before) - 1; last >= 0 && takesValue(f.set, before[last]) {
		flag, typed, isValue = before[last], word, true
		before = before[:last]
	}
	_ = f.set.Parse(before) // who types sees no errors
	if isValue {
		return valuesOf(flag, f.set.Arg(0)), typed, f
	}
	switch {
	case strings.HasPrefix(word, "-"):
		f.set.VisitAll(func(flag *pflag.Flag) {
			if len(f.set.Args()) == 0 || takes(f.set.Arg(0), flag.Name) {
				c.words = append(c.words, "--"+flag.Name)
			}
		})
	case len(f.set.Args()) == 0:
		c.words = commands
	case f.set.Arg(0) == "status":
		c.kind = "GPUNodeList"
	case f.set.Arg(0) == "advise" && len(f.set.Args()) <= 2:
		c = argument(f.set.Args()[1:], "namespace", "node", "policy")
	case f.set.Arg(0) == "top":
		c = argument(f.set.Args()[1:], "node", "pod", "policy")
	}
	return c, word, f
}

// argument is what the next argument may become of a command that takes one of some kinds, and then names.
func argument(before []string, kinds ...string) completion {
	switch {
	case len(before) == 0:
		return completion{words: kinds}
	case before[0] == "policy":
		return completion{kind: "GPUSharingPolicyList"}
	case before[0] == "node":
		return completion{kind: "GPUNodeList"}
	}
	return completion{}
}

// valuesOf is what the value of a flag of a command may become.
func valuesOf(flag, command string) completion {
	switch {
	case flag == "--policy", flag == "--delete":
		return completion{kind: "GPUSharingPolicyList"}
	case flag == "--nodes":
		return completion{kind: "GPUNodeList"}
	case flag == "--context":
		return completion{kind: contexts}
	case command != "must-gather" && (flag == "--output" || flag == "-o"):
		return completion{words: formatsOf[command]}
	}
	return completion{files: slices.Contains([]string{"--filename", "-f", "--kubeconfig", "--output", "-o"}, flag)}
}

// takesValue reports whether the word after a flag is its value.
func takesValue(set *pflag.FlagSet, word string) bool {
	var flag *pflag.Flag
	switch {
	case strings.HasPrefix(word, "--"):
		flag = set.Lookup(strings.TrimPrefix(word, "--"))
	case len(word) == 2 && word[0] == '-':
		flag = set.ShorthandLookup(word[1:])
	}
	return flag != nil && flag.NoOptDefVal == ""
}

// completions prints what kubectl asks for: a line for each word, and a directive. It prints no names if the cluster
// does not answer.
func (p *Program) completions(ctx context.Context, args []string) error {
	c, value, f := complete(args)
	if c.kind != "" {
		c.words = namesIn(ctx, f, c.kind)
	}
	words := slices.DeleteFunc(slices.Clone(c.words), func(word string) bool { return !strings.HasPrefix(word, value) })
	if words = append(words, noFiles); c.files {
		words[len(words)-1] = anyFiles
	}
	return p.write(strings.Join(words, "\n") + "\n")
}

// contexts is the kind of what the kubeconfig has.
const contexts = "contexts"

func namesIn(ctx context.Context, f *flags, kind string) (names []string) {
	if kind == contexts {
		config, err := loading(f).Load()
		if err != nil {
			return nil
		}
		return slices.Sorted(maps.Keys(config.Contexts))
	}
	c, err := connect(f)
	if err != nil {
		return nil
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind(kind))
	if c.List(ctx, list) != nil {
		return nil
	}
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names
}
