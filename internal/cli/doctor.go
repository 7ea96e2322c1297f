// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/openapi"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// ErrUnhealthy reports that doctor found an error.
var ErrUnhealthy = errors.New("doctor found errors")

// installation is what doctor reads of a cluster.
type installation struct {
	// program is the version of the plugin.
	program string
	// missing is why the kinds of the operator cannot be read; empty: they can.
	missing     string
	leader      leadership
	controllers []component
	agentSets   []agentSet
	// updateGoesOn says that the agents of further nodes were updated a short while ago.
	updateGoesOn bool
	skews        []skew
	snapshot     cluster.Snapshot
	lacks        []string // what is not known of NVIDIA's DRA driver, because the user may not read it
	programs     cluster.Programs
	nodes        []nodeParts
	// nodeSelector is which nodes have GPUs as the controller is told; nil: not known.
	nodeSelector labels.Selector
	// unknown are the nodes that it selects and that have no GPUNode.
	unknown []string
	clusterPolicy,
	gpuOperator string // the name of NVIDIA's ClusterPolicy, and the version of the GPU Operator that it is labelled with
	// standAlone says that no GPU Operator runs the device plugin; false also if the user may not know.
	standAlone bool
	// olmV0 is the namespace in which OLM v0 installed the operator's kinds; empty: it did not, or they were given to OLM v1.
	olmV0 string
	// installers are what installs the operator, such as ClusterExtension gpu-sharing-operator, as far as the user may read it.
	installers []string
	// told is the ConfigMap of a stand-alone device plugin that the flags of the controller name.
	told types.NamespacedName
}

// selector is which nodes have GPUs, as text.
func (is *installation) selector() string {
	if is.nodeSelector == nil {
		return cluster.DefaultSelector
	}
	return is.nodeSelector.String()
}

// component is a Deployment of the operator, or a pod of a DaemonSet on a node; version is empty if its image tells
// none.
type component struct {
	name, version string
	ready         bool
	updating      bool // of a Deployment: pods of a former version may run
	outdated      bool // of an agent: not as its DaemonSet is now
	// config is of a device plugin the ConfigMap that it reads; without a name: none.
	config types.NamespacedName
}

// agentSet is one of the two DaemonSets of agents. Of the nodes on which one is to run, present have one, and updated
// one as it is now.
type agentSet struct {
	name                    string
	nodes, present, updated int
	observed                bool   // Kubernetes has seen what it is now
	dra                     bool   // of the nodes where a GPUCluster installs NVIDIA's DRA driver
	generation              string // of the pods as they should be, which the label podGeneration of a pod tells; empty: not known
}

// nodeParts are the programs on a node with GPUs that the operator works with.
type nodeParts struct {
	name            string
	kubelet, driver string // versions
	nfd             bool   // Node Feature Discovery has labelled the node
	down            bool   // Kubernetes says that the node is not Ready
	stack           dra.Stack
	draAgent        bool // its agent is one of the DaemonSet draAgentName
	agents, plugins []component
	discovery       []component // of Node Feature Discovery
	drivers         []component // NVIDIA's DRA driver
}

// doctor prints what is wrong with the operator and what it needs.
func (p *Program) doctor(ctx context.Context, f *flags, _ []string) error {
	config, err := configOf(f)
	if err != nil {
		return err
	}
	is, err := p.examineCluster(ctx, config, f.namespace)
	if err != nil {
		return advise(err)
	}
	return p.report(diagnose(is), f.output)
}

// examineCluster reads the cluster of a configuration, with the controller of a namespace as leadershipOf takes it.
func (p *Program) examineCluster(ctx context.Context, config *rest.Config, namespace string) (installation, error) {
	c, err := clientOf(config)
	if err != nil {
		return installation{}, err
	}
	server, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return installation{}, fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	return p.examine(ctx, c, namespace, server.OpenAPIV3())
}

