// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package repair finds what is left half-done on a node, by the operator or by another controller, reports it and repairs what is the
// operator's.
//
//	judgement → each check → Finding{reason, message, repair} → judgement
package repair
