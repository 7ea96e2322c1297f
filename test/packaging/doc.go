// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package packaging holds tests of what users install: the Helm chart, the kustomize sources and the OLM bundle, with
// the real Helm and kustomize and, where it matters what an API server says, a real API server.
package packaging
