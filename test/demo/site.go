// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

// site is the cluster and its nodes, as the demo observes them.
type site struct {
	cluster  *env.Cluster
	machines []*machine
}

// nothing is what a node without GPUs advertises.
const nothing = "-"

// advertises is what a node offers to pods of NVIDIA's resources: what the kubelet lists, or what NVIDIA's DRA driver
// publishes.
func (s *site) advertises(ctx context.Context, name string) (string, error) {
	node := &corev1.Node{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return nothing, client.IgnoreNotFound(err)
	}
	var parts []string
	for resource, quantity := range node.Status.Allocatable {
		if strings.HasPrefix(string(resource), "nvidia.com/") && !quantity.IsZero() {
			parts = append(parts, fmt.Sprintf("%s: %s", resource, quantity.String()))
		}
	}
	published, err := s.published(ctx, name)
	if err != nil {
		return nothing, err
	}
	for resource, count := range published {
		parts = append(parts, fmt.Sprintf("%s: %d", resource, count))
	}
	if len(parts) == 0 {
		return nothing, nil
	}
	slices.Sort(parts)
	return strings.Join(parts, ", "), nil
}

func (s *site) advertisedBy(ctx context.Context, nodes ...string) (string, error) {
	var all []string
	for _, node := range nodes {
		one, err := s.advertises(ctx, node)
		if err != nil {
			return "", err
		}
		all = append(all, one)
	}
	return strings.Join(all, "; "), nil
}

func (s *site) machineOf(name string) *machine {
	for _, m := range s.machines {
		if m.name == name {
			return m
		}
	}
	return nil
}

// heldInstance is the instance that the pod holds, as the node's agent reports it; empty while it reports none.
func (s *site) heldInstance(ctx context.Context) (string, error) {
	node := &v1alpha1.GPUNode{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: changedNode}, node); err != nil {
		return "", fmt.Errorf("reading GPUNode %s: %w", changedNode, err)
	}
	for _, device := range node.Status.Devices {
		for _, h := range device.Holders {
			for _, i := range device.Instances {
				if h.Instance != nil && *h.Instance == i.ID {
					return fmt.Sprintf("instance %s of GPU %d (%s)", i.Profile, device.Index, i.UUID), nil
				}
			}
		}
	}
	return "", nil
}

// stepFailed reports whether the agent of the node has reported that the change fails.
func (s *site) stepFailed(ctx context.Context) (bool, error) {
	node := &v1alpha1.GPUNode{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: changedNode}, node); err != nil {
		return false, fmt.Errorf("reading GPUNode %s: %w", changedNode, err)
	}
	ready, _ := condition.Find(node.Status.Conditions, v1alpha1.ConditionApplied)
	return ready.Reason == v1alpha1.ReasonStepFailed && ready.ObservedGeneration == node.Generation, nil
}

// pending are the nodes of the policy that are not ready, of its present generation.
func (s *site) pending(ctx context.Context) ([]v1alpha1.PendingNode, error) {
	policy := &v1alpha1.GPUSharingPolicy{}
	if err := s.cluster.Client.Get(ctx, client.ObjectKey{Name: changedPolicy}, policy); err != nil {
		return nil, fmt.Errorf("reading policy %s: %w", changedPolicy, err)
	}
	ready, _ := condition.Find(policy.Status.Conditions, v1alpha1.ConditionReady)
	if ready.ObservedGeneration != policy.Generation {
		return nil, nil
	}
	return policy.Status.Pending, nil
}

// start starts a program of the demo. The environment is what env names and the demo's marker. What it writes goes to a file.
func start(logFile, path string, args, env []string) (*nodesim.Process, error) {
	cmd := exec.Command(path, args...)
	cmd.Env = slices.Concat(env, []string{marker + "=" + os.Getenv(marker)})
	return nodesim.StartProcess(cmd, logFile, 5*time.Second)
}

const sweeperCommand = "sweep"

// sweeper is the process that outlives the demo. It holds the reading end of a pipe; when the demo ends, however it
// ends, the pipe closes.
type sweeper struct {
	pipe *os.File
	cmd  *exec.Cmd
}

func startSweeper(dir string) (*sweeper, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("starting the sweeper: %w", err)
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("starting the sweeper: %w", err)
	}
	defer reader.Close() //nolint:errcheck // the sweeper has its own
	cmd := exec.Command(self, sweeperCommand, dir)
	cmd.Stdin = reader
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is not for it
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the sweeper: %w", err)
	}
	return &sweeper{pipe: writer, cmd: cmd}, nil
}

// finish lets the sweeper do its work and waits for it.
func (s *sweeper) finish() {
	_ = s.pipe.Close()
	_ = s.cmd.Wait()
}

// sweep waits for the end of the demo, ends every process that it left, and removes its folder.
func sweep(dir string) {
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	_, _ = io.Copy(io.Discard, os.Stdin)
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		for range 50 {
			pids := processesOf(dir)
			if len(pids) == 0 {
				break
			}
			for _, pid := range pids {
				_ = syscall.Kill(pid, s)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	_ = os.RemoveAll(dir)
}

// marker is the environment variable by which the demo's processes are known. MPS daemons, which get an environment of
// their own, are known by their program, which lies in the demo's folder.
const marker = "GPUSHARING_DEMO"

// processesOf finds the processes that the demo of a folder has started, or that these have.
func processesOf(dir string) []int {
	var pids []int
	folders, _ := filepath.Glob("/proc/[0-9]*")
	for _, folder := range folders {
		pid, err := strconv.Atoi(filepath.Base(folder))
		if err != nil || pid == os.Getpid() {
			continue
		}
		environ, _ := os.ReadFile(filepath.Join(folder, "environ"))
		program, _ := os.Readlink(filepath.Join(folder, "exe"))
		if bytes.Contains(environ, []byte(marker+"="+dir+"\x00")) || strings.HasPrefix(program, dir+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}
