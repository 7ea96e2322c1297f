// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

const (
	etc          = "/etc/kubernetes"
	pki          = etc + "/pki"
	apiserverURL = "https://" + Address + ":443"

	// AdminConfig is the administrator's kubeconfig.
	AdminConfig = etc + "/admin.conf"
)

// writeFiles writes all that the programs read.
func (n *Node) writeFiles() error {
	if err := writePKI(n.options.Name); err != nil {
		return err
	}
	for _, user := range []string{"admin", "controller-manager", "scheduler", "kubelet"} {
		if err := writeKubeconfig(user); err != nil {
			return err
		}
	}
	files := map[string]string{
		containerdConfig:                  n.containerdConfig(),
		"/etc/cni/net.d/10-pods.conflist": network,
		kubeletConfig:                     n.kubeletConfig(),
		etc + "/resolv.conf":              "", // there is no DNS here
	}
	for path, content := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("making a folder of the node: %w", err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return fmt.Errorf("writing a file of the node: %w", err)
		}
	}
	return nil
}

func writeKubeconfig(user string) error {
	path := filepath.Join(etc, user+".conf")
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		CurrentContext: "e2e",
		Contexts:       map[string]*clientcmdapi.Context{"e2e": {Cluster: "e2e", AuthInfo: user}},
		Clusters:       map[string]*clientcmdapi.Cluster{"e2e": {Server: apiserverURL, CertificateAuthority: pki + "/ca.crt"}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{user: {
			ClientCertificate: filepath.Join(pki, user+".crt"), ClientKey: filepath.Join(pki, user+".key"),
		}},
	}, path)
	if err != nil {
		return fmt.Errorf("writing a kubeconfig: %w", err)
	}
	return nil
}
