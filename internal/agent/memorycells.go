// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/memoryguard"
)

// recordedLimits is the record on the node of the limits that the agent has set. It is written before a limit is set and
// after it was read back, so that a crash between leaves no limit that nobody knows. It goes with a reboot, as all
// cgroups do.
type recordedLimits struct {
	BootID string
	Limits []recordedLimit
	// Stale are, by GPU, the limits that cgroups had which are gone. On misc a new cgroup may inherit one.
	Stale map[string][]uint64 `json:",omitempty"`
}

// recordedLimit is what may be set on a cgroup on a GPU: one limit or, between record and read-back, two.
type recordedLimit struct {
	Pod           string // namespace/name
	GPU, Path, ID string
	Bytes         []uint64
	// Late: on misc containers ran before the limit, whose memory of that time the driver does not count.
	Late bool `json:",omitempty"`
}

// readLimits reads a record. Of one that cannot be read nothing is known: the limits that are set count as another
// owner's, which are left alone.
func readLimits(ctx context.Context, content []byte, bootID string) recordedLimits {
	var r recordedLimits
	if content != nil {
		if err := json.Unmarshal(content, &r); err != nil {
			log(ctx).Error(err, "The record of memory limits cannot be read; limits that are set count as another program's")
		}
	}
	if r.BootID != bootID {
		return recordedLimits{BootID: bootID}
	}
	return r
}

// limitCells carries out what memoryguard decides about each cgroup on each GPU.
type limitCells struct {
	*MemoryLimiter

	record    recordedLimits
	saved     string
	backend   v1alpha1.MemoryBackend
	visible   bool // the tree of cgroups is the node's
	able      bool // to read limits, and to remove ours
	sets      bool // limits are set
	remaining int
	busy      bool // something was set, so that the containers of a pod may be about to come
	retry     bool
}

// save writes the record, if it changed, and removes it once it holds nothing.
func (c *limitCells) save() error {
	if len(c.record.Limits) == 0 && len(c.record.Stale) == 0 {
		c.saved = ""
		return c.Record.Write(nil) //nolint:wrapcheck // names the file
	}
	content, err := json.Marshal(c.record)
	if err != nil || string(content) == c.saved {
		return err //nolint:wrapcheck // plain data
	}
	if err := c.Record.Write(content); err != nil {
		return err //nolint:wrapcheck // names the file
	}
	c.saved = string(content)
	return nil
}

// cell is a cgroup on a GPU, and what it is to have.
type cell struct {
	pod    string
	gpu    string
	cgroup host.Cgroup
	want   uint64
	late   bool // containers are there already
	inside bool // it is a container's, beside the pod's that counts
}

func (m *MemoryLimiter) unlearn(key string) {
	delete(m.verified, key)
	delete(m.shown, key)
}

func cellKey(uuid, id string) string { return uuid + " " + id }

// carryOut goes over all pods, and over what is recorded and no pod's any more.
func (c *limitCells) carryOut(
	ctx context.Context, pods []limitedPod, mode v1alpha1.MemoryLimitMode, obstacle *memoryguard.Obstacle,
) (limits []memoryguard.PodLimit) {
	wanted := c.keeps(pods, mode)
	if c.able {
		c.sample(ctx)
	}
	for _, r := range slices.Clone(c.record.Limits) {
		cgroup := host.Cgroup{Path: r.Path, ID: r.ID}
		switch {
		case !c.visible:
			c.remaining++
		case !c.Cgroups.Is(cgroup):
			c.gone(r)
		case !wanted[cellKey(r.GPU, r.ID)]:
			c.undo(ctx, cell{pod: r.Pod, gpu: r.GPU, cgroup: cgroup})
		}
	}
	for i := range pods {
		p := &pods[i]
		if p.sliced {
			if obstacle != nil {
				p.Reason = obstacle.Reason
			} else if p.Reason == "" {
				p.Reason = c.limit(ctx, p)
			}
			limits = append(limits, p.PodLimit)
		}
	}
	c.disinherit(ctx, pods, wanted)
	return limits
}

