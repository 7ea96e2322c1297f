// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package packaging_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
	"github.com/gpusharing/gpu-sharing-operator/test/previous"
)

// released is the chart as make release pins it (hack/release, pin), with a version and the images of the controller
// and the agent.
func released(t *testing.T, version string) (chart, controller, agent string) {
	t.Helper()
	g := NewWithT(t)
	chart = filepath.Join(t.TempDir(), "chart")
	g.Expect(os.CopyFS(chart, os.DirFS(path(t, "config/helm")))).To(Succeed())
	image := func(name string) string {
		return fmt.Sprintf("ghcr.io/gpusharing/gpu-sharing-%s@sha256:%x", name, sha256.Sum256([]byte(name+version)))
	}
	controller, agent = image("controller"), image("agent")
	metadata := filepath.Join(chart, "Chart.yaml")
	content, err := os.ReadFile(metadata)
	g.Expect(err).NotTo(HaveOccurred())
	text := string(content)
	for was, is := range map[string]string{
		"\nversion: 0.1.0\n":    "\nversion: " + version + "\n",
		"\nappVersion: 0.1.0\n": "\nappVersion: " + version + "\n",
		"\nannotations:\n":      "\nannotations:\n  gpusharing.io/controller-image: " + controller + "\n  gpusharing.io/agent-image: " + agent + "\n",
	} {
		g.Expect(strings.Count(text, was)).To(Equal(1), was)
		text = strings.Replace(text, was, is, 1)
	}
	g.Expect(os.WriteFile(metadata, []byte(text), 0o600)).To(Succeed())
	return chart, controller, agent
}

// TestTheChartOfAReleaseRunsTheImagesThatTheValuesName: a copy that docker pull, tag and push made has another digest
// than the release's.
func TestTheChartOfAReleaseRunsTheImagesThatTheValuesName(t *testing.T) {
	h := newHelm(t)
	var controller, agent string
	h.chart, controller, agent = released(t, "0.2.0")
	const mirror, own = "mirror.example.com/gpu/agent", "ghcr.io/gpusharing/gpu-sharing-agent"
	digest := "@sha256:" + strings.Repeat("1", 64)
	for title, tc := range map[string]struct {
		values []string
		image  string
	}{
		"those of the release":  {image: agent},
		"a tag":                 {[]string{"images.agent.tag=dev"}, own + ":dev"},
		"a mirror":              {[]string{"images.agent.repository=" + mirror}, mirror + ":0.2.0"},
		"a mirror and a tag":    {[]string{"images.agent.repository=" + mirror, "images.agent.tag=0.2.0-mirrored"}, mirror + ":0.2.0-mirrored"},
		"a mirror and a digest": {[]string{"images.agent.repository=" + mirror, "images.agent.digest=" + digest[1:]}, mirror + digest},
		"a mirror whose name begins as the release": {[]string{"images.agent.repository=" + own + "-copy"}, own + "-copy:0.2.0"},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			objects := h.render(t, tc.values...)
			for workload, image := range map[string]string{
				"DaemonSet gpu-sharing-agent": tc.image, "DaemonSet gpu-sharing-mps": tc.image, "Deployment gpu-sharing-controller": controller,
			} {
				g.Expect(podOf(t, find(t, objects, workload)).Spec.Containers[0].Image).To(Equal(image), workload)
			}
		})
	}
}

// TestTheVersionLabelIsThatOfTheImage: kubectl gpusharing doctor compares the versions of controller and agents by it.
func TestTheVersionLabelIsThatOfTheImage(t *testing.T) {
	h := newHelm(t)
	h.chart, _, _ = released(t, "0.2.0")
	digest := "digest=sha256:" + strings.Repeat("1", 64)
	for title, tc := range map[string]struct{ values, version string }{
		"that of the release":       {"", "0.2.0"},
		"a tag":                     {"tag=0.0.9", "0.0.9"},
		"a mirror":                  {"repository=mirror.example.com/gpu", "0.2.0"},
		"a digest":                  {digest, ""},
		"a digest, and what it has": {digest + ",tag=0.0.9", "0.0.9"},
		"a tag that is no label":    {"tag=_" + strings.Repeat("9", 70), ""},
	} {
		t.Run(title, func(t *testing.T) {
			g := NewWithT(t)
			var values []string
			for value := range strings.SplitSeq(tc.values, ",") {
				if value != "" {
					values = append(values, "images.agent."+value, "images.controller."+value)
				}
			}
			objects := h.render(t, values...)
			agents := as[appsv1.DaemonSet](t, find(t, objects, "DaemonSet gpu-sharing-agent"))
			controller := find(t, objects, "Deployment gpu-sharing-controller")
			for _, labels := range []map[string]string{agents.Spec.Template.Labels, agents.Labels, controller.GetLabels()} {
				g.Expect(labels["app.kubernetes.io/version"]).To(Equal(tc.version), "%v", slices.Sorted(maps.Keys(labels)))
			}
		})
	}
}

