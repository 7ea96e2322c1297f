// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

const (
	// archiveFolder is the folder in the archive.
	archiveFolder = "gpu-sharing-must-gather"
	// mostGathered is how many bytes the files of an archive have together, before compression.
	mostGathered = 128 << 20
	// nodesGathered is how many nodes are gathered where --nodes names none: first those that are not ready.
	nodesGathered = 50
)

// unread is what an archive lacks.
type unread struct {
	What   string `json:"what"`
	Reason string `json:"reason"`
	// Needs is the right that is missing, and Grant how an administrator gives it; both are empty if none is.
	Needs string `json:"needs,omitempty"`
	Grant string `json:"grant,omitempty"`
}

// gathering collects the files of an archive.
type gathering struct {
	client client.Client
	pods   corev1client.PodsGetter

	files  files
	unread []unread
	nodes  []unstructured.Unstructured // all
	// names are the nodes of which objects are gathered.
	names []string
	own   []string // namespaces of the operator
}

// mustGather writes an archive for a bug report.
func (p *Program) mustGather(ctx context.Context, f *flags, _ []string) error {
	config, err := configOf(f)
	if err != nil {
		return err
	}
	c, err := clientOf(config)
	if err != nil {
		return err
	}
	pods, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	server, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", config.Host, err)
	}
	now := p.Clock.Now().UTC()
	g := &gathering{client: c, pods: pods, files: files{most: mostGathered}, unread: []unread{}}
	if err := g.gather(ctx, p, server, f.nodes); err != nil {
		return err
	}
	content, err := g.files.archive(archiveFolder, now)
	if err != nil {
		return err
	}
	to := cmp.Or(f.output, archiveFolder+"-"+now.Format("20060102T150405Z")+".tar.gz")
	if err := writeNew(to, content); err != nil {
		return fmt.Errorf("writing the archive: %w; name another file with --output", err)
	}
	return p.write(g.written(to, len(content), p.Width))
}

// writeNew writes a file that only the user can read. It is an error if there is one already: another may be able to
// read that.
func writeNew(name string, content []byte) (err error) {
	const forTheUserOnly = 0o600
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, forTheUserOnly)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	_, err = file.Write(content)
	return err
}

// gather reads what an archive has. Errors: the API server does not answer, or there is no such node.
func (g *gathering) gather(ctx context.Context, p *Program, server discovery.DiscoveryInterface, nodes []string) error {
	kubernetes, err := server.ServerVersion()
	if err != nil {
		return advise(fmt.Errorf("reading the version of the API server: %w", err))
	}
	is, err := p.examine(ctx, g.client, "", server.OpenAPIV3())
	found := diagnose(is)
	if status := apierrors.APIStatus(nil); err != nil {
		if !errors.As(err, &status) || apierrors.IsUnauthorized(err) {
			return advise(err)
		}
		found = []finding{{levelError, fmt.Sprintf("doctor could not read the cluster: %v", advise(err))}}
		g.missed("what doctor reads", err, "the ClusterRoles gpu-sharing-view and gpu-sharing-cli", "")
	}
	g.add("doctor.yaml", doctorsReport(found))
	g.add("versions.yaml", versionsOf(is, kubernetes.GitVersion))
	g.own = is.leader.namespaces
	if err := g.chooseNodes(ctx, is.snapshot, nodes); err != nil {
		return err
	}
	workloads := g.objects(ctx)
	g.events(ctx, workloads)
	g.logs(ctx, workloads)
	return g.addUnread()
}

// doctorsReport is what doctor prints, the worst first.
func doctorsReport(found []finding) []map[string]string {
	report := []map[string]string{}
	for _, f := range worstFirst(found) {
		report = append(report, map[string]string{"level": f.level, "finding": f.what})
	}
	return report
}

// versionsOf are the versions that an installation has. Those of agents, kubelets, device plugins and drivers are in
// pods, nodes and GPUNodes.
func versionsOf(is installation, kubernetes string) map[string]any {
	controllers := map[string]string{}
	for _, c := range is.controllers {
		controllers[c.name] = known(c.version)
	}
	return map[string]any{"kubectl-gpusharing": is.program, "kubernetes": kubernetes, "controllers": controllers, "gpuOperator": known(is.gpuOperator)}
}

// chooseNodes chooses the nodes of which objects are gathered: those that are named, or all with GPUs; of many first
// those that are not ready.
func (g *gathering) chooseNodes(ctx context.Context, s cluster.Snapshot, named []string) error {
	ready := map[string]bool{} // of the nodes with GPUs
	for _, r := range reports(s) {
		ready[r.Name] = r.Ready
	}
	g.nodes = g.list(ctx, kindOf("", "v1", "Node"), "")
	exists := map[string]bool{}
	for i := range g.nodes {
		name := g.nodes[i].GetName()
		if exists[name] = true; g.nodes[i].GetLabels()[cluster.LabelPresent] == cluster.LabelTrue && !ready[name] {
			ready[name] = false
		}
	}
	for _, name := range named {
		if len(g.nodes) > 0 && !exists[name] {
			return fmt.Errorf("--nodes: there is no node %q; `kubectl get nodes` lists them", name)
		}
	}
	if g.names = named; len(named) > 0 {
		return nil
	}
	names, remaining := firstNodes(ready, nodesGathered)
	if g.names = names; remaining > 0 {
		g.unread = append(g.unread, unread{
			What: count(remaining, "node") + " with GPUs", Reason: fmt.Sprintf("an archive has %d nodes, first those that are not ready; choose others with --nodes", nodesGathered),
		})
	}
	return nil
}

