// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpuoperator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/driver"
	"github.com/gpusharing/gpu-sharing-operator/test/nvidia"
)

const (
	// goneAfter is how long evicted pods and stopped operands may take to end, and validAfter the validator to be Ready.
	goneAfter, validAfter = 5 * time.Minute, 10 * time.Minute
	// unloads is how often the driver's pod may fail until the upgrade has, and backoff how long the kubelet waits
	// before it starts the pod's init container again; the kubelet doubles that each time.
	unloads, backoff = 4, 10 * time.Second
)

// Upgrade plays what happens on a node when the pod of NVIDIA's driver is replaced: the work of the GPU Operator's
// upgrade controller (v26.7), of k8s-driver-manager (v0.12.0), and of the driver container itself.
type Upgrade struct {
	Client client.Client
	Node   string
	// Driver is the driver of the node. Run replaces it.
	Driver *driver.Driver
	// Toolkit is installed anew for the new driver.
	Toolkit driver.Toolkit
	// Version is that of the new driver. Empty: only the driver's pod restarts, and module and workloads stay.
	Version string
	// Manual says that no upgrade controller takes part (driver.upgradePolicy.autoUpgrade: false): a user deletes the
	// driver's pod, and k8s-driver-manager evicts the pods that use GPUs, right before it unloads the module.
	Manual bool
	Log    io.Writer
	// Blocked has, for each attempt to unload the module that failed, what had the driver open: the program and its
	// pod.
	Blocked [][]string

	unloaded bool
}

// Run takes the node through the states of an upgrade. If one fails, the node stays in upgrade-failed.
func (u *Upgrade) Run(ctx context.Context) error {
	if u.Manual {
		if err := u.restartPod(ctx); err != nil {
			return err
		}
		return u.awaitValidator(ctx)
	}
	does := map[string]func(context.Context) error{
		nvidia.CordonRequired:      func(ctx context.Context) error { return u.cordon(ctx, true) },
		nvidia.PodDeletionRequired: u.deletePods,
		nvidia.PodRestartRequired:  u.restartPod,
		nvidia.ValidationRequired:  u.awaitValidator,
		nvidia.UncordonRequired:    func(ctx context.Context) error { return u.cordon(ctx, false) },
	}
	for _, state := range nvidia.UpgradeStates(u.Version == "") {
		if err := u.enter(ctx, state); err != nil {
			return err
		}
		if do := does[state]; do != nil { // in the others nothing that matters here
			if err := do(ctx); err != nil {
				return errors.Join(fmt.Errorf("upgrading the driver, %s: %w", state, err), u.enter(ctx, nvidia.UpgradeFailed))
			}
		}
	}
	return nil
}

// enter writes a state to the node.
func (u *Upgrade) enter(ctx context.Context, state string) error {
	u.log("driver upgrade:", state)
	return u.label(ctx, map[string]string{nvidia.LabelUpgrade: state})
}

