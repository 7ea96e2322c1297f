#!/usr/bin/env bash
# Builds every program of others that tests run, each once per version, into the cache outside git, in the order in which
# .ci/run needs them. Each script locks, so a test that needs one of them meanwhile waits for it. Progress goes to stderr.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

kube/build.sh >/dev/null
helm/build.sh >/dev/null
helm3/build.sh >/dev/null
prometheus/build.sh promtool >/dev/null
karpenter/build.sh >/dev/null
kueue/build.sh >/dev/null
chromium/build.sh >/dev/null
e2e/build.sh previous >/dev/null
cosign/build.sh >/dev/null
olm/build.sh others >/dev/null
