// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/action"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/cluster"
	"github.com/gpusharing/gpu-sharing-operator/internal/engine/timing"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu"
	"github.com/gpusharing/gpu-sharing-operator/internal/gpu/plan"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/condition"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
	"github.com/gpusharing/gpu-sharing-operator/internal/nvidia/dra"
)

// Of NVIDIA's DRA driver, on a node that it alone serves, a change needs this: what it lacks for a policy, the
// restart by which it looks at the GPUs again, and the proof that it publishes them.
//
//	lacks → … GPUs changed → awaitPublished: not as the agent reports → pod deleted, once → published | late → failed
//	duplicatedClasses, hangingClaims, draPluginFailing: what is left half-done

// draDriver is that driver as offering.
type draDriver struct{}

func (draDriver) ReadsConfigs() bool { return false }
func (draDriver) ByClaims() bool     { return true }
func (draDriver) gates() []gateFunc  { return []gateFunc{awaitSelected, awaitPublished} }
func (draDriver) findings() []findingFunc {
	return []findingFunc{duplicatedClasses, hangingClaims, draPluginFailing}
}

// taint keeps new pods off the GPUs; those that use none still come to the node. A copy of the baseline that names
// another policy is written before: were that write alone to fail, the node would count in the budget of that one.
func (draDriver) taint(v *View) []action.Action {
	rule, patch := action.TaintDevices{Node: v.Node.Name, Policy: v.Ref(), Since: v.Snapshot.Now}, v.Patch("recording the baseline")
	saveBaselineCopy(v, patch)
	switch former := v.Node.ChangedFor; {
	case len(patch.Annotations) == 0:
		return []action.Action{rule}
	case former != "" && former != v.Policy.Name:
		return []action.Action{patch}
	}
	return []action.Action{patch, rule}
}

// The DRA driver looks at the GPUs when its kubelet plugin starts, and never else. So after a change its pod on the
// node is deleted: pods that run keep what they have. DCGM and its exporter look at the instances when they start too,
// so they are deleted with it unless they have started since the change. The annotation gpusharing.io/instances has, as
// beside the device plugin, what the DRA driver will have seen once the pods that it lists are gone; it is written
// before a pod is deleted, so that this happens once for publishOccasion. Should the pod have been replaced just
// before without the cache showing that, gpusharing.io/plugin-restarted allows one restart more.

// draRestartReason is why the pod is deleted.
const draRestartReason = "it has not seen the GPUs and MIG instances that are there"

// awaitPublished is the gate that NVIDIA's DRA driver publishes the GPUs and instances as the agent reports them, by
// UUID, and that classes offer them.
func awaitPublished(v *View) (Result, bool) {
	if dynamicMIG(v) != nil {
		return Result{}, false // what it publishes is not what the agent sees
	}
	stale := v.Node.Published.Stale(v.Node.GPU.Status.Devices, v.Target.Shares)
	differences := stale
	if !v.Target.ReleasesNode { // a release does not wait for a GPU that is unhealthy
		differences = v.Node.Published.Differs(v.Node.GPU.Status.Devices, v.Target.Shares)
	}
	differences = orNotApplied(v, append(slices.Clone(differences), unofferedResources(v)...))
	if len(differences) == 0 {
		return Result{}, false
	}
	missing := func(s string) bool { return strings.HasSuffix(s, " is missing") } // what is gone may be many, with nothing to do about
	differences = slices.Concat(slices.DeleteFunc(slices.Clone(differences), func(s string) bool { return !missing(s) }), slices.DeleteFunc(differences, missing))
	r := Result{
		State: Verifying, Reason: v1alpha1.ReasonVerifying,
		Message: "NVIDIA's DRA driver does not publish yet what it must: " + format.List(differences),
	}
	if len(stale) > 0 {
		r.Next, r.After = restartDRAPlugin(v)
	}
	restarts, _ := SplitAct(r.Next)
	if len(restarts) > 0 {
		r.Message = "restarting NVIDIA's DRA driver on the node, because " + draRestartReason
	}
	return publishingOverdue(v, r, restarts), true
}

