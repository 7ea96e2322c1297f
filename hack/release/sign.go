// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// signer signs with cosign. Signatures and attestations are stored beside the images in the form that cosign 2 and 3,
// and the admission controllers of that time, verify.
type signer struct {
	// cosign is the program.
	cosign string
	// key is the file that `cosign generate-key-pair` wrote, with COSIGN_PASSWORD for it in the environment. Empty:
	// keyless, with the identity of the workflow.
	key string
	// public is the public key beside it. Empty if keyless.
	public string
	// identity and issuer are those of the workflow. Empty if a key signs.
	identity, issuer string
}

func newSigner(cosign, key string, keyless bool) (*signer, error) {
	switch {
	case key != "" && keyless:
		return nil, errors.New("KEY and KEYLESS exclude each other")
	case keyless:
		identity := os.Getenv("KEYLESS_IDENTITY")
		if identity == "" {
			return nil, errors.New("keyless signing needs KEYLESS_IDENTITY, the address of the workflow; it is made for .github/workflows/release.yaml")
		}
		return &signer{cosign: cosign, identity: identity, issuer: "https://token.actions.githubusercontent.com"}, nil
	case key == "":
		return nil, nil //nolint:nilnil // nobody signs
	}
	public := strings.TrimSuffix(key, filepath.Ext(key)) + ".pub"
	for _, file := range []string{key, public} {
		if _, err := os.Stat(file); err != nil {
			return nil, fmt.Errorf("signing needs both files that `cosign generate-key-pair` writes, %s and %s: %w", key, public, err)
		}
	}
	return &signer{cosign: cosign, key: key, public: public}, nil
}

// signing are the flags with which cosign signs. With a key nothing goes to a public log. Cosign 3 takes the addresses
// from a signing config unless that is turned off, and refuses the former form of a signature beside one.
func (c *signer) signing() []string {
	flags := []string{"--yes", "--use-signing-config=false", "--new-bundle-format=false"}
	if c.key == "" {
		return flags
	}
	return append(flags, "--key", c.key, "--tlog-upload=false")
}

// verifying are the flags with which cosign verifies.
func (c *signer) verifying() []string {
	if c.key == "" {
		return []string{"--certificate-identity", c.identity, "--certificate-oidc-issuer", c.issuer}
	}
	return []string{"--key", c.public, "--insecure-ignore-tlog=true"}
}

func (c *signer) run(ctx context.Context, command []string, args ...[]string) error {
	for _, more := range args {
		command = append(command, more...)
	}
	_, err := output(ctx, "", nil, c.cosign, command...)
	return err
}

// sign signs what has a digest in the registry, and with an image for several architectures each of its images.
func (c *signer) sign(ctx context.Context, reference string) error {
	return c.run(ctx, []string{"sign", "--recursive"}, c.signing(), []string{reference})
}

// attest signs a statement about it: a kind that cosign knows, such as cyclonedx, and a file with the statement.
func (c *signer) attest(ctx context.Context, reference, kind, file string) error {
	return c.run(ctx, []string{"attest", "--replace", "--type", kind, "--predicate", file}, c.signing(), []string{reference})
}

func (c *signer) verify(ctx context.Context, reference string) error {
	return c.run(ctx, []string{"verify"}, c.verifying(), []string{reference})
}

func (c *signer) verifyAttestation(ctx context.Context, reference, kind string) error {
	return c.run(ctx, []string{"verify-attestation", "--type", kind}, c.verifying(), []string{reference})
}

// signFile writes the signature of a file beside it, with the ending .sig, and keyless also the certificate (.pem).
func (c *signer) signFile(ctx context.Context, file string) error {
	args := []string{"--output-signature", file + ".sig"}
	if c.key == "" {
		args = append(args, "--output-certificate", file+".pem")
	}
	return c.run(ctx, []string{"sign-blob"}, c.signing(), args, []string{file})
}

func (c *signer) verifyFile(ctx context.Context, file string) error {
	args := []string{"--signature", file + ".sig"}
	if c.key == "" {
		args = append(args, "--certificate", file+".pem")
	}
	return c.run(ctx, []string{"verify-blob"}, c.verifying(), args, []string{file})
}
