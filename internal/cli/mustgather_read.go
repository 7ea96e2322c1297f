// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

const (
	// logLines, logBytes and logTimeout bound the log of a container.
	logLines, logBytes, logTimeout = 2000, 4 << 20, 30 * time.Second
	// logsTimeout bounds all logs together: each kubelet that does not answer costs logTimeout.
	logsTimeout           = 3 * time.Minute
	mpsName, operandsName = "gpu-sharing-mps", "gpu-sharing-operands"
	featureDiscovery      = cluster.FeatureDiscovery
)

// nvidias are the values of nameLabel of NVIDIA's workloads that no deploy label of a node starts, and of those that
// they need.
var nvidias = []string{"gpu-operator", "nvidia-device-plugin", featureDiscovery}

// list reads all objects of a kind in a namespace; empty: in all. It reads what it can, and records why that is not
// all. A kind that is not the operator's may be missing.
func (g *gathering) list(ctx context.Context, of schema.GroupVersionKind, namespace string, opts ...client.ListOption) []unstructured.Unstructured {
	var all []unstructured.Unstructured
	_, err := everyOf(ctx, g.client, of, func(items []unstructured.Unstructured) { all = append(all, items...) }, append(opts, client.InNamespace(namespace))...)
	if err != nil && (of.Group == v1alpha1.Group || !meta.IsNoMatchError(err)) {
		where := "all namespaces"
		if namespace != "" {
			where = "namespace " + namespace
		}
		g.missed(of.Kind+" objects in "+where, err, "list "+g.resource(of).String()+" in "+where, "")
	}
	return all
}

// resource is what RBAC calls a kind.
func (g *gathering) resource(of schema.GroupVersionKind) schema.GroupResource {
	mapping, err := g.client.RESTMapper().RESTMapping(of.GroupKind())
	if err != nil {
		return schema.GroupResource{Group: of.Group, Resource: of.Kind} // an API server without the kind
	}
	return mapping.Resource.GroupResource()
}

// write adds a file for an object.
func (g *gathering) write(o *unstructured.Unstructured) {
	if redacted := redact(o); redacted != nil {
		g.add(path.Join(g.resource(o.GroupVersionKind()).Resource, o.GetNamespace(), o.GetName()+".yaml"), redacted)
	}
}

// objects gathers all objects but Events. It returns the workloads and pods.
func (g *gathering) objects(ctx context.Context) (workloads []unstructured.Unstructured) {
	g.each(g.list(ctx, v1alpha1.SchemeGroupVersion.WithKind("GPUSharingPolicy"), ""), nil)
	g.each(g.list(ctx, v1alpha1.SchemeGroupVersion.WithKind("GPUNode"), ""), g.isChosen)
	g.each(g.nodes, g.isChosen)
	for _, plural := range []string{"gpunodes", "gpusharingpolicies"} {
		g.get(ctx, kindOf("apiextensions.k8s.io", "v1", "CustomResourceDefinition"), types.NamespacedName{Name: plural + "." + v1alpha1.Group})
	}
	named := client.MatchingFieldsSelector{Selector: fields.OneTermEqualSelector("metadata.name", controllerName)}
	g.each(g.list(ctx, kindOf("coordination.k8s.io", "v1", "Lease"), "", named), nil)
	g.each(g.list(ctx, kindOf(autoscaling.GroupKarpenter, "v1alpha1", "NodeOverlay"), ""), nil)
	g.dra(ctx)
	g.each(g.list(ctx, cluster.NodeFeatureKind(), ""), func(o *unstructured.Unstructured) bool {
		return slices.Contains(g.names, o.GetLabels()[cluster.LabelNodeName])
	})
	policies := g.list(ctx, clusterPolicyKind(), "")
	g.each(policies, nil)
	workloads = g.workloads(ctx, policies)
	g.configMaps(ctx, policies, workloads)
	return workloads
}

func (g *gathering) each(all []unstructured.Unstructured, chosen func(*unstructured.Unstructured) bool) {
	for i := range all {
		if chosen == nil || chosen(&all[i]) {
			g.write(&all[i])
		}
	}
}

func (g *gathering) isChosen(o *unstructured.Unstructured) bool {
	return slices.Contains(g.names, o.GetName())
}

