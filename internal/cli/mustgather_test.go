// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/clusterpolicy"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

func TestMustGather(t *testing.T) {
	cluster := env.Start(t, env.WithNVIDIA())
	populate(t, cluster.Client, newNode(t, "a", sim.A100))
	secretive(t, cluster.Client)
	bindRoles(t, cluster.Client, map[string][]string{"reader": {"gpu-sharing-view", "gpu-sharing-cli"}})
	// run returns the files, and what is printed.
	run := func(t *testing.T, user string, args ...string) (map[string]string, []byte, string, error) {
		t.Helper()
		var out strings.Builder
		to := filepath.Join(t.TempDir(), "a.tar.gz")
		p := &Program{Out: &out, Clock: clocktesting.NewFakeClock(now), Version: "v0.2.0"}
		err := p.Run(t.Context(), append(args, "must-gather", "--output", to, "--kubeconfig", kubeconfigOf(t, cluster.Config, user)))
		if err != nil {
			return nil, nil, out.String(), err
		}
		content, err := os.ReadFile(to)
		NewWithT(t).Expect(err).NotTo(HaveOccurred())
		return extracted(t, content), content, out.String(), nil
	}
	g := NewWithT(t)
	g.Eventually(func() string { _, _, out, _ := run(t, "reader"); return out }).WithTimeout(time.Minute).ShouldNot(ContainSubstring("GPUNode objects"), "the roles are bound")

	t.Run("with exactly the ready roles everything but logs", func(t *testing.T) {
		g := NewWithT(t)
		files, content, out, err := run(t, "reader")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(files).To(HaveLen(18), "%v", out)
		for name, has := range map[string]string{
			"doctor.yaml": "No controller is installed", "versions.yaml": "kubectl-gpusharing: v0.2.0", "gpusharingpolicies/research.yaml": "2g.10gb",
			"gpunodes/a.yaml": "uuid:", "nodes/a.yaml": "allocatable:", "nodes/b.yaml": "nvidia.com/gpu.present",
			"customresourcedefinitions/gpunodes.gpusharing.io.yaml": "storedVersions:", "customresourcedefinitions/gpusharingpolicies.gpusharing.io.yaml": "v1alpha1",
			"clusterpolicies/cluster-policy.yaml": "by-hand", "configmaps/default/by-hand.yaml": "timeSlicing", "configmaps/default/alone.yaml": "version: v1",
			"configmaps/gpu-sharing-operator/gpu-sharing-device-plugin.yaml": "slice-4", "deployments/gpu-sharing-operator/gpu-sharing-controller.yaml": "- --device-plugin-configmap=alone",
			"daemonsets/default/nvidia-device-plugin.yaml": "nvidia.com/gpu.deploy.device-plugin", "pods/gpu-sharing-operator/agent.yaml": "phase: Running",
			"events/gpu-sharing-operator.yaml": "BackOff", "unread.yaml": "get pods/log in namespace gpu-sharing-operator",
		} {
			g.Expect(files).To(HaveKeyWithValue(archiveFolder+"/"+name, ContainSubstring(has)), name)
		}
		for name, content := range files {
			g.Expect(content).NotTo(ContainSubstring(hidden), name)
		}
		var lacks []unread
		g.Expect(yaml.Unmarshal([]byte(files[archiveFolder+"/unread.yaml"]), &lacks)).To(Succeed())
		g.Expect(lacks).To(ConsistOf(And(HaveField("What", "logs in namespace gpu-sharing-operator"), HaveField("Grant", And(
			ContainSubstring("kubectl -n gpu-sharing-operator create role gpu-sharing-logs --verb=get --resource=pods/log"), ContainSubstring("create rolebinding")))),
			HaveField("What", "ConfigMap default/anothers")), "a tenant named that ConfigMap")
		g.Expect(out).To(And(ContainSubstring("Not in it: logs in namespace gpu-sharing-operator: "), ContainSubstring("create rolebinding gpu-sharing-logs")))
		_, again, _, err := run(t, "reader")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(bytes.Equal(again, content)).To(BeTrue(), "the same cluster and time make the same archive")
	})
	t.Run("logs for a user who may read them", func(t *testing.T) {
		g := NewWithT(t)
		files, _, _, err := run(t, "")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(files).To(HaveKeyWithValue(archiveFolder+"/logs/gpu-sharing-operator/agent/agent.log", "last 2000 lines of agent, previous false\n"))
		g.Expect(files).To(HaveKeyWithValue(archiveFolder+"/logs/gpu-sharing-operator/agent/agent.previous.log", "last 2000 lines of agent, previous true\n"))
		g.Expect(files[archiveFolder+"/unread.yaml"]).To(And(ContainSubstring("default/anothers"), Not(ContainSubstring("logs"))))
		for name := range files {
			g.Expect(name).NotTo(Or(ContainSubstring("proxy"), ContainSubstring("notebook")), "what is not the operator's may log anything")
		}
	})
	t.Run("only the nodes that are named", func(t *testing.T) {
		g := NewWithT(t)
		files, _, _, err := run(t, "", "--nodes", "b")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(files).To(And(HaveKey(archiveFolder+"/nodes/b.yaml"), Not(HaveKey(archiveFolder+"/nodes/a.yaml")), Not(HaveKey(archiveFolder+"/gpunodes/a.yaml")),
			Not(HaveKey(archiveFolder+"/pods/gpu-sharing-operator/agent.yaml")), HaveKey(archiveFolder+"/deployments/gpu-sharing-operator/gpu-sharing-controller.yaml")))
		_, _, _, err = run(t, "", "--nodes", "b,c")
		g.Expect(err).To(MatchError(ContainSubstring(`there is no node "c"`)))
	})
	t.Run("a user without rights gets an archive that says so", func(t *testing.T) {
		g := NewWithT(t)
		files, _, _, err := run(t, "nobody")
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(files).To(HaveLen(3))
		g.Expect(files).To(HaveKeyWithValue(archiveFolder+"/doctor.yaml", ContainSubstring("doctor could not read the cluster")))
		g.Expect(files).To(HaveKeyWithValue(archiveFolder+"/unread.yaml", And(ContainSubstring("list pods in all namespaces"), ContainSubstring("gpu-sharing-cli"))))
	})
	t.Run("no answer is an error", func(t *testing.T) {
		_, _, _, err := run(t, "", "--context", "another")
		NewWithT(t).Expect(err).To(HaveOccurred())
		_, _, _, err = run(t, "", "--output", t.TempDir())
		NewWithT(t).Expect(err).NotTo(HaveOccurred(), "the last --output counts")
	})
}

