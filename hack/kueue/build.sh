#!/usr/bin/env bash
# Builds Kueue from its Go module, once, and prints the path of the program.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
exec ../program.sh kueue sigs.k8s.io/kueue sigs.k8s.io/kueue/cmd/kueue "four minutes"
