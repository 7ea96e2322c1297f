// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package mps_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	. "github.com/onsi/gomega"
)

// shown lets the MPS pod look n times and returns the lines that its log got.
func (n *node) shown(t *testing.T, looks int) []string {
	t.Helper()
	var lines []string
	log := funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{})
	for range looks {
		NewWithT(t).Expect(n.host.Converge(logr.NewContext(t.Context(), log), false)).To(Succeed())
	}
	return lines
}

func TestThePodsLogHasTheLogsOfDaemonAndServers(t *testing.T) {
	g, n := served(t)
	write := func(name, text string) { g.Expect(n.daemons.Log(n.pipe(), name, text)).To(Succeed()) }

	write("control.log", "Starting control daemon\nNEW CLI")
	g.Expect(n.shown(t, 2)).To(ConsistOf(And(
		ContainSubstring(`"line"="Starting control daemon"`), ContainSubstring(`"resource"="nvidia.com/gpu"`),
		ContainSubstring(`"file"="control.log"`))))
	write("control.log", "ENT 17\n")
	write("server.log", "Creating server context\n")
	g.Expect(n.shown(t, 2)).To(ConsistOf(ContainSubstring(`"line"="NEW CLIENT 17"`),
		And(ContainSubstring(`"file"="server.log"`), ContainSubstring(`"line"="Creating server context"`))))

	control := n.path(resource, "log", "control.log")
	g.Expect(os.Rename(control, control+".1")).To(Succeed())
	write("control.log", "after a rotation that leaves a longer file than the one before it\n")
	g.Expect(n.shown(t, 2)).To(ConsistOf(ContainSubstring("after a rotation")))
	g.Expect(os.Truncate(control, 0)).To(Succeed())
	write("control.log", "short\n")
	g.Expect(n.shown(t, 2)).To(ConsistOf(ContainSubstring(`"line"="short"`)))
}

func TestTheLogsThatAreShownAreBounded(t *testing.T) {
	g, n := served(t)
	write := func(text string) { g.Expect(n.daemons.Log(n.pipe(), "server.log", text)).To(Succeed()) }
	g.Expect(n.shown(t, 1)).To(BeEmpty())

	write(strings.Repeat("x", 1<<20) + "\nend\n")
	lines := n.shown(t, 40)
	g.Expect(lines[len(lines)-1]).To(ContainSubstring(`"line"="end"`))
	for _, line := range lines {
		g.Expect(len(line)).To(BeNumerically("<", 4<<10))
	}

	write(strings.Repeat("one of very many lines\n", 1<<18))
	shown := 0
	for range 40 {
		lines := n.shown(t, 1)
		g.Expect(len(lines)).To(BeNumerically("<", 4<<10), "one look")
		shown += len(lines)
	}
	g.Expect(shown).To(BeNumerically("<", 1<<16), "the middle is left out")

	for i := range 8 {
		write(fmt.Sprintf("%d %s\n", i, strings.Repeat("y", 1<<20)))
		n.shown(t, 20)
	}
	info, err := os.Stat(n.path(resource, "log", "server.log"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(info.Size()).To(BeNumerically("<", 8<<20), "it lies in the memory of the node")
	write("goes on\n")
	g.Expect(n.shown(t, 2)).To(ConsistOf(ContainSubstring(`"line"="goes on"`)))
}

func TestALogThatIsThereAlreadyIsShownFromItsEnd(t *testing.T) {
	g, n := served(t)
	g.Expect(n.daemons.Log(n.pipe(), "control.log", strings.Repeat("long ago\n", 1<<14)+"just now\n")).To(Succeed())
	lines := n.shown(t, 3)
	g.Expect(lines[len(lines)-1]).To(ContainSubstring("just now"))
	g.Expect(len(lines)).To(BeNumerically("<", 4<<10))
}
