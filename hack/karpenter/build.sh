#!/usr/bin/env bash
# Builds Karpenter with its kwok provider from its Go module, once, and prints the path of the program.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
exec ../program.sh karpenter sigs.k8s.io/karpenter sigs.k8s.io/karpenter/kwok "four minutes"
