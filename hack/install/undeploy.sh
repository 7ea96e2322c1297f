#!/usr/bin/env bash
# Restores all nodes (kubectl gpusharing restore) and then removes the operator that `make deploy` installed, its kinds and its
# namespace. Ends with the names of what is left if that takes longer than UNDEPLOY_TIMEOUT seconds (default 300).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

KUBECTL=${KUBECTL:-kubectl}
timeout=${UNDEPLOY_TIMEOUT:-300}

go run ./cmd/kubectl-gpusharing restore --yes --timeout="${RESTORE_TIMEOUT:-1800}s"

SECONDS=0
"$KUBECTL" delete -k config/default --ignore-not-found --wait=false
# A call that fails tells nothing: only an answer without names ends this.
until rest=$("$KUBECTL" get -k config/default --ignore-not-found -o name) && [ -z "$rest" ]; do
	if [ "$SECONDS" -ge "$timeout" ]; then
		printf 'undeploy: not gone after %ss, look at their finalizers:\n%s\n' "$timeout" "${rest:-not known: the API server does not answer}" >&2
		exit 1
	fi
	sleep 1
done
hack/install/unlabel.sh
echo "undeploy: nothing of the operator is left"