// report prints findings; output is json, yaml, or empty for text. It is an error if one of them is.
func (p *Program) report(found []finding, output string) error {
	shown, err := reportAs(found, p.Width, output)
	if err != nil {
		return err
	}
	if err := p.write(shown); err != nil {
		return err
	}
	if unhealthy(found) {
		return ErrUnhealthy
	}
	return nil
}

func reportAs(found []finding, width int, output string) (string, error) {
	if output != "" {
		return marshal(map[string]any{"findings": doctorsReport(found)}, output)
	}
	shown := text{width: width}
	shown.findings(found)
	return shown.String(), nil
}

// unhealthy reports whether one of some findings is an error.
func unhealthy(found []finding) bool {
	return slices.ContainsFunc(found, func(f finding) bool { return f.level == levelError })
}

// examine reads a cluster, whose API server publishes the schemas of its kinds, with the controller of a namespace as
// leadershipOf takes it.
func (p *Program) examine(ctx context.Context, c client.Client, namespace string, published openapi.Client) (installation, error) {
	is := installation{program: p.Version}
	s, told, err := p.read(ctx, c, namespace)
	if meta.IsNoMatchError(err) {
		is.missing = err.Error()
		return is, nil
	}
	if err != nil {
		return is, err
	}
	is.snapshot, is.lacks, is.programs = s, told.lacks, told.programs
	if is.skews, err = readSkews(published); err != nil && !apierrors.IsForbidden(err) {
		return is, err
	}
	if is.leader, err = leadershipOf(ctx, c, namespace, p.Clock.Now()); err != nil {
		return is, err
	}
	if err := is.readControllers(ctx, c); err != nil {
		return is, err
	}
	if err := is.readAgentSets(ctx, c); err != nil {
		return is, err
	}
	if is.olmV0, err = installedByOLMv0(ctx, c); err != nil {
		return is, err
	}
	olm, err := installersOf(ctx, c)
	if err != nil {
		return is, err
	}
	is.installers = append(is.installers, olm...)
	policy, err := clusterPolicy(ctx, c)
	if err != nil && !apierrors.IsForbidden(err) {
		return is, err
	}
	is.standAlone = err == nil && !clusterpolicy.RunsPlugin(policy)
	if policy != nil {
		is.clusterPolicy, is.gpuOperator = policy.GetName(), policy.GetLabels()["app.kubernetes.io/version"]
	}
	err = is.readNodes(ctx, c)
	return is, err
}

// readControllers reads the Deployments of the controller. Kubernetes' ClusterRole edit lets each tenant create one
// with the same label, in a namespace that is none of the controller's.
func (is *installation) readControllers(ctx context.Context, c client.Client) error {
	deployments, err := deploymentsIn(ctx, c, is.leader.namespaces)
	if err != nil {
		return err
	}
	for i := range deployments {
		d := &deployments[i]
		is.controllers = append(is.controllers, component{
			name: d.Namespace + "/" + d.Name, version: versionOf(d.Labels, &d.Spec.Template.Spec), ready: d.Status.AvailableReplicas > 0,
			updating: isUpdating(d),
		})
		if d.Labels["helm.sh/chart"] != "" { // what Helm has kept has it too, also when OLM has installed the rest anew
			is.installers = []string{"Helm (release " + d.Annotations["meta.helm.sh/release-name"] + ")"}
		}
		is.told = standAloneOf(d)
		if selector := nodeSelectorOf(&d.Spec.Template.Spec); selector != nil {
			is.nodeSelector = selector
		}
	}
	return nil
}

