// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/go-logr/logr"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// The environment of the measurement: SCALE=100,1000,5000 are the numbers of nodes, each with a cluster of its own;
// SCALE_STEADY=60s is how long nothing changes.
const (
	scaleSizes  = "SCALE"
	scaleSteady = "SCALE_STEADY"
)

// gpusPerNode is how many GPUs each node has.
const gpusPerNode = 8

// The published bounds of the controller; resident memory and the share of a core up to 1,000 nodes. The other figures
// hang on the machine, and are printed only.
const (
	specWritesBound   = 1 // per changed node
	statusWritesBound = 2 // of a GPUNode: by the agent, that it has seen the spec and its key, and by the controller, that it is verified
	residentAt1000    = 128 << 20
	residentPerNode   = 60 << 10
	steadyShareBound  = 0.01
)

// TestScale changes the replicas of clusters of many nodes, then of one node among them, and then leaves them alone.
// API server and controller are the real ones, the controller with the rights that its manifests give it and in a
// process of its own, so that its costs are its own. Beside it stand the API calls that a person would make to change
// the replicas of all nodes by hand: the floor.
func TestScale(t *testing.T) {
	sizes := os.Getenv(scaleSizes)
	if sizes == "" {
		t.Skip("set " + scaleSizes + "=100,1000,5000, or make bench")
	}
	steady := 60 * time.Second
	if s := os.Getenv(scaleSteady); s != "" {
		var err error
		steady, err = time.ParseDuration(s)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
	}
	log.SetLogger(logr.Discard())
	program := built(t, "controller")
	var all []scaleFigures
	for size := range strings.SplitSeq(sizes, ",") {
		n, err := strconv.Atoi(size)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		t.Run(size, func(t *testing.T) {
			f := measureScale(t, program, n, steady)
			all = append(all, f)
			f.check(t)
		})
	}
	printScale(all)
}

// scaleFigures are what a cluster of some size cost.
type scaleFigures struct {
	nodes               int
	all, one, quiet     cost
	floor               cost
	resident, atMost    int64 // bytes
	residentBefore      int64 // before there was a node
	size                int   // of a GPUNode, in bytes of JSON
	quietFor            time.Duration
	firstPolicy, coming time.Duration
	status              time.Duration // what kubectl gpusharing status takes
	statusComputed      time.Duration // its CPU
	statusLines         int
}

// cost is what a change cost.
type cost struct {
	wall, cpu time.Duration // cpu is the controller's
	server    time.Duration // CPU of the API server
	writes    map[string]int
}

// per is how many writes of a kind came on a node.
func (c cost) per(nodes int, kinds ...string) float64 {
	sum := 0
	for _, kind := range kinds {
		sum += c.writes[kind]
	}
	return float64(sum) / float64(nodes)
}

// total is how many writes there were but for leases, which the controller renews to lead.
func (c cost) total() int {
	sum := 0
	for kind, n := range c.writes {
		if kind != kindLease {
			sum += n
		}
	}
	return sum
}

func (f scaleFigures) check(t *testing.T) {
	t.Helper()
	g := NewWithT(t)
	g.Expect(f.all.per(f.nodes, kindSpec)).To(BeNumerically("<=", specWritesBound*1.05), "GPUNode specs written for each changed node")
	g.Expect(f.all.per(f.nodes, kindRecord)).To(BeNumerically("<=", 0.05), "annotations of GPUNodes")
	g.Expect(f.all.per(f.nodes, kindStatus)).To(BeNumerically("<=", statusWritesBound*1.05), "statuses of each GPUNode")
	g.Expect(f.all.per(f.nodes, kindNode)).To(BeNumerically("<=", 1.05), "patches of each Node")
	g.Expect(f.quiet.total()-f.quiet.writes[kindKubelet]).To(BeZero(), "writes while nothing changes: %v", f.quiet.writes)
	if f.nodes <= 1000 {
		g.Expect(f.quiet.cpu.Seconds()/f.quietFor.Seconds()).To(BeNumerically("<", steadyShareBound*slowdown), "share of a core while nothing changes")
		g.Expect(f.resident).To(BeNumerically("<=", residentAt1000), "resident memory")
		g.Expect(f.statusLines).To(BeNumerically("<=", 24), "kubectl gpusharing status fits on a screen")
	}
	g.Expect((f.resident-f.residentBefore)/int64(f.nodes)).To(BeNumerically("<=", residentPerNode+residentAt1000/4/f.nodes), "resident memory for each node")
}