// restartPod deletes the driver's pod, and plays its successor: k8s-driver-manager as its init container, which the
// kubelet starts again if it fails, and then the driver container. The toolkit's pod starts after that.
func (u *Upgrade) restartPod(ctx context.Context) error {
	u.log("driver upgrade: the driver's pod is deleted")
	if err := u.Driver.PreStop(); err != nil {
		return err
	}
	unloaded, err := u.Driver.Shutdown()
	if err != nil {
		return err
	}
	u.unloaded = unloaded
	wait := backoff
	for err = u.manageDriver(ctx); err != nil; err = u.manageDriver(ctx) {
		inUse, is := errors.AsType[*driver.InUse](err)
		if !is {
			return err
		}
		names, nameErr := u.name(ctx, inUse)
		u.Blocked = append(u.Blocked, names)
		u.log("k8s-driver-manager: could not unload NVIDIA driver kernel modules, driver is in use by", names)
		if nameErr != nil || len(u.Blocked) == unloads {
			return errors.Join(err, nameErr)
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
		wait *= 2
	}
	next := u.Driver.Options
	if u.Version != "" {
		next.Version = u.Version
	}
	if u.Driver, err = driver.Start(next); err != nil {
		return err
	}
	return u.Toolkit.Install(ctx, u.Driver)
}

// manageDriver is k8s-driver-manager's command uninstall_driver. Where the module was unloaded already, it stops
// nothing.
func (u *Upgrade) manageDriver(ctx context.Context) (err error) {
	if u.unloaded {
		return u.Driver.Unmount()
	}
	node := &corev1.Node{}
	if err := u.Client.Get(ctx, client.ObjectKey{Name: u.Node}, node); err != nil {
		return fmt.Errorf("reading the node: %w", err)
	}
	paused, restored := nvidia.PauseForUpgrade(node.Labels)
	if err := u.label(ctx, paused); err != nil {
		return err
	}
	u.log("k8s-driver-manager: stopped the operands")
	defer func() { err = errors.Join(err, u.label(ctx, restored)) }()
	if err := u.awaitOperands(ctx, paused); err != nil {
		return err
	}
	u.log("k8s-driver-manager: the operands are gone")
	if u.Version != "" {
		if err := u.unload(ctx); err != nil {
			return err
		}
	}
	return u.Driver.Unmount()
}

// unload unloads the module, without an upgrade controller after the pods that use GPUs were evicted.
func (u *Upgrade) unload(ctx context.Context) (err error) {
	if !u.Manual {
		return u.Driver.Unload()
	}
	if err := u.cordon(ctx, true); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.cordon(ctx, false)) }()
	if err := u.deletePods(ctx); err != nil {
		return err
	}
	u.log("k8s-driver-manager: the pods that use GPUs are gone")
	return u.Driver.Unload()
}

// log writes what happens, with the time.
func (u *Upgrade) log(what ...any) {
	_, _ = fmt.Fprintln(u.Log, append([]any{"  ", time.Now().Format("15:04:05.000")}, what...)...)
}

func sleep(ctx context.Context, duration time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(duration):
		return nil
	}
}

const clientLabel = LabelDeploy + "client"

// awaited are the values of the label app of the pods for which k8s-driver-manager waits. NVIDIA's MPS DaemonSet is not
// among them.
var awaited = []string{
	validatorName, "nvidia-container-toolkit-daemonset", PluginName, FeaturesName, exporterName, dcgmName, "nvidia-mig-manager",
}

// label writes labels of the node.
func (u *Upgrade) label(ctx context.Context, labels map[string]string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err != nil {
		return err
	}
	return u.patchNode(ctx, patch)
}

func (u *Upgrade) cordon(ctx context.Context, unschedulable bool) error {
	return u.patchNode(ctx, fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, unschedulable))
}

func (u *Upgrade) patchNode(ctx context.Context, patch []byte) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: u.Node}}
	if err := u.Client.Patch(ctx, node, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("writing the node: %w", err)
	}
	return nil
}

// awaitOperands waits until the stopped operands are gone. When the validator ends, its preStop hook removes its files.
func (u *Upgrade) awaitOperands(ctx context.Context, labels map[string]string) error {
	for _, app := range awaited {
		isIt := func(p *corev1.Pod) bool { return p.Namespace == Namespace && p.Labels["app"] == app }
		if err := u.awaitGone(ctx, "pods with the label app="+app, isIt); err != nil {
			return err
		}
		if app == validatorName {
			if err := driver.Invalidate(); err != nil {
				return err
			}
		}
	}
	if labels[clientLabel] == "" {
		return nil
	}
	return u.awaitGone(ctx, "DaemonSet pods with the node selector "+clientLabel, func(p *corev1.Pod) bool {
		_, selects := p.Spec.NodeSelector[clientLabel] // node affinity does not count
		owner := metav1.GetControllerOf(p)
		return selects && owner != nil && owner.Kind == "DaemonSet"
	})
}

