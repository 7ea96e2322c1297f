// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// The part of NVML's C ABI that the simulated driver serves: layouts of the structures, as NVML's documentation gives
// them. Handles point to a struct handle of ours, which callers do not look into.

#ifndef SIMDRIVER_NVML_H
#define SIMDRIVER_NVML_H

#include <stdint.h>

enum { HANDLE_GPU = 1, HANDLE_MIG, HANDLE_GI, HANDLE_CI, HANDLE_EVENTS, HANDLE_GPM };

struct handle {
	int kind;
	int gpu; // index
	int gi;  // id of the GPU instance
	int ci;  // id of the compute instance, or number of the event set or of the GPM sample
};

struct pci_info {
	char bus_id_legacy[16];
	uint32_t domain, bus, device, pci_device_id, pci_subsystem_id;
	char bus_id[32];
};

struct memory {
	uint64_t total, free, used;
};

struct memory_v2 {
	uint32_t version;
	uint64_t total, reserved, free, used;
};

struct set_limits {
	const char *cgroup;
	uint64_t soft, hard;
};

struct get_limits {
	const char *cgroup;
	uint64_t soft, hard, used;
};

struct process_v1 {
	uint32_t pid;
	uint64_t used_memory;
};

struct process {
	uint32_t pid;
	uint64_t used_memory;
	uint32_t gi, ci;
};

struct process_utilization {
	uint32_t pid;
	uint64_t timestamp;
	uint32_t sm, memory, encoder, decoder;
};

struct utilization {
	unsigned int gpu, memory;
};

struct gpm_support {
	uint32_t version, supported;
};

struct gpm_metric {
	uint32_t id, ret;
	double value;
	const char *short_name, *long_name, *unit;
};

struct gpm_metrics {
	uint32_t version, count;
	struct handle *first, *second;
	struct gpm_metric metrics[333];
};

struct attributes {
	uint32_t multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gi_slices, ci_slices;
	uint64_t memory_mib;
};

struct placement {
	uint32_t start, size;
};

struct gi_profile {
	uint32_t id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
	uint64_t memory_mib;
};

struct gi_profile_v2 {
	uint32_t version, id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
	uint64_t memory_mib;
	char name[96];
};

struct gi_profile_v3 {
	uint32_t version, id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
	uint64_t memory_mib;
	char name[96];
	uint32_t capabilities;
};

struct gi_info {
	struct handle *device;
	uint32_t id, profile;
	struct placement placement;
};

struct ci_profile {
	uint32_t id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
};

struct ci_profile_v2 {
	uint32_t version, id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
	char name[96];
};

struct ci_info_v1 {
	struct handle *device, *gi;
	uint32_t id, profile;
};

struct ci_info {
	struct handle *device, *gi;
	uint32_t id, profile;
	struct placement placement;
};

struct license_expiry {
	unsigned int year;
	unsigned short month, day, hour, min, sec;
	unsigned char status;
};

struct licensable_feature {
	int code;
	unsigned int state;
	char info[128], product[128];
	unsigned int enabled;
	struct license_expiry expiry;
};

struct licensable_features {
	int supported;
	unsigned int count;
	struct licensable_feature features[3];
};

struct event_v1 {
	struct handle *device;
	uint64_t type, data;
};

struct event {
	struct handle *device;
	uint64_t type, data;
	uint32_t gi, ci;
};

struct handle *new_handle(int kind, int gpu, int gi, int ci);
const char *library_path(void);

#endif
