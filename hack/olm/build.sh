#!/usr/bin/env bash
# Builds every program that make olm-test runs, and those of others for make e2e, and lays them side by side in bin/olm of this checkout: both
# Operator Lifecycle Managers from their Go modules, once per version, in the cache of hack/kube/build.sh; ours from this checkout. Only the
# folder goes to stdout; progress goes to stderr.
#
#   hack/olm/build.sh [others]     others: those of others alone, without this checkout's
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bin=$top/bin/olm
mkdir -p "$bin/crds"

# build_all FOLDER-OF-GO.MOD HOW-LONG MODULE PACKAGE… builds what is not there yet, and links it.
build_all() {
	local folder=$1 long=$2 module=$3 package program
	shift 3
	for package in "$@"; do
		program=${package##*/}
		ln -sfn "$(cd "$top/hack/olm/$folder" && ../../program.sh "$program" "$module" "$package" "$long")" "$bin/$program"
	done
}

# source_of FOLDER-OF-GO.MOD MODULE prints the folder with the source of a module.
source_of() { (cd "$top/hack/olm/$1" && go mod download "$2" && go list -m -f '{{.Dir}}' "$2"); }

framework=github.com/operator-framework
# Without it the library that pulls images needs a C library.
GOFLAGS="${GOFLAGS:-} -tags=containers_image_openpgp" build_all v1 "three minutes" $framework/operator-controller \
	$framework/operator-controller/cmd/catalogd $framework/operator-controller/cmd/operator-controller
GOFLAGS="${GOFLAGS:-} -tags=containers_image_openpgp" build_all v0 "four minutes" $framework/operator-registry $framework/operator-registry/cmd/opm
build_all v0 "four minutes" $framework/operator-lifecycle-manager \
	$framework/operator-lifecycle-manager/cmd/catalog $framework/operator-lifecycle-manager/cmd/olm \
	$framework/operator-lifecycle-manager/cmd/copy-content $framework/operator-lifecycle-manager/util/cpb
v1=$(source_of v1 $framework/operator-controller)
ln -sfn "$v1/config/base/operator-controller/crd/bases" "$bin/crds/extensions"
ln -sfn "$v1/config/base/catalogd/crd/bases" "$bin/crds/catalogs"
ln -sfn "$(source_of v0 $framework/operator-lifecycle-manager)/deploy/chart/crds" "$bin/crds/v0"

if [ "${1:-}" != others ]; then
	ln -sfn "$("$top/hack/helm/build.sh")" "$bin/helm"
	ln -sfn "$("$top/hack/previous/build.sh")" "$bin/previous"
	cd "$top"
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/controller" ./cmd/controller
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/kubectl-gpusharing" ./cmd/kubectl-gpusharing
	(cd hack/release && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/release" . && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/registry" ./registry)
	(cd hack/bundle && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/bundle" .)
fi
echo "$bin"
