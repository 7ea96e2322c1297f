// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/internal/agent/host"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// SharedMemory is the name of the folder in the MPS root that all clients have as /dev/shm.
const SharedMemory = "shm"

// PipeFolder is the name of the folders in the MPS root that are mounted in the containers of clients.
const PipeFolder = "pipe"

// Processes tells about the processes of the node, and ends those that cannot be asked to end.
type Processes interface {
	host.Processes
	host.Users
	host.Mounts
	host.Trimmer
	host.Ender
}

// Server is an MPS server: the process that uses the GPUs on behalf of its clients.
type Server struct {
	PID     int
	Clients []int // their PIDs
}

// connected are the clients of servers.
func connected(servers []Server) (clients []int) {
	for _, s := range servers {
		clients = append(clients, s.Clients...)
	}
	return clients
}

// Use is how a daemon is used.
type Use struct {
	// Server is the PID of the server; 0 if there is none.
	Server int `json:"server,omitempty"`
	// User is the user ID of the server's clients. Nil if there is no server, or if it serves all users.
	User *int64 `json:"user,omitempty"`
	// Clients are the PIDs of the connected clients.
	Clients []int `json:"clients,omitempty"`
	// Outdated are the clients that connected before the limits last changed, and keep those from before.
	Outdated []int `json:"outdated,omitempty"`
	// OutdatedPods are the UIDs of the pods of the outdated clients.
	OutdatedPods []string `json:"outdatedPods,omitempty"`
	// Unreachable reports that another program has replaced the shared memory on the node: clients to come do not reach
	// the daemon.
	Unreachable bool `json:"unreachable,omitempty"`
	// Pods are the pods with processes that have the pipe directory mounted, whether or not they are clients now.
	Pods []PodUsers `json:"pods,omitempty"`
}

// PodUsers are the users of the processes of a pod.
type PodUsers struct {
	UID   string  `json:"uid"`
	Users []int64 `json:"users"` // sorted
}

// Waiting are the pods whose processes run as other users than the one that the server serves. Their CUDA programs
// wait, without an error, until the server has no clients.
func (u Use) Waiting() []PodUsers {
	if u.User == nil || len(u.Clients) == 0 {
		return nil
	}
	var waiting []PodUsers
	for _, pod := range u.Pods {
		if !slices.Contains(pod.Users, *u.User) {
			waiting = append(waiting, pod)
		}
	}
	return waiting
}

// unused reports whether no process uses the daemon or may begin to.
func (u Use) unused() bool { return len(u.Clients) == 0 && len(u.Pods) == 0 }

// useOf finds how a daemon with these servers is used. Outdated are the clients that were known to be, of which those
// that are still connected stay so.
func useOf(pipe string, d plan.Daemon, servers []Server, outdated []int, processes Processes) (Use, error) {
	u := Use{}
	for _, s := range servers {
		u.Clients = append(u.Clients, s.Clients...)
		if u.Server == 0 || len(s.Clients) > 0 { // a server that ends has none of interest
			u.Server = s.PID
		}
	}
	slices.Sort(u.Clients)
	if uid, runs := processes.User(u.Server); runs && u.Server != 0 && !d.MultiUser {
		u.User = &uid
	}
	pods := map[string]bool{}
	for _, pid := range u.Clients {
		if !slices.Contains(outdated, pid) {
			continue
		}
		u.Outdated = append(u.Outdated, pid)
		if pod := processes.Describe(pid).PodUID; pod != "" {
			pods[pod] = true
		}
	}
	u.OutdatedPods = slices.Sorted(maps.Keys(pods))
	given, err := podsOf(pipe, processes)
	u.Pods = given
	return u, err
}

// podsOf finds the pods to which the device plugin gave a pipe directory, and the users of their processes.
func podsOf(pipe string, processes Processes) ([]PodUsers, error) {
	given, err := processes.Mounted(pipe)
	if err != nil {
		return nil, err //nolint:wrapcheck // names what it did
	}
	return podsAmong(given[pipe], processes), nil
}

// podsAmong is podsOf among processes that have the pipe directory mounted: NVIDIA's device plugin has it mounted in the
// containers that get the resource (NVIDIA/k8s-device-plugin internal/plugin/mps.go). It sets CUDA_MPS_PIPE_DIRECTORY
// there too, but so can any pod.
func podsAmong(given []int, processes Processes) []PodUsers {
	users := map[string][]int64{}
	for _, pid := range given {
		uid, runs := processes.User(pid)
		if pod := processes.Describe(pid).PodUID; runs && pod != "" && !slices.Contains(users[pod], uid) {
			users[pod] = append(users[pod], uid)
		}
	}
	pods := make([]PodUsers, 0, len(users))
	for pod, uids := range users {
		slices.Sort(uids)
		pods = append(pods, PodUsers{UID: pod, Users: uids})
	}
	slices.SortFunc(pods, func(a, b PodUsers) int { return cmp.Compare(a.UID, b.UID) })
	return pods
}
