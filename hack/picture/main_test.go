// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"encoding/xml"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
)

func entry(name, value string) types.ReportEntry {
	return types.ReportEntry{Name: name, Value: types.WrapEntryValue(value)}
}

func TestAPictureHasWhatPassedSpecsPrinted(t *testing.T) {
	g := NewWithT(t)
	report := []types.Report{{SpecReports: types.SpecReports{
		{State: types.SpecStatePassed, ReportEntries: types.ReportEntries{entry("kubectl gpusharing top: one", "\nNODE <a>\n  17.0 GiB !  team/greedy\n")}},
		{State: types.SpecStateFailed, ReportEntries: types.ReportEntries{entry("kubectl gpusharing top: two", "\nbroken\n")}},
		{State: types.SpecStatePassed, ReportEntries: types.ReportEntries{entry("something else", "unrelated")}},
	}}}
	raw, err := json.Marshal(report)
	g.Expect(err).NotTo(HaveOccurred())
	folder := t.TempDir()
	from, to := filepath.Join(folder, "report.json"), filepath.Join(folder, "top.svg")
	g.Expect(os.WriteFile(from, raw, 0o600)).To(Succeed())
	g.Expect(draw(from, "kubectl gpusharing top", to)).To(Succeed())
	picture, err := os.ReadFile(to)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(picture)).To(And(ContainSubstring(">$ kubectl gpusharing top<"), ContainSubstring(">NODE &lt;a&gt;<"),
		ContainSubstring(`fill="#ffb454" xml:space="preserve">  17.0 GiB !  team/greedy<`)))
	g.Expect(string(picture)).NotTo(Or(ContainSubstring("broken"), ContainSubstring("unrelated")))
	decoder := xml.NewDecoder(strings.NewReader(string(picture)))
	for err == nil {
		_, err = decoder.Token()
	}
	g.Expect(err.Error()).To(Equal("EOF"), "it is well-formed")
	g.Expect(draw(from, "kubectl gpusharing advise", to)).To(MatchError(ContainSubstring("no passed spec")))
}
