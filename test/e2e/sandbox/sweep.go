// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// How long the sweeper tries, and how often.
const (
	sweepDeadline = 30 * time.Second
	sweepPoll     = 20 * time.Millisecond
)

// sweep waits until the outer stage has ended or is gone, and removes what the kernel does not: control groups and the
// machine's folder.
func sweep(dir string) error {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return fmt.Errorf("waiting for the machine's end: %w", err)
	}
	name := filepath.Base(dir)
	var err error
	for deadline := time.Now().Add(sweepDeadline); time.Now().Before(deadline); time.Sleep(sweepPoll) {
		if killGroups(name) {
			continue
		}
		if err = removeGroups(name); err == nil {
			break
		}
	}
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("removing the machine's folder: %w", err)
	}
	return nil
}
