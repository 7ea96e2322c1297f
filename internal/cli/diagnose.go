// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/openapi"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/node"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// The oldest versions that should work, and those of the device plugin that were tested or should work: the table
// "Compatibility" of docs/install.md.
const (
	leastKubernetes  = "1.30"
	leastGPUOperator = "v25.3"
	leastDriver      = "535"
	leastNFD         = "v0.17"
	firstPlugin      = "v0.19.3"
	lastPlugin       = "v0.20.0"
	// leastForDRA is the Kubernetes, and testedDRA the version of NVIDIA's DRA driver, for nodes that this driver
	// serves.
	leastForDRA = "1.36"
	testedDRA   = "v0.5.0"
)

// diagnosis collects findings.
type diagnosis struct{ found []finding }

func (d *diagnosis) add(level, format string, args ...any) {
	d.found = append(d.found, finding{level, fmt.Sprintf(format, args...)})
}

func (d *diagnosis) ok(format string, args ...any)    { d.add(levelOK, format, args...) }
func (d *diagnosis) warn(format string, args ...any)  { d.add(levelWarning, format, args...) }
func (d *diagnosis) error(format string, args ...any) { d.add(levelError, format, args...) }

// diagnose decides what is right and wrong with an installation.
func diagnose(is installation) []finding {
	d := &diagnosis{}
	if is.missing != "" {
		d.error("The operator is not installed: %s. Install it, or choose another cluster with --context", is.missing)
		return d.found
	}
	d.controller(is)
	d.betweenOLMs(is)
	if len(is.installers) > 1 {
		d.error("Several programs install the operator, each over what the other did: %s. Remove all but one, as docs/install.md#from-helm-to-olm or #from-olm-v0-to-v1 says", strings.Join(is.installers, ", "))
	}
	d.definitions(is)
	if len(is.unknown) > 0 {
		d.error("%s: the labels of a node with GPUs (%s), and no GPUNode. The controller makes one: look at its log", nodesNamed(is.unknown), is.selector())
	}
	if len(is.nodes) == 0 {
		if len(is.unknown) == 0 {
			d.warn("No node has GPUs: none has the labels %s, as where autoscalers have removed all. If there is one, look at the pods of NVIDIA's GPU "+
				"Feature Discovery, which sets nvidia.com/gpu.present", is.selector())
		}
		return d.found
	}
	d.each(is.nodes, levelWarning, "not Ready, so that the operator's and NVIDIA's programs may be missing there. Look at the node", func(n nodeParts) bool { return n.down })
	d.updates(is)
	if up := slices.DeleteFunc(slices.Clone(is.nodes), func(n nodeParts) bool { return n.down }); len(up) > 0 {
		is.nodes = up // a node that is down says nothing about the operator; if all are, that is no reason to call it healthy
	}
	d.agents(is)
	d.nvidia(is)
	d.dra(is)
	d.each(is.nodes, levelError, "kubelet older than "+leastKubernetes+". Upgrade Kubernetes", func(n nodeParts) bool { return older(n.kubelet, leastKubernetes) })
	d.each(is.nodes, levelWarning, "driver older than "+leastDriver+", which is not supported. Upgrade the driver", func(n nodeParts) bool {
		return older(n.driver, leastDriver)
	})
	d.policies(is.snapshot.Policies)
	return d.found
}

