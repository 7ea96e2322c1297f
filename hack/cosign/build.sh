#!/usr/bin/env bash
# Builds cosign from its Go module into a cache outside git, once per version, and prints the path of the program.
# Only the path goes to stdout; progress goes to stderr.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

version=$(go list -m -f '{{.Version}}' github.com/sigstore/cosign/v3)
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
out=$cache/cosign-$version
mkdir -p "$out"

# Two builds of one checkout may run side by side: the second waits for the first.
exec 9>"$out/.lock"
flock 9

if [ ! -x "$out/cosign" ]; then
	echo ">> building cosign $version from its Go module (once; ten minutes on two cores)" >&2
	# Built beside and renamed, so that an interrupted build leaves nothing that looks finished.
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X sigs.k8s.io/release-utils/version.gitVersion=$version" \
		-o "$out/.cosign.new" github.com/sigstore/cosign/v3/cmd/cosign
	mv "$out/.cosign.new" "$out/cosign"
fi
echo "$out/cosign"
