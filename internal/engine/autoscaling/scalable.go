// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package autoscaling

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
)

// The annotations by which Cluster Autoscaler knows the GPUs of a node of an empty group (kubernetes/autoscaler
// cloudprovider/clusterapi/clusterapi_utils.go). OpenShift ignores gpu-type: there the count is always that of
// nvidia.com/gpu (openshift/kubernetes-autoscaler cloudprovider/openshift/openshift_unstructured.go).
const (
	capacityPrefix     = "capacity.cluster-autoscaler.kubernetes.io/"
	AnnotationGPUType  = capacityPrefix + "gpu-type"
	AnnotationGPUCount = capacityPrefix + "gpu-count"
	// annotationLabels has the labels of a new node as a=b,c=d, and annotationTaints its taints as a=b:Effect,….
	annotationLabels = capacityPrefix + "labels"
	annotationTaints = capacityPrefix + "taints"
	// annotationGPUOpenShift is the number of whole GPUs, which OpenShift's controllers of AWS, Azure and GCP write.
	annotationGPUOpenShift = GroupOpenShift + "/GPU"
)

// OfScalable reports whether an annotation of a MachineSet or MachineDeployment matters here.
func OfScalable(annotation string) bool {
	return strings.HasPrefix(annotation, capacityPrefix) || annotation == v1alpha1.AnnotationAutoscaling || annotation == annotationGPUOpenShift
}

// defaulter fills in capacity annotations that are missing, once, and leaves them alone afterwards
// (openshift/cluster-autoscaler-operator pkg/controller/machineautoscaler/machinetarget.go). What it alone owns is a
// default, which the operator takes over.
const defaulter = "cluster-autoscaler-operator"

// Record is what the operator records on an object before it first writes to it.
type Record struct {
	// Policy asked for it.
	Policy string `json:"policy"`
	// Previous are the annotations before that. One that is missing was not there.
	Previous map[string]string `json:"previous,omitempty"`
}

// record is the record on the object; nil if there is none, or none that can be read.
func (s *Scalable) record() *Record {
	var r Record
	if json.Unmarshal([]byte(s.Annotations[v1alpha1.AnnotationAutoscaling]), &r) != nil {
		return nil
	}
	return &r
}

// owns reports whether the operator owns an annotation.
func (s *Scalable) owns(key string) bool { return slices.Contains(s.Managers[key], FieldManager) }

// others are the field managers of an annotation besides the operator.
func (s *Scalable) others(key string) []string {
	return slices.DeleteFunc(slices.Clone(s.Managers[key]), func(m string) bool { return m == FieldManager })
}

// theirs is an annotation as it is without the operator; empty: there is none.
func (s *Scalable) theirs(key string) string {
	if !s.owns(key) || len(s.others(key)) > 0 {
		return s.Annotations[key]
	}
	if record := s.record(); record != nil {
		return record.Previous[key]
	}
	return ""
}

// shown are the labels that nodes of the group had while there were some, as the operator announced them: those of which no template tells.
func (s *Scalable) shown() map[string]string {
	if !s.owns(annotationLabels) {
		return nil
	}
	labels := pairsIn(s.Annotations[annotationLabels])
	maps.DeleteFunc(labels, func(key, _ string) bool { return synced(key) })
	return labels
}

// pairsIn reads the form a=b,c=d.
func pairsIn(text string) map[string]string {
	pairs := map[string]string{}
	for part := range strings.SplitSeq(text, ",") {
		if key, value, is := strings.Cut(strings.TrimSpace(part), "="); is {
			pairs[key] = value
		}
	}
	return pairs
}

// expectations adds to want the labels and taints of a new node that Cluster Autoscaler does not know: of Cluster API it reads these
// annotations and no template. Otherwise no pod that selects the labels starts a node, and pods that do not tolerate the taints start
// nodes for nothing. What another has written there stays, and is reported if it lacks something.
func (e *entry) expectations(want map[string]string) {
	labels := map[string]string{}
	for key, value := range e.g.labels(&e.shape) {
		if selectsBy(e.by.Spec.NodeSelector, key) {
			labels[key] = value
		}
	}
	var taints []string
	for _, t := range e.by.Spec.Taints {
		taints = append(taints, fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect))
	}
	e.expect(want, annotationLabels, listing(labels))
	e.expect(want, annotationTaints, taints)
}

// expect adds entries to an annotation that has a list of them.
func (e *entry) expect(want map[string]string, key string, entries []string) {
	var has []string
	if e.g.scalable != nil && e.g.scalable.theirs(key) != "" {
		has = strings.Split(e.g.scalable.theirs(key), ",")
	}
	lacking := slices.DeleteFunc(slices.Clone(entries), func(entry string) bool { return slices.Contains(has, entry) })
	if len(lacking) == 0 {
		return
	}
	all := strings.Join(append(has, lacking...), ",")
	if len(has) > 0 {
		e.find(v1alpha1.ReasonOwnedByOther, "The annotation %s of %s lacks %s, so pods that go by it start no node, or start nodes for nothing. Set it to %s",
			key, e.g.Ref, strings.Join(lacking, " and "), all)
		return
	}
	want[key] = all
}

