#!/usr/bin/env bash
# Builds the programs that ship, for the tests that run them, and prints their folder. They are built in the settings of the tests, from
# which go build has nearly all of it, with the version of the chart and commit abcdef, so that no commit changes them. One that is as it
# was keeps its time, by which go test knows that a result still holds; go build would set it anew.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$PWD/bin/test
version=v$(awk '/^appVersion:/ {print $2}' config/helm/Chart.yaml)
symbols=github.com/gpusharing/gpu-sharing-operator/internal/kube/version
mkdir -p "$folder/new"
exec 9>"$folder/.lock"
flock 9

go build -buildvcs=false -ldflags "-s -w -X $symbols.version=$version -X $symbols.commit=abcdef" -o "$folder/new/" ./cmd/...
for program in "$folder"/new/*; do
	name=${program##*/}
	cmp --silent "$program" "$folder/$name" && continue
	cp "$program" "$folder/.$name" && mv "$folder/.$name" "$folder/$name"
done
echo "$folder"
