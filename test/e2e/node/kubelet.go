// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"os"
	"time"
)

const kubeletConfig = etc + "/kubelet.yaml"

func (n *Node) startKubelet() error {
	if log, err := os.Stat(kubeletLog()); err == nil {
		n.kubeletBegan.Store(log.Size())
	}
	kubelet, err := n.run("kubelet",
		"--config="+kubeletConfig, "--kubeconfig="+etc+"/kubelet.conf",
		"--hostname-override="+n.options.Name, "--node-ip="+Address,
		"--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki", "--v=2")
	if err != nil {
		return err
	}
	n.kubelet = kubelet
	return nil
}

// PublishEvery restarts the kubelet with another interval at which it publishes its status.
func (n *Node) PublishEvery(ctx context.Context, every time.Duration) error {
	n.options.StatusEvery = every
	if err := os.WriteFile(kubeletConfig, []byte(n.kubeletConfig()), 0o644); err != nil {
		return fmt.Errorf("writing the kubelet's configuration: %w", err)
	}
	return n.RestartKubelet(ctx)
}

// kubeletConfig is the kubelet's configuration. Set because of this machine: cgroupDriver, since systemd does not run
// here; failCgroupV1 and failSwapOn, since build machines have control groups of version 1 and may swap;
// localStorageCapacityIsolation and eviction, since the node's file systems lie in memory; oomScoreAdj, since lowering
// it needs CAP_SYS_RESOURCE. Set for speed: nodeStatusUpdateFrequency, whose default of 10s is the time that
// `make bench` measures with; what has not changed is published as often at most.
func (n *Node) kubeletConfig() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: %s/ca.crt}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix://%s
enableServer: true
evictionHard: {memory.available: 50Mi, nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.available: "0%%"}
failCgroupV1: false
failSwapOn: false
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
nodeStatusReportFrequency: %s
nodeStatusUpdateFrequency: %s
oomScoreAdj: 0
registerNode: true
resolvConf: %s/resolv.conf
rotateCertificates: false
shutdownGracePeriod: 0s
`, pki, containerdSocket, max(n.options.StatusEvery, time.Second), n.options.StatusEvery, etc)
}
