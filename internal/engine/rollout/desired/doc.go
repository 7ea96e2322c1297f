// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package desired writes GPUNode.spec: the desired state, the last good state, a failure, the permission to reboot.
//
//	view.Target → SetSpec → reached: RecordReached | failed: RecordFailure
package desired
