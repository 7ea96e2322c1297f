// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pluginconfig finds NVIDIA's device plugin and points it at our ConfigMap, once per installation, and restores
// what it changed when no policy needs it any more. It decides nothing about nodes.
//
//	found                          our ConfigMap                                       what is changed
//	GPUCluster                     none: DRAStackActive, but for nodes of the driver   nothing; what is left of a ClusterPolicy goes
//	GPUCluster and ClusterPolicy   the same, until a person deletes one of them        nothing
//	ClusterPolicy (the active)     gpu-sharing-device-plugin in its status.namespace   devicePlugin.config, mig.strategy,
//	                                                                                   daemonsets.tolerations if taints need it
//	neither, but flags name both   the one that they name, which may have other keys   nothing
//	none of these                  none: NoDevicePlugin                                nothing
//
// Changing the ClusterPolicy restarts NVIDIA's programs on every GPU node, so it is patched once, after the ConfigMap
// holds every key that a node could need. What was there before is recorded first, see baseline.
package pluginconfig

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

// ConfigMapName is the name of our ConfigMap.
const ConfigMapName = cluster.ConfigMapName

// fieldManager owns our keys of the ConfigMap and our fields of the ClusterPolicy.
const fieldManager = clusterpolicy.FieldManager

// StandAlone names the ConfigMap that a device plugin reads which the GPU Operator does not run.
type StandAlone struct {
	Namespace string // also where our ConfigMap goes while a ClusterPolicy does not tell its namespace
	ConfigMap string
}

// Configurer finds NVIDIA's device plugin and points it at our ConfigMap.
type Configurer struct {
	client     client.Client
	reader     client.Reader // not cached: ConfigMaps of others and whole definitions are read once and not watched
	clock      clock.PassiveClock
	standAlone StandAlone
	own        string // namespace of the operator, where the copy of our ConfigMap lies; empty: there is none
	versions   versions
	removals   removals
}

// CopyTo makes the Configurer keep a copy of our ConfigMap in the operator's own namespace.
func (c *Configurer) CopyTo(namespace string) *Configurer {
	c.own = namespace
	return c
}

// New returns a Configurer. The reader is not cached.
func New(c client.Client, reader client.Reader, clk clock.PassiveClock, standAlone StandAlone) *Configurer {
	return &Configurer{client: c, reader: reader, clock: clk, standAlone: standAlone}
}

// Observed is how NVIDIA's device plugin is installed, and what of ours is there.
type Observed struct {
	cluster.DevicePlugin
	// ConfigMap is ours; its name is empty if there is nowhere to put one.
	ConfigMap types.NamespacedName
	// GPUOperators are the namespaces of NVIDIA's GPU Operator, by the status of all ClusterPolicies and GPUClusters;
	// sorted.
	GPUOperators []string
	// Applied are those of its keys that we applied; nil if it does not exist.
	Applied map[string]string
	// Copied are the keys of the copy of our ConfigMap in the operator's own namespace; nil if there is none.
	Copied map[string]string
	// Held is why devicePlugin.config must not change now; empty if it may. The caller sets it before Configure and
	// Restore.
	Held string
	// KeepStrategy says that the default config must have the MIG strategy that the ClusterPolicy had. The caller sets
	// it before Configure.
	KeepStrategy bool
	// Overridden is set while another controller keeps reverting what we set in the ClusterPolicy.
	Overridden *Overridden

	clusterPolicy *unstructured.Unstructured // nil: stand-alone
	configMap     *corev1.ConfigMap          // without resource version if it does not exist
	copied        *corev1.ConfigMap          // likewise
	baseline      baseline                   // what is to be recorded
	record        string                     // what is recorded on our ConfigMap
	written       bool                       // Applied is all that is needed, and not what another controller has left of it
	defaultKey    string
	did           []string           // what was changed in the ClusterPolicy
	leftovers     []corev1.ConfigMap // ours, in namespaces where the device plugin no longer is
	undecided     bool               // a GPUCluster and a ClusterPolicy exist: either may go
}