// installedByOLMv0 is the namespace of olmV0. OLM v0 labels what it has installed, most of the time also with the namespace
// (https://olm.operatorframework.io/docs/concepts/crds/operator/), which otherwise is the one that the bundle suggests. OLM
// v1 takes over what Helm would.
func installedByOLMv0(ctx context.Context, c client.Client) (string, error) {
	crd := &metav1.PartialObjectMetadata{}
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	if err := c.Get(ctx, client.ObjectKey{Name: "gpusharingpolicies." + v1alpha1.Group}, crd); err != nil {
		return "", unlessForbidden(client.IgnoreNotFound(err))
	}
	if crd.Labels["olm.managed"] != "true" || crd.Labels["app.kubernetes.io/managed-by"] == "Helm" {
		return "", nil
	}
	for label := range crd.Labels {
		if namespace, is := strings.CutPrefix(label, "operators.coreos.com/gpu-sharing-operator."); is {
			return namespace, nil
		}
	}
	return "gpu-sharing-operator", nil
}

// installersOf are a ClusterServiceVersion and a ClusterExtension of the operator, one of each at most.
func installersOf(ctx context.Context, c client.Client) (all []string, err error) {
	const operator = "gpu-sharing-operator"
	second := false // ClusterExtension, which takes nothing
	_, v0 := eachOf(ctx, c, kindOf("operators.coreos.com", "v1alpha1", "ClusterServiceVersion"), func(o *unstructured.Unstructured) {
		if all == nil && strings.HasPrefix(o.GetName(), operator+".v") && o.GetLabels()["olm.copiedFrom"] == "" {
			all = []string{"OLM v0 (ClusterServiceVersion " + o.GetNamespace() + "/" + o.GetName() + ")"}
		}
	})
	_, v1 := eachOf(ctx, c, kindOf("olm.operatorframework.io", "v1", "ClusterExtension"), func(o *unstructured.Unstructured) {
		if !second && at(o, "spec", "source", "catalog", "packageName") == operator {
			all, second = append(all, "OLM v1 (ClusterExtension "+o.GetName()+")"), true
		}
	})
	return all, errors.Join(v0, v1)
}

func (is *installation) readAgentSets(ctx context.Context, c client.Client) error {
	sets := &appsv1.DaemonSetList{}
	if err := c.List(ctx, sets, client.MatchingLabels{nameLabel: agentName}); err != nil {
		return fmt.Errorf("reading the DaemonSet of the agents: %w", err)
	}
	for i := range sets.Items {
		d := &sets.Items[i]
		if is.isOf(d.Namespace) {
			is.agentSets = append(is.agentSets, agentSet{
				name: d.Namespace + "/" + d.Name, nodes: int(d.Status.DesiredNumberScheduled), present: int(d.Status.CurrentNumberScheduled),
				updated: int(d.Status.UpdatedNumberScheduled), observed: d.Status.ObservedGeneration >= d.Generation, dra: d.Name == draAgentName,
				generation: d.Annotations[appsv1.DeprecatedTemplateGeneration],
			})
		}
	}
	return nil
}

// podGeneration is the label that tells of which generation of its DaemonSet a pod is:
// https://github.com/kubernetes/kubernetes/blob/v1.37.1/pkg/controller/daemon/util/daemonset_util.go
const podGeneration = "pod-template-generation"

// outdated is how many agents an update of a DaemonSet has still to replace. That of a node that is down it cannot.
// Kubernetes counts that one as scheduled, and as updated if it is, because it stays there.
func (is *installation) outdated(of agentSet) int {
	return max(of.present-of.updated-is.down(of, func(n nodeParts) bool {
		return slices.ContainsFunc(n.agents, func(c component) bool { return c.outdated })
	}), 0)
}

// absent is on how many nodes that are up a DaemonSet has no agent though one is to run there.
func (is *installation) absent(of agentSet) int {
	return max(of.nodes-of.present-is.down(of, func(n nodeParts) bool { return len(n.agents) == 0 }), 0)
}

// down counts the nodes of a DaemonSet that are down and for which something is true.
func (is *installation) down(of agentSet, isTrue func(nodeParts) bool) int {
	return len(selected(is.nodes, func(n nodeParts) bool { return n.down && n.draAgent == of.dra && isTrue(n) }))
}

