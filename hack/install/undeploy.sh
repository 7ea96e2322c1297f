#!/usr/bin/env bash
# Puts everything back (restore.sh) and then removes the operator that `make deploy` installed, its kinds and its namespace.
# Ends with what is left, by name, if that takes longer than UNDEPLOY_TIMEOUT seconds (default 300).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

KUBECTL=${KUBECTL:-kubectl}
timeout=${UNDEPLOY_TIMEOUT:-300}

hack/install/restore.sh

SECONDS=0
"$KUBECTL" delete -k config/default --ignore-not-found --wait=false
while rest=$("$KUBECTL" get -k config/default --ignore-not-found -o name 2>/dev/null || true) && [ -n "$rest" ]; do
	if [ "$SECONDS" -ge "$timeout" ]; then
		printf 'undeploy: these are still there after %ss, look at their finalizers:\n%s\n' "$timeout" "$rest" >&2
		exit 1
	fi
	sleep 1
done
hack/install/unlabel.sh
echo "undeploy: nothing of the operator is left"