// secretive fills a cluster with what an archive has, and with a token in every field that it must not have. The
// kubelet of node a answers.
func secretive(t *testing.T, c client.Client) {
	t.Helper()
	g := NewWithT(t)
	annotations := map[string]string{
		"kubectl.kubernetes.io/last-applied-configuration": fmt.Sprintf(`{"spec":{"env":[{"value":%q}]}}`, hidden), "example.com/token": hidden,
	}
	meta := func(namespace, name string, labels map[string]string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels, Annotations: annotations}
	}
	container := corev1.Container{Name: "controller", Image: "example.invalid/x", Env: []corev1.EnvVar{{Name: "TOKEN", Value: hidden}}, Command: []string{hidden}}
	template := func(nodeSelector map[string]string, args ...string) corev1.PodTemplateSpec {
		container.Args = args
		return corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "x"}, Annotations: annotations},
			Spec:       corev1.PodSpec{NodeSelector: nodeSelector, Containers: []corev1.Container{container}},
		}
	}
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}
	clusterPolicy := object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy", map[string]any{})
	clusterPolicy.Object["spec"] = map[string]any{"devicePlugin": map[string]any{
		"config": map[string]any{"name": "by-hand"}, "env": []any{map[string]any{"name": "TOKEN", "value": hidden}}, "args": []any{hidden},
	}}
	clusterPolicy.SetAnnotations(annotations)
	var planned v1alpha1.GPUSharingPolicy
	g.Expect(yaml.Unmarshal([]byte(research), &planned)).To(Succeed())
	for _, o := range []client.Object{
		&corev1.Node{ObjectMeta: meta("", "b", map[string]string{cluster.LabelPresent: "true"})},
		&corev1.Pod{
			ObjectMeta: meta("gpu-sharing-operator", "notebook", map[string]string{nameLabel: "gpu-sharing-notebook"}),
			Spec:       corev1.PodSpec{NodeName: "a", Containers: []corev1.Container{container}},
			Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "controller", Image: "i", ImageID: "i"}}},
		},
		&corev1.Secret{ObjectMeta: meta("gpu-sharing-operator", "token", nil), StringData: map[string]string{"token": hidden}},
		&corev1.ConfigMap{ObjectMeta: meta("default", "by-hand", nil), Data: map[string]string{"any": "sharing: {timeSlicing: {}}"}},
		&corev1.ConfigMap{ObjectMeta: meta("default", "alone", nil), Data: map[string]string{"any": "version: v1"}},
		&corev1.ConfigMap{ObjectMeta: meta("default", "anothers", nil), Data: map[string]string{"any": hidden}},
		&appsv1.Deployment{
			ObjectMeta: meta("team", "mine", map[string]string{nameLabel: controllerName}),
			Spec:       appsv1.DeploymentSpec{Selector: selector, Template: template(nil, "--device-plugin-namespace=default", "--device-plugin-configmap=anothers")},
		},
		&corev1.ConfigMap{ObjectMeta: meta("gpu-sharing-operator", cluster.ConfigMapName, managedByUs), Data: map[string]string{"slice-4": "version: v1"}},
		&corev1.ConfigMap{ObjectMeta: meta("gpu-sharing-operator", "other", nil), Data: map[string]string{"token": hidden}},
		&appsv1.Deployment{
			ObjectMeta: meta("gpu-sharing-operator", controllerName, map[string]string{nameLabel: controllerName}),
			Spec:       appsv1.DeploymentSpec{Selector: selector, Template: template(nil, "--device-plugin-namespace=default", "--device-plugin-configmap=alone")},
		},
		&appsv1.Deployment{ObjectMeta: meta("gpu-sharing-operator", "other", nil), Spec: appsv1.DeploymentSpec{Selector: selector, Template: template(nil, hidden)}},
		&appsv1.DaemonSet{
			ObjectMeta: meta("default", "nvidia-device-plugin", nil),
			Spec:       appsv1.DaemonSetSpec{Selector: selector, Template: template(map[string]string{"nvidia.com/gpu.deploy.device-plugin": "true"}, hidden)},
		},
		&corev1.Event{
			ObjectMeta: meta("gpu-sharing-operator", "agent.1", nil), Reason: "BackOff", Message: "m",
			InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "gpu-sharing-operator", Name: "agent"},
		},
		&corev1.Event{
			ObjectMeta: meta("gpu-sharing-operator", "other.1", nil), Reason: "Started", Message: hidden,
			InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "gpu-sharing-operator", Name: "other"},
		},
		clusterPolicy, &planned,
	} {
		g.Expect(c.Create(t.Context(), o)).To(Succeed(), "%T %s", o, o.GetName())
	}
	written := client.RawPatch(types.MergePatchType, []byte(`{"data":{"slice-4":"version: v1"}}`))
	alone := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "alone"}}
	g.Expect(c.Patch(t.Context(), alone, written, client.FieldOwner(clusterpolicy.FieldManager))).To(Succeed())
	status := client.RawPatch(types.MergePatchType, []byte(`{"status":{"namespace":"default","state":"ready"}}`))
	g.Expect(c.Status().Patch(t.Context(), clusterPolicy, status)).To(Succeed())
	restarted := client.RawPatch(types.MergePatchType, []byte(`{"status":{"containerStatuses":[
		{"name":"agent","image":"i","imageID":"i","ready":true,"restartCount":1},{"name":"proxy","image":"i","imageID":"i","ready":true,"restartCount":1}]}}`))
	g.Expect(c.Status().Patch(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-sharing-operator", Name: "agent"}}, restarted)).To(Succeed())
	kubelet := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		_, _ = fmt.Fprintf(w, "last %s lines of %s, previous %t%s\n", q.Get("tailLines"), filepath.Base(r.URL.Path), q.Get("previous") == "true", q.Get("limitBytes"))
	}))
	t.Cleanup(kubelet.Close)
	host, port, err := net.SplitHostPort(kubelet.Listener.Addr().String())
	g.Expect(err).NotTo(HaveOccurred())
	number, err := strconv.Atoi(port)
	g.Expect(err).NotTo(HaveOccurred())
	n := &corev1.Node{}
	g.Expect(c.Get(t.Context(), client.ObjectKey{Name: "a"}, n)).To(Succeed())
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: host}, {Type: corev1.NodeExternalDNS, Address: hidden}}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(number)
	n.Status.Images = []corev1.ContainerImage{{Names: []string{hidden}}}
	g.Expect(c.Status().Update(t.Context(), n)).To(Succeed())
}

