// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/onsi/ginkgo/v2/types"

	"github.com/gpusharing/gpu-sharing-operator/test/e2e/turns"
)

const everything = "On a real node"

func listedSpecs() []types.SpecReport {
	return []types.SpecReport{
		spec(types.SpecStatePassed, "a", everything, "MPS"), spec(types.SpecStatePassed, "b", everything, "MPS"),
		spec(types.SpecStatePassed, "a", everything, "MIG"),
		spec(types.SpecStatePassed, "step 1", everything, "Guides", "CERN"), spec(types.SpecStatePassed, "step 1", everything, "Guides", "AKS"),
		spec(types.SpecStatePassed, "a", everything, "New"),
	}
}

func namesOf(hands []hand) (names [][]string) {
	for _, h := range hands {
		names = append(names, h.names())
	}
	return names
}

func TestTheLongestContainersAreDealtFirstAndRunInTheOrderOfTheProgram(t *testing.T) {
	took := map[string]float64{"MPS": 40, "MIG": 90, "Guides": 60}
	for machines, want := range map[int][][]string{
		1: {{"MPS", "MIG", "Guides", "New"}},
		2: {{"MIG", "New"}, {"MPS", "Guides"}},
		9: {{"MIG"}, {"Guides"}, {"MPS"}, {"New"}},
	} {
		if got := namesOf(deal(unitsOf(listedSpecs(), took), machines)); !reflect.DeepEqual(got, want) {
			t.Errorf("%d machines get %v, expected %v", machines, got, want)
		}
	}
}

func TestRunsWithoutTimeForAllLeaveOthersOut(t *testing.T) {
	all := unitsOf(listedSpecs(), nil)
	var first []string
	for by := range uint(6) {
		first = append(first, inTurn(all[1:], all, by)[0].Name)
	}
	if want := []string{"MIG", "MIG", "Guides", "New", "MIG", "MIG"}; !slices.Equal(first, want) {
		t.Errorf("six runs leave out last %v, expected %v", first, want)
	}
}

func TestEachSpecIsDealtToOneMachine(t *testing.T) {
	seen := map[string]int{}
	for _, h := range deal(unitsOf(listedSpecs(), nil), 3) {
		for _, s := range h.specs() {
			seen[s]++
		}
	}
	for _, s := range listedSpecs() {
		if seen[name(s)] != 1 {
			t.Errorf("%q is dealt %d times", name(s), seen[name(s)])
		}
	}
}

func TestNothingIsDealtWhereNoSpecMatches(t *testing.T) {
	if hands := deal(nil, 3); len(hands) != 0 {
		t.Errorf("%d machines have nothing to do", len(hands))
	}
}

func TestTheSecondsOfAContainerAreThoseOfAllItsSpecs(t *testing.T) {
	specs := listedSpecs()
	for i := range specs {
		specs[i].RunTime = 1500 * time.Millisecond
	}
	got := secondsOf([]types.Report{{SpecReports: specs[:4]}, {SpecReports: specs[4:]}})
	if want := (map[string]float64{"MPS": 3, "MIG": 2, "Guides": 3, "New": 2}); !reflect.DeepEqual(got, want) {
		t.Errorf("recorded are %v, expected %v", got, want)
	}
}

// late are the listed specs, for the first of which no time was left.
func late(many int) []types.SpecReport {
	specs := append(listedSpecs(), types.SpecReport{LeafNodeType: types.NodeTypeBeforeSuite})
	for i := range many {
		specs[i].State, specs[i].Failure.Message = types.SpecStateSkipped, turns.NoTime
	}
	return specs
}

func TestARunInWhichSpecsHadNoTurnHasNotPassed(t *testing.T) {
	hands := deal(unitsOf(listedSpecs(), nil), 1)
	for name, c := range map[string]struct {
		report types.Report
		passed bool
	}{
		"all passed":       {types.Report{SuiteSucceeded: true, SpecReports: listedSpecs()}, true},
		"one had no turn":  {types.Report{SuiteSucceeded: true, SpecReports: listedSpecs()[1:]}, false},
		"no time for one":  {types.Report{SuiteSucceeded: true, SpecReports: late(1)}, true},
		"no time for any":  {types.Report{SuiteSucceeded: true, SpecReports: late(6)}, false},
		"the suite failed": {types.Report{SpecReports: listedSpecs()}, false},
	} {
		var out strings.Builder
		if passed := tell(&out, []types.Report{c.report}, hands, time.Minute); passed != c.passed {
			t.Errorf("%s: passed is %v\n%s", name, passed, out.String())
		}
	}
}

// TestWhatOtherMachinesRunIsNotLeftOut once more by each of them: Ginkgo reports what the focus leaves out as skipped.
func TestWhatOtherMachinesRunIsNotLeftOut(t *testing.T) {
	hands := deal(unitsOf(listedSpecs(), nil), 2)
	for name, had := range map[string]bool{"no time for any": false, "one unit late, another without a turn": true} {
		t.Run(name, func(t *testing.T) {
			var reports []types.Report
			for m, h := range hands {
				specs := listedSpecs()
				for i := range specs {
					mine := slices.Contains(h.names(), unitName(specs[i]))
					late := mine && (!had || unitName(specs[i]) == hands[0].units[0].name)
					switch {
					case late:
						specs[i].State, specs[i].Failure.Message = types.SpecStateSkipped, turns.NoTime
					case !mine, had && m == 1: // that machine's focus found nothing
						specs[i].State = types.SpecStateSkipped
					}
				}
				reports = append(reports, types.Report{SuiteSucceeded: true, SpecReports: specs})
			}
			var out strings.Builder
			if tell(&out, reports, hands, time.Minute) {
				t.Errorf("passed:\n%s", out.String())
			}
		})
	}
}
