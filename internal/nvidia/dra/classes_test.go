// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

func TestNamesOfClasses(t *testing.T) {
	for profile, want := range map[string][2]string{
		"1g.5gb":    {"gpusharing-mig-1g.5gb", "nvidia.com/mig-1g.5gb"},
		"1g.5gb+me": {"gpusharing-mig-1g.5gb.me", "nvidia.com/mig-1g.5gb.me"},
	} {
		g := NewWithT(t)
		g.Expect([2]string{dra.ClassName(profile), plan.ResourceOf(profile)}).To(Equal(want))
		g.Expect(validation.IsDNS1123Subdomain(dra.ClassName(profile))).To(BeEmpty())
		g.Expect(dra.Ours(dra.ClassName(profile))).To(BeTrue())
	}
	node, is := dra.TaintRuleNode(dra.TaintRuleName("n1"))
	NewWithT(t).Expect([]any{node, is}).To(Equal([]any{"n1", true}))
}

func TestWhatAPolicysProfileMeans(t *testing.T) {
	for _, c := range []struct {
		profile, class string
		want           bool
	}{
		{"1g.5gb", "gpusharing-mig-1g.5gb", true},
		{"1g", "gpusharing-mig-1g.5gb", true},
		{"1g", "gpusharing-mig-1g.5gb.me", false},
		{"1g+me", "gpusharing-mig-1g.10gb.me", true},
		{"1g+me.all", "gpusharing-mig-1g.10gb.me.all", true},
		{"1g-me", "gpusharing-mig-1g.24gb-me", true},
		{"1g.10gb", "gpusharing-mig-1g.5gb", false},
		{"1g.10gb", "gpusharing-mig-1g.10gb.me", false},
		{"2g", "gpusharing-mig-1g.5gb", false},
		{"1g", "team-a", false},
	} {
		NewWithT(t).Expect(dra.Means(c.profile, c.class)).To(Equal(c.want), "%s %s", c.profile, c.class)
	}
	NewWithT(t).Expect(dra.ResourceRequestedBy("deviceclass.resource.kubernetes.io/gpusharing-mig-1g.5gb.me")).To(Equal("nvidia.com/mig-1g.5gb.me"))
	NewWithT(t).Expect(dra.ResourceRequestedBy("deviceclass.resource.kubernetes.io/gpusharing-gpu")).To(Equal("nvidia.com/gpu"))
	NewWithT(t).Expect(dra.ResourceRequestedBy("deviceclass.resource.kubernetes.io/other")).To(Equal("deviceclass.resource.kubernetes.io/other"))
}

