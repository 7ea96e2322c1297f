// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package connection_test

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/gpusharing/gpu-sharing-operator/cmd/internal/connection"
)

// TestTheAPIServerNeedNotCompress what the programs read, and is told whose requests they are.
func TestTheAPIServerNeedNotCompress(t *testing.T) {
	g := NewWithT(t)
	var asked http.Header
	server := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked = r.Header.Clone() }))
	defer server.Close()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	g.Expect(clientcmd.WriteToFile(api.Config{
		Clusters: map[string]*api.Cluster{"c": {Server: server.URL, InsecureSkipTLSVerify: true}}, Contexts: map[string]*api.Context{"c": {Cluster: "c"}}, CurrentContext: "c",
	}, file)).To(Succeed())
	t.Setenv("KUBECONFIG", file)

	config, err := connection.Config("agent")
	g.Expect(err).NotTo(HaveOccurred())
	_, _ = kubernetes.NewForConfigOrDie(config).ServerVersion()
	g.Expect(asked).NotTo(HaveKeyWithValue("Accept-Encoding", ContainElement("gzip")))
	g.Expect(asked).To(HaveKeyWithValue("User-Agent", ConsistOf("agent")))
}
