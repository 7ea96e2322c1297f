// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/features"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// hostFlags are those of both programs.
type hostFlags struct {
	hostRoot      string
	driverRoot    string
	containerRoot string
	mpsRoot       string
	log           zap.Options
}

func (f *hostFlags) bind(set *flag.FlagSet) {
	set.StringVar(&f.hostRoot, "host-root", "/", "folder at which the root of the node's file system is mounted")
	set.StringVar(&f.driverRoot, "driver-root", driver.Auto,
		"folder on the node below which the NVIDIA driver is installed, such as /run/nvidia/driver or /; auto: it is found")
	set.StringVar(&f.containerRoot, "container-root", "",
		"root of the container in which this program runs, where it shows the driver's device nodes and sockets; empty: no container")
	set.StringVar(&f.mpsRoot, "mps-root", "/run/nvidia/mps",
		"folder of the MPS control daemons, the same that NVIDIA's device plugin is given; made if it is not there")
	set.Bool("version", false, "print version and commit, and exit")
	f.log.BindFlags(set)
}

// parse parses and checks the flags, and starts logging.
func (f *hostFlags) parse(set *flag.FlagSet, args []string) error {
	if err := set.Parse(args); err != nil {
		return err
	}
	if set.NArg() > 0 {
		return fmt.Errorf("unknown argument %q; see --help", set.Arg(0))
	}
	paths := map[string]string{
		"host-root": f.hostRoot, "driver-root": f.driverRoot, "container-root": f.containerRoot, "mps-root": f.mpsRoot,
	}
	for flag, path := range paths {
		left := flag == "driver-root" && path == driver.Auto || flag == "container-root" && path == ""
		if !left && !filepath.IsAbs(path) {
			return fmt.Errorf("--%s must be an absolute path, not %q", flag, path)
		}
	}
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&f.log)))
	return nil
}

// drivers is the node on which the driver is looked for.
func (f *hostFlags) drivers() driver.Node {
	return driver.Node{Host: f.hostRoot, Root: f.driverRoot, Container: f.containerRoot}
}

// agentFlags are those of the agent.
type agentFlags struct {
	hostFlags
	node               string
	podResourcesSocket string
	kubeletRoot        string
	cdiRoot            string
	allowReboot        bool
	resync             time.Duration
	healthAddress      string
	metricsAddress     string
	samplingInterval   time.Duration
	memoryLimits       bool // a feature gate
}

// minSampling is the shortest sampling interval: a measurement may take seconds where it has to open the driver.
const minSampling = 5 * time.Second

func parseAgentFlags(args []string) (agentFlags, error) {
	var f agentFlags
	set := flag.NewFlagSet("agent", flag.ContinueOnError)
	f.bind(set)
	config.RegisterFlags(set)
	set.StringVar(&f.node, "node-name", os.Getenv("NODE_NAME"),
		"name of the node, which is the name of its GPUNode; default: environment variable NODE_NAME")
	set.StringVar(&f.podResourcesSocket, "pod-resources-socket", "/var/lib/kubelet/pod-resources/kubelet.sock",
		"the kubelet's pod resources socket, which tells which containers hold a GPU; empty: no kubelet is asked")
	set.StringVar(&f.kubeletRoot, "kubelet-root", "/var/lib/kubelet",
		"folder on the node in which the kubelet keeps its state, with the ConfigMaps of NVIDIA's pods")
	set.StringVar(&f.cdiRoot, "cdi-root", "/var/run/cdi",
		"folder of CDI specifications, in which NVIDIA's specification for its own pods is kept up to date; empty: none")
	set.BoolVar(&f.allowReboot, "allow-reboot", os.Getenv("ALLOW_REBOOT") == "true",
		"let the agent reboot the node where a policy says rollout.reboot: IfRequired and a MIG mode changes only so; "+
			"default: whether environment variable ALLOW_REBOOT is true")
	set.DurationVar(&f.resync, "resync", time.Minute, "how often the GPUs are looked at without a change of their GPUNode")
	set.StringVar(&f.healthAddress, "health-probe-bind-address", ":8081", "address of /healthz and /readyz; 0: none")
	set.StringVar(&f.metricsAddress, "metrics-bind-address", "0", "address of /metrics and "+usage.Path+", served over TLS to whom the API server lets get them; 0: none")
	set.DurationVar(&f.samplingInterval, "sampling-interval", 0,
		"how often the GPUs are measured without a reader, to keep peaks and distributions in memory for kubectl gpusharing advise; 0: never")
	set.Func("feature-gates", "features that are off by default, as NAME=true by comma: MemoryLimits (alpha) lets the agent have the driver limit "+
		"the memory of pods on time-sliced GPUs, where a policy asks for that (timeSlicing.memory.limit)", f.setFeatures)
	if err := f.parse(set, args); err != nil {
		return f, err
	}
	if f.node == "" {
		return f, errors.New("--node-name, or the environment variable NODE_NAME, must name the node")
	}
	if f.resync <= 0 {
		return f, fmt.Errorf("--resync must be longer than 0, not %s", f.resync)
	}
	if f.samplingInterval != 0 && f.samplingInterval < minSampling {
		return f, fmt.Errorf("--sampling-interval must be 0 or at least %s, not %s", minSampling, f.samplingInterval)
	}
	if f.samplingInterval != 0 && f.metricsAddress == "0" {
		return f, errors.New("--sampling-interval needs --metrics-bind-address, at which the agent serves what it keeps")
	}
	return f, nil
}

// setFeatures sets the feature gates of a list.
func (f *agentFlags) setFeatures(list string) error {
	return features.Set(list, map[string]*bool{features.MemoryLimits: &f.memoryLimits})
}
