#!/usr/bin/env bash
# Unpacks Debian's packages of hack/release/debian.txt for an architecture into a folder, which becomes the root of the agent's
# image. Each is downloaded once, into the cache of hack/kube/build.sh, and checked against its SHA-256.
#
#	hack/release/debian.sh amd64|arm64 FOLDER
#
# DEBIAN_MIRRORS are asked in their order; by default those that apt asks here. A mirror drops a package once Debian replaces it; Debian's
# archive of snapshots does not.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
architecture=$1 folder=$2
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}/debian
mirrors=${DEBIAN_MIRRORS:-$(sed -nE 's/^URIs: *//p; s/^deb +(\[[^]]*\] +)?([^ ]+) .*/\2/p' /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null || true)}
mkdir -p "$cache" "$folder/var/lib/dpkg/status.d"

# fetch SHA256 PATH downloads a package into the cache, unless it is there.
fetch() {
	local package=$cache/$1.deb mirror
	[ -e "$package" ] && return
	for mirror in $mirrors; do
		curl --fail --silent --show-error --location --max-time 120 --output "$package.$$" "$mirror/$2" || continue
		if sha256sum --check --status <<<"$1  $package.$$"; then
			mv "$package.$$" "$package"
			return
		fi
		echo "debian.sh: $mirror/$2 does not have the SHA-256 $1 of $here/debian.txt" >&2
	done
	rm -f "$package.$$"
	echo "debian.sh: no mirror has $2; set DEBIAN_MIRRORS, or update debian.txt to what Debian has now" >&2
	return 1
}

found=
while read -r of name _ sha256 path; do
	[ "$of" = "$architecture" ] || continue
	fetch "$sha256" "$path"
	dpkg-deb --extract "$cache/$sha256.deb" "$folder"
	dpkg-deb --field "$cache/$sha256.deb" >"$folder/var/lib/dpkg/status.d/$name" # scanners find here what is installed
	found=yes
done <"$here/debian.txt"
[ -n "$found" ] || { echo "debian.sh: debian.txt has no package for $architecture" >&2; exit 1; }
rm -rf "$folder/usr/share/lintian" "$folder"/usr/share/doc/*/{changelog*,NEWS*,README*,TODO*}
install -d -m 1777 "$folder/tmp"
