// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps

import "path"

// Persistence is what became of the persistence mode of a GPU for the sake of its compute mode.
type Persistence string

// The records of it.
const (
	PersistenceNotHeld     Persistence = ""
	PersistenceHeld        Persistence = "held"        // turned on here, so to be turned off
	PersistenceUnsupported Persistence = "unsupported" // the driver does not turn it on
)

// persistenceFile is the record of a GPU. It lies in the MPS root, which is gone with a reboot like the mode itself.
func persistenceFile(uuid string) string { return path.Join(desiredDir, "persistence", uuid) }

// Persistence is what is recorded of a GPU.
func (v *View) Persistence(uuid string) (Persistence, error) {
	var p Persistence
	_, err := v.files.read(persistenceFile(uuid), &p)
	return p, err
}

// RecordPersistence records what becomes of a GPU.
func (v *View) RecordPersistence(uuid string, p Persistence) error {
	if p == PersistenceNotHeld {
		return v.files.remove(persistenceFile(uuid))
	}
	return v.files.write(persistenceFile(uuid), p)
}
