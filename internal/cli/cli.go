// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cli is the kubectl plugin `kubectl gpusharing`. It asks the API server for what is there, decides with the
// same pure packages as the controller, and prints. Only restore changes something: it deletes policies. What it prints
// is plain text: pure functions over values, of which each line fits into the terminal and is not broken where there is
// none.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Program is the plugin, with what it needs of its surroundings.
type Program struct {
	In  io.Reader
	Out io.Writer
	// Interactive says that In is a terminal, at which a user can confirm.
	Interactive bool
	// Clock tells the time, from which what has run out is told.
	Clock clock.Clock
	// Width is the number of columns of the terminal; 0: the output goes elsewhere, and lines of text are not broken.
	Width int
	// Version of the plugin.
	Version string
}

// Run carries out one command. An error says what to do about it.
func (p *Program) Run(ctx context.Context, args []string) error {
	root := p.root(newFlags())                //nolint:contextcheck // cobra hands the context to what completes a word
	root.SetArgs(append([]string{}, args...)) // nil would stand for those of the process
	root.SetIn(p.In)
	root.SetOut(p.Out)
	root.SetErr(io.Discard) // errors are returned, and who completes a word sees none
	return root.ExecuteContext(ctx)
}

func hint(err error) error {
	between := "; "
	if strings.HasSuffix(err.Error(), "?") {
		between = " "
	}
	return fmt.Errorf("%w%s`kubectl gpusharing help` lists commands, `kubectl gpusharing help COMMAND` its flags", err, between)
}

func (p *Program) write(text string) error {
	if _, err := io.WriteString(p.Out, text); err != nil {
		return fmt.Errorf("writing the result: %w", err)
	}
	return nil
}

// flags are those of all commands.
type flags struct {
	config            *genericclioptions.ConfigFlags // kubectl's own
	files, deleted    []string
	recursive, stacks bool
	configMap         string
	wait, yes         bool
	policy, product   string
	selector          string
	notReady, watch   bool
	output            string
	nodes             []string
	timeout           time.Duration
	prometheus        string
	window, minAge    time.Duration
	port              uint16
	namespace         string
}

// newFlags are the flags with their defaults.
func newFlags() *flags {
	config := genericclioptions.NewConfigFlags(false)
	config.Namespace, config.CacheDir = nil, nil // what a namespace is for depends on the command, and nothing is cached
	return &flags{config: config, wait: true, timeout: restoreTimeout, window: adviseWindow, minAge: adviseMinAge}
}

// restoreTimeout is how long restore waits unless --timeout says otherwise: long enough for a drain and a reboot.
const restoreTimeout = 30 * time.Minute

// The defaults of advise: work repeats by the day or by the week.
const (
	adviseWindow = 7 * 24 * time.Hour
	adviseMinAge = 24 * time.Hour
)

var errNoFile = errors.New("plan needs a policy: -f POLICY.yaml, -f - for stdin, or --delete NAME")

// root is the plugin with its commands.
func (p *Program) root(f *flags) *cobra.Command {
	root := &cobra.Command{
		Use: "gpusharing", Short: "Shows how the GPUs of a cluster are shared, and what a policy would change. Only restore changes something.",
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpusharing"}, Version: p.Version,
		SilenceErrors: true, SilenceUsage: true, SuggestionsMinimumDistance: 2,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:              cobra.ArbitraryArgs,
	}
	root.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		return hint(fmt.Errorf("unknown command %q%s", args[0], meant(root.SuggestionsFor(args[0]))))
	}
	root.SetVersionTemplate("kubectl-gpusharing {{.Version}}\n")
	root.SetUsageTemplate(usageTemplate)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return hint(flagError(root, c, err)) })
	f.config.AddFlags(root.PersistentFlags())
	_ = root.RegisterFlagCompletionFunc("context", completing(f, contexts)) // the flag is there
	for _, v := range p.verbs() {
		root.AddCommand(v.command(f))
	}
	root.AddCommand(
		&cobra.Command{
			Use: "completion", Short: "Prints the program kubectl_complete-gpusharing, by which kubectl completes commands, flags and names",
			Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return p.write(completionScript) },
		},
		&cobra.Command{
			Use: "version", Short: "Prints the version and the commit of this program", Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error { return p.write("kubectl-gpusharing " + p.Version + "\n") },
		},
		&cobra.Command{
			Use: "options", Short: "Lists the flags that all commands take, which are kubectl's", Args: cobra.NoArgs,
			RunE: func(c *cobra.Command, _ []string) error { return p.write(c.InheritedFlags().FlagUsages()) },
		},
	)
	return root
}

