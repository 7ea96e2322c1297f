// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
)

const (
	// ManagerName is the name of mig-manager's DaemonSet.
	ManagerName = "nvidia-mig-manager"
	// LabelMIGState is what mig-manager reports of the layout that LabelMIGConfig names.
	LabelMIGState = "nvidia.com/mig.config.state"

	managerVolume = "mig-parted-config"
	managerFile   = "config.yaml"
	pausedForMIG  = "paused-for-mig-change"
	driverRoot    = "/run/nvidia/driver"
	// managerPatience is how long mig-manager waits for the end of the programs that it pauses.
	managerPatience = 5 * time.Minute
)

// manager is the DaemonSet of mig-manager, which reads a ConfigMap. The GPU Operator renders it also without one, with layouts of its
// own; here no spec needs that. Its pod holds the ConfigMap and does nothing: Manager does the work.
func manager(p *clusterPolicy) operand {
	main := standIn("nvidia-mig-manager", "rest")
	main.VolumeMounts = []corev1.VolumeMount{volumeMount(managerVolume, "/mig-parted-config", "")}
	return operand{
		name: ManagerName, account: exporterName, nodeSelector: deployedBy("mig-manager"), main: main,
		volumes: []corev1.Volume{{Name: managerVolume, VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: p.MIGManager.Config.Name},
		}}}},
	}
}

// Manager stands for mig-manager on a node: when the label names another layout, it pauses NVIDIA's programs, has NVIDIA's own
// nvidia-mig-parted apply the layout from the file that its pod has, makes the device nodes, and resumes the programs
// (NVIDIA/mig-parted v0.13.1 pkg/mig/reconfigure/reconfigure.go).
type Manager struct {
	Client client.Client
	Node   string
	// Program is nvidia-mig-parted.
	Program string
	// Log gets what the program prints.
	Log func(format string, args ...any)

	applied string // what was begun last, and by which pod: one that starts applies what the label names
}

// Run works until the context ends.
func (m *Manager) Run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := m.look(ctx); err != nil && ctx.Err() == nil {
			m.Log("mig-manager stand-in: %v", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(poll):
		}
	}
}

// look applies the layout that the label names, if it is another than the last one and mig-manager has a pod on the node.
func (m *Manager) look(ctx context.Context) error {
	node := &corev1.Node{}
	if err := m.Client.Get(ctx, client.ObjectKey{Name: m.Node}, node); err != nil {
		return fmt.Errorf("reading the node: %w", err)
	}
	pods, err := m.pods(ctx, ManagerName)
	if err != nil || len(pods) == 0 || !running(&pods[0]) {
		return err
	}
	name, pod := node.Labels[LabelMIGConfig], &pods[0]
	if name == "" || m.applied == string(pod.UID)+" "+name {
		return nil
	}
	m.applied = string(pod.UID) + " " + name
	return m.change(ctx, node, pod, name)
}

// change has a pod apply a layout between pausing and resuming NVIDIA's programs. A pod that ends in the middle resumes nothing.
func (m *Manager) change(ctx context.Context, node *corev1.Node, pod *corev1.Pod, name string) error {
	paused := map[string]string{}
	for _, operand := range []string{"device-plugin", "gpu-feature-discovery", "dcgm-exporter", "dcgm"} {
		if is := node.Labels[LabelDeploy+operand]; is == "true" || is == pausedForMIG { // by a pod that ended in the middle
			paused[LabelDeploy+operand] = pausedForMIG
		}
	}
	begun := maps.Clone(paused)
	begun[LabelMIGState] = "pending"
	if err := m.label(ctx, begun); err != nil {
		return err
	}
	state := "success"
	if err := m.reconfigure(ctx, string(pod.UID), name); err != nil {
		m.Log("mig-manager stand-in: %v", err)
		state = "failed"
	}
	switch err := m.Client.Get(ctx, client.ObjectKeyFromObject(pod), pod); {
	case apierrors.IsNotFound(err) || err == nil && !running(pod):
		return nil
	case err != nil:
		return fmt.Errorf("reading the pod of mig-manager: %w", err)
	}
	for key := range paused {
		paused[key] = "true"
	}
	paused[LabelMIGState] = state
	return m.label(ctx, paused)
}

func running(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning
}

// reconfigure applies a layout once the paused programs have ended.
func (m *Manager) reconfigure(ctx context.Context, podUID, name string) error {
	if err := m.ended(ctx); err != nil {
		return err
	}
	file := filepath.Join("/var/lib/kubelet/pods", podUID, "volumes", "kubernetes.io~configmap", managerVolume, managerFile)
	if err := m.run(ctx, "/bin/sh", "-c", withModules, "sh", m.Program, "apply", "-f", file, "-c", name); err != nil {
		return err
	}
	return m.run(ctx, "chroot", driverRoot, "nvidia-smi", "-L") // which makes the device nodes of the instances
}

// ended waits until the paused programs have no pod on the node.
func (m *Manager) ended(ctx context.Context) error {
	waiting, stop := context.WithTimeout(ctx, managerPatience)
	defer stop()
	for {
		var left []corev1.Pod
		for _, app := range []string{PluginName, FeaturesName, exporterName, dcgmName} {
			pods, err := m.pods(waiting, app)
			if err != nil {
				return err
			}
			left = append(left, pods...)
		}
		if len(left) == 0 {
			return nil
		}
		select {
		case <-waiting.Done():
			return fmt.Errorf("%d paused pods have not ended: %w", len(left), waiting.Err())
		case <-time.After(poll):
		}
	}
}

// withModules runs a program that sees the kernel modules of the simulated machine, among which nvidia-mig-parted looks for NVIDIA's.
// The kernel of this machine may have none, and then no place to show them.
const withModules = `set -e
mount --make-rprivate /
modules=$(cat ` + driver.Hardware + `/proc/modules)
mount -t tmpfs none /proc
echo "$modules" >/proc/modules
exec "$@"`

// run runs a program with the driver's library and programs, and with mounts of its own.
func (m *Manager) run(ctx context.Context, program string, args ...string) error {
	c := exec.CommandContext(ctx, program, args...)
	c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+driverRoot+"/usr/lib64", "PATH="+driverRoot+"/usr/bin:"+os.Getenv("PATH"))
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %v: %w\n%s", program, args, err, out)
	}
	return nil
}

func (m *Manager) pods(ctx context.Context, app string) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	if err := m.Client.List(ctx, pods, client.InNamespace(Namespace), client.MatchingLabels{"app": app}); err != nil {
		return nil, fmt.Errorf("listing the pods of %s: %w", app, err)
	}
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName != m.Node }), nil
}

func (m *Manager) label(ctx context.Context, labels map[string]string) error {
	node := &corev1.Node{}
	if err := m.Client.Get(ctx, client.ObjectKey{Name: m.Node}, node); err != nil {
		return fmt.Errorf("reading the node: %w", err)
	}
	before := node.DeepCopy()
	maps.Copy(node.Labels, labels)
	if err := m.Client.Patch(ctx, node, client.MergeFrom(before), client.FieldOwner("nvidia-mig-manager")); err != nil {
		return fmt.Errorf("labelling the node: %w", err)
	}
	return nil
}
