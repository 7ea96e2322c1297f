// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig_test

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const namespace = "gpu-operator"

// fixture is a cluster with the Configurer under test and a record of what it wrote.
type fixture struct {
	*WithT
	t          *testing.T
	client     client.WithWatch
	clock      *clocktesting.FakePassiveClock
	standAlone pluginconfig.StandAlone
	// tolerations are those that the operator must have.
	tolerations []corev1.Toleration
	// own is the namespace of the operator, held and keepStrategy are what a decision says.
	own, held    string
	keepStrategy bool
	writes       []string
	fail         func(write string) error
}

// newFixture empties what subtests share of the cluster.
func newFixture(t *testing.T, c client.WithWatch) *fixture {
	t.Helper()
	f := &fixture{WithT: NewWithT(t), t: t, client: c, clock: clocktesting.NewFakePassiveClock(time.Now())}
	t.Cleanup(func() {
		for _, kind := range []string{"ClusterPolicy", "GPUCluster"} {
			f.Expect(c.DeleteAllOf(context.Background(), nvidia(kind, ""))).To(Succeed())
		}
		f.Expect(c.DeleteAllOf(context.Background(), &corev1.ConfigMap{}, client.InNamespace(namespace))).To(Succeed())
	})
	return f
}

func (f *fixture) ctx() context.Context { return f.t.Context() }

// configurer is the Configurer under test: a fresh one each time, as after a restart.
func (f *fixture) configurer() *pluginconfig.Configurer {
	c := interceptor.NewClient(f.client, interceptor.Funcs{
		Apply: func(ctx context.Context, c client.WithWatch, o runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			return f.write("apply ConfigMap", func() error { return c.Apply(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return f.write("patch "+o.GetObjectKind().GroupVersionKind().Kind, func() error { return c.Patch(ctx, o, p, opts...) })
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return f.write("delete ConfigMap", func() error { return c.Delete(ctx, o, opts...) })
		},
	})
	return pluginconfig.New(c, f.client, f.clock, f.standAlone).CopyTo(f.own)
}

func (f *fixture) write(what string, do func() error) error {
	if f.fail != nil {
		if err := f.fail(what); err != nil {
			return err
		}
	}
	f.writes = append(f.writes, what)
	return do()
}

func (f *fixture) observe() *pluginconfig.Observed {
	f.t.Helper()
	o, err := f.configurer().Observe(f.ctx())
	f.Expect(err).NotTo(HaveOccurred())
	o.Held, o.KeepStrategy = f.held, f.keepStrategy
	return o
}

// configure is one reconcile that needs the device plugin to read these keys beside those of the Configurer itself.
func (f *fixture) configure(keys map[string]string) []string {
	f.t.Helper()
	f.Expect(f.tryConfigure(keys)).To(Succeed())
	return f.writes
}

func (f *fixture) tryConfigure(keys map[string]string) error {
	f.writes = nil
	o, err := f.configurer().Observe(f.ctx())
	if err != nil {
		return err
	}
	o.Held, o.KeepStrategy = f.held, f.keepStrategy
	all := maps.Clone(o.Configs)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, keys)
	if _, err := f.configurer().WriteKeys(f.ctx(), o, all); err != nil {
		return err
	}
	if _, err = f.configurer().Configure(f.ctx(), o, f.tolerations); err != nil {
		return err
	}
	return f.configurer().KeepCopy(f.ctx(), o)
}

func (f *fixture) restore(mounted bool) []string {
	f.t.Helper()
	f.writes = nil
	_, err := f.configurer().Restore(f.ctx(), f.observe(), mounted, f.tolerations)
	f.Expect(err).NotTo(HaveOccurred())
	return f.writes
}

func nvidia(kind, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetAPIVersion("nvidia.com/v1")
	if kind == "GPUCluster" {
		o.SetAPIVersion("nvidia.com/v1alpha1")
	}
	o.SetKind(kind)
	o.SetName(name)
	return o
}

// policy creates a ClusterPolicy with a spec, as Helm does, and the status of a GPU Operator in our namespace.
func (f *fixture) policy(name, spec string) *unstructured.Unstructured {
	f.t.Helper()
	o := nvidia("ClusterPolicy", name)
	f.Expect(yaml.Unmarshal([]byte(spec), &o.Object)).To(Succeed())
	f.Expect(f.client.Create(f.ctx(), o, client.FieldOwner("helm"))).To(Succeed())
	f.Expect(unstructured.SetNestedField(o.Object, namespace, "status", "namespace")).To(Succeed())
	f.Expect(f.client.Status().Update(f.ctx(), o, client.FieldOwner("gpu-operator"))).To(Succeed())
	return o
}

func (f *fixture) get(policy *unstructured.Unstructured) *unstructured.Unstructured {
	f.t.Helper()
	now := nvidia("ClusterPolicy", policy.GetName())
	f.Expect(f.client.Get(f.ctx(), client.ObjectKeyFromObject(policy), now)).To(Succeed())
	return now
}

// spec is the spec of a ClusterPolicy as YAML.
func (f *fixture) spec(policy *unstructured.Unstructured) string {
	f.t.Helper()
	data, err := yaml.Marshal(f.get(policy).Object["spec"])
	f.Expect(err).NotTo(HaveOccurred())
	return string(data)
}

func (f *fixture) patch(o client.Object, manager, patch string) {
	f.t.Helper()
	raw := client.RawPatch(types.MergePatchType, []byte(patch))
	f.Expect(f.client.Patch(f.ctx(), o.DeepCopyObject().(client.Object), raw, client.FieldOwner(manager))).To(Succeed())
}

func (f *fixture) configMap(name string) *corev1.ConfigMap {
	f.t.Helper()
	found := &corev1.ConfigMap{}
	err := f.client.Get(f.ctx(), types.NamespacedName{Namespace: namespace, Name: name}, found)
	if apierrors.IsNotFound(err) {
		return nil
	}
	f.Expect(err).NotTo(HaveOccurred())
	return found
}

func (f *fixture) createConfigMap(name string, data map[string]string) {
	f.t.Helper()
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: data}
	f.Expect(f.client.Create(f.ctx(), object, client.FieldOwner("kubectl"))).To(Succeed())
}

func keysOf(c *corev1.ConfigMap) []string { return slices.Sorted(maps.Keys(c.Data)) }

func newFixtureWithout(t *testing.T) *fixture {
	t.Helper()
	return &fixture{WithT: NewWithT(t), t: t, client: env.Start(t).Client, clock: clocktesting.NewFakePassiveClock(time.Now())}
}
