// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// why tells an application team why a pod does not run, or which share of which GPU it has. It needs no right but those
// of a user of the pod's namespace, and says what it cannot tell without the others.
//
//	pod, quotas, what may be read of the cluster → inquiry → whyOf → answer → text or JSON
func (p *Program) why(ctx context.Context, f *flags, args []string) error {
	kind, name, err := whyTarget(args)
	if err != nil {
		return hint(err)
	}
	namespace := f.namespace
	if namespace == "" {
		if namespace, _, err = f.config.ToRawKubeConfigLoader().Namespace(); err != nil {
			return fmt.Errorf("finding the namespace: %w; name it with -n", err)
		}
	}
	c, err := connect(f)
	if err != nil {
		return err
	}
	asked, err := p.inquire(ctx, c, namespace, kind, name)
	if err != nil {
		return err
	}
	said := whyOf(asked)
	if f.output != "" {
		encoded, err := marshal(said, f.output)
		return errors.Join(err, p.write(encoded))
	}
	shown := text{width: p.Width}
	shown.why(&said)
	return p.write(shown.String())
}

// The kinds that why takes, in the order in which it looks for a name without a kind.
const (
	whyPod         = "Pod"
	whyDeployment  = "Deployment"
	whyJob         = "Job"
	whyStatefulSet = "StatefulSet"
)

// whyKinds are the words for them, as kubectl takes them.
var whyKinds = map[string]string{
	"pod": whyPod, "pods": whyPod, "po": whyPod, "deployment": whyDeployment, "deployments": whyDeployment, "deploy": whyDeployment,
	"job": whyJob, "jobs": whyJob, "statefulset": whyStatefulSet, "statefulsets": whyStatefulSet, "sts": whyStatefulSet,
}

// whyTarget reads NAME, KIND/NAME or KIND NAME. Without a kind it is empty.
func whyTarget(args []string) (kind, name string, err error) {
	switch len(args) {
	case 1:
		word, rest, has := strings.Cut(args[0], "/")
		if !has {
			return "", args[0], nil
		}
		kind, name = word, rest
	case 2:
		kind, name = args[0], args[1]
	default:
		return "", "", errors.New("why needs a pod, or a Deployment, Job or StatefulSet: why POD, why deployment/NAME")
	}
	known, is := whyKinds[strings.ToLower(kind)]
	if !is || name == "" {
		return "", "", fmt.Errorf("why takes pods, Deployments, Jobs and StatefulSets, not %q; name one as deployment/NAME", strings.Join(args, " "))
	}
	return known, name, nil
}

// inquire reads what whyOf decides from. Only the pod, or what makes it, must be readable.
func (p *Program) inquire(ctx context.Context, c client.Client, namespace, kind, name string) (inquiry, error) {
	asked, err := readTarget(ctx, c, namespace, kind, name)
	if err != nil {
		return asked, advise(err)
	}
	reader := &tolerantReader{Client: c, namespace: namespace}
	quotas := &corev1.ResourceQuotaList{}
	if err := reader.without(c.List(ctx, quotas, client.InNamespace(namespace)), "ResourceQuotas", "the quota of the namespace is not known"); err != nil {
		return asked, advise(err)
	}
	var told readAs
	if asked.snapshot, told, err = p.read(ctx, reader, ""); err != nil {
		return asked, advise(err)
	}
	asked.now, asked.quotas = p.Clock.Now(), quotas.Items
	asked.nodes, asked.blindNodes, asked.blindPods = reader.candidates(&asked.snapshot), reader.blindNodes, reader.blindPods
	asked.lacks = slices.Concat(reader.lacks, told.lacks)
	return asked, nil
}

