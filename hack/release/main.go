// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Release makes everything that a release is from the commit that is checked out, into a folder, and publishes it:
// `make release` runs it. The same commit, registry, Go and C compilers make the same bytes, signatures excepted.
//
// A module of its own: what it needs moves no version of the operator.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
)

const (
	controllerName  = "gpu-sharing-controller"
	agentName       = "gpu-sharing-agent"
	chartName       = "gpu-sharing-operator"
	bundleName      = "gpu-sharing-bundle"
	catalogName     = "gpu-sharing-catalog"
	defaultRegistry = "ghcr.io/gpusharing"
)

type settings struct {
	root, out, registry, key, tag string
	keyless, unsigned, local      bool
	trial                         trialSettings
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	var set settings
	flag.StringVar(&set.root, "root", "../..", "top folder of the repository")
	flag.StringVar(&set.out, "out", "../../dist", "folder that is made; what was there is deleted")
	flag.StringVar(&set.registry, "registry", "", "registry and folder to push to, such as ghcr.io/gpusharing; empty: nothing is pushed")
	flag.StringVar(&set.tag, "tag", "", "the tag that is released, where the commit has several; empty: the highest")
	flag.StringVar(&set.key, "key", "", "private key that `cosign generate-key-pair` wrote; its password: environment variable COSIGN_PASSWORD")
	flag.BoolVar(&set.keyless, "keyless", false, "sign with the identity of the workflow instead of a key")
	flag.BoolVar(&set.unsigned, "unsigned", false, "push without signatures: a trial, whose notes may be those of the section Unreleased")
	flag.BoolVar(&set.local, "local", false, "build the images for this machine's architecture only, with its own C compiler, and push them and the chart unsigned")
	flag.StringVar(&set.trial.images, "trial", "", "push the chart as it lies in the root with these images, and nothing else: NAME=ARCHIVE,NAME=ARCHIVE")
	flag.StringVar(&set.trial.version, "as", "", "of -trial: the version; empty: that of the chart")
	flag.StringVar(&set.trial.helm, "helm", "", "of -trial: the program helm")
	flag.StringVar(&set.trial.bundler, "bundler", "", "of -trial: the program of hack/bundle; push the OLM bundle and the catalog too, and write them to -out")
	flag.Parse()
	do := run
	switch {
	case set.local:
		do = local
	case set.trial.images != "":
		do = trial
	}
	err := do(ctx, set)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, ">> "+format+"\n", args...) }

func run(ctx context.Context, set settings) error {
	for _, path := range []*string{&set.root, &set.out, &set.key} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return fmt.Errorf("finding %s: %w", *path, err)
		}
		*path = absolute
	}
	if set.registry != "" && set.key == "" && !set.keyless && !set.unsigned {
		return errors.New("what is pushed is signed: give KEY=cosign.key, or UNSIGNED=1 for a trial")
	}
	if _, err := newSigner("", set.key, set.keyless); err != nil { // before minutes of building
		return err
	}
	s, err := readSource(ctx, set.root, set.tag)
	if err != nil {
		return err
	}
	if _, err := readNotes(set.root, s.Version, set.unsigned); err != nil {
		return err
	}
	if err := checkCompilers(); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "release-")
	if err != nil {
		return fmt.Errorf("making a folder to work in: %w", err)
	}
	defer os.RemoveAll(work) //nolint:errcheck // what stays is in the system's folder for temporary files
	r, err := makeAll(ctx, set, s, work)
	if err != nil {
		return err
	}
	return publish(ctx, set, r)
}

// makeAll builds, assembles and writes everything, and publishes nothing.
func makeAll(ctx context.Context, set settings, s source, work string) (*release, error) {
	r, err := newRelease(ctx, set, s, work, programs())
	if err != nil {
		return nil, err
	}
	progress("writing %s", set.out)
	return r, r.assemble(ctx, work)
}

// newRelease lays out the commit in a folder, and builds these programs of it, with what their images need beside them.
func newRelease(ctx context.Context, set settings, s source, work string, programs []program) (*release, error) {
	progress("%s, commit %s", s.Version, s.Commit)
	tree := filepath.Join(work, "source")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return nil, fmt.Errorf("making a folder to work in: %w", err)
	}
	if err := s.export(ctx, set.root, tree); err != nil {
		return nil, err
	}
	packages, err := readDebian(tree)
	if err != nil {
		return nil, err
	}
	r := &release{
		source: s, tree: tree, out: set.out, unsigned: set.unsigned, packages: packages, roots: map[string]string{},
		registry: cmp.Or(strings.TrimSuffix(set.registry, "/"), defaultRegistry),
	}
	for _, p := range programs {
		progress("building %s for %s/%s", p.Name, p.OS, p.Arch)
		built, err := build(ctx, s, tree, filepath.Join(work, "programs"), p)
		if err != nil {
			return nil, err
		}
		r.programs = append(r.programs, built)
		if p.Name != "agent" {
			continue
		}
		if err := checkLibc(built.File, libc(of(packages, p.Arch))); err != nil {
			return nil, err
		}
		if r.roots[p.Arch], err = unpackDebian(ctx, tree, work, p.Arch); err != nil {
			return nil, err
		}
	}
	r.helm, err = output(ctx, tree, nil, filepath.Join(tree, "hack", "helm", "build.sh"))
	return r, err
}

// publish signs, pushes, attests, and verifies what was pushed.
func publish(ctx context.Context, set settings, r *release) error {
	cosign := ""
	if set.key != "" || set.keyless {
		var err error
		if cosign, err = output(ctx, r.tree, nil, filepath.Join(r.tree, "hack", "cosign", "build.sh")); err != nil {
			return err
		}
	}
	signs, err := newSigner(cosign, set.key, set.keyless)
	if err != nil {
		return err
	}
	if signs != nil {
		sums := filepath.Join(r.out, checksums)
		if err := errors.Join(signs.signFile(ctx, sums), signs.verifyFile(ctx, sums)); err != nil {
			return err
		}
	}
	if set.registry == "" {
		return nil
	}
	for _, p := range r.published {
		reference, err := p.byDigest()
		if err != nil {
			return err
		}
		progress("pushing %s:%s, %s", p.Name, p.Tag, reference)
		if err := push(ctx, p); err != nil {
			return err
		}
		if err := verifyPushed(ctx, p); err != nil {
			return err
		}
		if signs == nil {
			continue
		}
		if err := r.signAndVerify(ctx, signs, reference); err != nil {
			return err
		}
	}
	return nil
}

// signAndVerify signs what was pushed and its provenance, and then what is in it: an SBOM for each image.
func (r *release) signAndVerify(ctx context.Context, signs *signer, reference string) error {
	err := errors.Join(
		signs.sign(ctx, reference), signs.verify(ctx, reference),
		signs.attest(ctx, reference, "slsaprovenance1", filepath.Join(r.out, "provenance.json")),
		signs.verifyAttestation(ctx, reference, "slsaprovenance1"),
	)
	if err != nil {
		return err
	}
	for _, image := range sorted(r.sboms) {
		if name, _, _ := strings.Cut(reference, "@"); !strings.HasPrefix(image, name+"@") {
			continue
		}
		err := errors.Join(
			signs.verify(ctx, image), signs.attest(ctx, image, "cyclonedx", filepath.Join(r.out, r.sboms[image])),
			signs.verifyAttestation(ctx, image, "cyclonedx"),
		)
		if err != nil {
			return err
		}
	}
	return nil
}
