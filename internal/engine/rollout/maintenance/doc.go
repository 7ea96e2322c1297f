// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// Package maintenance is about what interrupts a change of a node as a whole: another controller that works on it, and a reboot.
//
//	driver upgrade | machine-config operator → Maintained → over → Continued: the agent looks again, all deadlines begin anew
//	reboot permitted → Down → agent Ready | not permitted: AwaitReboot
package maintenance