// controller diagnoses the controller, and its version beside that of this program.
func (d *diagnosis) controller(is installation) {
	switch {
	case is.leader.absent != "":
		d.error("%s", is.leader.absent)
	case is.leader.proof == "":
		d.warn("Not known whether a controller runs: you may not read ClusterRoleBindings, or leases and Deployments. Ask an administrator to " +
			"bind the ClusterRole gpu-sharing-cli to you")
	case len(is.controllers) == 0:
		d.ok("A controller runs: %s", is.leader.proof)
	}
	if len(is.controllers) > 1 {
		d.error("The operator is installed %d times: %s. Uninstall all but one", len(is.controllers), strings.Join(namesOf(is.controllers), ", "))
	}
	for _, c := range is.controllers {
		if !c.ready && is.leader.proof != "" {
			d.error("No pod of deployment %s is available, though the lease of the controller is held: look at the log of its pods", c.name)
		}
		if c.ready && c.updating {
			d.error("The update of deployment %s to version %s is not done: its former pods may still act. Wait for it, or look at its pods", c.name, known(c.version))
			continue
		}
		if c.ready && is.leader.absent == "" {
			d.ok("The controller runs: deployment %s, version %s", c.name, known(c.version))
		}
		own, _, _ := strings.Cut(is.program, " ")
		if differ(own, c.version) {
			d.warn("This program is %s and the controller %s. What plan prints is right if both have one version: install kubectl gpusharing %s", own, c.version, c.version)
		}
	}
}

// betweenOLMs tells how to go on with OLM v1 where OLM v0 has uninstalled the operator and left what v1 does not take
// over.
func (d *diagnosis) betweenOLMs(is installation) {
	if is.olmV0 == "" || is.leader.absent == "" || len(is.controllers) > 0 {
		return
	}
	const name, crds = "gpu-sharing-operator", "gpunodes." + v1alpha1.Group + " gpusharingpolicies." + v1alpha1.Group
	d.warn("OLM v0 has uninstalled the operator and left its kinds. Install it again; or to go on with OLM v1, run these commands first:\n%s", strings.Join([]string{
		"kubectl label crd " + crds + " app.kubernetes.io/managed-by=Helm olm.managed- operators.coreos.com/" + name + "." + is.olmV0 + "-",
		"kubectl annotate crd " + crds + " meta.helm.sh/release-name=" + name + " meta.helm.sh/release-namespace=" + is.olmV0,
		"kubectl delete clusterrole gpu-sharing-cli gpu-sharing-controller-autoscaling gpu-sharing-edit gpu-sharing-view",
		"kubectl -n " + is.olmV0 + " delete role,rolebinding gpu-sharing-controller gpu-sharing-node gpu-sharing-operands gpu-sharing-top --ignore-not-found",
	}, "\n"))
}

// definitions diagnoses the CRDs: the API server drops fields that they lack from all that is written. A controller of
// another version than this program may need other fields.
func (d *diagnosis) definitions(is installation) {
	own, _, _ := strings.Cut(is.program, " ")
	level := levelError
	if slices.ContainsFunc(is.controllers, func(c component) bool { return differ(own, c.version) }) {
		level = levelWarning
	}
	for _, s := range is.skews {
		d.add(level, "The CRD of %s is older than this program: it lacks %s. Apply the CRDs of the operator's version: helm upgrade with crds.install=true, "+
			"or kubectl apply --server-side -f config/crd", s.kind, format.Few(s.lacks, mostNamed))
	}
}

// mostNamed is how many of something a diagnosis names.
const mostNamed = 5

// updates diagnoses updates of the agents, and agents that Kubernetes does not create.
func (d *diagnosis) updates(is installation) {
	level, what := levelError, "is not done"
	if is.updateGoesOn {
		level, what = levelWarning, "goes on"
	}
	for _, set := range is.agentSets {
		if remaining := is.outdated(set); !set.observed || remaining > 0 {
			d.add(level, "The update of daemonset %s %s: %s of %s to be replaced. Wait for it, or look at the pods that are not ready", set.name, what,
				count(remaining, "agent"), count(set.nodes, "node"))
		}
		if absent := is.absent(set); set.observed && absent > 0 {
			namespace, name, _ := strings.Cut(set.name, "/")
			d.add(level, "daemonset %s has no pod on %d of %s. Its Events say why pods cannot be created, such as Pod Security or a quota: "+
				"kubectl -n %s describe daemonset %s", set.name, absent, count(set.nodes, "node"), namespace, name)
		}
	}
}

