// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// The controller turns all policies and all nodes into a desired state for each node, and brings it to the nodes one
// safe step at a time. One of several replicas leads. Run as `controller operands` it is another program: where OLM
// installs the operator, it installs the agent. Run as `controller check` it prints what is missing, and ends: the pod
// of `helm test` does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	_ "time/tzdata" // the image of the controller has no time zones, and neither has every machine

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/connection"
	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/serving"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/agentinstall"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/demand"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpunode"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/gpusharingpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/memoryguard"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/access"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/drain"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/version"
)

// name of the program, as events, leases and API server logs show it.
const name = "gpu-sharing-controller"

// writers is to how many nodes the rollout writes at the same time. Each write is answered within milliseconds; more of
// them would compete with the agents, which answer each, for the API server.
const writers = 8

// garbage is how much more memory than it holds the program takes before it collects garbage, in percent, unless GOGC
// says so. It holds much of the cluster and mostly waits, so memory counts for more than the processor.
const garbage = 50

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(garbage)
	}
	err := run(ctrl.SetupSignalHandler(), os.Args[1:])
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "controller:", err)
		os.Exit(1)
	}
}

// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=gpu-sharing-operator,resources=leases,verbs=create
// +kubebuilder:rbac:groups=coordination.k8s.io,namespace=gpu-sharing-operator,resources=leases,resourceNames=gpu-sharing-controller,verbs=get;update
// +kubebuilder:rbac:groups="",namespace=gpu-sharing-operator,resources=events,verbs=create;patch

// The namespace in which the operator is installed already.
// +kubebuilder:rbac:groups=admissionregistration.k8s.io,resources=validatingadmissionpolicybindings,resourceNames=gpu-sharing-mps-nodes,verbs=get
// +kubebuilder:rbac:groups=apps,resources=daemonsets,resourceNames=gpu-sharing-mps,verbs=get

// run serves until the context ends, or prints the version if it is asked for.
func run(ctx context.Context, args []string) error {
	if version.Requested(args) {
		fmt.Println(name, version.String())
		return nil
	}
	if len(args) > 0 && args[0] == "operands" {
		return runOperands(ctx, args[1:])
	}
	if len(args) > 0 && args[0] == "check" {
		return runCheck(ctx, args[1:], os.Stdout)
	}
	f, err := parseFlags(args)
	if err != nil {
		return err
	}
	mgr, err := newManager(f)
	if err != nil {
		return err
	}
	if err := agentinstall.Only(ctx, mgr.GetAPIReader(), f.namespace); err != nil {
		return err // Kubernetes starts it again
	}
	if err := register(ctx, mgr, f); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

func newManager(f flags) (manager.Manager, error) {
	config, err := connection.Config(name)
	if err != nil {
		return nil, err
	}
	config.QPS = -1 // the API server's priority and fairness paces clients
	config.Wrap(drain.AtOnce)
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(config, manager.Options{
		Scheme:                        scheme,
		Cache:                         gpusharingpolicy.CacheOptions(f.standAlone),
		Client:                        client.Options{Cache: &client.CacheOptions{Unstructured: true}},
		LeaderElection:                f.leaderElect,
		LeaderElectionID:              name,
		LeaderElectionNamespace:       f.namespace,
		LeaderElectionReleaseOnCancel: true, // the program ends when the manager does
		Metrics:                       server.Options{BindAddress: "0"},
	})
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	return mgr, nil
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		appsv1.AddToScheme, authorizationv1.AddToScheme, corev1.AddToScheme, policyv1.AddToScheme, v1alpha1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("registering the API: %w", err)
		}
	}
	return scheme, nil
}

// register adds the controllers to the manager.
func register(ctx context.Context, mgr manager.Manager, f flags) error {
	clk := clock.RealClock{}
	if err := gpunode.New(mgr.GetClient(), mgr.GetAPIReader(), f.nodeSelector, clk).Register(mgr); err != nil {
		return err
	}
	policies := gpusharingpolicy.New(mgr.GetClient(), gpusharingpolicy.Options{
		Reader:       mgr.GetAPIReader(),
		Clock:        clk,
		Events:       mgr.GetEventRecorder(name),
		PluginConfig: pluginconfig.New(mgr.GetClient(), mgr.GetAPIReader(), clk, f.standAlone).CopyTo(f.namespace),
		Namespace:    f.namespace,
		Writers:      writers,

		ReadinessTaint: f.readinessTaint,
	})
	if err := policies.Register(ctx, mgr); err != nil {
		return err
	}
	if err := registerAutoscaling(mgr, clk, f); err != nil {
		return err
	}
	err := memoryguard.New(mgr.GetClient(), memoryguard.Options{Reader: mgr.GetAPIReader(), Clock: clk, Events: mgr.GetEventRecorder(name)}).Register(mgr)
	if err != nil {
		return err
	}
	onDemand := demand.New(mgr.GetClient(), policies.DRAReader(), clk, mgr.GetEventRecorder(name))
	registerDemand := onDemand.RegisterOff
	if f.onDemandMIG {
		registerDemand = onDemand.Register
	}
	if err := registerDemand(mgr); err != nil {
		return err
	}
	if err := mgr.Add(newRest()); err != nil {
		return fmt.Errorf("adding what gives memory back: %w", err)
	}
	if err := serving.Metrics(ctx, mgr, f.metricsAddress, access.Guard(clk, ""), nil); err != nil {
		return err
	}
	alive := map[string]healthz.Checker{"ping": healthz.Ping}
	return serving.Health(ctx, mgr, f.healthAddress, alive, map[string]healthz.Checker{"ping": healthz.Ping, "kinds": policies.Ready})
}

// registerAutoscaling adds the controller that tells autoscalers what new nodes will advertise. It has a cache of its
// own, for kinds that the cluster may not have.
func registerAutoscaling(mgr manager.Manager, clk clock.Clock, f flags) error {
	options := autoscaling.CacheOptions()
	options.Scheme, options.Mapper, options.HTTPClient = mgr.GetScheme(), mgr.GetRESTMapper(), mgr.GetHTTPClient()
	groups, err := cache.New(mgr.GetConfig(), options)
	if err != nil {
		return fmt.Errorf("making the cache for the objects of autoscalers: %w", err)
	}
	return autoscaling.New(mgr.GetClient(), autoscaling.Options{
		Cache: groups, Reader: mgr.GetAPIReader(), PluginConfig: pluginconfig.New(mgr.GetClient(), mgr.GetAPIReader(), clk, f.standAlone), Clock: clk, Events: mgr.GetEventRecorder(name),
	}).Register(mgr)
}