// awaitPublishedInTime is the gate that NVIDIA's DRA driver, where it serves the node, publishes what is there. It is
// not waited for longer than after a change: the desired state of the agent may be reached no more.
func awaitPublishedInTime(v *View) (Result, bool) {
	if !v.ByClaims() {
		return Result{}, false
	}
	r, pending := awaitPublished(v)
	return r, pending && r.State == Verifying
}

// unofferedResources lists the resources of the target that no DeviceClass offers yet.
func unofferedResources(v *View) []string {
	var lacking []string
	for _, class := range DeviceClasses(v) {
		if _, offered := dra.Offering(v.Snapshot.DRA.Classes, class.Resource); !offered {
			lacking = append(lacking, "no DeviceClass serves "+class.Resource)
		}
	}
	return lacking
}

// publishingOverdue lets a change fail that is not published in time, unless the driver is restarted now. What was published
// before is waited for, and no longer under our taint, also where a restart is withheld because it was repeated too often.
func publishingOverdue(v *View, r Result, restarts []action.Action) Result {
	remaining := v.OrGrace(verifyRemaining(v, time.Time{}))
	if v.TargetIsLastGood() || v.FallsBack {
		if len(restarts) == 0 {
			r.State, r.Reason = Degraded, v1alpha1.ReasonNotPublished
		}
		if remaining <= 0 {
			r.Next = atOnce(append(restarts, removeTaints(v)...)...)
		} else if v.Taint() != nil {
			r.After = timing.Sooner(r.After, remaining)
		}
		return r
	}
	if len(restarts) > 0 && !slices.ContainsFunc(restarts, v.IsFought) {
		return r
	}
	if remaining <= 0 {
		return failChange(v, r, v1alpha1.ReasonNotPublished,
			fmt.Sprintf("not within %s: %s; look at the pod of NVIDIA's DRA driver on the node", timing.VerifyTimeout, r.Message))
	}
	r.After = timing.Sooner(r.After, remaining)
	return r
}

// restartDRAPlugin has the DRA driver look at the GPUs again: first it is recorded which pods have to go, then these
// are deleted. after is when to do so once more.
func restartDRAPlugin(v *View) (next NextAct, after time.Duration) {
	pods := draPluginPods(v)
	seen, leaving, _ := enumeratedInstances(v)
	if now := publishOccasion(v); seen != now && len(pods) > 0 {
		if remaining, starts := draPluginStarting(v, pods); starts {
			return nil, remaining
		}
		return atOnce(recordDRARestart(v, now, append(slices.Clone(pods), unawareMonitors(v)...))), 0
	}
	var deletions []action.Action
	waits := false
	for _, p := range v.Node.Pods {
		if !slices.Contains(leaving, p.UID) {
			continue
		}
		waits = true
		if !p.Terminating {
			deletion := deletePod(v, p, draRestartReason)
			deletion.Occasion = seen
			deletions = append(deletions, deletion)
		}
	}
	if waits || len(pods) == 0 {
		return atOnce(deletions...), 0
	}
	return restartDRAPluginAgain(v, pods)
}

// draPublishesWithin is how long the DRA driver may take to publish after its pod became Ready.
const draPublishesWithin = 10 * time.Second

// draPluginStarting reports whether a pod of the DRA driver is on its way to publish what is there: it looks at the
// GPUs when it starts. after is when to look again; 0: when the pod changes.
func draPluginStarting(v *View, pods []cluster.Pod) (after time.Duration, is bool) {
	for _, p := range pods {
		if p.Terminating {
			continue
		}
		remaining := p.ReadySince.Add(draPublishesWithin).Sub(v.Snapshot.Now)
		if is = is || p.ReadySince.IsZero() || remaining > 0; remaining > 0 {
			after = timing.Sooner(after, remaining)
		}
	}
	return after, is
}

