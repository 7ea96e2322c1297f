// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/cli-runtime/pkg/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
)

// plan prints what policies would do, and what the deletion of others would. The API server checks and completes the
// former in a dry run; then the same decision is made as the controller will make, before and after.
func (p *Program) plan(ctx context.Context, f *flags, rest []string) error {
	if len(rest) > 0 || len(f.files)+len(f.deleted) == 0 {
		return hint(errNoFile)
	}
	submitted, err := p.policies(f.files, f.recursive)
	if err != nil {
		return err
	}
	c, err := connect(f)
	if err != nil {
		return err
	}
	asked, s, err := p.ask(ctx, c, f.namespace, submitted, f.deleted)
	if err != nil {
		return err
	}
	asked.otherStack = f.stacks
	var preview string
	if f.output != "" {
		preview, err = marshal(planOf(s, asked), f.output)
	} else {
		preview, err = planText(ctx, c, s, asked, p.Width)
	}
	if err != nil {
		return err
	}
	if err := p.write(preview); err != nil {
		return err
	}
	if o := outcomeOf(s, asked); o != NoChange {
		return o
	}
	return nil
}

// ask lets the API server check policies in a dry run, and reads the cluster that they and the deletion of others would
// change. The namespace is that of ownNamespaces.
func (p *Program) ask(
	ctx context.Context, c client.Client, namespace string, submitted []*unstructured.Unstructured, deleted []string,
) (change, cluster.Snapshot, error) {
	asked := change{deleted: deleted}
	var unchecked []string
	for _, u := range submitted {
		policy, err := admit(ctx, c, u)
		if apierrors.IsForbidden(err) {
			unchecked = append(unchecked, u.GetName())
			policy, err = uncheckedPolicy(u)
		}
		if err != nil {
			return asked, cluster.Snapshot{}, advise(fmt.Errorf("policy %s: %w", u.GetName(), err))
		}
		asked.applied = append(asked.applied, *policy)
	}
	s, told, err := p.read(ctx, c, namespace)
	if err != nil {
		return asked, s, advise(err)
	}
	if asked.lacks = told.lacks; len(unchecked) > 0 {
		asked.lacks = append(asked.lacks, fmt.Sprintf("You may not write policies, so the API server has not checked %s: only unknown fields are refused here. With the "+
			"ClusterRole gpu-sharing-edit it does, in a dry run", strings.Join(unchecked, ", ")))
	}
	if err := knows(s, asked); err != nil {
		return asked, s, err
	}
	asked.found, err = configBefore(ctx, c)
	return asked, s, advise(err)
}

// policies reads the policies of files, folders and URLs; "-" is stdin.
func (p *Program) policies(files []string, recursive bool) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	named := slices.DeleteFunc(slices.Clone(files), func(file string) bool { return file == "-" })
	if len(named) < len(files) {
		data, err := io.ReadAll(p.In)
		if err != nil {
			return nil, fmt.Errorf("reading stdin: %w", err)
		}
		if all, err = parse(data); err != nil {
			return nil, fmt.Errorf("reading stdin: %w", err)
		}
	}
	if len(named) == 0 {
		return all, nil
	}
	builder := resource.NewLocalBuilder().Unstructured().FilenameParam(false, &resource.FilenameOptions{Filenames: named, Recursive: recursive})
	found, err := builder.Flatten().Do().Infos()
	if err != nil {
		return nil, fmt.Errorf("reading policies: %w", err)
	}
	if len(found) == 0 { // a pipeline would take it for no change
		return nil, fmt.Errorf("reading %s: %w", strings.Join(named, ", "), errNoPolicy)
	}
	for _, info := range found {
		u, is := info.Object.(*unstructured.Unstructured)
		if !is {
			return nil, fmt.Errorf("reading %s: it holds a %T", info.Source, info.Object)
		}
		if err := isPolicy(u); err != nil {
			return nil, fmt.Errorf("reading %s: %w", info.Source, err)
		}
		all = append(all, u)
	}
	return all, nil
}

var errNoPolicy = errors.New("it holds no GPUSharingPolicy")

// parse finds the policies in YAML or JSON.
func parse(data []byte) ([]*unstructured.Unstructured, error) {
	const lookAhead = 4096 // characters that tell YAML from JSON
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), lookAhead)
	var found []*unstructured.Unstructured
	for {
		u := &unstructured.Unstructured{}
		err := decoder.Decode(&u.Object)
		switch {
		case errors.Is(err, io.EOF) && len(found) == 0:
			return nil, errNoPolicy
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil:
			return nil, err
		case len(u.Object) == 0:
			continue
		}
		if err := isPolicy(u); err != nil {
			return nil, err
		}
		found = append(found, u)
	}
}

func isPolicy(u *unstructured.Unstructured) error {
	want := v1alpha1.SchemeGroupVersion.WithKind("GPUSharingPolicy")
	if got := u.GroupVersionKind(); got != want {
		return fmt.Errorf("it holds a %q of %q, but plan takes policies only: kind %s, apiVersion %s",
			got.Kind, got.GroupVersion(), want.Kind, want.GroupVersion())
	}
	if u.GetName() == "" {
		return errors.New("a policy has no metadata.name")
	}
	return nil
}

// admit lets the API server check a policy and fill in defaults, in a dry run: created if there is none of that name,
// and otherwise with its spec in place of the present one.
func admit(ctx context.Context, c client.Client, u *unstructured.Unstructured) (*v1alpha1.GPUSharingPolicy, error) {
	present := &v1alpha1.GPUSharingPolicy{}
	err := c.Get(ctx, types.NamespacedName{Name: u.GetName()}, present)
	switch {
	case apierrors.IsNotFound(err):
		answer := u.DeepCopy()
		if err := c.Create(ctx, answer, client.DryRunAll); err != nil {
			return nil, err
		}
		return typed(answer)
	case err != nil:
		return nil, err
	}
	patch, err := json.Marshal([]map[string]any{{"op": "replace", "path": "/spec", "value": u.Object["spec"]}})
	if err != nil {
		return nil, fmt.Errorf("encoding its spec: %w", err)
	}
	if err := c.Patch(ctx, present, client.RawPatch(types.JSONPatchType, patch), client.DryRunAll); err != nil {
		return nil, err
	}
	return present, nil
}

// uncheckedPolicy is a policy as it was submitted, for a user who may not ask the API server to check it. Unknown fields
// are an error. What the schema would fill in, the engine takes for granted.
func uncheckedPolicy(u *unstructured.Unstructured) (*v1alpha1.GPUSharingPolicy, error) {
	data, err := u.MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("encoding it: %w", err)
	}
	policy := &v1alpha1.GPUSharingPolicy{}
	if err := sigsyaml.UnmarshalStrict(data, policy); err != nil {
		return nil, fmt.Errorf("reading it: %w", err)
	}
	return policy, nil
}

func typed(u *unstructured.Unstructured) (*v1alpha1.GPUSharingPolicy, error) {
	policy := &v1alpha1.GPUSharingPolicy{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, policy); err != nil {
		return nil, fmt.Errorf("reading the answer of the API server: %w", err)
	}
	return policy, nil
}
