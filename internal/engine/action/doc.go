// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package action names all changes of the API that a decision may ask for, and counts how often each was carried out,
// so that no fight with another controller goes on without end.
//
//	decision → Action → carried out → Repeats.Note → Repeats.Admit in the next reconcile
package action
