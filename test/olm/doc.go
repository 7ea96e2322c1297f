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
//
// `make e2e` starts the same programs beside a kubelet (test/e2e/olm_test.go), where nothing of that is played: bundles
// are unpacked and catalogs served in pods, and all images come from a mirror of what the catalog lists. There this
// package has what both need: the programs and their arguments, the commands of docs/install.md, and what a cluster holds.
//
// What the first installation by the real OLM had wrong on 2026-11-24, and the test of each that failed then:
//
//	v1 deletes policies and GPUNodes with the ClusterExtension   TestOLMv1; test/api TestWhatWouldDeleteLivePoliciesIsRefused;
//	                                                             gpusharingpolicy TestPoliciesThatVanishAreNotReleased
//	namespaced rights become cluster-wide                        TestOLMv0 and TestOLMv1 (rights, accounts)
//	the MPS pods' account goes with the previous version         TestOLMv0; packaging TestWhatStaysBelongsToNoClusterServiceVersion
//	a binding that is deleted stays deleted                      packaging TestWhatAnotherControllerDeletesIsInstalledAgainWithinAMinute
//	a CSV is Succeeded without a DaemonSet                       TestBadLuckUnderOLMv0; agentinstall TestReadyOnceAndAsLongAsAllIsInstalled
//	v0 to v1 is refused                                          TestFromOLMv0ToV1; cli TestDoctorTellsHowToGoOnFromOLMv0ToV1
//	settings need the environment, which v1 does not give        TestOLMv1; packaging TestAConfigMapSetsWhatASubscriptionMaySet
//	a second installation in another namespace                   TestOLMv0; agentinstall TestNoSecondOperatorBeginsInAnotherNamespace
//	users with edit write GPUNodes                               TestOLMv0 (editors); test/api TestWhoWritesGPUNodes
package olm
