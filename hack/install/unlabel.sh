#!/usr/bin/env bash
# Removes the label nvidia.com/gpu.deploy.client from the nodes where the operator set it so that its agents run. To be called
# once the controller is gone, which would set it again. Values of other authors stay.
set -euo pipefail

KUBECTL=${KUBECTL:-kubectl}

"$KUBECTL" get nodes -o go-template='{{range .items}}{{$n := .metadata.name}}{{$label := index .metadata.labels "nvidia.com/gpu.deploy.client"}}{{range $key, $value := .metadata.annotations}}{{if eq $key "gpusharing.io/client"}}{{$n}} {{$label}}
{{end}}{{end}}{{end}}' | while read -r node value; do
	if [ "$value" = true ]; then
		"$KUBECTL" label node "$node" nvidia.com/gpu.deploy.client-
	fi
	"$KUBECTL" annotate node "$node" gpusharing.io/client-
done
