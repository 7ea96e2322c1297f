#!/usr/bin/env bash
# Builds a program from Prometheus' Go module, once, and prints its path. Of service discovery it has only that of Kubernetes.
#
#	hack/prometheus/build.sh prometheus|promtool
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
export GOFLAGS=-tags=remove_all_sd,enable_kubernetes_sd
exec ../program.sh "$1" github.com/prometheus/prometheus "github.com/prometheus/prometheus/cmd/$1" "a few minutes"
