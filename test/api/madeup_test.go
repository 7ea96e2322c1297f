// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// bad are specs that a person, a template or a language model may write who has read the docs and errs; one a line.
const bad = `
# strategy and its block
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 1}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: "4"}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 1000}}}
{sharing: {strategy: TimeSlicing}}
{sharing: {strategy: time-slicing, timeSlicing: {replicas: 4}}}
{sharing: {strategy: MPS, timeSlicing: {replicas: 4}}}
{sharing: {strategy: MPS, mps: {replicas: 4}, timeSlicing: {replicas: 4}}}
{sharing: {strategy: Exclusive, timeSlicing: {replicas: 4}}}
{sharing: {timeSlicing: {replicas: 4}}}
{}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}, timeSlicing: {replicas: 2}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, renameByDefault: true}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, interval: 2ms}}}
# nodeSelector
{nodeSelector: null, EXCLUSIVE}
{nodeSelector: {pool: gpu}, EXCLUSIVE}
{nodeSelector: {matchLabels: {gpu: true}}, EXCLUSIVE}
{nodeSelector: {matchLabels: {pool: "gpu nodes"}}, EXCLUSIVE}
{nodeSelector: {matchExpressions: [{key: pool, operator: In, values: ["a,b"]}]}, EXCLUSIVE}
{nodeSelector: {matchLabels: {example.com/gpu/pool: a}}, EXCLUSIVE}
{nodeSelector: {matchLabels: {Example.com/pool: a}}, EXCLUSIVE}
{nodeSelector: {matchLabels: {pool: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa}}, EXCLUSIVE}
{nodeSelector: {matchExpressions: [{key: pool, operator: In}]}, EXCLUSIVE}
{nodeSelector: {matchExpressions: [{key: pool, operator: Exists, values: ["true"]}]}, EXCLUSIVE}
{nodeSelector: {matchExpressions: [{key: gpus, operator: Gt, values: ["2"]}]}, EXCLUSIVE}
{nodeSelector: {matchLabels: {nvidia.com/gpu.product: Tesla-T4-SHARED}}, TIMESLICED}
{nodeSelector: {matchLabels: {nvidia.com/mig.config: all-1g.5gb}}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb}]}}}
{nodeSelector: {matchExpressions: [{key: nvidia.com/gpu.replicas, operator: DoesNotExist}]}, TIMESLICED}
{nodeSelector: {matchExpressions: {key: pool, operator: Exists}}, EXCLUSIVE}
{nodeSelector: {matchLabels: {pool: a.}}, EXCLUSIVE}
# gpuSelector
{gpuSelector: {products: ["NVIDIA A100-SXM4-40GB"]}, EXCLUSIVE}
{gpuSelector: {products: [Tesla-T4-SHARED]}, TIMESLICED}
{gpuSelector: {products: [NVIDIA-A100-SXM4-40GB-MIG-3g.20gb]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 3g.20gb}]}}}
{gpuSelector: {products: []}, EXCLUSIVE}
{gpuSelector: {products: Tesla-T4}, EXCLUSIVE}
{gpuSelector: {indexes: [-1]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}}
{gpuSelector: {indexes: [0, 0]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}}
{gpuSelector: {products: ["NVIDIA-(A100|H100)-.*"]}, EXCLUSIVE}
{gpuSelector: {products: ["NVIDIA-A100-[SP*"]}, EXCLUSIVE}
{gpuSelector: {}, EXCLUSIVE}
{gpuSelector: {product: Tesla-T4}, EXCLUSIVE}
{gpuSelector: {products: [Tesla-T4, Tesla-T4]}, EXCLUSIVE}
{gpuSelector: {indexes: [4096]}, EXCLUSIVE}
# MPS
{sharing: {strategy: MPS, mps: {replicas: 64}}}
{sharing: {strategy: MPS, mps: {replicas: 4, activeThreadPercentage: 0}}}
{sharing: {strategy: MPS, mps: {replicas: 4, activeThreadPercentage: "25%"}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: 4GB}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: 4G}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: 4096}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: "0"}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: {"0": 4G}}}}
{sharing: {strategy: MPS, mps: {replicas: 4}, advertise: {failRequestsGreaterThanOne: false}}}
# MIG
{sharing: {strategy: MIG, mig: {layouts: []}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb, instances: [{profile: 3g.20gb, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: mig-1g.5gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20GB, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: all-1g.5gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 5g, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 0}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 8}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 4g.20gb, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g, count: 2}, {profile: 2g, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 2}, {profile: 1g.5gb, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 2}, {profile: 1g, count: 3}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{replicas: 2, instances: [{profile: 1g, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0, 1]}, fill: 1g}, {gpus: {indexes: [1, 2]}, fill: 3g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}, {gpus: {indexes: [0]}, fill: 3g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: ["NVIDIA-A100-*"]}, fill: 1g}, {gpus: {products: ["NVIDIA-A100-*"]}, fill: 3g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: ["NVIDIA-*"]}, fill: 1g}, {gpus: {products: [NVIDIA-H100-PCIe]}, fill: 3g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}], wholeGPUs: {replicas: 4}}}}
{gpuSelector: {indexes: [0, 1]}, sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [2]}, fill: 1g}]}}}
{gpuSelector: {products: [NVIDIA-H100-PCIe]}, sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A100-SXM4-40GB]}, fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: {1g.5gb: 7}}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: mixed, layouts: [{fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{instances: [{profile: 3g, count: 1}, {profile: 2g, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{gpus: {indexes: [0]}, fill: 1g}], wholeGPUs: {replicas: 4}}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g.5gb, replicas: 2}, {gpus: {indexes: [1]}, fill: 1g.5gb, replicas: 4}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 3g, onDemand: {profiles: [1g], reserve: [{profile: 2g, count: 1}]}}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 1g, onDemand: {mode: Apply, profiles: [1g, 3g]}}]}}}
{sharing: {strategy: MIG, mig: {actuator: MIGManager, layouts: [{fill: 1g, onDemand: {mode: Apply, profiles: [1g, 3g]}}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}, advertise: {renameByDefault: true}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1c.3g.20gb}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{gpus: {indexes: [0]}, fill: 1g}, {gpus: {indexes: [1]}, fill: 2g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A30-SHARED]}, fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g, timeSlicing: [{profile: 2g, replicas: 2}]}]}}}
# memory
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {freeBelowPercent: 5%}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 4Gi}}}}
# taints
{EXCLUSIVE, taints: [{key: example.com/gpu, effect: NoExecute}]}
{EXCLUSIVE, taints: [{key: "example.com/gpu=shared:NoSchedule"}]}
{EXCLUSIVE, taints: [{key: node.kubernetes.io/unschedulable}]}
# rollout
{EXCLUSIVE, rollout: {maxUnavailable: 0%}}
{EXCLUSIVE, rollout: {drain: {mode: Evict, timeoutSeconds: 10m}}}
{EXCLUSIVE, rollout: {drain: {beforeReboot: AllPods}}}
{EXCLUSIVE, rollout: {windows: [{schedule: "0 0 22 * * FRI", duration: 4h}]}}
{EXCLUSIVE, rollout: {windows: [{schedule: "0 22 * * FRI-MON", duration: 4h}]}}
{EXCLUSIVE, rollout: {windows: [{schedule: "0 22 30 2 *", duration: 4h}]}}
{EXCLUSIVE, rollout: {windows: [{schedule: "@monthly", duration: 336h}]}}
{EXCLUSIVE, rollout: {windows: [{schedule: "0 22 * * *", duration: 4h, timeZone: Europe/Munich}]}}
{EXCLUSIVE, rollout: {maxFailures: 1}}
{EXCLUSIVE, rollout: {onWindowEnd: CancelDrain}}
{EXCLUSIVE, rollout: {windows: []}}
{EXCLUSIVE, rollout: {windows: [{schedule: "22:00", duration: 4h}]}}
{EXCLUSIVE, rollout: {windows: [{schedule: "0 22 * * FRI", duration: 4h, timeZone: CEST}]}}
{EXCLUSIVE, taints: {key: a}}
{EXCLUSIVE, taints: [{key: a, value: "1"}, {key: a, value: "2"}]}
{EXCLUSIVE, autoscaling: {mode: Manage, nodeShapes: [{product: Tesla-T4-SHARED, gpusPerNode: 1, nodeGroups: [{kind: NodePool, name: a}]}]}}
# autoscaling
{TIMESLICED, autoscaling: {nodeShapes: [{product: "NVIDIA-A100-*", gpusPerNode: 8, nodeGroups: [{kind: NodePool, name: a}]}]}}
{TIMESLICED, autoscaling: {nodeShapes: [{product: Tesla-T4, gpusPerNode: 4, nodeGroups: [{kind: MachineDeployment, name: a}]}]}}
`