// deletePods evicts the pods that use GPUs. One that nothing would replace makes the upgrade fail, as without
// podDeletion.force.
func (u *Upgrade) deletePods(ctx context.Context) error {
	pods, err := u.pods(ctx, usesGPU)
	if err != nil {
		return err
	}
	for i := range pods {
		owner := metav1.GetControllerOf(&pods[i])
		if owner == nil {
			return fmt.Errorf("pod %s uses a GPU and has no controller", client.ObjectKeyFromObject(&pods[i]))
		}
		if owner.Kind == "DaemonSet" {
			continue
		}
		if err := u.Client.SubResource("eviction").Create(ctx, &pods[i], &policyv1.Eviction{}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("evicting pod %s: %w", client.ObjectKeyFromObject(&pods[i]), err)
		}
	}
	return u.awaitGone(ctx, "pods that use GPUs", usesGPU)
}

// usesGPU reports whether a container of a pod that has not ended asks for a resource of NVIDIA's device plugin
// (NVIDIA/gpu-operator cmd/gpu-operator/main.go).
func usesGPU(p *corev1.Pod) bool {
	if p.Status.Phase != corev1.PodRunning && p.Status.Phase != corev1.PodPending {
		return false
	}
	for i := range p.Spec.Containers {
		for name := range p.Spec.Containers[i].Resources.Limits {
			if strings.HasPrefix(string(name), "nvidia.com/gpu") || strings.HasPrefix(string(name), "nvidia.com/mig-") {
				return true
			}
		}
	}
	return false
}

// awaitValidator waits until the validator's pod on the node is Ready.
func (u *Upgrade) awaitValidator(ctx context.Context) error {
	return u.await(ctx, validAfter, func() error {
		pods, err := u.pods(ctx, func(p *corev1.Pod) bool { return p.Namespace == Namespace && p.Labels["app"] == validatorName })
		if err != nil {
			return err
		}
		if len(pods) != 1 || !PodReady(&pods[0]) {
			return errors.New("the validator is not Ready")
		}
		return nil
	})
}

// PodReady reports whether a pod is Ready.
func PodReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func (u *Upgrade) awaitGone(ctx context.Context, what string, of func(*corev1.Pod) bool) error {
	return u.await(ctx, goneAfter, func() error {
		pods, err := u.pods(ctx, of)
		if err != nil {
			return err
		}
		var names []string
		for i := range pods {
			names = append(names, client.ObjectKeyFromObject(&pods[i]).String())
		}
		if len(names) > 0 {
			return fmt.Errorf("%s are not gone: %s", what, strings.Join(names, ", "))
		}
		return nil
	})
}

// await looks until a finding is nil, which is the error in the end.
func (u *Upgrade) await(ctx context.Context, patience time.Duration, finding func() error) error {
	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	for {
		err := finding()
		if err == nil {
			return nil
		}
		if ended := sleep(ctx, poll); ended != nil {
			return errors.Join(err, ended)
		}
	}
}

// pods are those on the node that are of a kind.
func (u *Upgrade) pods(ctx context.Context, of func(*corev1.Pod) bool) ([]corev1.Pod, error) {
	all := &corev1.PodList{}
	if err := u.Client.List(ctx, all); err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	var found []corev1.Pod
	for i := range all.Items {
		if p := &all.Items[i]; p.Spec.NodeName == u.Node && of(p) {
			found = append(found, *p)
		}
	}
	return found, nil
}

// name names the processes that have the driver open, each with its pod.
func (u *Upgrade) name(ctx context.Context, inUse *driver.InUse) ([]string, error) {
	pods, err := u.pods(ctx, func(*corev1.Pod) bool { return true })
	if err != nil {
		return nil, err
	}
	var names []string
	for _, h := range inUse.Holders {
		name := h.Program
		if i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return string(p.UID) == h.PodUID }); i >= 0 {
			name += " of pod " + client.ObjectKeyFromObject(&pods[i]).String()
		}
		names = append(names, name)
	}
	return names, nil
}
