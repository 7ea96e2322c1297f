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

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
)

// WriteGuard is the name of the admission policy around the controller.
const WriteGuard = "gpu-sharing-controller-fence"

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

// denials counts denied requests by policy, from the API server's metrics.
func denials(ctx context.Context, config *rest.Config) (map[string]int, error) {
	c, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	metrics, err := c.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	denied := map[string]int{}
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, len(metrics)+1)
	for lines.Scan() {
		labels, value, is := strings.Cut(lines.Text(), "} ")
		if !is || !strings.HasPrefix(labels, "apiserver_validating_admission_policy_check_total{") ||
			!strings.Contains(labels, `enforcement_action="deny"`) {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return nil, fmt.Errorf("reading the API server's metrics: %w", err)
		}
		_, policy, _ := strings.Cut(labels, `policy="`)
		policy, _, _ = strings.Cut(policy, `"`)
		denied[policy] += int(n)
	}
	return denied, lines.Err()
}
