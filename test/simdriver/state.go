// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package simdriver

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

const (
	stateFolder = "var/lib/simdriver"
	stateFile   = "node.json"
	lockFile    = "lock"
	callsFile   = "calls.log"
)

// State is what all programs of a node share.
type State struct {
	Node       sim.Node
	MPSServers []MPSServer              // that MPS control daemons have started
	MPSClients []MPSClient              // that are connected to them
	Events     []Event                  // that programs waiting for events have not missed
	Faults     []Fault                  // what is to go wrong
	Latency    map[string]time.Duration // of calls, by name; "*" for all others
	Unloaded   bool                     // the kernel module is not loaded
}

// MPSServer is the process through which the clients of an MPS control daemon use GPUs. It stays when they leave.
type MPSServer struct {
	PID           int
	PipeDirectory string
}

// MPSClient is a process that uses a GPU through MPS.
type MPSClient struct{ PID, ServerPID int }

// Event is something that NVML tells to those who wait, such as an Xid error.
type Event struct {
	Serial int
	GPU    string // UUID
	Type   uint64 // nvmlEventType…
	Data   uint64 // the Xid
}

// Fault makes calls fail or hang.
type Fault struct {
	Call   string        // NVML's name without version suffix, such as nvmlDeviceSetMigMode; or GPUReset
	GPU    string        // UUID; empty: of any GPU
	Return sim.Return    // what the call returns instead of having an effect; Success: it has its effect
	Hang   time.Duration // before it returns
	Times  int           // so many calls; 0: until it is cleared
}

// GPUReset is the call that a fault of nvidia-smi --gpu-reset names.
const GPUReset = "nvidia-smi --gpu-reset"

// Driver is a driver root: its state, the programs that have the driver open, and what a test does to it. It may be
// used by several goroutines and processes.
type Driver struct {
	*store

	clients
	injector
}

// store is the state of a driver root. It keeps its folder open, as a program keeps the kernel module open: that works
// on when the root is unmounted.
type store struct {
	root  string
	state *os.Root // closed when the store is no longer reachable

	mu     sync.Mutex
	stamp  stamp
	cached *State
}

// stamp tells one version of the state file from another without reading it.
type stamp struct {
	inode uint64
	size  int64
	mtime time.Time
}

// Open is the driver root at this path, which New has created.
func Open(root string) (*Driver, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("opening the simulated driver: %w", err)
	}
	state, err := os.OpenRoot(filepath.Join(root, stateFolder))
	if err != nil {
		return nil, fmt.Errorf("opening the simulated driver: %w", err)
	}
	s := &store{root: root, state: state}
	d := &Driver{store: s, clients: clients{s}, injector: injector{s}}
	if _, err := d.Read(); err != nil {
		return nil, errors.Join(fmt.Errorf("opening the simulated driver: %w", err), state.Close())
	}
	return d, nil
}

// Around is the driver root that a file belongs to: the closest folder above it that has a state.
func Around(file string) (*Driver, error) {
	for folder := filepath.Dir(file); ; folder = filepath.Dir(folder) {
		if _, err := os.Stat(filepath.Join(folder, stateFolder, stateFile)); err == nil {
			return Open(folder)
		}
		if folder == filepath.Dir(folder) {
			return nil, fmt.Errorf("%s lies in no simulated driver root: no folder above it has %s/%s", file, stateFolder, stateFile)
		}
	}
}

// Here is the driver root that this program lies in. Under chroot that is /.
func Here() (*Driver, error) {
	self, err := ownFile()
	if err != nil {
		return nil, fmt.Errorf("finding the driver root: %w", err)
	}
	return Around(self)
}

// OwnVersion is the driver version to which this program belongs; empty for a program that Install did not install.
func OwnVersion() string {
	self, err := ownFile()
	if err != nil {
		return ""
	}
	version, _ := VersionOf(self) // the reason is the caller's program, not its user's
	return version
}

// ownFile is the file of this program.
func ownFile() (string, error) {
	self, err := os.Executable()
	if err != nil { // no /proc, as where only a part of it is shown
		self, err = exec.LookPath(os.Args[0])
	}
	if err != nil {
		return "", err
	}
	return filepath.Abs(self)
}

// Root is the path of the driver root.
func (d *store) Root() string { return d.root }

// Read is the state now, shared with others who read it: it must not be changed.
func (d *store) Read() (*State, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, err := d.stampNow()
	if err != nil {
		return nil, err
	}
	if d.cached != nil && now == d.stamp {
		return d.cached, nil
	}
	s, err := load(d.state)
	if err != nil {
		return nil, err
	}
	d.cached, d.stamp = s, now // if it was replaced meanwhile, the stamp is the older: it is read again
	return s, nil
}

