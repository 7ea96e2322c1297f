// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// startControlPlane starts etcd, the API server, the controller manager and the scheduler.
func (n *Node) startControlPlane(ctx context.Context) error {
	if _, err := n.run("etcd", etcdArguments()...); err != nil {
		return err
	}
	apiserver, err := n.run("kube-apiserver", apiserverArguments()...)
	if err != nil {
		return err
	}
	if err := n.connect(); err != nil {
		return err
	}
	if err := n.waitFor(ctx, apiserver, "the API server", n.apiserverReady); err != nil {
		return err
	}
	for name, args := range map[string][]string{
		"kube-controller-manager": controllerManagerArguments(),
		"kube-scheduler":          schedulerArguments(),
	} {
		if _, err := n.run(name, args...); err != nil {
			return err
		}
	}
	return nil
}

// connect makes the administrator's client. Client-side throttling is off: the tests look often.
func (n *Node) connect() error {
	n.Config = &rest.Config{
		Host:            apiserverURL,
		TLSClientConfig: rest.TLSClientConfig{CAFile: pki + "/ca.crt", CertFile: pki + "/admin.crt", KeyFile: pki + "/admin.key"},
		QPS:             -1,
	}
	client, err := kubernetes.NewForConfig(n.Config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	n.Client = client
	return nil
}

func (n *Node) apiserverReady(ctx context.Context) error {
	return n.Client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

func etcdArguments() []string {
	return []string{
		"--data-dir=/var/lib/etcd",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=default=http://127.0.0.1:2380",
		"--unsafe-no-fsync", // nothing here outlives the machine
	}
}

func apiserverArguments() []string {
	return []string{
		"--etcd-servers=http://127.0.0.1:2379",
		// The service kubernetes is reached without kube-proxy, because the API server listens on its address and port.
		"--secure-port=443", "--bind-address=0.0.0.0", "--advertise-address=" + Address,
		"--service-cluster-ip-range=" + serviceRange,
		"--tls-cert-file=" + pki + "/apiserver.crt", "--tls-private-key-file=" + pki + "/apiserver.key",
		"--client-ca-file=" + pki + "/ca.crt",
		"--kubelet-client-certificate=" + pki + "/apiserver-kubelet.crt", "--kubelet-client-key=" + pki + "/apiserver-kubelet.key",
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + pki + "/sa.pub", "--service-account-signing-key-file=" + pki + "/sa.key",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
	}
}

func controllerManagerArguments() []string {
	return []string{
		"--kubeconfig=" + etc + "/controller-manager.conf",
		"--root-ca-file=" + pki + "/ca.crt", "--service-account-private-key-file=" + pki + "/sa.key",
		"--use-service-account-credentials=true",
		"--leader-elect=false", "--bind-address=127.0.0.1",
	}
}

func schedulerArguments() []string {
	return []string{"--kubeconfig=" + etc + "/scheduler.conf", "--leader-elect=false", "--bind-address=127.0.0.1"}
}
