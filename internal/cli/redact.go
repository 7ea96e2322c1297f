// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/autoscaling"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// kept is what redact keeps of a value, and of each item of a list: the fields that it names, with what it keeps of
// each. The field "*" stands for all that it does not name. Nil keeps the whole value.
type kept map[string]kept

var (
	keptMetadata = kept{
		"name": nil, "generateName": nil, "namespace": nil, "uid": nil, "labels": nil, "generation": nil, "creationTimestamp": nil,
		"deletionTimestamp": nil, "finalizers": nil, "ownerReferences": nil, "annotations": nil, // those that annotations keeps
	}
	keptContainer = kept{
		"name": nil, "image": nil, "resources": nil, "securityContext": nil, "ports": nil, "restartPolicy": nil, "env": {"name": nil},
		"volumeMounts": {"name": nil, "mountPath": nil, "readOnly": nil, "mountPropagation": nil},
		"args":         nil, // those of the operator's programs: see dropArgs
	}
	keptPodSpec = kept{
		"nodeName": nil, "nodeSelector": nil, "affinity": nil, "tolerations": nil, "priorityClassName": nil, "runtimeClassName": nil,
		"serviceAccountName": nil, "hostPID": nil, "hostIPC": nil, "hostNetwork": nil, "securityContext": nil,
		"terminationGracePeriodSeconds": nil, "containers": keptContainer, "initContainers": keptContainer,
		"volumes": {"name": nil, "hostPath": nil, "emptyDir": nil, "configMap": {"name": nil}},
	}
	keptContainerStatus = kept{
		"name": nil, "image": nil, "imageID": nil, "ready": nil, "started": nil, "restartCount": nil, "state": keptState, "lastState": keptState,
	}
	// keptState has no message of a container that ended: its program writes that.
	keptState = kept{
		"waiting": nil, "running": nil,
		"terminated": {"exitCode": nil, "signal": nil, "reason": nil, "startedAt": nil, "finishedAt": nil},
	}
	keptWorkload = kept{
		"spec": {
			"replicas": nil, "selector": nil, "strategy": nil, "updateStrategy": nil, "minReadySeconds": nil,
			"template": {"metadata": keptMetadata, "spec": keptPodSpec},
		},
		"status": nil,
	}
	// keptOperand is a part of NVIDIA's ClusterPolicy. Its fields "data", "args" and "env[].value" are free text.
	keptOperand = kept{
		"enabled": nil, "repository": nil, "image": nil, "version": nil, "env": {"name": nil}, "default": nil, "strategy": nil,
		"config": {"name": nil, "default": nil, "create": nil}, "gpuClientsConfig": {"name": nil}, "mps": {"root": nil},
		"tolerations": nil, "updateStrategy": nil, "rollingUpdate": nil, "priorityClassName": nil, "upgradePolicy": nil,
		"useNvidiaDriverCRD": nil, "usePrecompiled": nil, "kernelModuleType": nil, "installDir": nil, "defaultRuntime": nil,
		"runtimeClass": nil, "defaultWorkload": nil, "nriPluginEnabled": nil,
	}
	keptWhole = kept{"spec": nil, "status": nil}
)

// keptKinds is what redact keeps of each kind beside its metadata.
var keptKinds = map[schema.GroupKind]kept{
	{Group: v1alpha1.Group, Kind: "GPUSharingPolicy"}:        keptWhole,
	{Group: v1alpha1.Group, Kind: "GPUNode"}:                 keptWhole,
	{Group: autoscaling.GroupKarpenter, Kind: "NodeOverlay"}: keptWhole,
	{Group: "coordination.k8s.io", Kind: "Lease"}:            keptWhole,
	{Group: draGroup, Kind: kindSlice}:                       keptWhole,
	{Group: draGroup, Kind: kindTaintRule}:                   keptWhole,
	// Configurations of drivers are free text.
	{Group: draGroup, Kind: kindClass}: {"spec": {"selectors": nil, "extendedResourceName": nil}},
	{Group: draGroup, Kind: kindClaim}: {
		"spec": {"devices": {"requests": nil}}, "status": {"allocation": {"devices": {"results": nil}, "nodeSelector": nil}, "reservedFor": nil},
	},
	{Group: "apps", Kind: "Deployment"}:                                keptWorkload,
	{Group: "apps", Kind: "DaemonSet"}:                                 keptWorkload,
	{Kind: "ConfigMap"}:                                                {"data": nil},
	{Group: cluster.NodeFeatureKind().Group, Kind: "NodeFeature"}:      {"spec": {"labels": nil}},
	{Group: clusterPolicyKind().Group, Kind: clusterPolicyKind().Kind}: {"spec": {"*": keptOperand}, "status": {"namespace": nil, "state": nil, "conditions": nil}},
	{Group: "apiextensions.k8s.io", Kind: "CustomResourceDefinition"}: {
		"spec": {"group": nil, "scope": nil, "names": nil, "versions": {"name": nil, "served": nil, "storage": nil, "deprecated": nil}}, "status": nil,
	},
	{Kind: "Node"}: {
		"spec":   {"taints": nil, "unschedulable": nil},
		"status": {"allocatable": nil, "capacity": nil, "conditions": nil, "nodeInfo": nil},
	},
	{Kind: "Pod"}: {
		"spec": keptPodSpec,
		"status": {
			"phase": nil, "reason": nil, "message": nil, "conditions": nil, "startTime": nil,
			"containerStatuses": keptContainerStatus, "initContainerStatuses": keptContainerStatus,
		},
	},
	{Kind: "Event"}: {
		"involvedObject": nil, "type": nil, "reason": nil, "action": nil, "message": nil, "count": nil, "firstTimestamp": nil, "lastTimestamp": nil,
		"eventTime": nil, "series": nil, "related": nil, "reportingComponent": nil, "source": nil,
	},
}

