// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
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
	"time"
)

// validFor is longer than any node here lives.
const validFor = 24 * time.Hour

// authority signs the certificates of the cluster.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// subject is who a certificate is for: a user with groups, as Kubernetes reads common name and organisations.
type subject struct {
	file, user string
	groups     []string
	addresses  []net.IP
	names      []string
}

func subjects(node string) []subject {
	return []subject{
		{
			file: "apiserver", user: "kube-apiserver",
			addresses: []net.IP{net.ParseIP(Address), net.ParseIP(ServiceAddress), net.IPv4(127, 0, 0, 1)},
			names:     []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"},
		},
		{file: "apiserver-kubelet", user: "kube-apiserver-kubelet-client", groups: []string{"system:masters"}},
		{file: "admin", user: "admin", groups: []string{"system:masters"}},
		{file: "controller-manager", user: "system:kube-controller-manager"},
		{file: "scheduler", user: "system:kube-scheduler"},
		{file: "kubelet", user: "system:node:" + node, groups: []string{"system:nodes"}},
	}
}

// writePKI writes the certificates and keys of a cluster with one node, once: clients keep those of an authority's
// files that they have read.
func writePKI(node string) error {
	if _, err := os.Stat(filepath.Join(pki, "ca.crt")); err == nil {
		return nil
	}
	if err := os.MkdirAll(pki, 0o700); err != nil {
		return fmt.Errorf("making the folder of certificates: %w", err)
	}
	a, err := newAuthority()
	if err != nil {
		return err
	}
	for _, s := range subjects(node) {
		if err := a.issue(s); err != nil {
			return fmt.Errorf("issuing the certificate of %s: %w", s.user, err)
		}
	}
	return writeServiceAccountKey()
}

func newAuthority() (*authority, error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "kubernetes"}, SerialNumber: big.NewInt(1),
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(validFor),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the authority's key: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("making the authority: %w", err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("reading the authority: %w", err)
	}
	return &authority{certificate: certificate, key: key}, writePEM("ca.crt", "CERTIFICATE", der)
}

func (a *authority) issue(s subject) error {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: s.user, Organization: s.groups}, SerialNumber: serial,
		NotBefore: a.certificate.NotBefore, NotAfter: a.certificate.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: s.addresses, DNSNames: s.names,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		return err
	}
	if err := writePEM(s.file+".crt", "CERTIFICATE", der); err != nil {
		return err
	}
	return writeKey(s.file+".key", key)
}

// writeServiceAccountKey writes the pair that signs and checks the tokens of service accounts.
func writeServiceAccountKey() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making the key of service accounts: %w", err)
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return fmt.Errorf("making the key of service accounts: %w", err)
	}
	if err := writePEM("sa.pub", "PUBLIC KEY", public); err != nil {
		return err
	}
	return writeKey("sa.key", key)
}

func writeKey(name string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(name, "EC PRIVATE KEY", der)
}

func writePEM(name, kind string, der []byte) error {
	return os.WriteFile(filepath.Join(pki, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
