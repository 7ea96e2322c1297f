// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// source is the commit that is released.
type source struct {
	// Version is that of the tag, such as v1.2.3. Between tags it is Go's pseudo-version, such as
	// v1.2.4-0.20261122090000-0123456789ab.
	Version string
	Commit  string
	// Time is that of the commit. Everything in a release has it, so that the same commit makes the same bytes.
	Time time.Time
}

// number is the version without the v, as Helm, OLM and image tags have it.
func (s source) number() string { return strings.TrimPrefix(s.Version, "v") }

// readSource reads the commit that is checked out in a folder, whose version is that of a tag or, if none is named, of
// its highest one. It refuses a folder that differs from its commit, and a tag that the commit does not have.
func readSource(ctx context.Context, folder, tag string) (source, error) {
	git := func(args ...string) (string, error) {
		return output(ctx, folder, nil, "git", args...)
	}
	changed, err := git("status", "--porcelain")
	if err != nil {
		return source{}, err
	}
	if changed != "" {
		return source{}, fmt.Errorf("%s differs from its commit; commit or remove these files first:\n%s", folder, changed)
	}
	commit, err := git("rev-parse", "HEAD")
	if err != nil {
		return source{}, err
	}
	seconds, err := git("log", "-1", "--format=%ct")
	if err != nil {
		return source{}, err
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return source{}, fmt.Errorf("the time of commit %s: %w", commit, err)
	}
	tags, err := git("tag", "--points-at", "HEAD")
	if err != nil {
		return source{}, err
	}
	earlier, err := git("tag", "--merged", "HEAD")
	if err != nil {
		return source{}, err
	}
	s := source{Commit: commit, Time: time.Unix(unix, 0).UTC()}
	of := strings.Fields(tags)
	if tag != "" {
		if highest([]string{tag}) == "" || !slices.Contains(of, tag) {
			return source{}, fmt.Errorf("TAG=%s is no version, such as v1.2.3, among the tags of commit %s: %v", tag, commit, of)
		}
		of = []string{tag}
	}
	s.Version = version(of, strings.Fields(earlier), commit, s.Time)
	return s, nil
}

// version is the highest version among the tags of a commit or, if it has none, Go's pseudo-version after the highest
// earlier tag.
func version(tags, earlier []string, commit string, committed time.Time) string {
	if v := highest(tags); v != "" {
		return v
	}
	before := highest(earlier)
	return module.PseudoVersion(semver.Major(before), before, committed, commit[:12])
}

func highest(tags []string) string {
	best := ""
	for _, t := range tags {
		// Build metadata (+…) is not allowed in an image tag; v1.2 is a branch name's form.
		if semver.IsValid(t) && semver.Canonical(t) == t && semver.Compare(t, best) > 0 {
			best = t
		}
	}
	return best
}

// export writes the files of the commit into a folder, and nothing else that lies in the checkout.
func (s source) export(ctx context.Context, from, to string) error {
	_, err := output(ctx, from, nil, "bash", "-c", `set -o pipefail; git archive "$0" | tar -x -C "$1"`, s.Commit, to)
	return err
}

// output runs a program in a folder, with variables added to the environment, and returns what it prints.
func output(ctx context.Context, folder string, env []string, program string, args ...string) (string, error) {
	command := exec.CommandContext(ctx, program, args...)
	command.Dir = folder
	command.Env = append(os.Environ(), env...)
	out, err := command.Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(failed.Stderr)))
		}
		return "", fmt.Errorf("%s %s: %w", program, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}
