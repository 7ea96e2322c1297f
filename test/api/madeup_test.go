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

// bad are specs that a person may write who has read the docs and errs; one a line. Sections name what is wrong.
const bad = `
# which nodes
{nodeSelector: null, sharing: {strategy: Exclusive}}
{nodeselector: {matchLabels: {pool: a}}, sharing: {strategy: Exclusive}}
{nodeSelector: {pool: a}, sharing: {strategy: Exclusive}}
{nodeSelector: pool=a, sharing: {strategy: Exclusive}}
{nodeSelector: [], sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: 1}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: true}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: "team a"}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: "a,b"}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: "*"}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: a.}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {"pool!": a}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {"": a}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {/pool: a}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {Example.com/pool: a}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {nvidia.com/gpu.product: Tesla-T4}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {nvidia.com/gpu.replicas: "4"}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {nvidia.com/mps.capable: "true"}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: {key: pool, operator: Exists}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{operator: Exists}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool, operator: in, values: [a]}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool, operator: In, values: []}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool, operator: In, values: a}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool, operator: In, values: ["a b"]}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool, operator: DoesNotExist, values: [a]}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: nvidia.com/mig.config, operator: Exists}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: gpusharing.io/policy, operator: Exists}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: cores, operator: Gt, values: ["4"]}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: Büro}}, sharing: {strategy: Exclusive}}
# which GPUs
{gpuSelector: {}, sharing: {strategy: Exclusive}}
{gpuSelector: {products: []}, sharing: {strategy: Exclusive}}
{gpuSelector: {products: "Tesla-T4"}, sharing: {strategy: Exclusive}}
{gpuSelector: {product: Tesla-T4}, sharing: {strategy: Exclusive}}
{gpuSelector: {products: [Tesla T4]}, sharing: {strategy: Exclusive}}
{gpuSelector: {products: [Tesla-T4, Tesla-T4]}, sharing: {strategy: Exclusive}}
{gpuSelector: {indexes: [-1]}, sharing: {strategy: Exclusive}}
{gpuSelector: {indexes: ["0"]}, sharing: {strategy: Exclusive}}
{gpuSelector: {indexes: [1, 1]}, sharing: {strategy: Exclusive}}
{gpuSelector: {indexes: [0-3]}, sharing: {strategy: Exclusive}}
{gpuSelector: {indexes: [4096]}, sharing: {strategy: Exclusive}}
{gpuSelector: {products: ["NVIDIA-[AH100-*"]}, sharing: {strategy: Exclusive}}
{gpuSelector: {products: [Tesla-T4-SHARED]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}}
{gpuSelector: {products: [NVIDIA-A100-SXM4-40GB-MIG-1g.5gb]}, sharing: {strategy: Exclusive}}
# which strategy
{}
{sharing: {}}
{sharing: Exclusive}
{sharing: {strategy: Time-Slicing, timeSlicing: {replicas: 4}}}
{sharing: {strategy: timeSlicing, timeSlicing: {replicas: 4}}}
{sharing: {strategy: TimeSlicing}}
{sharing: {strategy: TimeSlicing, replicas: 4}}
{sharing: {strategy: TimeSlicing, mps: {replicas: 4}}}
{sharing: {strategy: MPS}}
{sharing: {strategy: MIG}}
{sharing: {strategy: Exclusive, mps: {replicas: 4}}}
{sharing: {timeSlicing: {replicas: 4}}}
# time-slicing
{sharing: {strategy: TimeSlicing, timeSlicing: {}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 0}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 1}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: -4}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 1000}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 99999999999999999999}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2.5}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, interval: 2ms}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, renameByDefault: true}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}, advertise: {renameByDefault: "yes"}}}
{sharing: {strategy: Exclusive, advertise: {failRequestsGreaterThanOne: true}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 4Gi}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 4GB, guard: {}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {limit: "Yes", guard: {}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {mode: Kill}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {freeBelowPercent: 5%}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {gracePeriodSeconds: 1m}}}}}
# MPS
{sharing: {strategy: MPS, mps: {replicas: 1}}}
{sharing: {strategy: MPS, mps: {replicas: 100}}}
{sharing: {strategy: MPS, mps: {replicas: 4, activeThreadPercentage: 25%}}}
{sharing: {strategy: MPS, mps: {replicas: 4, activeThreadPercentage: 150}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: 4096}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: -4Gi}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: 25%}}}
{sharing: {strategy: MPS, mps: {replicas: 4, pinnedMemoryLimit: 0=4G}}}
{sharing: {strategy: MPS, mps: {replicas: 4}, advertise: {failRequestsGreaterThanOne: false}}}
# MIG
{sharing: {strategy: MIG, mig: {}}}
{sharing: {strategy: MIG, mig: {layouts: [{}]}}}
{sharing: {strategy: MIG, mig: {layouts: {fill: 1g}}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: "19"}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1G.5GB}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: all-1g.5gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1c.3g.20gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: {1g.5gb: 7}}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 1}, {profile: 1g, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 7g, count: 1}, {profile: 1g, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 8}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g, count: 2}, {profile: 1g, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 4g.20gb, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 4g, count: 1}, {profile: 3g, count: 1}, {profile: 1g, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}, {fill: 3g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}, {gpus: {indexes: [0]}, fill: 3g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A30]}, fill: 1g}, {gpus: {products: [NVIDIA-A30], indexes: [1]}, fill: 2g}]}}}
{gpuSelector: {indexes: [0]}, sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [1]}, fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {strategy: mixed, layouts: [{fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: mixed, layouts: [{fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{instances: [{profile: 3g, count: 1}, {profile: 2g, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{gpus: {indexes: [0]}, fill: 1g}, {gpus: {indexes: [1]}, fill: 2g}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{gpus: {indexes: [0]}, fill: 1g}, {instances: [{profile: 2g, count: 3}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g.5gb, replicas: 2}, {gpus: {indexes: [1]}, fill: 1g.5gb, replicas: 4}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, instances: [{profile: 1g.5gb, count: 1, replicas: 3}]}, {instances: [{profile: 3g.20gb, count: 1}, {profile: 1g.5gb, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, instances: [{profile: 1g.5gb, count: 1, replicas: 3}]}, {fill: 1g.5gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A30-SHARED]}, fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}], wholeGPUs: {replicas: 4}}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}], wholeGPUs: {}}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 2}], replicas: 2}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g, timeSlicing: [{profile: 2g, replicas: 2}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}, advertise: {renameByDefault: true}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g, onDemand: {mode: Always, profiles: [1g]}}]}}}
# rollout, taints and the rest
{sharing: {strategy: Exclusive}, rollout: {maxUnavailable: 0}}
{sharing: {strategy: Exclusive}, rollout: {maxUnavailable: 110%}}
{sharing: {strategy: Exclusive}, rollout: {maxFailures: 1}}
{sharing: {strategy: Exclusive}, rollout: {failureThreshold: 10%}}
{sharing: {strategy: Exclusive}, rollout: {paused: "true"}}
{sharing: {strategy: Exclusive}, rollout: {drain: Evict}}
{sharing: {strategy: Exclusive}, rollout: {drain: {mode: evict}}}
{sharing: {strategy: Exclusive}, rollout: {drain: {timeoutSeconds: 10m}}}
{sharing: {strategy: Exclusive}, rollout: {drain: {beforeReboot: AllPods}}}
{sharing: {strategy: Exclusive}, rollout: {reboot: true}}
{sharing: {strategy: Exclusive}, rollout: {onWindowEnd: CancelDrain}}
{sharing: {strategy: Exclusive}, rollout: {windows: []}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "22:00", duration: 4h}]}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 22 * * FRI"}]}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 22 * * FRI", duration: 4}]}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 22 * * FRI", duration: 1d}]}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 25 * * FRI", duration: 4h}]}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 0 30 2 *", duration: 1h}]}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "*/5 0,1 31 Apr,6 ?", duration: 1h}]}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 22 * * FRI", duration: 4h, timeZone: CEST}]}}
{sharing: {strategy: Exclusive}, taints: [{key: example.com/shared, effect: NoExecute}]}
{sharing: {strategy: Exclusive}, taints: [{key: gpusharing.io/startup}]}
{sharing: {strategy: Exclusive}, taints: {key: a}}
{sharing: {strategy: Exclusive}, taints: [{key: a, value: "1"}, {key: a, value: "2"}]}
{sharing: {strategy: Exclusive}, releasePolicy: Delete}
{sharing: {strategy: Exclusive}, priority: high}
{sharing: {strategy: Exclusive}, autoscaling: {emptyPool: true}}
{sharing: {strategy: Exclusive}, autoscaling: {mode: Manage, nodeShapes: [{product: Tesla-T4, gpusPerNode: 1, nodeGroups: [{kind: MachineSet, name: a}]}]}}
{sharing: {strategy: Exclusive}, autoscaling: {mode: Manage, nodeShapes: [{product: Tesla-T4-SHARED, gpusPerNode: 1, nodeGroups: [{kind: NodePool, name: a}]}]}}
`

