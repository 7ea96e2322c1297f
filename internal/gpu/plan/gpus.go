// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package plan

// GPUs are the UUIDs of all GPUs that a step concerns, in the order of their indexes. When a step cannot be carried
// out, the later steps of these GPUs cannot either.
func GPUs(s Step) []string {
	switch s := s.(type) {
	case stopMPS:
		return uuids(s.devices)
	case startMPS:
		return uuids(s.devices)
	case setMIG:
		return append([]string{s.device.UUID}, s.device.ResetPeers...)
	}
	return []string{s.Device()}
}

func uuids(goals []goal) []string {
	list := make([]string, 0, len(goals))
	for _, g := range goals {
		list = append(list, g.device.UUID)
	}
	return list
}