// +kubebuilder:rbac:groups=nvidia.com,resources=clusterpolicies,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=nvidia.com,resources=gpuclusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=get;create
// +kubebuilder:rbac:groups="",resources=configmaps,resourceNames=gpu-sharing-device-plugin,verbs=list;watch;patch;delete

// Observe reads from the cache how the device plugin is installed and what of ours is there. Errors: ErrNotSynced.
func (c *Configurer) Observe(ctx context.Context) (*Observed, error) {
	o := &Observed{}
	clusters, err := c.list(ctx, gpuCluster)
	if err != nil {
		return nil, err
	}
	policies, err := c.list(ctx, clusterPolicy)
	if err != nil {
		return nil, err
	}
	o.GPUOperators = namespacesOf(slices.Concat(clusters, policies))
	if len(clusters) > 0 {
		active := clusterpolicy.Active(policies)
		o.Reason, o.Message, o.undecided = v1alpha1.ReasonDRAStackActive, draStackActive(clusters, active), active != nil
		return o, c.observeConfigMaps(ctx, o) // those of a ClusterPolicy that was there before
	}
	c.locate(o, clusterpolicy.Active(policies))
	if err := c.observeConfigMaps(ctx, o); err != nil {
		return nil, err
	}
	if o.Reason != "" {
		return o, nil
	}
	if o.clusterPolicy == nil {
		o.Configs = standAloneKeys(o.theirs(), o.Applied)
		o.Ready = exists(o.configMap)
		return o, nil
	}
	return o, c.observeClusterPolicy(ctx, o)
}

// observeClusterPolicy compares the ClusterPolicy with what it has to say, and remembers what it said before.
func (c *Configurer) observeClusterPolicy(ctx context.Context, o *Observed) error {
	policy := o.clusterPolicy
	b := recorded(policy, o.record, policy.GetAnnotations()[v1alpha1.AnnotationBaseline], o.copied.Annotations[v1alpha1.AnnotationBaseline])
	before := b.String()
	o.baseline = b.remember(policy)
	found, err := c.keysBefore(ctx, o)
	if err != nil {
		return err
	}
	o.baseline.Adopted, o.baseline.Keys = true, slices.Sorted(maps.Keys(found))
	if o.baseline.String() != before {
		o.baseline.Revision++
	}
	unlabelled, err := c.unlabelled(ctx, policy, o.baseline)
	if err != nil {
		return err
	}
	o.Configs, o.defaultKey = o.baseline.keys(found, unlabelled)
	o.NoMIGManager = noManager(policy, o.Configs)
	_, filed := o.Applied[migmanager.FileKey]
	o.MIGReady = filed && readsOurs(policy)
	o.Ready = configured(policy, o.defaultKey) && contains(o.Applied, o.Configs)
	o.Overridden, o.Overruled = o.overridden(c.clock.Now()), o.baseline.last(c.clock.Now())
	if o.Overridden != nil {
		o.Message = o.Overridden.Message
		o.Operands.NotBefore = timing.Latest(o.Operands.NotBefore, o.Overridden.Until) // who replaces all removes the tolerations too
	}
	return nil
}

// keysBefore is the content of the ConfigMap that the device plugin read before: as copied to ours or, if it was not
// copied yet, as it is.
func (c *Configurer) keysBefore(ctx context.Context, o *Observed) (map[string]string, error) {
	if o.baseline.Adopted {
		for _, keys := range []map[string]string{o.Applied, o.Copied} {
			if adopted := selectKeys(keys, o.baseline.Keys); len(adopted) == len(o.baseline.Keys) {
				return adopted, nil
			}
		}
	}
	name := o.baseline.configMap()
	if name == "" {
		return nil, nil
	}
	before := &corev1.ConfigMap{}
	key := types.NamespacedName{Namespace: o.ConfigMap.Namespace, Name: name}
	err := c.reader.Get(ctx, key, before)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading ConfigMap %s, which the device plugin reads: %w", key, err)
	}
	return before.Data, nil
}