// restartDRAPluginAgain restarts pods that have run for long enough to publish, at most once for publishOccasion.
func restartDRAPluginAgain(v *View, pods []cluster.Pod) (next NextAct, after time.Duration) {
	now := publishOccasion(v)
	if v.Node.Annotations[v1alpha1.AnnotationRestarted] == now {
		return nil, 0
	}
	for _, p := range pods {
		if remaining := p.Scheduled.Add(timing.VerifyTimeout / 2).Sub(v.Snapshot.Now); remaining > 0 {
			after = timing.Sooner(after, remaining)
		}
	}
	if after > 0 {
		return nil, after
	}
	patch := recordDRARestart(v, now, pods)
	patch.Annotations[v1alpha1.AnnotationRestarted] = &now
	return atOnce(patch), 0
}

// driverLooksFirst is LooksFirst of a node of the DRA driver, which is restarted: a pod that it gave an instance that is gone would hang for ever.
func driverLooksFirst(v *View) (first []action.Action, remaining time.Duration, is bool) {
	n, shown := &v.Node.GPU, v.Node.Published
	applied := condition.IsTrueAt(n.Status.Conditions, v1alpha1.ConditionApplied, n.Generation)
	if shown == nil || v.Node.IsLost() || dynamicMIG(v) != nil || applied && len(shown.Stale(n.Status.Devices, 0)) == 0 {
		return nil, 0, false
	}
	pods := draPluginPods(v)
	seen, leaving, _ := enumeratedInstances(v)
	leaves := func(p cluster.Pod) bool { return slices.Contains(leaving, p.UID) }
	if seen != publishOccasion(v) || slices.ContainsFunc(pods, leaves) {
		next, after := restartDRAPlugin(v)
		first, _ = SplitAct(next)
		remaining = after
	}
	for _, p := range pods {
		until := p.ReadySince.Add(draPublishesWithin)
		switch {
		case p.Terminating:
			until = p.EndsBy.Add(timing.StopTimeout)
		case p.ReadySince.IsZero():
			until = p.Scheduled.Add(timing.StopTimeout)
		}
		remaining = max(remaining, until.Sub(v.Snapshot.Now))
	}
	return first, remaining, len(first) > 0 || remaining > 0 || len(pods) == 0 // the kubelet deletes what a driver has published that is gone
}

// recordDRARestart notes the pods that have to go before the DRA driver has seen the GPUs.
func recordDRARestart(v *View, now string, pods []cluster.Pod) action.PatchNode {
	uids := make([]string, 0, len(pods))
	for _, p := range pods {
		uids = append(uids, p.UID)
	}
	slices.Sort(uids)
	patch := v.Patch("restarting NVIDIA's DRA driver on the node, because " + draRestartReason)
	patch.Annotations[v1alpha1.AnnotationInstances] = new(withoutPods(now, uids))
	restartsLate(v, patch)
	return patch
}

// stampSeen removes what was recorded of restarts from a node that is released, once the DRA driver publishes its
// baseline.
func (draDriver) stampSeen(v *View, patch action.PatchNode) {
	if v.Target.ReleasesNode && dynamicMIG(v) == nil && len(v.Node.Published.Stale(v.Node.GPU.Status.Devices, v.Target.Shares)) > 0 {
		return
	}
	for _, name := range []string{v1alpha1.AnnotationInstances, v1alpha1.AnnotationRestarted} {
		if _, has := v.Node.Annotations[name]; has && v.Target.ReleasesNode {
			patch.Annotations[name] = nil
		}
	}
}

// unawareMonitors are the pods of DCGM and its exporter that were on the node before the change was done, so they have
// not seen its instances.
func unawareMonitors(v *View) []cluster.Pod {
	changed := ConfigSelectedAt(v)
	return slices.DeleteFunc(slices.Clone(v.Node.Pods), func(p cluster.Pod) bool {
		return !isMonitorPod(v, p) || !changed.IsZero() && p.Scheduled.After(changed)
	})
}