// good are specs that must pass.
const good = `
# which nodes and GPUs
{sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: a}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {pool: ""}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {node-role.kubernetes.io/gpu: "", Team_A.x: B_1.c-d}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {nvidia.com/gpu.family: ampere}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchLabels: {kubernetes.io/hostname: gpu-1.example.com}}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool, operator: In, values: [a, b]}]}, sharing: {strategy: Exclusive}}
{nodeSelector: {matchExpressions: [{key: pool, operator: NotIn, values: [a]}, {key: spot, operator: DoesNotExist}]}, sharing: {strategy: Exclusive}}
{gpuSelector: {products: ["NVIDIA-A100-*", "Tesla-T?"]}, sharing: {strategy: Exclusive}}
{gpuSelector: {indexes: [0, 63]}, sharing: {strategy: Exclusive}}
# time-slicing and MPS
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 2}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {renameByDefault: true}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 10}, advertise: {failRequestsGreaterThanOne: false}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, interval: Long}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {guard: {}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {limit: Enforce, guard: {}}}}}
{sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4, memory: {perReplica: 3.5Gi, guard: {mode: Evict, freeBelowPercent: 10}}}}}
{sharing: {strategy: MPS, mps: {replicas: 10}}}
{sharing: {strategy: MPS, mps: {replicas: 10}, advertise: {renameByDefault: true, failRequestsGreaterThanOne: true}}}
{sharing: {strategy: MPS, mps: {replicas: 4, activeThreadPercentage: 25, pinnedMemoryLimit: 4Gi, multiUser: true}}}
# MIG
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb+me}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.5gb, count: 7}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g.20gb, count: 1}, {profile: 2g.10gb, count: 1}, {profile: 1g.5gb, count: 2}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 4g.40gb, count: 1}, {profile: 3g.40gb, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g.24gb-me, count: 3}, {profile: 1g.24gb+me.all, count: 1}]}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.5gb, replicas: 2}]}, advertise: {renameByDefault: true}}}
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 3g, count: 2, replicas: 4}]}]}, advertise: {failRequestsGreaterThanOne: false}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{fill: 3g.20gb}]}}}
{sharing: {strategy: MIG, mig: {actuator: MIGManager, layouts: [{fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}], wholeGPUs: {replicas: 4}}, advertise: {renameByDefault: true}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-A30]}, fill: 1g}, {gpus: {products: ["NVIDIA-A100-*"]}, fill: 3g}, {fill: 2g}]}}}
{sharing: {strategy: MIG, mig: {resourceNames: Uniform, layouts: [{gpus: {products: [NVIDIA-A30]}, fill: 1g}, {fill: 2g, replicas: 2}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: [NVIDIA-H100-PCIe]}, fill: 1g.10gb, replicas: 2}, {gpus: {products: [NVIDIA-H200]}, fill: 1g.10gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g, replicas: 2}, {fill: 1g}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: ["NVIDIA-A100-*"], indexes: [0]}, fill: 1g}, {gpus: {products: [NVIDIA-A30], indexes: [0]}, fill: 2g}]}}}
{gpuSelector: {indexes: [0, 1]}, sharing: {strategy: MIG, mig: {layouts: [{gpus: {indexes: [0]}, fill: 1g}, {gpus: {indexes: [1]}, fill: 3g}]}}}
# rollout, taints and the rest
{sharing: {strategy: Exclusive}, rollout: {maxUnavailable: 25%, failureThreshold: 3, paused: true}}
{sharing: {strategy: Exclusive}, rollout: {drain: {mode: Evict, timeoutSeconds: 3600}, reboot: IfRequired}}
{sharing: {strategy: Exclusive}, rollout: {reboot: IfRequired, drain: {beforeReboot: AllPods}}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 22 * * FRI", duration: 8h, timeZone: Europe/Berlin}, {schedule: "@monthly", duration: 2h30m}], onWindowEnd: CancelDrain}}
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 0 31 4 MON", duration: 1h}, {schedule: "0 0 31 4-6 *", duration: 1h}, {schedule: "0 0 29,30 2 *", duration: 1h}]}}
{sharing: {strategy: Exclusive}, rollout: {startupTaint: UntilReady}, priority: -5, releasePolicy: Retain}
{sharing: {strategy: Exclusive}, taints: [{key: nvidia.com/gpu}, {key: example.com/shared, value: "yes", effect: PreferNoSchedule}]}
{sharing: {strategy: Exclusive}, autoscaling: {emptyPool: Expected, unrenamedReplicas: Announce}}
{sharing: {strategy: Exclusive}, autoscaling: {mode: Manage, nodeShapes: [{product: Tesla-T4, gpusPerNode: 4, instanceTypes: [g4dn.12xlarge], nodeGroups: [{kind: NodePool, name: gpu}]}]}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g, onDemand: {mode: Apply, profiles: [1g]}}]}}}
`

