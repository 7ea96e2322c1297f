// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"
)

// mostLines is how long the story may be for a person to read it.
const mostLines = 70

// sayCost says what the changes have reached that began then, and what they have cost, as it was observed.
func (d *demo) sayCost(ctx context.Context, began time.Time, reached string) error {
	evicted, err := d.evictions(ctx)
	if err != nil {
		return err
	}
	d.narration.say("After %.1f s %s; %s; pods evicted: %d.", time.Since(began).Seconds(), reached, d.cost.sum(), evicted-d.cost.evicted)
	d.cost.evicted = evicted
	return nil
}

// showStatus shows what the nodes offer now.
func (d *demo) showStatus(ctx, _ context.Context, _ *sync.WaitGroup) error {
	if err := d.isHealthy(ctx); err != nil {
		return err
	}
	return d.showKubectl(ctx, all, "gpusharing", "status")
}

// isHealthy waits until `kubectl gpusharing doctor` finds no error.
func (d *demo) isHealthy(ctx context.Context) (err error) {
	if ended := until(ctx, func() (bool, error) {
		_, err = d.askKubectl(ctx, "gpusharing", "doctor")
		return err == nil, nil
	}); ended != nil {
		return errors.Join(ended, err)
	}
	return nil
}

// showNext says what to try next, and fails if the story got longer than anybody reads.
func (d *demo) showNext(context.Context, context.Context, *sync.WaitGroup) error {
	d.narration.chapter("What to try next")
	d.narration.show(`KEEP=1 make demo        the same cluster, left running: change policies, start pods, look at the page
README.md#install       two commands install the operator beside NVIDIA's; nothing on a GPU changes until you create a policy
docs/quickstart.md      the first policy on nodes of yours, and a pod with resources.limits: {nvidia.com/gpu: 1}
docs/security.md        what it may do, and what it never does`)
	if d.narration.lines > mostLines {
		return fmt.Errorf("the demo told %d lines; a story has %d at most (test/demo/result.go)", d.narration.lines, mostLines)
	}
	return nil
}

// showInvitation says what to try while the demo is left running.
func (d *demo) showInvitation(ctx, background context.Context, running *sync.WaitGroup) error {
	page, err := d.servePage(ctx, background, running)
	if err != nil {
		return err
	}
	d.narration.chapter("It is left running until you press Ctrl-C. The page: " + page)
	d.narration.show(fmt.Sprintf(`In another terminal, with kubectl and the operator's plugin:
  export KUBECONFIG=%s PATH=$PWD/%s:%s:$PATH

Look around:
  kubectl gpusharing status
  kubectl gpusharing why %s
  kubectl get gpunode gpu-a100 -o yaml
Change your mind, and see the node follow within seconds:
  kubectl patch gsp time-slicing-t4 --type merge -p '{"spec":{"sharing":{"timeSlicing":{"replicas":8}}}}'
  kubectl gpusharing status gpu-t4
Start a pod of yours: no scheduler runs here, so name a node by spec.nodeName, such as gpu-t4, and ask why it got its share.
Let a pod hold an instance and ask for another layout. The node waits, and its status names what blocks; delete the pod, and it follows:
  kubectl apply -f %s
  kubectl patch gsp mig-a100 --type merge -p '{"spec":{"sharing":{"mig":{"layouts":[{"fill":"1g"}]}}}}'
  kubectl gpusharing status mig-a100
  kubectl delete pod holder
Delete pods, their ResourceClaim, which nothing here deletes with its pod, and policies. Every node and NVIDIA's ClusterPolicy go back:
  kubectl delete pod,resourceclaim,gsp --all`, d.kubeconfig, d.programs, filepath.Dir(d.kubectl), draPod, holder))
	return nil
}

var address = regexp.MustCompile(`http://\S+`)

// servePage serves the page until the demo ends, and returns its address.
func (d *demo) servePage(ctx, background context.Context, running *sync.WaitGroup) (page string, err error) {
	log := filepath.Join(d.dir, "page.log")
	p, err := start(log, d.kubectl, []string{"gpusharing", "dashboard"}, d.environment())
	if err != nil {
		return "", err
	}
	running.Go(func() {
		<-background.Done()
		p.Stop()
	})
	err = until(ctx, func() (bool, error) {
		said, err := os.ReadFile(log)
		if page = address.FindString(string(said)); page == "" && !p.Alive() {
			err = fmt.Errorf("kubectl gpusharing dashboard ended: %s", said)
		}
		return page != "", err
	})
	return page, err
}
