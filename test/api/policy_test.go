// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package api_test holds what a real API server says to objects of ours: what it refuses and in which words, what it
// fills in, who may write what, and that everything is explained.
package api_test

import (
	"fmt"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// policy is a GPUSharingPolicy with a spec as a user writes it, in YAML: for all nodes, unless spec has a nodeSelector; null:
// without one.
func policy(tb testing.TB, name, spec string) *unstructured.Unstructured {
	tb.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(spec), &u.Object); err != nil {
		tb.Fatalf("the test's own YAML: %v", err)
	}
	if selector, given := u.Object["nodeSelector"]; !given {
		u.Object["nodeSelector"] = map[string]any{}
	} else if selector == nil {
		delete(u.Object, "nodeSelector")
	}
	u.Object = map[string]any{"spec": u.Object}
	u.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind("GPUSharingPolicy"))
	u.SetName(name)
	return u
}

func TestPolicy(t *testing.T) {
	cluster := env.Start(t)
	t.Run("is refused", func(t *testing.T) { refused(t, cluster.Client) })
	t.Run("is accepted", func(t *testing.T) { accepted(t, cluster.Client) })
	t.Run("has maintenance windows", func(t *testing.T) { windows(t, cluster.Client) })
	t.Run("is defaulted", func(t *testing.T) { defaulted(t, cluster.Client) })
	t.Run("reports every violation at once", func(t *testing.T) { atOnce(t, cluster.Client) })
}

const migWith = `sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: %q, count: 1}]}]}}`

// notOurLabel is the end of what the API server says to a selector that would undo itself.
const notOurLabel = "must not select by a label that this operator or NVIDIA's programs write as a consequence of sharing"