// usageTemplate is how help prints a command: its own flags, which are few, and where the others are.
const usageTemplate = `Usage:
  {{if .HasAvailableSubCommands}}{{.CommandPath}} COMMAND{{else}}{{.UseLine}}{{end}}
{{- if .HasExample}}

Example:
  {{.Example}}
{{- end}}
{{- if .HasAvailableSubCommands}}

Commands:
{{- range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}
{{- else if .HasAvailableLocalFlags}}

Flags:
{{.LocalNonPersistentFlags.FlagUsages | trimTrailingWhitespaces}}
{{- end}}

` + "`kubectl gpusharing options` lists kubectl's flags, which all commands take: --context, --as, --request-timeout …" + `
{{- if .HasAvailableSubCommands}}
` + "`kubectl gpusharing help COMMAND` explains a command." + `
{{- end}}
`

// meant asks whether something else was meant; empty: nothing is like it.
func meant(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", strings.Join(names, " or "))
}

// flagError says which commands take a flag that a command does not take, or which flag may have been meant.
func flagError(root, c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || c == root {
		return err
	}
	name, taken := unknown.GetSpecifiedName(), []string{}
	dashes := strings.Repeat("-", min(len(name), 2))
	alike := &cobra.Command{SuggestionsMinimumDistance: min(len(name)/3, 2)} // letters
	c.Flags().VisitAll(func(flag *pflag.Flag) {
		alike.AddCommand(&cobra.Command{Use: flag.Name, Run: func(*cobra.Command, []string) {}})
	})
	for _, other := range root.Commands() {
		if flag := other.LocalNonPersistentFlags().Lookup(name); flag != nil || len(name) == 1 && other.LocalNonPersistentFlags().ShorthandLookup(name) != nil {
			taken = append(taken, other.Name())
		}
	}
	switch suggested := alike.SuggestionsFor(name); {
	case len(taken) > 0:
		return fmt.Errorf("%s does not take %s%s, which is a flag of %s", c.Name(), dashes, name, strings.Join(taken, ", "))
	case len(suggested) > 0:
		return fmt.Errorf("%w%s", err, meant([]string{"--" + strings.Join(suggested, ", --")}))
	}
	return err
}

// verb is a command that reads the cluster.
type verb struct {
	// use is its name with its arguments; arguments are refused where it names none.
	use, short, long, example string
	run                       func(context.Context, *flags, []string) error
	// flags are its own.
	flags func(*flags, *pflag.FlagSet)
	// formats are the values of --output; nil: it has no such flag, or it is a file.
	formats []string
	// completes is what its next argument may become; nil: nothing.
	completes func(args []string) completion
}

// command is a verb as cobra has it.
func (v *verb) command(f *flags) *cobra.Command {
	c := &cobra.Command{Use: v.use, Short: v.short, Long: v.long, Example: v.example, Args: cobra.ArbitraryArgs, DisableFlagsInUseLine: true}
	c.RunE = func(c *cobra.Command, args []string) error {
		if !strings.Contains(v.use, " ") && len(args) > 0 {
			return hint(fmt.Errorf("%s takes no argument, but was given %s", c.Name(), strings.Join(args, " ")))
		}
		if v.formats != nil && f.output != "" && !slices.Contains(v.formats, f.output) {
			return hint(fmt.Errorf("--output %q of %s is not one of %s", f.output, c.Name(), strings.Join(v.formats, ", ")))
		}
		return v.run(c.Context(), f, args)
	}
	own := c.Flags()
	own.SortFlags = false
	if v.flags != nil {
		v.flags(f, own)
	}
	if v.formats != nil {
		own.StringVarP(&f.output, "output", "o", "", "format: "+strings.Join(v.formats, ", "))
	}
	v.completeFlags(c, f)
	c.ValidArgsFunction = func(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if v.completes == nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return v.completes(args).answer(c.Context(), f, typed)
	}
	return c
}

// connect makes a client of the cluster that the flags name.
func connect(f *flags) (client.Client, error) {
	config, err := configOf(f)
	if err != nil {
		return nil, err
	}
	return clientOf(config)
}

// configOf finds the cluster that the flags name.
func configOf(f *flags) (*rest.Config, error) {
	config, err := f.config.ToRESTConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the cluster: %w; name it with --kubeconfig and --context", err)
	}
	config.UserAgent = "kubectl-gpusharing"
	return config, nil
}

func clientOf(config *rest.Config) (client.Client, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	return client.WithFieldValidation(c, metav1.FieldValidationStrict), nil
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme, authenticationv1.AddToScheme, authorizationv1.AddToScheme, coordinationv1.AddToScheme,
		rbacv1.AddToScheme, v1alpha1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("registering the API: %w", err)
		}
	}
	return scheme, nil
}

// advise adds to an error of the API server what to do about it.
func advise(err error) error {
	switch {
	case err == nil:
		return nil
	case meta.IsNoMatchError(err):
		return fmt.Errorf("%w; install the GPU Sharing Operator in this cluster, or choose another with --context", err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w; ask an administrator to bind the ClusterRoles gpu-sharing-view and gpu-sharing-cli to you, and for restore "+
			"and to have plan check policies gpu-sharing-edit too (plan changes nothing: all its writes are dry runs)", err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w; log in to the cluster anew", err)
	}
	return err
}
