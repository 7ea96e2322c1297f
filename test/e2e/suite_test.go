// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/node"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/sandbox"
	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
	"github.com/gpusharing/gpu-sharing-operator/test/env"
)

const (
	// askedVariable must be set for these tests to run at all: they need root and minutes.
	askedVariable = "GPUSHARING_E2E"
	// logsVariable names a folder that gets the logs of every program and pod, and the report. Without it the report
	// goes to bin/e2e/last, which the Makefile makes.
	logsVariable = "GPUSHARING_E2E_LOGS"

	nodeName = "node-a"

	// patience is how long something is waited for that takes seconds on an idle machine, and minutes on one that is
	// not.
	patience = 4 * time.Minute
)

func TestMain(m *testing.M) {
	if os.Getenv(askedVariable) == "" {
		fmt.Println("skipped: the tests on a real node need root and take minutes; run `make e2e`")
		os.Exit(0)
	}
	root, err := env.Root()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(sandbox.Main(sandbox.Options{
		Hostname:  nodeName,
		Addresses: []string{node.Address, node.ServiceAddress},
		Visible:   visible(root),
		Kept:      outliving(root),
	}, m.Run))
}

// outliving is the folder in which what the node writes outlives it. Empty: none.
func outliving(root string) string {
	last := filepath.Join(root, "bin", "e2e", "last")
	if _, err := os.Stat(last); err != nil {
		last = ""
	}
	return cmp.Or(os.Getenv(logsVariable), last)
}

// visible are the folders that the node must see: this checkout, and the caches in which the programs lie that
// bin/e2e points at.
func visible(root string) []string {
	folders := []string{root}
	links, _ := filepath.Glob(filepath.Join(root, "bin", "e2e", "*")) // the patterns are not malformed
	for _, of := range []string{"dra", "olm"} {
		others, _ := filepath.Glob(filepath.Join(root, "bin", "e2e", of, "*"))
		links = append(links, others...)
	}
	seen := map[string]bool{}
	for _, link := range links {
		target, err := filepath.EvalSymlinks(link)
		if err == nil && target != link && !seen[filepath.Dir(target)] {
			seen[filepath.Dir(target)] = true
			folders = append(folders, filepath.Dir(target))
		}
	}
	return folders
}

// What is proved, in this order: there is one node, and each change of its GPUs costs time.
var _ = Describe("On a real node", func() {
	mine := turnsOf(os.Getenv(turns.Variable))
	BeforeEach(func() {
		if of := CurrentSpecReport().ContainerHierarchyTexts; mine != nil && !mine.Begins(of[min(1, len(of)-1)], time.Now()) {
			Skip(turns.NoTime)
		}
	}, OncePerOrdered)
	AfterEach(func(ctx SpecContext) {
		Expect(env.Denied(ctx, machine.Config, env.ControllerWrites)).To(BeZero(),
			"the controller wrote what config/manager/admission.yaml does not list; its log names the field")
	}, OncePerOrdered)
	byHandSpecs()
	timeSlicingSpecs()
	deviceFileSpecs()
	exclusiveSpecs()
	mpsSpecs()
	mpsUserSpecs()
	mpsApartSpecs()
	mpsDeniedSpecs()
	resilienceSpecs()
	restSpecs()
	usageSpecs()
	memoryLimitSpecs()
	mistakeSpecs()
	lifecycleSpecs()
	previousSpecs()
	olmSpecs()
	migSpecs()
	mixtureSpecs()
	onDemandSpecs()
	movedLayoutSpecs()
	openSpecs()
	switchSpecs()
	upgradeSpecs()
	tenantSpecs()
	variantSpecs()
	safetySpecs()
	prioritySpecs()
	beforeSpecs()
	migManagerSpecs()
	vgpuSpecs()
	guideSpecs()
	draByHandSpecs()
	draPolicySpecs()
	gpuClusterSpecs()
	speedSpecs()
	limitSpeedSpecs()
})

// turnsOf reads when this machine has to end; nil: whenever it does.
func turnsOf(raw string) *turns.Turns {
	if raw == "" {
		return nil
	}
	mine := &turns.Turns{}
	if err := json.Unmarshal([]byte(raw), mine); err != nil {
		panic(err) // of the runner's
	}
	return mine
}

func TestRealNode(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(patience)
	SetDefaultEventuallyPollingInterval(100 * time.Millisecond)
	EnforceDefaultTimeoutsWhenUsingContexts()
	RunSpecs(t, "A real node")
}