// disinherit goes over the cgroups that are to have no limit, also those of containers: any may have the address of one of ours.
func (c *limitCells) disinherit(ctx context.Context, pods []limitedPod, wanted map[string]bool) {
	if !c.able {
		return
	}
	for i := range pods {
		for uuid := range c.record.Stale {
			for _, pod := range pods[i].cgroups {
				for _, cgroup := range pod.All() {
					if !wanted[cellKey(uuid, cgroup.ID)] {
						c.inherited(ctx, cell{pod: pods[i].name(), gpu: uuid, cgroup: cgroup})
					}
				}
			}
		}
	}
}

// sample asks about one limit of ours on each GPU. Where it is gone, or that is not known, the driver may have been
// initialized anew, and have lost all: then everything is looked at again.
func (c *limitCells) sample(ctx context.Context) {
	asked := map[string]bool{}
	for _, r := range c.record.Limits {
		at := cell{gpu: r.GPU, cgroup: host.Cgroup{Path: r.Path, ID: r.ID}}
		if _, known := c.verified[cellKey(r.GPU, r.ID)]; !known || asked[r.GPU] || !c.Cgroups.Is(at.cgroup) {
			continue
		}
		asked[r.GPU] = true
		if read, reason := c.read(ctx, at); reason != "" || !slices.Contains(r.Bytes, read.Hard) {
			c.MemoryLimiter.verified, c.MemoryLimiter.shown = map[string]uint64{}, map[string]uint64{}
			return
		}
	}
}

// keeps are the cgroups on GPUs, by cellKey, that keep the limits of ours that they have, or get one. One that is no pod's as far as the kubelet
// lists pods or has them on record keeps its own while it runs, and so does a pod of which too little is known.
func (c *limitCells) keeps(pods []limitedPod, mode v1alpha1.MemoryLimitMode) map[string]bool {
	wanted := map[string]bool{}
	if mode != v1alpha1.MemoryLimitEnforce {
		return wanted
	}
	kept := map[string]bool{}
	for i := range pods {
		p := &pods[i]
		kept[p.name()+" "+p.GPU] = p.sliced && (len(p.cgroups) == 0 || p.Reason == v1alpha1.ReasonLimitFailed)
		for _, pod := range p.cgroups {
			for _, cgroup := range pod.All() {
				wanted[cellKey(p.GPU, cgroup.ID)] = p.sliced && p.Bytes > 0
			}
		}
	}
	for _, r := range c.record.Limits {
		key := cellKey(r.GPU, r.ID)
		is, known := wanted[key]
		wanted[key] = is || kept[r.Pod+" "+r.GPU] || !known && c.running[r.ID]
	}
	return wanted
}

// limit sees to the limit of a pod on a GPU, and returns why it does not hold.
func (c *limitCells) limit(ctx context.Context, p *limitedPod) (reason string) {
	if len(p.cgroups) == 0 {
		return v1alpha1.ReasonCgroupNotFound
	}
	for i := range p.cgroups {
		reason = cmp.Or(reason, c.limitOne(ctx, p, &p.cgroups[i]))
	}
	return reason
}

// limitOne is limit for one cgroup that the pod may have.
func (c *limitCells) limitOne(ctx context.Context, p *limitedPod, pod *host.PodCgroup) string {
	controller := memoryguard.Controller(c.backend)
	if !slices.Contains(pod.Controllers, controller) {
		return v1alpha1.ReasonNotDelegated
	}
	late := c.backend == v1alpha1.MemoryBackendMisc && pod.Begun()
	at := cell{pod: p.name(), gpu: p.GPU, cgroup: pod.Cgroup, want: p.Bytes, late: late}
	reason := c.settle(ctx, at)
	inside := pod.Containers
	if c.backend == v1alpha1.MemoryBackendMisc {
		inside = pod.Inside()
	}
	for _, container := range inside {
		own := cell{pod: p.name(), gpu: p.GPU, cgroup: container, inside: true}
		switch {
		case reason != "":
		case c.backend == v1alpha1.MemoryBackendMisc: // its own entry would take it out of the pod's budget
			reason = c.escaped(ctx, own)
			if r := c.recorded(at); r != nil && reason == v1alpha1.ReasonForeignLimit {
				r.Late = true // what the container takes meanwhile never counts
			}
		case slices.Contains(container.Controllers, controller): // so that it sees its share; the pod's limit holds without
			own.want = p.Bytes
			_ = c.settle(ctx, own)
		}
	}
	return reason
}

