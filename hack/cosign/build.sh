#!/usr/bin/env bash
# Builds cosign from its Go module, once, and prints the path of the program.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
exec ../program.sh cosign github.com/sigstore/cosign/v3 github.com/sigstore/cosign/v3/cmd/cosign "ten minutes" sigs.k8s.io/release-utils/version.gitVersion
