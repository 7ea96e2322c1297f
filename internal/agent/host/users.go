// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Users reports which user a process runs as, and which processes were given an environment variable.
type Users interface {
	// User is the effective user ID of a process. runs is false if the process is gone.
	User(pid int) (uid int64, runs bool)
	// WithVariable returns the value of an environment variable by PID, for the processes of the node, outside of
	// containers but for those with hostPID, that were started with it.
	WithVariable(name string) (map[int]string, error)
}

// User implements Users.
func (p *Proc) User(pid int) (uid int64, runs bool) {
	ids := strings.Fields(p.status(strconv.Itoa(pid), "Uid")) // real, effective, saved, file system
	if len(ids) < 2 {
		return 0, false
	}
	uid, err := strconv.ParseInt(ids[1], 10, 64)
	return uid, err == nil
}

// Privileged implements Programs.
func (p *Proc) Privileged(pid int) bool {
	dir := strconv.Itoa(pid)
	capabilities, err := strconv.ParseUint(p.status(dir, "CapEff"), 16, 64)
	if err != nil || capabilities&(1<<unix.CAP_SYS_ADMIN) == 0 {
		return false
	}
	own, err := p.root.Readlink("self/ns/user")
	if err != nil {
		return false
	}
	link := path.Join(dir, "ns/user")
	its, err := p.look(link, func() ([]byte, error) {
		target, err := p.root.Readlink(link)
		return []byte(target), err
	})
	return err == nil && string(its) == own // in a user namespace of its own any process has all capabilities
}

// WithVariable implements Users.
func (p *Proc) WithVariable(name string) (map[int]string, error) {
	found := map[int]string{}
	err := p.each(func(dir string, pid int) {
		if !p.inOwnPIDs(dir) {
			return
		}
		if value, given := p.variable(dir, name); given {
			found[pid] = value
		}
	})
	return found, err
}

// variable looks for one variable without a copy of all: it is asked of every process of the node.
func (p *Proc) variable(dir, name string) (value string, given bool) {
	environ, err := p.read(path.Join(dir, "environ"), maxEnvironment)
	if err != nil {
		return "", false // the process is gone
	}
	for pair := range bytes.SplitSeq(environ, []byte{0}) {
		if value, is := bytes.CutPrefix(pair, []byte(name+"=")); is {
			return string(value), true
		}
	}
	return "", false
}
