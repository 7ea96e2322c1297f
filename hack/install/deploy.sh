#!/usr/bin/env bash
# Installs the operator by kustomize: config/default as it is or, if REGISTRY is set, with the images CONTROLLER_IMG and AGENT_IMG.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

KUBECTL=${KUBECTL:-kubectl}
folder=config/default
if [ -n "${REGISTRY:-}" ]; then
	folder=bin/deploy
	mkdir -p "$folder"
	cat >"$folder/kustomization.yaml" <<YAML
resources:
- ../../config/default
images:
- {name: gpu-sharing-controller, newName: ${CONTROLLER_IMG%:*}, newTag: "${CONTROLLER_IMG##*:}"}
- {name: gpu-sharing-agent, newName: ${AGENT_IMG%:*}, newTag: "${AGENT_IMG##*:}"}
YAML
fi
"$KUBECTL" apply --server-side -k "$folder"