// settle brings a cgroup to what it is to have, and returns why it has not.
func (c *limitCells) settle(ctx context.Context, at cell) string {
	key, recorded := cellKey(at.gpu, at.cgroup.ID), c.recorded(at)
	if is, known := c.known(at)[key]; known && is == at.want && (recorded != nil || !c.sets) {
		return lateReason(recorded)
	}
	read, reason := c.read(ctx, at)
	if reason != "" {
		return reason
	}
	now := memoryguard.Cell{Backend: c.backend, Want: at.want, Stale: c.record.Stale[at.gpu], Read: memoryguard.Reading(read)}
	if recorded != nil {
		now.Ours = recorded.Bytes
	}
	do, reason := now.Next()
	switch {
	case do == memoryguard.Forget:
		c.forget(at)
	case do == memoryguard.Set && !c.sets: // Report: it would be set
	case do == memoryguard.Set && c.halted:
		return v1alpha1.ReasonNotEnforced
	case do == memoryguard.Set:
		reason = c.set(ctx, at, now)
	}
	if reason == "" {
		c.known(at)[key] = at.want
		reason = lateReason(c.recorded(at))
	}
	return reason
}

// known is what cgroups were found to have. Those of containers on dmem only show the share, so nobody asks about them again in vain.
func (c *limitCells) known(at cell) map[string]uint64 {
	if at.inside && c.backend == v1alpha1.MemoryBackendDmem {
		return c.shown
	}
	return c.verified
}

func lateReason(r *recordedLimit) string {
	if r != nil && r.Late {
		return v1alpha1.ReasonEarlierMemory
	}
	return ""
}

// set sets a limit: recorded before, read back after, on the same cgroup all the time.
func (c *limitCells) set(ctx context.Context, at cell, now memoryguard.Cell) string {
	intent := recordedLimit{Pod: at.pod, GPU: at.gpu, Path: at.cgroup.Path, ID: at.cgroup.ID, Bytes: []uint64{at.want}, Late: at.late}
	if now.Read.Hard != gpu.NoMemoryLimit && now.Read.Hard != at.want {
		intent.Bytes = []uint64{now.Read.Hard, at.want}
	}
	if was := c.recorded(at); was != nil {
		intent.Late = was.Late || at.late && now.Read.Hard == gpu.NoMemoryLimit
	}
	c.put(intent)
	if err := c.save(); err != nil {
		return c.failed(ctx, at, err)
	}
	if !c.Cgroups.Is(at.cgroup) {
		return v1alpha1.ReasonCgroupNotFound
	}
	if err := c.hardware.SetMemoryLimit(ctx, at.gpu, at.cgroup.Path, min(now.Read.Soft, at.want), at.want); err != nil {
		return c.failed(ctx, at, err)
	}
	if !c.Cgroups.Is(at.cgroup) { // what has its path now may have the limit
		if other, err := c.Cgroups.At(at.cgroup.Path); err == nil {
			intent.ID = other.ID
			c.put(intent)
		}
		return v1alpha1.ReasonCgroupNotFound
	}
	return c.confirm(ctx, at, now, intent)
}

// confirm reads back what was set, and records what is ours then.
func (c *limitCells) confirm(ctx context.Context, at cell, now memoryguard.Cell, intent recordedLimit) string {
	read, reason := c.read(ctx, at)
	if reason != "" {
		return reason
	}
	ours, reason := now.After(memoryguard.Reading(read))
	if reason == v1alpha1.ReasonNotEnforced && !at.inside { // a tenant may have the hook set one of its container
		ours, reason = c.prove(ctx, at, now, intent, read.Hard)
	}
	c.busy = c.busy || reason == ""
	if intent.Bytes = ours; len(ours) == 0 {
		c.forget(at)
	} else {
		c.put(intent)
	}
	if err := c.save(); err != nil {
		return c.failed(ctx, at, err)
	}
	return reason
}

