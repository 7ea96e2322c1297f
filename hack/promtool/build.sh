#!/usr/bin/env bash
# Builds promtool from Prometheus' Go module, once, and prints the path of the program. Service discovery is left out: tests of rules find
# nothing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
export GOFLAGS=-tags=remove_all_sd
exec ../program.sh promtool github.com/prometheus/prometheus github.com/prometheus/prometheus/cmd/promtool "a few minutes"