// Update changes the state while nobody else does. If change fails, nothing is changed and its error is returned.
func (d *store) Update(change func(*State) error) error {
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	s, err := load(d.state)
	if err != nil {
		return err
	}
	before := kernelFiles(s)
	if err := change(s); err != nil {
		return err
	}
	if err := save(d.state, s); err != nil {
		return err
	}
	return showKernel(d.state, before, kernelFiles(s))
}

// UpdateAlways is Update that keeps what change has done although it returns an error, as a call does that takes note
// of a request and refuses to act on it.
func (d *store) UpdateAlways(change func(*State) error) error {
	var refused error
	err := d.Update(func(s *State) error {
		refused = change(s)
		return nil
	})
	return errors.Join(err, refused)
}

func load(state *os.Root) (*State, error) {
	raw, err := state.ReadFile(stateFile)
	if err != nil {
		return nil, err
	}
	s := &State{}
	if err := json.Unmarshal(raw, s); err != nil {
		return nil, fmt.Errorf("reading %s: %w", stateFile, err)
	}
	return s, nil
}

// save replaces the file, so that readers need no lock. Its time is later than that of its predecessor, also within one
// tick of the file system's clock.
func save(state *os.Root, s *State) error {
	raw, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return fmt.Errorf("writing %s: %w", stateFile, err)
	}
	mtime := time.Now()
	if before, err := state.Stat(stateFile); err == nil && !mtime.After(before.ModTime()) {
		mtime = before.ModTime().Add(time.Microsecond)
	}
	const next = stateFile + ".next"
	if err := state.WriteFile(next, raw, 0o644); err != nil {
		return err
	}
	if err := state.Chtimes(next, mtime, mtime); err != nil {
		return err
	}
	return state.Rename(next, stateFile)
}

func (d *store) stampNow() (stamp, error) {
	info, err := d.state.Stat(stateFile)
	if err != nil {
		return stamp{}, err
	}
	raw, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{}, fmt.Errorf("looking at %s: no inode", stateFile)
	}
	return stamp{raw.Ino, info.Size(), info.ModTime()}, nil
}

// lock takes the lock of the state.
func (d *store) lock() (unlock func(), err error) {
	return lock(d.state.OpenFile(lockFile, os.O_CREATE|os.O_RDWR, 0o644))
}

// lock takes the lock of a file that was opened for it.
func lock(f *os.File, err error) (unlock func(), _ error) {
	if err != nil {
		return nil, err
	}
	_ = f.Chmod(0o666) // fails for a user who did not make it, and who needs no more than that another user did
	if err := flock(f, unix.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("locking %s: %w", f.Name(), err)
	}
	return func() { _ = f.Close() }, nil
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Record notes a call that changes the hardware, or tries to, in the log of calls.
func (d *store) Record(program, call, gpu, outcome string) {
	f, err := d.state.OpenFile(callsFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return // the log is for people; the hardware works without
	}
	defer f.Close()    //nolint:errcheck // the same
	_ = f.Chmod(0o666) // for programs of other users
	_, _ = fmt.Fprintf(f, "%s %s[%d] %s %s %s\n", time.Now().UTC().Format("15:04:05.000"), program, os.Getpid(), call, gpu, outcome)
}

// Take finds the fault that a call runs into, if any, and counts it; and how long the call takes otherwise.
func (d *store) Take(call, gpu string) (Fault, time.Duration, error) {
	s, err := d.Read()
	if err != nil {
		return Fault{}, 0, err
	}
	latency, ok := s.Latency[call]
	if !ok {
		latency = s.Latency["*"]
	}
	if s.fault(call, gpu) < 0 {
		return Fault{}, latency, nil
	}
	var taken Fault
	err = d.Update(func(s *State) error {
		taken = s.take(call, gpu)
		return nil
	})
	return taken, latency, err
}

func (s *State) fault(call, gpu string) int {
	return slices.IndexFunc(s.Faults, func(f Fault) bool { return f.Call == call && (f.GPU == "" || f.GPU == gpu) })
}

func (s *State) take(call, gpu string) Fault {
	i := s.fault(call, gpu)
	if i < 0 {
		return Fault{}
	}
	taken := s.Faults[i]
	if taken.Times == 1 {
		s.Faults = slices.Delete(s.Faults, i, i+1)
	} else if taken.Times > 1 {
		s.Faults[i].Times--
	}
	return taken
}
