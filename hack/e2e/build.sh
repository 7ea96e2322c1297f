#!/usr/bin/env bash
# Builds every program that a real node runs, and lays them side by side in bin/e2e of this checkout: Kubernetes' and
# containerd's and NVIDIA's from their Go modules, once per version, in the cache of hack/kube/build.sh; ours from this
# checkout; and if asked those of the previous version, and the Operator Lifecycle Managers. Only the folder goes to stdout; progress goes
# to stderr.
#
#   hack/e2e/build.sh [previous] [olm]
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
bin=$top/bin/e2e
mkdir -p "$bin"
# What compilers put aside lies in this checkout, so that nothing of a build that is killed lies anywhere else, and in a folder in which
# no ./... looks for packages.
find "$bin" -maxdepth 1 -name '.tmp.*' -mmin +60 -exec rm -rf {} +
TMPDIR=$(mktemp -d "$bin/.tmp.XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

# What the machine must have and Go cannot build: runc, the CNI plugins, and the C compiler's libc for NVIDIA's programs.
packages=()
[ -x /usr/sbin/runc ] || command -v runc >/dev/null || packages+=(runc)
[ -x /usr/lib/cni/bridge ] || packages+=(containernetworking-plugins)
command -v cc >/dev/null || packages+=(gcc libc6-dev)
[ ${#packages[@]} -eq 0 ] || "$top/hack/apt.sh" "${packages[@]}"

# build_all FOLDER-OF-GO.MOD NAME MODULE LDFLAGS PACKAGE… builds into $cache/NAME-<version of MODULE>, what is not there yet.
build_all() {
	local from=$top/hack/$1 name=$2 module=$3 ldflags=$4
	shift 4
	local version out package program
	version=$(cd "$from" && go list -m -f '{{.Version}}' "$module")
	out=$cache/$name-$version
	mkdir -p "$out"
	exec 9>"$out/.lock"
	flock 9
	for package in "$@"; do
		program=${package##*/}
		if [ ! -x "$out/$program" ]; then
			echo ">> building $program $version from its Go module (once)" >&2
			# Built beside and renamed, so that an interrupted build leaves nothing that looks finished.
			(cd "$from" && go build -trimpath -ldflags "-s -w ${ldflags//VERSION/$version}" -o "$out/.$program.new" "$package")
			mv "$out/.$program.new" "$out/$program"
		fi
		ln -sfn "$out/$program" "$bin/$program"
	done
	flock -u 9
}

kube=$("$top/hack/kube/build.sh" etcd kube-apiserver kubectl kube-controller-manager kube-scheduler kubelet)
for program in etcd kube-apiserver kubectl kube-controller-manager kube-scheduler kubelet; do
	ln -sfn "$kube/$program" "$bin/$program"
done

ln -sfn "$("$top/hack/helm/build.sh")" "$bin/helm"
ln -sfn "$("$top/hack/prometheus/build.sh" prometheus)" "$bin/prometheus"

containerd=github.com/containerd/containerd/v2
CGO_ENABLED=0 build_all containerd containerd $containerd "-X $containerd/version.Version=VERSION" \
	$containerd/cmd/containerd $containerd/cmd/containerd-shim-runc-v2 $containerd/cmd/ctr

# NVIDIA's programs load NVML at run time: its symbols stay unresolved when linking and are bound lazily.
plugin=github.com/NVIDIA/k8s-device-plugin
CGO_ENABLED=1 CGO_CFLAGS="-g -O2 -Wno-deprecated-declarations" CGO_LDFLAGS_ALLOW='-Wl,--unresolved-symbols=ignore-in-object-files' \
	build_all nvidia nvidia $plugin "-extldflags=-Wl,-z,lazy -X $plugin/internal/info.version=VERSION" \
	$plugin/cmd/nvidia-device-plugin $plugin/cmd/config-manager $plugin/cmd/gpu-feature-discovery $plugin/cmd/mps-control-daemon

parted=github.com/NVIDIA/mig-parted
CGO_ENABLED=1 CGO_CFLAGS="-g -O2 -Wno-deprecated-declarations" CGO_LDFLAGS_ALLOW='-Wl,--unresolved-symbols=ignore-in-object-files' \
	build_all nvidia nvidia-mig $parted "-extldflags=-Wl,-z,lazy" $parted/cmd/nvidia-mig-parted $parted/cmd/nvidia-mig-manager

# As its own image has it, which looks at the node below /host-…; its chart is the one that the GPU Operator's chart has in it.
nfd=sigs.k8s.io/node-feature-discovery
CGO_ENABLED=0 build_all nfd nfd $nfd "-X $nfd/pkg/version.version=VERSION -X $nfd/pkg/utils/hostpath.pathPrefix=/host-" \
	$nfd/cmd/nfd-master $nfd/cmd/nfd-worker $nfd/cmd/nfd-gc
ln -sfn "$(cd "$top/hack/nfd" && go mod download $nfd && go list -m -f '{{.Dir}}' $nfd)/deployment/helm/node-feature-discovery" "$bin/nfd-chart"

toolkit=github.com/NVIDIA/nvidia-container-toolkit
CGO_ENABLED=1 CGO_CFLAGS="-g -O2 -Wno-deprecated-declarations" CGO_LDFLAGS_ALLOW='-Wl,--unresolved-symbols=ignore-in-object-files' \
	build_all nvidia nvidia-toolkit $toolkit "-extldflags=-Wl,-z,lazy" \
	$toolkit/cmd/nvidia-ctk $toolkit/cmd/nvidia-cdi-hook $toolkit/cmd/nvidia-container-runtime
CGO_ENABLED=0 build_all nvidia nvidia-toolkit $toolkit "" ./nri

# NVIDIA's DRA driver, in a folder of its own: the hook in its CDI specifications is that of another container toolkit. Its chart, and
# what else its image holds, lies in the folder of its module.
dra=sigs.k8s.io/dra-driver-nvidia-gpu
mkdir -p "$bin/dra"
CGO_ENABLED=1 CGO_CFLAGS="-g -O2 -Wno-deprecated-declarations" CGO_LDFLAGS_ALLOW='-Wl,--unresolved-symbols=ignore-in-object-files' \
	bin=$bin/dra build_all dra nvidia-dra $dra "-extldflags=-Wl,-z,lazy -X $dra/internal/info.version=VERSION" $dra/cmd/gpu-kubelet-plugin
CGO_ENABLED=1 CGO_CFLAGS="-g -O2 -Wno-deprecated-declarations" CGO_LDFLAGS_ALLOW='-Wl,--unresolved-symbols=ignore-in-object-files' \
	bin=$bin/dra build_all dra nvidia-toolkit $toolkit "-extldflags=-Wl,-z,lazy" $toolkit/cmd/nvidia-cdi-hook
ln -sfn "$(cd "$top/hack/dra" && go mod download $dra && go list -m -f '{{.Dir}}' $dra)" "$bin/dra/module"

for more in "$@"; do
	case $more in
	previous) ln -sfn "$("$top/hack/previous/build.sh")" "$bin/previous" ;;
	olm) ln -sfn "$("$top/hack/olm/build.sh" others)" "$bin/olm" ;;
	esac
done

cd "$top"
mkdir -p "$bin/driver"
# The container toolkit links libraries by the names that they carry.
CGO_ENABLED=1 go build -trimpath -ldflags "-s -w -extldflags=-Wl,-soname,libnvidia-ml.so.1" -buildmode=c-shared \
	-o "$bin/driver/libnvidia-ml.so.1" ./test/simdriver/libnvidia-ml
CGO_ENABLED=1 go build -trimpath -ldflags "-s -w -extldflags=-Wl,-soname,libnvidia-ml.so.1" -buildmode=c-shared -tags r615 \
	-o "$bin/driver/libnvidia-ml.so.615" ./test/simdriver/libnvidia-ml
for program in $(cd test/simdriver && ls -d nvidia-* nv-*); do
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/driver/$program" "./test/simdriver/$program"
done
# As the Dockerfile builds them.
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/controller" ./cmd/controller
CGO_ENABLED=1 go build -trimpath -tags grpcnotrace -ldflags "-s -w" -o "$bin/agent" ./cmd/agent
# The same, with what stands for cgroup v2 where a machine has neither dmem nor misc: for the specs of memory limits alone.
CGO_ENABLED=1 go build -trimpath -tags grpcnotrace,cgroupstand -ldflags "-s -w" -o "$bin/agent-cgroupstand" ./cmd/agent
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/kubectl-gpusharing" ./cmd/kubectl-gpusharing
# What publishes the operator, and the registry to which it does.
(cd hack/release && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/release" . && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/registry" ./registry)
(cd hack/bundle && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/bundle" .)
# Static: they run in images that hold nothing else.
for program in $(cd test/e2e/programs && ls); do
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$bin/$program" "./test/e2e/programs/$program"
done
CGO_ENABLED=0 go build -trimpath -o "$bin/machines" ./hack/e2e
# The tests themselves, so that no process of go test delays their end.
go test -c -o "$bin/e2e.test" ./test/e2e
echo "$bin"