// prove finds out whether a limit that did not read back was below use for a moment, so that dmem kept none: one that no use can be above reads
// back then, and stays until the pod uses less. Otherwise no further limit is set.
func (c *limitCells) prove(
	ctx context.Context, at cell, now memoryguard.Cell, intent recordedLimit, is uint64,
) (ours []uint64, reason string) {
	if none := gpu.NoMemoryLimit; c.backend == v1alpha1.MemoryBackendDmem && now.Read.Hard == none && is == none { // else another's may be there
		most := c.memory[at.gpu]
		intent.Bytes = []uint64{at.want, most}
		c.put(intent)
		if err := c.save(); err != nil {
			return intent.Bytes, c.failed(ctx, at, err)
		}
		if err := c.hardware.SetMemoryLimit(ctx, at.gpu, at.cgroup.Path, now.Read.Soft, most); err != nil {
			return intent.Bytes, c.failed(ctx, at, err)
		}
		switch read, reason := c.read(ctx, at); {
		case reason != "":
			return intent.Bytes, reason
		case read.Hard == most:
			return []uint64{most}, v1alpha1.ReasonAboveLimit
		}
	}
	c.halted = true
	log(ctx).Info("A memory limit did not read back, so none is set any more", "cgroup", at.cgroup.Path, "gpu", at.gpu, "set", at.want)
	return intent.Bytes, v1alpha1.ReasonNotEnforced
}

// undo removes a limit of ours that nothing asks for any more.
func (c *limitCells) undo(ctx context.Context, at cell) {
	if !c.able || !c.clear(ctx, at) {
		c.remaining++
	}
}

// clear removes the limit of a cgroup if it is ours, and reports whether none of ours is left.
func (c *limitCells) clear(ctx context.Context, at cell) bool {
	c.unlearn(cellKey(at.gpu, at.cgroup.ID))
	read, reason := c.read(ctx, at)
	if reason != "" {
		return reason == v1alpha1.ReasonCgroupNotFound
	}
	now := memoryguard.Cell{Backend: c.backend, Stale: c.record.Stale[at.gpu], Read: memoryguard.Reading(read)}
	if recorded := c.recorded(at); recorded != nil {
		now.Ours = recorded.Bytes
	}
	switch do, _ := now.Next(); do {
	case memoryguard.Forget:
		c.forget(at)
	case memoryguard.Clear:
		if !c.Cgroups.Is(at.cgroup) {
			return true // the next look sees that it is gone
		}
		if err := c.hardware.SetMemoryLimit(ctx, at.gpu, at.cgroup.Path, now.Read.Soft, gpu.NoMemoryLimit); err != nil {
			c.failed(ctx, at, err)
			return false
		}
		if read, reason = c.read(ctx, at); reason != "" || read.Hard != gpu.NoMemoryLimit {
			c.retry = true
			return false
		}
		c.forget(at)
	case memoryguard.Leave, memoryguard.Set:
	}
	return true
}

// inherited removes from a pod that is to have no limit one that it has of a cgroup of ours which is gone.
func (c *limitCells) inherited(ctx context.Context, at cell) {
	key := cellKey(at.gpu, at.cgroup.ID)
	if is, known := c.verified[key]; c.backend != v1alpha1.MemoryBackendMisc || known && is == gpu.NoMemoryLimit {
		return
	}
	if c.clear(ctx, at) {
		c.verified[key] = gpu.NoMemoryLimit
	}
}

// escaped returns a reason if a container has a limit of its own, as the hook of NVIDIA's container toolkit sets it by a
// variable of the pod. On misc the pod's then no longer counts.
func (c *limitCells) escaped(ctx context.Context, at cell) string {
	key := cellKey(at.gpu, at.cgroup.ID)
	if is, known := c.verified[key]; known && is == gpu.NoMemoryLimit {
		return ""
	}
	read, reason := c.read(ctx, at)
	switch {
	case reason == v1alpha1.ReasonCgroupNotFound: // it has ended
		return ""
	case reason != "":
		return reason
	case read.Hard != gpu.NoMemoryLimit:
		if slices.Contains(c.record.Stale[at.gpu], read.Hard) && c.sets && c.clear(ctx, at) {
			return ""
		}
		return v1alpha1.ReasonForeignLimit
	}
	c.verified[key] = gpu.NoMemoryLimit
	return ""
}

