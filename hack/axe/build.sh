#!/usr/bin/env bash
# Prints the path of axe-core, which looks whether people can use a page who do not see it well or use no mouse: a script that the test of
# the page runs in the browser. npm brings it into the cache of hack/kube/build.sh, once. Only the path goes to stdout.
#
#	hack/axe/build.sh
set -euo pipefail

version=4.10.3
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
out=$cache/axe-core-$version
if [ ! -f "$out/axe.min.js" ]; then
	if ! command -v npm >/dev/null; then
		echo "axe: npm is missing; install it, or name axe.min.js of axe-core by AXE=/path" >&2
		exit 1
	fi
	echo ">> downloading axe-core $version with npm (once; 600 kB)" >&2
	mkdir -p "$cache"
	new=$(mktemp -d "$cache/.axe.XXXXXX")
	trap 'rm -rf "$new"' EXIT
	(cd "$new" && npm pack --silent "axe-core@$version" >&2 && tar -xzf axe-core-*.tgz)
	mkdir -p "$out"
	mv "$new/package/LICENSE" "$out/"
	mv "$new/package/axe.min.js" "$out/" # last: it says that all is there
fi
echo "$out/axe.min.js"
