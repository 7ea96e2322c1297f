// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// The picture in pixels: a plot with the names of its lines to the right.
const (
	pictureWidth, pictureHeight = 860, 420
	plotLeft, plotRight         = 60, 520
	plotTop, plotBottom         = 40, 370
	lowest                      = 0.8 // what serves less lies on the lower edge
)

// picture draws what each system serves, as a part of the optimum, over the load.
func picture(rows []row, best row) string {
	b := &strings.Builder{}
	text := func(x, y int, anchor, format string, args ...any) {
		words := strings.NewReplacer("&", "&amp;", "<", "&lt;").Replace(fmt.Sprintf(format, args...))
		fmt.Fprintf(b, "<text x=\"%d\" y=\"%d\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, words)
	}
	fmt.Fprintf(b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#444\">\n", pictureWidth, pictureHeight)
	fmt.Fprintf(b, "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", pictureWidth, pictureHeight)
	text(plotLeft, 22, "start", "Served slice-time, as a part of the optimum with free migration (simulated; less than %.1f: lower edge)", lowest)
	x := func(i int) int { return plotLeft + i*(plotRight-plotLeft)/(len(loads)-1) }
	y := func(v float64) int {
		return plotBottom - int(min(1, max(0, (v-lowest)/(1-lowest)))*(plotBottom-plotTop)+0.5)
	}
	for v := range 5 {
		at := lowest + float64(v)*(1-lowest)/4
		fmt.Fprintf(b, "<path d=\"M%d %dH%d\" stroke=\"#ddd\"/>\n", plotLeft, y(at), plotRight)
		text(plotLeft-8, y(at)+4, "end", "%.2f", at)
	}
	for i, load := range loads {
		text(x(i), plotBottom+20, "middle", "%.1f", load)
	}
	text((plotLeft+plotRight)/2, plotBottom+40, "middle", "load: memory slices asked for / memory slices")
	colors := []string{"#888", "#b58900", "#cb4b16", "#268bd2", "#6c71c4", "#d33682", "#859900", "#dc322f", "#2aa198", "#073642", "#b08", "#08b", "#7a4", "#c80", "#448"}
	for n, r := range rows {
		var points []string
		for i := range loads {
			points = append(points, fmt.Sprintf("%d,%d", x(i), y(float64(r.loads[i].served)/float64(best.loads[i].served))))
		}
		color := colors[n%len(colors)]
		fmt.Fprintf(b, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", strings.Join(points, " "), color)
		fmt.Fprintf(b, "<path d=\"M%d %dh18\" stroke=\"%s\" stroke-width=\"3\"/>\n", plotRight+20, plotTop+n*22, color)
		text(plotRight+44, plotTop+n*22+4, "start", "%s", r.name)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func TestThePictureNamesEachSystem(t *testing.T) {
	g := NewWithT(t)
	four := make([]result, len(loads))
	for i := range four {
		four[i].served = time.Hour
	}
	drawn := picture([]row{{name: "a < b", loads: four}}, row{loads: four})
	g.Expect(drawn).To(And(ContainSubstring("a &lt; b"), ContainSubstring(fmt.Sprintf("%d,%d", plotRight, plotTop))))
}
