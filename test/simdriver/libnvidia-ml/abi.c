// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

#define _GNU_SOURCE
#include "nvml.h"

#include <dlfcn.h>
#include <stdlib.h>

struct handle *new_handle(int kind, int gpu, int gi, int ci) {
	struct handle *h = calloc(1, sizeof *h);
	if (h != NULL) {
		*h = (struct handle){kind, gpu, gi, ci};
	}
	return h;
}

// library_path is the file that this code was loaded from.
const char *library_path(void) {
	Dl_info info;
	return dladdr((void *)library_path, &info) != 0 ? info.dli_fname : "";
}

const char *nvmlErrorString(int ret) {
	switch (ret) {
	case 0: return "Success";
	case 1: return "Uninitialized";
	case 2: return "Invalid Argument";
	case 3: return "Not Supported";
	case 4: return "Insufficient Permissions";
	case 6: return "Not Found";
	case 7: return "Insufficient Size";
	case 9: return "Driver Not Loaded";
	case 10: return "Timeout";
	case 12: return "NVML Shared Library Not Found";
	case 13: return "Function Not Found";
	case 15: return "GPU is lost";
	case 16: return "GPU requires reset";
	case 18: return "Driver/library version mismatch";
	case 19: return "In use by another client";
	case 20: return "Insufficient Memory";
	case 23: return "Insufficient Resources";
	case 25: return "Argument version mismatch";
	case 999: return "Unknown Error";
	}
	return "Unknown Error";
}
