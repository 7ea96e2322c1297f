// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	_ "embed"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// completionScript is the program kubectl_complete-gpusharing, which kubectl runs to complete the arguments of the
// plugin (k8s.io/kubectl pkg/cmd/plugin/plugin_completion.go). A release has it beside the plugin.
//
//go:embed kubectl_complete-gpusharing
var completionScript string

// The kinds of names that complete a word.
const (
	kindNodes    = "GPUNodeList"
	kindPolicies = "GPUSharingPolicyList"
	contexts     = "contexts" // of the kubeconfig
)

// completion is what a word may become: one of some words, or the name of an object of some kinds.
type completion struct {
	words, kinds []string
}

func ofKinds(kinds ...string) func([]string) completion {
	return func([]string) completion { return completion{kinds: kinds} }
}

// kindThenNames is for a command that takes one of some kinds, and then names.
func kindThenNames(kinds ...string) func([]string) completion {
	return func(args []string) completion {
		switch {
		case len(args) == 0:
			return completion{words: kinds}
		case args[0] == "policy":
			return completion{kinds: []string{kindPolicies}}
		case args[0] == "node":
			return completion{kinds: []string{kindNodes}}
		}
		return completion{}
	}
}

// kindThenName is for a command that takes one of some kinds, and then one name.
func kindThenName(kinds ...string) func([]string) completion {
	names := kindThenNames(kinds...)
	return func(args []string) completion {
		if len(args) > 1 {
			return completion{}
		}
		return names(args)
	}
}

// answer is what the typed part of a word may become. There are no names if the cluster does not answer.
func (c completion) answer(ctx context.Context, f *flags, typed string) ([]string, cobra.ShellCompDirective) {
	words := slices.Clone(c.words)
	for _, kind := range c.kinds {
		words = append(words, namesIn(ctx, f, kind)...)
	}
	words = slices.DeleteFunc(words, func(word string) bool { return !strings.HasPrefix(word, typed) })
	return words, cobra.ShellCompDirectiveNoFileComp
}

// completing completes the value of a flag by names of a kind.
func completing(f *flags, kind string) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		return completion{kinds: []string{kind}}.answer(c.Context(), f, typed)
	}
}

// completeFlags completes the values of the flags of a command. Only those that name files are completed by files.
func (v *verb) completeFlags(c *cobra.Command, f *flags) {
	c.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) {
		complete := cobra.NoFileCompletions
		switch flag.Name {
		case "policy", "delete":
			complete = completing(f, kindPolicies)
		case "nodes":
			complete = completing(f, kindNodes)
		case "output":
			if v.formats == nil {
				return
			}
			complete = func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
				return completion{words: v.formats}.answer(c.Context(), f, typed)
			}
		case "filename":
			return
		}
		_ = c.RegisterFlagCompletionFunc(flag.Name, complete) // the flag is there
	})
}

func namesIn(ctx context.Context, f *flags, kind string) (names []string) {
	if kind == contexts {
		config, err := f.config.ToRawKubeConfigLoader().RawConfig()
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