// draPluginPods are those of the DRA driver's kubelet plugin on the node.
func draPluginPods(v *View) []cluster.Pod {
	return slices.DeleteFunc(slices.Clone(v.Node.Pods), func(p cluster.Pod) bool { return !p.DRA })
}

// publishOccasion names that for which the DRA driver is restarted: the GPUs and instances that it must publish, the
// boot of the node, and the change, since the driver may have seen others between two with the same.
func publishOccasion(v *View) string {
	const hashed = 8
	n := &v.Node.GPU
	of := append(dra.UUIDs(n.Status.Devices), timing.Stamp(n.Status.BootID, n.Spec.ChangeTime.Time))
	sum := sha256.Sum256([]byte(strings.Join(of, " ")))
	return hex.EncodeToString(sum[:hashed])
}

// lacks says what Kubernetes or NVIDIA's DRA driver lacks.
func (draDriver) lacks(v *View) *plan.Problem {
	for _, find := range []func(*View) *plan.Problem{draDriverLacks, kubernetesLacks, classesLack, sharesDiffer, intervalDiffers} {
		if problem := find(v); problem != nil {
			return problem
		}
	}
	return nil
}

func draDriverLacks(v *View) *plan.Problem {
	if problem := dynamicMIG(v); problem != nil {
		return problem
	}
	return v.Node.Published.Unusable()
}

// dynamicMIG is the problem of a DRA driver that makes MIG instances on demand, alone or beside the device plugin: the
// instances of the node are its own, and the operator neither makes nor destroys any. Nil: it makes none.
func dynamicMIG(v *View) *plan.Problem {
	if v.Stack == dra.DevicePlugin {
		return nil
	}
	if slices.ContainsFunc(v.Node.Pods, func(p cluster.Pod) bool { return p.DynamicMIG }) {
		return dra.DynamicMIG("FEATURE_GATES of its pod on the node")
	}
	if v.Node.DynamicMIG {
		return dra.DynamicMIG("FEATURE_GATES of " + v.Node.DRA)
	}
	if problem := v.Node.Published.Unusable(); problem != nil && problem.Reason == v1alpha1.ReasonDynamicMIGActive {
		return problem
	}
	return nil
}

// besideDriversInstances are the GPUs of a baseline on which something is to be restored but MIG: instances are the
// driver's. A time slice that is back is asked for until the node is released, since it is read only while it is.
func besideDriversInstances(baseline []v1alpha1.DeviceSpec, have []gpu.Device) []v1alpha1.DeviceSpec {
	return slices.DeleteFunc(slices.Clone(baseline), func(d v1alpha1.DeviceSpec) bool {
		steps, err := plan.Node([]v1alpha1.DeviceSpec{d}, have)
		return err != nil || len(steps) == 0 && !plan.Timed(d.Sharing) || slices.ContainsFunc(steps, plan.ChangesMIG)
	})
}

// kubernetesLacks says what the API server does not serve. Taints of devices are needed where instances go.
func kubernetesLacks(v *View) *plan.Problem {
	partitions := slices.ContainsFunc(v.Target.Devices, func(d v1alpha1.DeviceSpec) bool { return d.Sharing.MIGMode == v1alpha1.MIGModeEnabled }) ||
		slices.ContainsFunc(v.Devices, func(d gpu.Device) bool { return d.State.MIG })
	if problem := noTaintRule(v); partitions && v.Snapshot.DRA.ServesClasses && problem != nil {
		return problem
	}
	if v.Snapshot.DRA.ServesClasses {
		return nil
	}
	return &plan.Problem{
		Reason: v1alpha1.ReasonDRAUnavailable,
		Message: "The API server serves no DeviceClasses of resource.k8s.io/v1 with an extended resource, by which pods request nvidia.com/gpu. " +
			"Use Kubernetes 1.36 or newer, or leave the node out",
	}
}