func refused(t *testing.T, c client.Client) {
	t.Helper()
	cases := map[string]struct {
		spec string
		says []string // the field, then the reason
	}{
		"no sharing": {
			spec: `{priority: 1}`,
			says: []string{"spec.sharing", "Required value"},
		},
		"no nodeSelector": {
			spec: `{nodeSelector: null, sharing: {strategy: Exclusive}}`,
			says: []string{"spec.nodeSelector", "Required value"},
		},
		"nodes by a label value with spaces":    selectorRefused(`matchLabels: {pool: "not a label!"}`, "matchLabels", "must have label values"),
		"nodes by a label value that is long":   selectorRefused(`matchLabels: {pool: `+strings.Repeat("a", 64)+`}`, "matchLabels", "must have label values"),
		"nodes by a label key with spaces":      selectorRefused(`matchLabels: {"not a key!": a}`, "matchLabels", "must have label keys"),
		"nodes by a label key with two slashes": selectorRefused(`matchLabels: {a/b/c: a}`, "matchLabels", "must have label keys"),
		"nodes by an expression on no key":      selectorRefused(`matchExpressions: [{key: "not a key!", operator: Exists}]`, "matchExpressions[0].key", "must be a label key"),
		"nodes by an expression on no value": selectorRefused(
			`matchExpressions: [{key: pool, operator: In, values: [-a]}]`, "matchExpressions[0].values[0]", "must be a label value"),
		"an unknown mode of autoscaling": {
			spec: `{sharing: {strategy: Exclusive}, autoscaling: {mode: Write}}`,
			says: []string{"spec.autoscaling.mode", "Unsupported value"},
		},
		"a shape that no node has": {
			spec: `{sharing: {strategy: Exclusive}, autoscaling: {nodeShapes: [{product: NVIDIA-A30, gpusPerNode: 17, nodeGroups: [{kind: EKSNodeGroup, name: a}]}]}}`,
			says: []string{"spec.autoscaling.nodeShapes[0].gpusPerNode", "less than or equal to 16"},
		},
		"a shape by NVIDIA's label": {
			spec: `{sharing: {strategy: Exclusive}, autoscaling: {nodeShapes: [{product: NVIDIA-A30-SHARED, gpusPerNode: 1, nodeGroups: [{kind: EKSNodeGroup, name: a}]}]}}`,
			says: []string{"spec.autoscaling.nodeShapes[0].product", "without the suffixes -SHARED"},
		},
		"a shape of no node group": {
			spec: `{sharing: {strategy: Exclusive}, autoscaling: {nodeShapes: [{product: NVIDIA-A30, gpusPerNode: 1}]}}`,
			says: []string{"spec.autoscaling.nodeShapes[0].nodeGroups", "Required value"},
		},
		"a MachineSet without a namespace": {
			spec: `{sharing: {strategy: Exclusive}, autoscaling: {nodeShapes: [{product: NVIDIA-A30, gpusPerNode: 1, nodeGroups: [{kind: MachineSet, name: a}]}]}}`,
			says: []string{"spec.autoscaling.nodeShapes[0].nodeGroups[0]", "namespace must be given for MachineDeployment and MachineSet"},
		},
		"a NodePool with a namespace": {
			spec: `{sharing: {strategy: Exclusive}, autoscaling: {nodeShapes: [{product: NVIDIA-A30, gpusPerNode: 1, nodeGroups: [{kind: NodePool, namespace: a, name: a}]}]}}`,
			says: []string{"spec.autoscaling.nodeShapes[0].nodeGroups[0]", "and only for them"},
		},
		"instance types of a MachineSet": {
			spec: `{sharing: {strategy: Exclusive}, autoscaling: {nodeShapes: [{product: NVIDIA-A30, gpusPerNode: 1, instanceTypes: [a], nodeGroups: [{kind: MachineSet, namespace: a, name: a}]}]}}`,
			says: []string{"spec.autoscaling.nodeShapes[0].instanceTypes", "for NodePools of Karpenter only"},
		},
		"a strategy without its member": {
			spec: `sharing: {strategy: TimeSlicing}`,
			says: []string{"spec.sharing", "timeSlicing must be set exactly when strategy is TimeSlicing"},
		},
		"another strategy's member": {
			spec: `sharing: {strategy: MIG, mps: {replicas: 2}}`,
			says: []string{
				"spec.sharing", "mig must be set exactly when strategy is MIG",
				"mps must be set exactly when strategy is MPS",
			},
		},
		"two members": {
			spec: `sharing: {strategy: MPS, mps: {replicas: 2}, timeSlicing: {replicas: 2}}`,
			says: []string{"spec.sharing", "timeSlicing must be set exactly when strategy is TimeSlicing"},
		},
		"a member with the strategy that has none": {
			spec: `sharing: {strategy: Exclusive, timeSlicing: {replicas: 2}}`,
			says: []string{"spec.sharing", "timeSlicing must be set exactly when strategy is TimeSlicing"},
		},
		"a misspelt field": {
			spec: `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}, advertise: {renameByDefaults: true}}`,
			says: []string{`unknown field "spec.sharing.advertise.renameByDefaults"`},
		},
		"a time slice that there is not": {
			spec: `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2, interval: Longer}}`,
			says: []string{"spec.sharing.timeSlicing.interval", `supported values: "Default", "Short", "Medium", "Long"`},
		},
		"a time slice beside another strategy": {
			spec: `sharing: {strategy: MPS, mps: {replicas: 2, interval: Short}}`,
			says: []string{`unknown field "spec.sharing.mps.interval"`},
		},
		"more time-sliced replicas than make sense": {
			spec: `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 257}}`,
			says: []string{"spec.sharing.timeSlicing.replicas", "should be less than or equal to 256"},
		},
		"replicas as text": {
			spec: `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: "4"}}`,
			says: []string{"spec.sharing.timeSlicing.replicas", "must be of type integer"},
		},
		"a memory guard that is no mode":                  guardRefused(`mode: Kill`, "mode", "Unsupported value"),
		"a memory guard for almost no free memory":        guardRefused(`freeBelowPercent: 0`, "freeBelowPercent", "greater than or equal to 1"),
		"a memory guard for more than half of the memory": guardRefused(`freeBelowPercent: 51`, "freeBelowPercent", "less than or equal to 50"),
		"a memory guard for an amount of free memory":     guardRefused(`freeBelowPercent: 2G`, "freeBelowPercent", "must be of type integer"),
		"a memory guard that acts at once":                guardRefused(`gracePeriodSeconds: 9`, "gracePeriodSeconds", "greater than or equal to 10"),
		"a memory guard that waits for hours":             guardRefused(`gracePeriodSeconds: 3601`, "gracePeriodSeconds", "less than or equal to 3600"),
		"a share of no memory":                            memoryRefused(`perReplica: 0Gi, guard: {}`, "perReplica", "must be a whole number of MiB"),
		"a share that nothing watches or limits":          memoryRefused(`perReplica: 4Gi`, "", "nothing watches or limits the memory"),
		"a limit that is no mode":                         memoryRefused(`limit: Kill`, "limit", "Unsupported value"),
		"a memory guard for MPS": {
			spec: `sharing: {strategy: MPS, mps: {replicas: 2, memory: {guard: {}}}}`,
			says: []string{`unknown field "spec.sharing.mps.memory"`},
		},
		"more MPS replicas than any GPU has clients": {
			spec: `sharing: {strategy: MPS, mps: {replicas: 49}}`,
			says: []string{"spec.sharing.mps.replicas", "should be less than or equal to 48"},
		},
		"no threads at all": {
			spec: `sharing: {strategy: MPS, mps: {replicas: 2, activeThreadPercentage: 0}}`,
			says: []string{"spec.sharing.mps.activeThreadPercentage", "should be greater than or equal to 1"},
		},
		"a memory limit in GB":                          limitRefused(`4GB`),
		"a memory limit of nothing":                     limitRefused(`0Gi`),
		"a memory limit without a unit":                 limitRefused(`"4096"`),
		"a memory limit of half a MiB":                  limitRefused(`1.5Mi`),
		"a memory limit that is no whole number of MiB": limitRefused(`0.1Gi`),
		"a memory limit of one byte too many":           limitRefused(`1073741825`),
		"a memory limit beyond any GPU":                 limitRefused(`1024Gi`),
		"no layout": {
			spec: `sharing: {strategy: MIG, mig: {layouts: []}}`,
			says: []string{"spec.sharing.mig.layouts", "should have at least 1 items"},
		},
		"layouts left out": {
			spec: `sharing: {strategy: MIG, mig: {resourceNames: PerProfile}}`,
			says: []string{"spec.sharing.mig.layouts", "Required value"},
		},
		"an empty layout": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{}]}}`,
			says: []string{"spec.sharing.mig.layouts[0]", "exactly one of instances and fill must be set"},
		},
		"a layout of no instances": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{instances: []}]}}`,
			says: []string{"spec.sharing.mig.layouts[0].instances", "should have at least 1 items"},
		},
		"a layout with instances and fill": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{fill: 1g, instances: [{profile: 3g, count: 1}]}]}}`,
			says: []string{"spec.sharing.mig.layouts[0]", "exactly one of instances and fill must be set"},
		},
		"replicas of a layout that lists instances": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 1}], replicas: 2}]}}`,
			says: []string{"spec.sharing.mig.layouts[0].replicas", "replicas of a layout are those of fill"},
		},
		"one replica of listed instances": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 1, replicas: 1}]}]}}`,
			says: []string{"spec.sharing.mig.layouts[0].instances[0].replicas", "should be greater than or equal to 2"},
		},
		"no instance of a profile": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 0}]}]}}`,
			says: []string{"spec.sharing.mig.layouts[0].instances[0].count", "should be greater than or equal to 1"},
		},
		"one replica of an instance": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{fill: 1g, replicas: 1}]}}`,
			says: []string{"spec.sharing.mig.layouts[0].replicas", "should be greater than or equal to 2"},
		},
		"differing profiles under one name": {
			spec: `sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{instances: [{profile: 1g, count: 1}, {profile: 3g, count: 1}]}]}}`,
			says: []string{"spec.sharing.mig.layouts", "each layout must have one profile only; use PerProfile for different profiles"},
		},
		"a name for replicas of GPUs that are not shared": {
			spec: `sharing: {strategy: Exclusive, advertise: {renameByDefault: true}}`,
			says: []string{"spec.sharing.advertise", "nothing has replicas"},
		},
		"a name for replicas of MIG instances that are not shared": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}, advertise: {renameByDefault: true}}`,
			says: []string{"spec.sharing.advertise", "nothing has replicas"},
		},
		"nothing said of replicas": {
			spec: `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}, advertise: {}}`,
			says: []string{"spec.sharing.advertise", "should have at least 1 properties"},
		},
		"MPS that serves requests of several": {
			spec: `sharing: {strategy: MPS, mps: {replicas: 2}, advertise: {failRequestsGreaterThanOne: false}}`,
			says: []string{"spec.sharing.advertise", "under MPS NVIDIA's device plugin always refuses"},
		},
		"replicas of whole GPUs under one name": {
			spec: `sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{gpus: {indexes: [0]}, fill: 1g}], wholeGPUs: {replicas: 4}}}`,
			says: []string{"spec.sharing.mig.wholeGPUs", "wholeGPUs needs resourceNames PerProfile: under Uniform no GPU of a node stays whole"},
		},
		"replicas of whole GPUs where every GPU has a layout": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}, {fill: 2g}], wholeGPUs: {replicas: 4}}}`,
			says: []string{"spec.sharing.mig.wholeGPUs", "wholeGPUs needs GPUs that stay whole: each layout must name its GPUs in gpus"},
		},
		"one replica of whole GPUs": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}], wholeGPUs: {replicas: 1}}}`,
			says: []string{"spec.sharing.mig.wholeGPUs.replicas", "should be greater than or equal to 2"},
		},
		"more replicas of whole GPUs than make sense": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}], wholeGPUs: {replicas: 257}}}`,
			says: []string{"spec.sharing.mig.wholeGPUs.replicas", "should be less than or equal to 256"},
		},
		"a mode on demand that does not exist":        onDemandRefused(`mode: Always, profiles: [1g]`, "mode", `supported values: "Advise", "Apply"`),
		"no profile on demand":                        onDemandRefused(`profiles: []`, "profiles", "should have at least 1 items"),
		"nine profiles on demand":                     onDemandRefused(`profiles: [1g, 2g, 3g, 4g, 7g, 1g.5gb, 1g.10gb, 2g.10gb, 3g.20gb]`, "profiles", "must have at most 8 items"),
		"a profile on demand twice":                   onDemandRefused(`profiles: [1g, 1g]`, "profiles[1]", "Duplicate value"),
		"a reserve of a profile that may not be made": onDemandRefused(`profiles: [1g], reserve: [{profile: 2g, count: 1}]`, "reserve", "a profile of reserve must be one of profiles"),
		"a reserve of none":                           onDemandRefused(`profiles: [1g], reserve: [{profile: 1g, count: 0}]`, "reserve[0].count", "greater than or equal to 1"),
		"instances that are idle for a moment":        onDemandRefused(`profiles: [1g], idleSeconds: 29`, "idleSeconds", "greater than or equal to 30"),
		"instances that are idle for more than a day": onDemandRefused(`profiles: [1g], idleSeconds: 86401`, "idleSeconds", "less than or equal to 86400"),
		"replicas of what is made on demand": layoutsRefused(
			`{fill: 1g, replicas: 2, onDemand: {profiles: [1g]}}`, "[0].onDemand", "onDemand and replicas cannot be combined"),
		"replicas of one profile of what is made on demand": layoutsRefused(
			`{instances: [{profile: 1g, count: 1, replicas: 2}], onDemand: {profiles: [1g]}}`, "[0].onDemand", "onDemand and replicas cannot be combined"),
		"two layouts on demand": layoutsRefused(
			`{gpus: {indexes: [0]}, fill: 1g, onDemand: {profiles: [1g]}}, {fill: 2g, onDemand: {profiles: [1g]}}`, "", "one layout at most may have onDemand"),
		"on demand under one name": {
			spec: `sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g, onDemand: {profiles: [1g]}}]}}`,
			says: []string{"spec.sharing.mig.layouts", "onDemand needs resourceNames PerProfile and actuator Agent"},
		},
		"on demand by NVIDIA's mig-manager": {
			spec: `sharing: {strategy: MIG, mig: {actuator: MIGManager, layouts: [{fill: 1g, onDemand: {profiles: [1g]}}]}}`,
			says: []string{"spec.sharing.mig.layouts", "onDemand needs resourceNames PerProfile and actuator Agent"},
		},
		"a profile of eight slices":            profileRefused("8g.80gb", "must be a MIG profile such as 1g.10gb"),
		"a profile of no slices":               profileRefused("0g.5gb", "must be a MIG profile such as 1g.10gb"),
		"a profile of no memory":               profileRefused("1g.0gb", "must be a MIG profile such as 1g.10gb"),
		"a profile in capitals":                profileRefused("1G.10GB", "must be a MIG profile such as 1g.10gb"),
		"a profile with an unknown attribute":  profileRefused("1g.10gb+fast", "must be a MIG profile such as 1g.10gb"),
		"a profile written as a resource name": profileRefused("nvidia.com/mig-1g.5gb", "must be a MIG profile such as 1g.10gb"),
		"a compute instance smaller than its GPU instance": profileRefused("1c.3g.20gb",
			"a compute instance smaller than its GPU instance cannot be advertised by NVIDIA's device plugin"),
		"an unknown profile to fill with": {
			spec: `sharing: {strategy: MIG, mig: {layouts: [{fill: all-1g.5gb}]}}`,
			says: []string{"spec.sharing.mig.layouts[0].fill", "must be a MIG profile such as 1g.10gb"},
		},
		"at most no node at a time":          rolloutRefused("maxUnavailable: 0", "maxUnavailable", "must be a number of nodes from 1"),
		"at most minus one node at a time":   rolloutRefused("maxUnavailable: -1", "maxUnavailable", "must be a number of nodes from 1"),
		"at most no percentage of the nodes": rolloutRefused("maxUnavailable: 0%", "maxUnavailable", "a percentage from 1% to 100%"),
		"more than all nodes":                rolloutRefused("maxUnavailable: 101%", "maxUnavailable", "a percentage from 1% to 100%"),
		"a number of nodes as text":          rolloutRefused(`maxUnavailable: "3"`, "maxUnavailable", "a percentage from 1% to 100%"),
		"a fraction of the nodes":            rolloutRefused("maxUnavailable: 0.5%", "maxUnavailable", "a percentage from 1% to 100%"),
		"no failure allowed":                 rolloutRefused("failureThreshold: 0", "failureThreshold", "should be greater than or equal to 1"),
		"a timeout too short to drain anything": rolloutRefused(
			"drain: {timeoutSeconds: 29}", "drain.timeoutSeconds", "should be greater than or equal to 30"),
		"a timeout of more than a week": rolloutRefused(
			"drain: {timeoutSeconds: 604801}", "drain.timeoutSeconds", "should be less than or equal to 604800"),
		"an unknown drain mode": rolloutRefused(
			"drain: {mode: Force}", "drain.mode", `supported values: "Evict", "WaitForIdle", "Never"`),
		"an unknown reboot mode": rolloutRefused("reboot: Always", "reboot", `supported values: "Never", "IfRequired"`),
		"an unknown mode for new nodes": rolloutRefused(
			"startupTaint: Cordon", "startupTaint", `supported values: "None", "UntilReady"`),
		"an unknown program that partitions": {
			spec: `sharing: {strategy: MIG, mig: {actuator: nvidia-smi, layouts: [{fill: 1g}]}}`,
			says: []string{"spec.sharing.mig.actuator", `supported values: "Agent", "MIGManager"`},
		},
		"the end of no window":  rolloutRefused("onWindowEnd: CancelDrain", "onWindowEnd", "no window ends"),
		"pods before no reboot": rolloutRefused("drain: {beforeReboot: AllPods}", "drain", "nothing is rebooted"),
		"a GPU index in two layouts": layoutsRefused(
			`{gpus: {indexes: [0, 1]}, fill: 1g}, {gpus: {indexes: [1, 2]}, fill: 2g}`, "", "a layout is for GPUs that an earlier one takes"),
		"a GPU index in two layouts, the second for one product": layoutsRefused(
			`{gpus: {indexes: [0]}, fill: 1g}, {gpus: {products: [NVIDIA-A30], indexes: [0]}, fill: 2g}`, "", "a layout is for GPUs that an earlier one takes"),
		"a product in two layouts": layoutsRefused(
			`{gpus: {products: [NVIDIA-A30, NVIDIA-B200]}, fill: 1g}, {gpus: {products: [NVIDIA-B200]}, fill: 2g}`, "", "a layout is for GPUs that an earlier one takes"),
		"a layout behind one for all GPUs": layoutsRefused(`{fill: 1g}, {gpus: {indexes: [0]}, fill: 2g}`, "", "a layout without gpus must be the last"),
		"two layouts for all GPUs":         layoutsRefused(`{fill: 1g}, {fill: 2g}`, "", "a layout without gpus must be the last"),
		"a layout behind one for all products": layoutsRefused(
			`{gpus: {products: ["*"]}, fill: 1g}, {fill: 2g}`, "", "a layout is for GPUs that an earlier one takes"),
		"a product behind a glob for it": layoutsRefused(
			`{gpus: {products: ["NVIDIA-*"]}, fill: 1g}, {gpus: {products: [NVIDIA-B200]}, fill: 2g}`, "", "a product must come before a glob for it"),
		"more compute slices than any GPU has": layoutsRefused(
			`{instances: [{profile: 2g, count: 3}, {profile: 1g, count: 2}]}`, "[0].instances", "are more instances than any GPU holds"),
		"more memory slices than any GPU has": layoutsRefused(
			`{instances: [{profile: 3g.20gb, count: 2}, {profile: 1g.5gb, count: 1}]}`, "[0].instances", "are more instances than any GPU holds"),
		"seven large instances": layoutsRefused(`{instances: [{profile: 3g, count: 7}]}`, "[0].instances", "are more instances than any GPU holds"),
		"two instances with media extensions": layoutsRefused(
			`{instances: [{profile: 1g.5gb+me, count: 2}]}`, "[0].instances", "one instance of a GPU at most has media extensions"),
		"a layout for a GPU that the policy does not select": {
			spec: `{gpuSelector: {indexes: [0, 1]}, sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [1, 2]}, fill: 1g}]}}}`,
			says: []string{"spec.sharing.mig.layouts", "an index that gpuSelector does not select"},
		},
		"a layout for products that the policy does not select": {
			spec: `{gpuSelector: {products: ["NVIDIA-H100-*"]}, sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A30]}, fill: 1g}]}}}`,
			says: []string{"spec.sharing.mig.layouts", "products that gpuSelector does not select"},
		},
		"a taint that evicts": taintRefused(
			"{key: example.com/shared, effect: NoExecute}", "effect", `supported values: "NoSchedule", "PreferNoSchedule"`),
		"a taint of ours":            taintRefused("{key: gpusharing.io/changing}", "key", "must not be a taint that Kubernetes or this operator"),
		"a startup taint of ours":    taintRefused("{key: readiness.k8s.io/gpusharing}", "key", "must not be a taint that Kubernetes or this operator"),
		"a taint of Kubernetes'":     taintRefused("{key: node.kubernetes.io/not-ready}", "key", "must not be a taint that Kubernetes"),
		"a taint that is not a key":  taintRefused("{key: shared gpu}", "key", "must be a label key"),
		"a taint with a value of no": taintRefused("{key: example.com/shared, value: a b}", "value", "must be a label value"),
		"the same taint twice": {
			spec: `{sharing: {strategy: Exclusive}, taints: [{key: a, effect: NoSchedule}, {key: a, value: b}]}`,
			says: []string{"spec.taints[1]", "Duplicate value"},
		},
		"an unknown release policy": {
			spec: `{releasePolicy: Delete, sharing: {strategy: Exclusive}}`,
			says: []string{"spec.releasePolicy", `supported values: "Restore", "Retain"`},
		},
		"a priority out of range": {
			spec: `{priority: 1000001, sharing: {strategy: Exclusive}}`,
			says: []string{"spec.priority", "should be less than or equal to 1000000"},
		},
		"nodes by NVIDIA's product label": selectorRefused(
			`matchLabels: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB}`, "matchLabels", notOurLabel),
		"nodes by NVIDIA's replicas label":     selectorRefused(`matchLabels: {nvidia.com/gpu.replicas: "1"}`, "matchLabels", notOurLabel),
		"nodes by NVIDIA's MIG config label":   selectorRefused(`matchLabels: {nvidia.com/mig.config: x}`, "matchLabels", notOurLabel),
		"nodes by NVIDIA's MIG state label":    selectorRefused(`matchLabels: {nvidia.com/mig.config.state: x}`, "matchLabels", notOurLabel),
		"nodes by NVIDIA's MIG profile labels": selectorRefused(`matchLabels: {nvidia.com/mig-1g.5gb.count: "7"}`, "matchLabels", notOurLabel),
		"nodes by the label that we write":     selectorRefused(`matchLabels: {nvidia.com/device-plugin.config: x}`, "matchLabels", notOurLabel),
		"nodes by a label of our own":          selectorRefused(`matchLabels: {gpusharing.io/anything: x}`, "matchLabels", notOurLabel),
		"nodes by an expression on NVIDIA's product label": selectorRefused(
			`matchExpressions: [{key: nvidia.com/gpu.product, operator: Exists}]`, "matchExpressions", notOurLabel),
		"an operator that needs values without any": selectorRefused(
			`matchExpressions: [{key: pool, operator: In}]`, "matchExpressions[0]", "values must be given for the operators In and NotIn"),
		"an operator that takes no values with some": selectorRefused(
			`matchExpressions: [{key: pool, operator: Exists, values: [a]}]`, "matchExpressions[0]", "and only for them"),
		"an unknown operator": selectorRefused(
			`matchExpressions: [{key: pool, operator: Gt, values: ["1"]}]`, "matchExpressions[0].operator", "supported values"),
		"GPUs by nothing": {
			spec: `{gpuSelector: {}, sharing: {strategy: Exclusive}}`,
			says: []string{"spec.gpuSelector", "should have at least 1 properties"},
		},
		"GPUs by a product with spaces": {
			spec: `{gpuSelector: {products: ["NVIDIA A100"]}, sharing: {strategy: Exclusive}}`,
			says: []string{"spec.gpuSelector.products[0]", "must be a product with dashes"},
		},
		"GPUs by an index that no node has": {
			spec: `{gpuSelector: {indexes: [64]}, sharing: {strategy: Exclusive}}`,
			says: []string{"spec.gpuSelector.indexes[0]", "should be less than or equal to 63"},
		},
		"GPUs by the same index twice": {
			spec: `{gpuSelector: {indexes: [0, 0]}, sharing: {strategy: Exclusive}}`,
			says: []string{"spec.gpuSelector.indexes[1]", "Duplicate value"},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			err := client.WithFieldValidation(c, "Strict").Create(t.Context(), policy(t, "refused", tc.spec))
			g.Expect(err).To(HaveOccurred(), "the policy was taken")
			g.Expect(apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)).To(BeTrue(), "an unexpected kind of error: %v", err)
			for _, words := range tc.says {
				g.Expect(err.Error()).To(ContainSubstring(words))
			}
		})
	}
}

type refusal = struct {
	spec string
	says []string
}

func guardRefused(guard, field, reason string) refusal {
	return memoryRefused("guard: {"+guard+"}", "guard."+field, reason)
}

func memoryRefused(memory, field, reason string) refusal {
	return refusal{
		spec: "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2, memory: {" + memory + "}}}",
		says: []string{strings.TrimSuffix("spec.sharing.timeSlicing.memory."+field, "."), reason},
	}
}

func limitRefused(limit string) refusal {
	return refusal{
		spec: "sharing: {strategy: MPS, mps: {replicas: 2, pinnedMemoryLimit: " + limit + "}}",
		says: []string{"spec.sharing.mps.pinnedMemoryLimit", "must be a whole number of MiB, less than 1Ti"},
	}
}

func profileRefused(profile, reason string) refusal {
	return refusal{
		spec: fmt.Sprintf(migWith, profile),
		says: []string{"spec.sharing.mig.layouts[0].instances[0].profile", reason},
	}
}

func layoutsRefused(layouts, field, reason string) refusal {
	return refusal{
		spec: "sharing: {strategy: MIG, mig: {layouts: [" + layouts + "]}}",
		says: []string{"spec.sharing.mig.layouts" + field, reason},
	}
}

func onDemandRefused(onDemand, field, reason string) refusal {
	return layoutsRefused("{fill: 1g, onDemand: {"+onDemand+"}}", "[0].onDemand."+field, reason)
}

func taintRefused(taint, field, reason string) refusal {
	return refusal{spec: fmt.Sprintf(`{sharing: {strategy: Exclusive}, taints: [%s]}`, taint), says: []string{"spec.taints[0]." + field, reason}}
}

func rolloutRefused(rollout, field, reason string) refusal {
	return refusal{
		spec: "{sharing: {strategy: Exclusive}, rollout: {" + rollout + "}}",
		says: []string{"spec.rollout." + field, reason},
	}
}

func selectorRefused(selector, field, reason string) refusal {
	return refusal{
		spec: "{sharing: {strategy: Exclusive}, nodeSelector: {" + selector + "}}",
		says: []string{"spec.nodeSelector." + field, reason},
	}
}

func accepted(t *testing.T, c client.Client) {
	t.Helper()
	cases := map[string]string{
		"the least":                                                  `sharing: {strategy: Exclusive}`,
		"the most time-sliced replicas":                              `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 256}}`,
		"MPS for all users":                                          `sharing: {strategy: MPS, mps: {replicas: 4, multiUser: true}}`,
		"the most MPS replicas":                                      `sharing: {strategy: MPS, mps: {replicas: 48, activeThreadPercentage: 100, pinnedMemoryLimit: 1023Gi}}`,
		"a memory limit of one and a half":                           `sharing: {strategy: MPS, mps: {replicas: 2, pinnedMemoryLimit: 1.5Gi}}`,
		"a memory limit of odd MiB":                                  `sharing: {strategy: MPS, mps: {replicas: 2, pinnedMemoryLimit: 8155Mi}}`,
		"a memory limit of many GiB":                                 `sharing: {strategy: MPS, mps: {replicas: 2, pinnedMemoryLimit: 143771Mi}}`,
		"a memory limit by a fraction":                               `sharing: {strategy: MPS, mps: {replicas: 2, pinnedMemoryLimit: "0.0009765625Gi"}}`,
		"a memory limit in bytes":                                    `sharing: {strategy: MPS, mps: {replicas: 2, pinnedMemoryLimit: 1073741824}}`,
		"a profile with media extensions":                            fmt.Sprintf(migWith, "1g.10gb+me"),
		"a profile with all media engines":                           fmt.Sprintf(migWith, "1g.24gb+me.all"),
		"a profile without media engines":                            fmt.Sprintf(migWith, "1g.24gb-me"),
		"a profile with graphics":                                    fmt.Sprintf(migWith, "1g.24gb+gfx"),
		"a profile by its slices":                                    fmt.Sprintf(migWith, "7g"),
		"one profile under one name":                                 `sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{instances: [{profile: 3g, count: 2}]}]}}`,
		"whole GPUs shared beside instances":                         `sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}], wholeGPUs: {replicas: 256}}}`,
		"as many instances as an A100 holds":                         `sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 4g, count: 1}, {profile: 3g, count: 1}]}]}}`,
		"small instances as many as fit":                             `sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 6}, {profile: 1g.5gb+me, count: 1}]}]}}`,
		"one index, of two products":                                 `sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A30], indexes: [0]}, fill: 1g}, {gpus: {products: [NVIDIA-B200], indexes: [0]}, fill: 2g}]}}`,
		"a product, then one index of the others":                    `sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A30]}, fill: 1g}, {gpus: {indexes: [0]}, fill: 2g}, {fill: 3g}]}}`,
		"pods before a reboot":                                       `{sharing: {strategy: Exclusive}, rollout: {reboot: IfRequired, drain: {beforeReboot: AllPods}}}`,
		"the end of a window":                                        `{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "@daily", duration: 4h}], onWindowEnd: CancelDrain}}`,
		"a percentage of the nodes":                                  `{sharing: {strategy: Exclusive}, rollout: {maxUnavailable: 100%}}`,
		"labels with and without a prefix, with and without a value": `{sharing: {strategy: Exclusive}, nodeSelector: {matchLabels: {a: "", example.com/B_c.d-e: F_g.h-1}}}`,
		"a label of NVIDIA's that is stable":                         `{sharing: {strategy: Exclusive}, nodeSelector: {matchLabels: {nvidia.com/gpu.present: "true", nvidia.com/gpu.family: ampere}}}`,
		"a memory guard with defaults":                               `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {}}}}`,
		"a memory guard with all":                                    `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 8Gi, guard: {mode: Evict, freeBelowPercent: 50, gracePeriodSeconds: 3600}}}}`,
		"a limit of the driver alone":                                `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {limit: Report}}}`,
		"a limit of the driver with share and guard":                 `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 4Gi, limit: Enforce, guard: {}}}}`,
		"a limit that was taken off":                                 `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 4Gi, limit: None}}}`,
		"a memory guard of the least free memory":                    `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {freeBelowPercent: 1, gracePeriodSeconds: 10}}}}`,
		"MIG instances on demand":                                    `sharing: {strategy: MIG, mig: {layouts: [{fill: 3g, onDemand: {profiles: [1g, 2g, 3g]}}]}}`,
		"MIG instances on demand, applied":                           `sharing: {strategy: MIG, mig: {layouts: [{fill: 3g, onDemand: {mode: Apply, profiles: [1g, 2g, 3g]}}]}}`,
		"MIG instances on demand with all":                           `sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g, replicas: 2}, {fill: 3g, onDemand: {mode: Advise, profiles: [1g, 2g], reserve: [{profile: 1g, count: 3}], idleSeconds: 30, namespaceSelector: {matchLabels: {team: a}, matchExpressions: [{key: b, operator: Exists}]}}}]}}`,
		"everything at once": `
