// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package demand

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
)

// pod asks for one instance of a profile.
type pod struct {
	arrival, duration time.Duration
	profile           int
}

// trace is pods by arrival, and how long they are watched. What runs longer counts until then.
type trace struct {
	pods []pod
	span time.Duration
}

// Published of the pods that share a GPU in Alibaba's cluster-trace-gpu-v2023: run times of 539 s in the median, 9,153 s
// at 90 % and 21 h at 99 %; times between two arrivals of 309 s in the median and 1,120 s in the mean. Assumed: the ends
// of the run times, that they are even between two quantiles on a logarithmic scale, and that the times between
// arrivals follow a Weibull distribution, whose shape follows from median and mean.
const (
	shape   = 0.53
	longest = 48 * time.Hour
	never   = 1e6 * time.Hour
)

func quantiles() []struct{ share, seconds float64 } {
	return []struct{ share, seconds float64 }{{0, 10}, {0.5, 539}, {0.9, 9153}, {0.99, 21 * 3600}, {1, longest.Seconds()}}
}

func duration(share float64) time.Duration {
	points := quantiles()
	for i := 1; i < len(points); i++ {
		if low, high := points[i-1], points[i]; share <= high.share {
			part := (share - low.share) / (high.share - low.share)
			return seconds(low.seconds * math.Pow(high.seconds/low.seconds, part))
		}
	}
	return longest
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// mix is how many of the pods ask for each profile, by day and, if it turns over, by night.
type mix struct {
	name       string
	day, night [kinds]float64
	services   float64 // the part of all memory slices that the first pods take and never release
}

// mixes are the mapping of the trace's requests to profiles (1,232 → 7g, 894 → 3g and 4g, 169 → 2g, 19 → 1g), and drawn
// ones, since it has almost no small profile.
func mixes() []mix {
	list := []mix{
		{name: "as Alibaba", day: [kinds]float64{19, 169, 447, 447, 1232}},
		{name: "uniform", day: [kinds]float64{1, 1, 1, 1, 1}},
		{name: "small-heavy", day: [kinds]float64{8, 4, 2, 1, 0.5}},
		{name: "large-heavy", day: [kinds]float64{0.5, 1, 2, 4, 8}},
		{name: "bimodal", day: [kinds]float64{7, 0, 0, 0, 1}},
		{name: "day and night", day: [kinds]float64{8, 4, 1, 0, 0}, night: [kinds]float64{0, 0, 2, 1, 2}},
		{name: "with services", day: [kinds]float64{1, 1, 1, 1, 1}, services: 0.3},
	}
	for i, m := range list {
		if m.night == ([kinds]float64{}) {
			list[i].night = m.day
		}
	}
	return list
}

func draw(r *rand.Rand, weights [kinds]float64) int {
	sum := 0.0
	for _, w := range weights {
		sum += w
	}
	at := r.Float64() * sum
	for p, w := range weights {
		if at -= w; at < 0 {
			return p
		}
	}
	return kinds - 1
}

// generate draws n pods of a mix. Day and night are twelve hours each once the trace is compressed to a load, so the
// profile is drawn afterwards; the sizes that decide how much to compress are then those of the day and the night in
// equal parts, and compressing again a few times meets the load.
func generate(m mix, n, gpus int, load float64, seed uint64) trace {
	r := rand.New(rand.NewPCG(seed, 44))
	var t trace
	at := 0.0
	profiles := make([][2]int, n)
	for i := range n {
		at += math.Pow(-math.Log(1-r.Float64()), 1/shape)
		t.pods = append(t.pods, pod{arrival: seconds(at), duration: duration(r.Float64())})
		profiles[i] = [2]int{draw(r, m.day), draw(r, m.night)}
	}
	taken := 0.0
	for i := 0; taken < m.services*float64(gpus*slicesOfGPU); i++ {
		t.pods[i].duration = never
		taken += float64(size(profiles[i][0]))
	}
	t.span = t.pods[n-1].arrival
	for range 4 {
		for i := range t.pods {
			t.pods[i].profile = profiles[i][int(t.pods[i].arrival/(12*time.Hour))%2]
		}
		t = t.compressed(gpus, load)
	}
	return t
}

// compressed moves arrivals together, or apart, until the pods ask for that part of all memory slices in the span.
func (t trace) compressed(gpus int, load float64) trace {
	scaled := func(factor float64) trace {
		s := trace{pods: slices.Clone(t.pods), span: time.Duration(float64(t.span) * factor)}
		for i := range s.pods {
			s.pods[i].arrival = time.Duration(float64(s.pods[i].arrival) * factor)
		}
		return s
	}
	low, high := 1e-9, 1e9
	for range 80 {
		if middle := math.Sqrt(low * high); scaled(middle).load(gpus) > load {
			low = middle
		} else {
			high = middle
		}
	}
	return scaled(high)
}

// asked is the time of memory slices that the pods ask for within the span.
func (t trace) asked() time.Duration {
	sum := time.Duration(0)
	for _, p := range t.pods {
		sum += time.Duration(size(p.profile)) * min(p.duration, t.span-p.arrival)
	}
	return sum
}

func (t trace) load(gpus int) float64 {
	return float64(t.asked()) / (float64(gpus*slicesOfGPU) * float64(t.span))
}

// read reads a trace: CSV whose first line names the columns arrival and duration, in seconds, and slices, 1 to 7. A pod
// asks for the smallest profile with that many compute slices. The errors name the line.
func read(in io.Reader, name string) (trace, error) {
	rows := csv.NewReader(in)
	header, err := rows.Read()
	if err != nil {
		return trace{}, fmt.Errorf("reading %s, line 1: %w; it must name the columns arrival, duration, slices", name, err)
	}
	columns := [3]int{}
	for i, column := range []string{"arrival", "duration", "slices"} {
		columns[i] = slices.IndexFunc(header, func(h string) bool { return strings.TrimSpace(h) == column })
		if columns[i] < 0 {
			return trace{}, fmt.Errorf("reading %s, line 1: there is no column %s; it must name the columns arrival, duration, slices", name, column)
		}
	}
	var t trace
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return trace{}, fmt.Errorf("reading %s: %w", name, err) // it names the line
		}
		p, err := podOf(row[columns[0]], row[columns[1]], row[columns[2]])
		if err != nil {
			line, _ := rows.FieldPos(0)
			return trace{}, fmt.Errorf("reading %s, line %d: %w", name, line, err)
		}
		t.pods = append(t.pods, p)
	}
	return t.begun(name)
}

