// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nodesim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// podState is what the kubelet remembers of a pod.
type podState struct {
	pod      *corev1.Pod // as last seen
	volumes  map[string]*projection
	restarts int32
	restart  time.Time     // not before
	backOff  time.Duration // before the restart after the next one
	admitted bool
	refused  string // why it was not admitted
	waiting  string // why its containers do not run

	program   Program
	plugin    *plugin             // of a device-plugin pod
	shm, mps  bool                // of NVIDIA's MPS DaemonSet: it has mounted shared memory, it has started
	claims    map[string][]string // its ResourceClaims, by name, with the devices that are prepared
	hangs     bool                // one of them cannot be prepared
	closeNVML func() error        // of a pod that has NVML open
	devices   []allocatedDevice   // of its containers
}

// kubelet runs the pods of the node, gives them devices, and publishes the status of the node.
type kubelet struct {
	*machine

	plugin      devicePlugin      // what the containers of NVIDIA's DaemonSets do
	published   map[string]counts // by resource, as last published
	publishedAt time.Time
	wiped       bool      // the ResourceSlices from before it started
	publisher   publisher // what of NVIDIA's DRA driver is there
	prepared    map[types.UID]preparedClaim
}

// syncPods is one turn of the kubelet's loop over its pods.
func (k *kubelet) syncPods(ctx context.Context, node *corev1.Node, pods []corev1.Pod) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forgetGone(pods)
	if err := k.wipeSlices(ctx); err != nil {
		return fmt.Errorf("deleting ResourceSlices: %w", err)
	}
	var errs []error
	if err := k.expireSlices(ctx); err != nil {
		errs = append(errs, fmt.Errorf("deleting ResourceSlices: %w", err))
	}
	if err := k.unprepare(ctx); err != nil {
		errs = append(errs, fmt.Errorf("giving back claims: %w", err))
	}
	for i := range pods {
		if err := k.syncPod(ctx, node, &pods[i]); err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", pods[i].Namespace, pods[i].Name, err))
		}
	}
	return errors.Join(errs...)
}

func (k *kubelet) forgetGone(pods []corev1.Pod) {
	here := map[types.UID]bool{}
	for i := range pods {
		here[pods[i].UID] = true
	}
	for uid, state := range k.pods {
		if !here[uid] {
			k.stop(state)
			delete(k.pods, uid)
		}
	}
}

func (k *kubelet) syncPod(ctx context.Context, node *corev1.Node, pod *corev1.Pod) error {
	state, ok := k.pods[pod.UID]
	if !ok {
		state = &podState{volumes: map[string]*projection{}}
		k.pods[pod.UID] = state
	}
	touched := state.pod == nil || !equality.Semantic.DeepEqual(state.pod.Annotations, pod.Annotations)
	state.pod = pod
	if pod.DeletionTimestamp != nil {
		return k.finish(ctx, state)
	}
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		k.stop(state)
		state.claims = nil
		return nil
	}
	if err := k.prepare(ctx, state); err != nil {
		return err
	}
	if state.hangs {
		return k.report(ctx, state, false)
	}
	if k.admit(state); state.refused != "" {
		return k.report(ctx, state, false)
	}
	if err := k.project(ctx, state, touched); err != nil {
		return err
	}
	ready := k.runContainers(ctx, node, state)
	return k.report(ctx, state, ready)
}

// finish ends a pod that is being deleted, and lets its object go.
func (k *kubelet) finish(ctx context.Context, state *podState) error {
	k.stop(state)
	err := k.Client.Delete(ctx, state.pod, client.GracePeriodSeconds(0), client.Preconditions{UID: &state.pod.UID})
	return client.IgnoreNotFound(err)
}

func (k *kubelet) stop(state *podState) {
	if state.program != nil {
		state.program.Stop()
		state.program = nil
	}
	if state.closeNVML != nil {
		_ = state.closeNVML()
		state.closeNVML = nil
	}
	if state.plugin != nil {
		k.plugin.unregister(state.plugin)
		state.plugin = nil
	}
	state.devices = nil
}

