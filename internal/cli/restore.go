// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// restorePoll is how often restore looks whether everything is as before.
const restorePoll = 2 * time.Second

// ErrNotRestored says that restore ended before everything was as before, or before that was known.
var ErrNotRestored = errors.New("not restored")

// restore deletes all policies and waits until every node and NVIDIA's ClusterPolicy are as they were before the
// operator.
func (p *Program) restore(ctx context.Context, f *flags, _ []string) error {
	if f.timeout <= 0 {
		return hint(fmt.Errorf("--timeout %s is not more than 0s", f.timeout))
	}
	c, err := connect(f)
	if err != nil {
		return err
	}
	return restoration{Program: p, client: c, namespace: f.namespace}.run(ctx, f)
}

// restoration is one run of restore on a cluster.
type restoration struct {
	*Program

	client    client.Client
	namespace string // of the controller, as leadershipOf takes it
}

func (r restoration) run(ctx context.Context, f *flags) error {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := r.client.List(ctx, policies); meta.IsNoMatchError(err) {
		return r.withoutKinds(ctx)
	} else if err != nil {
		return adviseRestore(fmt.Errorf("reading policies: %w", err))
	}
	if err := retaining(ctx, r.client, policies); err != nil {
		return adviseRestore(err)
	}
	left, err := Left(ctx, r.client)
	if err != nil {
		return adviseRestore(err)
	}
	if len(left) == 0 {
		return r.write("Restored: there was nothing to restore.\n")
	}
	leader, err := leadershipOf(ctx, r.client, r.namespace, r.Clock.Now())
	if err != nil {
		return err
	}
	if leader.absent != "" {
		return fmt.Errorf("nothing was deleted, because only a controller restores nodes. %s. Left:\n%s", leader.absent, indented(left))
	}
	if err := r.confirm(policies, f.yes); err != nil {
		return err
	}
	if err := r.deletePolicies(ctx, policies); err != nil {
		return err
	}
	if !f.wait {
		return r.write("The controller restores the nodes now. `kubectl gpusharing restore` waits until it has.\n")
	}
	return r.awaitRestored(ctx, f.timeout)
}

// withoutKinds looks at a cluster without the operator's kinds: nothing was ever shared there, or its records are lost.
func (r restoration) withoutKinds(ctx context.Context) error {
	var left []string
	for _, find := range []func(context.Context, client.Client) ([]string, error){
		leftNodes, leftNodeFeatures, leftClusterPolicies, leftConfigMaps, leftForAutoscalers, leftOfDRA,
	} {
		found, err := find(ctx, r.client)
		if err != nil {
			return adviseRestore(err)
		}
		left = append(left, found...)
	}
	if len(left) == 0 {
		return r.write("Nothing to restore: the kinds of the operator are not installed, and nothing of it is left.\n")
	}
	return fmt.Errorf("the kinds of the operator are not installed, and with them its records of the nodes are gone. "+
		"Install it again or correct by hand what is left:\n%s", indented(left))
}

