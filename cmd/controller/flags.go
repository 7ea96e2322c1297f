// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/labels"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/features"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

type flags struct {
	namespace      string
	nodeSelector   labels.Selector
	standAlone     pluginconfig.StandAlone
	readinessTaint bool
	onDemandMIG    bool
	leaderElect    bool
	healthAddress  string
	metricsAddress string
}

// parseFlags parses and checks the flags, and starts logging.
func parseFlags(args []string) (flags, error) {
	var (
		f        flags
		selector string
		logging  zap.Options
	)
	set := flag.NewFlagSet("controller", flag.ContinueOnError)
	logging.BindFlags(set)
	config.RegisterFlags(set)
	set.StringVar(&f.namespace, "namespace", os.Getenv("POD_NAMESPACE"),
		"namespace of the controller and its agents; default: environment variable POD_NAMESPACE")
	set.StringVar(&selector, "node-selector", cluster.DefaultSelector, "label selector of the nodes with GPUs")
	set.StringVar(&f.standAlone.Namespace, "device-plugin-namespace", "",
		"namespace of a device plugin that the GPU Operator does not run; also of the GPU Operator, while its ClusterPolicy does not tell")
	set.StringVar(&f.standAlone.ConfigMap, "device-plugin-configmap", "",
		"ConfigMap that a device plugin reads which the GPU Operator does not run; keys are added to it, and those there are left alone")
	set.BoolVar(&f.readinessTaint, "karpenter-readiness-taint", false, "Karpenter is v1.13 or newer, so its new nodes may get the taint "+
		v1alpha1.TaintStartupReadiness+" until they are ready (startupTaint: UntilReady)")
	set.Func("feature-gates", "features that are off by default, as NAME=true by comma: OnDemandMIG (alpha) reports which MIG instances pods "+
		"wait for; default: environment variable "+features.Variable, f.setFeatures)
	set.BoolVar(&f.leaderElect, "leader-elect", true, "act only while holding the lease, so that several replicas may run")
	set.StringVar(&f.healthAddress, "health-probe-bind-address", ":8081", "address of /healthz and /readyz; 0: none")
	set.StringVar(&f.metricsAddress, "metrics-bind-address", cmp.Or(os.Getenv(metricsVariable), "0"),
		"address of /metrics, served over TLS to whom the API server lets get it; 0: none; default: environment variable "+metricsVariable)
	set.Bool("version", false, "print version and commit, and exit")
	if err := f.setFeatures(os.Getenv(features.Variable)); err != nil {
		return f, fmt.Errorf("environment variable %s: %w", features.Variable, err)
	}
	if err := set.Parse(args); err != nil {
		return f, err
	}
	if err := f.check(selector, set.Args()); err != nil {
		return f, err
	}
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&logging)))
	return f, nil
}

// setFeatures sets the feature gates of a list.
func (f *flags) setFeatures(list string) error {
	return features.Set(list, map[string]*bool{features.OnDemandMIG: &f.onDemandMIG})
}

func (f *flags) check(selector string, rest []string) error {
	if len(rest) > 0 {
		return fmt.Errorf("unknown argument %q; see --help", rest[0])
	}
	if f.namespace == "" {
		return errors.New("--namespace, or the environment variable POD_NAMESPACE, must name the controller's namespace")
	}
	if f.standAlone.ConfigMap != "" && f.standAlone.Namespace == "" {
		return errors.New("--device-plugin-configmap needs --device-plugin-namespace")
	}
	parsed, err := labels.Parse(selector)
	if err != nil {
		return fmt.Errorf("--node-selector %q: %w", selector, err)
	}
	if parsed.Empty() {
		return errors.New("--node-selector must not be empty: it says which nodes have GPUs")
	}
	f.nodeSelector = parsed
	return nil
}