func (k *kubelet) stopPrograms() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, state := range k.pods {
		k.stop(state)
	}
}

// runContainers lets the containers of a pod do what they do, and reports whether the pod is ready.
func (k *kubelet) runContainers(ctx context.Context, node *corev1.Node, state *podState) bool {
	if missing := state.missingVolume(); missing != "" {
		state.waiting = missing
		return false
	}
	if k.Pulls != nil && k.Pulls(state.pod) {
		state.waiting = "ContainerCreating"
		return false
	}
	k.openNVML(state)
	if isDRA(state.pod) {
		return k.runDRA(ctx, state)
	}
	if state.pod.Labels["app"] == appDevicePlugin {
		return k.plugin.runPlugin(ctx, node, state)
	}
	if state.pod.Labels["app"] == appMPS {
		return k.plugin.runMPS(ctx, state)
	}
	return k.runProgram(ctx, state)
}

// runProgram keeps the process of a pod running.
func (k *kubelet) runProgram(ctx context.Context, state *podState) bool {
	if k.Start == nil {
		state.waiting = ""
		return true
	}
	if state.program != nil && !state.program.Alive() {
		k.Tell("kubelet: the program of pod %s ended; it is started again", state.pod.Name)
		state.program.Stop()
		state.program = nil
		k.crashed(state, "CrashLoopBackOff: the program ended")
	}
	if state.program == nil {
		if k.Clock.Now().Before(state.restart) {
			return false
		}
		program, err := k.Start(ctx, state.pod)
		if err != nil {
			k.crashed(state, err.Error())
			return false
		}
		state.waiting = ""
		if program == nil {
			return true
		}
		state.program = program
	}
	return state.program.Ready(ctx)
}

// longestBackOff is the most of RestartDelay that the kubelet waits: 5 minutes of 10 seconds.
const longestBackOff = 30

// crashed counts a restart and says when the next start is due, as the kubelet's back-off does (CrashLoopBackOff): at
// once the first time, then RestartDelay after the end, then twice as long each time, and from the beginning once twice
// the longest delay has passed since the last start (kubernetes pkg/kubelet/kuberuntime, doBackOff).
func (m *machine) crashed(state *podState, why string) {
	now, longest := m.Clock.Now(), longestBackOff*m.RestartDelay
	if now.Sub(state.restart) > 2*longest {
		state.backOff = 0
	}
	state.restarts++
	state.waiting = why
	state.restart = now.Add(state.backOff)
	state.backOff = min(max(2*state.backOff, m.RestartDelay), longest)
}

// openNVML: these of NVIDIA's programs keep the driver open for as long as they run.
func (k *kubelet) openNVML(state *podState) {
	if k.OpenNVML == nil || state.closeNVML != nil {
		return
	}
	switch state.pod.Labels["app"] {
	case appDevicePlugin, "nvidia-dcgm", "nvidia-dcgm-exporter":
		if closeNVML, err := k.OpenNVML(); err == nil {
			state.closeNVML = closeNVML
		}
	}
}

// report writes the status of a pod, if it changed.
func (k *kubelet) report(ctx context.Context, state *podState, ready bool) error {
	pod := state.pod
	want := pod.Status.DeepCopy()
	now := metav1.NewTime(k.Clock.Now())
	if want.StartTime == nil {
		want.StartTime = &now
	}
	want.Phase, want.Reason, want.Message = corev1.PodRunning, "", ""
	switch {
	case state.refused != "":
		want.Phase, want.Reason, want.Message = corev1.PodFailed, "UnexpectedAdmissionError", state.refused
	case state.hangs, !ready && len(state.volumes) > 0 && state.missingVolume() != "":
		want.Phase = corev1.PodPending
	}
	setCondition(want, corev1.PodScheduled, true, now)
	setCondition(want, corev1.PodReady, ready, now)
	setCondition(want, corev1.ContainersReady, ready, now)
	want.ContainerStatuses = containerStatuses(state, ready)
	if equality.Semantic.DeepEqual(&pod.Status, want) {
		return nil
	}
	base := pod.DeepCopy()
	pod.Status = *want
	return client.IgnoreNotFound(k.Client.Status().Patch(ctx, pod, client.MergeFrom(base)))
}

