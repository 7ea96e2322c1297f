// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

func TestNobodyIsGivenEverything(t *testing.T) {
	for _, o := range newHelm(t).render(t, everything()...) {
		switch o.GetKind() {
		case "ClusterRole", "Role":
			role := as[rbacv1.ClusterRole](t, o)
			for _, rule := range role.Rules {
				granted := slices.Concat(rule.APIGroups, rule.Resources, rule.Verbs, rule.NonResourceURLs)
				NewWithT(t).Expect(granted).NotTo(ContainElement("*"), "a rule of "+name(o))
				NewWithT(t).Expect(rule.Verbs).NotTo(ContainElements(BeElementOf("bind", "escalate", "impersonate")), "a rule of "+name(o))
				NewWithT(t).Expect(rule.Resources).NotTo(ContainElement("secrets"), "a rule of "+name(o))
			}
		case "ClusterRoleBinding", "RoleBinding":
			NewWithT(t).Expect(as[rbacv1.ClusterRoleBinding](t, o).RoleRef.Name).To(HavePrefix("gpu-sharing-"), name(o)+" binds a role of ours")
		}
	}
}

// TestOnlyOnRequestTheControllerWritesForAutoscalers: no other role has a right to write them.
func TestOnlyOnRequestTheControllerWritesForAutoscalers(t *testing.T) {
	h := newHelm(t)
	writes := func(values ...string) []string {
		var roles []string
		for _, o := range h.render(t, values...) {
			if o.GetKind() != "ClusterRole" && o.GetKind() != "Role" {
				continue
			}
			for _, rule := range as[rbacv1.ClusterRole](t, o).Rules {
				ofAutoscalers := slices.ContainsFunc(rule.APIGroups, func(group string) bool {
					return slices.Contains([]string{"karpenter.sh", "cluster.x-k8s.io", "machine.openshift.io"}, group)
				})
				reads := !slices.ContainsFunc(rule.Verbs, func(verb string) bool { return verb != "get" && verb != "list" && verb != "watch" })
				if ofAutoscalers && !reads && !slices.Contains(roles, o.GetName()) {
					roles = append(roles, o.GetName())
				}
			}
		}
		return roles
	}
	g := NewWithT(t)
	g.Expect(writes()).To(BeEmpty())
	g.Expect(writes("autoscaling.manage=true")).To(Equal([]string{"gpu-sharing-controller-autoscaling"}))
	binding := as[rbacv1.ClusterRoleBinding](t, find(t, h.render(t, "autoscaling.manage=true"), "ClusterRoleBinding gpu-sharing-controller-autoscaling"))
	g.Expect(binding.Subjects).To(HaveLen(1))
	g.Expect(binding.Subjects[0].Name).To(Equal("gpu-sharing-controller"))
}

func TestPodsSeeNoMoreOfTheNodeThanTheyMust(t *testing.T) {
	h := newHelm(t)
	tests := map[string]struct {
		values []string
		args   []string // by which the driver is found
	}{
		"with a driver that is found": {args: []string{}},
		"with a driver on the host":   {values: []string{"driver.root=/"}, args: []string{"--driver-root=/"}},
		"with a driver further down":  {values: []string{"driver.root=/opt/nvidia"}, args: []string{"--driver-root=/opt/nvidia"}},
	}
	for title, tc := range tests {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			objects := h.render(t, tc.values...)
			agent := as[appsv1.DaemonSet](t, find(t, objects, "DaemonSet gpu-sharing-agent")).Spec.Template.Spec
			g.Expect(folders(agent)).To(ConsistOf("/", "/run/nvidia/mps", "/var/lib/kubelet/pod-resources", "/var/run/cdi"))
			g.Expect(writable(agent)).To(ConsistOf("run", "mps-root", "cdi"))
			mps := as[appsv1.DaemonSet](t, find(t, objects, "DaemonSet gpu-sharing-mps")).Spec.Template.Spec
			g.Expect(folders(mps)).To(ConsistOf("/", "/run/nvidia/mps", "/run/nvidia/mps/shm"))
			g.Expect(writable(mps)).To(ConsistOf("run", "mps-root", "mps-shm", "tmp"))
			for _, pod := range []corev1.PodSpec{agent, mps} {
				g.Expect(pod.Containers[0].Args).To(ContainElements("--host-root=/host", "--container-root=/"))
				g.Expect(withPrefix(pod.Containers[0].Args, "--driver-root=")).To(Equal(tc.args))
			}
			for _, pod := range []corev1.PodSpec{agent, mps} {
				g.Expect(pod.HostNetwork || pod.HostIPC).To(BeFalse())
				g.Expect(pod.Containers[0].SecurityContext.ReadOnlyRootFilesystem).To(HaveValue(BeTrue()))
			}
			controller := as[appsv1.Deployment](t, find(t, objects, "Deployment gpu-sharing-controller")).Spec.Template.Spec
			g.Expect(controller.Volumes).To(BeEmpty())
		})
	}
}

func folders(pod corev1.PodSpec) []string {
	var all []string
	for _, volume := range pod.Volumes {
		if volume.HostPath != nil {
			all = append(all, volume.HostPath.Path)
		}
	}
	return all
}

func withPrefix(args []string, prefix string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return !strings.HasPrefix(arg, prefix) })
}

func writable(pod corev1.PodSpec) []string {
	var all []string
	for _, mount := range pod.Containers[0].VolumeMounts {
		if !mount.ReadOnly {
			all = append(all, mount.Name)
		}
	}
	return all
}