// readTarget finds the pod, or a pod of what makes pods: the one that is furthest from running.
func readTarget(ctx context.Context, c client.Client, namespace, kind, name string) (inquiry, error) {
	kinds := []string{kind}
	if kind == "" {
		kinds = []string{whyPod, whyDeployment, whyJob, whyStatefulSet}
	}
	key := client.ObjectKey{Namespace: namespace, Name: name}
	for _, kind := range kinds {
		var err error
		asked := inquiry{namespace: namespace}
		if kind == whyPod {
			asked.pod = &corev1.Pod{}
			err = c.Get(ctx, key, asked.pod)
		} else {
			err = asked.readWorkload(ctx, c, kind, key)
		}
		if !apierrors.IsNotFound(err) {
			return asked, err
		}
	}
	return inquiry{}, fmt.Errorf("namespace %s has no %s %q; `kubectl get pods -n %s` lists its pods, and -n names another namespace", namespace,
		strings.Join(kinds, " or "), name, namespace)
}

// readWorkload reads what makes pods, its pods, and why it cannot make one.
func (q *inquiry) readWorkload(ctx context.Context, c client.Client, kind string, key client.ObjectKey) error {
	made, err := q.workloadNamed(ctx, c, kind, key)
	if err != nil {
		return err
	}
	q.workload = kind + " " + key.String()
	chosen, err := metav1.LabelSelectorAsSelector(made.selector)
	if err != nil {
		return fmt.Errorf("reading the selector of %s: %w", q.workload, err)
	}
	pods := &corev1.PodList{}
	if err := c.List(ctx, pods, client.InNamespace(key.Namespace), client.MatchingLabelsSelector{Selector: chosen}); err != nil {
		return fmt.Errorf("reading the pods of %s: %w", q.workload, err)
	}
	live := slices.DeleteFunc(pods.Items, func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil || cluster.Finished(&pod) })
	slices.SortStableFunc(live, func(a, b corev1.Pod) int { return cmp.Compare(progressOf(&a), progressOf(&b)) })
	if len(live) > 0 {
		q.pod = &live[0]
	}
	if len(live) >= q.wanted && q.pod != nil {
		return nil
	}
	if q.refused == "" && kind != whyDeployment {
		q.refused, err = refusalOf(ctx, c, made.object)
	}
	if q.pod == nil || progressOf(q.pod) == podRuns && q.refused != "" {
		q.missing = true
		q.pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Labels: made.template.Labels}, Spec: made.template.Spec}
	}
	return err
}

// workload is what makes pods.
type workload struct {
	object   client.Object
	selector *metav1.LabelSelector
	template corev1.PodTemplateSpec
}

// workloadNamed reads a workload, and what it says of its pods.
func (q *inquiry) workloadNamed(ctx context.Context, c client.Client, kind string, key client.ObjectKey) (workload, error) {
	switch kind {
	case whyDeployment:
		d := &appsv1.Deployment{}
		err := c.Get(ctx, key, d)
		q.wanted = orOne(d.Spec.Replicas)
		for _, condition := range d.Status.Conditions {
			if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
				q.refused = condition.Message
			}
		}
		return workload{d, d.Spec.Selector, d.Spec.Template}, err
	case whyStatefulSet:
		s := &appsv1.StatefulSet{}
		err := c.Get(ctx, key, s)
		q.wanted = orOne(s.Spec.Replicas)
		return workload{s, s.Spec.Selector, s.Spec.Template}, err
	}
	j := &batchv1.Job{}
	err := c.Get(ctx, key, j)
	q.wanted = orOne(j.Spec.Parallelism)
	q.suspended, q.done = j.Spec.Suspend != nil && *j.Spec.Suspend, j.Status.CompletionTime != nil
	for _, condition := range j.Status.Conditions {
		if condition.Type == batchv1.JobFailed && condition.Status == corev1.ConditionTrue {
			q.failed = cmp.Or(condition.Message, condition.Reason)
		}
	}
	return workload{j, j.Spec.Selector, j.Spec.Template}, err
}

func orOne(n *int32) int {
	if n == nil {
		return 1
	}
	return int(*n)
}

// How far a pod is.
const (
	podWaits = iota
	podStarts
	podRuns
)

func progressOf(pod *corev1.Pod) int {
	switch {
	case pod.Spec.NodeName == "":
		return podWaits
	case pod.Status.Phase != corev1.PodRunning:
		return podStarts
	}
	return podRuns
}

