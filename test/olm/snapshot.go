// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package olm

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// passing are kinds whose objects come and go by themselves, with names that nobody chose.
func passing() []string {
	return []string{"pods", "replicasets", "events", "leases", "endpoints", "endpointslices", "controllerrevisions", "componentstatuses", "jobs"}
}

// Snapshot is every object of the cluster: what it says, without what only a server writes, by its kind and name. Kinds
// may be left out, by their plural.
func Snapshot(ctx context.Context, config *rest.Config, without ...string) (map[string]string, error) {
	config = rest.CopyConfig(config)
	config.WarningHandlerWithContext = rest.NoWarnings{} // that a kind is deprecated
	server, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, err
	}
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	lists, err := server.ServerPreferredResources()
	if err != nil {
		return nil, err
	}
	without = append(without, passing()...)
	all := map[string]string{}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			if strings.Contains(r.Name, "/") || !slices.Contains(r.Verbs, "list") || slices.Contains(without, r.Name) {
				continue
			}
			found, err := objects.Resource(gv.WithResource(r.Name)).List(ctx, metav1.ListOptions{})
			if err != nil {
				return nil, fmt.Errorf("listing %s: %w", r.Name, err)
			}
			for i := range found.Items {
				o := &found.Items[i]
				name := strings.TrimSuffix(r.Name+"."+gv.Group, ".") + " " + strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/")
				if all[name], err = content(o); err != nil {
					return nil, err
				}
			}
		}
	}
	return all, nil
}

// content is what an object says.
func content(o *unstructured.Unstructured) (string, error) {
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
	return string(data), err
}

// Differences are the objects that are there in addition (+), no more (-), or say something else (~).
func Differences(before, after map[string]string) []string {
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