nodeSelector:
  matchLabels: {pool: research}
  matchExpressions: [{key: zone, operator: In, values: [a, b]}, {key: spot, operator: DoesNotExist}]
gpuSelector: {products: ["NVIDIA-A100-*"], indexes: [0, 1]}
priority: 10
sharing:
  strategy: MIG
  mig:
    resourceNames: PerProfile
    layouts:
    - gpus: {products: [NVIDIA-A100-PCIE-40GB], indexes: [0]}
      instances: [{profile: 3g.20gb, count: 1, replicas: 3}, {profile: 2g.10gb, count: 2}]
    - fill: 1g
      replicas: 2
  advertise: {renameByDefault: true, failRequestsGreaterThanOne: false}
rollout: {maxUnavailable: 10%, paused: true, failureThreshold: 3, drain: {mode: Evict, timeoutSeconds: 30}}
releasePolicy: Retain
`,
	}
	for name, spec := range cases {
		t.Run(name, func(t *testing.T) {
			NewWithT(t).Expect(client.WithFieldValidation(client.NewDryRunClient(c), "Strict").
				Create(t.Context(), policy(t, "accepted", spec))).To(Succeed())
		})
	}
}

func defaulted(t *testing.T, c client.Client) {
	t.Helper()
	g := NewWithT(t)
	for name, spec := range map[string]string{
		"ts":     `sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}`,
		"mps":    `sharing: {strategy: MPS, mps: {replicas: 4}}`,
		"mig":    `sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}`,
		"demand": `sharing: {strategy: MIG, mig: {layouts: [{fill: 1g, onDemand: {profiles: [1g]}}]}}`,
	} {
		g.Expect(c.Create(t.Context(), policy(t, name, spec))).To(Succeed())
	}
	get := func(name string) v1alpha1.GPUSharingPolicySpec {
		p := &v1alpha1.GPUSharingPolicy{}
		g.Expect(c.Get(t.Context(), client.ObjectKey{Name: name}, p)).To(Succeed())
		return p.Spec
	}

	spec := get("ts")
	g.Expect(spec.Priority).To(BeZero())
	g.Expect(spec.ReleasePolicy).To(Equal(v1alpha1.ReleasePolicyRestore))
	g.Expect(spec.Rollout.MaxUnavailable.IntValue()).To(Equal(1))
	g.Expect(spec.Rollout.FailureThreshold).To(Equal(int32(1)))
	g.Expect(spec.Rollout.Drain.Mode).To(Equal(v1alpha1.DrainModeWaitForIdle), "nobody is evicted unasked")
	g.Expect(spec.Rollout.Drain.TimeoutSeconds).To(Equal(int32(600)))
	g.Expect(spec.Rollout.Reboot).To(Equal(v1alpha1.RebootModeNever), "nothing is rebooted unasked")
	g.Expect(spec.Rollout.StartupTaint).To(Equal(v1alpha1.StartupTaintNone))
	g.Expect(spec.Rollout.Windows).To(BeNil(), "changes start at any time")
	g.Expect(spec.Rollout.OnWindowEnd).To(BeEmpty(), "it needs windows")
	g.Expect(spec.Taints).To(BeEmpty())
	g.Expect(spec.Sharing.Advertise).To(BeNil(), "as NVIDIA's, but for requests of several")

	g.Expect(get("mps").Sharing.MPS.MultiUser).To(HaveValue(BeFalse()), "it gives up separation")
	g.Expect(get("mps").Sharing.MPS.ActiveThreadPercentage).To(BeNil(), "depends on the replicas")
	g.Expect(get("mig").Sharing.MIG.ResourceNames).To(Equal(v1alpha1.MIGResourceNamesPerProfile))
	g.Expect(get("mig").Sharing.MIG.Actuator).To(Equal(v1alpha1.MIGActuatorAgent))
	g.Expect(get("mig").Sharing.MIG.WholeGPUs).To(BeNil(), "whole GPUs are shared only if the policy says so")
	g.Expect(get("mig").Sharing.MIG.Layouts[0].OnDemand).To(BeNil())
	g.Expect(get("demand").Sharing.MIG.Layouts[0].OnDemand).To(HaveValue(Equal(v1alpha1.MIGOnDemand{
		Mode: v1alpha1.OnDemandModeAdvise, Profiles: []v1alpha1.MIGProfile{"1g"}, IdleSeconds: 300,
	})))
}

func atOnce(t *testing.T, c client.Client) {
	t.Helper()
	g := NewWithT(t)
	err := c.Create(t.Context(), policy(t, "refused", `{priority: 1000001, sharing: {strategy: MPS, timeSlicing: {replicas: 1}}}`))
	g.Expect(err).To(MatchError(And(
		ContainSubstring("spec.priority"),
		ContainSubstring("spec.sharing.timeSlicing.replicas"),
	)))
}
