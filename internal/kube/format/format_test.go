// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package format

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	. "github.com/onsi/gomega"
)

// TestSentencesBeginWithACapitalLetter, unless a name would be another one then.
func TestSentencesBeginWithACapitalLetter(t *testing.T) {
	for message, want := range map[string]string{
		"waiting for pod a/b": "Waiting for pod a/b", "waiting: x": "Waiting: x", "Waiting": "Waiting", "3 of 4 nodes": "3 of 4 nodes", "": "",
		"nvidia-smi failed": "nvidia-smi failed", "gpuSelector selects": "gpuSelector selects", "nvidia.com/gpu is": "nvidia.com/gpu is", "élan": "Élan",
	} {
		NewWithT(t).Expect(Sentence(message)).To(Equal(want))
	}
}

// TestOfALongMessageTheMiddleIsLeftOut: it begins with what is so and ends with what to do.
func TestOfALongMessageTheMiddleIsLeftOut(t *testing.T) {
	g := NewWithT(t)
	g.Expect(Message("stderr: \xff")).To(Equal("Stderr: �"))
	long, word := strings.TrimSpace(strings.Repeat("üüüü ", 30)), strings.TrimSpace(strings.Repeat("bb ", 30))
	g.Expect(Message("it failed: " + long + "; " + word + "; edit the policy")).To(And(HavePrefix("It failed: "+long+"; bb"), HaveSuffix("bb … edit the policy")))
	g.Expect(Message("It failed: " + long + " " + long + ". Edit the policy")).To(And(HavePrefix("It failed: üüüü"), HaveSuffix("üüüü … Edit the policy")))
	g.Expect(Message(word+"; "+long+" "+long)).To(HaveSuffix("üüüü …"), "an end that is too long is cut")
	name := strings.Repeat("n", 253)
	g.Expect(Message("pod "+name+" uses 33 GiB; end it")).To(Equal("Pod "+name[:40]+"…"+name[:20]+" uses 33 GiB; end it"), "a tenant chose the name")
	for _, s := range []string{long + long, long + "; " + long, strings.Repeat("a ", 150), strings.Repeat("a; ", 150), long + "; " + word + "; " + word} {
		g.Expect(utf8.RuneCountInString(Message(s))).To(BeNumerically("<=", MostMessage))
		g.Expect(Message(Message(s))).To(Equal(Message(s)))
	}
	end := strings.TrimSpace(strings.Repeat("bbbb ", 31))
	g.Expect(Message("It failed: " + long + "; " + end)).To(And(HavePrefix("It failed: üü"), HaveSuffix("üüüü … "+end)))
	refused := "installing DaemonSet gpu-sharing-agent: daemonsets.apps \"gpu-sharing-agent\" is forbidden: ValidatingAdmissionPolicy 'no-daemonsets' with binding " +
		"'no-daemonsets' denied request: no DaemonSet is welcome here, nor there"
	g.Expect(Message(refused)).To(And(HavePrefix("Installing DaemonSet gpu-sharing-agent: "), HaveSuffix(" … no DaemonSet is welcome here, nor there")), "the cause")
	exact := "A" + strings.Repeat("b", MostMessage-1)
	g.Expect(Message(exact)).To(Equal(exact))
}

// TestOfAListThereAreTheFirst: the others are counted.
func TestOfAListThereAreTheFirst(t *testing.T) {
	g := NewWithT(t)
	name := strings.Repeat("n", 30)
	g.Expect(List(nil)).To(BeEmpty())
	g.Expect(List([]string{"a", "b"})).To(Equal("a, b"))
	g.Expect(List(strings.Split("abcdefghi", ""))).To(Equal("a, b, c, d, e, f, g, h and 1 more"))
	g.Expect(List([]string{name, name, name})).To(Equal(name+", "+name+", "+name), "94 characters")
	g.Expect(List([]string{name, name, name, name})).To(Equal(name + ", " + name + " and 2 more"))
	g.Expect(ListIn([]string{name, "b"}, 10)).To(Equal(name + " and 1 more"))
}

// TestTheEndOfAnErrorBeginsWithAWord, unless that leaves little of it.
func TestTheEndOfAnErrorBeginsWithAWord(t *testing.T) {
	g := NewWithT(t)
	g.Expect(End("GPU-1: busy now", 15)).To(Equal("GPU-1: busy now"))
	g.Expect(End("GPU-1: busy now", 13)).To(Equal("… busy now"))
	g.Expect(End("GPU-1: abcdefgh", 10)).To(Equal("… abcdefgh"))
	g.Expect(End("abcdefgh ij", 8)).To(Equal("…efgh ij"))
}

// TestWhatIsNotThePointOfAMessage does not push out what to do.
func TestWhatIsNotThePointOfAMessage(t *testing.T) {
	g := NewWithT(t)
	g.Expect(Beside("a", "")).To(Equal("a"))
	g.Expect(Beside("a", "b")).To(Equal("a; b"))
	long := strings.Repeat("ü", MostMessage-3)
	g.Expect(Beside(long, "b")).To(Equal(long + "; b"))
	g.Expect(Beside(long, "bb")).To(Equal(long))
}

// TestClausesThatFit: the others are counted.
func TestClausesThatFit(t *testing.T) {
	g := NewWithT(t)
	all := []string{"aaaa", "bbbb", "cccc"}
	rest := func(i int) string { return fmt.Sprintf("%d more", len(all)-i) }
	g.Expect(Fit(all, 16, rest)).To(Equal("aaaa; bbbb; cccc"))
	g.Expect(Fit(all, 15, rest)).To(Equal("aaaa; 2 more"), "bbbb and what follows do not fit both")
	g.Expect(Fit(all, 11, rest)).To(Equal("aa…; 2 more"))
	g.Expect(Fit(all[:1], 3, rest)).To(Equal("aa…"))
	g.Expect(Fit(nil, 3, rest)).To(BeEmpty())
}