// isOutdated reports whether a pod is one of an older generation of a DaemonSet of agents.
func (is *installation) isOutdated(pod *corev1.Pod) bool {
	return slices.ContainsFunc(is.agentSets, func(s agentSet) bool {
		owner := metav1.GetControllerOf(pod)
		return owner != nil && pod.Namespace+"/"+owner.Name == s.name && s.generation != "" && pod.Labels[podGeneration] != s.generation
	})
}

// updated is how many agents are as they should be, and whether others are being updated, or made.
func (is *installation) updated() (agents int, updating bool) {
	for _, set := range is.agentSets {
		agents, updating = agents+set.updated, updating || !set.observed || is.outdated(set)+is.absent(set) > 0
	}
	return agents, updating
}

// isUpdating reports whether not all pods of a Deployment are as it says, as `kubectl rollout status` decides it, but
// that one may be unavailable.
func isUpdating(d *appsv1.Deployment) bool {
	s := &d.Status
	return s.ObservedGeneration < d.Generation || d.Spec.Replicas != nil && s.UpdatedReplicas < *d.Spec.Replicas || s.Replicas > s.UpdatedReplicas
}

// nodeSelectorOf is which nodes have GPUs by the flag of a controller; nil: it has none that can be read.
func nodeSelectorOf(spec *corev1.PodSpec) labels.Selector {
	for _, c := range spec.Containers {
		for _, arg := range c.Args {
			if value, is := strings.CutPrefix(arg, "--node-selector="); is {
				if selector, err := labels.Parse(value); err == nil {
					return selector
				}
			}
		}
	}
	return nil
}

// readNodes reads the nodes with GPUs, and the pods of the operator's agent and of NVIDIA's device plugin and DRA
// driver on them.
func (is *installation) readNodes(ctx context.Context, c client.Client) error {
	at := map[string]*nodeParts{}
	is.nodes = make([]nodeParts, len(is.snapshot.Nodes))
	for i := range is.snapshot.Nodes {
		n := &is.snapshot.Nodes[i]
		is.nodes[i] = nodeParts{name: n.Name, driver: n.GPU.Status.DriverVersion, stack: is.snapshot.Plugin.StackOf(n)}
		at[n.Name] = &is.nodes[i]
	}
	selector, err := labels.Parse(is.selector())
	if err != nil {
		return fmt.Errorf("reading which nodes have GPUs: %w", err)
	}
	err = eachPage(ctx, c, func(nodes *corev1.NodeList) {
		for i := range nodes.Items {
			node := &nodes.Items[i]
			if n := at[node.Name]; n != nil {
				n.observe(node)
			} else if node.DeletionTimestamp == nil && selector.Matches(labels.Set(node.Labels)) {
				is.unknown = append(is.unknown, node.Name)
			}
		}
	})
	if err != nil {
		return fmt.Errorf("reading nodes: %w", err)
	}
	err = eachPage(ctx, c, func(pods *corev1.PodList) {
		for i := range pods.Items {
			if n := at[pods.Items[i].Spec.NodeName]; n != nil {
				is.place(&pods.Items[i], n)
			}
		}
	})
	if err != nil {
		return fmt.Errorf("reading pods: %w", err)
	}
	slices.SortFunc(is.nodes, func(a, b nodeParts) int { return strings.Compare(a.name, b.name) })
	return nil
}

// draAgentName is the DaemonSet of the agents where a GPUCluster installs NVIDIA's DRA driver. The label of their pods
// is agentName, too.
const draAgentName = agentName + "-dra"

// observe adds what the Node says.
func (n *nodeParts) observe(node *corev1.Node) {
	n.kubelet = node.Status.NodeInfo.KubeletVersion
	n.down = slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue
	})
	n.draAgent = cluster.OfGPUCluster(node.Labels)
	for label := range node.Labels {
		n.nfd = n.nfd || strings.HasPrefix(label, "feature.node.kubernetes.io/")
	}
}

