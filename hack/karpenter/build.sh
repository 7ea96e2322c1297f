#!/usr/bin/env bash
# Builds Karpenter with its kwok provider from its Go module into a cache outside git, once per version, and prints the path of the
# program. Only the path goes to stdout; progress goes to stderr.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

version=$(go list -m -f '{{.Version}}' sigs.k8s.io/karpenter)
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
out=$cache/karpenter-$version
mkdir -p "$out"

# Two builds of one checkout may run side by side: the second waits for the first.
exec 9>"$out/.lock"
flock 9

if [ ! -x "$out/karpenter" ]; then
	echo ">> building Karpenter $version from its Go module (once; four minutes on two cores)" >&2
	# Built beside and renamed, so that an interrupted build leaves nothing that looks finished.
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$out/.karpenter.new" sigs.k8s.io/karpenter/kwok
	mv "$out/.karpenter.new" "$out/karpenter"
fi
echo "$out/karpenter"