// TestAnUpgradeThatReusesValuesRunsTheNewImages: Helm then takes the former defaults too, so that the images of a
// release are none of them.
func TestAnUpgradeThatReusesValuesRunsTheNewImages(t *testing.T) {
	withEachHelm(t, func(t *testing.T, i installation) {
		t.Helper()
		g := NewWithT(t)
		before, _, _ := released(t, "0.2.0")
		now, newController, newAgent := released(t, "0.3.0")
		i.do(t, "install", release, before, "--create-namespace", "--set", "logLevel=debug")
		i.do(t, "upgrade", release, now, "--reuse-values")
		controller, agent := object("apps/v1", "Deployment", namespace, "gpu-sharing-controller"), object("apps/v1", "DaemonSet", namespace, "gpu-sharing-agent")
		g.Expect(i.exists(t, controller)).To(BeTrue())
		g.Expect(i.exists(t, agent)).To(BeTrue())
		pod := as[appsv1.DaemonSet](t, agent).Spec.Template
		g.Expect(pod.Labels).To(HaveKeyWithValue("app.kubernetes.io/version", "0.3.0"))
		g.Expect(pod.Spec.Containers[0].Image).To(Equal(newAgent))
		g.Expect(pod.Spec.Containers[0].Args).To(ContainElement("--zap-log-level=debug"), "what a user gave")
		g.Expect(podOf(t, controller).Spec.Containers[0].Image).To(Equal(newController))
	})
}

// TestAnUpgradeThatReusesFormerValuesSaysWhatToDo: the defaults of a former version lack a value, and a
// release of it had digests there.
func TestAnUpgradeThatReusesFormerValuesSaysWhatToDo(t *testing.T) {
	withEachHelm(t, func(t *testing.T, i installation) {
		t.Helper()
		g := NewWithT(t)
		i.do(t, "install", release, formerChart(t), "--create-namespace", "--set", "logLevel=debug")
		_, err := i.try(t, "upgrade", release, i.chart, "--reuse-values")
		g.Expect(err).To(MatchError(ContainSubstring("Upgrade with --reset-then-reuse-values instead of --reuse-values")))
		g.Expect(err).NotTo(MatchError(ContainSubstring("/metrics/enabled")), "the user gave no value of it")
		i.do(t, "upgrade", release, i.chart, "--reset-then-reuse-values")
		controller := object("apps/v1", "Deployment", namespace, "gpu-sharing-controller")
		g.Expect(i.exists(t, controller)).To(BeTrue())
		g.Expect(podOf(t, controller).Spec.Containers[0].Args).To(ContainElement("--zap-log-level=debug"), "what a user gave")
	})
}

// crdFiles are those of the operator's kinds.
var crdFiles = []string{"config/crd/gpusharing.io_gpunodes.yaml", "config/crd/gpusharing.io_gpusharingpolicies.yaml"}

// TestTodaysCRDsKeepAllThatThePreviousVersionStored: what the previous version stored is valid today and loses nothing,
// or an upgrade would forget what it does to a node. Its parent had fields that today's CRDs lack, so it is the first
// of which that is so.
func TestTodaysCRDsKeepAllThatThePreviousVersionStored(t *testing.T) {
	var before []string
	for _, file := range crdFiles {
		is := schemaOf(t, today, file)
		NewWithT(t).Expect(losses(schemaOf(t, previous.File, file), is, "")).To(BeEmpty(), file)
		before = append(before, losses(schemaOf(t, previous.FileBefore, file), is, "")...)
	}
	NewWithT(t).Expect(before).NotTo(BeEmpty(), "choose an earlier commit as the previous version")
}

// today reads a file of this checkout.
func today(_ context.Context, file string) ([]byte, error) {
	root, err := env.Root()
	if err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(root, file))
}

// schemaOf is the schema in the file of a CRD.
func schemaOf(t *testing.T, read func(context.Context, string) ([]byte, error), file string) apiextensionsv1.JSONSchemaProps {
	t.Helper()
	g := NewWithT(t)
	content, err := read(t.Context(), file)
	g.Expect(err).NotTo(HaveOccurred())
	crd := apiextensionsv1.CustomResourceDefinition{}
	g.Expect(yaml.UnmarshalStrict(content, &crd)).To(Succeed())
	g.Expect(crd.Spec.Versions).To(HaveLen(1))
	return *crd.Spec.Versions[0].Schema.OpenAPIV3Schema
}

