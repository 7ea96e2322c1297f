// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

import "slices"

// ChangesMIG reports whether a step changes the MIG mode of a GPU or its instances. Where NVIDIA's mig-manager
// partitions the GPUs, those steps are its to make, in its own way.
func ChangesMIG(s Step) bool {
	switch s.(type) {
	case destroyInstance, createInstance, setMIG, keepMIG:
		return true
	}
	return false
}

// OnlyInstances reports whether steps only destroy and create instances.
func OnlyInstances(steps []Step) bool {
	return !slices.ContainsFunc(steps, func(s Step) bool {
		switch s.(type) {
		case destroyInstance, createInstance:
			return false
		}
		return true
	})
}

// WithoutMIG are the other steps of a plan.
func WithoutMIG(steps []Step) []Step { return slices.DeleteFunc(slices.Clone(steps), ChangesMIG) }