// place adds a pod to the parts of its node, if it is one.
func (is *installation) place(pod *corev1.Pod, n *nodeParts) {
	if cluster.Finished(pod) {
		return
	}
	of := cluster.PodOf(pod, &is.programs)
	part := component{name: pod.Namespace + "/" + pod.Name, version: versionOf(pod.Labels, &pod.Spec), ready: cluster.IsReady(pod)}
	switch {
	case cluster.IsAgent(pod) && is.isOf(pod.Namespace):
		part.outdated = is.isOutdated(pod)
		n.agents = append(n.agents, part)
	// Without the GPU Operator it may run in any namespace. Pod Security baseline lets no pod of a tenant mount the kubelet's folder.
	case isDevicePlugin(pod) && (of.NVIDIA || is.standAlone && cluster.MountsHost(pod.Spec.Volumes)):
		part.config = configRead(pod)
		n.plugins = append(n.plugins, part)
	case pod.Labels[nameLabel] == featureDiscovery && (of.Serves || !is.snapshot.Plugin.NodeFeatures):
		n.discovery = append(n.discovery, part)
	case n.stack != dra.DevicePlugin && of.DRA:
		n.drivers = append(n.drivers, part)
	}
}

// isOf reports whether the agents of the controller run in a namespace: in its own. Who may create a pod elsewhere may
// give it their label.
func (is *installation) isOf(namespace string) bool {
	if len(is.leader.namespaces) > 0 {
		return slices.Contains(is.leader.namespaces, namespace)
	}
	return len(is.controllers) == 0 || slices.ContainsFunc(is.controllers, func(c component) bool { return strings.HasPrefix(c.name, namespace+"/") })
}

// isDevicePlugin reports whether a pod is one of NVIDIA's device plugin, by the labels of the GPU Operator, and of the
// plugin's own chart.
func isDevicePlugin(pod *corev1.Pod) bool {
	return pod.Labels["app"] == "nvidia-device-plugin-daemonset" || pod.Labels[nameLabel] == "nvidia-device-plugin"
}

// versionOf is the version that the labels of an object tell, or the tag of its first image; empty: neither.
func versionOf(labels map[string]string, spec *corev1.PodSpec) string {
	if version := labels["app.kubernetes.io/version"]; version != "" || len(spec.Containers) == 0 {
		return version
	}
	image, _, _ := strings.Cut(spec.Containers[0].Image, "@")
	_, tag, _ := strings.Cut(image[strings.LastIndex(image, "/")+1:], ":")
	return tag
}

// The levels of findings.
const (
	levelOK      = "ok"
	levelWarning = "warning"
	levelError   = "error"
)

// finding is one thing that doctor says: what is so, and for a warning or an error what to do. Further lines are commands.
type finding struct{ level, what string }

// worstFirst sorts findings.
func worstFirst(all []finding) []finding {
	levels := []string{levelError, levelWarning, levelOK}
	return slices.SortedStableFunc(slices.Values(all), func(a, b finding) int {
		return cmp.Compare(slices.Index(levels, a.level), slices.Index(levels, b.level))
	})
}

// findings writes them, the worst first, and their number.
func (t *text) findings(all []finding) {
	counts := map[string]int{}
	for _, f := range worstFirst(all) {
		counts[f.level]++
		what, commands, _ := strings.Cut(f.what, "\n")
		t.row(0, f.level, what)
		for command := range strings.Lines(commands) { // not broken, so that they can be copied
			t.WriteString("    " + printable(strings.TrimSuffix(command, "\n")) + "\n")
		}
	}
	t.WriteString("\n")
	t.row(0, "", fmt.Sprintf("%s, %s", count(counts[levelError], "error"), count(counts[levelWarning], "warning")))
}

// nodesNamed names the first few of some nodes, and counts them.
func nodesNamed(names []string) string {
	return fmt.Sprintf("%s (%s)", count(len(names), "node"), format.Few(names, mostNamed))
}
