#!/usr/bin/env bash
# Gets Kubernetes' own programs into a cache outside git, once per version, and prints the folder they lie in. Tests find them
# there through KUBEBUILDER_ASSETS. Only the folder goes to stdout; progress goes to stderr.
#
#   hack/kube/build.sh [etcd] [kube-apiserver] [kubectl] [kube-controller-manager] [kube-scheduler] [kubelet]
#
# Without arguments: etcd, kube-apiserver and kubectl, which is what `make test` and `make demo` need. They are, in this order,
#
# 1. those in KUBEBUILDER_ASSETS, if it is set and has all that is asked for;
# 2. those that were downloaded or built before;
# 3. downloaded by setup-envtest, if no other program is asked for. ENVTEST_INDEX names another index than its own; none: do not
#    download. A machine that does not reach the index loses a few seconds;
# 4. built from their Go modules, which takes some minutes.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
index=${ENVTEST_INDEX:-https://raw.githubusercontent.com/kubernetes-sigs/controller-tools/HEAD/envtest-releases.yaml}
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
built=$cache/kubernetes-$version
prebuilt=(etcd kube-apiserver kubectl)
programs=("$@")
if [ ${#programs[@]} -eq 0 ]; then
	programs=("${prebuilt[@]}")
fi

# complete reports whether a folder has all programs that are asked for.
complete() {
	local program
	for program in "${programs[@]}"; do [ -x "$1/$program" ] || return 1; done
}

# downloadable reports whether setup-envtest has all programs that are asked for.
downloadable() {
	local program
	for program in "${programs[@]}"; do [[ " ${prebuilt[*]} " == *" $program "* ]] || return 1; done
}

# reachable reports within 3 seconds whether the host of the index takes connections, before setup-envtest is built for it. What a
# proxy reaches is not known.
reachable() {
	local scheme=${index%%://*} host=${index#*://}
	host=${host%%/*}
	[ -n "${https_proxy:-}${HTTPS_PROXY:-}${http_proxy:-}${HTTP_PROXY:-}" ] && return
	[[ $host == *:* ]] || host=$host:$([ "$scheme" = http ] && echo 80 || echo 443)
	timeout 3 bash -c ': <>"/dev/tcp/$0/$1"' "${host%:*}" "${host##*:}" 2>/dev/null
}

# envtest runs setup-envtest, which is built on its first use.
envtest() {
	local tool=$cache/envtest/setup-envtest
	if [ ! -x "$tool" ]; then
		local package=sigs.k8s.io/controller-runtime/tools/setup-envtest
		(cd prebuilt && timeout 15 go list -deps "$package" >/dev/null && go build -o "$tool.new" "$package") && mv "$tool.new" "$tool" || return
	fi
	timeout "$1" "$tool" --bin-dir "$cache/envtest" --index "$index" "${@:2}"
}

# download prints the folder of downloaded programs. The index comes first and for itself, because its silence is noticed sooner than
# that of an archive of some 50 MB.
download() {
	local minor folder log=$cache/envtest/log
	minor=$(cut -d. -f1-2 <<<"${version#v}")
	if [ -x "$cache/envtest/setup-envtest" ] && folder=$(envtest 5 use --installed-only --print path "$minor.x" 2>/dev/null) && complete "$folder"; then
		echo "$folder"
		return
	fi
	[ "$index" != none ] && reachable || return
	mkdir -p "$cache/envtest"
	[ -n "$(envtest 5 list --print overview "$minor.x" 2>"$log")" ] || return
	echo ">> downloading etcd, kube-apiserver and kubectl $minor" >&2
	folder=$(envtest 300 use --print path "$minor.x" 2>>"$log") && complete "$folder" || return
	echo "   downloaded in ${SECONDS}s" >&2
	echo "$folder"
}

# build builds those of the programs from their Go modules that are not there yet.
build() {
	local program packages=() missing=() started=$SECONDS job
	for program in "${programs[@]}"; do
		[ -x "$built/$program" ] && continue
		missing+=("$program")
		case $program in
		etcd) packages+=(go.etcd.io/etcd/server/v3) ;; # go build names it server
		*) packages+=("k8s.io/kubernetes/cmd/$program") ;;
		esac
	done
	echo ">> building ${missing[*]} $version from Go modules (once; some minutes on two cores)" >&2
	# kubectl refuses to talk about its own version unless it was set at link time.
	local ldflags="-s -w -X k8s.io/component-base/version.gitVersion=$version
		-X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=$(cut -d. -f2 <<<"$version")"
	# Built beside and renamed, so that an interrupted build leaves nothing that looks finished.
	rm -rf "$built/.new" && mkdir -p "$built/.new"
	CGO_ENABLED=0 go build -trimpath -ldflags "$ldflags" -o "$built/.new/" "${packages[@]}" &
	job=$!
	# In the background of a script it does not hear Ctrl-C by itself.
	trap 'kill "$job" 2>/dev/null; exit 130' INT TERM
	while kill -0 "$job" 2>/dev/null; do
		for _ in $(seq 30); do kill -0 "$job" 2>/dev/null && sleep 1; done
		kill -0 "$job" 2>/dev/null && echo "   still building ${missing[*]}, $((SECONDS - started))s" >&2
	done
	wait "$job"
	[ ! -e "$built/.new/server" ] || mv "$built/.new/server" "$built/.new/etcd"
	for program in "${missing[@]}"; do mv "$built/.new/$program" "$built/$program"; done
	rm -r "$built/.new"
	echo "   built in $((SECONDS - started))s" >&2
}

if [ -n "${KUBEBUILDER_ASSETS:-}" ] && complete "$KUBEBUILDER_ASSETS"; then
	echo "$KUBEBUILDER_ASSETS"
	exit
fi

# What is there needs no lock, which a build of other programs may hold for minutes.
if complete "$built"; then
	echo "$built"
	exit
fi

# Two runs in one checkout may stand side by side (tests and the demo): the second waits for the first.
mkdir -p "$built"
exec 9>"$built/.lock"
flock 9

if ! complete "$built"; then
	if downloadable && folder=$(download); then
		echo "$folder"
		exit
	fi
	build
fi
echo "$built"