// retaining is an error that names the policies and nodes with releasePolicy Retain. Their nodes would stay as they
// are.
func retaining(ctx context.Context, c client.Client, policies *v1alpha1.GPUSharingPolicyList) error {
	retain := map[string]bool{}
	var names []string
	for i := range policies.Items {
		if policies.Items[i].Spec.ReleasePolicy == v1alpha1.ReleasePolicyRetain {
			retain[policies.Items[i].Name] = true
			names = append(names, "gpusharingpolicy/"+policies.Items[i].Name)
		}
	}
	gpuNodes := &v1alpha1.GPUNodeList{}
	if err := c.List(ctx, gpuNodes); err != nil {
		return fmt.Errorf("reading GPUNodes: %w", err)
	}
	for i := range gpuNodes.Items {
		spec := gpuNodes.Items[i].Spec
		if spec.Baseline != nil && spec.Release != nil && spec.Release.ReleasePolicy == v1alpha1.ReleasePolicyRetain && !retain[spec.PolicyName] {
			names = append(names, "node/"+gpuNodes.Items[i].Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("nodes under releasePolicy Retain would stay as they are, so nothing was deleted. Set releasePolicy: Restore in the "+
		"policies, select retained nodes by such a policy, and wait until the controller has seen it:\n%s", indented(names))
}

// confirm asks whether the policies are to be deleted.
func (r restoration) confirm(policies *v1alpha1.GPUSharingPolicyList, yes bool) error {
	if yes || len(policies.Items) == 0 {
		return nil
	}
	names := make([]string, len(policies.Items))
	for i := range policies.Items {
		names[i] = "gpusharingpolicy/" + policies.Items[i].Name
	}
	if !r.Interactive {
		return fmt.Errorf("restore deletes all policies; confirm that by --yes:\n%s", indented(names))
	}
	question := fmt.Sprintf("You are about to delete %s and to restore the nodes:\n%s\nDo you want to continue? (y/N): ",
		count(len(names), "GPUSharingPolicy object"), indented(names))
	if err := r.write(question); err != nil {
		return err
	}
	answer, err := bufio.NewReader(r.In).ReadString('\n')
	if !slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(answer))) {
		return errors.Join(errors.New("canceled: nothing was deleted"), err)
	}
	return nil
}

// deletePolicies deletes them one after another.
func (r restoration) deletePolicies(ctx context.Context, policies *v1alpha1.GPUSharingPolicyList) error {
	for i := range policies.Items {
		policy := &policies.Items[i]
		if err := client.IgnoreNotFound(r.client.Delete(ctx, policy, client.Preconditions{UID: &policy.UID})); err != nil {
			return notDeleted(fmt.Errorf("deleting policy %s: %w", policy.Name, err), i, len(policies.Items))
		}
		if err := r.write(fmt.Sprintf("gpusharingpolicy/%s deleted\n", policy.Name)); err != nil {
			return notDeleted(err, i+1, len(policies.Items))
		}
	}
	return nil
}

// notDeleted says that not all policies were deleted, and whether some were, or may have been.
func notDeleted(err error, deleted, all int) error {
	status := apierrors.APIStatus(nil)
	switch {
	case deleted > 0:
		return fmt.Errorf("%w: %d of %s deleted, and the controller restores their nodes. Run the command again for the rest: %w",
			ErrNotRestored, deleted, count(all, "GPUSharingPolicy object"), adviseRestore(err))
	case !errors.As(err, &status):
		return fmt.Errorf("%w, as far as is known: the API server did not answer whether it deleted a policy. Run the command again: %w", ErrNotRestored, err)
	}
	return adviseRestore(err)
}

// awaitRestored waits until nothing is left, and prints what is whenever that changes. While the API server does not
// answer, nothing is known, and nothing counts as restored.
func (r restoration) awaitRestored(ctx context.Context, timeout time.Duration) error {
	deadline, told := r.Clock.Now().Add(timeout), ""
	for {
		status, err := r.whatIsLeft(ctx)
		if err != nil {
			return err
		}
		if status == "" {
			return r.write("Restored: every node, and NVIDIA's ClusterPolicy, is as it was before the operator.\n")
		}
		if !r.Clock.Now().Before(deadline) {
			return fmt.Errorf("%w within %s. The controller continues; run the command again to wait on. Left:\n%s", ErrNotRestored, timeout, status)
		}
		if status != told {
			if err := r.write("Waiting:\n" + status + "\n"); err != nil {
				return err
			}
			told = status
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: interrupted. The controller continues; run the command again to wait on. Left:\n%s", ErrNotRestored, status)
		case <-r.Clock.After(restorePoll):
		}
	}
}

// whatIsLeft tells what is left, or that it is not known. It is empty only if everything is restored. The error is one
// that time does not heal.
func (r restoration) whatIsLeft(ctx context.Context) (string, error) {
	left, err := Left(ctx, r.client)
	switch {
	case meta.IsNoMatchError(err), apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return "", fmt.Errorf("%w, as far as is known: %w", ErrNotRestored, adviseRestore(err))
	case err != nil:
		return indented([]string{fmt.Sprintf("not known: %v", err)}), nil
	case len(left) == 0:
		return "", nil
	}
	if leader, err := leadershipOf(ctx, r.client, r.namespace, r.Clock.Now()); err == nil && leader.absent != "" {
		left = append([]string{leader.absent}, left...)
	}
	return indented(slices.Concat(left, r.createdAgain(ctx))), nil
}

// createdAgain says what to do where there are policies again, although restore deleted all: while it waits, it deletes
// none.
func (r restoration) createdAgain(ctx context.Context) []string {
	policies := &v1alpha1.GPUSharingPolicyList{}
	if err := r.client.List(ctx, policies); err != nil {
		return nil
	}
	var names []string
	for i := range policies.Items {
		if policies.Items[i].DeletionTimestamp == nil {
			names = append(names, policies.Items[i].Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s created after all policies were deleted: %s. Stop what creates policies, such as Argo CD or Flux, and run the command again",
		count(len(names), "GPUSharingPolicy object"), format.Few(names, mostNamed))}
}

// adviseRestore adds to an error which rights restore needs.
func adviseRestore(err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("%w; ask an administrator to bind the ClusterRoles gpu-sharing-view, gpu-sharing-edit and gpu-sharing-cli to you", err)
	}
	return advise(err)
}

// indented are lines that belong to the text before them.
func indented(lines []string) string { return "  " + strings.Join(lines, "\n  ") }
