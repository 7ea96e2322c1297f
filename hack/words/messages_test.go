// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

func TestMessagesPassOneDoor(t *testing.T) {
	source := `package p

func p() {
	c := metav1.Condition{Type: "T", Reason: "Mine", LastTransitionTime: now}
	c.Reason = "Theirs"
	c.Reason, c.Message = v1alpha1.ReasonReady, "a" + "b"
	r.Eventf(o, nil, "Normal", c.Reason, "Do", "%s", note)
	r.Eventf(o, nil, "Normal", c.Reason, "Do", "%s", format.Message(note))
	c.Message = fmt.Sprintf("` + strings.Repeat("x", 150) + `"+
		"` + strings.Repeat("y", 51) + `", c)
}
`
	g := NewWithT(t)
	problems, err := checkMessages("internal/engine/p.go", []byte(source))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(problems).To(ConsistOf(
		HavePrefix(`internal/engine/p.go:4: the reason "Mine" is a literal`),
		HavePrefix("internal/engine/p.go:4: a condition with a time of its own"),
		HavePrefix(`internal/engine/p.go:5: the reason "Theirs" is a literal`),
		HavePrefix("internal/engine/p.go:7: an Event whose note has not passed format.Message"),
		HavePrefix("internal/engine/p.go:9: a text of 201 characters"),
	))
	for _, other := range []string{"internal/cli/p.go", "test/p.go", "internal/engine/p_test.go", "internal/engine/p.md"} {
		g.Expect(checkMessages(other, []byte(source))).To(BeEmpty())
	}
}
