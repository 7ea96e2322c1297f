#!/usr/bin/env bash
# Builds what the demo needs, reporting what takes how long, and runs the demo. KEEP=1 leaves it running until Ctrl-C.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What runs in the background does not hear Ctrl-C by itself.
jobs=()
trap 'for job in "${jobs[@]}"; do kill "$job" 2>/dev/null || true; done' EXIT
trap 'exit 130' INT TERM

# step runs a command and reports what it builds and for how long, also while it takes long.
step() {
	local started=$SECONDS what=$1 build
	shift
	echo ">> building $what" >&2
	"$@" &
	build=$!
	jobs+=("$build")
	while kill -0 "$build" 2>/dev/null; do
		for _ in $(seq 300); do kill -0 "$build" 2>/dev/null && sleep 0.1; done
		kill -0 "$build" 2>/dev/null && echo "   still building $what, $((SECONDS - started))s" >&2
	done
	wait "$build"
	echo "   $what: $((SECONDS - started))s" >&2
}

# NVIDIA's Go bindings bind deprecated functions too; what the C compiler says of them is not for our users.
export CGO_CFLAGS="${CGO_CFLAGS:--g -O2 -Wno-deprecated-declarations}"
mkdir -p bin

# Kubernetes' programs need nothing of ours, so they come meanwhile. build.sh reports by itself what takes long there.
hack/kube/build.sh >bin/.kube &
kube=$!
jobs+=("$kube")

# With the same settings as `go test`, so that the two share what they build.
step "controller, agent, kubectl plugin and demo (the first time some minutes)" go build -o bin/ ./cmd/... ./test/demo
step "the simulated driver" bin/demo build-driver
wait "$kube"
KUBEBUILDER_ASSETS=$(cat bin/.kube)
export KUBEBUILDER_ASSETS
echo ">> all is built after ${SECONDS}s; the demo starts" >&2

exec bin/demo
