// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package env_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	authenticationv1 "k8s.io/api/authentication/v1"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

// builder runs hack/kube/build.sh with an empty cache. A go of its own builds no Kubernetes program, since that takes
// minutes, but writes a file in its place.
type builder struct {
	script string
	env    []string
	cache  string
}

func newBuilder(t *testing.T) *builder {
	t.Helper()
	g := NewWithT(t)
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	program, err := exec.LookPath("go")
	g.Expect(err).NotTo(HaveOccurred())
	path, cache := t.TempDir(), t.TempDir()
	script := `#!/bin/bash
case "$*" in *k8s.io/kubernetes/cmd/*|*go.etcd.io/etcd/*)
	while [ "$1" != -o ]; do shift; done
	folder=$2
	for package in "${@:3}"; do
		name=${package##*/}
		[ "$package" = go.etcd.io/etcd/server/v3 ] && name=server
		printf '#!/bin/sh\necho built\n' >"$folder/$name" && chmod +x "$folder/$name"
	done
	exit ;;
esac
exec ` + program + ` "$@"
`
	g.Expect(os.WriteFile(filepath.Join(path, "go"), []byte(script), 0o700)).To(Succeed())
	b := &builder{script: filepath.Join(root, "hack", "kube", "build.sh"), cache: cache}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); name != "KUBEBUILDER_ASSETS" && !strings.Contains(strings.ToLower(name), "_proxy") {
			b.env = append(b.env, v)
		}
	}
	b.env = append(b.env, "PATH="+path+":"+os.Getenv("PATH"), "GPUSHARING_CACHE="+cache)
	return b
}

// run is what etcd, kube-apiserver and kubectl (or those asked for) of the folder that the script prints say, and its
// progress.
func (b *builder) run(t *testing.T, index string, programs ...string) (origin, progress string) {
	t.Helper()
	g := NewWithT(t)
	command := exec.CommandContext(t.Context(), b.script, programs...)
	command.Env = append(slices.Clone(b.env), "ENVTEST_INDEX="+index)
	var out, errs bytes.Buffer
	command.Stdout, command.Stderr = &out, &errs
	g.Expect(command.Run()).To(Succeed(), errs.String())
	if len(programs) == 0 {
		programs = []string{"etcd", "kube-apiserver", "kubectl"}
	}
	said := map[string]bool{}
	for _, name := range programs {
		answer, err := exec.CommandContext(t.Context(), filepath.Join(strings.TrimSpace(out.String()), name)).Output()
		g.Expect(err).NotTo(HaveOccurred(), name)
		said[strings.TrimSpace(string(answer))] = true
	}
	g.Expect(said).To(HaveLen(1), "all programs have one origin")
	for origin = range said {
		return origin, errs.String()
	}
	return "", ""
}

// index serves an index of setup-envtest with one archive, of Kubernetes' minor version that hack/kube/go.mod names.
func index(t *testing.T, hash string) *httptest.Server {
	t.Helper()
	g := NewWithT(t)
	archive := archive(t)
	if hash == "" {
		hash = fmt.Sprintf("%x", sha512.Sum512(archive))
	}
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Version}}", "k8s.io/kubernetes")
	root, err := env.Root()
	g.Expect(err).NotTo(HaveOccurred())
	list.Dir = filepath.Join(root, "hack", "kube")
	version, err := list.Output()
	g.Expect(err).NotTo(HaveOccurred())
	release := strings.Join(strings.Split(strings.TrimSpace(string(version)), ".")[:2], ".") + ".0"

	mux := http.NewServeMux()
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	mux.HandleFunc("/index.yaml", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "releases:\n  %[1]s:\n    envtest-%[1]s-%[2]s-%[3]s.tar.gz:\n      hash: %[4]s\n      selfLink: %[5]s/archive\n",
			release, runtime.GOOS, runtime.GOARCH, hash, server.URL)
	})
	mux.HandleFunc("/archive", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(archive) })
	return server
}

