#!/usr/bin/env bash
# Prints the path of a Chromium or Chrome: the one that CHROMIUM names, else one that is installed, else Debian's. That is brought into the
# cache of hack/kube/build.sh, once for each version that apt knows. Nothing is installed, and no right of root is needed. Only the path
# goes to stdout; progress goes to stderr.
#
#	hack/chromium/build.sh
set -euo pipefail

if [ -n "${CHROMIUM:-}" ]; then
	command -v "$CHROMIUM"
	exit
fi
for installed in chromium google-chrome; do
	if command -v "$installed"; then exit; fi
done
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
mkdir -p "$cache"
exec 9>"$cache/.chromium.lock"
flock 9

candidate() { apt-cache policy chromium 2>/dev/null | awk '/Candidate:/ {print $2}'; }
version=$(candidate)
if [ -z "$version" ] && [ "$(id -u)" = 0 ]; then
	apt-get update -qq >&2 || true
	version=$(candidate)
fi
if [ -z "$version" ] || [ "$version" = "(none)" ] || [[ $version == *snap* ]]; then
	had=$(find "$cache" -maxdepth 2 -path '*/chromium-*/chromium' -print -quit) # apt's lists may have been removed since
	if [ -n "$had" ]; then
		echo "$had"
		exit
	fi
	echo "chromium: apt knows no package chromium; run apt-get update, or name a Chromium or Chrome by CHROMIUM=/path" >&2
	exit 1
fi
out=$cache/chromium-${version//[^A-Za-z0-9.~-]/_}
if [ ! -x "$out/chromium" ]; then
	echo ">> downloading Debian's chromium $version with apt-get (once; about 125 MB)" >&2
	rm -rf "$out" "$out.new"
	mkdir -p "$out.new/packages" "$out.new/root"
	# Those of its dependencies that this machine lacks, too.
	(
		cd "$out.new/packages"
		mapfile -t packages < <(apt-get install --simulate --no-install-recommends chromium fonts-dejavu-core 2>/dev/null | awk '/^Inst/ {print $2}')
		apt-get download -qq "${packages[@]:-chromium}" >&2
	)
	for package in "$out.new"/packages/*.deb; do dpkg-deb --extract "$package" "$out.new/root"; done
	rm -r "$out.new/packages"
	cat >"$out.new/chromium" <<'START'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/root
LD_LIBRARY_PATH=$(printf '%s:' "$here"/usr/lib/*-linux-gnu "$here"/usr/lib/*-linux-gnu/* "$here"/lib/*-linux-gnu)
export LD_LIBRARY_PATH
exec "$here/usr/lib/chromium/chromium" "$@"
START
	chmod +x "$out.new/chromium"
	if ! "$out.new/chromium" --version >&2; then
		rm -rf "$out.new"
		echo "chromium: what was downloaded does not start; install chromium, and name it by CHROMIUM=chromium" >&2
		exit 1
	fi
	mv "$out.new" "$out"
fi
echo "$out/chromium"
