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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/deviceplugin"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const installed = `
spec:
  devicePlugin: {enabled: true}
  mig: {strategy: single}
`

var research = map[string]string{"research-1": "version: v1\n"}

func TestWithoutNVIDIA(t *testing.T) {
	f := newFixtureWithout(t)
	o := f.observe()
	f.Expect(o.Reason).To(Equal(v1alpha1.ReasonNoDevicePlugin))
	f.Expect(o.Message).To(Equal("there is no ClusterPolicy in this cluster; install NVIDIA's GPU Operator, or name a stand-alone " +
		"plugin's ConfigMap by --device-plugin-namespace and --device-plugin-configmap"))
	f.Expect(f.configure(research)).To(BeEmpty())
	f.Expect(f.restore(false)).To(BeEmpty())
}

func TestConfigurer(t *testing.T) {
	c := env.Start(t, env.WithNVIDIA()).Client
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	NewWithT(t).Expect(c.Create(t.Context(), ns)).To(Succeed())

	for name, test := range map[string]func(*fixture){
		"says why there is no device plugin to configure":                     testReasons,
		"follows the oldest ClusterPolicy":                                    testOldest,
		"follows the one that the GPU Operator does not ignore":               testFirstReconciled,
		"writes the keys, then the ClusterPolicy once, then nothing":          testOnce,
		"goes on where it was killed":                                         testKilled,
		"leaves MIG as it was on nodes that no policy governs":                testUngoverned,
		"restores a ClusterPolicy that was restored from a backup":            testRestoredClusterPolicy,
		"survives the loss of its records":                                    testLostRecords,
		"waits for clients of NVIDIA's MPS daemons":                           testHeld,
		"keeps the keys of the ConfigMap that was there":                      testAdopts,
		"fights over no key, and keeps the copy meanwhile":                    testKeysTaken,
		"gives NVIDIA's programs tolerations and takes them back":             testTolerations,
		"leaves tolerations alone that a user has written since":              testTolerationsTaken,
		"adds tolerations again that were removed, with a bound":              testTolerationsRemoved,
		"adds tolerations with a bound that a webhook strips off the write":   testTolerationsStripped,
		"leaves none of its tolerations where a webhook strips some":          testTolerationsStrippedInPart,
		"adds one more toleration while another field is fought over":         testOneMoreToleration,
		"puts the ClusterPolicy back, then removes the ConfigMap":             testRestore,
		"finds the record on the ClusterPolicy if the ConfigMap is deleted":   testRecord,
		"overrules a field manager once and then leaves it alone for a while": testFight,
		"does the same where the whole ClusterPolicy is replaced":             testFightByReplacing,
		"waits longer each time that it is reverted":                          testFightCalms,
		"knows whom it overruled from either record":                          testRecordIsLost,
		"takes upgrades that are weeks apart for no fight":                    testUpgradedEachMonth,
		"takes a person who installs a few times in an hour for no fight":     testInstalledAgain,
		"tries again at once when NVIDIA's operator reports":                  testMeetsStatusWrites,
		"gives up after a few tries, and takes nobody for an adversary":       testMeetsTooManyWrites,
		"records what a user writes in the same moment":                       testMeetsUser,
		"leaves a ClusterPolicy alone that it has not seen":                   testMeetsDeletion,
		"does not overwrite what it has not seen":                             testStale,
		"starts anew with a ClusterPolicy that replaces another":              testReplaced,
		"lets mig-manager read our ConfigMap, with what it read before":       testManager,
		"says why mig-manager cannot be asked":                                testNoManager,
		"leaves nothing behind where a GPUCluster follows a ClusterPolicy":    testGPUClusterFollows,
		"adds its keys to the ConfigMap of a stand-alone plugin":              testStandAlone,
	} {
		t.Run(name, func(t *testing.T) { test(newFixture(t, c)) })
	}
}

func testReasons(top *fixture) {
	for name, tc := range map[string]struct {
		spec       string // of a ClusterPolicy
		cluster    bool   // with a GPUCluster
		namespace  bool   // ClusterPolicy.status.namespace is set
		standAlone pluginconfig.StandAlone
		reason     string
		message    string
	}{
		"a GPUCluster": {
			cluster: true,
			reason:  v1alpha1.ReasonDRAStackActive,
			message: "GPUCluster dra exists, so there is no device plugin to configure, and NVIDIA's DRA driver does not serve the node. Look at the driver's pod there, " +
				"or replace the GPUCluster by a ClusterPolicy",
		},
		"a GPUCluster beside a ClusterPolicy": {
			cluster: true, spec: installed, namespace: true,
			reason: v1alpha1.ReasonDRAStackActive,
			message: "GPUCluster dra and ClusterPolicy cluster-policy exist, and the GPU Operator serves only one. Delete GPUCluster dra to keep the device plugin, or " +
				"ClusterPolicy cluster-policy to move to DRA (docs/dra.md)",
		},
		"a ClusterPolicy that disables the device plugin": {
			spec: "spec: {devicePlugin: {enabled: false}}", namespace: true,
			reason: v1alpha1.ReasonNoDevicePlugin,
			message: "ClusterPolicy cluster-policy has spec.devicePlugin.enabled false; enable it, or name a stand-alone " +
				"plugin's ConfigMap by --device-plugin-namespace and --device-plugin-configmap",
		},
		"a ClusterPolicy that disables the device plugin, beside a stand-alone one": {
			spec: "spec: {devicePlugin: {enabled: false}}", namespace: true,
			standAlone: pluginconfig.StandAlone{Namespace: namespace, ConfigMap: "plugin"},
		},
		"a ClusterPolicy that the GPU Operator has not seen yet": {
			spec:   installed,
			reason: v1alpha1.ReasonNoDevicePlugin,
			message: "ClusterPolicy cluster-policy does not say in its status.namespace where the GPU Operator runs; wait until " +
				"the GPU Operator has reconciled it, or start the controller with --device-plugin-namespace",
		},
		"such a ClusterPolicy, when a flag names the namespace": {
			spec: installed, standAlone: pluginconfig.StandAlone{Namespace: namespace},
		},
		"a ClusterPolicy": {spec: installed, namespace: true},
	} {
		top.t.Run(name, func(t *testing.T) {
			f := newFixture(t, top.client)
			f.standAlone = tc.standAlone
			if tc.cluster {
				f.Expect(f.client.Create(t.Context(), nvidia("GPUCluster", "dra"))).To(Succeed())
			}
			if tc.spec != "" {
				policy := f.policy("cluster-policy", tc.spec)
				if !tc.namespace {
					unstructured.RemoveNestedField(policy.Object, "status", "namespace")
					f.Expect(f.client.Status().Update(t.Context(), policy)).To(Succeed())
				}
			}
			o := f.observe()
			f.Expect(o.Reason).To(Equal(tc.reason))
			f.Expect(o.Message).To(Equal(tc.message))
			if tc.reason != "" {
				f.Expect(f.configure(research)).To(BeEmpty())
			}
		})
	}
}

// testGPUClusterFollows: nothing reads the ConfigMap any more, once the pods that mount it are gone.
func testGPUClusterFollows(f *fixture) {
	f.own = "default"
	f.policy("cluster-policy", installed)
	f.configure(research)
	f.Expect(f.client.Create(f.ctx(), nvidia("GPUCluster", "dra"))).To(Succeed())
	f.Expect(f.restore(false)).To(BeEmpty(), "nobody knows which of the two goes")
	f.Expect(f.client.Delete(f.ctx(), nvidia("ClusterPolicy", "cluster-policy"))).To(Succeed())
	f.Expect(f.observe().Restores(false, false, nil)).To(BeTrue())
	f.Expect(f.restore(true)).To(BeEmpty())
	tenants := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Name: pluginconfig.ConfigMapName, Namespace: "kube-public", Finalizers: []string{"example.com/kept"},
		Labels: map[string]string{"app.kubernetes.io/managed-by": "gpu-sharing-operator"},
	}}
	f.Expect(f.client.Create(f.ctx(), tenants)).To(Succeed())
	f.t.Cleanup(func() {
		tenants.Finalizers = nil
		f.Expect(client.IgnoreNotFound(f.client.Update(context.Background(), tenants))).To(Succeed())
	})
	f.Expect(f.restore(false)).To(Equal(slices.Repeat([]string{"delete ConfigMap"}, 3)), "and its copy; the tenant's that says that it is ours stays")
	f.Expect(f.client.Get(f.ctx(), client.ObjectKeyFromObject(tenants), tenants)).To(Succeed())
	f.Expect(f.observe().Restores(false, false, nil)).To(BeFalse())
}

func testOldest(f *fixture) {
	f.policy("z", installed)
	f.clock.SetTime(time.Now())
	f.Eventually(func() time.Time { return time.Now().Truncate(time.Second) }, "10s", "50ms").
		Should(BeTemporally(">", f.get(nvidia("ClusterPolicy", "z")).GetCreationTimestamp().Time), "creation times are in seconds")
	f.policy("a", installed)
	f.policy("b", installed)
	f.configure(research)
	f.Expect(f.spec(nvidia("", "z"))).To(ContainSubstring(pluginconfig.ConfigMapName))
	f.Expect(f.spec(nvidia("", "a"))).NotTo(ContainSubstring(pluginconfig.ConfigMapName))

	f.Expect(f.client.Delete(f.ctx(), nvidia("ClusterPolicy", "z"))).To(Succeed())
	f.configure(research)
	f.Expect(f.spec(nvidia("", "a"))).To(ContainSubstring(pluginconfig.ConfigMapName), "of equal age, the first by name")
	f.Expect(f.spec(nvidia("", "b"))).NotTo(ContainSubstring(pluginconfig.ConfigMapName))
}

// testFirstReconciled: up to v26.3 the GPU Operator follows the first ClusterPolicy that it has reconciled since its
// start, which may be the younger one.
func testFirstReconciled(f *fixture) {
	older := f.policy("a", installed)
	f.configure(research)
	f.policy("z", installed)
	f.Expect(f.observe().Ready).To(BeTrue(), "nothing is known of the second one yet")
	state := client.RawPatch(types.MergePatchType, []byte(`{"status":{"state":"ignored"}}`))
	f.Expect(f.client.Status().Patch(f.ctx(), nvidia("ClusterPolicy", older.GetName()), state)).To(Succeed())
	f.configure(research)
	f.Expect(f.spec(nvidia("", "z"))).To(ContainSubstring(pluginconfig.ConfigMapName))
	f.Expect(f.observe().Ready).To(BeTrue())
}

func testOnce(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.Expect(f.observe().Ready).To(BeFalse())
	f.Expect(f.observe().Applied).To(BeNil())

	f.Expect(f.configure(research)).To(Equal([]string{"apply ConfigMap", "patch ClusterPolicy"}))
	unlabelled, asked := deviceplugin.Default("mixed"), deviceplugin.Default("single")
	f.Expect(f.configMap(pluginconfig.ConfigMapName).Data).To(Equal(map[string]string{
		"research-1": "version: v1\n", unlabelled.Key: unlabelled.Data, asked.Key: asked.Data,
	}), "every device plugin starts with one of them, so it must not end any")
	f.Expect(f.spec(policy)).To(MatchYAML(`
