// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/gpuoperator"
)

// found is all that an administrator had before the first policy and wants to have again after the last.
type found struct {
	Labels, Annotations map[string]string
	Taints              []corev1.Taint
	Cordoned            bool
	Offered             map[string]int64
	// ConfigMaps are those in NVIDIA's namespace, with their keys.
	ConfigMaps map[string]map[string]string
	// ClusterPolicy is its spec, and Templates the pods of NVIDIA's DaemonSets.
	ClusterPolicy any
	Templates     map[string]corev1.PodTemplateSpec
	// GPUs is the state of each GPU's hardware, in words.
	GPUs []string
}

// settled finds all that an administrator had, once NVIDIA's programs have done what begin and the policies before it
// ask.
func settled(ctx context.Context) found {
	GinkgoHelper()
	Eventually(restoredFromUs).WithContext(ctx).Should(Succeed())
	expectOperandsReady(ctx)
	var f found
	Eventually(func(g Gomega) {
		now, err := look(ctx)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(now.ConfigMaps).NotTo(HaveKey(ourConfigMap))
		g.Expect(now.Labels).To(HaveKeyWithValue("nvidia.com/gpu.count", strconv.Itoa(len(fitted))))
		// On a machine with much else to do, NVIDIA's programs are seconds late to start anew.
		g.Expect(now.Offered).To(Equal(map[string]int64{"nvidia.com/gpu": int64(len(fitted))}))
		g.Expect(now.Labels).To(HaveKeyWithValue("nvidia.com/mig.strategy", "single"))
		// GPU Feature Discovery looks once a minute. Until then it reports instances that are gone; after begin there
		// are none.
		g.Expect(slices.Collect(maps.Keys(now.Labels))).NotTo(ContainElement(MatchRegexp(`^nvidia\.com/mig-\d`)))
		g.Consistently(look, "1s").WithContext(ctx).Should(BeComparableTo(now))
		f = now
	}).WithContext(ctx).Should(Succeed())
	return f
}

// look finds all that an administrator had, as it is now.
func look(ctx context.Context) (found, error) {
	n := &corev1.Node{}
	if err := kube.Get(ctx, client.ObjectKey{Name: nodeName}, n); err != nil {
		return found{}, err
	}
	delete(n.Labels, "nvidia.com/gfd.timestamp")
	offers, err := offered(ctx)
	if err != nil {
		return found{}, err
	}
	f := found{
		Labels: n.Labels, Annotations: n.Annotations, Taints: n.Spec.Taints, Cordoned: n.Spec.Unschedulable, Offered: offers,
		ConfigMaps: map[string]map[string]string{}, Templates: map[string]corev1.PodTemplateSpec{},
	}
	if err := f.lookAtNVIDIA(ctx); err != nil {
		return found{}, err
	}
	driver, err := gpus.Node()
	if err != nil {
		return found{}, err
	}
	for _, g := range driver.GPUs {
		f.GPUs = append(f.GPUs, fmt.Sprintf("%s: MIG mode %v, compute mode %v, %d instances", g.UUID, g.MIG, g.ComputeMode, len(g.Instances)))
	}
	slices.Sort(f.GPUs)
	return f, nil
}

// leaveOutFeatures leaves out the labels that NFD's master sets, which lists them in an annotation, without its own
// domain.
func (f *found) leaveOutFeatures() {
	const list, domain = "nfd.node.kubernetes.io/feature-labels", "feature.node.kubernetes.io/"
	for name := range strings.SplitSeq(f.Annotations[list], ",") {
		delete(f.Labels, name)
		delete(f.Labels, domain+name)
	}
	delete(f.Annotations, list)
}

func (f *found) lookAtNVIDIA(ctx context.Context) error {
	p := &unstructured.Unstructured{}
	p.SetGroupVersionKind(gpuoperator.PolicyKind())
	if err := kube.Get(ctx, client.ObjectKey{Name: gpuoperator.PolicyName}, p); err != nil {
		return err
	}
	f.ClusterPolicy = p.Object["spec"]
	maps, sets := &corev1.ConfigMapList{}, &appsv1.DaemonSetList{}
	for _, list := range []client.ObjectList{maps, sets} {
		if err := kube.List(ctx, list, client.InNamespace(gpuoperator.Namespace)); err != nil {
			return err
		}
	}
	for _, m := range maps.Items {
		f.ConfigMaps[m.Name] = m.Data
	}
	for i := range sets.Items {
		f.Templates[sets.Items[i].Name] = sets.Items[i].Spec.Template
	}
	return nil
}
