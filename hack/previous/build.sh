#!/usr/bin/env bash
# Builds controller and agent of the previous version from its commit, once, into a cache outside git, and lays its chart beside them.
# Only the folder goes to stdout; progress goes to stderr. test/previous says which commit that is, and why.
#
#   hack/previous/build.sh
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
commit=$(sed -n 's/^const Commit = "\([0-9a-f]\{40\}\)"$/\1/p' "$top/test/previous/previous.go")
: "${commit:?test/previous/previous.go has no constant Commit with 40 digits}"
version=$(sed -n 's/^const Version = "\(.*\)"$/\1/p' "$top/test/previous/previous.go")
: "${version:?test/previous/previous.go has no constant Version}"
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
folder=$cache/previous-$commit
release=$folder/v$version
# Go sees no commit in a worktree. The package lies where that commit has it.
symbols=github.com/gpusharing/gpu-sharing-operator/internal
ldflags="-s -w"
for package in version kube/version; do
	ldflags+=" -X $symbols/$package.version=v$version -X $symbols/$package.commit=$commit"
done
mkdir -p "$folder"

# Two builds may run side by side: the second waits for the first.
exec 9>"$folder/.lock"
flock 9

if [ ! -d "$release" ]; then
	if ! git -C "$top" cat-file -e "$commit^{commit}" 2>/dev/null; then
		echo "previous version: the history of $top lacks commit $commit. If the clone is shallow, run: git fetch --unshallow" >&2
		exit 1
	fi
	echo ">> building the previous version from commit ${commit:0:12} (once; some minutes on two cores)" >&2
	# What a build that was killed left.
	rm -rf "$folder/source" "$folder/new"
	git -C "$top" worktree prune
	git -C "$top" worktree add --quiet --detach "$folder/source" "$commit" >&2
	trap 'git -C "$top" worktree remove --force "$folder/source"' EXIT
	mkdir "$folder/new"
	(
		cd "$folder/source"
		CGO_ENABLED=0 go build -trimpath -ldflags "$ldflags" -o "$folder/new/controller" ./cmd/controller
		CGO_ENABLED=1 CGO_CFLAGS="-g -O2 -Wno-deprecated-declarations" go build -trimpath -ldflags "$ldflags" -o "$folder/new/agent" ./cmd/agent
	)
	mkdir "$folder/new/config"
	cp -R "$folder/source/config/helm" "$folder/new/config/helm"
	# Renamed once it is complete, so that an interrupted build leaves nothing that looks finished.
	mv "$folder/new" "$release"
fi
echo "$release"
