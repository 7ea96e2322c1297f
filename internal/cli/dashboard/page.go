// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package dashboard serves the page of `kubectl gpusharing dashboard` to the browser of the user who started it, and to
// nobody else. It knows no cluster: it is given what the page shows, and hands each browser what has changed.
package dashboard

import "time"

// Page is what the page shows. The JSON of its parts is what the browser gets.
type Page struct {
	// Cluster names the cluster: the context of the kubeconfig, or the address of the API server.
	Cluster  string   `json:"cluster"`
	Policies []Policy `json:"policies"`
	// NoPolicy says what is so if there is no policy.
	NoPolicy string `json:"noPolicy,omitempty"`
	// Stale is why the page may not be what the API server has now; nil: the API server has just answered.
	Stale *Stale `json:"stale,omitempty"`
	// Notes are what the page cannot show, each with the reason and what to do about it.
	Notes []string `json:"notes"`
	Nodes []Node   `json:"-"`
}

// Stale is since when a page may not be what the API server has, and why, as the end of a sentence.
type Stale struct {
	Since time.Time `json:"since"`
	Why   string    `json:"why"`
}

// Tone is how a state is marked, beside its text.
type Tone string

// The tones of a state.
const (
	ToneReady   Tone = "ready"
	ToneWorking Tone = "working" // the rollout goes on by itself
	ToneBlocked Tone = "blocked" // waits for something that the rollout does not bring about
	ToneFailed  Tone = "failed"
)

// Policy is a GPUSharingPolicy with the progress of its rollout.
type Policy struct {
	Name     string `json:"name"`
	Strategy string `json:"strategy"`
	Matched  int32  `json:"matched"` // nodes
	Ready    int32  `json:"ready"`
	Updated  int32  `json:"updated"`
	Blocked  int32  `json:"blocked"`
	State    string `json:"state"`
	Tone     Tone   `json:"tone"`
	Message  string `json:"message,omitempty"`
	Shares   Shares `json:"shares"` // of its nodes
	// Notes are what else is to be known, such as who waits for MIG instances on demand.
	Notes []string `json:"notes,omitempty"`
}

// Node is the card of a node.
type Node struct {
	Name     string   `json:"name"`
	Policy   string   `json:"policy,omitempty"` // that governs it; empty: none does
	State    string   `json:"state"`
	Tone     Tone     `json:"tone"`
	Message  string   `json:"message,omitempty"`
	Products []string `json:"products"`
	// Namespaces are those of the pods that hold or use its GPUs, or block its change.
	Namespaces []string   `json:"namespaces"`
	Resources  []Resource `json:"resources"`
	Steps      []string   `json:"steps,omitempty"`
	Blockers   []string   `json:"blockers,omitempty"`
	GPUs       []GPU      `json:"gpus"`
	Shares     Shares     `json:"shares"`
	// Notes are what is not known of the node, such as why it was not measured.
	Notes []string `json:"notes,omitempty"`
}

// Shares are how many GPUs, instances and replicas are offered, and how many of them containers hold.
type Shares struct {
	Offered int64 `json:"offered"`
	InUse   int64 `json:"inUse"`
}

// Resource is an extended resource that a node advertises.
type Resource struct {
	Name string `json:"name"`
	Now  *int64 `json:"now,omitempty"`  // nil: not known
	Then *int64 `json:"then,omitempty"` // once the change is done; nil: as now
}

// GPU is one GPU, drawn to scale.
type GPU struct {
	UUID        string      `json:"uuid"`
	Index       int         `json:"index"`
	Product     string      `json:"product"`
	Sharing     string      `json:"sharing"`               // how it is shared, in words
	MemoryBytes int64       `json:"memoryBytes,omitempty"` // 0: not known
	Drawing     Drawing     `json:"drawing"`
	Others      []string    `json:"others,omitempty"`      // pods and processes that use it and hold no part of it
	Memory      *Memory     `json:"memory,omitempty"`      // nil: not measured
	Utilization *float64    `json:"utilization,omitempty"` // of the streaming multiprocessors, 0 to 1
	Containers  []Container `json:"containers,omitempty"`  // that were measured, the largest first
	OtherBytes  int64       `json:"otherBytes,omitempty"`  // of no container that is known
}

// Drawing divides a GPU into blocks.
type Drawing struct {
	Slices int     `json:"slices"` // the sum of the sizes of all blocks
	Blocks []Block `json:"blocks"`
}

// Block is a MIG instance, a replica, a whole GPU, or room between instances.
type Block struct {
	Size int `json:"size"`
	// Name is what the block is; empty: nothing is there.
	Name string `json:"name,omitempty"`
	// Holders are the pods and processes that hold or use it, each once.
	Holders     []string `json:"holders,omitempty"`
	Memory      *Memory  `json:"memory,omitempty"`      // of an instance
	Utilization *float64 `json:"utilization,omitempty"` // of an instance
	// New reports, in the drawing after a change, that the change creates the block.
	New bool `json:"new,omitempty"`
}

// Memory is an amount of memory, in bytes.
type Memory struct {
	Used  int64 `json:"used"`
	Total int64 `json:"total"`
}

// Container is what a container uses of a GPU or an instance. What is not known is nil.
type Container struct {
	Name        string   `json:"name"` // namespace/pod container
	Where       string   `json:"where,omitempty"`
	UsedBytes   *int64   `json:"usedBytes,omitempty"`
	ShareBytes  *int64   `json:"shareBytes,omitempty"`
	Utilization *float64 `json:"utilization,omitempty"`
	Over        bool     `json:"over,omitempty"` // its share
}

// Question asks what a change of policies would do.
type Question struct {
	// Policies are those to apply, as YAML or JSON.
	Policies string `json:"policies"`
	// Delete are the names of those to delete.
	Delete []string `json:"delete"`
}

// Answer is what a change of policies would do.
type Answer struct {
	// Text is what `kubectl gpusharing plan` prints.
	Text  string        `json:"text"`
	Nodes []NodePreview `json:"nodes"`
}

// NodePreview is a node of which GPUs would be changed.
type NodePreview struct {
	Name string       `json:"name"`
	GPUs []GPUPreview `json:"gpus"`
}

// GPUPreview is a GPU before and after a change.
type GPUPreview struct {
	Index   int     `json:"index"`
	Product string  `json:"product"`
	Before  Drawing `json:"before"`
	After   Drawing `json:"after"`
}
