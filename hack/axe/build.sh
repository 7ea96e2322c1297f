#!/usr/bin/env bash
# Prints the path of axe-core's axe.min.js, which looks for what keeps people from using the page (make browser-test): the one that AXE
# names, else that of npm's package, which comes into the cache once. Only the path goes to stdout.
#
#	hack/axe/build.sh
set -euo pipefail

readonly version=4.14.1 sum=29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c
if [ -n "${AXE:-}" ]; then
	realpath -e "$AXE"
	exit
fi
out=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}/axe-core-$version.js
if ! sha256sum --quiet --check - <<<"$sum  $out" >/dev/null 2>&1; then
	command -v npm >/dev/null || {
		echo "axe: npm is missing; install it, or name an axe.min.js of axe-core $version by AXE=/path" >&2
		exit 1
	}
	new=$(mktemp -d)
	trap 'rm -rf "$new"' EXIT
	(cd "$new" && npm pack --silent "axe-core@$version" >/dev/null && tar -xzf "axe-core-$version.tgz" package/axe.min.js)
	sha256sum --quiet --check - >&2 <<<"$sum  $new/package/axe.min.js"
	mkdir -p "${out%/*}"
	mv "$new/package/axe.min.js" "$out"
fi
echo "$out"