func TestWhichClassesMustExist(t *testing.T) {
	own := func(name, resource string) dra.Class {
		return dra.Class{Name: name, Resource: resource, Own: true, Selector: dra.ForInstances("1g.5gb").Selector}
	}
	beside := func(c dra.Class, others string) dra.Class {
		c.Beside = others
		return c
	}
	nobody := func(dra.Class) bool { return false }
	write, whole, media := dra.ForInstances("1g.5gb"), dra.ForGPUs(), dra.ForInstances("1g.10gb+me.all")
	for name, c := range map[string]struct {
		have   []dra.Class
		want   []dra.Write
		named  func(dra.Class) bool
		write  []dra.Write
		remove []string
	}{
		"none yet":                      {want: []dra.Write{write, write}, write: []dra.Write{write}},
		"it exists":                     {want: []dra.Write{write}, have: []dra.Class{own(write.Name, write.Resource)}},
		"another's serves the resource": {want: []dra.Write{write}, have: []dra.Class{{Name: "team-a", Resource: write.Resource}}},
		"another's has the name":        {want: []dra.Write{write}, have: []dra.Class{{Name: write.Name}}},
		"it lost its resource":          {want: []dra.Write{write}, have: []dra.Class{own(write.Name, "")}, write: []dra.Write{write}},
		"another controller gave it a configuration": {
			want: []dra.Write{write}, have: []dra.Class{{Name: write.Name, Resource: write.Resource, Own: true, Selector: write.Selector, Configured: true}},
			remove: []string{write.Name},
		},
		"NVIDIA's class for whole GPUs serves no resource, as with a GPUCluster": {
			want: []dra.Write{whole}, have: []dra.Class{{Name: "gpu.nvidia.com"}}, write: []dra.Write{whole},
		},
		"NVIDIA's class for whole GPUs serves the resource": {want: []dra.Write{whole}, have: []dra.Class{{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"}}},
		"nobody needs one for whole GPUs any more":          {have: []dra.Class{own(whole.Name, whole.Resource)}, remove: []string{whole.Name}},
		"nobody needs it any more":                          {have: []dra.Class{own(write.Name, write.Resource)}, remove: []string{write.Name}},
		"a pod names it": {
			have: []dra.Class{own(write.Name, write.Resource)}, named: func(c dra.Class) bool { return c.Resource == write.Resource },
		},
		"nobody needs it beside another's, and the scheduler would forget the resource": {
			have:  []dra.Class{own(write.Name, write.Resource), {Name: "b", Resource: write.Resource}, {Name: "a", Resource: write.Resource}},
			write: []dra.Write{{Name: write.Name, Resource: write.Resource, Selector: write.Selector, Beside: "a,b"}},
		},
		"another's came and was noted": {have: []dra.Class{beside(own(write.Name, write.Resource), "a"), {Name: "a", Resource: write.Resource}}},
		"another's went, and the scheduler has forgotten the resource": {
			want: []dra.Write{write}, have: []dra.Class{beside(own(write.Name, write.Resource), "a")}, write: []dra.Write{write},
		},
		"another's went, and nobody needs it": {have: []dra.Class{beside(own(write.Name, write.Resource), "a")}, remove: []string{write.Name}},
		"a configuration beside another's": {
			have:  []dra.Class{{Name: write.Name, Resource: write.Resource, Own: true, Selector: "true", Configured: true}, {Name: "a", Resource: write.Resource}},
			write: []dra.Write{{Name: write.Name, Resource: write.Resource, Selector: write.Selector, Beside: "a"}},
		},
		"an edit, another's came, and nobody may need it": {
			have:  []dra.Class{{Name: media.Name, Resource: media.Resource, Own: true, Selector: "true"}, {Name: "a", Resource: media.Resource}},
			write: []dra.Write{{Name: media.Name, Resource: media.Resource, Selector: media.Selector, Beside: "a"}},
		},
		"a configuration, and the resource of another's": {
			want: []dra.Write{write}, have: []dra.Class{{Name: write.Name, Resource: "b", Own: true, Configured: true}, {Name: "a", Resource: "b"}}, write: []dra.Write{write},
		},
		"those of others stay": {have: []dra.Class{{Name: "gpu.nvidia.com", Resource: "nvidia.com/gpu"}, {Name: write.Name}, own("other", "")}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			if c.named == nil {
				c.named = nobody
			}
			write, remove := dra.Classes(c.have, c.want, c.named)
			g.Expect(write).To(Equal(c.write))
			g.Expect(remove).To(Equal(c.remove))
		})
	}
}

func TestOfTwoClassesTheLaterOneServes(t *testing.T) {
	classes := []dra.Class{{Name: "b", Resource: "r", Age: 5}, {Name: "a", Resource: "r", Age: 5}, {Name: "old", Resource: "r", Age: 1}, {Name: "x", Age: 9}}
	c, is := dra.Offering(classes, "r")
	NewWithT(t).Expect([]any{c.Name, is}).To(Equal([]any{"a", true}))
	_, is = dra.Offering(classes, "none")
	NewWithT(t).Expect(is).To(BeFalse())
}

func TestWhyNoClassCanServe(t *testing.T) {
	for name, c := range map[string]struct {
		have   []dra.Class
		reason string
	}{
		"none yet":               {},
		"it exists":              {have: []dra.Class{{Name: "gpusharing-mig-1g.5gb", Resource: "nvidia.com/mig-1g.5gb", Own: true}}},
		"another's serves":       {have: []dra.Class{{Name: "x", Resource: "nvidia.com/mig-1g.5gb"}, {Name: "gpusharing-mig-1g.5gb"}}},
		"another's has the name": {have: []dra.Class{{Name: "gpusharing-mig-1g.5gb", Resource: "a/b"}}, reason: v1alpha1.ReasonDeviceClassConflict},
		"the feature gate is off": {
			have: []dra.Class{{Name: "gpusharing-mig-1g.5gb", Own: true}}, reason: v1alpha1.ReasonDRAUnavailable,
		},
	} {
		t.Run(name, func(t *testing.T) {
			problem := dra.ClassProblem(c.have, dra.ForInstances("1g.5gb"))
			if c.reason == "" {
				NewWithT(t).Expect(problem).To(BeZero())
				return
			}
			NewWithT(t).Expect(problem).To(HaveField("Reason", c.reason))
		})
	}
}

func TestWhatToSetForShares(t *testing.T) {
	pool := func(shares int64) *dra.Pool {
		return &dra.Pool{Complete: true, Devices: []dra.Device{{Name: "gpu-0", Type: "gpu", UUID: "GPU-a", Shares: shares}}}
	}
	for name, c := range map[string]struct {
		pool      *dra.Pool
		want      int64
		requested dra.RequestedShares
		says      []string
	}{
		"as it is":            {pool: pool(4), want: 4},
		"nothing is known":    {pool: &dra.Pool{}, want: 4},
		"no slices":           {want: 4},
		"to be switched on":   {pool: pool(1), want: 4, says: []string{"publishes no shares", "featureGates.ConsumableShares=true and consumableShares=4"}},
		"to be raised":        {pool: pool(2), want: 4, says: []string{"publishes 2 shares", "consumableShares=4", "No running pod"}},
		"to be lowered":       {pool: pool(8), want: 4, says: []string{"consumableShares=4", "Running pods keep their shares"}},
		"to be switched off":  {pool: pool(4), want: 1, says: []string{"needs whole GPUs", "First drain", "consumableShares=disabled"}},
		"by memory":           {pool: pool(0), want: 4, says: []string{"unlimited or memory", "consumableShares=4"}},
		"two policies differ": {pool: pool(2), want: 4, requested: dra.RequestedShares{2: {"b"}, 4: {"a"}}, says: []string{"policy b needs 2 shares", "one number for all nodes"}},
		"whole GPUs beside":   {pool: pool(1), want: 4, requested: dra.RequestedShares{1: {"b"}, 4: {"a"}}, says: []string{"policy b needs whole GPUs"}},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			problem := dra.SharesProblem(c.pool, c.want, "a", c.requested)
			if len(c.says) == 0 {
				g.Expect(problem).To(BeZero())
				return
			}
			g.Expect(problem).To(HaveField("Reason", v1alpha1.ReasonDRASharesDiffer))
			for _, part := range c.says {
				g.Expect(problem.Message).To(ContainSubstring(part))
			}
		})
	}
}

