// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
)

func TestWordsAreFoundInCommentsStringsNamesAndDocs(t *testing.T) {
	files := map[string]string{
		"a.go":                 "package a\n\n// a wish\nvar wish = \"it shall\" // fine\n\n// who is in\n// the way\n",
		"docs/b.md":            "Fine.\n\nSomebody\nreads it, wishfully, of the daemonset.\n",
		"config/c.yaml":        "a: b\n# The daemon\n# set.\n",
		"docs/dev/language.md": "A wish.\n",
		"config/crd/e.yaml":    "# a wish\n",
		"f.json":               "\"wish\"",
		"g.go":                 "package g\n\nfunc wishfulDaemonSets() { daemonSet, twoWishes := 0, 1 }\n\nfunc blockerInTheWay() {}\n",
	}
	g := NewWithT(t)
	var names []string
	for name := range files {
		names = append(names, name)
	}
	problems, err := check(names, func(name string) ([]byte, error) { return []byte(files[name]), nil })
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(problems).To(ContainElements(
		`a.go:3: "wish": write desired, desired state, spec`,
		`a.go:4: "wish": write desired, desired state, spec`,
		`a.go:4: "shall": write must, will, is expected to`,
		`a.go:6: "in the way": write blocks, blocker`,
		`g.go:3: "Wishes": write desired, desired state, spec`,
		`g.go:5: "In The Way": write blocks, blocker`,
		`config/c.yaml:2: "daemon set": write DaemonSet`,
		`docs/b.md:3: "Somebody": write another controller, a user, an administrator`,
	))
	g.Expect(problems).To(ContainElement(HavePrefix("hack/words: has no such word any more")))
	g.Expect(problems).NotTo(ContainElement(HavePrefix("docs/dev/language.md:")), "an exception with a finding is needed")
	g.Expect(problems).To(HaveLen(8+len(excepted())-1), "nothing else is found")
}

func TestAFileThatIsGoneIsNoFinding(t *testing.T) {
	g := NewWithT(t)
	problems, err := check([]string{"gone.go"}, func(string) ([]byte, error) { return nil, os.ErrNotExist })
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(problems).To(HaveLen(len(excepted())))
}

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
