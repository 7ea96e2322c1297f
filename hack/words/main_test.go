// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
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