// good are specs that must pass.
const good = `
{nodeSelector: {matchLabels: {pool: a}}, TIMESLICED}
{EXCLUSIVE}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 256}}}
{sharing: {strategy: MPS, mps: {replicas: 2}}}
{sharing: {strategy: MPS, mps: {replicas: 48, activeThreadPercentage: 100, pinnedMemoryLimit: 512Mi}}}
{sharing: {strategy: MPS, mps: {replicas: 8, pinnedMemoryLimit: 2147483648}}}
{sharing: {strategy: MPS, mps: {replicas: 8, pinnedMemoryLimit: 1.5Gi}}}
{sharing: {strategy: MPS, mps: {replicas: 10, activeThreadPercentage: 33, multiUser: true}, advertise: {renameByDefault: true, failRequestsGreaterThanOne: true}}}
{nodeSelector: {matchExpressions: [{key: pool, operator: In, values: [a, b]}, {key: example.com/reserved, operator: DoesNotExist}]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2, interval: Long}}}
{nodeSelector: {matchExpressions: [{key: node.kubernetes.io/instance-type, operator: In, values: [p4d.24xlarge, g5.xlarge]}]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}
{nodeSelector: {matchLabels: {cloud.google.com/gke-accelerator: nvidia-tesla-t4, karpenter.sh/nodepool: gpu}}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}
{nodeSelector: {matchLabels: {kubernetes.io/hostname: gpu-01.example.com}}, EXCLUSIVE}
{nodeSelector: {matchLabels: {nvidia.com/gpu.present: "true", nvidia.com/gpu.family: ampere}}, TIMESLICED}
{nodeSelector: {matchLabels: {node-role.kubernetes.io/gpu: ""}}, TIMESLICED}
{gpuSelector: {products: ["NVIDIA-A100-*", NVIDIA-H100-80GB-HBM3, "Tesla-?4", "NVIDIA-L40*"]}, TIMESLICED}
{gpuSelector: {products: [NVIDIA-GeForce-RTX-4090, NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition, NVIDIA-GB10]}, TIMESLICED}
{TIMESLICED, taints: [{key: nvidia.com/gpu, value: shared}, {key: example.com/shared, effect: PreferNoSchedule}]}
{EXCLUSIVE, taints: [{key: dedicated, value: gpu}, {key: dedicated, value: gpu, effect: PreferNoSchedule}]}
{priority: -100, releasePolicy: Retain, EXCLUSIVE}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 3840Mi, guard: {mode: Evict, freeBelowPercent: 10, gracePeriodSeconds: 30}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {limit: Enforce, perReplica: 4Gi}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}, rollout: {maxUnavailable: 10%, failureThreshold: 3, drain: {mode: Evict, timeoutSeconds: 604800}, onWindowEnd: CancelDrain, windows: [{schedule: "0 22 * * MON-FRI", duration: 90m, timeZone: Europe/Berlin}, {schedule: "*/30 0-5 * * SAT,SUN", duration: 30m}]}}
{EXCLUSIVE, rollout: {windows: [{schedule: "@weekly", duration: 168h}, {schedule: "15 1,13 1-7 JAN-JUN *", duration: 5m, timeZone: America/Argentina/Buenos_Aires}, {schedule: "0 3 29 2 *", duration: 2h, timeZone: Etc/GMT+5}]}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}, rollout: {paused: true, maxUnavailable: 100%, drain: {mode: Never}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}, rollout: {reboot: IfRequired, drain: {beforeReboot: AllPods, mode: Evict}}}
{gpuSelector: {products: ["NVIDIA-A100-*-40GB"]}, sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 1}, {profile: 2g.10gb, count: 1}, {profile: 1g.5gb, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{instances: [{profile: 1g, count: 7}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.10gb+me, count: 1}, {profile: 1g.10gb, count: 6}]}]}}}
{gpuSelector: {products: ["NVIDIA-H100-*"]}, sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.20gb, count: 2}, {profile: 1g.10gb, count: 4}]}]}}}
{gpuSelector: {products: [NVIDIA-A30]}, sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 2g.12gb, count: 1}, {profile: 1g.6gb, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 7g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, instances: [{profile: 7g, count: 1}]}, {gpus: {products: ["NVIDIA-H100-*"]}, fill: 2g}, {fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0], products: ["NVIDIA-A100-*"]}, fill: 1g}, {gpus: {indexes: [0], products: ["NVIDIA-H100-*"]}, fill: 3g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0, 1]}, instances: [{profile: 3g, count: 1, replicas: 4}, {profile: 1g, count: 4}]}], wholeGPUs: {replicas: 8}}, advertise: {renameByDefault: true, failRequestsGreaterThanOne: false}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g.5gb, replicas: 2}, {gpus: {indexes: [1]}, fill: 3g.20gb, replicas: 4}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 3g, onDemand: {mode: Apply, profiles: [1g, 2g, 3g, 7g], idleSeconds: 60, reserve: [{profile: 1g, count: 2}], namespaceSelector: {matchLabels: {team: ml}}}}]}}}
{sharing: {strategy: MIG, mig: {actuator: MIGManager, layouts: [{gpus: {products: ["NVIDIA-A100-*"]}, fill: 1g.5gb}]}}}
{nodeSelector: {matchLabels: {karpenter.sh/nodepool: shared}}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}, advertise: {renameByDefault: true}}, rollout: {startupTaint: UntilReady}, autoscaling: {mode: Manage, emptyPool: Expected, nodeShapes: [{product: NVIDIA-A10G, gpusPerNode: 1, instanceTypes: [g5.xlarge, g5.2xlarge], nodeGroups: [{kind: NodePool, name: shared}]}, {product: Tesla-T4, gpusPerNode: 4, nodeGroups: [{kind: MachineDeployment, name: t4, namespace: capi}, {kind: EKSNodeGroup, name: t4}]}]}}
{priority: 1000000, releasePolicy: Retain, nodeSelector: {matchLabels: {pool: a, example.com/zone: b}, matchExpressions: [{key: example.com/gen, operator: NotIn, values: [old]}]}, gpuSelector: {products: ["NVIDIA-L4"]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 8, interval: Short, memory: {limit: Report, perReplica: 2Gi, guard: {mode: Report, freeBelowPercent: 50, gracePeriodSeconds: 3600}}}, advertise: {renameByDefault: true}}, taints: [{key: example.com/shared-gpu, value: l4}], rollout: {maxUnavailable: 25%, failureThreshold: 10, reboot: Never, drain: {mode: WaitForIdle, timeoutSeconds: 30}, windows: [{schedule: "0 2 * * *", duration: 1h30m, timeZone: Asia/Kolkata}]}, autoscaling: {mode: Advise, unrenamedReplicas: Withhold}}
{nodeSelector: {matchLabels: {node-role.kubernetes.io/gpu: "", Team_A.x: B_1.c-d}}, EXCLUSIVE}
{gpuSelector: {indexes: [0, 63]}, EXCLUSIVE}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb+me}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 4g.40gb, count: 1}, {profile: 3g.40gb, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.24gb-me, count: 3}, {profile: 1g.24gb+me.all, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{gpus: {products: [NVIDIA-A30]}, fill: 1g}, {fill: 2g, replicas: 2}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-H100-PCIe]}, fill: 1g.10gb, replicas: 2}, {gpus: {products: [NVIDIA-H200]}, fill: 1g.10gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g, replicas: 2}, {fill: 1g}]}}}
{gpuSelector: {indexes: [0, 1]}, sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}, {gpus: {indexes: [1]}, fill: 3g}]}}}
{EXCLUSIVE, rollout: {windows: [{schedule: "0 0 31 4 MON", duration: 1h}, {schedule: "0 0 31 4-6 *", duration: 1h}, {schedule: "0 0 29,30 2 *", duration: 1h}]}}
{EXCLUSIVE, autoscaling: {emptyPool: Expected, unrenamedReplicas: Announce}}
`