// noTaintRule says why the operator cannot have a DeviceTaintRule for the node, which keeps new pods off its GPUs while
// they are changed; nil if it can.
func noTaintRule(v *View) *plan.Problem {
	var message string
	switch {
	case !v.Snapshot.DRA.ServesTaintRules:
		message = "The API server serves no DeviceTaintRules, which keep new pods off the GPUs while they are changed. Use Kubernetes 1.37, or 1.36 with the feature gate " +
			"DRADeviceTaintRules"
	case v.Node.TaintRuleTaken:
		message = fmt.Sprintf("DeviceTaintRule %s exists and is not the operator's, which needs one of that name to keep new pods off the GPUs while they are changed. "+
			"Delete it", dra.TaintRuleName(v.Node.Name))
	default:
		return nil
	}
	if v.Policy != nil {
		message += ", or leave the node out of nodeSelector"
	}
	return &plan.Problem{Reason: v1alpha1.ReasonDRAUnavailable, Message: message}
}

func classesLack(v *View) *plan.Problem {
	for _, class := range DeviceClasses(v) {
		if problem := dra.ClassProblem(v.Snapshot.DRA.Classes, class); problem != nil {
			return problem
		}
	}
	return nil
}

// DeviceClasses are the DeviceClasses by which pods get what a policy asks of the node, unless others serve the same
// resources.
func DeviceClasses(v *View) []dra.Write {
	if v.Policy == nil {
		return nil
	}
	deviceClasses := DeviceClassesOf(v.Target.Devices)
	if v.Target.Expected[plan.ResourceGPU] > 0 {
		deviceClasses = append(deviceClasses, dra.ForGPUs())
	}
	return deviceClasses
}

// DeviceClassesOf are those of the MIG instances that the GPUs are to have.
func DeviceClassesOf(devices []v1alpha1.DeviceSpec) []dra.Write {
	profiles := map[string]bool{}
	for _, d := range devices {
		for _, i := range d.Sharing.Instances {
			profiles[i.Profile] = true
		}
	}
	var deviceClasses []dra.Write
	for _, profile := range slices.Sorted(maps.Keys(profiles)) {
		deviceClasses = append(deviceClasses, dra.ForInstances(profile))
	}
	return deviceClasses
}

// sharesDiffer compares the shares of whole GPUs with what the policy needs. Nodes without whole GPUs need no number,
// and neither do policies that only leave GPUs whole.
func sharesDiffer(v *View) *plan.Problem {
	if v.Target.Expected[plan.ResourceGPU] == 0 || v.Target.Shares == 0 {
		return nil
	}
	return dra.SharesProblem(v.Node.Published, v.Target.Shares, v.Policy.Name, v.Snapshot.DRA.RequestedShares)
}

// intervalDiffers compares the time slice that the DeviceClass of whole GPUs gives them with what the policy needs.
func intervalDiffers(v *View) *plan.Problem {
	if v.Target.Expected[plan.ResourceGPU] == 0 {
		return nil
	}
	off := ""
	for _, p := range draPluginPods(v) {
		if !p.SetsTimeSlices && !p.Terminating {
			off = p.Namespace + "/" + p.Name
		}
	}
	return dra.IntervalProblem(v.Snapshot.DRA.Classes, dra.Interval(v.Policy.Spec.Sharing), v.Policy.Name, off)
}

// hangingClaims finds pods that wait for a device which is gone: their claims keep it, and nothing allocates another
// one. Until the DRA driver publishes what is there, nothing tells which devices are gone.
func hangingClaims(v *View, s State) Finding {
	if s != UpToDate {
		return Finding{}
	}
	var hanging []string
	for _, c := range v.Node.Claims {
		gone := c.Gone(v.Node.Name, v.Node.Published)
		if len(gone) == 0 {
			continue
		}
		for _, p := range v.Node.Pods {
			if p.Starting && !p.Terminating && p.Has(c) {
				hanging = append(hanging, fmt.Sprintf("pod %s/%s (%s)", p.Namespace, p.Name, strings.Join(gone, ", ")))
			}
		}
	}
	if len(hanging) == 0 {
		return Finding{}
	}
	slices.Sort(hanging)
	return Finding{
		Reason: v1alpha1.ReasonDeviceGone, Beside: true,
		Message: fmt.Sprintf("These pods were allocated devices that no longer exist, and cannot start: %s. Delete them, so that their workloads "+
			"make others", format.List(slices.Compact(hanging))),
	}
}

