#!/usr/bin/env bash
# Builds what the demo needs, telling what it does, and runs the demo. KEEP=1 leaves it running until Ctrl-C.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

export KUBEBUILDER_ASSETS
KUBEBUILDER_ASSETS=${KUBEBUILDER_ASSETS:-$(hack/kube/build.sh)}

# What runs in the background does not hear Ctrl-C by itself.
build=
trap '[ -z "$build" ] || kill "$build" 2>/dev/null; exit 130' INT TERM

# Tells what is built and for how long, also while it takes long.
step() {
	local started=$SECONDS what=$1
	shift
	echo ">> building $what" >&2
	"$@" &
	build=$!
	while kill -0 "$build" 2>/dev/null; do
		for _ in $(seq 300); do kill -0 "$build" 2>/dev/null && sleep 0.1; done
		kill -0 "$build" 2>/dev/null && echo "   still building $what, $((SECONDS - started))s" >&2
	done
	wait "$build"
	build=
}

# NVIDIA's Go bindings bind deprecated functions too; what the C compiler says of them is not for our users.
export CGO_CFLAGS="${CGO_CFLAGS:--g -O2 -Wno-deprecated-declarations}"
# With the same settings as `go test`, so that the two share what they build.
mkdir -p bin
step "controller, agent, kubectl plugin and demo (the first time some minutes)" go build -o bin/ ./cmd/... ./test/demo
step "the simulated driver" bin/demo build-driver

exec bin/demo