// begun lets the trace begin with its first pod.
func (t trace) begun(name string) (trace, error) {
	slices.SortStableFunc(t.pods, func(a, b pod) int { return int(a.arrival - b.arrival) })
	if len(t.pods) < 2 || t.pods[0].arrival == t.pods[len(t.pods)-1].arrival {
		return trace{}, fmt.Errorf("reading %s: a trace needs pods that arrive at two times at least", name)
	}
	first := t.pods[0].arrival
	for i := range t.pods {
		t.pods[i].arrival -= first
	}
	t.span = t.pods[len(t.pods)-1].arrival
	return t, nil
}

func podOf(arrival, length, wanted string) (pod, error) {
	var values [3]float64
	for i, cell := range []string{arrival, length, wanted} {
		column := []string{"arrival", "duration", "slices"}[i]
		v, err := strconv.ParseFloat(strings.TrimSpace(cell), 64)
		if err != nil || math.IsNaN(v) || v < 0 || v > 1e9 {
			return pod{}, fmt.Errorf("%s is %q; it must be a number from 0 to 1e9", column, cell)
		}
		values[i] = v
	}
	profile := slices.IndexFunc(computeSlices(), func(n int) bool { return float64(n) >= values[2] })
	switch {
	case values[1] == 0:
		return pod{}, errors.New("duration is 0; it must be more")
	case profile < 0 || values[2] == 0:
		return pod{}, fmt.Errorf("slices is %q; it must be more than 0 and at most 7", wanted)
	}
	return pod{arrival: seconds(values[0]), duration: seconds(values[1]), profile: profile}, nil
}

func readFile(name string) (trace, error) {
	f, err := os.Open(name)
	if err != nil {
		return trace{}, fmt.Errorf("reading the trace: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	return read(f, name)
}

func TestTheGeneratorHasThePublishedStatistics(t *testing.T) {
	g := NewWithT(t)
	r := rand.New(rand.NewPCG(1, 1))
	var lengths, gaps []float64
	mean := 0.0
	for range 200_000 {
		lengths = append(lengths, duration(r.Float64()).Seconds())
		gaps = append(gaps, math.Pow(-math.Log(1-r.Float64()), 1/shape))
		mean += gaps[len(gaps)-1] / 200_000
	}
	slices.Sort(lengths)
	slices.Sort(gaps)
	for share, published := range map[float64]float64{0.5: 539, 0.9: 9153, 0.99: 75600} {
		g.Expect(lengths[int(share*200_000)]).To(BeNumerically("~", published, published/20))
	}
	g.Expect(mean / gaps[100_000]).To(BeNumerically("~", 1120.0/309, 0.15))
}

func TestATraceIsCompressedToALoad(t *testing.T) {
	for _, m := range mixes() {
		for _, load := range loads {
			made := generate(m, 2000, 16, load, 7)
			NewWithT(t).Expect(made.load(16)).To(BeNumerically("~", load, 0.01), m.name)
		}
	}
}

func TestATraceIsReadFromCSV(t *testing.T) {
	g := NewWithT(t)
	got, err := read(strings.NewReader("name, slices, arrival, duration\na,3,100,60\nb,0.5,40,7.5\nc,5,40,1\n"), "x.csv")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(got.pods).To(Equal([]pod{
		{arrival: 0, duration: 7500 * time.Millisecond, profile: 0},
		{arrival: 0, duration: time.Second, profile: 4},
		{arrival: time.Minute, duration: time.Minute, profile: 2},
	}))
	g.Expect(got.span).To(Equal(time.Minute))
}

func TestAWrongTraceNamesTheLine(t *testing.T) {
	for text, message := range map[string]string{
		"":                                        "line 1",
		"arrival,slices\n1,1\n":                   "line 1: there is no column duration",
		"arrival,duration,slices\n0,1,1\nx,1,1":   `line 3: arrival is "x"`,
		"arrival,duration,slices\n0,1,8\n":        `line 2: slices is "8"`,
		"arrival,duration,slices\n0,0,1\n":        "line 2: duration is 0",
		"arrival,duration,slices\n0,-1,1\n":       `line 2: duration is "-1"`,
		"arrival,duration,slices\n0,1\n":          "line 2",
		"arrival,duration,slices\n0,1,1\n0,2,1\n": "two times at least",
	} {
		_, err := read(strings.NewReader(text), "x.csv")
		NewWithT(t).Expect(err).To(MatchError(And(ContainSubstring("x.csv"), ContainSubstring(message))), text)
	}
}