// beyondSchema are specs that are as bad and that neither a schema nor CEL can know: what they lack is on the nodes. The policy
// then says so of its nodes. They are here so that a check that learns one is noticed.
const beyondSchema = `
# no GPU has a profile of these sizes, or none with so many slices
{sharing: {strategy: MIG, mig: {layouts: [{fill: 1g.999gb}]}}}
{sharing: {strategy: MIG, mig: {layouts: [{fill: 6g}]}}}
# two names of one profile
{sharing: {strategy: MIG, mig: {layouts: [{instances: [{profile: 1g, count: 1, replicas: 2}, {profile: 1g.5gb, count: 1, replicas: 3}]}]}}}
# the second pattern is within the first
{sharing: {strategy: MIG, mig: {layouts: [{gpus: {products: ["NVIDIA-*"]}, fill: 1g}, {gpus: {products: [NVIDIA-A30]}, fill: 2g}]}}}
# no node has a GPU of that name
{gpuSelector: {products: [Tesla-T400O]}, sharing: {strategy: Exclusive}}
# half of the GPUs of a node, which NVIDIA's plugin shares alike
{gpuSelector: {indexes: [0]}, sharing: {strategy: TimeSlicing, timeSlicing: {replicas: 4}}}
# a range that ends before it begins
{sharing: {strategy: Exclusive}, rollout: {windows: [{schedule: "0 22-4 * * *", duration: 1h}]}}
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

// specs are the lines of a text that are no headings.
func specs(text string) (all []string) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			all = append(all, line)
		}
	}
	return all
}
