// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/gpu/sim"
)

// The errors name roles of config/rbac/users.yaml. With exactly these roles each command works.
func TestUsersNeedTheRolesThatErrorsNameAndNoOthers(t *testing.T) {
	g := NewWithT(t)
	cluster := env.Start(t, env.WithNVIDIA())
	populate(t, cluster.Client, newNode(t, "a", sim.A100))
	g.Expect(cluster.Client.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "plugin"}})).To(Succeed())
	const view, edit, cli = "gpu-sharing-view", "gpu-sharing-edit", "gpu-sharing-cli"
	bindRoles(t, cluster.Client, map[string][]string{"viewer": {view}, "reader": {view, cli}, "editor": {view, edit, cli}})
	printed := func(user string, args []string) (string, error) {
		var out strings.Builder
		p := &Program{In: strings.NewReader(research), Out: &out, Clock: clocktesting.NewFakeClock(now), Width: 100}
		err := p.Run(t.Context(), append(slices.Clone(args), "--kubeconfig", kubeconfigOf(t, cluster.Config, user)))
		return out.String(), err
	}
	run := func(user string, args []string) error {
		_, err := printed(user, args)
		if errors.Is(err, ErrUnhealthy) {
			return nil // it could read everything
		}
		return failure(err)
	}
	for _, tc := range []struct {
		args []string
		may  []string            // users
		lack map[string][]string // users that lack rights, each with the roles that the error names
	}{
		{
			args: []string{"status"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"import", "--configmap", "default/plugin"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"doctor"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"plan", "-f", "-"}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli, edit}},
		}, {
			args: []string{"advise", "--prometheus", answering(t, "", seenOn("a", "train"))}, may: []string{"reader", "editor"},
			lack: map[string][]string{"nobody": {view, cli}, "viewer": {cli}},
		}, {
			args: []string{"restore", "--yes"}, may: []string{"editor"},
			lack: map[string][]string{"nobody": {view, cli, edit}, "viewer": {cli, edit}},
		},
	} {
		t.Run(tc.args[0], func(t *testing.T) {
			g := NewWithT(t)
			for _, user := range tc.may {
				g.Eventually(run).WithArguments(user, tc.args).WithTimeout(time.Minute).Should(Succeed(), user)
			}
			for user, lacks := range tc.lack {
				err := run(user, tc.args)
				g.Expect(apierrors.IsForbidden(err)).To(BeTrue(), "%s: %v", user, err)
				for _, role := range lacks {
					g.Expect(err).To(MatchError(ContainSubstring(role)), user)
				}
			}
		})
	}
	t.Run("plan says what the API server has not checked", func(t *testing.T) {
		g := NewWithT(t)
		out, err := printed("reader", []string{"plan", "-f", "-"})
		g.Expect(err).To(Equal(Disruptive))
		g.Expect(strings.Join(strings.Fields(out), " ")).To(And(HavePrefix("You may not write policies, so the API server has not checked research"), ContainSubstring(edit),
			HaveSuffix("OUTCOME Disruptive: GPUs have to be idle for it, or workloads find nothing to run on (exit code 3)")))
		out, err = printed("editor", []string{"plan", "-f", "-"})
		g.Expect(err).To(Equal(Disruptive))
		g.Expect(out).To(HavePrefix("POLICY research (new)"))
	})
	t.Run("advise prints a policy without the right to plan, and names the role", func(t *testing.T) {
		g := NewWithT(t)
		address := answering(t, "", seenOn("a", "train"))
		out, err := printed("reader", []string{"advise", "--prometheus", address})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(And(ContainSubstring("kind: GPUSharingPolicy"), ContainSubstring("What it changes is not shown"), ContainSubstring(edit)))
		out, err = printed("editor", []string{"advise", "--prometheus", address})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(out).To(ContainSubstring("What it would change, as kubectl gpusharing plan prints it:"))
	})
	t.Run("doctor finds with these roles what an administrator finds", func(t *testing.T) {
		g := NewWithT(t)
		g.Expect(cluster.Client.Create(t.Context(), object("nvidia.com/v1", "ClusterPolicy", "", "cluster-policy", map[string]any{}))).To(Succeed())
		g.Expect(cluster.Client.Create(t.Context(), bindingOf("gpu-sharing-operator"))).To(Succeed())
		g.Expect(cluster.Client.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-sharing-operator", Name: controllerName}})).To(Succeed())
		found, err := printed("", []string{"doctor"})
		g.Expect(err).To(MatchError(ErrUnhealthy))
		g.Expect(found).To(And(ContainSubstring("ClusterPolicy cluster-policy"), ContainSubstring("nobody holds lease")))
		g.Eventually(func() string { out, _ := printed("reader", []string{"doctor"}); return out }).WithTimeout(time.Minute).Should(Equal(found))
	})
}

// bindRoles creates the roles of config/rbac/users.yaml, and binds them to users.
func bindRoles(t *testing.T, c client.Client, users map[string][]string) {
	t.Helper()
	g := NewWithT(t)
	roles, err := os.ReadFile("../../config/rbac/users.yaml")
	g.Expect(err).NotTo(HaveOccurred())
	for text := range strings.SplitSeq(string(roles), "\n---\n") {
		role := &rbacv1.ClusterRole{}
		g.Expect(yaml.UnmarshalStrict([]byte(text), role)).To(Succeed())
		g.Expect(c.Create(t.Context(), role)).To(Succeed())
	}
	for user, bound := range users {
		for _, role := range bound {
			g.Expect(c.Create(t.Context(), &rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: user + "-" + role},
				RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
				Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
			})).To(Succeed())
		}
	}
}

// kubeconfigOf writes a kubeconfig with which the administrator acts as a user.
func kubeconfigOf(t *testing.T, admin *rest.Config, user string) string {
	t.Helper()
	g := NewWithT(t)
	data, err := env.Kubeconfig(admin)
	g.Expect(err).NotTo(HaveOccurred())
	config, err := clientcmd.Load(data)
	g.Expect(err).NotTo(HaveOccurred())
	for _, info := range config.AuthInfos {
		info.Impersonate = user
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	g.Expect(clientcmd.WriteToFile(*config, path)).To(Succeed())
	return path
}
