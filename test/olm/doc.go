// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package olm installs the operator by the real Operator Lifecycle Managers, v0 and v1, uninstalls it in every order,
// and goes from one to the other: with the bundle and the catalog as `make release` makes them, from a registry on
// loopback. `make olm-test` runs it; hack/olm/build.sh builds the programs.
//
// Real are etcd, kube-apiserver with OwnerReferencesPermissionEnforcement, kube-controller-manager (garbage collection,
// namespaces, Deployments, Jobs), OLM, the operator's controller and operands as processes with the tokens of the accounts
// that OLM made, and the reconciler of its agent with its account's. The commands are those of docs/install.md.
//
// What is played: a scheduler, the kubelet and NVIDIA's stack (test/nodesim), GPUs (test/gpu/sim), and of the Job with
// which OLM v0 unpacks a bundle, and of the pod with which it serves a catalog, the pull of the image: `opm` then unpacks
// or serves the files that were pushed, the latter where a hosts file names the Service. OLM's programs are cluster
// administrators. There is no OpenShift.
//
// catalogd's webhook listens on all addresses, so the tests run in a network namespace of their own.
package olm