// read asks the driver about a cgroup. Misc says of one without a limit that limits are not supported.
func (c *limitCells) read(ctx context.Context, at cell) (gpu.MemoryLimit, string) {
	if !c.Cgroups.Is(at.cgroup) {
		return gpu.MemoryLimit{}, v1alpha1.ReasonCgroupNotFound
	}
	found, err := c.hardware.MemoryLimit(ctx, at.gpu, at.cgroup.Path)
	switch {
	case errors.Is(err, gpu.ErrNotSupported) && c.backend == v1alpha1.MemoryBackendMisc:
		return gpu.MemoryLimit{Hard: gpu.NoMemoryLimit}, ""
	case err != nil:
		return gpu.MemoryLimit{}, c.failed(ctx, at, err)
	}
	return found, ""
}

// failed is the reason that belongs to an error. A cgroup that is gone is none.
func (c *limitCells) failed(ctx context.Context, at cell, err error) string {
	if !c.Cgroups.Is(at.cgroup) {
		return v1alpha1.ReasonCgroupNotFound
	}
	reason := v1alpha1.ReasonLimitFailed
	if errors.Is(err, gpu.ErrPermission) {
		reason = v1alpha1.ReasonNoPermission
	}
	c.retry = true
	c.metrics.limitErrors.WithLabelValues(reason).Inc()
	log(ctx).Info("A memory limit could not be read or set; it is tried again", "cgroup", at.cgroup.Path, "gpu", at.gpu, "reason", err.Error())
	return reason
}

func (c *limitCells) index(uuid, id string) int {
	return slices.IndexFunc(c.record.Limits, func(r recordedLimit) bool { return r.GPU == uuid && r.ID == id })
}

func (c *limitCells) recorded(at cell) *recordedLimit {
	if i := c.index(at.gpu, at.cgroup.ID); i >= 0 {
		return &c.record.Limits[i]
	}
	return nil
}

func (c *limitCells) put(r recordedLimit) {
	if i := c.index(r.GPU, r.ID); i >= 0 {
		c.record.Limits[i] = r
		return
	}
	c.record.Limits = append(c.record.Limits, r)
}

func (c *limitCells) forget(at cell) {
	if i := c.index(at.gpu, at.cgroup.ID); i >= 0 {
		c.record.Limits = slices.Delete(c.record.Limits, i, i+1)
	}
}

// gone notes that a cgroup of ours is no more. On misc its limit stays in the driver's table.
func (c *limitCells) gone(r recordedLimit) {
	c.forget(cell{gpu: r.GPU, cgroup: host.Cgroup{ID: r.ID}})
	c.unlearn(cellKey(r.GPU, r.ID))
	if c.backend != v1alpha1.MemoryBackendDmem {
		if c.record.Stale == nil {
			c.record.Stale = map[string][]uint64{}
		}
		stale := c.record.Stale[r.GPU]
		for _, bytes := range r.Bytes {
			if !slices.Contains(stale, bytes) {
				stale = append(stale, bytes)
			}
		}
		c.record.Stale[r.GPU] = stale[max(0, len(stale)-maxStale):]
	}
}

// maxStale is how many different limits of cgroups that are gone are remembered of a GPU: the newest.
const maxStale = 64

// after is when to look again.
func (c *limitCells) after(limits []memoryguard.PodLimit) time.Duration {
	now, missing := c.clock.Now(), map[string]time.Time{}
	after := limitsResync
	for _, p := range limits {
		switch p.Reason {
		case v1alpha1.ReasonCgroupNotFound:
			name := p.Namespace + "/" + p.Pod
			since, known := c.missing[name]
			if !known {
				since = now
			}
			if missing[name] = since; now.Sub(since) < time.Minute {
				after = min(after, limitsSoon)
			}
		case v1alpha1.ReasonAboveLimit:
			after = min(after, limitsRetry)
		}
	}
	c.MemoryLimiter.missing = missing
	switch {
	case c.busy:
		after = min(after, limitsSoon)
	case c.retry || c.remaining > 0:
		after = min(after, limitsRetry)
	}
	return after
}