// get gathers one object, if it exists.
func (g *gathering) get(ctx context.Context, of schema.GroupVersionKind, name types.NamespacedName) {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(of)
	err := g.client.Get(ctx, name, o)
	switch {
	case err == nil:
		g.write(o)
	case !apierrors.IsNotFound(err):
		g.missed(of.Kind+" "+name.String(), err, "get "+g.resource(of).String(), "")
	}
}

// workloads gathers the Deployments, DaemonSets and pods of the operator and of NVIDIA, and returns them.
func (g *gathering) workloads(ctx context.Context, policies []unstructured.Unstructured) []unstructured.Unstructured {
	var found []unstructured.Unstructured
	namespaces := map[string]bool{}
	for i := range policies {
		namespaces[at(&policies[i], "status", "namespace")] = true
	}
	for _, kind := range []string{"Deployment", "DaemonSet"} {
		for _, o := range g.list(ctx, kindOf("apps", "v1", kind), "") {
			if isProgram(&o, "spec", "template", "spec") {
				found = append(found, o)
				namespaces[o.GetNamespace()] = true
			}
		}
	}
	delete(namespaces, "") // which would be all
	// The operator's pods are found without the right to read DaemonSets too.
	pod, seen := kindOf("", "v1", "Pod"), map[types.UID]bool{}
	var pods []unstructured.Unstructured
	for _, name := range ownNames {
		pods = append(pods, g.list(ctx, pod, "", client.MatchingLabels{nameLabel: name})...)
	}
	for _, namespace := range slices.Sorted(maps.Keys(namespaces)) {
		pods = append(pods, g.list(ctx, pod, namespace)...)
	}
	for i := range pods {
		if !seen[pods[i].GetUID()] && isProgram(&pods[i], "spec") && g.isNear(&pods[i]) {
			seen[pods[i].GetUID()] = true
			found = append(found, pods[i])
		}
	}
	theirs := func(o unstructured.Unstructured) int { // a tenant may label pods as ours, and fill the archive by them
		if slices.Contains(g.own, o.GetNamespace()) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(found, func(a, b unstructured.Unstructured) int { return theirs(a) - theirs(b) })
	g.each(found, nil)
	return found
}

// isProgram reports whether a workload or a pod, of which the path leads to the specification of the pod, is the
// operator's or NVIDIA's.
func isProgram(o *unstructured.Unstructured, podSpec ...string) bool {
	selector, _, _ := unstructured.NestedStringMap(o.Object, append(podSpec, "nodeSelector")...)
	return isOurs(o.GetLabels()) || slices.Contains(nvidias, o.GetLabels()[nameLabel]) || o.GetLabels()["app"] == "gpu-operator" || cluster.SelectsDeploy(selector) || isDRADriver(o.GetLabels())
}

// isDRADriver reports whether labels are those of a program of NVIDIA's DRA driver.
func isDRADriver(labels map[string]string) bool {
	return strings.HasPrefix(labels[cluster.LabelApp], "nvidia-dra-driver") || // with a GPUCluster
		slices.ContainsFunc(cluster.DRALabels(), func(label string) bool { return label != cluster.LabelApp && labels[label] != "" })
}

// dra gathers what NVIDIA's DRA driver publishes of the chosen nodes, which claims have devices of them, the
// classes by which pods get GPUs, and all taints of devices.
func (g *gathering) dra(ctx context.Context) {
	g.each(g.list(ctx, kindOf(draGroup, "v1", kindSlice), ""), func(o *unstructured.Unstructured) bool {
		return at(o, "spec", "driver") == dra.DriverName && slices.Contains(g.names, at(o, "spec", "nodeName"))
	})
	g.each(g.list(ctx, kindOf(draGroup, "v1", kindClaim), ""), func(o *unstructured.Unstructured) bool {
		claim, counts := dra.ClaimOf(o.GetNamespace(), o.GetName(), o.Object)
		return counts && slices.ContainsFunc(claim.Devices, func(d dra.Allocated) bool { return slices.Contains(g.names, d.Pool) })
	})
	g.each(g.list(ctx, kindOf(draGroup, "v1", kindClass), ""), func(o *unstructured.Unstructured) bool {
		return cluster.IsGPUResource(dra.ClassOf(o).Resource) || dra.Ours(o.GetName())
	})
	g.each(g.list(ctx, kindOf(draGroup, "v1", kindTaintRule), ""), nil)
}

// isNear reports whether a pod is on a chosen node, or is no pod of a DaemonSet.
func (g *gathering) isNear(pod *unstructured.Unstructured) bool {
	name, node := pod.GetLabels()[nameLabel], at(pod, "spec", "nodeName")
	ofEachNode := name == agentName || name == mpsName || slices.ContainsFunc(pod.GetOwnerReferences(), func(r metav1.OwnerReference) bool { return r.Kind == "DaemonSet" })
	return !ofEachNode || node == "" || slices.Contains(g.names, node)
}

// configMaps gathers the operator's ConfigMaps, and those that NVIDIA's device plugin and mig-manager read.
func (g *gathering) configMaps(ctx context.Context, policies, workloads []unstructured.Unstructured) {
	kind := kindOf("", "v1", "ConfigMap")
	g.each(g.list(ctx, kind, "", managedByUs), func(o *unstructured.Unstructured) bool { return o.GetName() == cluster.ConfigMapName })
	read := map[types.NamespacedName]bool{}
	for i := range policies {
		policy := &policies[i]
		namespace := at(policy, "status", "namespace")
		for _, name := range []string{
			at(policy, "spec", "devicePlugin", "config", "name"), at(policy, "spec", "migManager", "config", "name"), configRecorded(policy),
		} {
			read[types.NamespacedName{Namespace: namespace, Name: name}] = true
		}
	}
	for i := range workloads {
		if name := standAloneConfigMap(&workloads[i]); !read[name] {
			read[name] = false // a user who may create Deployments may label one so, and name any ConfigMap
		}
	}
	for _, name := range slices.SortedFunc(maps.Keys(read), func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) }) {
		if name.Namespace != "" && name.Name != "" {
			g.configMap(ctx, name, read[name])
		}
	}
}

