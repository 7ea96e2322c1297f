// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build hardware

package gputest

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include <stddef.h>

typedef int (*init_t)(unsigned);
typedef int (*get_t)(int *, int);
typedef int (*attribute_t)(int *, int, int);
typedef int (*retain_t)(void **, int);
typedef int (*current_t)(void *);
typedef int (*memory_t)(size_t *, size_t *);
typedef int (*allocate_t)(unsigned long long *, size_t);
typedef int (*free_t)(unsigned long long);
typedef int (*load_t)(void **, const void *);
typedef int (*function_t)(void **, void *, const char *);
typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int (*synchronize_t)(void);
typedef int (*name_t)(int, const char **);

static void *cuda;

static const char *cudaName(int code) {
	const char *name = "no library";
	name_t f = cuda ? (name_t)dlsym(cuda, "cuGetErrorName") : NULL;
	if (f) f(code, &name);
	return name;
}

// A context on the first GPU: 0, or CUDA's error.
static int cudaUse(const char *library, int *multiprocessors, size_t *available) {
	int device, code;
	void *context;
	size_t total;
	if (!(cuda = dlopen(library, RTLD_NOW))) return -1;
	if ((code = ((init_t)dlsym(cuda, "cuInit"))(0))) return code;
	if ((code = ((get_t)dlsym(cuda, "cuDeviceGet"))(&device, 0))) return code;
	if ((code = ((retain_t)dlsym(cuda, "cuDevicePrimaryCtxRetain"))(&context, device))) return code;
	if ((code = ((current_t)dlsym(cuda, "cuCtxSetCurrent"))(context))) return code;
	if ((code = ((attribute_t)dlsym(cuda, "cuDeviceGetAttribute"))(multiprocessors, 16, device))) return code;
	return ((memory_t)dlsym(cuda, "cuMemGetInfo_v2"))(available, &total);
}

// A question to the driver that takes memory for a moment: 0, or CUDA's error.
static int cudaTouch(void) {
	unsigned long long memory;
	int code;
	if ((code = ((allocate_t)dlsym(cuda, "cuMemAlloc_v2"))(&memory, 1 << 20))) return code;
	return ((free_t)dlsym(cuda, "cuMemFree_v2"))(memory);
}

static void *kernel;
static unsigned long long result;

// A kernel of name k in PTX, and memory for what it writes: 0, or CUDA's error.
static int cudaLoad(const char *ptx) {
	void *module;
	int code;
	if ((code = ((load_t)dlsym(cuda, "cuModuleLoadData"))(&module, ptx))) return code;
	if ((code = ((function_t)dlsym(cuda, "cuModuleGetFunction"))(&kernel, module, "k"))) return code;
	return ((allocate_t)dlsym(cuda, "cuMemAlloc_v2"))(&result, 1 << 20);
}

// One run of the kernel, waited for: 0, or CUDA's error.
static int cudaRun(unsigned blocks, unsigned rounds) {
	void *parameters[] = {&result, &rounds};
	int code = ((launch_t)dlsym(cuda, "cuLaunchKernel"))(kernel, blocks, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
	return code ? code : ((synchronize_t)dlsym(cuda, "cuCtxSynchronize"))();
}
*/
import "C"

import (
	"errors"
	"fmt"
	"time"
	"unsafe"
)

// touchTime is how often a client asks the driver for something, so that it learns of an error.
const touchTime = 100 * time.Millisecond

// fmaKernel computes without memory: rounds of a multiplication and an addition in each thread.
const fmaKernel = `.version 7.0
.target sm_70
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 rounds) {
	.reg .pred %p; .reg .f32 %f<3>; .reg .b32 %r<3>; .reg .b64 %d<3>;
	ld.param.u64 %d0, [out]; ld.param.u32 %r0, [rounds]; mov.u32 %r1, %tid.x;
	cvt.rn.f32.u32 %f0, %r1; mov.f32 %f1, 0f3F7FFFF0; mov.f32 %f2, 0f3F000000;
again:	fma.rn.f32 %f0, %f0, %f1, %f2; sub.u32 %r0, %r0, 1; setp.ne.u32 %p, %r0, 0; @%p bra again;
	mul.wide.u32 %d1, %r1, 4; add.u64 %d2, %d0, %d1; st.global.f32 [%d2], %f0;
	ret;
}`

// Work is what a program computes: kernels of blocks of 256 threads, one after the other.
type Work struct {
	Blocks, Rounds int
	For, Pause     time.Duration // in all, and between two kernels
}

func cudaError(code C.int) error {
	if code == 0 {
		return nil
	}
	return fmt.Errorf("%s (%d)", C.GoString(C.cudaName(code)), int(code))
}

// openCUDA makes a context on the first GPU, by CUDA's library at a path.
func openCUDA(library string) (multiprocessors int, availableMiB int64, err error) {
	path := C.CString(library)
	defer C.free(unsafe.Pointer(path))
	var count C.int
	var available C.size_t
	err = cudaError(C.cudaUse(path, &count, &available))
	return int(count), int64(available) >> 20, err
}

// UseCUDA uses the first GPU, as a program does: it calls got with the multiprocessors and the free memory in MiB that
// it sees, and goes on until CUDA returns an error, which it returns with CUDA's name.
func UseCUDA(library string, got func(multiprocessors int, availableMiB int64)) error {
	multiprocessors, available, err := openCUDA(library)
	if err != nil {
		return err
	}
	got(multiprocessors, available)
	for {
		if err := cudaError(C.cudaTouch()); err != nil {
			return err
		}
		time.Sleep(touchTime)
	}
}

// MeasureCUDA computes on the first GPU from a moment on, and returns how long each kernel took.
func MeasureCUDA(library string, from time.Time, w Work) ([]time.Duration, error) {
	if _, _, err := openCUDA(library); err != nil {
		return nil, err
	}
	ptx := C.CString(fmaKernel)
	defer C.free(unsafe.Pointer(ptx))
	run := func() error { return cudaError(C.cudaRun(C.uint(w.Blocks), C.uint(w.Rounds))) }
	if err := errors.Join(cudaError(C.cudaLoad(ptx)), run()); err != nil {
		return nil, err
	}
	time.Sleep(time.Until(from))
	var took []time.Duration
	for begin := time.Now(); begin.Before(from.Add(w.For)); begin = time.Now() {
		if err := run(); err != nil {
			return nil, err
		}
		took = append(took, time.Since(begin))
		time.Sleep(w.Pause)
	}
	return took, nil
}
