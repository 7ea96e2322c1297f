// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package agentinstall installs what the Operator Lifecycle Manager cannot: its bundles hold Deployments, but no
// DaemonSet, no SecurityContextConstraints and no admission policy (operator-registry,
// pkg/lib/bundle/supported_resources.go). Helm and kustomize need none of it.
//
// It knows nothing of GPUs. It applies the objects of two files, which the bundle brings in a ConfigMap, into its own
// namespace and with the images that its environment names:
//
//	owned.yaml  go when the Deployment goes that this runs in, so when the operator is uninstalled
//	kept.yaml   stay: the MPS pods, since MPS clients die with their daemon, and what they need
//
// It writes when it starts, when another controller changes or deletes a DaemonSet of its namespace, and every minute,
// which the API server ignores where nothing differs.
package agentinstall

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// The files with the objects.
const (
	ownedFile = "owned.yaml"
	keptFile  = "kept.yaml"
)

// agentContainer is the name of the container of an agent, metricsPort that of its port, by which its readers find it, and cgroups that of the
// volume with the node's control groups.
const agentContainer, metricsPort, cgroups, cgroupRoot = "agent", "metrics", "cgroups", "/sys/fs/cgroup"

// objects reads what is to be applied for a Deployment.
func (c *Controller) objects(owner *appsv1.Deployment) ([]*unstructured.Unstructured, error) {
	owned, err := read(c.manifests, ownedFile)
	if err != nil {
		return nil, err
	}
	for _, o := range owned {
		o.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "Deployment", Name: owner.Name, UID: owner.UID}})
	}
	kept, err := read(c.manifests, keptFile)
	if err != nil {
		return nil, err
	}
	all := slices.Concat(owned, kept)
	for _, o := range all {
		if o.GetNamespace() != "" {
			o.SetNamespace(owner.Namespace)
		}
		if annotations := o.GetAnnotations(); annotations[v1alpha1.AnnotationNamespace] != "" {
			annotations[v1alpha1.AnnotationNamespace] = owner.Namespace
			o.SetAnnotations(annotations)
		}
		if err := setAccounts(o, owner.Namespace); err != nil {
			return nil, err
		}
		if err := setContainers(o, c.images, c.agents); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// setAccounts puts the ServiceAccounts that a SecurityContextConstraints names as its users into a namespace.
func setAccounts(o *unstructured.Unstructured, namespace string) error {
	users, found, err := unstructured.NestedStringSlice(o.Object, "users")
	if err != nil {
		return fmt.Errorf("reading the users of %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	if !found {
		return nil
	}
	const account = "system:serviceaccount:"
	for i, user := range users {
		if _, name, _ := strings.Cut(strings.TrimPrefix(user, account), ":"); strings.HasPrefix(user, account) {
			users[i] = account + namespace + ":" + name
		}
	}
	if err := unstructured.SetNestedStringSlice(o.Object, users, "users"); err != nil {
		return fmt.Errorf("naming the users of %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	return nil
}

func read(manifests fs.FS, file string) ([]*unstructured.Unstructured, error) {
	data, err := fs.ReadFile(manifests, file)
	if err != nil {
		return nil, fmt.Errorf("reading what is to be installed: %w", err)
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	var all []*unstructured.Unstructured
	for {
		o := &unstructured.Unstructured{}
		err := decoder.Decode(&o.Object)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading what is to be installed from %s: %w", file, err)
		}
		if len(o.Object) > 0 {
			all = append(all, o)
		}
	}
}

// setContainers puts the images of the same name into a workload, and gives its agents what the settings say. An image that
// nobody named is refused: it would be pulled from wherever the nodes look first.
func setContainers(o *unstructured.Unstructured, images map[string]string, agents Agents) error {
	for _, list := range []string{"initContainers", "containers"} {
		path := []string{"spec", "template", "spec", list}
		containers, found, err := unstructured.NestedSlice(o.Object, path...)
		if err != nil {
			return fmt.Errorf("reading the %s of %s %s: %w", list, o.GetKind(), o.GetName(), err)
		}
		if !found {
			continue
		}
		for _, container := range containers {
			isAgent, err := setContainer(container, images, agents)
			if err != nil {
				return fmt.Errorf("one of the %s of %s %s: %w", list, o.GetKind(), o.GetName(), err)
			}
			if isAgent && agents.Cgroups {
				volumes := []string{"spec", "template", "spec", "volumes"}
				there, _, _ := unstructured.NestedSlice(o.Object, volumes...)
				there = append(there, map[string]any{"name": cgroups, "hostPath": map[string]any{"path": cgroupRoot, "type": "Directory"}})
				if err := unstructured.SetNestedSlice(o.Object, there, volumes...); err != nil {
					return fmt.Errorf("writing the volumes of %s %s: %w", o.GetKind(), o.GetName(), err)
				}
			}
		}
		if err := unstructured.SetNestedSlice(o.Object, containers, path...); err != nil {
			return fmt.Errorf("writing the %s of %s %s: %w", list, o.GetKind(), o.GetName(), err)
		}
	}
	return nil
}

// setContainer is setContainers for one, and reports whether it is an agent's.
func setContainer(container any, images map[string]string, agents Agents) (isAgent bool, err error) {
	fields, isObject := container.(map[string]any)
	if !isObject {
		return false, errors.New("is no object")
	}
	image := images[fmt.Sprint(fields["image"])]
	if image == "" {
		return false, fmt.Errorf("nobody named the image %v", fields["image"])
	}
	fields["image"] = image
	if fields["name"] != agentContainer {
		return false, nil
	}
	add := func(list string, what any) {
		there, _ := fields[list].([]any)
		fields[list] = append(there, what)
	}
	for _, arg := range agents.Args {
		add("args", arg)
	}
	if agents.Port != 0 {
		add("ports", map[string]any{"name": metricsPort, "containerPort": int64(agents.Port)})
	}
	if agents.Cgroups {
		add("volumeMounts", map[string]any{"name": cgroups, "mountPath": cgroupRoot})
	}
	return true, nil
}