devicePlugin: {enabled: true, config: {name: gpu-sharing-device-plugin, default: `+unlabelled.Key+`}}
mig: {}
`), "only the three fields differ")

	f.Expect(f.observe().Ready).To(BeTrue())
	f.Expect(f.configure(research)).To(BeEmpty())
	f.Expect(f.configure(map[string]string{"research-2": "version: v1\n"})).To(Equal([]string{"apply ConfigMap"}))
	f.Expect(f.configMap(pluginconfig.ConfigMapName).Data).NotTo(HaveKey("research-1"), "a key that nothing names any more goes")
}

func testUngoverned(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "by-hand"}}
	f.Expect(f.client.Create(f.ctx(), node)).To(Succeed())
	f.t.Cleanup(func() { f.Expect(f.client.Delete(context.Background(), node)).To(Succeed()) })
	unlabelled := func() string {
		f.configure(research)
		observed := f.observe()
		f.Expect(observed.Overridden).To(BeNil(), "the operator does not take itself for another controller")
		f.Expect(observed.Ready).To(BeTrue())
		return f.spec(policy)
	}
	mixed, single := deviceplugin.Default("mixed").Key, deviceplugin.Default("single").Key
	f.Expect(unlabelled()).To(ContainSubstring(mixed))

	node.Status.Devices = []v1alpha1.DeviceStatus{{
		UUID: "GPU-1", Sharing: v1alpha1.DeviceSharing{MIGMode: v1alpha1.MIGModeEnabled},
	}}
	f.Expect(f.client.Status().Update(f.ctx(), node)).To(Succeed())
	f.Expect(unlabelled()).To(ContainSubstring(mixed), "a policy may govern it, and a change restarts NVIDIA's programs on every node")
	f.keepStrategy = true
	f.Expect(unlabelled()).To(ContainSubstring(single), "no policy governs the node, and nobody asked for other names there")
	f.keepStrategy = false
	f.Expect(unlabelled()).To(ContainSubstring(single), "it never changes back")

	f.restore(false)
	f.Expect(unlabelled()).To(ContainSubstring(single), "the node was there before")
}

// testRestoredClusterPolicy deletes the ClusterPolicy and restores a copy that was taken while the operator was in
// charge.
func testRestoredClusterPolicy(f *fixture) {
	f.createConfigMap("by-hand", map[string]string{"any": "version: v1\n"})
	const before = "{devicePlugin: {enabled: true, config: {name: by-hand, default: any}}, mig: {strategy: single}}"
	policy := f.policy("cluster-policy", "spec: "+before)
	f.configure(research)
	f.Expect(f.client.Get(f.ctx(), client.ObjectKeyFromObject(policy), policy)).To(Succeed())
	backup := policy.DeepCopy()
	f.Expect(f.client.Delete(f.ctx(), policy)).To(Succeed())
	backup.SetUID("")
	backup.SetResourceVersion("")
	f.Expect(f.client.Create(f.ctx(), backup)).To(Succeed())
	backup.Object["status"] = policy.Object["status"]
	f.Expect(f.client.Status().Update(f.ctx(), backup)).To(Succeed())
	f.configure(research)
	f.restore(false)
	f.Expect(f.spec(backup)).To(MatchYAML(before))
}

// testLostRecords deletes each object that holds the record of the ClusterPolicy, one after the other, and the
// ConfigMap that the device plugin read before.
func testLostRecords(f *fixture) {
	f.createConfigMap("by-hand", map[string]string{"any": "version: v1\n"})
	const before = "{devicePlugin: {enabled: true, config: {name: by-hand, default: any}}, mig: {strategy: single}}"
	policy := f.policy("cluster-policy", "spec: "+before)
	f.copies()
	f.configure(research)
	f.Expect(f.observe().Copied).To(HaveKey("research-1"))

	f.Expect(f.client.Delete(f.ctx(), f.configMap(pluginconfig.ConfigMapName))).To(Succeed())
	f.Expect(f.client.Delete(f.ctx(), f.configMap("by-hand"))).To(Succeed())
	bare := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":null}}`))
	f.Expect(f.client.Patch(f.ctx(), policy, bare)).To(Succeed())
	o := f.observe()
	f.Expect(o.Copied).To(HaveKey("research-1"), "what only a node names can be written again")
	f.Expect(o.Configs).To(HaveKey("any"), "and so can what was copied from a ConfigMap that is gone")
	f.configure(research)
	f.restore(false)
	f.Expect(f.spec(policy)).To(MatchYAML(before))
	f.Expect(f.observe().Copied).To(BeNil(), "nothing of the operator stays behind")
}

