// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// narrator tells what happens while the demo runs.
type narrator struct {
	site

	narration *narration

	mu   sync.Mutex
	told map[string]string // what was told last, by node
}

// narrate tells of what the controller announces as Events and of what the agents report, until the context ends.
func (n *narrator) narrate(ctx context.Context) {
	go n.follow(ctx, &eventsv1.EventList{}, n.tellEvent)
	seen := map[string]string{}
	go n.follow(ctx, &v1alpha1.GPUNodeList{}, func(o client.Object) { n.tellNode(o, seen) })
}

// follow calls tell for every change of the objects of a list's kind.
func (n *narrator) follow(ctx context.Context, list client.ObjectList, tell func(client.Object)) {
	for ctx.Err() == nil {
		w, err := n.cluster.Client.Watch(ctx, list)
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		for event := range w.ResultChan() {
			if o, ok := event.Object.(client.Object); ok && (event.Type == watch.Added || event.Type == watch.Modified) {
				tell(o)
			}
		}
	}
}

// tellEvent tells what the controller announces, shorter than the Event does: about its node, and without the labels.
func (n *narrator) tellEvent(o client.Object) {
	e, ok := o.(*eventsv1.Event)
	if !ok || e.ReportingController != "gpu-sharing-controller" || e.Series != nil {
		return
	}
	node, note := abridge(e)
	n.mu.Lock()
	again := n.told[node] == note
	n.told[node] = note
	n.mu.Unlock()
	if !again {
		n.narration.say(node, "controller: %s", note)
	}
}

// abridge finds the node, or else the object, that an Event is about and says in few words what it tells.
func abridge(e *eventsv1.Event) (about, note string) {
	node, note := "", e.Note
	switch {
	case e.Regarding.Kind == "Node":
		node = e.Regarding.Name
	case e.Related != nil && e.Related.Kind == "Node":
		node = e.Related.Name
	}
	if found := waiting.FindStringSubmatch(note); found != nil {
		node, note = found[1], note[len(found[0]):]
	}
	if found := action.FindStringSubmatch(note); found != nil {
		note = cmp.Or(found[2], found[3])
	}
	if node == "" {
		return e.Regarding.Name, note
	}
	whole := regexp.MustCompile(` node ` + regexp.QuoteMeta(node) + `([^-.a-z0-9]|$)`) // and none whose name only begins so
	return node, whole.ReplaceAllString(note, " the node$1")
}

var (
	// waiting begins the message of a policy whose nodes are on their way.
	waiting = regexp.MustCompile(`^\d+ of \d+ nodes? ready; node ([^ :]+): `)
	// action is what is done to a node, and in brackets or after a colon what for.
	action = regexp.MustCompile(`^(?:patch node (\S+) \(([^)]*)\).*|set spec of GPUNode \S+: (.*))$`)
)

// tellNode tells of a GPUNode what has changed since it was told of last.
func (n *narrator) tellNode(o client.Object, seen map[string]string) {
	node, ok := o.(*v1alpha1.GPUNode)
	if !ok || len(node.Status.Devices) == 0 {
		return
	}
	now := describeDevices(node.Status.Devices)
	if applied := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionApplied); applied != nil && applied.Status != metav1.ConditionTrue {
		now += fmt.Sprintf(" (%s: %s)", applied.Reason, applied.Message)
	}
	if seen[node.Name] == now {
		return
	}
	seen[node.Name] = now
	for _, m := range n.machines {
		if calls := m.newCalls(); m.name == node.Name && calls != "" {
			n.narration.say(node.Name, "driver: %s", calls)
		}
	}
	n.narration.say(node.Name, "agent: %s", now)
}

// describeDevices is how the GPUs of a node are shared, those that are alike together.
func describeDevices(devices []v1alpha1.DeviceStatus) string {
	var kinds []string
	counts := map[string]int{}
	for _, device := range devices {
		kind := device.Product + " " + describeSharing(device)
		if counts[kind] == 0 {
			kinds = append(kinds, kind)
		}
		counts[kind]++
	}
	for i, kind := range kinds {
		kinds[i] = fmt.Sprintf("%d× %s", counts[kind], kind)
	}
	return strings.Join(kinds, ", ")
}

func describeSharing(d v1alpha1.DeviceStatus) string {
	switch s := d.Sharing; {
	case s.MPS != nil:
		return fmt.Sprintf("under MPS (%s of memory and %d%% of the threads for each client)", s.MPS.PinnedMemoryLimit, s.MPS.ActiveThreadPercentage)
	case len(s.Instances) > 0:
		var parts []string
		for _, i := range s.Instances {
			parts = append(parts, fmt.Sprintf("%d× %s", i.Count, i.Profile))
		}
		return "split into " + strings.Join(parts, " + ")
	case s.MIGMode == v1alpha1.MIGModeEnabled:
		return "in MIG mode, empty"
	default:
		return "whole"
	}
}
