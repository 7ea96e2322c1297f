#!/usr/bin/env bash
# Builds Helm 3 from its Go module, once, and prints the path of the program.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
exec ../program.sh helm helm.sh/helm/v3 helm.sh/helm/v3/cmd/helm "a few minutes" helm.sh/helm/v3/internal/version.version