// losses are what the values of a schema lose or are refused for under another.
func losses(was, is apiextensionsv1.JSONSchemaProps, path string) (lost []string) {
	if was.Type != is.Type || was.XIntOrString != is.XIntOrString {
		lost = append(lost, fmt.Sprintf("%s was %q and is %q", path, was.Type, is.Type))
	}
	lost = append(lost, narrowed(was, is, path)...)
	for name, property := range was.Properties {
		if today, kept := is.Properties[name]; kept {
			lost = append(lost, losses(property, today, path+"."+name)...)
		} else {
			lost = append(lost, path+"."+name+" is gone")
		}
	}
	if was.Items != nil && is.Items != nil {
		lost = append(lost, losses(*was.Items.Schema, *is.Items.Schema, path+"[]")...)
	}
	if was.AdditionalProperties != nil && is.AdditionalProperties != nil {
		lost = append(lost, losses(*was.AdditionalProperties.Schema, *is.AdditionalProperties.Schema, path+"{}")...)
	}
	return lost
}

// narrowed are the bounds that are tighter than they were.
func narrowed(was, is apiextensionsv1.JSONSchemaProps, path string) (tighter []string) {
	for name, bounds := range map[string][2]*int64{
		"maxLength": {was.MaxLength, is.MaxLength}, "maxItems": {was.MaxItems, is.MaxItems}, "maxProperties": {was.MaxProperties, is.MaxProperties},
	} {
		if bounds[1] != nil && (bounds[0] == nil || *bounds[1] < *bounds[0]) {
			tighter = append(tighter, path+" has a smaller "+name)
		}
	}
	if is.Pattern != "" && is.Pattern != was.Pattern {
		tighter = append(tighter, path+" has another pattern")
	}
	for _, value := range was.Enum {
		if is.Enum != nil && !slices.ContainsFunc(is.Enum, func(v apiextensionsv1.JSON) bool { return bytes.Equal(v.Raw, value.Raw) }) {
			tighter = append(tighter, fmt.Sprintf("%s may not be %s", path, value.Raw))
		}
	}
	for _, name := range is.Required {
		if _, existed := was.Properties[name]; existed && !slices.Contains(was.Required, name) && is.Properties[name].Default == nil {
			tighter = append(tighter, path+"."+name+" is required")
		}
	}
	return tighter
}

// TestAnUpgradeWithPoliciesOfTheFormerSchemaIsRefused before anything changes: it would lose what they say by fields that
// have other names today. Once they are gone, it goes on.
func TestAnUpgradeWithPoliciesOfTheFormerSchemaIsRefused(t *testing.T) {
	withEachHelm(t, func(t *testing.T, i installation) {
		t.Helper()
		g := NewWithT(t)
		i.do(t, "install", release, formerChart(t), "--create-namespace")
		policy := object("gpusharing.io/v1alpha1", "GPUSharingPolicy", "", "shared")
		policy.Object["spec"] = map[string]any{"sharing": map[string]any{
			"strategy": "TimeSlicing", "timeSlicing": map[string]any{"replicas": int64(4), "renameByDefault": true},
		}}
		g.Eventually(func() error { return i.Client.Create(t.Context(), policy) }, 30*time.Second).Should(Succeed())
		crd := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "gpusharingpolicies.gpusharing.io")
		controller := object("apps/v1", "Deployment", namespace, "gpu-sharing-controller")
		versions := func() []string {
			g.Expect(i.exists(t, crd)).To(BeTrue())
			g.Expect(i.exists(t, controller)).To(BeTrue())
			return []string{crd.GetResourceVersion(), controller.GetResourceVersion()}
		}
		before := versions()

		_, err := i.try(t, "upgrade", release, i.chart)
		g.Expect(err).To(MatchError(And(
			ContainSubstring("1 GPUSharingPolicies of an earlier schema (shared)"), ContainSubstring("run kubectl gpusharing restore"),
		)))
		g.Expect(versions()).To(Equal(before), "nothing has changed")

		g.Expect(i.Client.Delete(t.Context(), policy)).To(Succeed())
		i.do(t, "upgrade", release, i.chart)
		g.Expect(i.Client.Create(t.Context(), &v1alpha1.GPUSharingPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: "shared"},
			Spec: v1alpha1.GPUSharingPolicySpec{NodeSelector: &v1alpha1.NodeSelector{}, Sharing: v1alpha1.Sharing{
				Strategy: v1alpha1.StrategyTimeSlicing, TimeSlicing: &v1alpha1.TimeSlicing{Replicas: 4},
				Advertise: &v1alpha1.Advertise{RenameByDefault: new(true)},
			}},
		})).To(Succeed())
		i.do(t, "upgrade", release, i.chart)
	})
}