// TestAClassOfTheOperatorsIsRepaired: a user, or a tool that copies one class over another, changed what it selects, or
// gave it a configuration. Pods that request 1g.5gb get other instances by it.
func TestAClassOfTheOperatorsIsRepaired(t *testing.T) {
	for name, change := range map[string]func(spec map[string]any){
		"its selector names another profile": func(spec map[string]any) {
			spec["selectors"] = []any{map[string]any{"cel": map[string]any{"expression": dra.ForInstances("7g.40gb").Selector}}}
		},
		"it has no selector": func(spec map[string]any) { delete(spec, "selectors") },
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			object := dra.NewClass(dra.ForInstances("1g.5gb"))
			change(object.Object["spec"].(map[string]any))
			write, _ := dra.Classes([]dra.Class{dra.ClassOf(object)}, []dra.Write{dra.ForInstances("1g.5gb")}, func(dra.Class) bool { return false })
			g.Expect(write).To(HaveLen(1), "as a lost extendedResourceName is repaired")
		})
	}
}

// TestATaintRuleThatTaintsNothingIsNone: a user set its effect to None, or narrowed its selector to one device. New
// pods come to the node.
func TestATaintRuleThatTaintsNothingIsNone(t *testing.T) {
	for name, change := range map[string]func(o *unstructured.Unstructured) error{
		"effect None": func(o *unstructured.Unstructured) error {
			return unstructured.SetNestedField(o.Object, "None", "spec", "taint", "effect")
		},
		"one device": func(o *unstructured.Unstructured) error {
			return unstructured.SetNestedField(o.Object, "gpu-7", "spec", "deviceSelector", "device")
		},
		"another pool": func(o *unstructured.Unstructured) error {
			return unstructured.SetNestedField(o.Object, "b", "spec", "deviceSelector", "pool")
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			rule := dra.NewTaintRule("a", time.Unix(1_800_000_000, 0))
			g.Expect(change(rule)).To(Succeed())
			_, _, ok := dra.TaintRuleOf(rule)
			g.Expect(ok).To(BeFalse())
		})
	}
}

// TestTheRecordOfOtherClassesFits: the names of the other classes of a resource are an annotation, which has its limit. That one of them came or
// went still shows.
func TestTheRecordOfOtherClassesFits(t *testing.T) {
	g := NewWithT(t)
	own := dra.ForInstances("1g.5gb")
	have := []dra.Class{{Name: own.Name, Resource: own.Resource, Selector: own.Selector, Own: true}}
	beside := func() string {
		write, _ := dra.Classes(have, nil, func(dra.Class) bool { return true })
		g.Expect(write).To(HaveLen(1))
		return write[0].Beside
	}
	for i := range 2000 {
		have = append(have, dra.Class{Name: fmt.Sprintf("%04d.%s", i, strings.Repeat("c", 240)), Resource: own.Resource})
	}
	many := beside()
	g.Expect(len(many)).To(BeNumerically("<=", 1024))
	have = have[:len(have)-1]
	g.Expect(beside()).NotTo(Equal(many))
}