// testKeysTaken: another controller edits or deletes keys again and again, so that the decision withholds their write.
func testKeysTaken(f *fixture) {
	f.createConfigMap("by-hand", map[string]string{"any": "version: v1\n"})
	f.policy("cluster-policy", "spec: {devicePlugin: {enabled: true, config: {name: by-hand, default: any}}, mig: {strategy: single}}")
	f.copies()
	f.configure(research)
	before := f.observe().Copied
	f.Expect(before).To(And(HaveKey("any"), HaveKey("research-1")))
	for _, data := range []string{`{"any": "theirs", "research-1": "theirs"}`, `{"any": null, "research-1": null}`} {
		theirs := client.RawPatch(types.MergePatchType, []byte(`{"data":`+data+`}`))
		f.Expect(f.client.Patch(f.ctx(), f.configMap(pluginconfig.ConfigMapName), theirs, client.FieldOwner("other"))).To(Succeed())
		f.writes = nil
		o := f.observe()
		f.Expect(o.Ready).To(BeFalse())
		_, err := f.configurer().Configure(f.ctx(), o, nil)
		f.Expect(err).NotTo(HaveOccurred())
		f.Expect(f.configurer().KeepCopy(f.ctx(), o)).To(Succeed())
		f.Expect(f.writes).To(BeEmpty())
		f.Expect(f.observe().Copied).To(Equal(before))
	}
	f.configure(research)
	f.Expect(f.observe().Ready).To(BeTrue())
	f.configure(nil)
	f.Expect(f.observe().Copied).NotTo(HaveKey("research-1"), "nothing names it any more")
}

