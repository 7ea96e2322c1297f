// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
	"github.com/gpusharing/gpu-sharing-operator/test/simdriver"
)

// inUse is what nvidia-smi adds if a GPU was not reset because a program has it open.
const inUse = "currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, " +
	"graphics application such as an X server, or a monitoring application such as another instance of nvidia-smi). " +
	"Please first kill all processes using these devices and all compute applications running in the system."

// reset resets the chosen GPUs. It asks nvidia-persistenced to let them go meanwhile, if it can reach it.
func (s smi) reset() error {
	state, err := s.driver.Read()
	if err != nil {
		return err
	}
	gpus, err := s.chosen(state)
	if err != nil {
		return err
	}
	uuids := make([]string, 0, len(gpus))
	for _, g := range gpus {
		uuids = append(uuids, g.UUID)
	}
	if daemon, reached := simdriver.DialPersistenced(); reached {
		defer daemon.Close() //nolint:errcheck // it takes back what it let go
		for _, uuid := range uuids {
			daemon.Ask("reset", uuid) // what it keeps is in use
		}
	}
	failures := map[string]error{}
	for _, uuid := range uuids {
		if err := s.meet(simdriver.GPUReset, uuid); err != nil {
			failures[uuid] = err
		}
	}
	err = s.driver.WithClients(func(state *simdriver.State) error { return s.resetNow(state, uuids, failures) })
	for _, uuid := range uuids {
		s.driver.Record("nvidia-smi", simdriver.GPUReset, uuid, outcome(errors.Join(err, failures[uuid])))
	}
	return errors.Join(err, s.notReset(gpus, failures))
}

// resetNow resets GPUs, those that NVSwitches connect together, and adds to the failures.
func (s smi) resetNow(state *simdriver.State, uuids []string, failures map[string]error) error {
	if peers := state.Node.ResetPeers(uuids...); len(peers) > 0 {
		var b strings.Builder
		b.WriteString("GPU Reset couldn't run because GPUs that are connected through NVLink must be reset together. " +
			"The following GPUs must be named too:")
		for _, id := range peers {
			b.WriteString("\n  GPU 0000" + strings.ToUpper(id))
		}
		return errors.New(b.String())
	}
	for _, uuid := range uuids {
		if failures[uuid] == nil {
			if err := state.Node.CanReset(uuid, os.Getpid()); err != nil {
				failures[uuid] = err
			}
		}
	}
	for _, uuid := range uuids {
		together := len(state.Node.ResetPeers(uuid)) > 0
		if failures[uuid] != nil || together && len(failures) > 0 {
			continue
		}
		named := []string{uuid}
		if together {
			named = uuids
		}
		if err := state.Node.Reset(os.Getpid(), named...); err != nil {
			failures[uuid] = err
			continue
		}
		g, err := state.Node.GPU(uuid)
		if err != nil {
			return err
		}
		s.say("GPU %s was successfully reset.", busID(g))
	}
	return nil
}

// notReset says which GPUs were not reset, and why.
func (s smi) notReset(gpus []*sim.GPU, failures map[string]error) error {
	if len(failures) == 0 {
		return nil
	}
	busy, worst := 0, sim.Success
	s.say("\nThe following GPUs could not be reset:")
	for _, g := range gpus {
		refusal, ok := errors.AsType[*sim.Error](failures[g.UUID])
		if !ok {
			continue
		}
		worst = refusal.Return
		if refusal.Return == sim.InUse {
			busy++
		}
		s.say("  GPU %s: %s", busID(g), words(refusal.Return))
	}
	switch {
	case busy == 1:
		s.say("\n1 device is %s", inUse)
	case busy > 1:
		s.say("\n%d devices are %s", busy, inUse)
	}
	return &sim.Error{Return: worst, Why: fmt.Sprintf("%d of %d GPUs were not reset", len(failures), len(gpus))}
}

// persistenceMode asks nvidia-persistenced, where this program reaches it. Otherwise it sets the legacy mode.
func (s smi) persistenceMode() error {
	on, ok := onOff(s.options["-pm"])
	if !ok {
		return &sim.Error{Return: sim.InvalidArgument, Why: "\"" + s.options["-pm"] + "\" is no persistence mode"}
	}
	state, err := s.driver.Read()
	if err != nil {
		return err
	}
	gpus, err := s.chosen(state)
	if err != nil {
		return err
	}
	daemon, reached := simdriver.DialPersistenced()
	if !reached {
		return s.finished(s.legacyPersistence(on))
	}
	defer daemon.Close() //nolint:errcheck // the answers are here
	verb := map[bool]string{true: "on", false: "off"}[on]
	for _, g := range gpus {
		if !daemon.Ask(verb, g.UUID) {
			return &sim.Error{Return: sim.Unknown, Why: "Unable to set persistence mode for GPU " + busID(g)}
		}
	}
	if !on {
		err = s.legacyPersistence(false)
	}
	return s.finished(err)
}

func (s smi) legacyPersistence(on bool) error {
	return s.each("nvmlDeviceSetPersistenceMode", func(_ *simdriver.State, g *sim.GPU) error {
		g.Persistence = on
		return nil
	})
}
