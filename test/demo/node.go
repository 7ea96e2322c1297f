// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// Where things are on a node, as the manifests have them too.
const (
	driverRoot   = "run/nvidia/driver"
	mpsRoot      = "run/nvidia/mps"
	podResources = "var/lib/kubelet/pod-resources/kubelet.sock"
)

// pace is how long the kubelet and NVIDIA's programs take for what takes the real ones up to half a minute.
const pace = 300 * time.Millisecond

// machine is one simulated node. Its file system is a folder of the demo's.
type machine struct {
	name    string
	root    string
	agent   string // the agent's program
	cluster *env.Cluster
	driver  *simdriver.Driver
	sim     *nodesim.Node
}

// newMachine makes a node with a simulated driver.
func newMachine(d *demo, spec simdriver.Spec, agent string) (*machine, error) {
	m := &machine{name: spec.Name, root: filepath.Join(d.dir, spec.Name), cluster: d.cluster, agent: agent}
	driver, err := simdriver.New(m.path(driverRoot), d.driver, spec)
	if err != nil {
		return nil, err
	}
	m.driver = driver
	if err := os.MkdirAll(m.path("dev"), 0o755); err != nil { // without a /dev of its own the driver's root is not a container's
		return nil, err
	}
	m.sim = nodesim.New(nodesim.Options{
		Name: m.name, Labels: draLabels(m.name), Client: d.cluster.Client, Clock: clock.RealClock{},
		Inventory: m.inventory, OpenNVML: m.openNVML, MPSAnswers: m.mpsAnswers, Start: m.start,
		Tell:         func(format string, args ...any) { d.narration.note(m.name, format, args...) },
		StatusPeriod: pace, RestartDelay: pace, RetryDelay: pace,
	})
	return m, nil
}

func (m *machine) path(elements ...string) string {
	return filepath.Join(append([]string{m.root}, elements...)...)
}

// run lets the node live until the context ends.
func (m *machine) run(ctx context.Context) error {
	if err := m.sim.ServePodResources(ctx, m.path(podResources)); err != nil {
		return err
	}
	m.sim.Run(ctx, 200*time.Millisecond)
	return nil
}

func (m *machine) inventory(context.Context) (gpu.Inventory, error) {
	node, err := m.driver.Node()
	if err != nil {
		return gpu.Inventory{}, err
	}
	return node.Observe(), nil
}

func (m *machine) openNVML() (func() error, error) {
	connection, err := m.driver.Connect()
	if err != nil {
		return nil, err
	}
	return connection.Disconnect, nil
}

// mpsAnswers asks the daemon as NVIDIA's device plugin does.
func (m *machine) mpsAnswers(ctx context.Context, resource string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	ask := exec.CommandContext(ctx, m.path(driverRoot, "usr/bin/nvidia-cuda-mps-control"))
	ask.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + m.path(mpsRoot, resource, "pipe")}
	ask.Stdin = strings.NewReader("get_default_active_thread_percentage\n")
	return ask.Run() == nil
}

// start runs the pods of the agent's image as the processes that ship, with the arguments of their manifests and the
// token of their pod. Paths in the arguments are followed from the container through its mounts to the node.
func (m *machine) start(ctx context.Context, pod *corev1.Pod) (nodesim.Program, error) {
	container := pod.Spec.Containers[0]
	if !strings.HasPrefix(container.Image, "gpu-sharing-agent") {
		return nil, nil
	}
	address, err := nodesim.FreeAddress(ctx)
	if err != nil {
		return nil, err
	}
	kubeconfig, err := m.kubeconfig(ctx, pod)
	if err != nil {
		return nil, err
	}
	var args []string
	for _, arg := range container.Args {
		if strings.HasPrefix(arg, "--container-root=") { // here are no containers
			continue
		}
		arg = m.onNode(arg, pod)
		if strings.HasPrefix(arg, "--health-probe-bind-address=") {
			arg = "--health-probe-bind-address=" + address
		}
		args = append(args, arg)
	}
	name := pod.Labels["app.kubernetes.io/name"]
	p, err := start(m.path(name+".log"), m.agent, args, []string{
		"NODE_NAME=" + m.name, "KUBECONFIG=" + kubeconfig, "PATH=" + os.Getenv("PATH"),
	})
	if err != nil {
		return nil, err
	}
	if container.ReadinessProbe != nil {
		p.Health = "http://" + address + container.ReadinessProbe.HTTPGet.Path
	}
	return p, nil
}

// kubeconfig is that of a pod's service account; one for a pod that has no token names no API server.
func (m *machine) kubeconfig(ctx context.Context, pod *corev1.Pod) (string, error) {
	if pod.Spec.AutomountServiceAccountToken != nil && !*pod.Spec.AutomountServiceAccountToken {
		return "/nonexistent", nil
	}
	config, err := m.cluster.ConfigAs(ctx, env.Identity{
		Namespace: pod.Namespace, ServiceAccount: pod.Spec.ServiceAccountName, Pod: pod.Name, Node: m.name,
	})
	if err != nil {
		return "", err
	}
	file := m.path(pod.Spec.ServiceAccountName + ".kubeconfig")
	return file, env.WriteKubeconfig(config, file)
}

// onNode turns a path in an argument into the node's path that is mounted there.
func (m *machine) onNode(arg string, pod *corev1.Pod) string {
	flag, path, ok := strings.Cut(arg, "=/")
	if !ok {
		return arg
	}
	path = "/" + path
	for _, mount := range pod.Spec.Containers[0].VolumeMounts {
		rest, under := strings.CutPrefix(path, mount.MountPath)
		if host := hostPath(pod, mount.Name); under && host != "" {
			return flag + "=" + m.path(host, rest)
		}
	}
	return arg
}

func hostPath(pod *corev1.Pod, volume string) string {
	for _, v := range pod.Spec.Volumes {
		if v.Name == volume && v.HostPath != nil {
			return v.HostPath.Path
		}
	}
	return ""
}
