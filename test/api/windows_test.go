// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"fmt"
	"testing"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// windows: the API server accepts the windows that people write for CronJobs, and rejects those that never open.
func windows(t *testing.T, c client.Client) {
	t.Helper()
	create := func(t *testing.T, window string) error {
		t.Helper()
		spec := fmt.Sprintf("{sharing: {strategy: Exclusive}, rollout: {windows: [%s]}}", window)
		return client.WithFieldValidation(client.NewDryRunClient(c), "Strict").Create(t.Context(), policy(t, "windows", spec))
	}
	for _, window := range []string{
		`{schedule: "0 22 * * FRI", duration: 8h, timeZone: Europe/Berlin}`,
		`{schedule: "*/15 0-5,22-23 1,15 jan-mar 1-5", duration: 5m}`,
		`{schedule: "59 23 31 12 6", duration: 168h, timeZone: America/Argentina/Buenos_Aires}`,
		`{schedule: "00 09 ? * sun", duration: 1h30m, timeZone: Etc/GMT+3}`,
		`{schedule: "@daily", duration: 1h0m0s, timeZone: UTC}`,
	} {
		t.Run("accepts "+window, func(t *testing.T) {
			NewWithT(t).Expect(create(t, window)).To(Succeed())
		})
	}
	const cron, hours, zone = "must be five fields of cron", "must be hours and minutes from 5m to 168h", "IANA database"
	for window, says := range map[string]string{
		`{duration: 1h}`:                                                 "spec.rollout.windows[0].schedule: Required value",
		`{schedule: "@daily"}`:                                           "spec.rollout.windows[0].duration: Required value",
		`{schedule: "0 22 * *", duration: 1h}`:                           cron,
		`{schedule: "0 0 22 * * 1", duration: 1h}`:                       cron,
		`{schedule: "60 22 * * 1", duration: 1h}`:                        cron,
		`{schedule: "0 24 * * 1", duration: 1h}`:                         cron,
		`{schedule: "0 22 0 * 1", duration: 1h}`:                         cron,
		`{schedule: "0 22 * 13 1", duration: 1h}`:                        cron,
		`{schedule: "0 22 * * 7", duration: 1h}`:                         cron,
		`{schedule: "0 22 * * Friday", duration: 1h}`:                    cron,
		`{schedule: "0 22 * * FRI-MON", duration: 1h}`:                   "a range must not end before it begins",
		`{schedule: "*/0 22 * * 1", duration: 1h}`:                       "a step must be a number above 0",
		`{schedule: "TZ=UTC 0 22 * * 1", duration: 1h}`:                  cron,
		`{schedule: "@every 1h", duration: 1h}`:                          cron,
		`{schedule: "@Daily", duration: 1h}`:                             cron,
		`{schedule: "@daily", duration: 4m}`:                             hours,
		`{schedule: "@daily", duration: 168h1m}`:                         hours,
		`{schedule: "@daily", duration: 30s}`:                            hours,
		`{schedule: "@daily", duration: 1.5h}`:                           hours,
		`{schedule: "@daily", duration: ""}`:                             "spec.rollout.windows[0].duration",
		`{schedule: "@daily", duration: 999999999999h}`:                  "spec.rollout.windows[0].duration",
		`{schedule: "@daily", duration: 1h, timeZone: Local}`:            zone,
		`{schedule: "@daily", duration: 1h, timeZone: ../etc/localtime}`: zone,
		`{schedule: "@daily", duration: 1h, timeZone: Europe/Atlantis}`:  zone,
	} {
		t.Run("rejects "+window, func(t *testing.T) {
			err := create(t, window)
			t.Log(err)
			NewWithT(t).Expect(err).To(MatchError(And(ContainSubstring("spec.rollout.windows[0]"), ContainSubstring(says))))
		})
	}
}
