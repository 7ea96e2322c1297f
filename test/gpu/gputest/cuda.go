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

typedef int (*asynchronous_t)(unsigned long long *, size_t, void *);
typedef int (*managed_t)(unsigned long long *, size_t, unsigned);
typedef int (*fill_t)(unsigned long long, unsigned char, size_t);
typedef int (*create_t)(unsigned long long *, size_t, const void *, unsigned long long);
struct shared { char bytes[64]; };
typedef int (*export_t)(struct shared *, unsigned long long);
typedef int (*import_t)(unsigned long long *, struct shared, unsigned);
typedef int (*free_asynchronous_t)(unsigned long long, void *);

// Memory of a kind, as takenKinds has them: 0, or CUDA's error. Managed memory is written to on the GPU.
static int cudaTake(int kind, size_t bytes, unsigned long long *memory) {
	int code;
	struct { int type, handles, location, device; void *metadata; unsigned char flags[8]; } pinned = {1, 0, 1, 0, NULL, {0}};
	switch (kind) {
	case 1:
		if ((code = ((asynchronous_t)dlsym(cuda, "cuMemAllocAsync"))(memory, bytes, NULL))) return code;
		break;
	case 2:
		return ((create_t)dlsym(cuda, "cuMemCreate"))(memory, bytes, &pinned, 0);
	case 3:
		if ((code = ((managed_t)dlsym(cuda, "cuMemAllocManaged"))(memory, bytes, 1))) return code;
		if ((code = ((fill_t)dlsym(cuda, "cuMemsetD8_v2"))(*memory, 1, bytes))) return code;
		break;
	default:
		return ((allocate_t)dlsym(cuda, "cuMemAlloc_v2"))(memory, bytes);
	}
	return ((synchronize_t)dlsym(cuda, "cuCtxSynchronize"))();
}

static int cudaGive(int kind, unsigned long long memory) {
	int code;
	switch (kind) {
	case 1:
		if ((code = ((free_asynchronous_t)dlsym(cuda, "cuMemFreeAsync"))(memory, NULL))) return code;
		return ((synchronize_t)dlsym(cuda, "cuCtxSynchronize"))();
	case 2:
		return ((free_t)dlsym(cuda, "cuMemRelease"))(memory);
	case 4:
		return ((free_t)dlsym(cuda, "cuIpcCloseMemHandle"))(memory);
	}
	return ((free_t)dlsym(cuda, "cuMemFree_v2"))(memory);
}

static int cudaExport(unsigned long long memory, void *into) {
	return ((export_t)dlsym(cuda, "cuIpcGetMemHandle"))(into, memory);
}

static int cudaImport(const void *exported, unsigned long long *memory) {
	return ((import_t)dlsym(cuda, "cuIpcOpenMemHandle_v2"))(memory, *(const struct shared *)exported, 1);
}

static int cudaMemory(size_t *available, size_t *total) { return ((memory_t)dlsym(cuda, "cuMemGetInfo_v2"))(available, total); }
*/
import "C"

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
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

// takenKinds are the kinds of memory by their numbers in C.
func takenKinds() []sim.MemoryKind {
	return []sim.MemoryKind{sim.DeviceMemory, sim.PoolMemory, sim.VirtualMemory, sim.ManagedMemory, sim.ImportedMemory}
}

// memoryProgram is a CUDA program that does with memory what it is told.
type memoryProgram struct{ taken []takenMemory }

type takenMemory struct {
	kind   C.int
	memory C.ulonglong
}

// ServeMemory makes this process a LimitedProgram on the first GPU. It answers each line that it reads by one line.
func ServeMemory(library string, in io.Reader, out io.Writer) error {
	_, _, failed := openCUDA(library)
	p := memoryProgram{}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		answer := fmt.Sprint(failed)
		if failed == nil {
			answer = p.obey(lines.Text())
		}
		if _, err := fmt.Fprintln(out, answer); err != nil {
			return err
		}
	}
	return nil
}

func (p *memoryProgram) obey(line string) string {
	var verb, argument string
	var kind int
	_, _ = fmt.Sscan(line, &verb, &argument, &kind)
	switch verb {
	case "allocate":
		_, code := p.take(kind, argument)
		return named(code)
	case "export":
		memory, code := p.take(0, argument)
		handle := make([]byte, unsafe.Sizeof(C.struct_shared{}))
		if code == 0 {
			code = C.cudaExport(memory, unsafe.Pointer(&handle[0]))
		}
		if code != 0 {
			return named(code)
		}
		return hex.EncodeToString(handle)
	case "import":
		handle, err := hex.DecodeString(argument)
		if err != nil || len(handle) != int(unsafe.Sizeof(C.struct_shared{})) {
			return "no handle: " + argument
		}
		var memory C.ulonglong
		code := C.cudaImport(unsafe.Pointer(&handle[0]), &memory)
		return p.note(4, memory, code)
	case "free":
		for _, t := range slices.Backward(p.taken) {
			C.cudaGive(t.kind, t.memory)
		}
		p.taken = nil
		return ""
	case "memory":
		var available, total C.size_t
		if code := C.cudaMemory(&available, &total); code != 0 {
			return named(code)
		}
		return fmt.Sprint(uint64(total), " ", uint64(available))
	}
	return "unknown: " + line
}

func (p *memoryProgram) take(kind int, size string) (C.ulonglong, C.int) {
	var bytes uint64
	var memory C.ulonglong
	_, _ = fmt.Sscan(size, &bytes)
	code := C.cudaTake(C.int(kind), C.size_t(bytes), &memory)
	p.note(kind, memory, code)
	return memory, code
}

func (p *memoryProgram) note(kind int, memory C.ulonglong, code C.int) string {
	if code == 0 {
		p.taken = append(p.taken, takenMemory{C.int(kind), memory})
	}
	return named(code)
}

// named is CUDA's name of an error; empty: none.
func named(code C.int) string {
	if code == 0 {
		return ""
	}
	return C.GoString(C.cudaName(code))
}

// CUDAProgram is a LimitedProgram to which lines are written, and which answers.
type CUDAProgram struct {
	In  io.Writer
	Out *bufio.Reader
	// Stop ends the process.
	Stop func()
}

func (p CUDAProgram) ask(format string, args ...any) string {
	if _, err := fmt.Fprintf(p.In, format+"\n", args...); err != nil {
		return err.Error()
	}
	answer, err := p.Out.ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(answer)
}

// Allocate implements LimitedProgram.
func (p CUDAProgram) Allocate(kind sim.MemoryKind, bytes uint64) string {
	return p.ask("allocate %d %d", bytes, slices.Index(takenKinds(), kind))
}

// Free implements LimitedProgram.
func (p CUDAProgram) Free() { p.ask("free") }

// Export implements LimitedProgram.
func (p CUDAProgram) Export(bytes uint64) string { return p.ask("export %d", bytes) }

// Import implements LimitedProgram.
func (p CUDAProgram) Import(exported string) string { return p.ask("import %s", exported) }

// Memory implements LimitedProgram.
func (p CUDAProgram) Memory() (total, free uint64) {
	_, _ = fmt.Sscan(p.ask("memory"), &total, &free)
	return total, free
}

// End implements LimitedProgram.
func (p CUDAProgram) End() { p.Stop() }
