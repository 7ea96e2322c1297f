// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginconfig_test

import (
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/internal/controller/pluginconfig"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/migmanager"
)

const theirConfigs = `version: v1
mig-configs:
  all-disabled:
  - devices: all
    mig-enabled: false
`

// configureMIG is one reconcile that needs mig-manager.
func (f *fixture) configureMIG() []string {
	f.t.Helper()
	f.writes = nil
	_, err := f.configurer().ConfigureMIG(f.ctx(), f.observe())
	f.Expect(err).NotTo(HaveOccurred())
	return f.writes
}

func (f *fixture) restoreMIG() []string {
	f.t.Helper()
	f.writes = nil
	_, err := f.configurer().RestoreMIG(f.ctx(), f.observe())
	f.Expect(err).NotTo(HaveOccurred())
	return f.writes
}

func testManager(top *fixture) {
	for name, tc := range map[string]struct{ spec, configMap string }{
		"built in": {spec: installed, configMap: "default-mig-parted-config"},
		"named": {
			spec:      installed + "  migManager: {enabled: true, config: {name: mine, default: all-disabled}}\n",
			configMap: "mine",
		},
	} {
		f := newFixture(top.t, top.client)
		policy := f.policy("cluster-policy-"+tc.configMap, tc.spec)
		before := f.spec(policy)
		f.createConfigMap(tc.configMap, map[string]string{migmanager.FileKey: theirConfigs})
		f.Expect(f.configureMIG()).To(BeEmpty(), "the device plugin comes first")
		f.configure(research)
		f.Expect(f.observe().MIGReady).To(BeFalse(), name)
		f.Expect(f.configureMIG()).To(Equal([]string{"apply ConfigMap", "patch ClusterPolicy"}), name)
		f.Expect(f.configureMIG()).To(BeEmpty(), "once")
		f.Expect(f.observe().MIGReady).To(BeTrue())
		ours := f.configMap(pluginconfig.ConfigMapName)
		f.Expect(ours.Data[migmanager.FileKey]).To(MatchYAML(theirConfigs), "nodes that no policy governs go on naming them")
		f.Expect(keysOf(ours)).To(ContainElement("research-1"))
		f.Expect(f.spec(policy)).To(ContainSubstring("name: " + pluginconfig.ConfigMapName))

		f.Expect(f.restoreMIG()).To(Equal([]string{"patch ClusterPolicy"}))
		f.Expect(f.restoreMIG()).To(BeEmpty())
		f.Expect(f.observe().MIGReady).To(BeFalse())
		f.configureMIG()
		f.restore(false)
		f.Expect(f.spec(policy)).To(MatchYAML(before), "with the device plugin's it is restored too")
		f.Expect(f.client.Delete(f.ctx(), policy)).To(Succeed())
	}
}

func testNoManager(f *fixture) {
	policy := f.policy("cluster-policy", installed+"  migManager: {enabled: false}\n")
	f.configure(research)
	f.Expect(f.observe().NoMIGManager).To(Equal("ClusterPolicy cluster-policy has spec.migManager.enabled false; enable it"))
	f.Expect(f.configureMIG()).To(BeEmpty())
	f.patch(policy, "helm", `{"spec":{"migManager":{"enabled":true}}}`)
	f.Expect(f.observe().NoMIGManager).To(BeEmpty())

	f.restore(false)
	f.createConfigMap("plugin-configs", map[string]string{migmanager.FileKey: "version: v1\n"})
	f.patch(policy, "helm", `{"spec":{"devicePlugin":{"config":{"name":"plugin-configs","default":"config.yaml"}}}}`)
	f.Expect(f.observe().NoMIGManager).To(ContainSubstring("has a key config.yaml, which mig-manager would read"))
}
