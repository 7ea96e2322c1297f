// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package timing

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"
)

// window is a maintenance window of a policy.
type window struct {
	opens cron.Schedule
	lasts time.Duration
	zone  *time.Location
}

// Calendar are the maintenance windows of a policy. Without any, disruptive changes may start at any time.
type Calendar []window

// someDay is a time within five years of which each schedule comes true that ever does. The library looks no further.
var someDay = time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)

// calendarOf parses the maintenance windows of a policy. The error names the field and what is wrong with it.
func calendarOf(p *v1alpha1.GPUSharingPolicy) (Calendar, error) {
	c := make(Calendar, 0, len(p.Spec.Rollout.Windows))
	for i, spec := range p.Spec.Rollout.Windows {
		w, err := windowFrom(spec)
		if err != nil {
			return nil, fmt.Errorf("rollout.windows[%d]%w", i, err)
		}
		c = append(c, w)
	}
	return c, nil
}

func windowFrom(spec v1alpha1.MaintenanceWindow) (w window, err error) {
	if w.opens, err = cron.ParseStandard(spec.Schedule); err != nil {
		return w, fmt.Errorf(".schedule %q is no schedule: %w", spec.Schedule, err)
	}
	if w.opens.Next(someDay).IsZero() {
		return w, fmt.Errorf(".schedule %q names a date that does not exist", spec.Schedule)
	}
	if w.lasts, err = time.ParseDuration(spec.Duration); err != nil || w.lasts <= 0 {
		return w, errors.Join(fmt.Errorf(".duration %q is no duration", spec.Duration), err)
	}
	if w.zone, err = time.LoadLocation(spec.TimeZone); err != nil {
		return w, fmt.Errorf(".timeZone %q is unknown: %w", spec.TimeZone, err)
	}
	return w, nil
}

// At reports whether a window is open, and when that changes: when the next window opens or, at the earliest, when the
// last open one closes.
func (c Calendar) At(now time.Time) (open bool, changes time.Time) {
	for _, w := range c {
		start := w.startAfter(now.Add(-w.lasts))
		switch end := start.Add(w.lasts); {
		case start.IsZero():
		case !start.After(now):
			if !open || end.After(changes) {
				changes = end
			}
			open = true
		case !open && (changes.IsZero() || start.Before(changes)):
			changes = start
		}
	}
	return open || len(c) == 0, changes
}

// clockChange is more than any clock is set back or forward.
const clockChange = 3 * time.Hour

// startAfter is when the window opens for the first time after t. The schedule is followed on the clock of the wall,
// since the library leaves out each time that daylight saving skips.
func (w window) startAfter(t time.Time) time.Time {
	wall := onWall(t.In(w.zone)).Add(-clockChange)
	for {
		wall = w.opens.Next(wall)
		if wall.IsZero() {
			return wall
		}
		if start := w.whenWallShows(wall); start.After(t) {
			return start
		}
	}
}

// onWall is what the clock on the wall shows, as if it showed UTC.
func onWall(t time.Time) time.Time {
	_, offset := t.Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}

// whenWallShows is when the clock on the wall shows a time: the first time if it does so twice. A time that the clock
// skips comes as much later as the clock jumps.
func (w window) whenWallShows(wall time.Time) time.Time {
	const day = 24 * time.Hour
	var before time.Time
	for _, near := range []time.Time{wall.Add(-day), wall.Add(day)} {
		_, offset := near.In(w.zone).Zone()
		at := wall.Add(-time.Duration(offset) * time.Second).In(w.zone)
		if onWall(at).Equal(wall) {
			return at
		}
		if before.IsZero() {
			before = at
		}
	}
	return before
}

// Suspend pauses the policies that have an invalid maintenance window, so that they change nothing until it is
// corrected, and returns why each is. The policies that it is given stay as they are.
func Suspend(policies []v1alpha1.GPUSharingPolicy) (suspended []v1alpha1.GPUSharingPolicy, calendars []Calendar, why []error) {
	suspended, calendars, why = policies, make([]Calendar, len(policies)), make([]error, len(policies))
	for i := range policies {
		if calendars[i], why[i] = calendarOf(&policies[i]); why[i] == nil {
			continue
		}
		if &suspended[0] == &policies[0] {
			suspended = slices.Clone(policies)
		}
		suspended[i].Spec.Rollout.Paused = true
	}
	return suspended, calendars, why
}
