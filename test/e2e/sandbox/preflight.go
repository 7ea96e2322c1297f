// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// needed are the capabilities without which no kubelet and no containerd run, and what for.
func needed() map[int]string {
	return map[int]string{
		unix.CAP_SYS_ADMIN:  "CAP_SYS_ADMIN, to mount file systems and make namespaces",
		unix.CAP_NET_ADMIN:  "CAP_NET_ADMIN, to make the network of pods",
		unix.CAP_MKNOD:      "CAP_MKNOD, to make device files",
		unix.CAP_SYS_CHROOT: "CAP_SYS_CHROOT, to give containers a root of their own",
		unix.CAP_SYS_PTRACE: "CAP_SYS_PTRACE, to look at what other programs have mounted",
	}
}

// lacking is what this machine lacks to hold another one, each in words; nothing if it can.
func lacking() []string {
	var lacks []string
	if os.Geteuid() != 0 {
		lacks = append(lacks, "root")
	}
	has := capabilities()
	for capability, what := range needed() {
		if has&(1<<capability) == 0 {
			lacks = append(lacks, what)
		}
	}
	known, _ := os.ReadFile("/proc/filesystems") // an empty one lacks all
	for _, kind := range []string{"overlay", "tmpfs"} {
		if !strings.Contains(string(known), "\t"+kind+"\n") {
			lacks = append(lacks, "the file system "+kind)
		}
	}
	if _, err := hierarchies(); err != nil {
		lacks = append(lacks, err.Error())
	}
	return lacks
}

// capabilities are the effective ones of this process, a bit for each.
func capabilities() uint64 {
	status, _ := os.ReadFile("/proc/self/status") // without it none is known
	_, rest, _ := strings.Cut(string(status), "\nCapEff:")
	line, _, _ := strings.Cut(rest, "\n")
	bits, _ := strconv.ParseUint(strings.TrimSpace(line), 16, 64) // the same
	return bits
}

func preflight() error {
	if lacks := lacking(); len(lacks) > 0 {
		return fmt.Errorf("a real node cannot run here: this machine lacks %s", strings.Join(lacks, "; "))
	}
	return nil
}