// selectsBy reports whether a selector goes by a label.
func selectsBy(s *v1alpha1.NodeSelector, label string) bool {
	if s == nil {
		return false
	}
	_, is := s.MatchLabels[label]
	return is || slices.ContainsFunc(s.MatchExpressions, func(r v1alpha1.NodeSelectorRequirement) bool { return r.Key == label })
}

// listing is the form a=b of pairs, sorted.
func listing(pairs map[string]string) []string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		all = append(all, key+"="+pairs[key])
	}
	return all
}

// clusterAPI decides on the annotations of a MachineDeployment or MachineSet of Cluster API.
func (e *entry) clusterAPI(wanted *wants) {
	announced, count := e.largest()
	want := map[string]string{AnnotationGPUType: announced, AnnotationGPUCount: strconv.FormatInt(count, 10)}
	e.expectations(want)
	command := fmt.Sprintf("kubectl annotate --overwrite -n %s %s.%s %s %s", e.g.Namespace, strings.ToLower(string(e.g.Kind)), GroupClusterAPI, e.g.Name,
		strings.Join(listing(want), " "))
	e.paste = append(e.paste, command)
	e.hidden()
	if len(e.resources) > 1 {
		rest := slices.DeleteFunc(slices.Sorted(maps.Keys(e.resources)), func(name string) bool { return name == announced })
		e.find(v1alpha1.ReasonMultipleResources, "Annotations announce one resource, which is %s. No pod that asks for %s starts the first node of %s. "+
			"Use one MIG profile, or keep one node (minimum size 1)",
			announced, strings.Join(rest, " or "), e.g.Ref)
	}
	if e.g.scalable == nil {
		e.find(v1alpha1.ReasonAdviceOnly, "%s is not in this cluster. Run this in the management cluster, for the MachineDeployment that owns it if there is one: %s", e.g.Ref, command)
		return
	}
	e.annotate(want, wanted)
}

// largest is the resource of which a node has the most; of several the first by name.
func (e *entry) largest() (name string, count int64) {
	for _, n := range slices.Sorted(maps.Keys(e.resources)) {
		if e.resources[n] > count {
			name, count = n, e.resources[n]
		}
	}
	return name, count
}

// Versions of OpenShift whose autoscaler reads gpu-count, before the annotation that OpenShift's own controllers
// overwrite.
const countsFromMajor, countsFromMinor = 4, 19

// openShift decides on the annotation of a MachineSet of OpenShift.
func (e *entry) openShift(wanted *wants) {
	count := e.resources[plan.ResourceGPU]
	if count > int64(e.shape.count) {
		e.paste = append(e.paste, fmt.Sprintf("# ClusterAutoscaler.spec.resourceLimits.gpus counts replicas: multiply min and max by %d. A node is empty "+
			"until it is ready: set spec.scaleDown.delayAfterAdd to 15m or more.", count/int64(e.shape.count)))
	}
	if count == 0 || len(e.resources) > 1 {
		e.paste = append(e.paste, fmt.Sprintf("oc patch machineautoscaler -n %s NAME-OF-ITS-MACHINEAUTOSCALER --type=merge -p '{\"spec\":{\"minReplicas\":1}}'", e.g.Namespace))
		e.find(v1alpha1.ReasonResourceNotSupported, "OpenShift's autoscaler can announce nvidia.com/gpu only, so %s does not scale from zero for %s. "+
			"Set minReplicas: 1 in its MachineAutoscaler, or keep the name nvidia.com/gpu",
			e.g.Ref, strings.Join(slices.Sorted(maps.Keys(e.resources)), " and "))
		return
	}
	want := map[string]string{AnnotationGPUCount: strconv.FormatInt(count, 10)}
	command := fmt.Sprintf("oc annotate --overwrite -n %s machineset.%s %s %s=%d", e.g.Namespace, GroupOpenShift, e.g.Name, AnnotationGPUCount, count)
	if major, minor := version(e.s.OpenShift); major < countsFromMajor || major == countsFromMajor && minor < countsFromMinor {
		has := "The version of OpenShift is not known"
		if e.s.OpenShift != "" {
			has = "OpenShift is " + e.s.OpenShift
		}
		e.find(v1alpha1.ReasonResourceNotSupported, "%s, and its autoscaler reads an annotation that OpenShift overwrites before 4.19. Set minReplicas: 1 in the "+
			"MachineAutoscaler of %s. From 4.19 on: %s", has, e.g.Ref, command)
		return
	}
	e.paste = append(e.paste, command)
	if e.g.scalable == nil {
		e.find(v1alpha1.ReasonAdviceOnly, "%s cannot be read. Run: %s", e.g.Ref, command)
		return
	}
	e.annotate(want, wanted)
}