func extracted(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	g := NewWithT(t)
	plain, err := gzip.NewReader(bytes.NewReader(archive))
	g.Expect(err).NotTo(HaveOccurred())
	r, found, last := tar.NewReader(plain), map[string]string{}, ""
	for {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(header.Name > last).To(BeTrue(), "sorted: %s", header.Name)
		g.Expect(header.ModTime.Equal(now)).To(BeTrue())
		content, err := io.ReadAll(r)
		g.Expect(err).NotTo(HaveOccurred())
		found[header.Name], last = string(content), header.Name
	}
}

// TestTheEndOfALongLogIsKept: what went wrong last stands there.
func TestTheEndOfALongLogIsKept(t *testing.T) {
	for text, want := range map[string]string{
		"one\ntwo\n": "one\ntwo\n", "first\nsecond\nthird\n": "third\n", "no line is as long as this": "ong as this", "": "",
	} {
		for _, read := range []func(io.Reader) io.Reader{iotest.OneByteReader, iotest.DataErrReader} {
			got, err := lastOf(read(strings.NewReader(text)), 11)
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(string(got)).To(Equal(want))
		}
	}
	got, err := lastOf(iotest.TimeoutReader(strings.NewReader("x")), 11)
	NewWithT(t).Expect(err).To(MatchError(iotest.ErrTimeout))
	NewWithT(t).Expect(string(got)).To(Equal("x"), "what came before")
}