// copies makes the Configurer keep a copy of the ConfigMap in a namespace of the operator.
func (f *fixture) copies() {
	f.own = "default"
	f.t.Cleanup(func() {
		of := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: f.own, Name: pluginconfig.ConfigMapName}}
		f.Expect(client.IgnoreNotFound(f.client.Delete(context.Background(), of))).To(Succeed())
	})
}

// testHeld leaves devicePlugin.config alone while NVIDIA's MPS daemons have clients, on the way in and on the way out.
func testHeld(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	before := f.spec(policy)
	f.held = "pod team/train uses NVIDIA's MPS daemon"
	f.configure(research)
	f.Expect(f.spec(policy)).To(Equal(before))
	f.held = ""
	f.configure(research)
	configured := f.spec(policy)
	f.Expect(configured).NotTo(Equal(before))
	f.held = "pod team/train uses NVIDIA's MPS daemon"
	f.restore(false)
	f.Expect(f.spec(policy)).To(Equal(configured))
	f.Expect(f.observe().Ready).To(BeTrue(), "its ConfigMap is there still")
	f.held = ""
	f.restore(false)
	f.Expect(f.spec(policy)).To(Equal(before))
}

func testKilled(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	failed := map[string]bool{}
	f.fail = func(write string) error {
		if !failed[write] {
			failed[write] = true
			return context.DeadlineExceeded
		}
		return nil
	}
	f.Expect(f.tryConfigure(research)).To(MatchError(ContainSubstring("writing ConfigMap gpu-operator/gpu-sharing-device-plugin")))
	f.Expect(f.tryConfigure(research)).To(MatchError(ContainSubstring("patching ClusterPolicy cluster-policy")))
	f.Expect(f.spec(policy)).To(ContainSubstring("strategy: single"))
	f.Expect(f.configure(research)).To(Equal([]string{"patch ClusterPolicy"}))
	f.Expect(f.observe().Ready).To(BeTrue())

	o := f.observe()
	_, err := f.configurer().Restore(f.ctx(), o, false, nil)
	f.Expect(err).To(MatchError(ContainSubstring("removing ConfigMap gpu-operator/gpu-sharing-device-plugin")))
	f.Expect(f.restore(false)).To(Equal([]string{"delete ConfigMap"}))
	f.Expect(f.spec(policy)).To(MatchYAML("{devicePlugin: {enabled: true}, mig: {strategy: single}}"))
}