// refusalOf is why the controller of an object could last not create a pod, as its Event says; empty: none says so, or
// the user may not read it.
func refusalOf(ctx context.Context, c client.Client, object client.Object) (string, error) {
	events := &corev1.EventList{}
	fields := client.MatchingFields{"involvedObject.name": object.GetName(), "reason": "FailedCreate"}
	if err := c.List(ctx, events, client.InNamespace(object.GetNamespace()), fields); err != nil {
		return "", unlessForbidden(err)
	}
	last := ""
	var at metav1.Time
	for i := range events.Items {
		e := &events.Items[i]
		if e.InvolvedObject.UID == object.GetUID() && !e.LastTimestamp.Before(&at) {
			last, at = e.Message, e.LastTimestamp
		}
	}
	return last, nil
}

// tolerantReader reads for a user who may read little. Of what the user may not list it lists nothing, or what other
// objects tell, and it notes what is not known for that.
type tolerantReader struct {
	client.Client

	namespace             string // whose pods the user may list at least
	nodes                 map[string]*corev1.Node
	pods                  map[string][]*corev1.Pod // by node
	gpuNodes              []v1alpha1.GPUNode
	blindNodes, blindPods bool
	lacks                 []string
}

// without returns an error unless it is that the user may not read something, which it notes.
func (t *tolerantReader) without(err error, plural, lacks string) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	t.lacks = append(t.lacks, fmt.Sprintf("You may not list %s, so %s", plural, lacks))
	return nil
}

// List lists what the user may list.
func (t *tolerantReader) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	err := t.Client.List(ctx, list, options...)
	switch list := list.(type) {
	case *v1alpha1.GPUSharingPolicyList:
		return t.without(err, "GPUSharingPolicies", "it is not known how long a change may take")
	case *v1alpha1.GPUNodeList:
		err = t.without(err, "GPUNodes", "it is not known which share of which GPU a pod has, nor which change is under way: ask an administrator to "+
			"bind the ClusterRole gpu-sharing-view to you")
		t.gpuNodes = list.Items
	case *corev1.NodeList:
		if t.blindNodes = t.blindNodes || apierrors.IsForbidden(err); t.blindNodes {
			list.Items = nodesAsReported(t.gpuNodes)
		}
		err = t.without(err, "Nodes", "labels, taints and free memory of nodes are not known, and what they offer only as GPUNodes report it")
		t.keepNodes(list.Items)
	case *corev1.PodList:
		if apierrors.IsForbidden(err) {
			t.blindPods = true
			_ = t.without(err, "Pods of other namespaces", "who else holds shares is known only as GPUNodes report it")
			err = t.Client.List(ctx, list, client.InNamespace(t.namespace))
		}
		t.keepPods(list.Items)
	}
	return err
}

// nodesAsReported are the nodes as far as their GPUNodes tell: what those that a policy governs advertise.
func nodesAsReported(gpuNodes []v1alpha1.GPUNode) []corev1.Node {
	var nodes []corev1.Node
	for i := range gpuNodes {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: gpuNodes[i].Name}}
		n.Status.Allocatable = corev1.ResourceList{}
		for _, r := range gpuNodes[i].Status.Rollout.Resources {
			n.Status.Allocatable[corev1.ResourceName(r.Name)] = *quantityOf(r.Advertised)
		}
		nodes = append(nodes, n)
	}
	return nodes
}

func (t *tolerantReader) keepNodes(nodes []corev1.Node) {
	if t.nodes == nil {
		t.nodes = map[string]*corev1.Node{}
	}
	for i := range nodes {
		t.nodes[nodes[i].Name] = &nodes[i]
	}
}

func (t *tolerantReader) keepPods(pods []corev1.Pod) {
	if t.pods == nil {
		t.pods = map[string][]*corev1.Pod{}
	}
	for i := range pods {
		if pod := &pods[i]; pod.Spec.NodeName != "" && !cluster.Finished(pod) {
			t.pods[pod.Spec.NodeName] = append(t.pods[pod.Spec.NodeName], pod)
		}
	}
}