func version(v string) (major, minor int) {
	parts := strings.SplitN(v, ".", 3)
	if len(parts) < 2 {
		return 0, 0
	}
	major, _ = strconv.Atoi(parts[0])
	minor, _ = strconv.Atoi(parts[1])
	return major, minor
}

// annotate decides on annotations of an object in the cluster: what keeps the operator from writing them, or that it
// writes them.
func (e *entry) annotate(want map[string]string, wanted *wants) {
	s := e.g.scalable
	e.unreadable(want)
	is := !s.surplus(want) && !slices.ContainsFunc(slices.Collect(maps.Keys(want)), func(k string) bool { return s.Annotations[k] != want[k] })
	missing := slices.ContainsFunc(slices.Collect(maps.Keys(want)), func(k string) bool { _, found := s.Annotations[k]; return !found })
	pairs := listing(want)
	if !e.managed() {
		e.adviseAnnotations(is, pairs)
		return
	}
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if foreign := s.foreign(k, want[k]); len(foreign) > 0 {
			e.find(v1alpha1.ReasonOwnedByOther, "Field manager %s owns the annotation %s of %s. Set it to %s there, or remove it there",
				strings.Join(foreign, " and "), k, e.g.Ref, want[k])
			return
		}
	}
	before := e.last()
	if (missing || !is && s.Annotations[v1alpha1.AnnotationAutoscaling] == "") && s.removed(before, pairs) {
		e.written = before.Written
		e.find(v1alpha1.ReasonRemovedByOther, "Another controller removed the operator's annotations from %s, which field manager %s wrote last. "+
			"Add them to the source of that object: %s. Or set spec.autoscaling.mode to Advise and back", e.g.Ref, cmp.Or(s.LastManager, "of another controller"), strings.Join(pairs, " "))
		return
	}
	wanted.annotations = append(wanted.annotations, annotationWant{scalable: s, by: e.by, want: want})
	if e.refused(s.objectName()) {
		return
	}
	if !is || s.record() == nil {
		e.find(v1alpha1.ReasonConfiguring, "%s is being annotated with %s", e.g.Ref, strings.Join(pairs, " "))
		return
	}
	e.written = pairs
	e.find(v1alpha1.ReasonConfigured, "%s announces %s", e.g.Ref, strings.Join(pairs, " "))
}

// adviseAnnotations reports whether the object has the annotations that its autoscaler needs, for a policy that only
// advises.
func (e *entry) adviseAnnotations(is bool, pairs []string) {
	s := e.g.scalable
	if s.Annotations[v1alpha1.AnnotationAutoscaling] != "" && s.restore() != nil && e.refused(s.objectName()) {
		return
	}
	if is {
		e.find(v1alpha1.ReasonConfigured, "%s announces %s", e.g.Ref, strings.Join(pairs, " "))
		return
	}
	e.find(v1alpha1.ReasonAdviceOnly, "Cluster Autoscaler does not know what new nodes of %s advertise. Annotate it as `kubectl gpusharing plan` prints, or set "+
		"spec.autoscaling.mode: Manage", e.g.Ref)
}

// last is what the policy reported of the group last; nil: nothing.
func (e *entry) last() *v1alpha1.NodeGroupStatus {
	for i := range e.by.Status.NodeGroups {
		s := &e.by.Status.NodeGroups[i]
		if e.g.is(s.Kind, s.Namespace, s.Name) {
			return s
		}
	}
	return nil
}

// removed reports whether the operator has written exactly that to the object before, so that its absence is the work
// of another. An object that was deleted and created again has another UID.
func (s *Scalable) removed(before *v1alpha1.NodeGroupStatus, pairs []string) bool {
	return before != nil && (before.UID == "" || before.UID == s.UID) && slices.Equal(before.Written, pairs)
}

// foreign are the field managers that own an annotation which would have to change. A default of OpenShift's
// cluster-autoscaler-operator counts as nobody's.
func (s *Scalable) foreign(key, want string) []string {
	have, found := s.Annotations[key]
	if !found || have == want {
		return nil
	}
	return slices.DeleteFunc(s.others(key), func(m string) bool { return m == defaulter })
}

// unreadable reports annotations for the autoscaler that are no numbers, so that it takes the group for one without a
// template.
func (e *entry) unreadable(want map[string]string) {
	s := e.g.scalable
	value, found := s.Annotations[AnnotationGPUCount]
	if _, err := strconv.ParseInt(value, 10, 64); !found || err == nil {
		return
	}
	if _, ours := want[AnnotationGPUCount]; ours && e.managed() && len(s.foreign(AnnotationGPUCount, want[AnnotationGPUCount])) == 0 {
		return // it is overwritten
	}
	e.find(v1alpha1.ReasonInvalidValue, "The annotation %s of %s is %q, which is no number, so Cluster Autoscaler starts no node of an empty group. Field manager %s "+
		"wrote it: set it to %s", AnnotationGPUCount, e.g.Ref, value, cmp.Or(strings.Join(s.others(AnnotationGPUCount), " and "), "of another controller"), want[AnnotationGPUCount])
}