// configMap gathers a ConfigMap, if it exists. One that is not known to be NVIDIA's is gathered only if the operator
// has written to it, which the API server records.
func (g *gathering) configMap(ctx context.Context, name types.NamespacedName, known bool) {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kindOf("", "v1", "ConfigMap"))
	err := g.client.Get(ctx, name, o)
	written := slices.ContainsFunc(o.GetManagedFields(), func(f metav1.ManagedFieldsEntry) bool { return f.Manager == clusterpolicy.FieldManager })
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		g.missed("ConfigMap "+name.String(), err, "get configmaps", "")
	case !known && !written:
		g.unread = append(g.unread, unread{What: "ConfigMap " + name.String(), Reason: "a Deployment names it, but the operator has not written to it"})
	default:
		g.write(o)
	}
}

// standAloneConfigMap is the ConfigMap of a device plugin without the GPU Operator that the flags of a Deployment of
// the controller name.
func standAloneConfigMap(o *unstructured.Unstructured) types.NamespacedName {
	var deployment appsv1.Deployment
	if o.GetKind() != "Deployment" || o.GetLabels()[nameLabel] != controllerName || runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &deployment) != nil {
		return types.NamespacedName{}
	}
	return standAloneOf(&deployment)
}

// events gathers the Events that the operator has written, and those about policies, GPUNodes, workloads and pods.
func (g *gathering) events(ctx context.Context, workloads []unstructured.Unstructured) {
	kind := kindOf("", "v1", "Event")
	about, namespaces := map[[3]string]bool{}, map[string]bool{}
	for i := range workloads {
		o := &workloads[i]
		about[[3]string{o.GetKind(), o.GetNamespace(), o.GetName()}], namespaces[o.GetNamespace()] = true, true
	}
	found := map[string][]any{}
	seen := map[types.UID]bool{}
	add := func(events []unstructured.Unstructured, gathered func(kind, namespace, name string) bool) {
		for i := range events {
			e := &events[i]
			kind, namespace, name := at(e, "involvedObject", "kind"), at(e, "involvedObject", "namespace"), at(e, "involvedObject", "name")
			if (kind == "Node" || kind == "GPUNode") && !slices.Contains(g.names, name) || !gathered(kind, namespace, name) || seen[e.GetUID()] {
				continue
			}
			seen[e.GetUID()] = true
			found[e.GetNamespace()] = append(found[e.GetNamespace()], redact(e))
		}
	}
	all := func(string, string, string) bool { return true }
	for _, field := range []fields.Selector{
		fields.OneTermEqualSelector("reportingComponent", controllerName), fields.OneTermEqualSelector("involvedObject.kind", "GPUSharingPolicy"),
		fields.OneTermEqualSelector("involvedObject.kind", "GPUNode"),
	} {
		add(g.list(ctx, kind, "", client.MatchingFieldsSelector{Selector: field}), all)
	}
	for _, namespace := range slices.Sorted(maps.Keys(namespaces)) {
		add(g.list(ctx, kind, namespace), func(kind, namespace, name string) bool { return about[[3]string{kind, namespace, name}] })
	}
	for _, namespace := range slices.Sorted(maps.Keys(found)) {
		g.add(path.Join("events", namespace+".yaml"), found[namespace])
	}
}

