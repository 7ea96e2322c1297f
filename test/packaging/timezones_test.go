// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"os/exec"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

// TestProgramsHoldTheTimeZones: maintenance windows name time zones, and an image made from scratch has none.
func TestProgramsHoldTheTimeZones(t *testing.T) {
	for _, program := range []string{"controller", "kubectl-gpusharing"} {
		t.Run(program, func(t *testing.T) {
			g := NewWithT(t)
			out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../../cmd/"+program).Output()
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(strings.Fields(string(out))).To(ContainElement("time/tzdata"))
		})
	}
}
