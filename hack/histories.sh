#!/usr/bin/env bash
# Plays random histories in the cluster in miniature of internal/engine/rollout, on all cores: so many seeds from a first one, each where
# NVIDIA's device plugin serves all nodes and where NVIDIA's DRA driver serves most of them. Prints each seed that fails, with the
# command that plays it again. It can be ended at any time: the same call goes on where it was, as long as the code is the same.
#
#	hack/histories.sh 20000 1
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
many=$1 first=$2
chunk=250
driver=$((1 << 40)) # the first seed of histories on the DRA driver
program=bin/histories.test state=bin/histories.state

mkdir -p bin
go test -c -o "$program" ./internal/engine/rollout
program=$(realpath "$program") state=$(realpath "$state")
asked="$many $first $(sha256sum <"$program" | cut -d' ' -f1)"
next=$first failed=()
if [ -f "$state" ] && { read -r known; read -r at; } <"$state" && [ "$known" = "$asked" ]; then
	next=$at
	mapfile -t -s 2 failed <"$state"
	echo "histories: goes on with seed $next"
fi

# save keeps what was asked for, the next seed, and what failed so far, one a line.
save() {
	printf '%s\n' "$asked" "$next" "${failed[@]}" >"$state.new"
	mv "$state.new" "$state"
}

# play plays so many seeds from one, and adds to failed.
play() {
	local out line seed
	out=$(cd internal/engine/rollout && HISTORIES=$2 HISTORIES_FROM=$1 HISTORIES_BREAKS=$2 "$program" -test.run '^TestHistories$' -test.timeout 0) && return
	local found=0
	while IFS= read -r line; do
		[[ $line =~ ^\ +histories_test\.go:[0-9]+:\ ([0-9]+)\ ([a-z]+:.*)$ ]] || continue
		seed=${BASH_REMATCH[1]} found=1
		failed+=("HISTORY=$seed go test ./internal/engine/rollout -run '^TestHistories\$' -v # ${BASH_REMATCH[2]}")
		echo "${failed[-1]}"
	done <<<"$out"
	if [ "$found" = 0 ]; then
		printf '%s\n' "$out" >&2
		exit 1
	fi
}

last=$((first + many))
while [ "$next" -lt "$last" ]; do
	n=$((last - next < chunk ? last - next : chunk))
	play "$next" "$n"
	play $((driver + next)) "$n"
	next=$((next + n))
	save
	echo "histories: $((next - first)) of $many seeds, each on both stacks; ${#failed[@]} failures"
done
rm -f "$state"
[ "${#failed[@]}" = 0 ] || { printf '%s\n' "${failed[@]}"; exit 1; }