func testAdopts(f *fixture) {
	f.createConfigMap("by-hand", map[string]string{"a100": "version: v1\n", "any": "version: v1\nflags: {migStrategy: none}\n"})
	policy := f.policy("cluster-policy", `
spec:
  devicePlugin: {enabled: true, config: {name: by-hand, default: any}}
  mig: {strategy: mixed}
`)
	f.Expect(f.configure(research)).To(HaveLen(2))
	f.Expect(f.configMap(pluginconfig.ConfigMapName).Data).To(Equal(map[string]string{
		"research-1": "version: v1\n",
		"a100":       "version: v1\nflags:\n  migStrategy: mixed\n",
		"any":        "version: v1\nflags: {migStrategy: mixed}\n",
	}), "mig.strategy overruled each of them")
	f.Expect(f.spec(policy)).To(ContainSubstring("default: any"))

	f.Expect(f.client.Delete(f.ctx(), f.configMap("by-hand"))).To(Succeed())
	f.Expect(f.configure(research)).To(BeEmpty(), "what was copied stays, for labels of nodes may name it")
	f.createConfigMap("by-hand", nil)
	f.restore(false)
	f.Expect(f.spec(policy)).To(MatchYAML(`
devicePlugin: {enabled: true, config: {name: by-hand, default: any}}
mig: {strategy: mixed}
`))
}

