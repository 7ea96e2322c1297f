#!/usr/bin/env bash
# Installs packages of Debian with apt-get, as root.
#
#	hack/apt.sh PACKAGE…
set -euo pipefail

cache=${GPUSHARING_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpu-sharing-operator}
echo ">> installing $* with apt-get" >&2
# Two builds may run side by side, also of two checkouts, and others install packages too. Only the lock of dpkg has a timeout.
mkdir -p "$cache"
flock "$cache/.apt.lock" apt-get update -qq >&2
DEBIAN_FRONTEND=noninteractive flock "$cache/.apt.lock" \
	apt-get install -o DPkg::Lock::Timeout=300 -qq -y --no-install-recommends "$@" >&2
