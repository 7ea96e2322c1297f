#!/usr/bin/env bash
# Builds Helm from its Go module, once, and prints the path of the program.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
exec ../program.sh helm helm.sh/helm/v4 helm.sh/helm/v4/cmd/helm "a few minutes" helm.sh/helm/v4/internal/version.version
