// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ControllerWrites is the name of the admission policy around the controller.
const ControllerWrites = "gpu-sharing-controller-writes"

// DeleteKind deletes a definition of the operator's although there are policies, as a person does who insists: the
// bindings of the admission policies that refuse it go first, and take effect a moment later.
func (c *Cluster) DeleteKind(ctx context.Context, name string) error {
	for _, refuses := range []string{"gpu-sharing-in-use", "gpu-sharing-not-restored"} {
		binding := &admissionregistrationv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: refuses}}
		if err := client.IgnoreNotFound(c.Client.Delete(ctx, binding)); err != nil {
			return fmt.Errorf("deleting the binding of %s: %w", refuses, err)
		}
	}
	definition := &unstructured.Unstructured{}
	definition.SetName(name)
	definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	return wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		err := c.Client.Delete(ctx, definition)
		return err == nil, client.IgnoreNotFound(ignoreForbidden(err))
	})
}

func ignoreForbidden(err error) error {
	if apierrors.IsForbidden(err) {
		return nil
	}
	return err
}

// Denied counts the requests that an admission policy has denied since the test got the API server.
func (c *Cluster) Denied(ctx context.Context, policy string) (int, error) {
	denied, err := denials(ctx, c.Config)
	return denied[policy] - c.denied[policy], err
}

// Denied counts the requests that an admission policy has denied since the API server started.
func Denied(ctx context.Context, config *rest.Config, policy string) (int, error) {
	denied, err := denials(ctx, config)
	return denied[policy], err
}

// denials counts denied requests by policy.
func denials(ctx context.Context, config *rest.Config) (map[string]int, error) {
	denied := map[string]int{}
	err := counters(ctx, config, func(labels string, n int) {
		if strings.HasPrefix(labels, "apiserver_validating_admission_policy_check_total{") && strings.Contains(labels, `enforcement_action="deny"`) {
			_, policy, _ := strings.Cut(labels, `policy="`)
			policy, _, _ = strings.Cut(policy, `"`)
			denied[policy] += n
		}
	})
	return denied, err
}

// Evictions counts the evictions of pods that the API server was asked for since it started, whatever became of them.
func Evictions(ctx context.Context, config *rest.Config) (asked int, err error) {
	err = counters(ctx, config, func(labels string, n int) {
		if strings.HasPrefix(labels, "apiserver_request_total{") && strings.Contains(labels, `subresource="eviction"`) {
			asked += n
		}
	})
	return asked, err
}

// counters calls each for the counters in the API server's metrics, with name and labels.
func counters(ctx context.Context, config *rest.Config, each func(labels string, n int)) error {
	c, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return fmt.Errorf("reading the API server's metrics: %w", err)
	}
	metrics, err := c.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return fmt.Errorf("reading the API server's metrics: %w", err)
	}
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, len(metrics)+1)
	for lines.Scan() {
		labels, value, is := strings.Cut(lines.Text(), "} ")
		if n, err := strconv.ParseFloat(value, 64); is && err == nil {
			each(labels, int(n))
		}
	}
	return lines.Err()
}