func testRestore(top *fixture) {
	for name, spec := range map[string]string{
		"with neither config nor strategy": `{devicePlugin: {enabled: true}, daemonsets: {updateStrategy: RollingUpdate}}`,
		"with empty ones":                  `{devicePlugin: {config: {name: "", default: ""}}, mig: {}, daemonsets: {updateStrategy: RollingUpdate}}`,
		"with strategy none":               `{devicePlugin: {config: {}}, mig: {strategy: none}, daemonsets: {updateStrategy: OnDelete}}`,
	} {
		top.t.Run(name, func(t *testing.T) {
			f := newFixture(t, top.client)
			policy := f.policy("cluster-policy", "spec: "+spec)
			f.Expect(f.restore(false)).To(BeEmpty(), "nothing of ours is there")
			f.configure(research)

			f.Expect(f.restore(true)).To(Equal([]string{"patch ClusterPolicy"}))
			f.Expect(f.spec(policy)).To(MatchYAML(spec))
			f.Expect(f.get(policy).GetAnnotations()).To(BeEmpty())
			f.Expect(f.restore(true)).To(BeEmpty(), "a pod that mounts the ConfigMap could not start again without it")
			f.Expect(f.restore(false)).To(Equal([]string{"delete ConfigMap"}))
			f.Expect(f.restore(false)).To(BeEmpty())
		})
	}
}

func testRecord(f *fixture) {
	f.createConfigMap("by-hand", map[string]string{"any": "version: v1\n"})
	policy := f.policy("cluster-policy", `
spec: {devicePlugin: {config: {name: by-hand, default: any}}, mig: {strategy: single}}
`)
	before := f.spec(policy)
	f.configure(research)
	f.Expect(f.client.Delete(f.ctx(), f.configMap(pluginconfig.ConfigMapName))).To(Succeed())
	f.Expect(f.observe().Ready).To(BeFalse())
	f.Expect(f.configure(research)).To(Equal([]string{"apply ConfigMap"}))
	f.Expect(keysOf(f.configMap(pluginconfig.ConfigMapName))).To(Equal([]string{"any", "research-1"}))
	f.Expect(f.observe().Ready).To(BeTrue())
	f.restore(false)
	f.Expect(f.spec(policy)).To(Equal(before))
}