func setCondition(status *corev1.PodStatus, kind corev1.PodConditionType, is bool, now metav1.Time) {
	want := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, LastTransitionTime: now}
	if is {
		want.Status = corev1.ConditionTrue
	}
	for i, c := range status.Conditions {
		if c.Type != kind {
			continue
		}
		if c.Status != want.Status {
			status.Conditions[i] = want
		}
		return
	}
	status.Conditions = append(status.Conditions, want)
}

func containerStatuses(state *podState, ready bool) []corev1.ContainerStatus {
	statuses := make([]corev1.ContainerStatus, 0, len(state.pod.Spec.Containers))
	for _, c := range state.pod.Spec.Containers {
		s := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: ready, RestartCount: state.restarts}
		if ready {
			s.State.Running = &corev1.ContainerStateRunning{}
		} else if state.waiting != "" {
			s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: state.waiting}
		}
		statuses = append(statuses, s)
	}
	return statuses
}

type counts struct{ capacity, allocatable int }

// publish writes the extended resources into the node's status when the period has passed and they changed.
func (k *kubelet) publish(ctx context.Context, node *corev1.Node) error {
	if k.Clock.Since(k.publishedAt) < k.StatusPeriod {
		return nil
	}
	want := k.resources()
	base := node.DeepCopy()
	for name, c := range want {
		node.Status.Capacity[corev1.ResourceName(name)] = *resource.NewQuantity(int64(c.capacity), resource.DecimalSI)
		node.Status.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(c.allocatable), resource.DecimalSI)
	}
	k.publishedAt = k.Clock.Now()
	if maps.Equal(want, k.published) {
		return nil
	}
	if err := k.Client.Status().Patch(ctx, node, client.MergeFrom(base)); err != nil {
		return fmt.Errorf("publishing the status of node %s: %w", k.Name, err)
	}
	k.published = want
	k.Tell("kubelet: the node advertises %s", describe(want))
	return nil
}

// resources counts the devices of each resource. One that a plugin no longer serves stays, with nothing to allocate.
func (k *kubelet) resources() map[string]counts {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string]counts{}
	for name, e := range k.endpoints {
		c := counts{capacity: len(e.devices), allocatable: len(e.devices)}
		if e.gone {
			c.allocatable = 0
		}
		all[name] = c
	}
	return all
}

func describe(resources map[string]counts) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		if c := resources[name]; c.allocatable > 0 {
			parts = append(parts, fmt.Sprintf("%s: %d", name, c.allocatable))
		}
	}
	if len(parts) == 0 {
		return "no GPU"
	}
	return strings.Join(parts, ", ")
}

// projection is a ConfigMap as a pod sees it.
type projection struct {
	data  map[string]string // nil: the ConfigMap does not exist
	since time.Time
}

// project brings ConfigMaps into a pod: at once when the pod is new or was changed, otherwise after the delay.
func (k *kubelet) project(ctx context.Context, state *podState, touched bool) error {
	for _, volume := range state.pod.Spec.Volumes {
		if volume.ConfigMap == nil {
			continue
		}
		name := volume.ConfigMap.Name
		old, ok := state.volumes[name]
		if ok && old.data != nil && !touched && k.Clock.Since(old.since) < k.ProjectionDelay {
			continue
		}
		configMap := &corev1.ConfigMap{}
		err := k.Client.Get(ctx, types.NamespacedName{Namespace: state.pod.Namespace, Name: name}, configMap)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("projecting ConfigMap %s: %w", name, err)
		}
		state.volumes[name] = &projection{data: dataOf(configMap, err == nil), since: k.Clock.Now()}
	}
	return nil
}

func dataOf(configMap *corev1.ConfigMap, exists bool) map[string]string {
	if !exists {
		return nil
	}
	if configMap.Data == nil {
		return map[string]string{}
	}
	return configMap.Data
}

