// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// TestDeployTakesTheImagesOfTheRegistry: `make deploy REGISTRY=…` applies config/default with the images that `make
// docker-push REGISTRY=…` has pushed, and without REGISTRY as it is.
func TestDeployTakesTheImagesOfTheRegistry(t *testing.T) {
	for name, of := range map[string]struct {
		registry, controller, agent string
	}{
		"a registry":  {"registry.example.com:5000/gpu", "registry.example.com:5000/gpu/gpu-sharing-controller:1.2.3", "registry.example.com:5000/gpu/gpu-sharing-agent:1.2.3"},
		"no registry": {"", "gpu-sharing-controller:latest", "gpu-sharing-agent:latest"},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			// In place of kubectl: builds what kubectl apply --server-side -k FOLDER would apply.
			kubectl := filepath.Join(t.TempDir(), "kubectl")
			script := "#!/bin/sh\n[ \"$1\" = apply ] || exit 0\nexec go tool -modfile=" + path(t, "hack/tools/go.mod") + " kustomize build \"$4\"\n"
			g.Expect(os.WriteFile(kubectl, []byte(script), 0o700)).To(Succeed())
			deploy := exec.CommandContext(t.Context(), "make", "-s", "-C", path(t, "."), "deploy",
				"KUBECTL="+kubectl, "REGISTRY="+of.registry, "VERSION=1.2.3")
			objects, err := env.Objects([]byte(run(t, deploy)))
			g.Expect(err).NotTo(HaveOccurred())
			for workload, image := range map[string]string{
				"Deployment gpu-sharing-controller": of.controller, "DaemonSet gpu-sharing-agent": of.agent, "DaemonSet gpu-sharing-agent-dra": of.agent,
				"DaemonSet gpu-sharing-mps": of.agent,
			} {
				g.Expect(podOf(t, find(t, objects, workload)).Spec.Containers[0].Image).To(Equal(image), workload)
			}
		})
	}
}

// TestUninstallKeepsTheRecordsOfNodes: `make uninstall` deletes the kinds only if no policy is left and every node is
// restored, because a GPUNode holds the record of how its node was.
func TestUninstallKeepsTheRecordsOfNodes(t *testing.T) {
	for name, of := range map[string]struct {
		policies, baselines string
		refused             string
	}{
		"a policy is left":       {policies: "gpusharingpolicy.gpusharing.io/mine", refused: "gpusharingpolicy.gpusharing.io/mine"},
		"a node is not restored": {baselines: "node-a", refused: "node-a"},
		"nothing is left":        {},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			dir := t.TempDir()
			kubectl, deleted := filepath.Join(dir, "kubectl"), filepath.Join(dir, "deleted")
			script := "#!/bin/sh\ncase \"$1 $2\" in\n" +
				"'get crd') echo customresourcedefinition/gpusharingpolicies; echo customresourcedefinition/gpunodes;;\n" +
				"'get gpusharingpolicies') echo '" + of.policies + "';;\n" +
				"'get gpunodes') echo '" + of.baselines + "';;\n" +
				"'delete -k') echo \"$3\" >" + deleted + ";;\n*) exit 1;;\nesac\n"
			g.Expect(os.WriteFile(kubectl, []byte(script), 0o700)).To(Succeed())
			uninstall := exec.CommandContext(t.Context(), "make", "-s", "-C", path(t, "."), "uninstall", "KUBECTL="+kubectl)
			out, err := uninstall.CombinedOutput()
			if of.refused != "" {
				g.Expect(err).To(HaveOccurred())
				g.Expect(string(out)).To(ContainSubstring(of.refused))
				g.Expect(deleted).NotTo(BeAnExistingFile())
				return
			}
			g.Expect(err).NotTo(HaveOccurred(), "%s", out)
			g.Expect(os.ReadFile(deleted)).To(Equal([]byte("config/crd\n")))
		})
	}
}

// read reads the objects of a file of the repository.
func read(tb testing.TB, file string) []*unstructured.Unstructured {
	tb.Helper()
	data, err := os.ReadFile(path(tb, file))
	if err != nil {
		tb.Fatal(err)
	}
	objects, err := env.Objects(data)
	if err != nil {
		tb.Fatalf("%s: %v", file, err)
	}
	return objects
}

// name tells one object from another.
func name(o *unstructured.Unstructured) string { return o.GetKind() + " " + o.GetName() }

func names(objects []*unstructured.Unstructured) []string {
	all := make([]string, len(objects))
	for i, o := range objects {
		all[i] = name(o)
	}
	return all
}

func find(tb testing.TB, objects []*unstructured.Unstructured, wanted string) *unstructured.Unstructured {
	tb.Helper()
	for _, o := range objects {
		if name(o) == wanted {
			return o
		}
	}
	tb.Fatalf("there is no %s among %s", wanted, strings.Join(names(objects), ", "))
	return nil
}

// as converts an object to its Go type and refuses fields that the type does not have.
func as[T any](tb testing.TB, o *unstructured.Unstructured) T {
	tb.Helper()
	var typed T
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, &typed, true); err != nil {
		tb.Fatalf("%s: %v", name(o), err)
	}
	return typed
}

// contents are those of all files that match patterns, one after the other.
func contents(tb testing.TB, patterns ...string) string {
	tb.Helper()
	var all strings.Builder
	for _, pattern := range patterns {
		files, err := filepath.Glob(path(tb, pattern))
		if err != nil {
			tb.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				tb.Fatal(err)
			}
			all.Write(data)
		}
	}
	return all.String()
}
