// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package gpusharingpolicy

import (
	"reflect"
	"sync"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// profileLists lets GPUs of one product share the list of their MIG profiles, which is most of what is told of a GPU
// and the same on each. It keeps one list for each product: what is in the cache is never changed.
type profileLists struct {
	mu        sync.Mutex
	byProduct map[string][]v1alpha1.ProfileStatus
}

// share replaces lists that are equal to one that is there.
func (l *profileLists) share(devices []v1alpha1.DeviceStatus) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range devices {
		d := &devices[i]
		if len(d.Profiles) == 0 {
			continue
		}
		if known := l.byProduct[d.Product]; reflect.DeepEqual(known, d.Profiles) {
			d.Profiles = known
		} else {
			l.byProduct[d.Product] = d.Profiles
		}
	}
}

// slimGPUNode keeps what server-side apply needs of the managed fields, and lists of profiles once.
func (l *profileLists) slimGPUNode(object any) (any, error) {
	if n, isGPUNode := object.(*v1alpha1.GPUNode); isGPUNode {
		l.share(n.Status.Devices)
	}
	return keepOwnManagedFields(object)
}