// candidates are the nodes with GPUs, by name: those of the snapshot and, where GPUNodes are missing or may not be read,
// those that offer GPUs.
func (t *tolerantReader) candidates(s *cluster.Snapshot) []candidate {
	found := s.NodesByName()
	var all []candidate
	for name, object := range t.nodes {
		n := found[name]
		if n == nil {
			alone := cluster.NodeAlone(object)
			if len(alone.Unallocatable) == 0 && !slices.ContainsFunc(slices.Collect(maps.Keys(alone.Allocatable)), cluster.IsGPUResource) {
				continue
			}
			n = &alone
		}
		all = append(all, candidate{Node: n, object: object, pods: t.pods[name], offers: n.OfferedGPUs(s.Plugin.StackOf(n))})
	}
	slices.SortFunc(all, func(a, b candidate) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// why writes an answer: the sentence first, and then what it follows from.
func (t *text) why(a *answer) {
	who := cmp.Or(a.Pod, a.Workload)
	if a.Pod != "" {
		who = "Pod " + a.Namespace + "/" + a.Pod
	}
	if a.Workload != "" && a.Pod != "" {
		who += " of " + a.Workload
	}
	state := "is " + a.Phase
	if a.Pod == "" {
		state = "has no pod"
	}
	t.row(0, "", fmt.Sprintf("%s %s. %s", who, state, a.Answer))
	var below text
	below.width = t.width
	if len(a.Requests) > 0 {
		below.row(2, "asks for", resources(a.Requests))
	}
	for i := range a.Shares {
		of := ""
		if a.Shares[i].Container != "" { // a claim is the pod's
			of = "container " + a.Shares[i].Container + ": "
		}
		below.row(2, "has", of+a.Shares[i].String())
	}
	if a.Limit != "" {
		below.row(2, "limit", a.Limit)
	}
	if a.Change != "" {
		below.row(2, "change", a.Change)
	}
	if len(a.Shares) == 0 && a.Cause != causeRunning {
		below.rows("offered", offerLines(a.Offers))
		below.rows("nodes", verdictLines(a.Nodes))
		below.rows("held by", holdingLines(a.Holders))
		below.rows("on demand", a.OnDemand)
	}
	for _, q := range a.Quotas {
		below.row(2, "quota", fmt.Sprintf("%d of %d %s are taken, by ResourceQuota %s", q.Used, q.Hard, q.Resource, q.Name))
	}
	if a.Scheduler != "" {
		below.row(2, "scheduler", a.Scheduler)
	}
	below.rows("not known", a.NotKnown)
	if below.Len() > 0 {
		t.WriteString("\n" + below.String())
	}
}

func offerLines(offers []offer) (lines []string) {
	for _, o := range offers {
		line := fmt.Sprintf("%s: %d on %s", o.Resource, o.Total, count(o.Nodes, "node"))
		if o.Free != nil {
			line += fmt.Sprintf(", %d free", *o.Free)
		}
		lines = append(lines, line)
	}
	return lines
}

// verdictLines are a line for all nodes off which the same keeps a pod, the nearest nodes first.
func verdictLines(all []verdict) (lines []string) {
	const most = 12
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(a, b verdict) int { return slices.Index(funnel, b.Cause) - slices.Index(funnel, a.Cause) })
	var nodes alike[string]
	for _, v := range sorted {
		nodes.add(v.Message, v.Node)
	}
	for _, message := range nodes.order {
		if len(lines) == most {
			return append(lines, fmt.Sprintf("and %d other reasons", len(nodes.order)-most))
		}
		lines = append(lines, fmt.Sprintf("%s: %s", format.List(nodes.names[message]), message))
	}
	return lines
}

func holdingLines(all []holding) (lines []string) {
	const most = 12
	for i, h := range mostFirst(all) {
		if i == most {
			return append(lines, fmt.Sprintf("and %s", count(len(all)-most, "other namespace")))
		}
		lines = append(lines, fmt.Sprintf("%s %d: %s", h.Namespace, h.Shares, format.List(h.Pods)))
	}
	return lines
}