// beyondSchema are specs that are as bad and that neither a schema nor CEL can know: what they lack is on the nodes. The policy
// then says so of its nodes. They are here so that a check that learns one is noticed.
const beyondSchema = `
# no GPU has a profile of these sizes, or none with so many slices
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.999gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 6g}]}}}
# two names of one profile
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 1, replicas: 2}, {profile: 1g.5gb, count: 1, replicas: 3}]}]}}}
# no node has a GPU of that name
{gpuSelector: {products: [GPU-5f8e2b1a-0c6d-4f5e-9b7a-1d2c3e4f5a6b]}, EXCLUSIVE}
# the selector contradicts itself
{nodeSelector: {matchLabels: {pool: a}, matchExpressions: [{key: pool, operator: NotIn, values: [a]}]}, EXCLUSIVE}
# half of the GPUs of a node, which NVIDIA's plugin shares alike
{gpuSelector: {indexes: [0]}, TIMESLICED}
# more than these GPUs hold: MPS clients, memory, a profile of another model, MIG
{gpuSelector: {products: [Tesla-V100-*]}, sharing: {strategy: MPS, mps: {replicas: 48}}}
{gpuSelector: {products: [Tesla-T4]}, sharing: {strategy: MPS, mps: {replicas: 2, pinnedMemoryLimit: 80Gi}}}
{gpuSelector: {products: [NVIDIA-A100-SXM4-40GB]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 3g.40gb}]}}}
{gpuSelector: {products: [Tesla-T4]}, sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}}
# patterns with an asterisk before their end are not compared with others, and names of days not with numbers
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: ["*-40GB"]}, fill: 1g}, {gpus: {products: [NVIDIA-A100-SXM4-40GB]}, fill: 3g}]}}}
{EXCLUSIVE, rollout: {windows: [{schedule: "0 22 * * FRI-1", duration: 1h}]}}
`