// firstNodes are at most so many nodes, first those that are not ready, then by name; left is how many others there
// are.
func firstNodes(ready map[string]bool, most int) (names []string, remaining int) {
	names = slices.SortedFunc(maps.Keys(ready), func(a, b string) int {
		switch {
		case ready[a] == ready[b]:
			return strings.Compare(a, b)
		case ready[a]:
			return 1
		}
		return -1
	})
	if remaining = len(names) - most; remaining > 0 {
		return names[:most], remaining
	}
	return names, 0
}

// add adds a file with a value as YAML.
func (g *gathering) add(name string, value any) {
	content, err := yaml.Marshal(value)
	if err != nil {
		g.unread = append(g.unread, unread{What: name, Reason: err.Error()})
		return
	}
	g.addText(name, content)
}

// addUnread adds the file of what the archive lacks, which it has also if it is full.
func (g *gathering) addUnread() error {
	content, err := yaml.Marshal(g.unread)
	if err != nil {
		return fmt.Errorf("listing what the archive lacks: %w", err)
	}
	g.files.most += len(content)
	g.addText("unread.yaml", content)
	return nil
}

func (g *gathering) addText(name string, content []byte) {
	if !g.files.add(name, content) {
		g.unread = append(g.unread, unread{
			What: name, Reason: fmt.Sprintf("the archive would have more than %d MiB; choose fewer nodes with --nodes", mostGathered>>20),
		})
	}
}

// missed records what could not be read. It names the right if that is the reason.
func (g *gathering) missed(what string, err error, needs, grant string) {
	lacks := unread{What: what, Reason: err.Error()}
	if apierrors.IsForbidden(err) {
		lacks.Needs, lacks.Grant = needs, cmp.Or(grant, "an administrator binds the ClusterRoles gpu-sharing-view and gpu-sharing-cli to you")
	}
	if !slices.Contains(g.unread, lacks) {
		g.unread = append(g.unread, lacks)
	}
}

// written is what must-gather prints.
func (g *gathering) written(file string, size, width int) string {
	const kib = 1024
	shown := text{width: width}
	shown.row(0, "", fmt.Sprintf("Wrote %s (%s, %d KiB).", file, count(len(g.files.content), "file"), (size+kib-1)/kib))
	shown.row(0, "", "It has no Secrets and no values of environment variables. Names, messages and logs are in it as they are: read them before you publish it.")
	var different []unread
	of := map[unread][]string{} // what is lacking for the same reason
	for _, lacks := range g.unread {
		why := lacks
		if why.What = ""; of[why] == nil {
			different = append(different, why)
		}
		of[why] = append(of[why], lacks.What)
	}
	for _, lacks := range different {
		shown.row(0, "", fmt.Sprintf("Not in it: %s: %s", format.Few(of[lacks], mostNamed), lacks.Reason))
		if lacks.Needs != "" {
			shown.row(2, "", fmt.Sprintf("It needs %s: %s", lacks.Needs, lacks.Grant))
		}
	}
	return shown.String()
}

// files are those of an archive, by their path in it. They have at most so many bytes together.
type files struct {
	content map[string][]byte
	size    int
	most    int
}

// add adds a file. It reports whether there was room for it.
func (f *files) add(name string, content []byte) bool {
	if f.size+len(content) > f.most {
		return false
	}
	if f.content == nil {
		f.content = map[string][]byte{}
	}
	f.size += len(content) - len(f.content[name])
	f.content[name] = content
	return true
}

// archive is a tar.gz with the files in a folder, sorted by name: the same files and time make the same bytes.
func (f *files) archive(folder string, at time.Time) ([]byte, error) {
	var buffer bytes.Buffer
	compressed := gzip.NewWriter(&buffer)
	w := tar.NewWriter(compressed)
	for _, name := range slices.Sorted(maps.Keys(f.content)) {
		content := f.content[name]
		header := &tar.Header{Name: path.Join(folder, name), Mode: 0o644, Size: int64(len(content)), ModTime: at, Format: tar.FormatPAX}
		if err := w.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("writing %s into the archive: %w", name, err)
		}
		if _, err := w.Write(content); err != nil {
			return nil, fmt.Errorf("writing %s into the archive: %w", name, err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("writing the archive: %w", err)
	}
	if err := compressed.Close(); err != nil {
		return nil, fmt.Errorf("compressing the archive: %w", err)
	}
	return buffer.Bytes(), nil
}
