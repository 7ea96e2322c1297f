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
# As the chart does: the schema has changed without conversion, and the former one did not require nodeSelector.
crd=gpusharingpolicies.gpusharing.io
required=$("$KUBECTL" get crd "$crd" --ignore-not-found -o jsonpath='{.spec.versions[0].name}:{.spec.versions[0].schema.openAPIV3Schema.properties.spec.required}')
if [ -n "$required" ] && [[ $required != *nodeSelector* ]] && [ -n "$("$KUBECTL" get "$crd" -o name)" ]; then
	echo "deploy: the cluster has GPUSharingPolicies of an earlier schema, and this version renames fields of them. Save them, run kubectl gpusharing restore" \
		"with the plugin of the installed version, deploy, and apply them with the new names (CHANGELOG.md)" >&2
	exit 1
fi
"$KUBECTL" apply --server-side -k "$folder"
