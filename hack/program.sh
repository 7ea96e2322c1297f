#!/usr/bin/env bash
# Builds a program from its Go module into a cache outside git, once per version, and prints the path of the program. Only the path goes
# to stdout; progress goes to stderr. It runs in the folder of the go.mod that pins the version.
#
#	program.sh NAME MODULE PACKAGE HOW-LONG [VARIABLE]     VARIABLE: the string of the program that says its version
set -euo pipefail

name=$1 module=$2 package=$3 long=$4 variable=${5:-}
version=$(go list -m -f '{{.Version}}' "$module")
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
out=$cache/$name-$version
mkdir -p "$out"

# Two builds of one checkout may run side by side: the second waits for the first.
exec 9>"$out/.lock"
flock 9

if [ ! -x "$out/$name" ]; then
	echo ">> building $name $version from its Go module (once; $long on two cores)" >&2
	# Built beside and renamed, so that an interrupted build leaves nothing that looks finished.
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w${variable:+ -X $variable=$version}" -o "$out/.$name.new" "$package"
	mv "$out/.$name.new" "$out/$name"
fi
echo "$out/$name"