func testFight(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	const back = `{"spec":{"devicePlugin":{"config":{"name":"theirs"}},"mig":{"strategy":"mixed"}}}`
	f.configure(research)

	f.patch(policy, "argocd-controller", back)
	f.Expect(f.observe().Overridden).To(BeNil())
	f.configure(research)
	f.Expect(f.observe().Ready).To(BeTrue(), "once, a chart that is upgraded writes its values over ours")

	f.patch(policy, "argocd-controller", back)
	f.Expect(f.configure(research)).To(BeEmpty())
	overridden := f.observe().Overridden
	f.Expect(overridden).NotTo(BeNil())
	f.Expect(overridden.Message).To(MatchRegexp(`^ClusterPolicy: field manager "argocd-controller" set devicePlugin.config.name "theirs", ` +
		`mig.strategy "mixed" again; reverted at \d\d:\d\d:\d\d UTC\. Make it leave that alone$`))

	f.clock.SetTime(overridden.Until)
	f.configure(research)
	f.Expect(f.observe().Ready).To(BeTrue())
	f.restore(false)
	f.Expect(f.spec(policy)).To(And(ContainSubstring("name: theirs"), ContainSubstring("strategy: mixed")),
		"what they want once we are gone is what they said last")
}

// testFightByReplacing replaces the ClusterPolicy by a manifest again and again, as Argo CD does with Replace=true: the
// record on the ClusterPolicy goes too.
func testFightByReplacing(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	manifest := f.get(policy).Object["spec"]
	f.tolerations = []corev1.Toleration{{Key: "example.com/shared", Operator: corev1.TolerationOpExists}}
	f.configure(research)
	f.Eventually(func() bool { // times of the API server are in seconds
		now := f.get(policy)
		now.SetAnnotations(nil)
		now.Object["spec"] = manifest
		f.Expect(f.client.Update(f.ctx(), now, client.FieldOwner("argocd-controller"))).To(Succeed())
		return !slices.Contains(f.configure(research), "patch ClusterPolicy")
	}).WithTimeout(5*time.Second).Should(BeTrue(), "the operator patches the ClusterPolicy without end")
	f.Expect(f.observe().Overridden.Manager).To(Equal("argocd-controller"))
	f.tolerations = nil
	f.restore(false)
	f.Expect(f.get(policy).Object["spec"]).To(Equal(manifest))
}

func testStale(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	stale := f.observe()
	f.patch(policy, "kubectl-edit", `{"spec":{"mig":{"strategy":"mixed"}}}`)
	_, err := f.configurer().Configure(f.ctx(), stale, nil)
	f.Expect(err).NotTo(HaveOccurred())
	f.restore(false)
	f.Expect(f.spec(policy)).To(ContainSubstring("strategy: mixed"))
}

func testReplaced(f *fixture) {
	f.configureAndDelete(installed)
	f.Expect(f.observe().Reason).To(Equal(v1alpha1.ReasonNoDevicePlugin))
	policy := f.policy("cluster-policy", "spec: {devicePlugin: {}, mig: {strategy: mixed}}")
	f.configure(research)
	f.Expect(keysOf(f.configMap(pluginconfig.ConfigMapName))).To(ConsistOf("research-1", deviceplugin.Default("mixed").Key))
	f.restore(false)
	f.Expect(f.spec(policy)).To(ContainSubstring("strategy: mixed"))

	f.configureAndDelete(installed)
	f.Expect(f.restore(true)).To(BeEmpty())
	f.Expect(f.restore(false)).To(Equal([]string{"delete ConfigMap"}), "found though no ClusterPolicy tells the namespace")
}

func (f *fixture) configureAndDelete(spec string) {
	f.t.Helper()
	f.Expect(f.client.DeleteAllOf(f.ctx(), nvidia("ClusterPolicy", ""))).To(Succeed())
	policy := f.policy("cluster-policy", spec)
	f.configure(research)
	f.Expect(f.client.Delete(f.ctx(), policy)).To(Succeed())
}

