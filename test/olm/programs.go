// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/nodesim"
)

const (
	// NamespaceV0 is that of OLM v0 and of its CatalogSources.
	NamespaceV0 = "olm"
	// NamespaceV1 is that of OLM v1.
	NamespaceV1 = "olmv1-system"
)

// Program is a program of OLM, and how it is started. Its kubeconfig is in the environment.
type Program struct {
	Name string
	Args []string
}

// V0 are the programs of OLM v0, which unpacks bundles and serves catalogs with these images.
func V0(opm, util string) []Program {
	return []Program{
		{Name: "olm", Args: []string{"--namespace=" + NamespaceV0}},
		{Name: "catalog", Args: []string{"--namespace=" + NamespaceV0, "--opmImage=" + opm, "--util-image=" + util}},
	}
}

// V1 are the programs of OLM v1, whose home folder is given, and which pull from a registry without TLS, or what is named
// after it from its mirror. They answer on the loopback interface, but for catalogd's webhook, which nobody calls.
func V1(ctx context.Context, home, registry, mirror string) ([]Program, error) {
	containers, certificates := filepath.Join(home, ".config", "containers"), filepath.Join(home, "certificates")
	catalogs, controller := filepath.Join(home, "catalogd"), filepath.Join(home, "operator-controller")
	for _, folder := range []string{containers, certificates, catalogs, controller} {
		if err := os.MkdirAll(folder, 0o700); err != nil {
			return nil, fmt.Errorf("making a folder of OLM v1: %w", err)
		}
	}
	insecure := fmt.Appendf(nil, "[[registry]]\nlocation = %q\ninsecure = true\n[[registry.mirror]]\nlocation = %q\ninsecure = true\n", registry, mirror)
	if err := os.WriteFile(filepath.Join(containers, "registries.conf"), insecure, 0o600); err != nil {
		return nil, fmt.Errorf("naming the registry to OLM v1: %w", err)
	}
	if err := writeCertificate(certificates); err != nil {
		return nil, fmt.Errorf("making the certificate of catalogd: %w", err)
	}
	var free []string // of the catalogs, the webhook, two for health and one for metrics
	for range 5 {
		address, err := nodesim.FreeAddress(ctx)
		if err != nil {
			return nil, err
		}
		free = append(free, address)
	}
	port := func(address string) string { _, p, _ := net.SplitHostPort(address); return p }
	return []Program{
		{Name: "catalogd", Args: []string{
			"--system-namespace=" + NamespaceV1, "--cache-dir=" + catalogs, "--health-probe-bind-address=" + free[2], "--metrics-bind-address=" + free[4],
			"--tls-cert=" + certificates + "/tls.crt", "--tls-key=" + certificates + "/tls.key",
			"--catalogs-server-addr=" + free[0], "--external-address=localhost:" + port(free[0]), "--webhook-server-port=" + port(free[1]),
		}},
		{Name: "operator-controller", Args: []string{
			"--system-namespace=" + NamespaceV1, "--cache-path=" + controller, "--health-probe-bind-address=" + free[3], "--catalogd-cas-dir=" + certificates,
		}},
	}, nil
}

// writeCertificate writes a certificate for localhost into a folder, with its key.
func writeCertificate(folder string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	for file, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: certificate}, "tls.key": {Type: "EC PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(folder, file), pem.EncodeToMemory(block), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// CRDs are the folders with OLM's definitions below the one of hack/olm/build.sh: v0, or extensions and catalogs for v1.
func CRDs(bin string, names ...string) (folders []string, err error) {
	for _, name := range names {
		folder, err := filepath.EvalSymlinks(filepath.Join(bin, "crds", name))
		if err != nil {
			return nil, fmt.Errorf("finding the definitions of OLM: %w", err)
		}
		folders = append(folders, folder)
	}
	return folders, nil
}

// Documented is the n-th block of commands, from 1, below a headline of docs/install.md. Nobody answers what restore
// asks, and the namespace of catalogs is that of OLM elsewhere than on OpenShift.
func Documented(headline string, n int) (string, error) {
	root, err := env.Root()
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(filepath.Join(root, "docs", "install.md"))
	if err != nil {
		return "", err
	}
	_, section, found := strings.Cut(string(data), "# "+headline+"\n")
	section, _, _ = strings.Cut(section, "\n##")
	blocks := strings.Split(section, "```")
	if !found || len(blocks) < 2*n {
		return "", fmt.Errorf("docs/install.md, %s: there is no block %d", headline, n)
	}
	commands, is := strings.CutPrefix(blocks[2*n-1], "sh\n")
	if !is {
		return "", fmt.Errorf("docs/install.md, %s: block %d has no commands", headline, n)
	}
	return strings.NewReplacer("kubectl gpusharing restore", "kubectl gpusharing restore --yes --timeout=2m", "openshift-marketplace", NamespaceV0).Replace(commands), nil
}