// agents diagnoses the agents, and their versions beside that of the controller.
func (d *diagnosis) agents(is installation) {
	ready := func(n nodeParts) bool {
		return slices.ContainsFunc(n.agents, func(c component) bool { return c.ready })
	}
	level := levelError
	if is.updateGoesOn {
		level = levelWarning
	}
	d.each(is.nodes, level, "no agent. The agent runs where the label nvidia.com/gpu.deploy.client is true: look at daemonset/"+agentName, func(n nodeParts) bool {
		return len(n.agents) == 0 && !n.draAgent
	})
	d.each(is.nodes, level, "no agent. With a GPUCluster it runs where the label nvidia.com/gpu.deploy.dra-driver is true and "+
		"nvidia.com/gpu.deploy.dra-validator is not stopped: look at daemonset/"+draAgentName, func(n nodeParts) bool { return len(n.agents) == 0 && n.draAgent })
	d.each(is.nodes, level, "an agent that is not ready. Look at the log of its pod (app.kubernetes.io/name=gpu-sharing-agent)", func(n nodeParts) bool {
		return len(n.agents) > 0 && !ready(n)
	})
	if running := selected(is.nodes, ready); len(running) == len(is.nodes) {
		d.ok("An agent is ready on %s with GPUs", count(len(running), "node"))
	}
	for _, c := range is.controllers {
		d.each(is.nodes, levelWarning, fmt.Sprintf("an agent of another version than the controller, %s. Wait for the update of their DaemonSet, "+
			"or finish the upgrade", known(c.version)),
			func(n nodeParts) bool {
				return slices.ContainsFunc(n.agents, func(a component) bool { return differ(a.version, c.version) })
			})
	}
}

// nvidia diagnoses NVIDIA's programs.
func (d *diagnosis) nvidia(is installation) {
	switch {
	case is.snapshot.Plugin.Reason != "":
		d.error("%s: %s", is.snapshot.Plugin.Reason, is.snapshot.Plugin.Message)
	case is.clusterPolicy == "" && !slices.ContainsFunc(is.nodes, usesPlugin): // NVIDIA's DRA driver serves them all
	case is.clusterPolicy == "":
		d.ok("No ClusterPolicy of NVIDIA's GPU Operator was found")
	case older(is.gpuOperator, leastGPUOperator):
		d.warn("NVIDIA's GPU Operator is %s. Before %s MPS does not work: upgrade it", is.gpuOperator, leastGPUOperator)
	default:
		d.ok("NVIDIA's GPU Operator has ClusterPolicy %s, version %s", is.clusterPolicy, known(is.gpuOperator))
	}
	if is.standAlone {
		d.standAlone(is)
	}
	d.each(is.nodes, levelWarning, "no label of Node Feature Discovery (feature.node.kubernetes.io/…). Look at its worker", func(n nodeParts) bool { return !n.nfd })
	d.each(is.nodes, levelError, "no pod of NVIDIA's device plugin that is ready, so they offer no GPUs. Look at its DaemonSet, and at the label nvidia.com/gpu.deploy.device-plugin",
		func(n nodeParts) bool {
			return usesPlugin(n) && !slices.ContainsFunc(n.plugins, func(c component) bool { return c.ready })
		})
	d.each(is.nodes, levelWarning, "Node Feature Discovery older than "+leastNFD+", without which MPS does not work beside NVIDIA's MPS DaemonSet. Upgrade it",
		func(n nodeParts) bool {
			return slices.ContainsFunc(n.discovery, func(c component) bool { return older(c.version, leastNFD) })
		})
	plugins := func(n nodeParts) []component { return n.plugins }
	untested := func(v string) bool { return older(v, firstPlugin) || older(lastPlugin, v) }
	d.versions(is.nodes, plugins, "NVIDIA's device plugin", untested, fmt.Sprintf("Versions %s to %s were tested or should work", firstPlugin, lastPlugin))
}

