// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import "github.com/gpusharing/gpu-sharing-operator/api/v1alpha1"

// Class is what a reason means for a rollout, whatever the state of the node: some of the bits below. What it means to
// a person is said where the reason is declared, and what to do about it in docs/troubleshooting.md.
type Class uint8

// The bits of a Class.
const (
	// Transient: the node waits for its turn, or for a step of the rollout that ends by itself.
	Transient Class = 1 << iota
	// UnderWay: the node is being changed, as opposed to one that waits for its turn or is blocked.
	UnderWay
	// Ends: nothing more happens to the node until the policy or the cluster is changed.
	Ends
	// NeedsAttention: a person should look at the node, though its change did not fail: something on it is left undone.
	NeedsAttention
	// First: a policy gives it as its own reason, whatever other nodes wait for.
	First
	// Chosen: a user wants it so, for as long as he wants.
	Chosen
)

// Plain is the class of a reason that blocks a node until something is done about it, of one of a node that waits for
// nothing, and of one that no node has.
const Plain Class = 0

// ClassOf is the class of a reason.
func ClassOf(reason string) Class { return reasonClasses[reason] }

// Is reports whether a class has a bit.
func (c Class) Is(bit Class) bool { return c&bit != 0 }

// reasonClasses has every reason of the API. States of nodes, conditions, metrics and Events follow from it.
var reasonClasses = map[string]Class{
	v1alpha1.ReasonAccepted:                 Plain,
	v1alpha1.ReasonConflicted:               Plain,
	v1alpha1.ReasonDRAStackActive:           Plain,
	v1alpha1.ReasonNoDevicePlugin:           Plain,
	v1alpha1.ReasonNoMatchingNodes:          Plain,
	v1alpha1.ReasonTooManyPolicies:          Plain,
	v1alpha1.ReasonConfigMapFull:            Ends | NeedsAttention,
	v1alpha1.ReasonPaused:                   Transient | First | Chosen,
	v1alpha1.ReasonInvalidWindow:            Transient | Ends | First,
	v1alpha1.ReasonTaintsPresent:            Plain,
	v1alpha1.ReasonTolerationsChanging:      Plain,
	v1alpha1.ReasonTolerationMissing:        Plain,
	v1alpha1.ReasonTaintConflict:            Plain,
	v1alpha1.ReasonNodeNotInitialized:       Plain,
	v1alpha1.ReasonStartupTaintMissing:      Plain,
	v1alpha1.ReasonStartupTaintInMachineSet: Plain,
	v1alpha1.ReasonConfigured:               Plain,
	v1alpha1.ReasonConfiguring:              Plain,
	v1alpha1.ReasonAdviceOnly:               Plain,
	v1alpha1.ReasonUnknownShape:             Plain,
	v1alpha1.ReasonAmbiguousShape:           Plain,
	v1alpha1.ReasonNodesDisagree:            Plain,
	v1alpha1.ReasonNodeGroupNotFound:        Plain,
	v1alpha1.ReasonNodeGroupNotSelected:     Plain,
	v1alpha1.ReasonResourceNotSupported:     Plain,
	v1alpha1.ReasonMultipleResources:        Plain,
	v1alpha1.ReasonOverlayNotServed:         Plain,
	v1alpha1.ReasonFeatureGateOff:           Plain,
	v1alpha1.ReasonOverlayConflict:          Plain,
	v1alpha1.ReasonGPUCountRises:            Plain,
	v1alpha1.ReasonOwnedByOther:             Plain,
	v1alpha1.ReasonRemovedByOther:           Plain,
	v1alpha1.ReasonInvalidValue:             Plain,
	v1alpha1.ReasonNotPermitted:             Plain,
	v1alpha1.ReasonWriteFailed:              NeedsAttention,
	v1alpha1.ReasonAcceleratorLabel:         Plain,
	v1alpha1.ReasonLimitsNotCounted:         Plain,
	v1alpha1.ReasonStaleTemplate:            Plain,
	v1alpha1.ReasonScaleDownCandidate:       Plain,
	v1alpha1.ReasonRequestNotOffered:        Plain,
	v1alpha1.ReasonContainerOverShare:       Plain,
	v1alpha1.ReasonNotMeasured:              Plain,
	v1alpha1.ReasonReady:                    Plain,
	v1alpha1.ReasonAgentNotReporting:        Plain,
	v1alpha1.ReasonGPUNodeMissing:           NeedsAttention,
	v1alpha1.ReasonNodeOptedOut:             Plain,
	v1alpha1.ReasonConfiguringDevicePlugin:  Transient | First,
	v1alpha1.ReasonOutsideWindow:            Transient | Chosen,
	v1alpha1.ReasonWaitingForFirst:          Transient,
	v1alpha1.ReasonWaitingForBudget:         Transient,
	v1alpha1.ReasonRolloutHalted:            Transient | Ends,
	v1alpha1.ReasonGPUInUse:                 Plain,
	v1alpha1.ReasonDrainTimedOut:            Plain,
	v1alpha1.ReasonDriverUpgrade:            Plain,
	v1alpha1.ReasonNodeMaintenance:          Plain,
	v1alpha1.ReasonStoppingOperands:         Transient | UnderWay,
	v1alpha1.ReasonDisablingNVIDIAMPS:       Transient | UnderWay,
	v1alpha1.ReasonNodeFeatureIgnored:       NeedsAttention,
	v1alpha1.ReasonMPSCapableReset:          NeedsAttention,
	v1alpha1.ReasonApplying:                 Transient | UnderWay,
	v1alpha1.ReasonSelecting:                Transient | UnderWay,
	v1alpha1.ReasonVerifying:                Transient | UnderWay,
	v1alpha1.ReasonNotAdvertised:            NeedsAttention,
	v1alpha1.ReasonRestoring:                UnderWay,
	v1alpha1.ReasonClusterNotRead:           Plain,
	v1alpha1.ReasonProgressing:              Transient | UnderWay,
	v1alpha1.ReasonProfileNotAvailable:      Plain,
	v1alpha1.ReasonLayoutDoesNotFit:         Plain,
	v1alpha1.ReasonMIGNotSupported:          Plain,
	v1alpha1.ReasonNoLayoutMatches:          Plain,
	v1alpha1.ReasonMixedInstances:           Plain,
	v1alpha1.ReasonPartialSelection:         Plain,
	v1alpha1.ReasonMPSClientLimitExceeded:   Plain,
	v1alpha1.ReasonNoNodeFeatures:           Plain,
	v1alpha1.ReasonMPSMultiUserNotSupported: Plain,
	v1alpha1.ReasonTimeSliceNotSupported:    Plain,
	v1alpha1.ReasonMemoryLimitExceeded:      Plain,
	v1alpha1.ReasonVirtualGPUNotSupported:   Plain,
	v1alpha1.ReasonProcessesUnknown:         Plain,
	v1alpha1.ReasonMIGActive:                Plain,
	v1alpha1.ReasonNoMIGManager:             Plain,
	v1alpha1.ReasonReplicasDiffer:           Plain,
	v1alpha1.ReasonOperandsLeftStopped:      NeedsAttention,
	v1alpha1.ReasonOperandsNotEnding:        NeedsAttention,
	v1alpha1.ReasonMIGManagerBusy:           Plain,
	v1alpha1.ReasonMIGManagerStuck:          NeedsAttention,
	v1alpha1.ReasonConfigManagerFailing:     NeedsAttention,
	v1alpha1.ReasonDevicePluginFailing:      NeedsAttention,
	v1alpha1.ReasonDevicePluginOutdated:     NeedsAttention,
	v1alpha1.ReasonMPSCapableStale:          NeedsAttention,
	v1alpha1.ReasonLimitsPending:            Plain,
	v1alpha1.ReasonMPSUnreachable:           Plain,
	v1alpha1.ReasonMPSUserWaiting:           Plain,
	v1alpha1.ReasonMPSClientsRunning:        First,
	v1alpha1.ReasonGPUMissing:               Plain,
	v1alpha1.ReasonComputeModeLeft:          NeedsAttention,
	v1alpha1.ReasonComputeModeLost:          NeedsAttention,
	v1alpha1.ReasonSlicerActive:             Plain,
	v1alpha1.ReasonDRADriverActive:          Plain,
	v1alpha1.ReasonConfigLabelReset:         Plain,
	v1alpha1.ReasonMIGManagerReenabled:      NeedsAttention,
	v1alpha1.ReasonMIGConfigIgnored:         NeedsAttention,
	v1alpha1.ReasonChangedByOthers:          NeedsAttention,
	v1alpha1.ReasonNotOnDRA:                 Plain,
	v1alpha1.ReasonDRAUnavailable:           Plain,
	v1alpha1.ReasonDRADriverUnknown:         Plain,
	v1alpha1.ReasonDRADriverFailing:         Plain,
	v1alpha1.ReasonDRASharesDiffer:          Plain,
	v1alpha1.ReasonDRAIntervalDiffers:       Plain,
	v1alpha1.ReasonDynamicMIGActive:         Plain,
	v1alpha1.ReasonDeviceClassConflict:      Plain,
	v1alpha1.ReasonNotPublished:             Plain,
	v1alpha1.ReasonDeviceGone:               Plain,
	v1alpha1.ReasonMeasuring:                Plain,
	v1alpha1.ReasonDiscovered:               Plain,
	v1alpha1.ReasonNVMLFailed:               Plain,
	v1alpha1.ReasonDriverNotFound:           Plain,
	v1alpha1.ReasonDriverNotReady:           Plain,
	v1alpha1.ReasonDriverMismatch:           Plain,
	v1alpha1.ReasonPlatformNotSupported:     Plain,
	v1alpha1.ReasonDeviceNodesMissing:       Plain,
	v1alpha1.ReasonPodResourcesFailed:       Plain,
	v1alpha1.ReasonApplied:                  Plain,
	v1alpha1.ReasonNoPolicy:                 Plain,
	v1alpha1.ReasonApplyTimedOut:            Plain,
	v1alpha1.ReasonStepFailed:               Plain,
	v1alpha1.ReasonMPSDaemonFailed:          Plain,
	v1alpha1.ReasonUnknownDevice:            Plain,
	v1alpha1.ReasonVGPUUnlicensed:           Plain,
	v1alpha1.ReasonRebootRequired:           Plain,
	v1alpha1.ReasonMIGManagerPartitioning:   Transient | UnderWay,
	v1alpha1.ReasonMIGManagerFailed:         Plain,
	v1alpha1.ReasonRebooting:                Transient | UnderWay,
	v1alpha1.ReasonRebootInVain:             Plain,
	v1alpha1.ReasonAwaitingReport:           Plain,
}
