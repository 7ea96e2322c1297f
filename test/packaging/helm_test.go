// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const (
	release   = "gpu-sharing-operator"
	namespace = "gpu-sharing-operator"
)

// helm is the real Helm, with our chart.
type helm struct {
	program, chart string
	env            []string
}

// The scripts that build the versions of Helm that users have.
const helm3, helm4 = "hack/helm3/build.sh", "hack/helm/build.sh"

func newHelm(tb testing.TB) helm {
	tb.Helper()
	return helmOf(tb, helm4)
}

func helmOf(tb testing.TB, script string) helm {
	tb.Helper()
	return helm{
		program: strings.TrimSpace(run(tb, exec.CommandContext(tb.Context(), path(tb, script)))),
		chart:   path(tb, "config/helm"),
		env:     []string{"HELM_CACHE_HOME=" + tb.TempDir(), "HELM_CONFIG_HOME=" + tb.TempDir(), "HELM_DATA_HOME=" + tb.TempDir()},
	}
}

// run returns what a program printed, and fails the test if it failed.
func run(tb testing.TB, command *exec.Cmd) string {
	tb.Helper()
	out, err := output(command)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

func output(command *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(command.Args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// path is that of a file of the repository.
func path(tb testing.TB, elements ...string) string {
	tb.Helper()
	root, err := env.Root()
	if err != nil {
		tb.Fatal(err)
	}
	return filepath.Join(append([]string{root}, elements...)...)
}

func (h helm) run(tb testing.TB, args ...string) (string, error) {
	tb.Helper()
	command := exec.CommandContext(tb.Context(), h.program, args...)
	command.Env = append(os.Environ(), h.env...)
	return output(command)
}

// render is what the chart installs with some values, given as for --set.
func (h helm) render(tb testing.TB, values ...string) []*unstructured.Unstructured {
	tb.Helper()
	objects, err := h.template(tb, set(values)...)
	if err != nil {
		tb.Fatal(err)
	}
	return objects
}

func (h helm) template(tb testing.TB, args ...string) ([]*unstructured.Unstructured, error) {
	tb.Helper()
	out, err := h.run(tb, append([]string{"template", release, h.chart, "--namespace", namespace}, args...)...)
	if err != nil {
		return nil, err
	}
	return decode(out)
}

func set(values []string) []string {
	var args []string
	for _, value := range values {
		args = append(args, "--set", value)
	}
	return args
}

// everything turns on what is off by default.
func everything() []string {
	return []string{
		"openshift.enabled=true", "networkPolicy.enabled=true", "metrics.enabled=true", "metrics.podMonitor.enabled=true",
		"metrics.prometheusRule.enabled=true", "metrics.dashboard.enabled=true", "logLevel=debug", "agent.allowReboot=true",
		"devicePlugin.namespace=nvidia-device-plugin", "devicePlugin.configMap=plugin-configs", "priorityClassQuota.enabled=true",
	}
}
