// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package browser tests the page of `kubectl gpusharing dashboard` in a real browser, beside a real API server.
package browser