// redact returns what must-gather writes of an object, which shares memory with it; nil: nothing, as of a Secret. It
// keeps the fields that keptKinds lists, and so no value of an environment variable, and of annotations those of the
// operator and of NVIDIA.
func redact(o *unstructured.Unstructured) map[string]any {
	of, known := keptKinds[o.GroupVersionKind().GroupKind()]
	if !known {
		return nil
	}
	all := kept{"apiVersion": nil, "kind": nil, "metadata": keptMetadata}
	maps.Copy(all, of)
	redacted, _ := prune(o.Object, all).(map[string]any)
	dropArgs(redacted, isOurs(o.GetLabels()))
	return redacted
}

// prune returns what is kept of a value; nil: nothing.
func prune(value any, keep kept) any {
	if keep == nil {
		return value
	}
	switch value := value.(type) {
	case []any:
		items := []any{}
		for _, item := range value {
			if item = prune(item, keep); item != nil {
				items = append(items, item)
			}
		}
		return items
	case map[string]any:
		return pruneFields(value, keep)
	}
	return nil // a field of another type than the one that is known
}

func pruneFields(value map[string]any, keep kept) map[string]any {
	fields := map[string]any{}
	for name, field := range value {
		part, named := keep[name]
		if !named {
			part, named = keep["*"]
		}
		if named && name == "annotations" {
			field = annotations(field)
		}
		if field = prune(field, part); named && field != nil {
			fields[name] = field
		}
	}
	return fields
}

// annotations are those of the operator, of NVIDIA, and of maintenance. Any program may write any text into the others,
// such as `kubectl apply` the whole object.
func annotations(all any) any {
	found := map[string]any{}
	given, _ := all.(map[string]any)
	for name, value := range given {
		domain, _, _ := strings.Cut(name, "/")
		if domain == v1alpha1.Group || domain == nvidiaDomain || strings.HasSuffix(domain, "."+nvidiaDomain) || cluster.OfMaintenance(name) {
			found[name] = value
		}
	}
	if len(found) == 0 {
		return nil
	}
	return found
}

const nvidiaDomain = "nvidia.com"

// ownNames are the values of nameLabel of the operator's workloads. Others that begin so are a user's.
var ownNames = []string{controllerName, agentName, mpsName, operandsName}

// isOurs reports whether the labels are those of the operator's Deployments, DaemonSets and pods.
func isOurs(labels map[string]string) bool { return slices.Contains(ownNames, labels[nameLabel]) }

// ownContainers are those of the operator's programs. Another container may have been added to their pods.
var ownContainers = []string{"controller", "agent", "operands", "prepare", "mps"}

// dropArgs removes the arguments of containers, except those of the operator's own programs: none of their flags is
// secret.
func dropArgs(workload map[string]any, ours bool) {
	for _, path := range [][]string{{"spec"}, {"spec", "template", "spec"}} {
		for _, list := range []string{"containers", "initContainers"} {
			containers, _, _ := unstructured.NestedFieldNoCopy(workload, append(slices.Clone(path), list)...)
			items, _ := containers.([]any)
			for _, item := range items {
				container, _ := item.(map[string]any)
				if name, _ := container["name"].(string); !ours || !slices.Contains(ownContainers, name) {
					delete(container, "args")
				}
			}
		}
	}
}
