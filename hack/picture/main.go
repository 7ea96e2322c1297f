// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Command picture draws what commands printed in make e2e, as an SVG: the pictures of the docs show what was printed on
// the real node.
//
//	go run ./hack/picture REPORT.json 'kubectl gpusharing top' docs/images/top.svg
//
// It draws those entries of the report whose names begin with the command, one below the other.
package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

func main() {
	const arguments = 3
	if len(os.Args) != 1+arguments {
		fmt.Fprintln(os.Stderr, "usage: picture REPORT.json COMMAND FILE.svg")
		os.Exit(2)
	}
	if err := draw(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "picture:", err)
		os.Exit(1)
	}
}

func draw(report, command, file string) error {
	raw, err := os.ReadFile(report) //nolint:gosec // the report that the developer names
	if err != nil {
		return fmt.Errorf("reading the report: %w", err)
	}
	var reports []types.Report
	if err := json.Unmarshal(raw, &reports); err != nil {
		return fmt.Errorf("reading the report %s: %w", report, err)
	}
	lines := printed(reports, command)
	if len(lines) == 0 {
		return errors.New("no passed spec of the report has printed that; run make e2e FOCUS='Who uses the GPUs'")
	}
	return os.WriteFile(file, []byte(svg(command, lines)), 0o644) //nolint:gosec // a file of the repository
}

// printed is what specs that passed added to the report under the name of a command, each below a prompt.
func printed(reports []types.Report, command string) (lines []string) {
	for i := range reports {
		for _, spec := range reports[i].SpecReports {
			for _, entry := range spec.ReportEntries {
				if spec.State != types.SpecStatePassed || !strings.HasPrefix(entry.Name, command) {
					continue
				}
				if len(lines) > 0 {
					lines = append(lines, "")
				}
				lines = append(lines, "$ "+command)
				lines = append(lines, strings.Split(strings.Trim(entry.StringRepresentation(), "\n"), "\n")...)
			}
		}
	}
	return lines
}

// svg draws lines as a terminal does. A line about a container over its share stands out.
func svg(title string, lines []string) string {
	const size, lineHeight, margin, wide = 13, 18, 16, 0.602 // of a font in which each character is so wide
	columns := 0
	for _, line := range lines {
		columns = max(columns, len([]rune(line)))
	}
	width, height := int(float64(columns)*size*wide)+2*margin, len(lines)*lineHeight+2*margin
	var out strings.Builder
	_, _ = fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img">`+"\n", width, height, width, height)
	_, _ = fmt.Fprintf(&out, "<title>%s</title>\n", escaped(title))
	_, _ = fmt.Fprintf(&out, `<rect width="%d" height="%d" rx="8" fill="#1b1f24"/>`+"\n", width, height)
	_, _ = fmt.Fprintf(&out, `<g font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="%d" fill="#d7dce2" xml:space="preserve">`+"\n", size)
	for i, line := range lines {
		style := ""
		switch {
		case strings.HasPrefix(line, "$ "):
			style = ` fill="#7fd18b"`
		case strings.Contains(line, " ! ") || strings.HasPrefix(line, "! "):
			style = ` fill="#ffb454"`
		}
		_, _ = fmt.Fprintf(&out, `<text x="%d" y="%d"%s xml:space="preserve">%s</text>`+"\n", margin, margin+size+i*lineHeight, style, escaped(line))
	}
	out.WriteString("</g>\n</svg>\n")
	return out.String()
}

func escaped(s string) string {
	var out strings.Builder
	_ = xml.EscapeText(&out, []byte(s)) // a strings.Builder takes everything
	return out.String()
}