// logs gathers the logs of the operator's pods.
func (g *gathering) logs(ctx context.Context, workloads []unstructured.Unstructured) {
	ctx, cancel := context.WithTimeout(ctx, logsTimeout)
	defer cancel()
	forbidden := map[string]bool{}
	for i := range workloads {
		pod := &corev1.Pod{}
		o := &workloads[i]
		if o.GetKind() != "Pod" || !isOurs(o.GetLabels()) || forbidden[o.GetNamespace()] {
			continue
		}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, pod); err != nil {
			g.missed("logs of pod "+o.GetNamespace()+"/"+o.GetName(), err, "", "")
			continue
		}
		forbidden[pod.Namespace] = g.logsOf(ctx, pod)
	}
}

// logsOf gathers the logs of the operator's containers of a pod. It reports whether the user may not read logs in its
// namespace.
func (g *gathering) logsOf(ctx context.Context, pod *corev1.Pod) (forbidden bool) {
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		for _, previous := range []bool{false, true} {
			if !slices.Contains(ownContainers, status.Name) || previous && status.RestartCount == 0 {
				continue
			}
			err := g.log(ctx, pod, status.Name, previous)
			if apierrors.IsForbidden(err) {
				g.missed("logs in namespace "+pod.Namespace, err, "get pods/log in namespace "+pod.Namespace, fmt.Sprintf(
					"an administrator runs `kubectl -n %[1]s create role gpu-sharing-logs --verb=get --resource=pods/log` and "+
						"`kubectl -n %[1]s create rolebinding gpu-sharing-logs --role=gpu-sharing-logs --user=NAME`", pod.Namespace))
				return true
			}
			if err != nil {
				g.missed(fmt.Sprintf("log of container %s of pod %s/%s", status.Name, pod.Namespace, pod.Name), err, "", "")
			}
		}
	}
	return false
}

// log gathers the last lines of the log of a container.
func (g *gathering) log(ctx context.Context, pod *corev1.Pod, container string, previous bool) error {
	ctx, cancel := context.WithTimeout(ctx, logTimeout)
	defer cancel()
	stream, err := g.pods.Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{
		Container: container, Previous: previous, TailLines: new(int64(logLines)), // with LimitBytes the last lines would be missing
	}).Stream(ctx) // of which the error has the reason
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }() // it was read
	content, err := lastOf(stream, logBytes)
	if previous {
		container += ".previous"
	}
	name := path.Join("logs", pod.Namespace, pod.Name, container+".log")
	if err == nil || len(content) > 0 {
		g.addText(name, content)
	}
	if err != nil {
		return fmt.Errorf("reading the log: %w; %s has the %d bytes that came before", err, name, len(content))
	}
	return nil
}

// lastOf reads a text to its end and returns its last lines, of at most so many bytes together. It holds about twice as
// many. If it cannot read on, it returns the last of what it has read, and why.
func lastOf(text io.Reader, most int) ([]byte, error) {
	var last []byte
	const atOnce = 32 << 10
	for part, cut := make([]byte, atOnce), false; ; {
		n, err := text.Read(part)
		last = append(last, part[:n]...)
		if len(last) > 2*most || err != nil && len(last) > most {
			last, cut = append(last[:0], last[len(last)-most:]...), true
		}
		if err == nil {
			continue
		}
		if _, rest, found := bytes.Cut(last, []byte("\n")); cut && found {
			last = rest
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return last, err
	}
}