// locate says where our ConfigMap belongs, or why nowhere.
func (c *Configurer) locate(o *Observed, policy *unstructured.Unstructured) {
	if clusterpolicy.RunsPlugin(policy) {
		o.ConfigMap = types.NamespacedName{Namespace: namespaceOf(policy), Name: ConfigMapName}
		if o.ConfigMap.Namespace == "" {
			o.ConfigMap.Namespace = c.standAlone.Namespace
		}
		if o.ConfigMap.Namespace == "" {
			o.Reason, o.Message = v1alpha1.ReasonNoDevicePlugin, fmt.Sprintf("ClusterPolicy %s does not say in its "+
				"status.namespace where the GPU Operator runs; wait until the GPU Operator has reconciled it, or start "+
				"the controller with --device-plugin-namespace", policy.GetName())
			return
		}
		o.ClusterPolicy, o.clusterPolicy, o.Operands = true, policy, c.operandsOf(policy)
		return
	}
	if c.standAlone.Namespace != "" && c.standAlone.ConfigMap != "" {
		o.ConfigMap = types.NamespacedName{Namespace: c.standAlone.Namespace, Name: c.standAlone.ConfigMap}
		return
	}
	o.Reason, o.Message = v1alpha1.ReasonNoDevicePlugin, noDevicePlugin(policy)
}

// observeConfigMaps finds our ConfigMap, and those of ours that were left where the device plugin was before.
func (c *Configurer) observeConfigMaps(ctx context.Context, o *Observed) error {
	o.configMap, o.copied = &corev1.ConfigMap{}, &corev1.ConfigMap{}
	all := &corev1.ConfigMapList{}
	if err := c.client.List(ctx, all); err != nil {
		return fmt.Errorf("reading our ConfigMap: %w", err)
	}
	for i := range all.Items {
		switch found := &all.Items[i]; {
		case client.ObjectKeyFromObject(found) == o.ConfigMap:
			o.configMap = found
		case found.Name == ConfigMapName && found.Namespace == c.own:
			o.copied, o.Copied = found, found.Data
		case found.Name == ConfigMapName && found.Labels[managedBy] == operator && found.DeletionTimestamp == nil:
			o.leftovers = append(o.leftovers, *found)
		}
	}
	applied, err := appliedKeys(o.configMap)
	o.Applied, o.record = applied, o.configMap.Annotations[v1alpha1.AnnotationBaseline]
	return err
}

// unlabelled is the MIG strategy of the key for nodes without a label. NVIDIA's config-manager (v0.18.2 to v0.20.0,
// cmd/config-manager/main.go: SyncableConfig.Get) lets every device plugin start with that key, whatever the node's
// label says, and selects the label's a moment later. A plugin ends that starts with single where GPUs or instances
// differ, and with none it offers GPUs in MIG mode as whole ones; mixed offers what is there, under the same names as
// any other strategy where there is no MIG. So it is mixed, unless MIG is on at a node that no policy governs: that one
// gets what the ClusterPolicy asked for. To change the key restarts NVIDIA's programs on every node, so once the
// ClusterPolicy names our ConfigMap it stays, and changes at most once more: when a node with MIG joins that no policy
// governs (KeepStrategy).
func (c *Configurer) unlabelled(ctx context.Context, policy *unstructured.Unstructured, b baseline) (string, error) {
	for _, strategy := range []string{b.strategy(), deviceplugin.StrategyMixed} {
		if configured(policy, deviceplugin.Default(strategy).Key) {
			return strategy, nil
		}
	}
	nodes := &v1alpha1.GPUNodeList{}
	if err := c.client.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
		return "", fmt.Errorf("listing GPUNodes: %w", err)
	}
	for i := range nodes.Items {
		if n := &nodes.Items[i]; n.Spec.PolicyName == "" && n.Spec.Baseline == nil && hasMIG(n) {
			return b.strategy(), nil
		}
	}
	return deviceplugin.StrategyMixed, nil
}

func hasMIG(n *v1alpha1.GPUNode) bool {
	return slices.ContainsFunc(n.Status.Devices, func(d v1alpha1.DeviceStatus) bool {
		return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled
	})
}