func printScale(all []scaleFigures) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', 0)
	line := func(name string, cell func(f scaleFigures) string) {
		cells := []string{name}
		for _, f := range all {
			cells = append(cells, cell(f))
		}
		_, _ = fmt.Fprintf(w, "| %s\t|\n", strings.Join(cells, "\t| "))
	}
	line("", func(f scaleFigures) string { return fmt.Sprintf("%d nodes", f.nodes) })
	line("---", func(scaleFigures) string { return "---" })
	line("floor: a label for each node and a key, one after the other", func(f scaleFigures) string { return seconds(f.floor.wall) })
	line("replicas of all nodes: until all are Ready", func(f scaleFigures) string { return seconds(f.all.wall) })
	line("… ratio to the floor", func(f scaleFigures) string { return fmt.Sprintf("%.2f", f.all.wall.Seconds()/f.floor.wall.Seconds()) })
	line("… writes for each node; the floor's is 1", func(f scaleFigures) string { return fmt.Sprintf("%.2f", f.all.per(f.nodes, f.all.kinds()...)) })
	for _, kind := range kindsOf(all) {
		line("… "+kind, func(f scaleFigures) string { return fmt.Sprintf("%.2f", f.all.per(f.nodes, kind)) })
	}
	line("… CPU of the controller", func(f scaleFigures) string { return seconds(f.all.cpu) })
	line("… CPU of the controller for each node", func(f scaleFigures) string {
		return (f.all.cpu / time.Duration(f.nodes)).Round(time.Microsecond).String()
	})
	line("… CPU of the API server for each node; of the floor", func(f scaleFigures) string {
		each := func(c cost) time.Duration { return (c.server / time.Duration(f.nodes)).Round(100 * time.Microsecond) }
		return fmt.Sprintf("%s; %s", each(f.all), each(f.floor))
	})
	line("size of a GPUNode", func(f scaleFigures) string { return fmt.Sprintf("%.1f KB", float64(f.size)/1000) })
	line("one node among them: until it is Ready", func(f scaleFigures) string { return seconds(f.one.wall) })
	line("… writes", func(f scaleFigures) string { return strconv.Itoa(f.one.total()) })
	line("… CPU of the controller", func(f scaleFigures) string { return f.one.cpu.Round(time.Millisecond).String() })
	line("nothing changes: writes but for the lease", func(f scaleFigures) string { return strconv.Itoa(f.quiet.total() - f.quiet.writes[kindKubelet]) })
	line("… share of a core", func(f scaleFigures) string {
		return fmt.Sprintf("%.2f %%", 100*f.quiet.cpu.Seconds()/f.quietFor.Seconds())
	})
	line("resident memory", func(f scaleFigures) string { return mebibytes(f.resident) })
	line("… at most", func(f scaleFigures) string { return mebibytes(f.atMost) })
	line("… more than with no node, for each node", func(f scaleFigures) string {
		return fmt.Sprintf("%d KiB", (f.resident-f.residentBefore)/int64(f.nodes)>>10)
	})
	line("kubectl gpusharing status", func(f scaleFigures) string {
		return fmt.Sprintf("%s, CPU %s, %d lines", shown(f.status), shown(f.statusComputed), f.statusLines)
	})
	for _, f := range all {
		ratio, share := f.all.wall.Seconds()/f.floor.wall.Seconds(), f.quiet.cpu.Seconds()/f.quietFor.Seconds()
		writes, one := f.all.per(f.nodes, f.all.kinds()...), f.one.cpu.Seconds()/max(all[0].one.cpu.Seconds(), 0.01)
		fmt.Printf("%d nodes: %.2f writes for each (%s), %.2f times the floor (%s), one node's CPU %.1f times that at %d nodes (%s), "+
			"idle %.2f %% of a core (%s)\n", f.nodes, writes, verdict(writes, writesAim, "6"), ratio, verdict(ratio, floorAim, "7"),
			one, all[0].nodes, verdict(one, oneOfManyAim, "3"), 100*share, verdict(share, idleShareAim, "0.3 %"))
	}
	fmt.Printf("\n%d GPUs on each node; %d cores, load %s; etcd does not wait for the disk; kubelets publish at once\n", gpusPerNode, runtime.NumCPU(), load())
	_ = w.Flush()
}

func (c cost) kinds() []string {
	var kinds []string
	for kind := range c.writes {
		if kind != kindLease && kind != kindKubelet {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return kinds
}

// kindsOf are the kinds of writes that a change of all nodes took, most first.
func kindsOf(all []scaleFigures) []string {
	if len(all) == 0 {
		return nil
	}
	last := all[len(all)-1].all
	kinds := last.kinds()
	slices.SortStableFunc(kinds, func(a, b string) int { return cmp.Compare(last.writes[b], last.writes[a]) })
	return kinds
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }

func mebibytes(n int64) string { return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20)) }

// load is the machine's load average as the measurement ends.
func load() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(data))[:3], " ")
}
