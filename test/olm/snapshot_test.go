// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// passing are kinds whose objects come and go by themselves, with names that nobody chose.
func passing() []string {
	return []string{"pods", "replicasets", "events", "leases", "endpoints", "endpointslices", "controllerrevisions", "componentstatuses", "jobs"}
}

// snapshot is every object of the cluster: what it says, without what only a server writes, by its kind and name.
func (s *site) snapshot() map[string]string {
	s.t.Helper()
	config := rest.CopyConfig(s.cluster.Config)
	config.WarningHandlerWithContext = rest.NoWarnings{} // that a kind is deprecated
	server, err := discovery.NewDiscoveryClientForConfig(config)
	s.Expect(err).NotTo(HaveOccurred())
	objects, err := dynamic.NewForConfig(config)
	s.Expect(err).NotTo(HaveOccurred())
	lists, err := server.ServerPreferredResources()
	s.Expect(err).NotTo(HaveOccurred())
	all := map[string]string{}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		s.Expect(err).NotTo(HaveOccurred())
		for _, r := range list.APIResources {
			if strings.Contains(r.Name, "/") || !slices.Contains(r.Verbs, "list") || slices.Contains(passing(), r.Name) {
				continue
			}
			found, err := objects.Resource(gv.WithResource(r.Name)).List(s.t.Context(), metav1.ListOptions{})
			s.Expect(err).NotTo(HaveOccurred(), r.Name)
			for i := range found.Items {
				o := &found.Items[i]
				all[strings.TrimSuffix(r.Name+"."+gv.Group, ".")+" "+strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/")] = s.content(o)
			}
		}
	}
	return all
}

// content is what an object says.
func (s *site) content(o *unstructured.Unstructured) string {
	s.t.Helper()
	o = o.DeepCopy()
	for _, field := range []string{"resourceVersion", "uid", "generation", "creationTimestamp", "managedFields"} {
		unstructured.RemoveNestedField(o.Object, "metadata", field)
	}
	unstructured.RemoveNestedField(o.Object, "metadata", "annotations", "deprecated.daemonset.template.generation")
	if allocatable, found, _ := unstructured.NestedMap(o.Object, "status", "allocatable"); found && o.GetKind() == "Node" {
		o.Object["allocatable"] = allocatable
	}
	delete(o.Object, "status")
	data, err := json.Marshal(o.Object)
	s.Expect(err).NotTo(HaveOccurred())
	return string(data)
}

// differences are the objects that are there in addition (+), no more (-), or say something else (~).
func differences(before, after map[string]string) []string {
	var all []string
	for name, content := range after {
		was, there := before[name]
		switch {
		case !there:
			all = append(all, "+ "+name)
		case was != content:
			all = append(all, fmt.Sprintf("~ %s: …%s… is now …%s…", name, around(was, content), around(content, was)))
		}
	}
	for name := range before {
		if _, there := after[name]; !there {
			all = append(all, "- "+name)
		}
	}
	slices.Sort(all)
	return all
}

// around is a text where it begins to differ from another one.
func around(text, other string) string {
	at := 0
	for at < min(len(text), len(other)) && text[at] == other[at] {
		at++
	}
	return text[max(0, at-100):min(len(text), at+200)]
}

// sinceThen are the differences from a snapshot.
func (s *site) sinceThen(before map[string]string) func() []string {
	return func() []string { s.t.Helper(); return differences(before, s.snapshot()) }
}

// documented is the n-th block of commands, from 1, below a headline of docs/install.md.
func (s *site) documented(headline string, n int) string {
	s.t.Helper()
	root, err := env.Root()
	s.Expect(err).NotTo(HaveOccurred())
	data, err := os.ReadFile(filepath.Join(root, "docs", "install.md"))
	s.Expect(err).NotTo(HaveOccurred())
	_, section, found := strings.Cut(string(data), "# "+headline+"\n")
	s.Expect(found).To(BeTrue(), headline)
	section, _, _ = strings.Cut(section, "\n##")
	blocks := strings.Split(section, "```")
	s.Expect(len(blocks)).To(BeNumerically(">", 2*n-1), "%s has no %d blocks", headline, n)
	commands, is := strings.CutPrefix(blocks[2*n-1], "sh\n")
	s.Expect(is).To(BeTrue(), "%s: block %d has no commands", headline, n)
	// Nobody answers here.
	return strings.ReplaceAll(commands, "kubectl gpusharing restore", "kubectl gpusharing restore --yes --timeout=2m")
}

// do runs commands as an administrator, who is in the folder of the release.
func (s *site) do(commands string) string {
	s.t.Helper()
	out, err := s.try(commands)
	s.Expect(err).NotTo(HaveOccurred(), "%s\n%s", commands, out)
	return out
}

func (s *site) try(commands string) (string, error) {
	s.t.Helper()
	root, err := env.Root()
	s.Expect(err).NotTo(HaveOccurred())
	assets, err := env.Assets(s.t.Context())
	s.Expect(err).NotTo(HaveOccurred())
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*wait)
	defer cancel()
	shell := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	shell.Dir = s.released
	shell.Env = []string{
		"PATH=" + strings.Join([]string{s.bin, assets, filepath.Join(root, "hack", "install"), os.Getenv("PATH")}, ":"), "HOME=" + s.dir,
		"KUBECONFIG=" + s.kubeconfig, "REGISTRY=" + s.registry,
	}
	out, err := shell.CombinedOutput()
	return string(out), err
}