// TestWhatCameOfALogBeforeItWasCutOffIsKept: a kubelet that answers slowly, or not to the end, is one of which the log
// matters most.
func TestWhatCameOfALogBeforeItWasCutOffIsKept(t *testing.T) {
	g := NewWithT(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "first\nsecond\n")
		g.Expect(http.NewResponseController(w).Flush()).To(Succeed())
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(server.Close)
	pods, err := corev1client.NewForConfig(&rest.Config{Host: server.URL})
	g.Expect(err).NotTo(HaveOccurred())
	gathered := &gathering{pods: pods, files: files{most: mostGathered}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "agent-0"}}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "agent"}}
	g.Expect(gathered.logsOf(t.Context(), pod)).To(BeFalse())
	g.Expect(gathered.files.content).To(HaveKeyWithValue("logs/x/agent-0/agent.log", []byte("first\nsecond\n")))
	g.Expect(gathered.unread).To(ConsistOf(And(HaveField("What", "log of container agent of pod x/agent-0"),
		HaveField("Reason", ContainSubstring("logs/x/agent-0/agent.log has the 13 bytes that came before")))))
}

// TestNodesThatAreNotReadyComeFirst: an archive has so many nodes.
func TestNodesThatAreNotReadyComeFirst(t *testing.T) {
	g := NewWithT(t)
	names, remaining := firstNodes(map[string]bool{"a": true, "d": false, "b": true, "c": false}, 3)
	g.Expect(names).To(Equal([]string{"c", "d", "a"}))
	g.Expect(remaining).To(Equal(1))
	names, remaining = firstNodes(map[string]bool{"a": true}, 3)
	g.Expect(names).To(Equal([]string{"a"}))
	g.Expect(remaining).To(BeZero())
}

