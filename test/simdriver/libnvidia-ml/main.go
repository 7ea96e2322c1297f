// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// libnvidia-ml is NVML's C ABI over the simulated hardware, built with -buildmode=c-shared. What it does not serve is a
// stub that returns NVML_ERROR_NOT_SUPPORTED (stubs.c), since go-nvml ends the process that calls a symbol that is
// missing.
package main

// #include "nvml.h"
import "C"

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

func main() {}

// Returns that the rules of package sim do not give.
const (
	uninitialized   sim.Return = 1
	moduleMismatch  sim.Return = 18 // the library belongs to another version of the driver than the kernel module
	noMemory        sim.Return = 20
	noData          sim.Return = 21
	versionMismatch sim.Return = 25
)

// library is the state of the loaded library: what nvmlInit opened, and the handles given out. Handles stay valid for
// the life of the process.
type library struct {
	mu      sync.Mutex
	driver  *simdriver.Driver
	client  *simdriver.Client
	version string // of the driver to which the file of the library belongs
	users   int    // nvmlInit less nvmlShutdown
	calls   atomic.Int64
	handles map[C.struct_handle]*C.struct_handle
	sets    []*eventSet
	samples map[int]gpmSample // by number
}

// loaded is the one library of the process, as in NVML.
var loaded = &library{handles: map[C.struct_handle]*C.struct_handle{}, samples: map[int]gpmSample{}} //nolint:gochecknoglobals // a C library is global

func (l *library) open() sim.Return {
	l.mu.Lock()
	defer l.mu.Unlock()
	file := C.GoString(C.library_path())
	if l.driver == nil {
		d, err := simdriver.Around(file)
		if err != nil {
			return sim.DriverNotLoaded
		}
		l.driver = d
	}
	s, err := l.driver.Read()
	if err != nil || s.Unloaded {
		return sim.DriverNotLoaded
	}
	if l.version == "" { // once: what a process has loaded does not change when the file is replaced
		l.version, _ = simdriver.VersionOf(file)
	}
	if l.version != s.Node.DriverVersion {
		return moduleMismatch
	}
	if l.users == 0 {
		client, err := l.driver.Connect()
		if err != nil {
			return sim.Unknown
		}
		l.client = client
	}
	l.users++
	return sim.Success
}

func (l *library) shut() sim.Return {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users == 0 {
		return uninitialized
	}
	l.users--
	if l.users == 0 {
		_ = l.client.Disconnect() // the lock is gone in any case
		if s, err := l.driver.Read(); err == nil && s.Node.Forgets {
			_ = l.driver.WithClients(func(s *simdriver.State) error { s.Node.Forget(); return nil }) // NVML does not say
		}
		if file := os.Getenv(simdriver.CountEnv); file != "" {
			_ = os.WriteFile(file, strconv.AppendInt(nil, l.calls.Load(), 10), 0o600) // who measures misses it
		}
		if len(l.samples) > 0 { // NVML itself does not say that a program grows for ever
			clear(l.samples)
			return sim.InUse
		}
	}
	return sim.Success
}

func (l *library) current() (*simdriver.Driver, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.driver, l.users > 0
}

// handle is the handle of something, the same each time.
func (l *library) handle(kind, gpu, gi, ci int) *C.struct_handle {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := C.struct_handle{kind: C.int(kind), gpu: C.int(gpu), gi: C.int(gi), ci: C.int(ci)}
	h, ok := l.handles[key]
	if !ok {
		h = C.new_handle(key.kind, key.gpu, key.gi, key.ci)
		l.handles[key] = h
	}
	return h
}

// returned is the NVML return of an error of the rules.
func returned(err error) sim.Return {
	var refusal *sim.Error
	switch {
	case err == nil:
		return sim.Success
	case errors.As(err, &refusal):
		return refusal.Return
	}
	return sim.Unknown
}

// call serves a call that reads.
func call(name string, h *C.struct_handle, do func(s *simdriver.State) sim.Return) C.int {
	loaded.calls.Add(1)
	d, ok := loaded.current()
	if !ok {
		return C.int(uninitialized)
	}
	s, err := d.Read()
	if err != nil {
		return C.int(sim.DriverNotLoaded)
	}
	if ret := meet(d, s, name, h); ret != sim.Success {
		return C.int(ret)
	}
	return C.int(do(s))
}

// change serves a call that changes the hardware.
func change(name string, h *C.struct_handle, do func(s *simdriver.State) error) C.int {
	return changeAfter(meet, name, h, do)
}

// meeting is what a call meets before it does its work.
type meeting func(d *simdriver.Driver, s *simdriver.State, name string, h *C.struct_handle) sim.Return

func changeAfter(meet meeting, name string, h *C.struct_handle, do func(s *simdriver.State) error) C.int {
	loaded.calls.Add(1)
	d, ok := loaded.current()
	if !ok {
		return C.int(uninitialized)
	}
	s, err := d.Read()
	if err != nil {
		return C.int(sim.DriverNotLoaded)
	}
	ret := meet(d, s, name, h)
	if ret == sim.Success {
		ret = returned(d.WithClients(do))
	}
	d.Record("NVML", name, uuidOf(s, h), ret.String())
	return C.int(ret)
}

// meet lets a call run into its fault, if it has one, and take its time.
func meet(d *simdriver.Driver, s *simdriver.State, name string, h *C.struct_handle) sim.Return {
	if len(s.Faults) == 0 && len(s.Latency) == 0 {
		return sim.Success
	}
	fault, latency, err := d.Take(name, uuidOf(s, h))
	if err != nil {
		return sim.Unknown
	}
	time.Sleep(latency + fault.Hang)
	return fault.Return
}

// meetFault is meet of a call that finds nothing to do, which takes no time.
func meetFault(d *simdriver.Driver, s *simdriver.State, name string, h *C.struct_handle) sim.Return {
	fault, _, err := d.Take(name, uuidOf(s, h))
	if err != nil {
		return sim.Unknown
	}
	time.Sleep(fault.Hang)
	return fault.Return
}

func uuidOf(s *simdriver.State, h *C.struct_handle) string {
	if h == nil || int(h.gpu) >= len(s.Node.GPUs) || h.kind == C.HANDLE_EVENTS || h.kind == C.HANDLE_GPM {
		return ""
	}
	return s.Node.GPUs[h.gpu].UUID
}

// find is the GPU of a handle of that kind.
func find(s *simdriver.State, h *C.struct_handle, kinds ...C.int) (*sim.GPU, bool) {
	if h == nil || h.gpu < 0 || int(h.gpu) >= len(s.Node.GPUs) {
		return nil, false
	}
	if !slices.Contains(kinds, h.kind) {
		return nil, false
	}
	return &s.Node.GPUs[h.gpu], true
}

// onGPU serves a call that reads something of a GPU, through its handle or that of one of its MIG devices.
func onGPU(name string, h *C.struct_handle, do func(s *simdriver.State, g *sim.GPU) sim.Return) C.int {
	return call(name, h, func(s *simdriver.State) sim.Return {
		g, ok := find(s, h, C.HANDLE_GPU, C.HANDLE_MIG)
		if !ok {
			return sim.InvalidArgument
		}
		return do(s, g)
	})
}
