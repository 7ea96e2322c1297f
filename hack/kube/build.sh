#!/usr/bin/env bash
# Builds Kubernetes' own programs from their Go modules into a cache outside git, once per version, and prints the
# folder they lie in. Tests find them there through KUBEBUILDER_ASSETS.
#
#   hack/kube/build.sh [etcd] [kube-apiserver] [kubectl] [kube-controller-manager] [kube-scheduler] [kubelet]
#
# Without arguments: what `make test` and `make demo` need. Only the folder goes to stdout; progress goes to stderr.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
out=$cache/kubernetes-$version
mkdir -p "$out"

programs=("$@")
if [ ${#programs[@]} -eq 0 ]; then
	programs=(etcd kube-apiserver kubectl)
fi

# kubectl refuses to talk about its own version unless it was set at link time.
ldflags="-s -w -X k8s.io/component-base/version.gitVersion=$version
	-X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=$(cut -d. -f2 <<<"$version")"

# Two builds of one checkout may run side by side (tests and the demo): the second waits for the first.
exec 9>"$out/.lock"
flock 9

for program in "${programs[@]}"; do
	[ -x "$out/$program" ] && continue
	case $program in
	etcd) package=go.etcd.io/etcd/server/v3 ;;
	*) package=k8s.io/kubernetes/cmd/$program ;;
	esac
	echo ">> building $program $version from its Go module (once; a few minutes on two cores)" >&2
	started=$SECONDS
	# Built beside and renamed, so that an interrupted build leaves nothing that looks finished.
	CGO_ENABLED=0 go build -trimpath -ldflags "$ldflags" -o "$out/.$program.new" "$package" &
	build=$!
	while kill -0 "$build" 2>/dev/null; do
		for _ in $(seq 30); do kill -0 "$build" 2>/dev/null && sleep 1; done
		kill -0 "$build" 2>/dev/null && echo "   still building $program, $((SECONDS - started))s" >&2
	done
	wait "$build"
	mv "$out/.$program.new" "$out/$program"
	echo "   $program built in $((SECONDS - started))s" >&2
done
echo "$out"
