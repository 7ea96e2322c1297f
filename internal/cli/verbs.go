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

// verbs are the commands that read the cluster.
func (p *Program) verbs() []verb {
	return slices.Concat(p.showing(), p.planning(), p.operating())
}

// showing are the commands that show how GPUs are shared.
func (p *Program) showing() []verb {
	return []verb{
		{
			use: "status [NODE...|POLICY]", run: p.status, formats: []string{outputJSON, outputWide, outputYAML}, completes: ofKinds(kindNodes, kindPolicies),
			short: "Shows policies and GPUs, who has which share, and why something is not ready",
			long: "Shows policies and GPUs, who has which share, and why something is not ready. A few GPUs are drawn, more are counted, equal nodes together; a name\n" +
				"draws the GPUs of a node, or shows a policy alone, and -o wide draws all.",
			example: "kubectl gpusharing status --not-ready -l pool=training",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.StringVar(&f.policy, "policy", "", "only nodes that this policy governs")
				set.StringVar(&f.product, "product", "", "only nodes with GPUs of this product, such as NVIDIA-A100-SXM4-40GB")
				set.StringVarP(&f.selector, "selector", "l", "", "only nodes whose labels this selector matches, such as pool=training")
				set.BoolVar(&f.notReady, "not-ready", false, "only nodes that are not ready")
				set.BoolVarP(&f.watch, "watch", "w", false, "print it again whenever it changes")
				ofController(f, set)
			},
		}, {
			use: "why POD|KIND/NAME", run: p.why, formats: []string{outputJSON, outputYAML},
			short: "Says why a pod does not run, or which share of which GPU it has",
			long: "Says why a pod, or those of a Deployment, Job or StatefulSet, do not run, or which share of which GPU they have. It needs no rights but those of a\n" +
				"user of the namespace, and says what it cannot tell without others.",
			example: "kubectl gpusharing why deployment/web -n team",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.StringVarP(&f.namespace, "namespace", "n", "", "namespace of the pod; default: that of the context")
			},
		}, {
			use: "top [node|policy|pod] [NAME...]", run: p.top, formats: []string{outputJSON, outputYAML}, completes: kindThenNames("node", "pod", "policy"),
			short:   "Shows who uses the GPUs now: memory beside the share of each container, and utilization",
			example: "kubectl gpusharing top pod trainer-0",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.BoolVarP(&f.watch, "watch", "w", false, "measure again every 5 seconds")
			},
		}, {
			use: "dashboard", run: p.dashboard,
			short:   "Serves status and top as a page for your browser, on this machine alone and with your rights",
			example: "kubectl gpusharing dashboard --port 8080",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.Uint16Var(&f.port, "port", 0, "port on 127.0.0.1; default: one that is free")
				ofController(f, set)
			},
		},
	}
}

// planning are the commands that lead to policies.
func (p *Program) planning() []verb {
	return []verb{
		{
			use: "plan -f FILE | --delete NAME", run: p.plan, formats: []string{outputJSON, outputYAML},
			short: "Prints what policies would do to each node, or what their deletion would, and changes nothing",
			long: "Prints what policies would do to each node, or what their deletion would, and changes nothing. It exits with 0: no change, 2: none that is\n" +
				"disruptive, 3: disruptive, 4: cannot be satisfied, 1: the command failed.",
			example: "kubectl gpusharing plan -f policies/ -R",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.StringSliceVarP(&f.files, "filename", "f", nil, "file, folder or URL with policies; - for stdin")
				set.BoolVarP(&f.recursive, "recursive", "R", false, "also the folders below those of --filename")
				set.StringSliceVar(&f.deleted, "delete", nil, "name of a policy as if it were deleted")
				set.BoolVar(&f.stacks, "stacks", false, "also what pods could request if the other one of NVIDIA's programs, device plugin or DRA driver, offered the GPUs")
			},
		}, {
			use: "advise [policy|node|namespace NAME]", run: p.adviseSharing, completes: kindThenName("namespace", "node", "policy"),
			short:   "Says which ways to share the GPUs fit what containers used, with a policy for the best one",
			example: "kubectl gpusharing advise namespace team --prometheus http://prometheus.monitoring:9090",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.StringVar(&f.prometheus, "prometheus", "", "URL of a Prometheus that reads the agents; default: what the agents keep in memory")
				set.DurationVar(&f.window, "window", f.window, "how far back Prometheus is asked")
				set.DurationVar(&f.minAge, "min-age", f.minAge, "how long a node must have been observed at the least")
			},
		}, {
			use: "import", run: p.importPolicies,
			short:   "Prints policies that describe how the GPUs are shared already, for kubectl apply",
			example: "kubectl gpusharing import > policies.yaml",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.StringVar(&f.configMap, "configmap", "", "NAMESPACE/NAME of the ConfigMap that a device plugin without the GPU Operator reads")
			},
		},
	}
}

// operating are the commands for the operator itself.
func (p *Program) operating() []verb {
	return []verb{
		{
			use: "doctor", run: p.doctor, formats: []string{outputJSON, outputYAML}, flags: ofController,
			short:   "Checks the operator and NVIDIA's programs that it needs, and says what to do; exits with 3 if there are errors",
			example: "kubectl gpusharing doctor",
		}, {
			use: "must-gather", run: p.mustGather,
			short:   "Writes an archive for a bug report, without Secrets; it leaves out, and lists, what you may not read",
			example: "kubectl gpusharing must-gather -o bug.tar.gz",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.StringVarP(&f.output, "output", "o", "", "file to write")
				set.StringSliceVar(&f.nodes, "nodes", nil, "only these nodes; default: 50 with GPUs, first those that are not ready")
			},
		}, {
			use: "restore", run: p.restore,
			short: "Deletes all policies, and waits until every node and NVIDIA's ClusterPolicy are as they were before the operator",
			long: "Deletes all policies, and waits until every node and NVIDIA's ClusterPolicy are as they were before the operator. It exits with 2 if they are not in\n" +
				"time.",
			example: "kubectl gpusharing restore --timeout 1h",
			flags: func(f *flags, set *pflag.FlagSet) {
				set.BoolVar(&f.wait, "wait", f.wait, "wait until everything is as before")
				set.DurationVar(&f.timeout, "timeout", f.timeout, "how long to wait")
				set.BoolVarP(&f.yes, "yes", "y", false, "delete the policies without asking")
				ofController(f, set)
			},
		},
	}
}

// ofController is the flag for the namespace in which the controller runs.
func ofController(f *flags, set *pflag.FlagSet) {
	set.StringVarP(&f.namespace, "namespace", "n", "", "namespace of the controller; default: that of its ClusterRoleBinding")
}

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
