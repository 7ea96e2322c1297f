// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/connection"
	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/features"
	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/serving"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/agentinstall"
)

// agentImage is the environment variable that OLM sets to the agent's image, by digest where images are mirrored, and
// the name that the manifests have for it.
const agentImageVariable, agentImage = "RELATED_IMAGE_AGENT", "gpu-sharing-agent"

type operandFlags struct {
	owner         types.NamespacedName
	manifests     string
	agentImage    string
	healthAddress string
	agents        agentinstall.Agents
}

// The environment variables that a Subscription of OLM may set (spec.config.env), since nobody can give a program flags
// there.
const metricsVariable, samplingVariable = "METRICS_BIND_ADDRESS", "SAMPLING_INTERVAL"

func parseOperandFlags(args []string) (operandFlags, error) {
	f := operandFlags{agentImage: os.Getenv(agentImageVariable)}
	var logging zap.Options
	set := flag.NewFlagSet("controller operands", flag.ContinueOnError)
	logging.BindFlags(set)
	config.RegisterFlags(set)
	set.StringVar(&f.owner.Namespace, "namespace", os.Getenv("POD_NAMESPACE"),
		"namespace of this program, and of all that it installs; default: environment variable POD_NAMESPACE")
	set.StringVar(&f.owner.Name, "owner", "gpu-sharing-operands", "Deployment that this program runs in")
	set.StringVar(&f.manifests, "manifests", "/manifests", "folder with owned.yaml and kept.yaml")
	set.StringVar(&f.healthAddress, "health-probe-bind-address", ":8081", "address of /healthz and /readyz; 0: none")
	metrics := set.String("metrics-bind-address", cmp.Or(os.Getenv(metricsVariable), "0"),
		"where the agents serve /metrics and /usage, such as :8443; 0: nowhere; default: environment variable "+metricsVariable)
	sampling := set.String("sampling-interval", os.Getenv(samplingVariable),
		"how often the agents measure without a reader, such as 60s; default: environment variable "+samplingVariable+", or never")
	gates := set.String("feature-gates", os.Getenv(features.Variable), "feature gates of the whole operator; default: environment variable "+features.Variable)
	if err := set.Parse(args); err != nil {
		return f, err
	}
	if set.NArg() > 0 {
		return f, fmt.Errorf("unknown argument %q; see operands --help", set.Arg(0))
	}
	var err error
	if f.agents, err = agentMetrics(*metrics, *sampling); err != nil {
		return f, err
	}
	if err := features.Set(*gates, map[string]*bool{features.MemoryLimits: &f.agents.Cgroups}); err != nil {
		return f, fmt.Errorf("--feature-gates (%s): %w", features.Variable, err)
	}
	if f.agents.Cgroups {
		f.agents.Args = append(f.agents.Args, "--feature-gates="+features.MemoryLimits+"=true")
	}
	if f.owner.Namespace == "" {
		return f, errors.New("--namespace, or the environment variable POD_NAMESPACE, must name the namespace")
	}
	if f.agentImage == "" {
		return f, fmt.Errorf("the environment variable %s must name the agent's image", agentImageVariable)
	}
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&logging)))
	return f, nil
}

// agentMetrics is how the agents serve what they measure, at an address, and how often they measure.
func agentMetrics(address, interval string) (agentinstall.Agents, error) {
	if address == "0" {
		if interval != "" {
			return agentinstall.Agents{}, fmt.Errorf("--sampling-interval (%s) needs --metrics-bind-address (%s): nobody could read the samples", samplingVariable, metricsVariable)
		}
		return agentinstall.Agents{}, nil
	}
	m := agentinstall.Agents{Args: []string{"--metrics-bind-address=" + address}}
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		m.Port, err = strconv.Atoi(port)
	}
	if err != nil {
		return m, fmt.Errorf("--metrics-bind-address (%s) %q must have a port, such as :8443: %w", metricsVariable, address, err)
	}
	if interval != "" {
		if _, err := time.ParseDuration(interval); err != nil {
			return m, fmt.Errorf("--sampling-interval (%s): %w", samplingVariable, err)
		}
		m.Args = append(m.Args, "--sampling-interval="+interval)
	}
	return m, nil
}

// runOperands installs, where OLM installed the controller, what OLM cannot install.
func runOperands(ctx context.Context, args []string) error {
	f, err := parseOperandFlags(args)
	if err != nil {
		return err
	}
	config, err := connection.Config(agentinstall.FieldManager)
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := appsv1.AddToScheme(scheme); err != nil {
		return fmt.Errorf("registering the API: %w", err)
	}
	mgr, err := ctrl.NewManager(config, manager.Options{
		Scheme:  scheme,
		Cache:   cache.Options{DefaultNamespaces: map[string]cache.Config{f.owner.Namespace: {}}},
		Metrics: server.Options{BindAddress: "0"},
	})
	if err != nil {
		return fmt.Errorf("making the manager: %w", err)
	}
	operands := agentinstall.New(mgr.GetClient(), agentinstall.Options{
		Owner: f.owner, Manifests: os.DirFS(f.manifests), Images: map[string]string{agentImage: f.agentImage}, Agents: f.agents,
		Events: mgr.GetEventRecorder(agentinstall.FieldManager), Reader: mgr.GetAPIReader(),
	})
	if err := operands.Register(mgr); err != nil {
		return err
	}
	alive := map[string]healthz.Checker{"ping": healthz.Ping}
	if err := serving.Health(ctx, mgr, f.healthAddress, alive, map[string]healthz.Checker{"installed": operands.Installed}); err != nil {
		return err
	}
	return mgr.Start(ctx)
}
