// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package env starts a real API server and etcd, for the tests and for the demo: with RBAC and admission policies as in
// a cluster, but without scheduler, controller manager and kubelet, whose part of the play test/nodesim has.
//
// The programs are those in KUBEBUILDER_ASSETS or, where that is not set, those that hack/kube/build.sh downloads or
// builds from Kubernetes' own Go modules. Nothing but loopback is listened on.
package env

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// Cluster is an API server with its etcd.
type Cluster struct {
	// Config is an administrator's.
	Config *rest.Config
	// Client is an administrator's, not cached, and knows Scheme.
	Client client.WithWatch
	// Scheme knows Kubernetes' own kinds and ours.
	Scheme *runtime.Scheme

	environment *envtest.Environment
	denied      map[string]int // requests that admission policies had denied when a test got it, by policy
}

// Option changes how a cluster starts.
type Option func(*options)

type options struct {
	brief       bool
	nvidia      bool
	autoscalers bool
	dir         string
	crds        []string
	flags       map[string]string
}

// WithNVIDIA installs the CRDs of NVIDIA's GPU Operator too.
func WithNVIDIA() Option { return func(o *options) { o.nvidia = true } }

// WithAutoscalers installs stand-ins for the CRDs of Karpenter, Cluster API and OpenShift's Machine API too.
func WithAutoscalers() Option { return func(o *options) { o.autoscalers = true } }

// WithCRDs installs the CRDs in these folders too.
func WithCRDs(folders ...string) Option {
	return func(o *options) { o.crds = append(o.crds, folders...) }
}

// WithOwnCRDs installs the operator's CRDs of this folder instead of those of today.
func WithOwnCRDs(folder string) Option { return func(o *options) { o.crds[0] = folder } }

// WithInterruptions lets the API server end within seconds, even with watches open: see Interrupt.
func WithInterruptions() Option { return func(o *options) { o.brief = true } }

// WithFlag sets a flag of the API server.
func WithFlag(name, value string) Option {
	return func(o *options) {
		if o.flags == nil {
			o.flags = map[string]string{}
		}
		o.flags[name] = value
	}
}

// WithDir keeps the files of the API server and of etcd in a directory, which the caller removes. Without it they lie
// in a temporary one and go with Stop.
func WithDir(dir string) Option { return func(o *options) { o.dir = dir } }

// New starts a cluster. The caller stops it.
func New(ctx context.Context, opts ...Option) (*Cluster, error) {
	o, err := newOptions(opts)
	if err != nil {
		return nil, err
	}
	assets, err := Assets(ctx)
	if err != nil {
		return nil, err
	}
	return start(o, assets)
}

func newOptions(opts []Option) (options, error) {
	root, err := Root()
	if err != nil {
		return options{}, err
	}
	o := options{crds: []string{filepath.Join(root, "config", "crd")}}
	for _, opt := range opts {
		opt(&o)
	}
	if o.nvidia {
		o.crds = append(o.crds, filepath.Join(root, "test", "env", "nvidia"))
	}
	if o.autoscalers {
		o.crds = append(o.crds, filepath.Join(root, "test", "env", "autoscalers"))
	}
	return o, nil
}

func start(o options, assets string) (*Cluster, error) {
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	environment := &envtest.Environment{
		Scheme:                   scheme,
		BinaryAssetsDirectory:    assets,
		CRDDirectoryPaths:        o.crds,
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: time.Minute,
		ControlPlaneStopTimeout:  time.Minute,
	}
	if err := configure(environment, o.dir); err != nil {
		return nil, err
	}
	if o.brief {
		environment.ControlPlane.GetAPIServer().Configure().Set("request-timeout", "3s") // which is how long it waits for requests
	}
	for name, value := range o.flags {
		environment.ControlPlane.GetAPIServer().Configure().Set(name, value)
	}
	config, err := environment.Start()
	if err != nil && strings.Contains(err.Error(), "default namespace didn't register") {
		config, err = startLate(environment)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting etcd and kube-apiserver of %s: %w", assets, err), environment.Stop())
	}
	c, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making a client: %w", err), environment.Stop())
	}
	return &Cluster{Config: config, Client: c, Scheme: scheme, environment: environment}, nil
}

// startLate goes on where envtest gives up: it gives a new API server five seconds for its first namespace, whatever
// else the machine does.
func startLate(environment *envtest.Environment) (*rest.Config, error) {
	c, err := client.New(environment.Config, client.Options{})
	if err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), environment.ControlPlaneStartTimeout)
	defer cancel()
	err = untilDone(ctx, func(ctx context.Context) (bool, error) {
		err := c.Get(ctx, client.ObjectKey{Name: metav1.NamespaceDefault}, &corev1.Namespace{})
		return err == nil, err
	})
	if err != nil {
		return nil, fmt.Errorf("waiting for the first namespace: %w", err)
	}
	_, err = envtest.InstallCRDs(environment.Config, envtest.CRDInstallOptions{
		Scheme: environment.Scheme, Paths: environment.CRDDirectoryPaths, ErrorIfPathMissing: environment.ErrorIfCRDPathMissing,
		MaxTime: environment.ControlPlaneStartTimeout,
	})
	return environment.Config, err
}

// configure sets what envtest leaves to chance: where files lie, and that nothing waits for a disk.
func configure(environment *envtest.Environment, dir string) error {
	etcd := environment.ControlPlane.Etcd
	if etcd == nil {
		etcd = &envtest.Etcd{}
		environment.ControlPlane.Etcd = etcd
	}
	etcd.Configure().Set("unsafe-no-fsync", "true")
	if dir == "" {
		return nil
	}
	etcd.DataDir = filepath.Join(dir, "etcd")
	api := environment.ControlPlane.GetAPIServer()
	api.CertDir = filepath.Join(dir, "kube-apiserver")
	for _, d := range []string{etcd.DataDir, api.CertDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fmt.Errorf("making the folder of the control plane: %w", err)
		}
	}
	return nil
}

func newScheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("registering Kubernetes' kinds: %w", err)
	}
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("registering our kinds: %w", err)
	}
	return scheme, nil
}

// Interrupt stops the API server and leaves etcd running. It needs WithInterruptions and, of a cluster of New, WithDir,
// since its certificates would be lost.
func (c *Cluster) Interrupt() error { return c.environment.ControlPlane.GetAPIServer().Stop() }

// Resume starts the API server again, at the same address.
func (c *Cluster) Resume() error { return c.environment.ControlPlane.GetAPIServer().Start() }

// Stop stops the API server and etcd.
func (c *Cluster) Stop() error { return c.environment.Stop() }

// Assets is the folder with etcd, kube-apiserver and kubectl. It builds them where they are not there yet, which takes
// minutes and is told on stderr.
func Assets(ctx context.Context) (string, error) {
	if dir := os.Getenv("KUBEBUILDER_ASSETS"); dir != "" {
		return dir, nil
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	build := exec.CommandContext(ctx, filepath.Join(root, "hack", "kube", "build.sh"))
	var stdout bytes.Buffer
	build.Stdout, build.Stderr = &stdout, os.Stderr
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("getting Kubernetes' programs with hack/kube/build.sh: %w", err)
	}
	return strings.TrimSpace(stdout.String()), nil
}

// Root is the top folder of this repository, found upwards from the working directory.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("finding the repository: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "PROJECT")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("finding the repository: no folder above the working directory has a file PROJECT")
		}
		dir = parent
	}
}