// versions diagnoses those of a program of NVIDIA, as tags and labels tell them.
func (d *diagnosis) versions(nodes []nodeParts, of func(nodeParts) []component, program string, untested func(string) bool, tested string) {
	versions := map[string]bool{}
	for _, n := range nodes {
		for _, c := range of(n) {
			versions[c.version] = true
		}
	}
	for _, v := range slices.Sorted(maps.Keys(versions)) {
		switch {
		case v == "":
			d.warn("The version of %s is not known: its image has no tag. %s", program, tested)
		case untested(v):
			d.warn("%s is %s. %s", program, v, tested)
		default:
			d.ok("%s is %s", program, v)
		}
	}
}

// usesPlugin reports whether the device plugin is to serve a node.
func usesPlugin(n nodeParts) bool { return n.stack != dra.DRADriver }

// dra diagnoses NVIDIA's DRA driver, and what Kubernetes has around it, where it serves nodes.
func (d *diagnosis) dra(is installation) {
	for _, lacks := range is.lacks {
		d.warn("%s", lacks)
	}
	d.each(is.nodes, levelError, "NVIDIA's device plugin and its DRA driver offer the same GPUs, so that pods of both get the same ones. Drain each node and keep one of "+
		"them off it (docs/dra.md)", func(n nodeParts) bool { return n.stack == dra.Both })
	if !slices.ContainsFunc(is.nodes, func(n nodeParts) bool { return !usesPlugin(n) }) {
		return
	}
	ready := func(n nodeParts) bool {
		return slices.ContainsFunc(n.drivers, func(c component) bool { return c.ready })
	}
	d.each(is.nodes, levelError, "no pod of NVIDIA's DRA driver that is ready, so no new pod gets their GPUs. Look at its DaemonSet, whose pods have the label "+
		cluster.DRALabels()[0]+"=kubelet-plugin, or with a GPUCluster app=nvidia-dra-driver-kubelet-plugin",
		func(n nodeParts) bool { return !usesPlugin(n) && !ready(n) })
	drivers := func(n nodeParts) []component { return n.drivers }
	d.versions(is.nodes, drivers, "NVIDIA's DRA driver", func(v string) bool { return differ(v, testedDRA) }, fmt.Sprintf("Version %s was tested", testedDRA))
	d.each(is.nodes, levelError, "kubelet older than "+leastForDRA+", where NVIDIA's DRA driver serves the GPUs. Upgrade Kubernetes, or serve them by the device plugin",
		func(n nodeParts) bool { return !usesPlugin(n) && older(n.kubelet, leastForDRA) })
	d.classes(is.snapshot.DRA)
}

// classes diagnoses DeviceClasses and DeviceTaintRules.
func (d *diagnosis) classes(w cluster.DRA) {
	if !w.ServesTaintRules {
		d.warn("The API server serves no DeviceTaintRules, so policies with the strategy MIG change nothing where NVIDIA's DRA driver serves the GPUs. Use " +
			"Kubernetes 1.37, or 1.36 with the feature gate DRADeviceTaintRules")
	}
	if !w.ServesClasses {
		d.error("The API server serves no DeviceClasses of resource.k8s.io/v1, so pods cannot request GPUs of NVIDIA's DRA driver by a resource name. Use Kubernetes %s or newer",
			leastForDRA)
		return
	}
	served := map[string]bool{}
	for _, c := range w.Classes {
		served[c.Resource] = c.Resource != ""
	}
	for _, resource := range slices.Sorted(maps.Keys(served)) {
		if duplicates := dra.Duplicates(w.Classes, resource); duplicates != "" && served[resource] {
			d.warn("%s", duplicates)
		}
	}
}

// policies diagnoses the policies.
func (d *diagnosis) policies(policies []v1alpha1.GPUSharingPolicy) {
	for i := range policies {
		if state, why := policyState(&policies[i]); state != v1alpha1.ReasonReady {
			do := cmp.Or(node.WhatToDo(state), "docs/troubleshooting.md lists what to do about each reason")
			d.warn("Policy %s is not ready: %s: %s. %s", policies[i].Name, state, why, do)
		}
	}
}