// TestMadeUpPolicies: policies that were made up from the docs, without looking at the schema, are judged rightly.
func TestMadeUpPolicies(t *testing.T) {
	g := NewWithT(t)
	g.Expect(len(specs(bad))).To(BeNumerically(">=", 100))
	g.Expect(len(specs(good))).To(BeNumerically(">=", 40))
	c := client.WithFieldValidation(client.NewDryRunClient(env.Start(t).Client), "Strict")
	for _, spec := range specs(bad) {
		err := c.Create(t.Context(), policy(t, "made-up", spec))
		if !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) {
			t.Errorf("not refused (%v): %s", err, spec)
		}
	}
	for _, spec := range append(specs(good), specs(beyondSchema)...) {
		if err := c.Create(t.Context(), policy(t, "made-up", spec)); err != nil {
			t.Errorf("refused: %s: %v", spec, err)
		}
	}
}

// specs are the lines of a text that are no headings, with what is often in them written out.
func specs(text string) (all []string) {
	short := strings.NewReplacer("EXCLUSIVE", "sharing: {strategy: Exclusive}", "TIMESLICED", "sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}")
	for line := range strings.Lines(text) {
		if line = short.Replace(strings.TrimSpace(line)); line != "" && line[0] != '#' {
			all = append(all, line)
		}
	}
	return all
}