func archive(t *testing.T) []byte {
	t.Helper()
	g := NewWithT(t)
	var packed bytes.Buffer
	compressed := gzip.NewWriter(&packed)
	files := tar.NewWriter(compressed)
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		program := "#!/bin/sh\necho downloaded\n"
		g.Expect(files.WriteHeader(&tar.Header{Name: "controller-tools/envtest/" + name, Mode: 0o755, Size: int64(len(program))})).To(Succeed())
		_, err := files.Write([]byte(program))
		g.Expect(err).NotTo(HaveOccurred())
	}
	g.Expect(files.Close()).To(Succeed())
	g.Expect(compressed.Close()).To(Succeed())
	return packed.Bytes()
}

func TestKubernetesProgramsAreDownloadedOnce(t *testing.T) {
	g := NewWithT(t)
	b, server := newBuilder(t), index(t, "")
	origin, progress := b.run(t, server.URL+"/index.yaml")
	g.Expect(origin).To(Equal("downloaded"))
	g.Expect(progress).To(ContainSubstring("downloaded in"))

	server.Close()
	origin, progress = b.run(t, server.URL+"/index.yaml")
	g.Expect(origin).To(Equal("downloaded"), "the index is gone, the programs are there")
	g.Expect(progress).To(BeEmpty())

	origin, _ = b.run(t, server.URL+"/index.yaml", "kube-apiserver", "kubelet")
	g.Expect(origin).To(Equal("built"), "setup-envtest has no kubelet")
}

func TestKubernetesProgramsAreBuiltWhereNothingCanBeDownloaded(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = silent.Close() })
	gone := httptest.NewServer(nil)
	gone.Close()
	for name, address := range map[string]string{
		"no downloads wanted":          "none",
		"nothing listens":              gone.URL + "/index.yaml",
		"no such host":                 "http://index.invalid/index.yaml",
		"the index is silent":          "http://" + silent.Addr().String() + "/index.yaml",
		"the index does not exist":     index(t, "").URL + "/other.yaml",
		"an archive that was tampered": index(t, strings.Repeat("0", 128)).URL + "/index.yaml",
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			b := newBuilder(t)
			started := time.Now()
			origin, progress := b.run(t, address)
			g.Expect(origin).To(Equal("built"))
			g.Expect(strings.ToLower(progress)).NotTo(Or(ContainSubstring("error"), ContainSubstring("unable"), ContainSubstring("fail")))
			t.Logf("%s, from an empty cache", time.Since(started).Round(time.Second/10))
		})
	}
}

func TestKubernetesProgramsOfTheUserAreTaken(t *testing.T) {
	g := NewWithT(t)
	b, mine := newBuilder(t), t.TempDir()
	b.env = append(b.env, "KUBEBUILDER_ASSETS="+mine)
	origin, _ := b.run(t, "none")
	g.Expect(origin).To(Equal("built"), "an incomplete folder does not count")
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		g.Expect(os.WriteFile(filepath.Join(mine, name), []byte("#!/bin/sh\necho mine\n"), 0o700)).To(Succeed())
	}
	origin, _ = b.run(t, "none")
	g.Expect(origin).To(Equal("mine"))
}

func TestIdentityOfAPodOnANode(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t)
	c, err := cluster.ClientAs(t.Context(), env.Identity{
		Namespace: "somewhere", ServiceAccount: "agent", Pod: "agent-1", Node: "node-1",
	})
	g.Expect(err).NotTo(HaveOccurred())

	review := &authenticationv1.SelfSubjectReview{}
	g.Expect(c.Create(t.Context(), review)).To(Succeed())
	g.Expect(review.Status.UserInfo.Username).To(Equal("system:serviceaccount:somewhere:agent"))
	g.Expect(review.Status.UserInfo.Extra["authentication.kubernetes.io/node-name"]).
		To(HaveExactElements("node-1"), "the API server can tell one node's agent from another's")
}
