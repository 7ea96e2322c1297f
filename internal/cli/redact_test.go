// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// hidden is a token, of which no byte may be in an archive.
const hidden = "hunter2-eyJhbGciOi"

// TestRedact: of each object, what a bug report needs is kept, and no byte of a token.
func TestRedact(t *testing.T) {
	for name, test := range map[string]struct{ object, want string }{
		"a Secret": {
			"{apiVersion: v1, kind: Secret, metadata: {name: s}, data: {a: " + hidden + "}}", "null",
		},
		"a kind of another group": {
			"{apiVersion: example.com/v1, kind: Pod, metadata: {name: s}, spec: {nodeName: " + hidden + "}}", "null",
		},
		"annotations, but those of the operator, of NVIDIA and of maintenance": {
			`{apiVersion: v1, kind: ConfigMap, metadata: {name: c, namespace: team, labels: {a: b}, managedFields: [{manager: m}], selfLink: x, annotations: {
				kubectl.kubernetes.io/last-applied-configuration: '{"token":"` + hidden + `"}', token: ` + hidden + `, gpusharing.io.example.com/x: ` + hidden + `,
				notnvidia.com/x: ` + hidden + `, gpusharing.io/baseline: kept, nvidia.com/gpu-driver-upgrade-enabled: "true", feature.nvidia.com/x: some}},
				data: {any: "version: v1"}, binaryData: {x: ` + hidden + `}}`,
			`{apiVersion: v1, kind: ConfigMap, metadata: {name: c, namespace: team, labels: {a: b}, annotations: {
				gpusharing.io/baseline: kept, nvidia.com/gpu-driver-upgrade-enabled: "true", feature.nvidia.com/x: some}}, data: {any: "version: v1"}}`,
		},
		"a node": {
			`{apiVersion: v1, kind: Node, metadata: {name: a, annotations: {machineconfiguration.openshift.io/currentConfig: one, x/y: ` + hidden + `}},
				spec: {providerID: ` + hidden + `, taints: [{key: k, effect: NoSchedule}]},
				status: {allocatable: {nvidia.com/gpu: "2"}, addresses: [{address: ` + hidden + `}], images: [{names: [` + hidden + `]}], nodeInfo: {kubeletVersion: v1}}}`,
			`{apiVersion: v1, kind: Node, metadata: {name: a, annotations: {machineconfiguration.openshift.io/currentConfig: one}},
				spec: {taints: [{key: k, effect: NoSchedule}]}, status: {allocatable: {nvidia.com/gpu: "2"}, nodeInfo: {kubeletVersion: v1}}}`,
		},
		"a pod of the operator, and a container that was added to it": {
			`{apiVersion: v1, kind: Pod, metadata: {name: p, labels: {app.kubernetes.io/name: gpu-sharing-agent}}, spec: {nodeName: a, containers: [
				{name: agent, image: i, args: [--resync=1m], command: [` + hidden + `], env: [{name: A, value: ` + hidden + `}, {name: B, valueFrom: {secretKeyRef: {name: ` + hidden + `}}}],
				 envFrom: [{secretRef: {name: ` + hidden + `}}], livenessProbe: {httpGet: {httpHeaders: [{value: ` + hidden + `}]}}, lifecycle: {preStop: {exec: {command: [` + hidden + `]}}}},
				{name: proxy, args: [--token=` + hidden + `]}], volumes: [{name: v, secret: {secretName: ` + hidden + `}}, {name: w, configMap: {name: c}}, {name: x, csi: {volumeAttributes: {t: ` + hidden + `}}}]},
				status: {phase: Running, podIP: ` + hidden + `, containerStatuses: [{name: agent, restartCount: 1,
				state: {waiting: {reason: CrashLoopBackOff, message: back-off}}, lastState: {terminated: {exitCode: 1, reason: Error, message: ` + hidden + `}}}]}}`,
			`{apiVersion: v1, kind: Pod, metadata: {name: p, labels: {app.kubernetes.io/name: gpu-sharing-agent}}, spec: {nodeName: a, containers: [
				{name: agent, image: i, args: [--resync=1m], env: [{name: A}, {name: B}]}, {name: proxy}],
				volumes: [{name: v}, {name: w, configMap: {name: c}}, {name: x}]}, status: {phase: Running, containerStatuses: [{name: agent, restartCount: 1,
				state: {waiting: {reason: CrashLoopBackOff, message: back-off}}, lastState: {terminated: {exitCode: 1, reason: Error}}}]}}`,
		},
		"a DeviceClass, without the configuration of its driver": {
			`{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: c}, spec: {extendedResourceName: nvidia.com/gpu, selectors: [{cel: {expression: e}}],
				config: [{opaque: {driver: d, parameters: {x: ` + hidden + `}}}]}}`,
			`{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: c}, spec: {extendedResourceName: nvidia.com/gpu, selectors: [{cel: {expression: e}}]}}`,
		},
		"a ResourceClaim, without the configuration of its driver": {
			`{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c, namespace: team}, spec: {devices: {requests: [{name: r}],
				config: [{opaque: {parameters: {x: ` + hidden + `}}}]}}, status: {reservedFor: [{resource: pods, name: p, uid: u}], devices: [{data: {x: ` + hidden + `}}],
				allocation: {devices: {results: [{driver: gpu.nvidia.com, pool: a, device: gpu-0}], config: [{opaque: {parameters: {x: ` + hidden + `}}}]}}}}`,
			`{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c, namespace: team}, spec: {devices: {requests: [{name: r}]}},
				status: {reservedFor: [{resource: pods, name: p, uid: u}], allocation: {devices: {results: [{driver: gpu.nvidia.com, pool: a, device: gpu-0}]}}}}`,
		},
		"a workload of a user that has a name like the operator's": {
			`{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, labels: {app.kubernetes.io/name: gpu-sharing-notebook}}, spec: {template: {spec: {
				containers: [{name: agent, args: [--token=` + hidden + `]}]}}}}`,
			`{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, labels: {app.kubernetes.io/name: gpu-sharing-notebook}}, spec: {template: {spec: {
				containers: [{name: agent}]}}}}`,
		},
		"a DaemonSet of NVIDIA's": {
			`{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: d}, spec: {template: {metadata: {annotations: {x: ` + hidden + `}, labels: {a: b}}, spec: {
				initContainers: [{name: agent, args: [` + hidden + `], env: [{name: A, value: ` + hidden + `}]}], imagePullSecrets: [{name: ` + hidden + `}]}}}, status: {numberReady: 2}}`,
			`{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: d}, spec: {template: {metadata: {labels: {a: b}}, spec: {
				initContainers: [{name: agent, env: [{name: A}]}]}}}, status: {numberReady: 2}}`,
		},
		"NVIDIA's ClusterPolicy": {
			`{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: c}, spec: {token: ` + hidden + `, tokens: [` + hidden + `],
				devicePlugin: {enabled: true, args: [` + hidden + `], env: [{name: A, value: ` + hidden + `}], config: {name: m, default: any, data: {x: ` + hidden + `}}},
				driver: {licensingConfig: {secretName: ` + hidden + `}, version: "580"}, mig: {strategy: mixed}}, status: {state: ready, other: ` + hidden + `}}`,
			`{apiVersion: nvidia.com/v1, kind: ClusterPolicy, metadata: {name: c}, spec: {tokens: [], devicePlugin: {enabled: true, env: [{name: A}],
				config: {name: m, default: any}}, driver: {version: "580"}, mig: {strategy: mixed}}, status: {state: ready}}`,
		},
		"a definition of a kind": {
			`{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: d}, spec: {group: g, conversion: {webhook: ` + hidden + `},
				versions: [{name: v1, served: true, storage: true, schema: {x: ` + hidden + `}}]}, status: {storedVersions: [v1]}}`,
			`{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: d}, spec: {group: g,
				versions: [{name: v1, served: true, storage: true}]}, status: {storedVersions: [v1]}}`,
		},
		"a policy": {
			`{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: p}, spec: {sharing: {strategy: MPS}}, status: {conditions: [{type: Ready}]}}`,
			`{apiVersion: gpusharing.io/v1alpha1, kind: GPUSharingPolicy, metadata: {name: p}, spec: {sharing: {strategy: MPS}}, status: {conditions: [{type: Ready}]}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			o := &unstructured.Unstructured{}
			g.Expect(yaml.Unmarshal([]byte(test.object), &o.Object)).To(Succeed())
			before := o.DeepCopy()
			got, err := yaml.Marshal(redact(o))
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(got).To(MatchYAML(test.want))
			g.Expect(string(got)).NotTo(ContainSubstring(hidden))
			g.Expect(o).To(Equal(before), "it is not changed")
		})
	}
}