// ReadConfigs are the UIDs of the pods on the node that have a ConfigMap before them.
func (k *kubelet) ReadConfigs() (pods []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for uid, state := range k.pods {
		if len(state.volumes) > 0 {
			pods = append(pods, string(uid))
		}
	}
	return pods
}

// SeesConfig reports whether a pod sees a key of a ConfigMap.
func (k *kubelet) SeesConfig(pod, key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	state := k.pods[types.UID(pod)]
	if state == nil {
		return false
	}
	for _, v := range state.volumes {
		if _, sees := v.data[key]; sees {
			return true
		}
	}
	return false
}

// missingVolume says why the containers cannot be created yet; empty if they can.
func (s *podState) missingVolume() string {
	for name, p := range s.volumes {
		if p.data == nil {
			return fmt.Sprintf("ContainerCreating: configmap %q not found", name)
		}
	}
	return ""
}

// podResources serves the kubelet's pod-resources API of a node.
type podResources struct {
	podresourcesv1.UnimplementedPodResourcesListerServer
	machine *machine
}

// ServePodResources serves the pod-resources API on a socket until the context ends.
func (k *kubelet) ServePodResources(ctx context.Context, socket string) error {
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return fmt.Errorf("making the folder of the pod-resources socket: %w", err)
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing an old pod-resources socket: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("listening for pod-resources requests: %w", err)
	}
	server := grpc.NewServer()
	podresourcesv1.RegisterPodResourcesListerServer(server, &podResources{machine: k.machine})
	go func() {
		<-ctx.Done()
		server.Stop()
	}()
	go func() { _ = server.Serve(listener) }()
	return nil
}

// List implements the API: every pod of the node, with the devices of its containers by resource.
func (r *podResources) List(context.Context, *podresourcesv1.ListPodResourcesRequest) (*podresourcesv1.ListPodResourcesResponse, error) {
	r.machine.mu.Lock()
	defer r.machine.mu.Unlock()
	response := &podresourcesv1.ListPodResourcesResponse{}
	for _, state := range r.machine.pods {
		response.PodResources = append(response.PodResources, state.podResources(r.machine.Name))
	}
	return response, nil
}

// GetAllocatableResources implements the API: every device that a plugin offers.
func (r *podResources) GetAllocatableResources(
	context.Context, *podresourcesv1.AllocatableResourcesRequest,
) (*podresourcesv1.AllocatableResourcesResponse, error) {
	r.machine.mu.Lock()
	defer r.machine.mu.Unlock()
	response := &podresourcesv1.AllocatableResourcesResponse{}
	for resource, e := range r.machine.endpoints {
		devices := &podresourcesv1.ContainerDevices{ResourceName: resource}
		for _, d := range e.devices {
			devices.DeviceIds = append(devices.DeviceIds, d.ID)
		}
		response.Devices = append(response.Devices, devices)
	}
	return response, nil
}

// Get implements the API.
func (r *podResources) Get(_ context.Context, request *podresourcesv1.GetPodResourcesRequest) (*podresourcesv1.GetPodResourcesResponse, error) {
	r.machine.mu.Lock()
	defer r.machine.mu.Unlock()
	for _, state := range r.machine.pods {
		if state.pod.Namespace == request.PodNamespace && state.pod.Name == request.PodName {
			return &podresourcesv1.GetPodResourcesResponse{PodResources: state.podResources(r.machine.Name)}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "pod %s in namespace %s not found", request.PodName, request.PodNamespace)
}

func (s *podState) podResources(node string) *podresourcesv1.PodResources {
	pod := &podresourcesv1.PodResources{Name: s.pod.Name, Namespace: s.pod.Namespace}
	for _, c := range s.pod.Spec.Containers {
		container := &podresourcesv1.ContainerResources{Name: c.Name, DynamicResources: s.dynamicResources(node, &c)}
		for _, d := range s.devices {
			if d.container == c.Name {
				container.Devices = append(container.Devices, &podresourcesv1.ContainerDevices{
					ResourceName: d.resource, DeviceIds: []string{d.id},
				})
			}
		}
		pod.Containers = append(pod.Containers, container)
	}
	return pod
}
