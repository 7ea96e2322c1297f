// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	drivers "github.com/gpusharing/gpu-sharing-operator/internal/agent/driver"
	"github.com/gpusharing/gpu-sharing-operator/internal/agent/nvml"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/gputest"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// observeEnv makes the test program observe the hardware through the library it names, print that and end, so that a
// test can ask another process.
const observeEnv = "GPUTEST_OBSERVE"

// root is the driver root of all tests: a process has one NVML library in its life. Each test puts its own node there.
// It is made when first needed, so that tests on real GPUs need no compiler.
var root = sync.OnceValues(makeDriverRoot)

const rootPattern = "simdriver-"

func TestMain(m *testing.M) {
	if library := os.Getenv(observeEnv); library != "" {
		os.Exit(observeAndPrint(library))
	}
	if library := os.Getenv(limitEnv); library != "" {
		os.Exit(limitAndPrint(library))
	}
	temporary, err := os.MkdirTemp("", rootPattern)
	if err == nil {
		err = os.Setenv("TMPDIR", temporary) // where the driver root and what tests make lies, gone with it
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	status := m.Run()
	_ = os.RemoveAll(temporary)
	os.Exit(status)
}

func makeDriverRoot() (*simdriver.Driver, error) {
	cache, err := simdriver.CacheDir()
	if err != nil {
		return nil, err
	}
	programs, err := simdriver.Build(context.Background(), cache)
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", rootPattern)
	if err != nil {
		return nil, err
	}
	return simdriver.New(folder, programs, simdriver.Spec{})
}

// driver is the driver under the NVML of all tests.
func driver(t *testing.T) *simdriver.Driver {
	t.Helper()
	d, err := root()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func observeAndPrint(library string) int {
	inv, err := nvml.New(nvml.Options{Library: library}).Observe(context.Background())
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(inv)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// on puts a node into the driver root and opens it through NVML.
func on(t *testing.T, models ...sim.Model) *nvml.Hardware {
	t.Helper()
	d := driver(t)
	if err := d.Replace(simdriver.Spec{Name: t.Name(), Models: models}); err != nil {
		t.Fatal(err)
	}
	library, err := drivers.Node{Host: "/"}.Library(d.Root())
	if err != nil {
		t.Fatal(err)
	}
	h := nvml.New(nvml.Options{Library: library, SMI: smiOf(d), After: atOnce, Now: time.Now, Module: moduleOf(d)})
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// smiOf is what the agent gives to NVML: the driver's own program.
func smiOf(d *simdriver.Driver) func(context.Context, ...string) (string, error) {
	program := filepath.Join(d.Root(), "usr", "bin", "nvidia-smi")
	return func(ctx context.Context, args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
		if err != nil {
			return string(out), fmt.Errorf("nvidia-smi: %w: %s", err, strings.TrimSpace(string(out)))
		}
		return string(out), nil
	}
}

// moduleOf reads the simulated kernel's list of modules.
func moduleOf(d *simdriver.Driver) func(string) bool {
	return func(name string) bool {
		modules, err := os.ReadFile(filepath.Join(d.Root(), "proc", "modules"))
		return err == nil && strings.Contains(string(modules), "\n"+name+" ")
	}
}

// atOnce is a clock on which no time passes.
func atOnce(time.Duration) <-chan time.Time {
	passed := make(chan time.Time)
	close(passed)
	return passed
}

func TestContract(t *testing.T) {
	gputest.Contract(t, func(t *testing.T, models ...string) gputest.Fixture {
		t.Helper()
		wanted := make([]sim.Model, 0, len(models))
		for _, m := range models {
			wanted = append(wanted, sim.Model(m))
		}
		return gputest.Fixture{Hardware: on(t, wanted...), Rig: rig{t, driver(t)}}
	})
}

type rig struct {
	t *testing.T
	d *simdriver.Driver
}

func (r rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r rig) gpu(uuid string, change func(g *sim.GPU)) {
	r.must(r.d.Update(func(s *simdriver.State) error {
		g, err := s.Node.GPU(uuid)
		if err == nil {
			change(g)
		}
		return err
	}))
}

func (r rig) AddProcess(uuid string, p gpu.Process)  { r.must(r.d.AddProcess(uuid, p)) }
func (r rig) SetUse(uuid string, use gpu.ProcessUse) { r.must(r.d.SetUse(uuid, use)) }
func (r rig) RemoveProcess(pid int)                  { r.must(r.d.RemoveProcess(pid)) }
func (r rig) Reboot()                                { r.must(r.d.Reboot()) }

// HoldOpen opens the GPUs as another process would. The lock of a client is its own also within one process.
func (r rig) HoldOpen() (release func()) {
	const other = 900100
	r.must(r.d.Update(func(s *simdriver.State) error {
		s.Node.Open(sim.Client{PID: other})
		return nil
	}))
	return func() {
		r.must(r.d.Update(func(s *simdriver.State) error {
			s.Node.Shut(other)
			return nil
		}))
	}
}

func (r rig) HoldInstances() (release func()) {
	client, err := r.d.Connect()
	r.must(err)
	r.must(client.HoldInstances())
	return func() { r.must(client.Disconnect()) }
}

func (r rig) Switch() {
	r.must(r.d.Update(func(s *simdriver.State) error {
		s.Node.NVSwitch = true
		return nil
	}))
}

func (r rig) SetPersistence(uuid string, on bool) {
	r.gpu(uuid, func(g *sim.GPU) { g.Persistence = on })
}

func (r rig) ForbidReset(uuid string) { r.gpu(uuid, func(g *sim.GPU) { g.NoReset = true }) }

func (r rig) TakeLicense(uuid string) { r.gpu(uuid, func(g *sim.GPU) { g.Unlicensed = true }) }

func (r rig) Persistence(uuid string) (on bool) {
	r.gpu(uuid, func(g *sim.GPU) { on = g.Persistence })
	return on
}

func (r rig) CreatePartial(uuid, profile string, at gpu.Placement, slices int) {
	r.must(r.d.Update(func(s *simdriver.State) error { return s.Node.CreatePartial(uuid, profile, at, slices) }))
}

func (r rig) FailComputeInstances() {
	r.must(r.d.AddFault(simdriver.Fault{
		Call: "nvmlGpuInstanceCreateComputeInstance", Return: sim.Unknown, Times: 1,
	}))
}
