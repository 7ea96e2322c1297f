#!/usr/bin/env bash
# Proves that `make e2e` leaves nothing behind, however and whenever it is ended: it is started again and again, ended at
# several moments in several ways, and what the machine holds afterwards is compared with what it held before.
#
#   hack/e2e/killed.sh [SECONDS…]     the moments, counted from the start; default: 3 12 30 60 100
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
moments=("${@:-}")
[ -n "${moments[0]}" ] || moments=(3 12 30 60 100)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/tmp"

# held lists what of this machine a node could leave behind. Its processes are in another PID namespace than this shell, or
# run programs of this checkout.
held() {
	local own process exe
	own=$(readlink /proc/self/ns/pid)
	for process in /proc/[0-9]*; do
		exe=$(readlink "$process/exe" 2>/dev/null) || continue
		if [ "$(readlink "$process/ns/pid" 2>/dev/null)" != "$own" ] || [[ $exe == "$PWD/bin/"* ]]; then
			[ -e "$process" ] && echo "process ${process#/proc/} $exe"
		fi
	done
	sed 's/^/mount /' /proc/self/mounts
	find /sys/class/net -mindepth 1 -printf 'network %f\n'
	find /sys/fs/cgroup -type d -printf 'control group %p\n'
	find /run /dev /etc /var/lib /var/log /opt -xdev \( -path /var/lib/apt -o -path /var/lib/dpkg -o -path /dev/pts \) -prune -o -printf 'file %p\n'
	find "$scratch/tmp" -mindepth 1 -printf 'file %p\n'
	git status --porcelain --ignored | grep -v ' bin/$' | sed 's/^/in the checkout /' || true
	{ readlink /proc/[0-9]*/ns/net 2>/dev/null || true; } | sort -u | sed 's/^/network namespace /'
}

# end ends what was started, in one of several ways: make with its children in a session of their own.
end() {
	local way=$1 leader=$2
	case $way in
	'SIGKILL to everything') kill -KILL -- "-$leader" ;;
	'SIGTERM to make') kill -TERM "$leader" ;;
	'Ctrl-C') kill -INT -- "-$leader" ;;
	'SIGKILL to make alone') kill -KILL "$leader" ;;
	'SIGTERM to everything') kill -TERM -- "-$leader" ;;
	esac
}

ways=('SIGKILL to everything' 'SIGTERM to make' 'Ctrl-C' 'SIGKILL to make alone' 'SIGTERM to everything')
hack/e2e/build.sh >/dev/null
held | sort >"$scratch/before"
failed=0
for i in "${!moments[@]}"; do
	moment=${moments[$i]} way=${ways[$((i % ${#ways[@]}))]}
	TMPDIR=$scratch/tmp setsid make e2e >"$scratch/log" 2>&1 </dev/null &
	leader=$!
	sleep "$moment"
	end "$way" "$leader" || echo "it had ended before $moment s"
	for _ in $(seq 120); do # what clears up has 30 s for it; a machine under load may need longer
		held | sort >"$scratch/after"
		cmp -s "$scratch/before" "$scratch/after" && break
		sleep 1
	done
	wait "$leader" 2>/dev/null || true
	if left=$(diff "$scratch/before" "$scratch/after"); then
		echo "nothing is left after $way at ${moment}s"
	else
		failed=1
		printf 'LEFT after %s at %ss:\n%s\nits last words:\n' "$way" "$moment" "$left"
		tail -5 "$scratch/log"
	fi
done
exit $failed
