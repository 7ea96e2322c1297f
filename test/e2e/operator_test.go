// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/image"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/node"
)

// operatorNamespace is where the README installs the operator.
const operatorNamespace = "gpu-sharing-operator"

// agentProgram is the agent in its image.
const agentProgram = "/usr/bin/gpu-sharing-agent"

// operatorImages are ours, of the programs in a folder, as the Dockerfile makes them: the controller static and alone,
// the agent with the C library.
func operatorImages(ctx context.Context, programs string) []image.Image {
	controller := image.Image{
		Name: controllerImage, Entrypoint: []string{"/controller"}, User: "65532:65532",
		Files: map[string]string{"/controller": filepath.Join(programs, "controller")},
	}
	agent, err := image.Image{
		Name: agentImage, Entrypoint: []string{agentProgram},
		Env:   []string{"PATH=/usr/bin:/bin"},
		Files: map[string]string{agentProgram: filepath.Join(programs, "agent")},
	}.WithLibrariesOf(ctx, filepath.Join(programs, "agent"))
	Expect(err).NotTo(HaveOccurred())
	return []image.Image{controller, agent}
}

// helm runs Helm as an administrator, in this checkout.
func helm(ctx context.Context, args ...string) {
	GinkgoHelper()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "helm"), args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "KUBECONFIG="+node.AdminConfig, "HOME=/tmp")
	out, err := cmd.CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "helm %s:\n%s", strings.Join(args, " "), out)
}

// documentedInstall is how the README says that the operator is installed: the arguments of helm. The registry is this
// machine's, which has no TLS.
func documentedInstall() []string {
	GinkgoHelper()
	raw, err := os.ReadFile(filepath.Join(root, "README.md"))
	Expect(err).NotTo(HaveOccurred())
	commands := regexp.MustCompile(`(?m)^helm (install .*)$`).FindAllSubmatch(raw, -1)
	Expect(commands).To(HaveLen(1), "the README has one command that installs the operator")
	command := os.Expand(string(commands[0][1]), func(name string) string {
		Expect(name).To(Equal("REGISTRY"))
		return registryAddress + registryFolder
	})
	return append(strings.Fields(command), "--plain-http")
}

// installOperator installs the operator as the README says, word for word, and waits until its pods are Ready.
func installOperator(ctx context.Context) {
	GinkgoHelper()
	helm(ctx, documentedInstall()...)
	Eventually(func() ([]string, error) { return notReady(ctx, operatorNamespace) }).WithContext(ctx).Should(BeEmpty())
}

// upgradeOperator upgrades the operator to the version in the registry, with values as for helm --set.
func upgradeOperator(ctx context.Context, values ...string) {
	GinkgoHelper()
	args := []string{"upgrade", release, chartReference, "--plain-http", "--namespace", operatorNamespace}
	for _, value := range values {
		args = append(args, "--set", value)
	}
	helm(ctx, args...)
}

// share applies a policy for all GPU nodes; sharing is its spec.sharing as YAML.
func share(ctx context.Context, sharing string) {
	GinkgoHelper()
	apply(ctx, "shared", "{sharing: "+sharing+"}")
}

// apply applies a policy for all nodes unless spec, which is YAML, selects some.
func apply(ctx context.Context, name, spec string) {
	GinkgoHelper()
	parsed := v1alpha1.GPUSharingPolicySpec{}
	Expect(yaml.UnmarshalStrict([]byte(spec), &parsed)).To(Succeed())
	applySpec(ctx, name, parsed)
}

func applySpec(ctx context.Context, name string, spec v1alpha1.GPUSharingPolicySpec) {
	GinkgoHelper()
	if spec.NodeSelector == nil {
		spec.NodeSelector = &v1alpha1.NodeSelector{} // the machine has one node
	}
	p := &v1alpha1.GPUSharingPolicy{Spec: spec}
	p.Name = name
	now := &v1alpha1.GPUSharingPolicy{}
	err := kube.Get(ctx, client.ObjectKeyFromObject(p), now)
	Expect(client.IgnoreNotFound(err)).To(Succeed())
	if err != nil {
		Expect(kube.Create(ctx, p)).To(Succeed())
		return
	}
	before := now.DeepCopy()
	now.Spec = p.Spec
	Expect(kube.Patch(ctx, now, client.MergeFrom(before))).To(Succeed())
}

// expectReady waits until a policy says of its present generation that it is Ready.
func expectReady(ctx context.Context, name string) {
	GinkgoHelper()
	Eventually(func() error { return ready(ctx, name) }).WithContext(ctx).Should(Succeed())
}

func ready(ctx context.Context, name string) error {
	p := &v1alpha1.GPUSharingPolicy{}
	if err := kube.Get(ctx, client.ObjectKey{Name: name}, p); err != nil {
		return err
	}
	c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionReady)
	if c == nil || c.ObservedGeneration != p.Generation || c.Status != "True" {
		return fmt.Errorf("generation %d of policy %s is not Ready: %s", p.Generation, name, explain(ctx, p))
	}
	return nil
}

// explain is all that the API says about why a policy is not Ready.
func explain(ctx context.Context, p *v1alpha1.GPUSharingPolicy) string {
	var b strings.Builder
	status, _ := yaml.Marshal(p.Status) // plain data
	fmt.Fprintf(&b, "\n%s", status)
	n := &v1alpha1.GPUNode{}
	if err := kube.Get(ctx, client.ObjectKey{Name: nodeName}, n); err == nil {
		n.ManagedFields = nil
		gpunode, _ := yaml.Marshal(n) // plain data
		fmt.Fprintf(&b, "\n%s", gpunode)
	}
	return b.String()
}

// unshare ends users' pods, deletes the policies and waits until the node is restored.
func unshare(ctx context.Context, want map[string]int64) {
	GinkgoHelper()
	stopPods(ctx)
	Expect(kube.DeleteAllOf(ctx, &v1alpha1.GPUSharingPolicy{})).To(Succeed())
	expectAllocatable(ctx, want)
}

// edits is how often replicas are changed in a row, without a restart of anything.
const edits = 30

// timed runs something and notes how long it took.
func timed(what string, do func()) {
	began := time.Now()
	do()
	AddReportEntry(what, time.Since(began).Round(10*time.Millisecond).String())
}