// each adds a finding about the nodes for which something holds, if there are any.
func (d *diagnosis) each(nodes []nodeParts, level, has string, holds func(nodeParts) bool) {
	if names := selected(nodes, holds); len(names) > 0 {
		d.add(level, "%s: %s", nodesNamed(names), has)
	}
}

func selected(nodes []nodeParts, holds func(nodeParts) bool) (names []string) {
	for _, n := range nodes {
		if holds(n) {
			names = append(names, n.name)
		}
	}
	return names
}

func namesOf(all []component) []string {
	names := make([]string, len(all))
	for i := range all {
		names[i] = all[i].name
	}
	return names
}

func known(version string) string {
	if version == "" {
		return "not known"
	}
	return version
}

// older reports whether a version is before another one; false if it is not known.
func older(is, least string) bool {
	a, err := parseVersion(is)
	if err != nil {
		return false
	}
	b, err := parseVersion(least)
	return err == nil && a.LessThan(b)
}

// differ reports whether two versions are known and not the same.
func differ(a, b string) bool {
	v, err := parseVersion(a)
	if err != nil {
		return false
	}
	w, err := parseVersion(b)
	return err == nil && !v.EqualTo(w)
}

// parseVersion reads a version such as v1.37.1, 1.30 or 535. Errors: it is none, such as a tag named latest.
func parseVersion(s string) (*version.Version, error) {
	s = strings.TrimPrefix(s, "v")
	if s != "" && !strings.Contains(s, ".") {
		s += ".0"
	}
	return version.ParseGeneric(s)
}

// skew is a kind of the operator of which the API server does not know all fields that this program knows.
type skew struct {
	kind string
	// lacks are the paths of the fields that the CRD lacks.
	lacks []string
}

// openAPISchema is what is needed of an OpenAPI v3 schema.
type openAPISchema struct {
	Properties map[string]openAPISchema `json:"properties"`
	Items      *openAPISchema           `json:"items"`
	Kinds      []struct {
		Group, Kind string
	} `json:"x-kubernetes-group-version-kind"`
}

// readSkews compares the fields of the operator's kinds with those that the API server publishes of their CRDs, which
// everybody who is logged in may read. Nil where it does not publish them.
func readSkews(published openapi.Client) ([]skew, error) {
	paths, err := published.Paths()
	if err != nil {
		return nil, fmt.Errorf("reading what the API server publishes of its kinds: %w", err)
	}
	version, found := paths["apis/"+v1alpha1.SchemeGroupVersion.String()]
	if !found {
		return nil, nil
	}
	data, err := version.Schema("application/json")
	if err != nil {
		return nil, fmt.Errorf("reading the schemas of %s: %w", v1alpha1.SchemeGroupVersion, err)
	}
	var document struct {
		Components struct {
			Schemas map[string]openAPISchema `json:"schemas"`
		} `json:"components"`
	}
	if err := json.Unmarshal(data, &document); err != nil {
		return nil, fmt.Errorf("decoding the schemas of %s: %w", v1alpha1.SchemeGroupVersion, err)
	}
	return skews(document.Components.Schemas), nil
}

// skews are the kinds whose schemas lack fields.
func skews(published map[string]openAPISchema) (found []skew) {
	for kind, of := range map[string]reflect.Type{
		"GPUNode": reflect.TypeFor[v1alpha1.GPUNode](), "GPUSharingPolicy": reflect.TypeFor[v1alpha1.GPUSharingPolicy](),
	} {
		for _, s := range published {
			if len(s.Kinds) == 0 || s.Kinds[0].Kind != kind {
				continue
			}
			if lacks := lacking(s, of, ""); len(lacks) > 0 {
				slices.Sort(lacks)
				found = append(found, skew{kind: kind, lacks: lacks})
			}
		}
	}
	slices.SortFunc(found, func(a, b skew) int { return strings.Compare(a.kind, b.kind) })
	return found
}

