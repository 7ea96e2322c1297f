#!/usr/bin/env bash
# Builds Helm from its Go module into a cache outside git, once per version, and prints the path of the program.
# Only the path goes to stdout; progress goes to stderr.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

version=$(go list -m -f '{{.Version}}' helm.sh/helm/v4)
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
out=$cache/helm-$version
mkdir -p "$out"

# Two builds of one checkout may run side by side: the second waits for the first.
exec 9>"$out/.lock"
flock 9

if [ ! -x "$out/helm" ]; then
	echo ">> building helm $version from its Go module (once; a few minutes on two cores)" >&2
	# Built beside and renamed, so that an interrupted build leaves nothing that looks finished.
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X helm.sh/helm/v4/internal/version.version=$version" \
		-o "$out/.helm.new" helm.sh/helm/v4/cmd/helm
	mv "$out/.helm.new" "$out/helm"
fi
echo "$out/helm"