// duplicatedClasses finds that several DeviceClasses serve a resource of the node: another one was made after the
// operator had looked for an owner.
func duplicatedClasses(v *View, s State) Finding {
	if v.Policy == nil || s != UpToDate {
		return Finding{}
	}
	var says []string
	for _, resource := range slices.Sorted(maps.Keys(v.Target.Expected)) {
		if duplicates := dra.Duplicates(v.Snapshot.DRA.Classes, resource); duplicates != "" {
			says = append(says, duplicates)
		}
	}
	if len(says) == 0 {
		return Finding{}
	}
	return Finding{Reason: v1alpha1.ReasonDeviceClassConflict, Beside: true, Message: strings.Join(says, ". ")}
}

// upgradeUnvalidated finds an upgrade of NVIDIA's driver that does not end by itself: with a GPUCluster it waits for
// NVIDIA's validator, whose pod claims a whole GPU, and without a pod it waits without a deadline (NVIDIA/gpu-operator
// manifests/state-dra-validation, v26.7.0, and NVIDIA/k8s-operator-libs pkg/upgrade/validation_manager.go).
func upgradeUnvalidated(v *View, s State) Finding {
	whole := func(d gpu.Device) bool { return !d.State.MIG }
	validates := cluster.OfGPUCluster(v.Node.Labels) && v.Node.Labels[cluster.LabelUpgrade] == cluster.UpgradeValidates
	if s != UpToDate || !validates || slices.ContainsFunc(v.Devices, whole) {
		return Finding{}
	}
	return Finding{
		Reason: v1alpha1.ReasonDriverUpgrade, Beside: true,
		Message: fmt.Sprintf("The upgrade of NVIDIA's driver waits for NVIDIA's validator, which claims a whole GPU, and all are in MIG mode. The driver runs. "+
			"End the upgrade: kubectl label node %s --overwrite %s=%s",
			v.Node.Name, cluster.LabelUpgrade, cluster.UpgradeUncordons),
	}
}

// draPluginStartsWithin is how long the DaemonSet of the DRA driver may take to bring a pod to the node.
const draPluginStartsWithin = time.Minute

// draPluginFailing finds that the pod of the DRA driver does not run as it should, or is missing, where that is waited
// for.
func draPluginFailing(v *View, s State) Finding {
	if !slices.Contains([]State{Verifying, Degraded, UpToDate, Failed}, s) {
		return Finding{}
	}
	f := Finding{}
	var says []string
	running := false
	for _, p := range draPluginPods(v) {
		running = running || !p.Terminating
		for _, t := range p.Troubles {
			remaining, is := t.Counts(v.Snapshot.Now)
			if f.After = timing.Sooner(f.After, remaining); is {
				says = append(says, fmt.Sprintf("container %s of pod %s/%s %s; look at `kubectl logs -n %s %s -c %s --previous`",
					t.Container, p.Namespace, p.Name, t.Why, p.Namespace, p.Name, t.Container))
			}
		}
	}
	if waits := s == Verifying || s == Degraded; !running && waits {
		if remaining := ConfigSelectedAt(v).Add(draPluginStartsWithin).Sub(v.Snapshot.Now); remaining > 0 {
			return Finding{After: remaining} // it may be on its way
		}
		says = append(says, "no pod of NVIDIA's DRA driver is on the node; look at its DaemonSet, and whether its pods tolerate the node's taints")
	}
	if len(says) > 0 {
		slices.Sort(says)
		f.Reason, f.Message = v1alpha1.ReasonDRADriverFailing, strings.Join(says, "; ")
	}
	return f
}
