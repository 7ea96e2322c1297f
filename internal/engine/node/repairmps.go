// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
	"github.com/gpusharing/gpu-sharing-operator/internal/kube/format"
)

// limitsPending finds pods that keep the MPS limits from before the last change.
func limitsPending(v *View, s State) finding {
	if s != UpToDate {
		return finding{} // until then the limits are a part of the change
	}
	var names []string
	clients := int32(0)
	for _, d := range v.Node.GPU.Status.MPS {
		clients += d.OutdatedClients
		for _, uid := range d.OutdatedPodUIDs {
			names = append(names, podNameOf(v, uid))
		}
	}
	if clients == 0 {
		return finding{}
	}
	slices.Sort(names)
	who := fmt.Sprintf("%d MPS clients", clients)
	if len(names) > 0 {
		who = format.List(names)
	}
	return finding{Reason: v1alpha1.ReasonLimitsPending, Message: fmt.Sprintf("%s: started before the MPS limits changed, and "+
		"keep their former limits until they end; restart them to apply the new limits", who)}
}

// mpsUnreachable finds daemons that new pods cannot reach.
func mpsUnreachable(v *View, _ State) finding {
	var names []string
	clients := int32(0)
	for _, d := range v.Node.GPU.Status.MPS {
		if d.Unreachable {
			names = append(names, d.ResourceName)
			clients += d.Clients
		}
	}
	if len(names) == 0 {
		return finding{}
	}
	slices.Sort(names)
	return finding{Reason: v1alpha1.ReasonMPSUnreachable, Message: fmt.Sprintf("%s: another program replaced the shared memory of MPS, "+
		"as NVIDIA's MPS DaemonSet does when it starts, so new pods cannot use it until no client is connected, now %d; restart the pods "+
		"that use MPS", format.List(names), clients)}
}

// userWaiting finds pods that wait because MPS serves one user ID at a time.
func userWaiting(v *View, _ State) finding {
	var names []string
	var active int64
	for _, d := range v.Node.GPU.Status.MPS {
		if d.User == nil || len(d.WaitingPods) == 0 {
			continue
		}
		active = *d.User
		for _, p := range d.WaitingPods {
			names = append(names, fmt.Sprintf("%s (user %d)", podNameOf(v, p.UID), p.User))
		}
	}
	if len(names) == 0 {
		return finding{}
	}
	slices.Sort(names)
	return finding{Reason: v1alpha1.ReasonMPSUserWaiting, Message: fmt.Sprintf("MPS serves one user ID at a time, now %d; waiting: "+
		"%s; run all pods of the node as one user ID (securityContext.runAsUser), or set sharing.mps.multiUser", active, format.List(names))}
}

// podNameOf is the name of a pod of the node.
func podNameOf(v *View, uid string) string {
	for _, p := range v.Node.Pods {
		if p.UID == uid {
			return p.Namespace + "/" + p.Name
		}
	}
	return "pod " + uid
}
