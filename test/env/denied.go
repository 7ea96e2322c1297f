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

// Fence is the name of the admission policy around the controller.
const Fence = "gpu-sharing-controller-fence"

// Denied counts the requests that an admission policy has denied since the API server started, from its metrics.
func Denied(ctx context.Context, config *rest.Config, policy string) (int, error) {
	c, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return 0, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	metrics, err := c.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return 0, fmt.Errorf("reading the API server's metrics: %w", err)
	}
	denied := 0
	lines := bufio.NewScanner(bytes.NewReader(metrics))
	lines.Buffer(nil, len(metrics)+1)
	for lines.Scan() {
		labels, value, is := strings.Cut(lines.Text(), "} ")
		if !is || !strings.HasPrefix(labels, "apiserver_validating_admission_policy_check_total{") ||
			!strings.Contains(labels, `enforcement_action="deny"`) || !strings.Contains(labels, fmt.Sprintf("policy=%q", policy)) {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("reading the API server's metrics: %w", err)
		}
		denied += int(n)
	}
	return denied, lines.Err()
}
