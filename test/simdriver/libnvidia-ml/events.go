// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

// #include "nvml.h"
import "C"

import (
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// supportedEvents are ECC errors of one and of two bits, and Xid errors.
const supportedEvents = 0x1 | 0x2 | 0x8

// pollEvents is how often a waiting program looks whether there is an event.
const pollEvents = 50 * time.Millisecond

type eventSet struct {
	kinds map[int]uint64 // by index of the GPU
	seen  int            // serial of the last event that was told or missed
}

//export nvmlEventSetCreate
func nvmlEventSetCreate(set **C.struct_handle) C.int {
	return call("nvmlEventSetCreate", nil, func(s *simdriver.State) sim.Return {
		*set = loaded.handle(C.HANDLE_EVENTS, 0, 0, loaded.newEventSet(lastSerial(s)))
		return sim.Success
	})
}

func (l *library) newEventSet(seen int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sets = append(l.sets, &eventSet{kinds: map[int]uint64{}, seen: seen})
	return len(l.sets) - 1
}

func (l *library) eventSet(h *C.struct_handle) (*eventSet, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h == nil || h.kind != C.HANDLE_EVENTS || int(h.ci) >= len(l.sets) || l.sets[h.ci] == nil {
		return nil, false
	}
	return l.sets[h.ci], true
}

func lastSerial(s *simdriver.State) int {
	if len(s.Events) == 0 {
		return 0
	}
	return s.Events[len(s.Events)-1].Serial
}

//export nvmlEventSetFree
func nvmlEventSetFree(set *C.struct_handle) C.int {
	if _, ok := loaded.eventSet(set); !ok {
		return C.int(sim.InvalidArgument)
	}
	loaded.mu.Lock()
	defer loaded.mu.Unlock()
	loaded.sets[set.ci] = nil
	return C.int(sim.Success)
}

//export nvmlDeviceGetSupportedEventTypes
func nvmlDeviceGetSupportedEventTypes(h *C.struct_handle, kinds *C.ulonglong) C.int {
	return onGPU("nvmlDeviceGetSupportedEventTypes", h, func(*simdriver.State, *sim.GPU) sim.Return {
		*kinds = supportedEvents
		return sim.Success
	})
}

//export nvmlDeviceRegisterEvents
func nvmlDeviceRegisterEvents(h *C.struct_handle, kinds C.ulonglong, set *C.struct_handle) C.int {
	return onGPU("nvmlDeviceRegisterEvents", h, func(*simdriver.State, *sim.GPU) sim.Return {
		events, ok := loaded.eventSet(set)
		if !ok {
			return sim.InvalidArgument
		}
		if kinds&^supportedEvents != 0 {
			return sim.NotSupported
		}
		events.kinds[int(h.gpu)] |= uint64(kinds)
		return sim.Success
	})
}

//export nvmlEventSetWait
func nvmlEventSetWait(set *C.struct_handle, data *C.struct_event_v1, milliseconds C.uint) C.int {
	var full C.struct_event
	ret := wait(set, &full, milliseconds)
	*data = C.struct_event_v1{device: full.device, _type: full._type, data: full.data}
	return ret
}

//export nvmlEventSetWait_v2
func nvmlEventSetWait_v2(set *C.struct_handle, data *C.struct_event, milliseconds C.uint) C.int {
	return wait(set, data, milliseconds)
}

func wait(set *C.struct_handle, data *C.struct_event, milliseconds C.uint) C.int {
	events, ok := loaded.eventSet(set)
	if !ok {
		return C.int(sim.InvalidArgument)
	}
	deadline := time.Now().Add(time.Duration(milliseconds) * time.Millisecond)
	for {
		ret := call("nvmlEventSetWait", nil, func(s *simdriver.State) sim.Return { return events.next(s, data) })
		if ret != C.int(sim.Timeout) || !time.Now().Before(deadline) {
			return ret
		}
		time.Sleep(min(pollEvents, time.Until(deadline)))
	}
}

// next tells the oldest event that is waited for and was not told, or Timeout.
func (e *eventSet) next(s *simdriver.State, data *C.struct_event) sim.Return {
	for _, event := range s.Events {
		if event.Serial <= e.seen {
			continue
		}
		e.seen = event.Serial
		for index, g := range s.Node.GPUs {
			if g.UUID == event.GPU && e.kinds[index]&event.Type != 0 {
				*data = C.struct_event{
					device: loaded.handle(C.HANDLE_GPU, index, 0, 0),
					_type:  C.uint64_t(event.Type), data: C.uint64_t(event.Data), gi: none, ci: none,
				}
				return sim.Success
			}
		}
	}
	return sim.Timeout
}