func TestMPSClientsOutliveUpgradeAndUninstall(t *testing.T) {
	g := NewWithT(t)
	h := newHelm(t)
	objects := h.render(t, "openshift.enabled=true")
	mps := as[appsv1.DaemonSet](t, find(t, objects, "DaemonSet gpu-sharing-mps"))
	g.Expect(mps.Spec.UpdateStrategy.Type).To(Equal(appsv1.OnDeleteDaemonSetStrategyType))
	g.Expect(mps.Spec.Template.Spec.Tolerations).To(ConsistOf(corev1.Toleration{Operator: corev1.TolerationOpExists}),
		"no taint evicts it")
	for _, needed := range []string{
		"DaemonSet gpu-sharing-mps", "ServiceAccount gpu-sharing-mps", "SecurityContextConstraints gpu-sharing-node",
		"Role gpu-sharing-node", "RoleBinding gpu-sharing-node",
		"ValidatingAdmissionPolicy gpu-sharing-mps-nodes", "ValidatingAdmissionPolicyBinding gpu-sharing-mps-nodes",
		"CustomResourceDefinition gpunodes.gpusharing.io", "CustomResourceDefinition gpusharingpolicies.gpusharing.io",
	} {
		g.Expect(find(t, objects, needed).GetAnnotations()).To(HaveKeyWithValue("helm.sh/resource-policy", "keep"), needed)
	}
}

func TestImages(t *testing.T) {
	h := newHelm(t)
	digest := "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	tests := map[string]struct {
		values []string
		image  string
	}{
		"by the version of the chart": {image: "ghcr.io/gpusharing/gpu-sharing-agent:0.1.0"},
		"by tag":                      {values: []string{"images.agent.repository=mirror:5000/agent", "images.agent.tag=dev"}, image: "mirror:5000/agent:dev"},
		"by digest, whatever the tag": {values: []string{"images.agent.tag=dev", "images.agent.digest=" + digest}, image: "ghcr.io/gpusharing/gpu-sharing-agent@" + digest},
	}
	for title, tc := range tests {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			objects := h.render(t, append(tc.values, "images.pullSecrets[0].name=mirror")...)
			for _, daemonSet := range []string{"DaemonSet gpu-sharing-agent", "DaemonSet gpu-sharing-agent-dra", "DaemonSet gpu-sharing-mps"} {
				pod := as[appsv1.DaemonSet](t, find(t, objects, daemonSet)).Spec.Template.Spec
				g.Expect(pod.Containers[0].Image).To(Equal(tc.image))
				g.Expect(pod.ImagePullSecrets).To(ConsistOf(corev1.LocalObjectReference{Name: "mirror"}))
			}
		})
	}
}

// shipped is the path of a program that ships. make test has built them all.
func shipped(tb testing.TB, program string) string {
	tb.Helper()
	folder := os.Getenv("GPUSHARING_PROGRAMS")
	if folder == "" {
		folder = strings.TrimSpace(run(tb, exec.CommandContext(tb.Context(), path(tb, "hack/shipped.sh"))))
	}
	file := filepath.Join(folder, program)
	if _, err := os.Stat(file); err != nil { // go test keeps no result of another program
		tb.Fatal(err)
	}
	return file
}

func TestPrograms(t *testing.T) {
	t.Run("have the flags that their pods give them", haveTheFlagsOfTheirPods)
	t.Run("print their version and commit", func(t *testing.T) {
		version := read(t, "config/helm/Chart.yaml")[0].Object["appVersion"]
		for program, name := range map[string]string{
			"controller": "gpu-sharing-controller", "agent": "gpu-sharing-agent", "kubectl-gpusharing": "kubectl-gpusharing",
		} {
			out, err := output(exec.CommandContext(t.Context(), shipped(t, program), "--version"))
			NewWithT(t).Expect(err).NotTo(HaveOccurred())
			NewWithT(t).Expect(out).To(Equal(fmt.Sprintf("%s v%s (commit abcdef)\n", name, version)))
		}
	})
}

// A flag that a program does not have would stop it at its first start.
func haveTheFlagsOfTheirPods(t *testing.T) {
	t.Helper()
	g := NewWithT(t)

	h := newHelm(t)
	pods := h.render(t, everything()...)
	pods = append(pods, h.render(t, "logLevel=2", "metrics.enabled=true", "metrics.sampling.interval=60s")...)
	pods = append(pods, read(t, "config/operands/deployment.yaml")...)
	programs := map[string]string{"controller": "controller", "check": "controller", "operands": "controller", "agent": "agent", "mps": "agent", "prepare": "agent"}
	files := map[string]string{"controller": shipped(t, "controller"), "agent": shipped(t, "agent")}
	started := map[string]bool{}
	for _, o := range pods {
		if !slices.Contains([]string{"Deployment", "DaemonSet", "Pod"}, o.GetKind()) {
			continue
		}
		pod := podOf(t, o).Spec
		for _, container := range append(pod.InitContainers, pod.Containers...) {
			// Flags are parsed in their order, so the help is printed only if all before are known.
			_, err := output(exec.CommandContext(t.Context(), files[programs[container.Name]], append(container.Args, "--help")...))
			g.Expect(err).NotTo(HaveOccurred(), name(o))
			started[container.Name] = true
		}
	}
	g.Expect(started).To(HaveLen(len(programs)))
}
