// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/usage"
)

// UsageCollector measures who uses the GPUs whenever Prometheus asks. A series goes with its container, and what is not
// known has none.
type UsageCollector struct {
	measure func() (usage.Report, error)

	complete                                                    *prometheus.Desc
	memoryTotal, memoryUsed, memoryFree, utilization            *prometheus.Desc
	instanceSM, instanceBandwidth                               *prometheus.Desc
	containers, replicas, limitThreads, limitMemory             *prometheus.Desc
	containerMemory, containerShare, containerSM, containerRate *prometheus.Desc
	clients, outdated                                           *prometheus.Desc
}

var _ prometheus.Collector = (*UsageCollector)(nil)

// unitLabels are those of a GPU or a MIG instance. Prometheus itself uses the label instance for what it scrapes.
func unitLabels() []string {
	return []string{"node", "gpu", "gpu_index", "gpu_instance", "profile", "product", "strategy"}
}

// containerLabels are those of a container on one.
func containerLabels() []string {
	return []string{"node", "gpu", "gpu_index", "gpu_instance", "profile", "product", "strategy", "namespace", "pod", "container"}
}

// NewUsageCollector makes a collector of what measure measures.
func NewUsageCollector(measure func() (usage.Report, error)) *UsageCollector {
	return &UsageCollector{
		measure: measure,
		complete: prometheus.NewDesc("gpusharing_agent_usage_complete",
			"1 if all GPUs of the node could be measured for this scrape, otherwise 0; the agent's log has the error.",
			[]string{"node"}, nil),
		memoryTotal: prometheus.NewDesc("gpusharing_gpu_memory_total_bytes",
			"Memory of a GPU or, with gpu_instance, of a MIG instance.", unitLabels(), nil),
		memoryUsed: prometheus.NewDesc("gpusharing_gpu_memory_used_bytes",
			"Memory of a GPU or a MIG instance that is in use, without what the driver reserves.", unitLabels(), nil),
		memoryFree: prometheus.NewDesc("gpusharing_gpu_memory_free_bytes",
			"Memory of a GPU or a MIG instance that is free.", unitLabels(), nil),
		utilization: prometheus.NewDesc("gpusharing_gpu_utilization_ratio",
			"Part of the driver's last sample period in which kernels ran on a GPU, 0 to 1. Absent in MIG mode.", unitLabels(), nil),
		instanceSM: prometheus.NewDesc("gpusharing_gpu_sm_utilization_ratio",
			"Part of the streaming multiprocessors of a MIG instance that were busy while it was measured, 0 to 1. Hopper and later.", unitLabels(), nil),
		instanceBandwidth: prometheus.NewDesc("gpusharing_gpu_memory_bandwidth_utilization_ratio",
			"Part of the memory bandwidth of a MIG instance that was used while it was measured, 0 to 1. Hopper and later.", unitLabels(), nil),
		containers: prometheus.NewDesc("gpusharing_gpu_containers",
			"Containers that hold or use a GPU or a MIG instance. Absent for a GPU that has instances.", unitLabels(), nil),
		replicas: prometheus.NewDesc("gpusharing_gpu_replicas",
			"How often the node advertises a GPU or a MIG instance. Absent for a GPU that has instances.", unitLabels(), nil),
		limitThreads: prometheus.NewDesc("gpusharing_mps_server_limits_active_thread_ratio",
			"Part of the threads of a GPU that one client of its MPS server may use, 0 to 1.", unitLabels(), nil),
		limitMemory: prometheus.NewDesc("gpusharing_mps_server_limits_pinned_memory_bytes",
			"Memory of a GPU that one client of its MPS server may allocate. Absent without a limit.", unitLabels(), nil),
		containerMemory: prometheus.NewDesc("gpusharing_container_gpu_memory_used_bytes",
			"GPU memory that the processes of a container use; 0 for a container that holds the GPU and has no process on it.",
			containerLabels(), nil),
		containerShare: prometheus.NewDesc("gpusharing_container_gpu_memory_share_bytes",
			"GPU memory that a container is meant to have: the limit of the MPS server, what the policy's memory guard says, or the memory divided "+
				"by the replicas.",
			containerLabels(), nil),
		containerSM: prometheus.NewDesc("gpusharing_container_gpu_sm_utilization_ratio",
			"Part of the driver's last sample period in which the streaming multiprocessors worked for a container, 0 to 1. Absent if they did "+
				"not lately, for MPS clients and in MIG mode.", containerLabels(), nil),
		containerRate: prometheus.NewDesc("gpusharing_container_gpu_memory_utilization_ratio",
			"Part of the driver's last sample period in which the memory controller worked for a container, 0 to 1. Absent as above.",
			containerLabels(), nil),
		clients: prometheus.NewDesc("gpusharing_mps_clients",
			"Clients of the MPS server of a resource.", []string{"node", "resource"}, nil),
		outdated: prometheus.NewDesc("gpusharing_mps_clients_outdated",
			"Clients of the MPS server of a resource that connected before the limits last changed, and keep the former limits.",
			[]string{"node", "resource"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *UsageCollector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.complete, c.memoryTotal, c.memoryUsed, c.memoryFree, c.utilization, c.instanceSM, c.instanceBandwidth, c.containers, c.replicas, c.limitThreads, c.limitMemory,
		c.containerMemory, c.containerShare, c.containerSM, c.containerRate, c.clients, c.outdated,
	} {
		descriptions <- d
	}
}

// Collect implements prometheus.Collector.
func (c *UsageCollector) Collect(metrics chan<- prometheus.Metric) {
	report, err := c.measure()
	complete := 1.0
	if err != nil {
		complete = 0
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(c.complete, complete, report.Node)
	for _, u := range report.Units {
		c.unit(gauge, report.Node, u)
	}
	for _, d := range report.Daemons {
		gauge(c.clients, float64(d.Clients), report.Node, d.Resource)
		gauge(c.outdated, float64(d.OutdatedClients), report.Node, d.Resource)
	}
}

// emit sends one value.
type emit func(d *prometheus.Desc, value float64, labels ...string)

func (c *UsageCollector) unit(gauge emit, node string, u usage.Unit) {
	instance := ""
	if u.Instance != nil {
		instance = strconv.Itoa(*u.Instance)
	}
	labels := []string{node, u.GPU, strconv.Itoa(u.Index), instance, u.Profile, u.Product, string(u.Strategy)}
	if u.Memory != nil {
		gauge(c.memoryTotal, float64(u.Memory.Total), labels...)
		gauge(c.memoryUsed, float64(u.Memory.Used), labels...)
		gauge(c.memoryFree, float64(u.Memory.Free), labels...)
	}
	switch {
	case u.Utilization == nil:
	case u.Instance != nil:
		gauge(c.instanceSM, u.Utilization.Compute, labels...)
		gauge(c.instanceBandwidth, u.Utilization.Memory, labels...)
	default:
		gauge(c.utilization, u.Utilization.Compute, labels...)
	}
	if !u.Partitioned {
		gauge(c.containers, float64(len(u.Containers)), labels...)
		gauge(c.replicas, float64(u.Replicas), labels...)
	}
	if u.Limits != nil {
		gauge(c.limitThreads, u.Limits.ActiveThreads, labels...)
		if u.Limits.MemoryBytes != nil {
			gauge(c.limitMemory, float64(*u.Limits.MemoryBytes), labels...)
		}
	}
	for _, container := range u.Containers {
		c.container(gauge, append(slices.Clip(labels), container.Namespace, container.Pod, container.Container), container)
	}
}

func (c *UsageCollector) container(gauge emit, labels []string, container usage.Container) {
	if container.MemoryBytes != nil {
		gauge(c.containerMemory, float64(*container.MemoryBytes), labels...)
	}
	if container.ShareBytes != nil {
		gauge(c.containerShare, float64(*container.ShareBytes), labels...)
	}
	if container.Utilization != nil {
		gauge(c.containerSM, container.Utilization.Compute, labels...)
		gauge(c.containerRate, container.Utilization.Memory, labels...)
	}
}