func testStandAlone(top *fixture) {
	config := deviceplugin.Default("")
	for name, tc := range map[string]struct {
		theirs map[string]string // nil: no ConfigMap
		ours   []string          // beside research-1
		stays  []string
	}{
		"that does not exist":       {ours: []string{"default"}, stays: []string{"default"}},
		"with the one key":          {theirs: map[string]string{"any": config.Data}, ours: []string{"default"}, stays: []string{"any"}},
		"with a default":            {theirs: map[string]string{"default": "", "a100": ""}, stays: []string{"a100", "default"}},
		"with a default of a chart": {theirs: map[string]string{"b": "", "a100": ""}, stays: []string{"a100", "b"}},
	} {
		top.t.Run(name, func(t *testing.T) {
			f := newFixture(t, top.client)
			f.standAlone = pluginconfig.StandAlone{Namespace: namespace, ConfigMap: "plugin"}
			f.copies()
			if tc.theirs != nil {
				f.createConfigMap("plugin", tc.theirs)
			}
			f.Expect(f.configure(research)).To(Equal([]string{"apply ConfigMap", "apply ConfigMap"}), "and its copy")
			o := f.observe()
			f.Expect(o.Ready).To(BeTrue())
			f.Expect(o.Copied).NotTo(BeNil())
			f.Expect(o.ClusterPolicy).To(BeFalse())
			f.Expect(slices.Sorted(maps.Keys(o.Applied))).To(Equal(append(tc.ours, "research-1")))
			for key, data := range tc.theirs {
				f.Expect(f.configMap("plugin").Data).To(HaveKeyWithValue(key, data))
			}
			f.Expect(f.configure(research)).To(BeEmpty())
			f.restore(true) // the plugin mounts its ConfigMap all the time
			f.Expect(keysOf(f.configMap("plugin"))).To(Equal(tc.stays))
			f.Expect(f.observe().Copied).To(BeNil(), "nothing of the operator stays behind")
			f.Expect(f.restore(true)).To(BeEmpty())
		})
	}
}

func testTolerations(f *fixture) {
	policy := f.policy("cluster-policy", `
spec:
  devicePlugin: {enabled: true}
  daemonsets: {tolerations: [{key: team, operator: Exists}]}
`)
	before := f.spec(policy)
	f.tolerations = []corev1.Toleration{{Key: "example.com/shared", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
	f.Expect(f.configure(research)).To(Equal([]string{"apply ConfigMap", "patch ClusterPolicy"}), "one patch for all")
	f.Expect(f.spec(policy)).To(ContainSubstring(`
  tolerations:
  - key: team
    operator: Exists
  - effect: NoSchedule
    key: example.com/shared
    operator: Exists
`))
	f.Expect(f.observe().Operands.Ours).To(Equal(f.tolerations))
	f.Expect(f.configure(research)).To(BeEmpty())

	f.tolerations = nil
	f.Expect(f.configure(research)).To(Equal([]string{"patch ClusterPolicy"}))
	f.Expect(f.observe().Operands.Tolerations).To(Equal([]corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}))
	f.Expect(f.observe().Ready).To(BeTrue(), "and it still reads our ConfigMap")

	f.tolerations = []corev1.Toleration{{Key: "example.com/shared", Operator: corev1.TolerationOpExists}}
	f.configure(research)
	f.Expect(f.restore(true)).To(Equal([]string{"patch ClusterPolicy"}))
	f.Expect(f.observe().Operands.Ours).To(Equal(f.tolerations), "they stay until they may go")
	f.tolerations = nil
	f.Expect(f.restore(false)).To(Equal([]string{"patch ClusterPolicy", "delete ConfigMap"}))
	f.Expect(f.spec(policy)).To(Equal(before))
	f.Expect(f.get(policy).GetAnnotations()).To(BeEmpty())
}

func testTolerationsTaken(f *fixture) {
	policy := f.policy("cluster-policy", installed)
	f.tolerations = []corev1.Toleration{{Key: "example.com/shared", Operator: corev1.TolerationOpExists}}
	f.configure(research)
	f.patch(policy, "helm", `{"spec": {"daemonsets": {"tolerations": [{"key": "team", "operator": "Exists"}]}}}`)
	o := f.observe()
	f.Expect(o.Operands.Taken).To(Equal("helm"))
	f.Expect(o.Operands.Ours).To(BeEmpty())
	f.Expect(o.Ready).To(BeTrue())
	f.tolerations = nil
	f.restore(false)
	f.Expect(f.observe().Operands.Tolerations).To(Equal([]corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}))
	f.Expect(f.get(policy).GetAnnotations()).To(BeEmpty())
}