// TestAnArchiveIsBounded: what does not fit into it is left out, and the archive says so.
func TestAnArchiveIsBounded(t *testing.T) {
	g := NewWithT(t)
	gathered := &gathering{files: files{most: 10}}
	gathered.addText("a", []byte("12345678"))
	gathered.addText("b", []byte("12345678"))
	gathered.addText("c", []byte("12"))
	g.Expect(gathered.files.content).To(And(HaveLen(2), HaveKey("a"), HaveKey("c")))
	g.Expect(gathered.unread).To(ConsistOf(HaveField("What", "b")))
}

// TestTheOperatorsPodsComeFirst: pods of a tenant with its label have no room before, nor time of their logs; ConfigMaps with its label have none.
func TestTheOperatorsPodsComeFirst(t *testing.T) {
	g := NewWithT(t)
	labelled := func(namespace string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "agent", UID: types.UID(namespace), Labels: map[string]string{nameLabel: agentName}}}
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("ConfigMap"), meta.RESTScopeNamespace)
	mine := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "a-tenant", Name: "mine", Labels: map[string]string(managedByUs)}}
	c := fake.NewClientBuilder().WithRESTMapper(mapper).WithObjects(labelled("a-tenant"), labelled("gpu-sharing-operator"), mine).Build()
	gathered := &gathering{client: c, files: files{most: 200}, own: []string{"gpu-sharing-operator"}}
	g.Expect(gathered.workloads(t.Context(), nil)[0].GetNamespace()).To(Equal("gpu-sharing-operator"))
	g.Expect(gathered.files.content).To(And(HaveLen(1), HaveKey(ContainSubstring("/gpu-sharing-operator/"))))
	gathered.files.most = mostGathered
	gathered.configMaps(t.Context(), nil, nil)
	g.Expect(gathered.files.content).NotTo(HaveKey(ContainSubstring("mine")))
}

// TestTheArchiveSaysWhatItLacksAlsoIfItIsFull.
func TestTheArchiveSaysWhatItLacksAlsoIfItIsFull(t *testing.T) {
	g := NewWithT(t)
	gathered := &gathering{files: files{most: 10}}
	gathered.addText("a", []byte("1234567890"))
	gathered.addText("b", []byte("1"))
	g.Expect(gathered.addUnread()).To(Succeed())
	g.Expect(gathered.files.content).To(HaveKeyWithValue("unread.yaml", ContainSubstring("what: b")))
}

// TestAnArchiveReplacesNoFile, of which the rights, and what it has, are another's.
func TestAnArchiveReplacesNoFile(t *testing.T) {
	g := NewWithT(t)
	name := filepath.Join(t.TempDir(), "a.tar.gz")
	g.Expect(writeNew(name, []byte("first"))).To(Succeed())
	info, err := os.Stat(name)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(info.Mode().Perm()).To(Equal(os.FileMode(0o600)))
	g.Expect(writeNew(name, []byte("second"))).To(MatchError(os.ErrExist))
	g.Expect(os.ReadFile(name)).To(BeEquivalentTo("first"))
}
