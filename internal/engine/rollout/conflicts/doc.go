// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package conflicts notices that another controller offers or partitions the GPUs of a node, and remembers that on the Node.
//
//	sign → OfferedBy, Record → sign gone for five minutes → forgotten
package conflicts