// lacking are the paths of the fields of a type that a schema lacks; of a structure that is missing, only its own.
func lacking(s openAPISchema, of reflect.Type, path string) (lacks []string) {
	switch {
	case of.Kind() == reflect.Pointer:
		return lacking(s, of.Elem(), path)
	case of.Kind() == reflect.Slice && s.Items != nil:
		return lacking(*s.Items, of.Elem(), path+"[]")
	case of.Kind() != reflect.Struct || of.PkgPath() != reflect.TypeFor[v1alpha1.GPUNode]().PkgPath():
		return nil // the types of others have a form of their own
	}
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous && name == "" && strings.HasPrefix(field.Type.PkgPath(), "k8s.io/"), name == "metadata", name == "-":
			continue
		case name == "":
			lacks = append(lacks, lacking(s, field.Type, path)...)
			continue
		}
		if part, known := s.Properties[name]; known {
			lacks = append(lacks, lacking(part, field.Type, path+"."+name)...)
		} else {
			lacks = append(lacks, strings.TrimPrefix(path+"."+name, "."))
		}
	}
	return lacks
}

// standAloneOf is the ConfigMap of a device plugin without the GPU Operator that the flags of a controller name.
func standAloneOf(deployment *appsv1.Deployment) (named types.NamespacedName) {
	for _, container := range deployment.Spec.Template.Spec.Containers {
		for _, arg := range container.Args {
			switch flag, value, _ := strings.Cut(arg, "="); flag {
			case "--device-plugin-namespace":
				named.Namespace = value
			case "--device-plugin-configmap":
				named.Name = value
			}
		}
	}
	return named
}

// configRead is the ConfigMap from which NVIDIA's config-manager in a pod takes the configurations of the device plugin
// (k8s-device-plugin, cmd/config-manager); without a name: it has none.
func configRead(pod *corev1.Pod) types.NamespacedName {
	for i := range pod.Spec.Containers {
		container := &pod.Spec.Containers[i]
		for _, variable := range container.Env {
			if variable.Name == "CONFIG_FILE_SRCDIR" {
				return types.NamespacedName{Namespace: pod.Namespace, Name: configMapAt(&pod.Spec, container, variable.Value)}
			}
		}
	}
	return types.NamespacedName{Namespace: pod.Namespace}
}

// configMapAt is the ConfigMap that a container mounts at a path; empty: none.
func configMapAt(spec *corev1.PodSpec, container *corev1.Container, path string) string {
	for _, mount := range container.VolumeMounts {
		for _, volume := range spec.Volumes {
			if mount.MountPath == path && volume.Name == mount.Name && volume.ConfigMap != nil {
				return volume.ConfigMap.Name
			}
		}
	}
	return ""
}

// standAlone diagnoses device plugins that the GPU Operator does not run: policies reach them by the ConfigMap that the
// controller was told.
func (d *diagnosis) standAlone(is installation) {
	var read []string
	for _, n := range is.nodes {
		for _, c := range n.plugins {
			if usesPlugin(n) {
				read = append(read, c.config.String())
			}
		}
	}
	if len(read) == 0 || len(is.controllers) == 0 {
		return // nothing is known of the one or of the other
	}
	slices.Sort(read)
	for _, config := range slices.Compact(read) {
		namespace, name, _ := strings.Cut(config, "/")
		switch {
		case name == "":
			d.error("The device plugin in namespace %s is not the GPU Operator's and reads no ConfigMap, so no policy reaches it. Install it by NVIDIA's chart with config.name "+
				"or config.map, then upgrade the operator", namespace)
		case is.told.Name == "":
			d.error("The device plugin is not the GPU Operator's, and the controller was not told which ConfigMap it reads. Upgrade the operator with "+
				"--set devicePlugin.namespace=%s,devicePlugin.configMap=%s", namespace, name)
		case config != is.told.String():
			d.error("The device plugin reads ConfigMap %s, and the controller was told %s. Upgrade the operator with --set devicePlugin.namespace=%s,devicePlugin.configMap=%s",
				config, is.told, namespace, name)
		default:
			d.ok("The operator configures a stand-alone device plugin by ConfigMap %s", config)
		}
	}
}
