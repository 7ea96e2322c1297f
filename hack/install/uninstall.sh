#!/usr/bin/env bash
# Deletes the kinds, and with them all policies and GPUNodes. Refuses while a policy is left, or a GPUNode still has the record of
# how its node was before the operator.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

KUBECTL=${KUBECTL:-kubectl}
kinds=$("$KUBECTL" get crd gpusharingpolicies.gpusharing.io gpunodes.gpusharing.io --ignore-not-found -o name)
case $kinds in *gpusharingpolicies*)
	left=$("$KUBECTL" get gpusharingpolicies -o name)
	[ -z "$left" ] || { printf 'uninstall: policies are left; run make restore first:\n%s\n' "$left" >&2 && exit 1; }
	;;
esac
case $kinds in *gpunodes*)
	left=$("$KUBECTL" get gpunodes -o jsonpath='{range .items[?(@.spec.baseline)]}{.metadata.name}{"\n"}{end}')
	[ -z "$left" ] || { printf 'uninstall: these nodes are not restored; run make restore first, or give up the records with kubectl delete -k config/crd:\n%s\n' "$left" >&2 && exit 1; }
	;;
esac
"$KUBECTL" delete -k config/crd --ignore-not-found
